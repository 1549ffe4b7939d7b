"""Whole fits on a device with the rules of a GPU, as rank 0 of eight; see `tests.support.pretended_device`.

A fit here covers everything between a batch on the host and a checkpoint: it fails if an operation mixes tensors of the host and the
device.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torchmetrics
from fabricate_deepspeed.loss_scale import LossScale
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fabricate import Callback, Trainer, TrainModule, hookimpl
from fabricate.checkpoint.state.staging import DeviceStaging
from fabricate.model.export import export_model
from fabricate.testing.ranks import run_alone
from fabricate.training.saves import saving
from tests.support import pretended_device
from tests.support.pretended_device import Rules, open_device, open_group, trained_on_the_device

RANKS, ROWS, TOKENS, WORDS, WIDTH = 8, 64, 5, 16, 8
HALF = ("bf16", "fp16")
FITS = {
    "single": ("fp32", *HALF),
    "ddp": ("fp32", *HALF),
    "fsdp": ("fp32", *HALF),
    "fsdp:offload=cpu": ("fp32", *HALF),
    "fsdp:shard=4": ("fp32", *HALF),
    "fsdp:shard=4,offload=cpu": ("bf16",),
    "fsdp:accumulate=whole,activation_checkpointing=true": ("bf16",),
    "fsdp:tp=2": ("fp32", "bf16"),
}
ON_THE_HOST = ("fsdp:offload=cpu", "fsdp:shard=4,offload=cpu")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.down(torch.relu(self.up(x))))


class Blocks(torch.nn.Module):
    tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Net(TrainModule):
    """A language model whose rows have unequal numbers of labels, a buffer, and a torchmetrics object."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = torchmetrics.SumMetric()

    def configure_model(self) -> None:
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.inner = Blocks()
        self.head = torch.nn.Linear(WIDTH, WORDS)
        self.register_buffer("seen", torch.zeros(()))

    def init_weights(self, submodule: torch.nn.Module) -> None:
        if submodule is self:
            self.seen.zero_()
        elif hasattr(submodule, "reset_parameters"):
            submodule.reset_parameters()

    def loss(self, batch: Any) -> torch.Tensor:
        x, labels = batch
        return cross_entropy(self.head(self.inner(self.words(x))).flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen += 1
        loss = self.loss(batch)
        self.log("half", loss.detach() / 2)
        return loss

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        self.shown.update((batch[1] >= 0).sum())
        self.log("shown", self.shown)
        return {"loss": self.loss(batch)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)


class Watch(Callback):
    """Counts the times that the second update waited for the device; hears everything that costs something."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.counts: list[int] = []
        self.steps = 0

    def on_before_step(self, grad_norm: torch.Tensor) -> None:
        assert grad_norm.device == pretended_device.DEVICE

    def on_step(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        assert loss.device == grad_norm.device == pretended_device.DEVICE
        self.counts.append(len(self.rules.waits))
        self.steps = step


class Copies(Callback):
    """Copies what a checkpoint would hold instead of writing it: each of the alike ranks would write the same file."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.chunks = 0
        self.exported = (0, 0)
        """Tensors of an export on a rank that does not write it, and the waits for the device meanwhile."""

    @hookimpl
    def write_checkpoint(self, trainer: Trainer, path: Path) -> bool:
        module = trainer._live().module
        before = len(self.rules.waits)
        export_model(module, trainer.strategy, path, main=False)
        self.exported = (len(module.state_dict()), len(self.rules.waits) - before)
        staging = DeviceStaging(pretended_device.DEVICE)
        chunks, ready = staging.copy(saving._assemble(trainer._live(), path).chunks)
        ready()
        self.chunks += len(chunks)
        return True


def rows(number: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (2, number, TOKENS), generator=generator)
    labels = torch.where(torch.arange(TOKENS) <= torch.arange(number)[:, None] % TOKENS, tokens[1], -100)
    return TensorDataset(tokens[0], labels)


def fit(strategy: str, precision: str, world_size: int, run_dir: Path) -> dict[str, Any]:
    """Two updates with accumulation, clipping, validation, logging and a save."""
    with trained_on_the_device(world_size) as rules, pytest.MonkeyPatch.context() as patch:
        if world_size > 1:  # `Copies` leaves no file that a save could look at
            patch.setattr(saving, "_check_written", lambda run, path: None)
        watch, copies = Watch(rules), Copies(rules)
        trainer = Trainer(
            strategy=strategy,
            precision=precision,
            plugins=[watch, copies] if world_size > 1 else [watch],
            max_steps=2,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            seed=1,
            run_dir=run_dir,
            save_every="2 steps",
            save="async",
            log_every="2 steps",
            validate_every="2 steps",
            progress=False,
        )
        trainer.fit(Net(), rows(ROWS), rows(2 * world_size), batch_size=2)
    begin, end = watch.counts[:2]
    waits = rules.waits[begin:end]
    return {"steps": watch.steps, "waits": waits, "chunks": copies.chunks, "exported": copies.exported}


def fits(root: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Every fit, in a process that nothing else uses. An error is the text of its traceback."""
    open_device()
    answers: dict[tuple[str, str], dict[str, Any]] = {}

    def attempt(key: tuple[str, str], world_size: int) -> None:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        if world_size > 1:
            every = str(world_size)
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=every, LOCAL_WORLD_SIZE=every)
            os.environ.update(
                MASTER_ADDR="localhost", MASTER_PORT="29500"
            )  # nothing is opened there: the group is open
        try:
            answers[key] = fit(key[0].removesuffix(NO_HOST), key[1], world_size, root / str(len(answers)))
        except Exception:
            answers[key] = {"error": traceback.format_exc()}

    try:
        answers["zero", "host"] = {"gradients": scaled_on_the_host()}
    except Exception:
        answers["zero", "host"] = {"error": traceback.format_exc()}
    for kind in (Net, NetWithNested):
        try:
            answers["resumed", kind.__name__] = {"apart": resumed(kind, root / kind.__name__)}
        except Exception:
            answers["resumed", kind.__name__] = {"error": traceback.format_exc()}
    for precision in FITS["single"]:
        attempt(("single", precision), 1)
    with open_group(RANKS, host_backend=False):
        attempt(("ddp" + NO_HOST, "bf16"), RANKS)
    with open_group(RANKS):
        for strategy in list(FITS)[1:]:
            for precision in FITS[strategy]:
                attempt((strategy, precision), RANKS)
    return answers


class Nested(torch.optim.SGD):
    """Keeps tensors in a list and in a mapping for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                zero = torch.zeros_like(parameter)
                state.update(step=torch.tensor(0.0), list=[zero, None], mapping={"mean": zero.clone()})
            state["step"] += 1
            state["list"][0].lerp_(parameter.grad, 0.1)
            state["mapping"]["mean"].lerp_(state["list"][0], 0.1)
            parameter.sub_(state["mapping"]["mean"])


class NetWithNested(Net):
    def configure_optimizers(self) -> Any:
        return Nested(self.parameters(), lr=1e-2)


def resumed(kind: type[Net], root: Path) -> float:
    """The largest difference of weights between a fit of four updates and one that was resumed after two."""

    def weights(steps: int, run_dir: Path) -> list[torch.Tensor]:
        with trained_on_the_device(1):
            module = kind()
            trainer = Trainer(max_steps=steps, seed=1, run_dir=run_dir, save_every="2 steps", progress=False)
            trainer.fit(module, rows(8), batch_size=2)
            return [parameter.detach().cpu() for parameter in module.parameters()]

    whole = weights(4, root / "whole")
    weights(2, root / "parts")
    parts = weights(4, root / "parts")
    return max(float((one - other).abs().max()) for one, other in zip(whole, parts, strict=True))


def scaled_on_the_host() -> dict[int, list[float]]:
    """By stage of ZeRO with an offloaded optimizer, its gradients after an update whose weights sum up to two, clipped to 1."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    answers = {}
    with Rules():
        for stage, kind in ((2, DeepSpeedZeroOptimizer), (3, DeepSpeedZeroOptimizer_Stage3)):
            master = torch.zeros(3, requires_grad=True)
            master.grad = torch.full((3,), 4.0)
            zero = object.__new__(kind)  # without the groups that its constructor makes
            vars(zero).update(
                device="cpu",
                clip_grad=1.0,
                loss_scaler=SimpleNamespace(cur_scale=1.0),
                fp32_partitioned_groups_flat=[master],
            )
            scale = LossScale(zero)
            scale.scale_gradients(torch.full((), 0.5, device=pretended_device.DEVICE))
            first: Any = [master.grad] if stage == 2 else 0
            zero.unscale_and_clip_grads(first, torch.tensor(8.0))
            answers[stage] = master.grad.tolist()
    return answers


NO_HOST = " over a group of the device alone"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    return run_alone(fits, tmp_path_factory.mktemp("fits"), timeout=400)


def trained(answers: dict[tuple[str, str], dict[str, Any]], strategy: str, precision: str) -> dict[str, Any]:
    answer = answers[strategy, precision]
    if "error" in answer:
        pytest.fail(answer["error"], pytrace=False)
    return answer


@pytest.mark.parametrize(("strategy", "precision"), [(s, p) for s, precisions in FITS.items() for p in precisions])
def test_a_fit_keeps_to_the_rules_of_a_device(results: Any, strategy: str, precision: str) -> None:
    answer = trained(results, strategy, precision)
    assert answer["steps"] == 2
    assert answer["chunks"] > 0 or strategy == "single"


@pytest.mark.parametrize("strategy", [s for s in FITS if s.startswith("fsdp") and "tp" not in s])
def test_a_rank_that_gathers_for_an_export_is_one_tensor_ahead_at_most(results: Any, strategy: str) -> None:
    tensors, waits = trained(results, strategy, "bf16")["exported"]
    assert waits == tensors > 0


def test_replicas_need_no_backend_for_tensors_of_the_host(results: Any) -> None:
    assert trained(results, "ddp" + NO_HOST, "bf16")["steps"] == 2


def test_zero_scales_offloaded_gradients_on_the_host(results: Any) -> None:
    assert trained(results, "zero", "host")["gradients"] == {2: [pytest.approx(0.5)] * 3, 3: [pytest.approx(0.5)] * 3}


@pytest.mark.parametrize("kind", [Net, NetWithNested])
def test_a_resumed_fit_on_a_device_has_the_state_of_its_optimizer_there(results: Any, kind: type[Net]) -> None:
    assert trained(results, "resumed", kind.__name__)["apart"] == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", [s for s in FITS if s not in ON_THE_HOST])
def test_an_update_does_not_wait_for_the_device(results: Any, strategy: str, precision: str) -> None:
    if precision in FITS[strategy]:
        assert trained(results, strategy, precision)["waits"] == []
