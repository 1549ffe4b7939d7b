"""Optimizers whose state is not a tensor per parameter and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Trainer, TrainModule

ROWS = [(torch.full((3,), float(row)), torch.tensor([float(row)])) for row in range(8)]


class Mapped(torch.optim.SGD):
    """Keeps a mapping per parameter, and reads values, which is not possible on the meta device."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault("kept", {"mean": torch.zeros_like(parameter), "steps": 0})
            kept["mean"] = kept["mean"].lerp(parameter.grad, 0.5 / (1 + abs(parameter.detach().sum().item())))
            kept["steps"] += 1
            parameter.data.sub_(kept["mean"], alpha=1e-3 * kept["steps"])


class Named(torch.optim.SGD):
    """Keeps state under a name."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.state["steps"] = 0  # type: ignore[index]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] += 1  # type: ignore[index, operator]
        for group in self.param_groups:
            group["lr"] = 1e-3 / self.state["steps"]  # type: ignore[index]
        super().step()


class Regression(TrainModule):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = torch.nn.Linear(3, 1), kind

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        self.optimizer = self.kind(self.parameters(), lr=1e-3)
        return self.optimizer


class Saving(Regression):
    def on_save(self, state: dict[str, Any]) -> None:
        state["steps"] = self.optimizer.state["steps"]

    def on_load(self, state: dict[str, Any]) -> None:
        self.optimizer.state["steps"] = state["steps"]


@pytest.mark.parametrize(
    ("module", "kind", "named"), [(Regression, Mapped, False), (Regression, Named, True), (Saving, Named, False)]
)
def test_a_resumed_run_is_the_same_or_a_note_says_what_is_lost(
    module: Any, kind: Any, named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(run_dir: Path, steps: int) -> torch.Tensor:
        made = module(kind)
        Trainer(max_steps=steps, run_dir=run_dir, seed=1, progress=False).fit(made, ROWS, batch_size=2)
        return torch.cat([made.layer.weight.detach().flatten(), made.layer.bias.detach()])

    whole = fit(tmp_path / "whole", 6)
    fit(tmp_path / "resumed", 3)
    assert torch.equal(whole, fit(tmp_path / "resumed", 6)) is not named
    assert ("note: Named.state['steps'] changed since the fit began" in capsys.readouterr().err) is named
