"""Parameters in any order in the groups of an optimizer, as code that takes them from a set makes them: another order after each start, and
on each rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import mse_loss

from fabricate import Trainer, TrainModule
from fabricate.testing import run_ranks

ROWS = torch.utils.data.TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(0)))


class Net(TrainModule):
    """Layers of one shape, so that nothing but the order tells them apart."""

    reverse = False
    """Whether the groups have the reversed order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(*[torch.nn.Linear(6, 6) for _ in range(4)])
        self.head = torch.nn.Linear(6, 6)

    def training_step(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.head(torch.tanh(self.body(batch[0]))), batch[0].square())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        body, head = list(self.body.named_parameters()), list(self.head.named_parameters())
        if self.reverse:
            body, head = body[::-1], head[::-1]
        return torch.optim.AdamW([{"params": body}, {"params": head, "lr": 0.003}], lr=0.01, weight_decay=0.1)

    def on_fit_start(self, trainer: Trainer) -> None:
        names = {p: name.partition(".")[2] for name, p in self.named_parameters()}
        if trainer.strategy.exposes_gradients and type(self) is Net:  # otherwise the groups hold flat shards
            for group in trainer.optimizers["main"].param_groups:
                assert group["param_names"] == [names[p] for p in group["params"]]


def fit(
    run_dir: Path, steps: int, strategy: str = "single", *, reverse: bool = False, module: Net | None = None
) -> dict[str, torch.Tensor]:
    module = module or Net()
    module.reverse = reverse
    trainer = Trainer(max_steps=steps, run_dir=run_dir, strategy=strategy, max_grad_norm=0.05, seed=1, progress=False)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer.fit(module, ROWS, batch_size=12 // ranks)
    return load_file(next((run_dir / "model").glob("*.safetensors")))


def _apart(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def test_neither_the_clipped_update_nor_a_resume_depends_on_the_order(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", 8)
    assert _apart(fit(tmp_path / "reversed", 8, reverse=True), whole) == 0
    fit(tmp_path / "cut", 4)
    assert _apart(fit(tmp_path / "cut", 8, reverse=True), whole) == 0


class Flat(torch.optim.SGD):
    """Keeps the state of all parameters in one vector, as LBFGS does, and an option with a value for each of them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        state, scales = self.state[parameters[0]], self.param_groups[0]["scales"]
        gradients = torch.cat([scale * p.grad.flatten() for scale, p in zip(scales, parameters, strict=True)])
        state["mean"] = gradients + 0.9 * state.get("mean", torch.zeros_like(gradients))
        parts = state["mean"].split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, part in zip(parameters, parts, strict=True):
                p.sub_(0.05 * part.view_as(p))


class OfOneVector(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = list(self.parameters())
        optimizer = Flat(parameters[::-1] if self.reverse else parameters, lr=0.1)
        optimizer.param_groups[0]["scales"] = [1.0] * len(parameters)
        return optimizer


def test_a_state_that_is_one_vector_of_all_parameters_is_resumed_in_its_order(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", 8, module=OfOneVector())
    fit(tmp_path / "cut", 4, module=OfOneVector())
    assert _apart(fit(tmp_path / "cut", 8, reverse=True, module=OfOneVector()), whole) == 0


def _on_ranks(strategy: str, folder: Path) -> dict[str, torch.Tensor]:
    rank = int(os.environ["RANK"])
    fit(folder, 4, strategy, reverse=rank == 1)
    return fit(folder, 8, strategy, reverse=rank == 0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_ranks_may_have_different_orders(strategy: str, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", 8)
    for weights in run_ranks(_on_ranks, 2, strategy, tmp_path / "ranks", timeout=120):
        assert _apart(weights, whole) < 1e-6


class Scaled(Net):
    """One group has an option with a value for each parameter, and only the other group comes from a set."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        body, head = list(self.body.parameters())[::-1], list(self.head.parameters())
        groups = [{"params": body, "scales": list(range(len(body)))}, {"params": head[::-1] if self.reverse else head}]
        return torch.optim.AdamW(groups, lr=0.01)

    def on_fit_start(self, trainer: Trainer) -> None:
        group = trainer.optimizers["main"].param_groups[0]
        self.scaled = [next(n for n, each in self.named_parameters() if each is p) for p in group["params"]]


def _only_one() -> list[str]:
    module = Scaled()
    module.reverse = os.environ["RANK"] == "1"
    Trainer(max_steps=1, strategy="ddp", progress=False).fit(module, ROWS, batch_size=4)
    return module.scaled


def test_a_group_that_all_ranks_have_in_one_order_keeps_it() -> None:
    names = [name for name, _ in Net().body.named_parameters(prefix="body")]
    assert run_ranks(_only_one, 2) == [names[::-1]] * 2


class Other(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        first, *others = self.body.parameters() if self.reverse else reversed(list(self.body.parameters()))
        return torch.optim.AdamW([{"params": [first]}, {"params": others}])


def _other_groups() -> None:
    module = Other()
    module.reverse = os.environ["RANK"] == "1"
    Trainer(max_steps=1, strategy="ddp", progress=False).fit(module, ROWS, batch_size=4)


def test_other_groups_on_another_rank_are_refused() -> None:
    refused = r"Other.configure_optimizers: group 0 of optimizer 'main' has other parameters on rank \d than on rank \d\. .*order of a set"
    with pytest.raises(Exception, match=refused):
        run_ranks(_other_groups, 2)
