"""Shares of time and rates of a lap. The clock stands still unless a test moves it, so that every number is exact."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from fabricate import Callback, Trainer, TrainModule
from fabricate.metrics.timing import Stopwatch
from fabricate.testing import run_ranks


class Clock:
    """Seconds, as `time.perf_counter` gives them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(time, "perf_counter", CLOCK)
    return CLOCK


class Slow(torch.utils.data.Dataset):
    """Rows that take 10 ms each."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        CLOCK.now += 0.01
        return torch.ones(1)


class Works(TrainModule):
    """A step that takes 30 ms; keeps the rates of each log boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rates: list[dict[str, float]] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        CLOCK.now += 0.03
        return self.layer(batch).mean()

    def validation_step(self, batch: torch.Tensor) -> None:
        CLOCK.now += 0.5

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_log(self) -> None:
        self.rates.append(self.trainer.rates)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_share_of_waiting_for_data_is_measured_and_written(accumulation: int, tmp_path: Path, clock: Clock) -> None:
    module = Works()
    trainer = Trainer(
        max_epochs=1,
        gradient_accumulation_steps=accumulation,
        log_every=2,
        validate_every=2,
        progress=False,
        run_dir=tmp_path,
    )
    trainer.fit(module, Slow(), [torch.ones(1, 1)], batch_size=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["clock"] for line in lines if line["stage"] == "train"] == [
        {"time": ANY, "seconds": ANY, **rates} for rates in module.rates
    ]
    seconds = 0.04 * accumulation  # without the validation
    assert module.rates == 4 // accumulation * [
        {
            "seconds_per_step": pytest.approx(seconds),
            "steps_per_second": pytest.approx(1 / seconds),
            "samples_per_second": pytest.approx(25),
            "data_share": pytest.approx(0.25),
        }
    ]


def test_time_spent_apart_from_training_is_in_no_rate(clock: Clock) -> None:
    stopwatch = Stopwatch()
    clock.now += 0.02
    with stopwatch.apart():
        clock.now += 0.2
    assert stopwatch.lap(1, 8)["seconds_per_step"] == pytest.approx(0.02)


def test_a_lap_counts_from_the_one_before(clock: Clock) -> None:
    stopwatch = Stopwatch()
    stopwatch.start(100, 800)
    clock.now += 0.04
    stopwatch.waited += 0.01
    assert stopwatch.lap(103, 824)["data_share"] == pytest.approx(0.25)
    clock.now += 0.01
    assert stopwatch.lap(104, 832)["data_share"] == 0
    assert stopwatch.lap(104, 832) == {}


def test_communication_is_a_share_of_the_step(clock: Clock) -> None:
    stopwatch = Stopwatch()
    clock.now += 0.05
    assert stopwatch.lap(2, 16, communicated=0.02)["communication_share"] == pytest.approx(0.8)


def _shares(strategy: str) -> list[dict[str, float]]:
    module = Works()
    trainer = Trainer(max_epochs=4, strategy=strategy, precision="fp32", log_every=4, progress=False)
    trainer.fit(module, Slow(), batch_size=1)
    return module.rates


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_share_of_communication_is_told(strategy: str) -> None:
    for rates in run_ranks(_shares, 2, strategy):
        assert all(0 <= lap["communication_share"] <= 1 for lap in rates)
        assert max(lap["communication_share"] for lap in rates) > 0


def _evaluated() -> list[float]:
    """Seconds of communication when an evaluation begins and when it ends."""
    seconds: list[float] = []

    class Looks(Callback):
        def on_eval_start(self, trainer: Trainer) -> None:
            seconds.append(trainer.strategy._communication.seconds)  # type: ignore[attr-defined]

        on_eval_end = on_eval_start

    trainer = Trainer(
        max_steps=1, strategy="fsdp", precision="fp32", log_every=100, validate_every=1, progress=False, plugins=[Looks()]
    )  # fmt: skip
    trainer.fit(Works(), Slow(), Slow(), batch_size=1)
    return seconds


def test_what_an_evaluation_gathers_is_no_communication_of_training() -> None:
    for begin, end in run_ranks(_evaluated, 2):
        assert begin == end > 0
