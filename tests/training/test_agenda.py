"""When ranks agree on what was requested: after each update where a listener could have requested something, rarely otherwise."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from fabricate import Callback, FitResult, Trainer, TrainModule
from fabricate.hooks import EVENTS
from fabricate.testing import run_ranks
from fabricate.training import agenda

STEPS, AT = 100, 60


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.steps = 0

    def training_step(self, batch: Any) -> torch.Tensor:
        self.steps += 1
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert (
            self.trainer.total_steps == STEPS
        )  # read before the first update, which does not count as a use in a step
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Slow(Net):
    """A quarter of the longest wait for each update."""

    def training_step(self, batch: Any) -> torch.Tensor:
        time.sleep(agenda.LONGEST_WAIT_SECONDS / 4)
        return super().training_step(batch)


class Signalled(Net):
    """Rank 1 gets a signal in an update."""

    def training_step(self, batch: Any) -> torch.Tensor:
        if self.steps == AT and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch)


class Stops(Net):
    """Rank 1 ends the fit from inside a step."""

    def training_step(self, batch: Any) -> torch.Tensor:
        step = self.trainer.step
        if step == AT and os.environ["RANK"] == "1":
            self.trainer.stop("enough")
        return super().training_step(batch)


class Listens(Callback):
    def on_step(self, step: int) -> None: ...


def fit(module: TrainModule, *plugins: object) -> tuple[FitResult, int]:
    """The result, and how often the ranks agreed."""
    agreed = 0
    agree = agenda.ManyRanks.agree

    def counted(self: Any, own: Any) -> Any:
        nonlocal agreed
        agreed += 1
        return agree(self, own)

    agenda.ManyRanks.agree = counted  # type: ignore[method-assign]
    try:
        data = TensorDataset(torch.randn(4 * STEPS, 4, generator=torch.Generator().manual_seed(0)))
        trainer = Trainer(max_steps=STEPS, strategy="ddp", log_every=10**6, progress=False, plugins=plugins)
        return trainer.fit(module, data, batch_size=2), agreed
    finally:
        agenda.ManyRanks.agree = agree  # type: ignore[method-assign]


def several_fits() -> dict[str, tuple[FitResult, int]]:
    return {
        "quiet": fit(Net()),
        "slow": fit(Slow()),
        "listener": fit(Net(), Listens()),
        "signal": fit(Signalled()),
        "stop": fit(Stops()),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[FitResult, int]]]:
    return run_ranks(several_fits, 2)


def test_ranks_agree_rarely_where_nothing_but_a_signal_could_request_something(ranks: list[Any]) -> None:
    for fits in ranks:
        assert fits["quiet"][0].steps == STEPS
        assert STEPS / agenda.MOST_UPDATES <= fits["quiet"][1] < STEPS / 2


def test_ranks_agree_so_often_that_a_request_waits_a_tenth_of_a_second(ranks: list[Any]) -> None:
    for fits in ranks:
        assert fits["slow"][1] >= STEPS / 4


def test_ranks_agree_after_each_update_in_which_a_listener_ran(ranks: list[Any]) -> None:
    for fits in ranks:
        assert fits["listener"][1] >= STEPS


def test_a_signal_to_one_rank_ends_all_at_one_step_within_few_updates(ranks: list[Any]) -> None:
    results = [fits["signal"][0] for fits in ranks]
    assert {result.stop_reason for result in results} == {"interrupted"}
    assert len({result.steps for result in results}) == 1
    assert AT < results[0].steps <= AT + agenda.MOST_UPDATES


def test_a_request_from_inside_a_step_acts_at_the_very_next_boundary(ranks: list[Any]) -> None:
    for fits in ranks:
        assert (fits["stop"][0].steps, fits["stop"][0].stop_reason) == (AT + 1, "enough")


def test_every_hook_counts_as_one_of_an_update_unless_it_is_listed() -> None:
    """So that the requests of a new hook act at the very next boundary."""
    in_an_update = {"train_step", "on_accumulate", "on_before_step", "optimizer_step", "on_step", "on_step_skipped"}
    assert set(EVENTS) - agenda.OUTSIDE_UPDATES == in_an_update
    assert set(EVENTS) >= agenda.OUTSIDE_UPDATES
