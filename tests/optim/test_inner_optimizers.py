"""Optimizers inside other optimizers: what the estimate of memory does to them, and what a checkpoint holds of them."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fabricate import Trainer, TrainModule
from fabricate.seeding import rng_state, set_rng_state

ROWS = [(torch.full((3,), float(row)), torch.tensor([float(row)])) for row in range(8)]


class Regression(TrainModule):
    """With the optimizer that `wrap` makes of one with momentum."""

    def __init__(self, wrap: Any, momentum: float = 0.9) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.wrap, self.momentum = wrap, momentum

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        self.optimizer = self.wrap(torch.optim.SGD(self.parameters(), lr=1e-3, momentum=self.momentum))
        return self.optimizer


class Drawing(torch.optim.SGD):
    """Counts its steps and draws from every generator in them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        torch.rand(1), np.random.rand(), random.random()
        super().step()


class Holding(torch.optim.Optimizer):
    """Holds an optimizer, an iterator, a generator, and a list of its parameters, and changes all of them in a step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.inners = [Drawing(self.param_groups[0]["params"], lr=0.1)]
        torch.optim.lr_scheduler.StepLR(self.inners[0], 1)  # sets `step` on the object
        self.factors, self.own = iter(range(100)), random.Random(1)
        self.weights = list(self.param_groups[0]["params"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inners[0].step()
        next(self.factors), self.own.random()
        for weight in self.weights:
            weight.data.add_(1)


def test_the_estimate_of_memory_changes_nothing_that_an_optimizer_holds() -> None:
    class Looked(Regression):
        def on_fit_start(self) -> None:
            optimizer = self.optimizer
            self.found = optimizer.inners[0].steps, next(optimizer.factors), optimizer.own.random()
            self.weight = self.layer.weight.detach().clone()

    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    module = Looked(Holding)
    weight = module.layer.weight.detach().clone()
    before = rng_state()
    expected = draw()
    set_rng_state(before)
    plan = Trainer(max_steps=1).plan(module, ROWS, batch_size=2)
    assert "state of Holding" in plan.source("memory_per_rank")
    assert draw() == expected
    Trainer(max_steps=1, progress=False).fit(module, ROWS, batch_size=2)
    assert module.found == (0, 0, random.Random(1).random())
    assert torch.equal(module.weight, weight)


class Keeping(torch.optim.Optimizer):
    """Lookahead over an optimizer with a state of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 1e-3})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))


class Listing(Keeping):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.inners = {"only": (inner,)}


class OwnState(Keeping):
    """The groups are those of the inner optimizer, but not the state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, defaultdict(dict)


class Sharing(Keeping):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.param_groups, self.state = inner.param_groups, inner.state


class SavedByHand(Regression):
    def on_save(self, state: dict[str, Any]) -> None:
        state["inner"] = self.optimizer.inner.state_dict()

    def on_load(self, state: dict[str, Any]) -> None:
        self.optimizer.inner.load_state_dict(state["inner"])


@pytest.mark.parametrize(
    ("module", "wrap", "momentum", "named"),
    [
        (Regression, Keeping, 0.9, "Keeping.inner.state"),
        (Regression, OwnState, 0.9, "OwnState.inner.state"),
        (Regression, Keeping, 0.0, ""),
        (Regression, Sharing, 0.9, ""),
        (SavedByHand, Keeping, 0.9, ""),
        (SavedByHand, Listing, 0.9, ""),
    ],
)
def test_a_state_inside_that_a_resume_loses_is_named_and_no_other(
    module: Any, wrap: Any, momentum: float, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(run_dir: Path, steps: int) -> torch.Tensor:
        made = module(wrap, momentum)
        Trainer(max_steps=steps, run_dir=run_dir, seed=1, progress=False).fit(made, ROWS, batch_size=2)
        return torch.cat([made.layer.weight.detach().flatten(), made.layer.bias.detach()])

    whole = fit(tmp_path / "whole", 6)
    fit(tmp_path / "resumed", 3)
    assert torch.equal(whole, fit(tmp_path / "resumed", 6)) is not bool(named)
    notes = [line for line in capsys.readouterr().err.splitlines() if "changed since the fit began" in line]
    assert all(note.startswith(f"note: {named} changed") for note in notes)
    assert bool(notes) is bool(named)
