"""The GPT that the GPU campaign trains, by hand and by fabricate, on the same tokens with the same optimizer.

The model is defined here, so that figures do not change with versions of transformers. Both loops compile the same blocks with the same
options and start from the same weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from campaigns.gpu.measuring import Host, Window
from fabricate import Callback, Trainer, TrainModule


class Block(torch.nn.Module):
    """Causal attention and a layer of four times the width, each added to its input. (rows, length, width) -> the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.size, self.dropout = width // heads, dropout
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The head is the first dimension, so that a rank of tensor parallelism has whole heads.
        heads = self.qkv(self.norm1(x)).unflatten(2, (-1, 3, self.size)).transpose(1, 3)
        query, key, value = heads.unbind(1)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(torch.nn.Module):
    """(rows, length) tokens -> (rows, length, vocabulary) logits; the head has the embedding's weight."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(size.vocabulary, size.width)
        self.positions = torch.nn.Embedding(size.length, size.width)
        self.blocks = torch.nn.ModuleList([Block(size.width, size.heads, size.dropout) for _ in range(size.layers)])
        self.norm = torch.nn.LayerNorm(size.width)
        for layer in self.modules():
            if isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
                torch.nn.init.normal_(layer.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT, and the rows of a micro-batch."""

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    rows: int
    dropout: float = 0.0

    def build(self, place: torch.device) -> torch.nn.Module:
        """A new model, with the same weights every time on the same kind of device. A large model is initialised on the device, which saves
        seconds."""
        torch.manual_seed(0)
        with place:
            return GPT(self)

    def data(self, micro_batches: int, rows: int | None = None) -> TensorDataset:
        """Tokens, (rows, length + 1), int64: each is a function of the previous token, except one in eight, which is random. rows: the
        total number."""
        generator = torch.Generator().manual_seed(1)
        shape = (rows or micro_batches * self.rows, self.length + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        random = torch.rand(shape, generator=generator) < 0.125
        for at in range(1, shape[1]):
            tokens[:, at] = torch.where(random[:, at], tokens[:, at], (3 * tokens[:, at - 1] + 1) % self.vocabulary)
        return TensorDataset(tokens)

    def parameters(self) -> int:
        """The number of parameters, without the small ones: positions and normalisations."""
        return self.layers * 12 * self.width**2 + self.vocabulary * self.width

    def flops(self) -> float:
        """The operations of one micro-batch: 6 per token and weight (position embeddings are looked up, not multiplied) and 12 per token,
        layer, position and width for attention, recomputation not counted (PaLM, arXiv:2204.02311, appendix B)."""
        each = 6 * self.parameters() + 12 * self.layers * self.length * self.width
        return float(each * self.rows * self.length)


SIZES = {
    "tiny": Size(layers=2, width=64, heads=4, length=32, vocabulary=128, rows=8),
    # the host, not the GPU, limits its speed
    "short": Size(layers=4, width=256, heads=4, length=256, vocabulary=8192, rows=8),
    "124M": Size(layers=12, width=768, heads=12, length=1024, vocabulary=50304, rows=16),
    "350M": Size(layers=24, width=1024, heads=16, length=1024, vocabulary=50304, rows=16),
    "1.3B": Size(layers=24, width=2048, heads=16, length=2048, vocabulary=50304, rows=8),
    "3B": Size(layers=30, width=2816, heads=22, length=1024, vocabulary=50304, rows=8),
}
"""The sizes by name. 50304 is GPT-2's 50257, rounded up to a multiple of 128."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training, the same for every loop. compile: options of torch.compile for each block. rows: the total number, to make the last batch
    shorter. fused: use AdamW's single kernel. read_every: updates after which the loop by hand reads the loss, as for a log."""

    size: Size
    updates: int
    precision: str = "bf16"
    accumulation: int = 1
    clip: float | None = None
    compile: Mapping[str, Any] | None = None
    rows: int | None = None
    lr: float = 3e-4
    fused: bool = True
    read_every: int | None = None

    @property
    def kind(self) -> str:
        """The precision without its options."""
        return self.precision.partition(":")[0]

    def scaler(self, place: torch.device) -> torch.amp.GradScaler:
        """The scaler of the loop by hand: enabled for fp16, with the precision's option init_scale."""
        scale = float(self.precision.partition("init_scale=")[2] or 65536)
        return torch.amp.GradScaler(place.type, init_scale=scale, enabled=self.kind == "fp16")

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """AdamW; in pure bf16 one that compensates rounding."""
        if self.precision == "bf16-true":
            from optimi import AdamW

            return AdamW(parameters, lr=self.lr, weight_decay=0.1, kahan_sum=True)
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.1, eps=1e-6, fused=self.fused)

    def data(self) -> TensorDataset:
        """The data of all updates."""
        return self.size.data(self.updates * self.accumulation, self.rows)

    def loader(self, device: Host) -> DataLoader[Any]:
        """A loader without shuffling, from pinned memory."""
        return DataLoader(self.data(), batch_size=self.size.rows, pin_memory=device.real)


@dataclasses.dataclass
class Trained:
    """losses: of each update, if they were recorded. weights: a sample of each tensor, as one float32 vector on the CPU."""

    losses: list[float]
    weights: torch.Tensor


def options_of(name: str) -> tuple[str, dict[str, Any]]:
    """ "fp8:recipe=rowwise,emulate=true" as ("fp8", {"recipe": "rowwise", "emulate": True})."""
    kind, _, options = name.partition(":")
    values = dict(option.split("=") for option in options.split(",") if option)
    return kind, {key: {"true": True, "false": False}.get(value, value) for key, value in values.items()}


def strategy_of(name: str) -> Any:
    """The strategy's name; for a strategy of a plugin, which need not be installed, an object."""
    kind, options = options_of(name)
    if kind.startswith("zero"):
        from fabricate_deepspeed import stage3, stage12

        return {"zero1": stage12.ZeRO1, "zero2": stage12.ZeRO2, "zero3": stage3.ZeRO3}[kind](**options)
    if kind == "diloco":
        from fabricate_diloco.strategy import DiLoCo

        return DiLoCo(**options)
    return name


def precision_of(name: str) -> Any:
    """The precision's name; for a precision of a plugin an object."""
    kind, options = options_of(name)
    if kind == "fp8":
        from fabricate_fp8.precision import FP8

        return FP8(**options)
    return name


def to_float8(model: torch.nn.Module, precision: str) -> None:
    """Convert the blocks' linear layers by torchao, as fabricate's fp8 does."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    _, options = options_of(precision)
    config = Float8LinearConfig.from_recipe_name(options.get("recipe", "tensorwise"))
    convert_to_float8_training(model, config=dataclasses.replace(config, emulate=options.get("emulate", False)))


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of the next token. tokens: (rows, length + 1)."""
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def vector(model: torch.nn.Module) -> torch.Tensor:
    """A sample of about 65536 numbers of each weight of an unsharded model; a copy of all would take seconds."""
    flat = (p.detach().flatten() for p in model.parameters())
    return torch.cat([each[:: max(1, len(each) // 65536)].float().cpu() for each in flat])


def compile_blocks(model: Any, options: Mapping[str, Any] | None) -> None:
    """Compile each block, as fabricate's compile= does."""
    blocks = model.blocks if isinstance(model, GPT) else ()
    for block in blocks if options is not None else ():
        block.compile(**options)


def by_hand(recipe: Recipe, device: Host, window: Window | None = None) -> Trained:
    """Train with a typical hand-written loop for one device; it reads no loss before the end."""
    place, half = device.device, dict.fromkeys(("bf16", "bf16-true", "fp8"), torch.bfloat16) | {"fp16": torch.float16}
    dtype = half.get(recipe.kind)
    model = recipe.size.build(place).to(torch.bfloat16 if recipe.precision == "bf16-true" else torch.float32)
    if recipe.kind == "fp8":
        to_float8(model, recipe.precision)
    compile_blocks(model, recipe.compile)
    optimizer, parameters = recipe.optimizer(model.parameters()), list(model.parameters())
    scaler = recipe.scaler(place)
    losses: list[torch.Tensor] = []
    model.train()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = recipe.precision == "fp32:tf32=true"
    for number, (batch,) in enumerate(recipe.loader(device), 1):
        tokens = batch.to(place, non_blocking=True)
        with torch.autocast(place.type, dtype) if dtype is not None else contextlib.nullcontext():
            loss = loss_of(model, tokens) / recipe.accumulation
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        if number % recipe.accumulation == 0:
            if recipe.clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            update = number // recipe.accumulation
            if window is not None:
                window.updated(update)
            if recipe.read_every is not None and update % recipe.read_every == 0:
                loss.item()
    torch.backends.cuda.matmul.allow_tf32 = before
    each = torch.stack(losses).view(-1, recipe.accumulation).sum(1).tolist()
    return Trained(each, vector(model))


class Module(TrainModule):
    """The same model as a TrainModule, built on `place`. window: called after each update."""

    def __init__(self, recipe: Recipe, place: torch.device, window: Window | None = None) -> None:
        super().__init__()
        self.recipe, self._window = recipe, window
        self.gpt = recipe.size.build(place)
        self.tp_plan = {"gpt.blocks.*.qkv": "colwise", "gpt.blocks.*.out": "rowwise"}
        self.tp_plan |= {"gpt.blocks.*.up": "colwise", "gpt.blocks.*.down": "rowwise"}

    def training_step(self, batch: Any) -> torch.Tensor:
        return loss_of(self.gpt, batch[0])

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": loss_of(self.gpt, batch[0])}

    def predict_step(self, batch: Any) -> torch.Tensor:
        return self.gpt(batch[0][:, :-1])[:, -1].argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.recipe.optimizer(self.parameters())

    def on_step(self, step: int) -> None:
        if self._window is not None:
            self._window.updated(step)


class Losses(Callback):
    """Every update's loss, read at the end."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def on_step(self, loss: torch.Tensor) -> None:
        self._kept.append(loss.detach())

    def read(self) -> list[float]:
        """The recorded losses; waits for the device."""
        return torch.stack(self._kept).tolist() if self._kept else []


class Stamps(Callback):
    """The times, in seconds, at which updates were complete; waits for each."""

    def __init__(self, device: Host) -> None:
        self._device = device
        self.at: list[float] = []

    def on_step(self) -> None:
        self._device.synchronize()
        self.at.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The seconds from each update to the next."""
        return [after - before for before, after in itertools.pairwise(self.at)]


def trainer(recipe: Recipe, **arguments: Any) -> Trainer:
    """A Trainer without output for a recipe; `arguments` take precedence."""
    quiet: dict[str, Any] = {
        "strategy": "single",
        "precision": precision_of(recipe.precision),
        "log_every": 10**9,
        "progress": False,
    }
    quiet |= {
        "gradient_accumulation_steps": recipe.accumulation,
        "max_grad_norm": recipe.clip,
        "max_steps": recipe.updates,
    }
    quiet |= {"compile": dict(recipe.compile) if recipe.compile is not None else False, "seed": 0}
    return Trainer(**quiet | arguments)


def fabricated(
    recipe: Recipe, device: Host, window: Window | None = None, losses: bool = False, **arguments: Any
) -> Trained:
    """Train the recipe with fabricate. losses: record them, for which fabricate computes one for a hook in every update."""
    recorder, module = Losses(), Module(recipe, device.device, window)
    plugins = [*arguments.pop("plugins", ()), *([recorder] if losses else [])]
    with contextlib.redirect_stdout(io.StringIO()):  # the printed plan
        trainer(recipe, plugins=plugins, **arguments).fit(module, recipe.loader(device))
    return Trained(recorder.read(), vector(module.gpt))


Loop = Callable[[Recipe, Host, Window | None], Trained]


def clean(device: Host) -> None:
    """Discard compiled code and cached memory between two trainings."""
    gc.collect()
    torch._dynamo.reset()
    device.forget()


def apart(one: torch.Tensor, other: torch.Tensor, untrained: torch.Tensor) -> float:
    """The distance of two models' weights, relative to the distance of the second from the untrained weights."""
    return float((one - other).norm() / (other - untrained).norm())


def differ(one: list[float], other: list[float]) -> float:
    """The largest relative difference of two lists of losses of the same length."""
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(one, other, strict=True))
