"""A fit with a request to stop continues to its minimum length, and anomaly detection lasts as long as the fit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, ConfigurationError, EarlyStopping, Trainer, TrainModule
from fabricate.testing import run_ranks


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor) -> dict[str, float]:
        return {"loss": 1.0}  # never better

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class StopsOn(Callback):
    """Requests the end after the first update, on one rank."""

    def __init__(self, rank: int, kill: bool = False) -> None:
        self.rank, self.kill = rank, kill

    def on_step(self, trainer: Trainer, step: int) -> None:
        if step == 1 and trainer.accelerator.process_index == self.rank:
            trainer.stop("enough")
        if step == 3 and self.kill:
            os.kill(os.getpid(), signal.SIGINT)


def ends(plugin: object, *, steps: bool = True, val: bool = False, **arguments: Any) -> tuple[int, str]:
    rows = torch.zeros(32, 4)
    settings: dict[str, Any] = {"max_epochs": 4, "log_every": 100, "progress": False, "print_plan": "none", **arguments}
    result = Trainer(plugins=[plugin], **settings).fit(Net(), rows, rows if val else None, batch_size=4)
    return result.steps, result.stop_reason


def test_a_stop_waits_for_the_least_number_of_steps_or_epochs() -> None:
    per_epoch = 8
    assert ends(StopsOn(0)) == (1, "enough")
    assert ends(StopsOn(0), min_steps=5) == (5, "enough")
    assert ends(StopsOn(0), min_epochs=2) == (2 * per_epoch, "enough")
    assert ends(StopsOn(0), min_steps=19, min_epochs=2) == (19, "enough")
    assert ends(StopsOn(0), max_epochs=1, min_steps=40) == (per_epoch, "max_epochs")


def test_early_stopping_waits_too() -> None:
    early = EarlyStopping(patience=1)
    steps, reason = ends(early, val=True, min_epochs=3)
    assert (steps, reason[:15]) == (24, "early stopping:")


def test_a_request_of_one_rank_waits_on_all() -> None:
    assert run_ranks(ends, 2, StopsOn(1), min_steps=3, strategy="ddp") == [(3, "enough")] * 2


class Interrupted(EarlyStopping):
    """Would end the fit at step 4, which is interrupted at step 5."""

    def __init__(self, first: bool) -> None:
        super().__init__(patience=1)
        self.first = first

    def on_step(self, step: int) -> None:
        if step == 5 and self.first:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_waits_for_its_least_length_goes_on_to_it_after_a_resume(tmp_path: Path) -> None:
    once: dict[str, Any] = {"val": True, "run_dir": tmp_path, "validate_every": 2, "min_steps": 9}
    assert ends(Interrupted(True), **once) == (5, "interrupted")
    steps, reason = ends(Interrupted(False), **once)
    assert (steps, reason[:15]) == (9, "early stopping:")


def test_a_stop_that_waits_is_in_the_checkpoint(tmp_path: Path) -> None:
    assert ends(StopsOn(0, kill=True), min_steps=9, run_dir=tmp_path) == (3, "interrupted")
    assert ends(StopsOn(0), min_steps=9, run_dir=tmp_path) == (9, "enough")


def test_a_signal_does_not_wait(tmp_path: Path) -> None:
    assert ends(StopsOn(0, kill=True), min_steps=9, run_dir=tmp_path) == (3, "interrupted")


def test_a_least_length_above_the_greatest_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="min_epochs=3 is more than max_epochs=2"):
        Trainer(min_epochs=3, max_epochs=2)


class Anomalous(Net):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (0 * self.net(batch)).sqrt().sum()  # its gradient is 0 times infinity


def test_anomaly_detection_names_the_operation_and_ends_with_the_fit() -> None:
    trainer = Trainer(max_steps=1, detect_anomaly=True, progress=False, print_plan="none")
    with (
        pytest.warns(UserWarning, match="Error detected in MulBackward0"),
        pytest.raises(RuntimeError, match="MulBackward0"),
    ):
        trainer.fit(Anomalous(), torch.zeros(4, 4), batch_size=4)
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize("place", ["s3://bucket/runs", "gs://bucket", "hf://me/runs"])
def test_a_run_directory_on_a_remote_store_is_refused(place: str) -> None:
    with pytest.raises(ConfigurationError, match=r"run_dir='.*://.*' is not a directory of a file system"):
        Trainer(run_dir=place)
