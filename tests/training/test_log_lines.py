"""Lines of metrics.jsonl if a device runs behind its host: the same lines, written while the device works on the next update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, FabricateError, Trainer
from fabricate.training import boundary
from fabricate.training.reports.log_lines import may_wait
from tests.support.regression import ROWS, Regression, exploding, fit


@pytest.fixture
def device_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may be written an update later, as on a device; the numbers are those of a CPU."""
    monkeypatch.setattr(boundary, "may_wait", lambda run: True)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "clock"} for line in entries]


class Writes(Callback):
    """The steps that have their line, after each step."""

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / "metrics.jsonl"
        self.steps_in_file: list[list[int]] = []

    def on_step(self) -> None:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.steps_in_file.append([json.loads(line)["step"] for line in lines])


def run(run_dir: Path, *plugins: object, steps: int = 11) -> None:
    torch.manual_seed(0)
    fit(
        Regression(), *plugins, run_dir=run_dir, max_steps=steps, log_every=2, validate_every=6, save_every=5, val=ROWS,
        max_grad_norm=1.0, seed=3,
    )  # fmt: skip


def test_a_line_is_written_an_update_later_and_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "at_once")
    monkeypatch.setattr(boundary, "may_wait", lambda run: True)
    writes = Writes(tmp_path / "later")
    run(tmp_path / "later", writes)
    assert lines(tmp_path / "later") == lines(tmp_path / "at_once")
    assert writes.steps_in_file[:4] == [[], [], [], [2]], "the line of step 2 is written at the boundary after step 3"
    run(tmp_path / "resumed", steps=7)
    run(tmp_path / "resumed")
    assert lines(tmp_path / "resumed") == lines(tmp_path / "at_once")


def test_a_loss_that_is_not_finite_is_reported_with_its_step(device_behind: None) -> None:
    with pytest.raises(FabricateError, match=r"the loss became inf in the updates up to step 2\. "):
        fit(exploding(1), max_steps=9, log_every=2)


def test_values_come_later_only_where_they_are_just_shown() -> None:
    answers: list[bool] = []

    class Asks(Callback):
        def on_step(self, trainer: Trainer) -> None:
            engine: Any = trainer._live().engine
            here, engine.device = engine.device, torch.device("meta")
            answers.append(may_wait(trainer._live()))
            engine.device = here
            answers.append(may_wait(trainer._live()))

    class Stops(Callback):
        def on_log(self, trainer: Trainer) -> None:
            trainer.stop("enough")

    fit(Regression(), Asks(), max_steps=1, progress=True)
    fit(Regression(), Asks(), Stops(), max_steps=1, progress=True)
    assert answers == [True, False, False, False]


class Staged(Regression):
    def configure_optimizers(self) -> Any:
        first, *others = self.layers.parameters()
        optimizer = torch.optim.SGD(
            [{"params": [first], "weight_decay": 0.1}, {"params": others[:1]}, {"params": others[1:], "lr": 0.001}],
            lr=0.01,
        )
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step > 2 else 1.0)


def test_the_rate_of_each_group_that_began_with_another_one_is_logged(tmp_path: Path) -> None:
    fit(Staged(), run_dir=tmp_path, max_steps=4, log_every=1)
    rates = [
        {n: v for n, v in line["metrics"].items() if n.startswith("lr")}
        for line in lines(tmp_path)
        if line["stage"] == "train"
    ]
    assert rates == [{"lr": 0.01, "lr_group_2": 0.001}] * 2 + [{"lr": 0.0, "lr_group_2": 0.0}] * 2


def test_a_loss_that_is_not_finite_speaks_of_a_checkpoint_only_if_there_is_one(tmp_path: Path) -> None:
    for run_dir in (None, tmp_path):
        with pytest.raises(FabricateError, match="the loss became") as caught:
            fit(exploding(4), run_dir=run_dir, max_steps=8, log_every=1, save_every=2)
        assert ("the last checkpoint was saved before that" in str(caught.value)) == (run_dir is not None)
