"""Parameter groups that a hook adds during a fit, and optimizers that mean other weights than those they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, CheckpointError, ConfigurationError, FitResult, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.state.logical import read_whole
from tests.support.hearing import ROWS, Regression


def fit(module: TrainModule, steps: int = 2, **options: Any) -> FitResult:
    trainer = Trainer(max_steps=steps, seed=1, progress=False, **options)
    return trainer.fit(module, ROWS, ROWS if isinstance(module, Free) else None, batch_size=2, shuffle=False)


class Staged(TrainModule):
    """The second layer joins the optimizer after the first update, or in the first."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        self.hook = hook

    def training_step(self, batch: Any) -> dict[str, Any]:
        loss = torch.nn.functional.mse_loss(self.second(self.first(batch[0])), batch[1])
        return {"loss": loss, "weight": 100.0}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.first.parameters(), lr=1.0)

    def _add(self) -> None:
        self.trainer.optimizers["main"].add_param_group({"params": list(self.second.parameters())})

    def on_step(self, step: int) -> None:
        if self.hook == "on_step" and step == 1:
            self._add()

    def on_before_step(self) -> None:
        if self.hook == "on_before_step":
            self._add()


def test_a_group_that_a_hook_adds_is_clipped_and_normalised_from_the_next_update_on() -> None:
    module = Staged("on_step")
    before = torch.nn.utils.parameters_to_vector(module.second.parameters()).detach().clone()
    fit(module, max_grad_norm=1e-3, gradient_accumulation_steps=2)
    moved = torch.nn.utils.parameters_to_vector(module.second.parameters()).detach() - before
    assert 1e-5 < float(moved.norm()) <= 1e-3 + 1e-6


def test_the_error_of_a_resume_without_the_added_group_names_the_way_that_can_be_resumed(tmp_path: Path) -> None:
    fit(Staged("on_step"), run_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"has 2 groups of 4 .* this run has 1 groups of 2, .* with UnfreezeAt"):
        fit(Staged("on_step"), 4, run_dir=tmp_path)


def test_the_error_of_a_resume_without_a_buffer_that_a_step_made_names_the_remedy(tmp_path: Path) -> None:
    class Late(Free):
        def training_step(self, batch: Any) -> torch.Tensor:
            self.register_buffer("mean", batch[0].mean(0))
            return super().training_step(batch)

    fit(Late(), run_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"the module lacks model/mean\. .* make it in __init__, with its shape"):
        fit(Late(), 4, run_dir=tmp_path)


def test_the_gradients_of_a_layer_that_a_hook_adds_are_those_of_one_update() -> None:
    class Grows(Staged):
        def on_step(self, step: int) -> None:
            if step == 1:
                self.third = torch.nn.Linear(1, 1)
                self.trainer.optimizers["main"].add_param_group({"params": list(self.third.parameters())})

        def training_step(self, batch: Any) -> Any:
            out = self.second(self.first(batch[0]))
            return torch.nn.functional.mse_loss(self.third(out) if hasattr(self, "third") else out, batch[1])

    module = Grows("")
    fit(module, 3)
    assert module.third.weight.grad is None


def test_a_group_that_is_added_where_gradients_are_ready_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="on_before_step added a parameter group after this update's"):
        fit(Staged("on_before_step"))


class ScheduleFree(torch.optim.SGD):
    """The protocol of schedule-free optimizers: weights y are trained, z moves, x is meant."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group |= {"train_mode": False, "k": 0}

    @torch.no_grad()
    def _mix(self, train_mode: bool, share: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train_mode:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.lerp_(self.state[parameter]["z"], share)
                group["train_mode"] = train_mode

    def eval(self) -> None:
        self._mix(False, 1 - 1 / 0.9)

    def train(self) -> None:
        self._mix(True, 1 - 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"], "optimizer.train() was not called"
            share = 1 / (group["k"] + 1)
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, share).sub_(y.grad, alpha=group["lr"] * (0.9 * (1 - share)))
                z.sub_(y.grad, alpha=group["lr"])
            group["k"] += 1


class Free(Regression):
    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters(), lr=1e-2)


class Meant(Callback):
    """The weights that the optimizer means, after each update; the loss of each validation, computed from them."""

    def __init__(self) -> None:
        self.weights = torch.empty(0)

    def on_step(self, trainer: Any, module: Free) -> None:
        optimizer = trainer.optimizers["main"]
        z = optimizer.state[module.layer.weight]["z"]
        self.weights = module.layer.weight.detach().lerp(z, 1 - 1 / 0.9)


def test_evaluations_checkpoints_and_exports_have_the_weights_that_the_optimizer_means(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, meant = Free(), Meant()
    result = fit(module, 4, run_dir=tmp_path / "whole", plugins=[meant], validate_every=2, save_every="2 steps")
    assert result.checkpoint is not None
    with Reader(result.checkpoint) as reader:
        torch.testing.assert_close(read_whole(reader, "model/layer.weight"), meant.weights)
    torch.testing.assert_close(module.layer.weight.detach(), meant.weights)
    exported = Free.load_from_checkpoint(result.checkpoint)
    assert Trainer(progress=False).validate(exported, ROWS, batch_size=2)["val_loss"] == pytest.approx(
        result.metrics["val_loss"]
    )

    torch.manual_seed(0)
    fit(Free(), 2, run_dir=tmp_path / "cut", plugins=[Meant()], validate_every=2, save_every="2 steps")
    resumed = Free()
    fit(resumed, 4, run_dir=tmp_path / "cut", plugins=[Meant()], validate_every=2, save_every="2 steps")
    assert torch.equal(resumed.layer.weight, module.layer.weight)
