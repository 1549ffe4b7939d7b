"""The range test tries growing rates, suggests the one at which the loss falls fastest, and leaves the module as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import ConfigurationError, LearningRateFinder, StochasticWeightAveraging, Trainer, TrainModule
from fabricate.testing import run_ranks

STEPS = 20


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.BatchNorm1d(1))
        self.register_buffer("grows", torch.zeros(0), persistent=False)
        self.register_buffer("assigned", torch.zeros(()))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.grows.set_(torch.ones(len(self.grows) + 1))
        self.assigned = self.assigned + 1
        return (self.net[0](batch) - batch.sum(1, keepdim=True)).square().mean() + 0 * self.net(batch).sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=123.0)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


def rows() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 4).repeat(STEPS + 4, 1)


def run_of(strategy: str = "single", **options: Any) -> tuple[LearningRateFinder, str, bool]:
    """The finder of a fit, why that ended, and whether the module is as before."""
    module = Net()
    finder = LearningRateFinder(**{"min_lr": 1e-4, "max_lr": 2.0, "num_training_steps": STEPS, **options})
    arguments: dict[str, Any] = {
        "max_steps": 50,
        "seed": 3,
        "progress": False,
        "print_plan": "none",
        "strategy": strategy,
    }
    size = 4 if strategy != "single" else 8
    result = Trainer(**arguments, plugins=[finder]).fit(module, rows(), batch_size=size, shuffle=False)
    state = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in module.state_dict().items()}
    if strategy == "zero3":  # empty outside of a fit
        state = {name: value for name, value in state.items() if value.numel()}
    same = all(torch.equal(state[name], value) for name, value in Net().state_dict().items() if name in state)
    return finder, result.stop_reason, same and not len(module.grows)


def by_hand(threshold: float = 4.0) -> tuple[list[float], list[float]]:
    """Rates and smoothed losses, in plain torch."""
    module, batch = Net(), rows()[:8]
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    rates: list[float] = []
    losses: list[float] = []
    mean = 0.0
    for update in range(STEPS):
        rate = 1e-4 * (2.0 / 1e-4) ** (update / (STEPS - 1))
        optimizer.param_groups[0]["lr"] = rate
        loss = module.training_step(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = 0.98 * mean + 0.02 * loss.item()
        smoothed = mean / (1 - 0.98 ** (update + 1))
        if update and smoothed > threshold * min([*losses, smoothed]):
            break
        rates.append(rate)
        losses.append(smoothed)
    return rates, losses


def check(finder: LearningRateFinder, reason: str, same: bool) -> None:
    rates, losses = by_hand()
    assert finder.results["lr"] == pytest.approx(rates)
    assert finder.results["loss"] == pytest.approx(losses, rel=1e-4)
    assert reason.startswith("learning rate finder: ")
    assert same


def test_rates_and_losses_are_those_of_a_range_test_by_hand_and_the_module_is_as_before() -> None:
    finder, reason, same = run_of()
    check(finder, reason, same)
    lowest = min(finder.results["loss"])
    suggestion = finder.suggestion(skip_begin=2)
    assert suggestion is not None
    assert 1e-3 < suggestion < finder.results["lr"][finder.results["loss"].index(lowest)] * 1.01


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_all_ranks_find_the_same_learning_rate(strategy: str) -> None:
    for answer in run_ranks(run_of, 2, strategy):
        check(*answer)


def test_linear_rates_without_an_early_end_are_all_tried() -> None:
    finder, reason, _ = run_of(max_lr=0.1, mode="linear", early_stop_threshold=None)
    assert finder.results["lr"] == pytest.approx(
        [1e-4 + (0.1 - 1e-4) * update / (STEPS - 1) for update in range(STEPS)]
    )
    assert reason == "learning rate finder: all rates were tried"
    assert LearningRateFinder().suggestion() is None, "nothing was tried"


class ByEpochs(Net):
    """Its epochs have two updates."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=123.0)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch), "epoch"


def test_a_schedule_that_advances_by_epochs_changes_no_rate() -> None:
    finder = LearningRateFinder(1e-4, 2.0, STEPS)
    Trainer(max_steps=STEPS, plugins=[finder], progress=False).fit(ByEpochs(), rows()[:16], batch_size=8, shuffle=False)
    batches, module = rows()[:16].chunk(2), Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    losses = []
    for update in range(STEPS):
        optimizer.param_groups[0]["lr"] = finder.rate(update)
        loss = module.training_step(batches[update % 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    smoothed, mean = [], 0.0
    for update, value in enumerate(losses, 1):
        mean = 0.98 * mean + 0.02 * value
        smoothed.append(mean / (1 - 0.98**update))
    assert finder.results["loss"] == pytest.approx(smoothed[: len(finder.results["loss"])], rel=1e-4)


def test_what_cannot_be_a_range_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"min_lr=1\.0, max_lr=0\.1"):
        LearningRateFinder(1.0, 0.1)
    with pytest.raises(ConfigurationError, match=r"run_dir='.*' is set"):
        Trainer(max_steps=2, run_dir=tmp_path, plugins=[LearningRateFinder()], progress=False).fit(
            Net(), rows(), batch_size=8
        )


def test_averaging_with_rates_of_its_own_is_refused() -> None:
    plugins = [LearningRateFinder(num_training_steps=20), StochasticWeightAveraging(0.5)]
    with pytest.raises(ConfigurationError, match="StochasticWeightAveraging sets learning rates of its own"):
        Trainer(max_steps=20, plugins=plugins, progress=False).fit(Net(), rows(), batch_size=8)


def test_a_fit_that_is_too_short_or_goes_on_from_a_checkpoint_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"progress": False, "print_plan": "none"}
    with pytest.raises(ConfigurationError, match=r"num_training_steps=20\): the fit has only 5 updates"):
        Trainer(max_steps=5, plugins=[LearningRateFinder(num_training_steps=20)], **options).fit(
            Net(), rows(), batch_size=8
        )
    saved = Trainer(max_steps=2, run_dir=tmp_path, **options).fit(Net(), rows(), batch_size=8).checkpoint
    assert saved is not None
    trainer = Trainer(max_steps=20, plugins=[LearningRateFinder(num_training_steps=20)], **options)
    module = Net()
    with pytest.raises(ConfigurationError, match="resumes from a checkpoint at step 2"):
        trainer.fit(module, rows(), batch_size=8, resume=saved)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in Net().state_dict().items())


def test_a_stream_that_ends_before_all_rates_were_tried_suggests_none() -> None:
    finder = LearningRateFinder(num_training_steps=30)
    batches = (batch for batch in rows()[:160].split(8))
    Trainer(max_epochs=1, plugins=[finder], progress=False).fit(Net(), batches)
    assert len(finder.results["lr"]) == 20
    assert finder.suggestion() is None
