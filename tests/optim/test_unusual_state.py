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


def test_tensors_in_the_options_of_several_groups_are_resumed(tmp_path: Path) -> None:
    class Rates(Regression):
        def configure_optimizers(self) -> Any:
            weight, bias = (
                {"params": [p], "lr": torch.tensor(lr)} for p, lr in zip(self.parameters(), (0.01, 0.02), strict=True)
            )
            optimizer = torch.optim.AdamW([weight, bias])
            return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def fit(run_dir: Path, steps: int) -> list[float]:
        made = Rates(None)
        Trainer(max_steps=steps, run_dir=run_dir, seed=1, progress=False).fit(made, ROWS, batch_size=2)
        return [float(value) for p in made.parameters() for value in p.detach().flatten()]

    whole = fit(tmp_path / "whole", 6)
    fit(tmp_path / "resumed", 3)
    assert fit(tmp_path / "resumed", 6) == whole


class Rotates(torch.optim.Optimizer):
    """Keeps matrices by columns, as those that preconditioned optimizers (SOAP, Shampoo) get from torch.linalg: in a list, in the shape of
    the parameter, and in another shape. Their products are rounded differently by rows."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad
            if not state:
                noise = torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(1))
                square, wide = torch.linalg.qr(noise)[0].mT.contiguous().mT, noise[0, :12].mT.contiguous().mT
                state.update(bases=[square[0], {"second": square[1]}], own=square[2], wide=wide)
            turned = state["bases"][0].T @ gradient @ state["bases"][1]["second"] @ state["own"]
            state["own"] = state["own"] + 1e-3 * turned  # keeps the order in memory
            state["wide"].mul_(0.9)
            parameter.data.sub_(turned @ (state["wide"].T @ state["wide"]), alpha=1e-3)


class Square(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(24, 24, bias=False)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = (self.layer(batch) - batch.sin()).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        self.optimizer = Rotates(self.parameters(), lr=1e-3)
        return self.optimizer


def test_state_comes_back_in_its_order_in_memory(tmp_path: Path) -> None:
    def fit(run_dir: Path, steps: int) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        module = Square()
        rows = torch.randn(8, 24, generator=torch.Generator().manual_seed(2))
        Trainer(max_steps=steps, run_dir=run_dir, seed=1, progress=False).fit(module, rows, batch_size=2)
        (state,) = module.optimizer.state.values()
        matrices = [state["bases"][0], state["bases"][1]["second"], state["own"], state["wide"]]
        return module.layer.weight.detach(), [matrix.stride() for matrix in matrices]

    whole, strides = fit(tmp_path / "whole", 8)
    assert strides == [(1, 24), (1, 24), (1, 24), (1, 12)]
    fit(tmp_path / "resumed", 3)
    resumed, again = fit(tmp_path / "resumed", 8)
    assert again == strides
    assert torch.equal(resumed, whole)
