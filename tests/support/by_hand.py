"""A small module whose rows have unequal weights, fits of it, and the same by hand in plain PyTorch: the reference for ZeRO."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import torch

from fabricate import Callback, Trainer, TrainModule
from fabricate.testing import run_ranks

WIDTH, BATCH, STEPS = 8, 12, 5
TOLERANCE = 1e-5
ROWS = torch.randn(2 * BATCH + 5, WIDTH, generator=torch.Generator().manual_seed(1))


class Net(TrainModule):
    """Layers, a normalisation, a parameter of the module itself and a frozen one; `counts` are the weights of the rows."""

    windows = 0
    """Updates so far, if a plugin counts them."""

    def __init__(self, kind: str = "adamw") -> None:
        super().__init__()
        self.kind = kind
        self.first = torch.nn.Linear(WIDTH, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.second = torch.nn.Linear(7, 3)
        self.gain = torch.nn.Parameter(torch.ones(3))
        self.fixed = torch.nn.Parameter(torch.full((3,), 0.5), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.norm(torch.tanh(self.first(rows)))) * self.gain + self.fixed
        return out

    def loss(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts = 1 + (rows[:, 0] > 0).float() * 2
        errors = (self(rows) - rows[:, :3]).square().mean(1)
        return (errors * counts).sum() / counts.sum(), counts.sum()

    def training_step(self, batch: torch.Tensor) -> dict[str, Any]:
        loss, weight = self.loss(batch)
        return {"loss": loss, "weight": weight}

    def validation_step(self, batch: torch.Tensor) -> dict[str, Any]:
        loss, weight = self.loss(batch)
        return {"loss": loss, "weight": weight}

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim == 1 and p.requires_grad]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(groups, lr=1e-2)


class Recorder(Callback):
    """Records losses, norms, skipped updates, and the whole weights at the end of a fit."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}

    def on_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        self.losses.append(float(loss))
        self.norms.append(float(grad_norm))

    def on_step_skipped(self, reason: str) -> None:
        self.skipped.append(reason)

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.weights = {n: trainer.strategy.gather(p).clone() for n, p in module.named_parameters()}


class Counting(Callback):
    """Sets the number of updates in the module."""

    def on_step(self, module: TrainModule) -> None:
        module.windows += 1


class Sometimes(Net):
    """A net with a layer that is used in every other window only; `Counting` counts the windows."""

    def __init__(self, kind: str = "adamw") -> None:
        super().__init__(kind)
        self.extra = torch.nn.Linear(3, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = super().forward(rows)
        return self.extra(out) if self.windows % 2 == 0 else out


class Late(Sometimes):
    """The same, with the layer in the last windows."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = Net.forward(self, rows)
        return self.extra(out) if self.windows >= 2 else out


def seeded(net: type[Net] = Net, kind: str = "adamw") -> Net:
    """A new `net`, with the same weights every time."""
    torch.manual_seed(0)
    return net(kind)


def fit(strategy: str, kind: str = "adamw", steps: int = STEPS, net: type[Net] = Net, **arguments: Any) -> Recorder:
    """Fit windows of `BATCH` rows in two micro-batches over all ranks, with clipping. All ranks, with the launcher's variables."""
    module, recorder = seeded(net, kind), Recorder()
    resume = arguments.pop("resume", "never")
    options: dict[str, Any] = {"precision": "fp32", "max_grad_norm": 0.3, "gradient_accumulation_steps": 2, "seed": 3}
    options |= arguments
    plugins = [*options.pop("plugins", ()), recorder]
    size = BATCH // int(os.environ["WORLD_SIZE"]) // (options["gradient_accumulation_steps"] or 2)
    trainer = Trainer(strategy=strategy, max_steps=steps, progress=False, plugins=plugins, **options)
    trainer.fit(module, ROWS, batch_size=size, shuffle=False, resume=resume)
    return recorder


def by_hand(kind: str = "adamw", steps: int = STEPS, net: type[Net] = Net) -> Recorder:
    """Train whole windows in one process, without fabricate."""
    module, recorder = seeded(net, kind), Recorder()
    environment = dict(os.environ)
    optimizer = module.configure_optimizers()
    os.environ.clear()  # torch sets variables of its compiler when a process builds its first optimizer
    os.environ.update(environment)
    windows = [ROWS[start : start + BATCH] for start in range(0, len(ROWS), BATCH)]
    for step in range(steps):
        loss, _ = module.loss(windows[step % len(windows)])
        loss.backward()
        for parameter in module.parameters():  # ZeRO's flat slices are updated in every step
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        optimizer.step()
        module.zero_grad()
        module.windows += 1
        recorder.losses.append(loss.item())
        recorder.norms.append(norm.item())
    recorder.weights = {n: p.detach() for n, p in module.named_parameters()}
    return recorder


def fits(strategy: str) -> list[Recorder]:
    """A fit with each of the two optimizers."""
    return [fit(strategy, kind) for kind in ("adamw", "sgd")]


def assert_as_by_hand(strategy: str, world_size: int) -> None:
    """Assert that every rank has the losses, norms and weights of a loop by hand, with both optimizers."""
    hand = [by_hand("adamw"), by_hand("sgd")]
    for rank in run_ranks(fits, world_size, strategy, timeout=120):
        assert [difference(recorder, wanted) < TOLERANCE for recorder, wanted in zip(rank, hand, strict=True)] == [
            True,
            True,
        ]


def _fit_heard(strategy: str) -> tuple[Recorder, str]:
    """A fit of which some windows leave a layer out, and what it printed to stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        recorder = fit(strategy, net=Sometimes, plugins=[Counting()])
    return recorder, printed.getvalue()


def assert_idle_layers_as_by_hand(strategy: str) -> None:
    """Assert the same on two ranks if some windows leave a layer out, which then has a gradient of zero, and that one note names it."""
    (recorder, printed), (_, of_rank_1) = run_ranks(_fit_heard, 2, strategy, timeout=120)
    assert difference(recorder, by_hand(net=Sometimes)) < TOLERANCE
    assert printed.count("had no gradient in this update") == 1
    assert "note: extra.weight, extra.bias had no" in printed
    assert "note: extra" not in of_rank_1


def difference(one: Recorder, other: Recorder) -> float:
    """The largest difference of losses, norms and weights, relative to the largest value of each kind."""
    pairs = [
        (torch.tensor(one.losses), torch.tensor(other.losses)),
        (torch.tensor(one.norms), torch.tensor(other.norms)),
    ]
    pairs += [(one.weights[name], value) for name, value in other.weights.items()]
    assert one.weights.keys() == other.weights.keys()
    return max(float((a.float() - b.float()).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)
