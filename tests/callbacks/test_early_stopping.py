"""EarlyStopping: when it stops, after a resume too, and metrics that are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, CheckpointError, ConfigurationError, EarlyStopping, FabricateError, TrainModule
from fabricate.testing import run_ranks
from tests.support.regression import ROWS, Regression, Scripted, fit


@pytest.mark.parametrize(
    ("values", "options", "steps"),
    [
        ([3.0, 2.0, 2.5, 2.1], {"patience": 2}, 4),
        ([3.0, 2.0, 2.5, 1.0, 1.1, 1.2], {"patience": 2}, 6),
        ([3.0, 2.9, 2.8], {"patience": 2, "min_delta": 0.5}, 3),
        ([1.0, 2.0, 1.5], {"patience": 1, "mode": "max"}, 3),
        ([1.0, float("nan"), float("nan")], {"patience": 2}, 3),
        ([0.936026936026936, 0.9360269362, 0.9360269366], {"patience": 2, "mode": "max"}, 3),
        ([0.5, 0.49999, 0.49998, 0.49998, 0.49998], {"patience": 2}, 5),
        ([0.5, 0.499999999, 0.499999998, 1.0, 1.0], {"patience": 2, "min_delta": 1e-12}, 5),
    ],
)
def test_early_stopping_stops_after_its_patience(values: list[float], options: dict[str, Any], steps: int) -> None:
    result = fit(Scripted(values), EarlyStopping("val_loss", **options), val=ROWS[:2], validate_every=1, max_steps=20)
    assert result.steps == steps
    assert result.stop_reason.startswith("early stopping: val_loss has not improved on ")


def test_early_stopping_begins_anew_with_each_fit() -> None:
    stopping = EarlyStopping(patience=2)
    for _ in range(2):
        assert fit(Scripted([1.0, 2.0, 3.0, 4.0]), stopping, val=ROWS[:2], validate_every=1, max_steps=20).steps == 3


def test_early_stopping_goes_on_counting_after_a_resume(tmp_path: Path) -> None:
    common: dict[str, Any] = {"val": ROWS[:2], "validate_every": 1, "run_dir": tmp_path}
    assert fit(Scripted([1.0, 2.0]), EarlyStopping(patience=2), max_steps=2, **common).stop_reason == "max_steps"
    common["accept_changes"] = ("module",)
    result = fit(Scripted([2.0, 2.0]), EarlyStopping(patience=2), max_steps=9, **common)
    assert (result.steps, result.stop_reason) == (3, "early stopping: val_loss has not improved on 1 in 2 validations")


def test_a_run_that_early_stopping_ended_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common: dict[str, Any] = {"val": ROWS[:2], "validate_every": 1, "max_steps": 9, "run_dir": tmp_path}
    for _ in range(2):
        result = fit(Scripted([1.0, 2.0, 2.0, 0.5]), EarlyStopping(patience=2), **common)
        assert (result.steps, result.stop_reason) == (
            3,
            "early stopping: val_loss has not improved on 1 in 2 validations",
        )
    assert "already complete: nothing to train (early stopping: val_loss has not improved" in capsys.readouterr().out
    assert (
        fit(
            Scripted([0.5, 0.4, 0.3, 0.2, 0.1, 0.0]), EarlyStopping(patience=3), accept_changes=("module",), **common
        ).steps
        == 9
    )


def test_early_stopping_on_a_metric_that_is_not_there_says_which_are() -> None:
    with pytest.raises(
        FabricateError, match=r"EarlyStopping\(metric='val_acc'\): validation recorded val_loss, and not this one"
    ):
        fit(None, EarlyStopping("val_acc", mode="max"), val=ROWS, validate_every=1)


def test_states_of_two_early_stoppings_are_not_taken_for_each_other(tmp_path: Path) -> None:
    def both() -> list[EarlyStopping]:
        return [EarlyStopping("val_loss"), EarlyStopping("val_gain", mode="max")]

    class Gains(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"loss": 2.0, "gain": 5.0}

    arguments: dict[str, Any] = {"val": ROWS[:2], "run_dir": tmp_path, "validate_every": 1}
    fit(Gains(), *both(), **arguments)
    with pytest.raises(
        CheckpointError, match=r"metric='val_gain', mode='max'\): the state in the checkpoint is that of EarlyStopping"
    ):
        fit(Gains(), *reversed(both()), max_steps=3, **arguments)
    again = both()
    fit(Gains(), *again, max_steps=3, **arguments)
    assert [each.best for each in again] == [2.0, 5.0]


class Adds(Callback):
    """A plugin that computes a metric of its own at the end of a validation, as FID or BLEU. `how`: it writes the metric or logs it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_eval_end(self, module: TrainModule, metrics: dict[str, float]) -> None:
        if self.how == "writes":
            metrics["val_score"] = 10 - metrics["val_loss"]
        else:
            module.log("score", 10 - metrics["val_loss"])


class OnAPlateau(Regression):
    def validation_step(self, batch: Any) -> Any:
        return {"loss": [3.0, 3.0, 2.0, 2.5, 2.1][self.trainer.step]}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
        return optimizer, schedule, "val_score"


def stopped_by_a_metric_of_a_plugin(how: str, first: bool, run_dir: Path) -> tuple[int, float | None, float]:
    plugins = [EarlyStopping("val_score", patience=2, mode="max"), Adds(how)]
    result = fit(
        OnAPlateau(),
        *(plugins if first else plugins[::-1]),
        val=ROWS[:4],
        validate_every=1,
        max_steps=20,
        sanity_batches=2,
        run_dir=run_dir,
        keep={"last": 1, "best": 1, "metric": "val_score", "mode": "max"},
        strategy="ddp",
    )
    return result.steps, result.best_score, result.metrics["lr"]


@pytest.mark.parametrize("how", ["writes", "logs"])
@pytest.mark.parametrize("first", [True, False])
def test_a_metric_that_a_plugin_adds_may_stop_a_fit_choose_checkpoints_and_move_a_schedule(
    how: str, first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stopped_by_a_metric_of_a_plugin(how, first, tmp_path) == (4, 8.0, 0.025)
    assert "If Adds adds this metric in a hook of the evaluation, all is well" in capsys.readouterr().err


def test_on_ranks_a_metric_that_a_plugin_adds_may_stop_a_fit(tmp_path: Path) -> None:
    for steps, best, _ in run_ranks(stopped_by_a_metric_of_a_plugin, 2, "logs", True, tmp_path):
        assert (steps, best) == (4, 8.0)


def test_a_metric_that_no_plugin_adds_is_refused_at_the_first_validation(tmp_path: Path) -> None:
    keep = {"best": 1, "metric": "val_other", "mode": "max"}
    with pytest.raises(ConfigurationError, match="keep: validation gives val_loss, val_score, but not 'val_other'"):
        fit(Regression(), Adds("logs"), val=ROWS[:4], validate_every=1, sanity_batches=2, run_dir=tmp_path, keep=keep)
