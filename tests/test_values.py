"""Durations as users write them, and the result of a fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fabricate import ConfigurationError, Every, FitResult, metric_mode


@pytest.mark.parametrize(
    ("text", "every", "shown"),
    [
        ("500 steps", Every(steps=500), "500 steps"),
        ("1 step", Every(steps=1), "1 step"),
        ("1_000 Steps", Every(steps=1000), "1000 steps"),
        ("2epochs", Every(epochs=2), "2 epochs"),
        (" 1 epoch ", Every(epochs=1), "1 epoch"),
        ("1e3 steps", Every(steps=1000), "1000 steps"),
        ("10 minutes", Every(minutes=10), "10 minutes"),
        ("90 seconds", Every(minutes=1.5), "1.5 minutes"),
        ("0.5 hours", Every(hours=0.5), "0.5 hours"),
        ("1e9 tokens", Every(tokens=1e9), "1000000000 tokens"),
        (7, Every(steps=7), "7 steps"),
        (Every(hours=1), Every(hours=1), "1 hour"),
    ],
)
def test_a_duration_is_read_and_shown(text: Any, every: Every, shown: str) -> None:
    parsed = Every.parse("save_every", text)
    assert (parsed, str(parsed)) == (every, shown)
    assert Every.parse("save_every", str(parsed)) == every


@pytest.mark.parametrize(
    "wrong", ["", "steps", "5", "5 weeks", "five steps", "1.2.3 steps", "1e steps", True, 2.5, None, [5]]
)
def test_what_is_no_duration_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^save_every=.* is not a duration: write '500 steps'"):
        Every.parse("save_every", wrong)


@pytest.mark.parametrize("wrong", ["0 steps", 0, -1, "0 minutes"])
def test_a_duration_has_to_be_positive(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"save_every=.*: the number has to be positive"):
        Every.parse("save_every", wrong)


@pytest.mark.parametrize("wrong", [{"steps": 1.5}, {"epochs": 1.5}])
def test_steps_and_epochs_are_whole(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="are whole numbers"):
        Every(**wrong)


@pytest.mark.parametrize("units", [{}, {"steps": 1, "epochs": 1}])
def test_exactly_one_unit_is_given(units: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="needs exactly one unit"):
        Every(**units)


@pytest.mark.parametrize("value", [True, "5", float("nan")])
def test_an_amount_is_a_number(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="the number has to be positive"):
        Every(steps=value)


def test_the_unit_and_the_amount_are_told() -> None:
    assert [(every.unit, every.amount) for every in (Every(steps=3), Every(hours=0.5), Every(tokens=2))] == [
        ("steps", 3.0),
        ("hours", 0.5),
        ("tokens", 2.0),
    ]


@pytest.mark.parametrize("record", [Every(steps=1), FitResult(1, 0)])
def test_records_are_frozen(record: Any) -> None:
    field = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, 2)


def test_the_result_of_a_fit_has_defaults_for_a_run_without_directory() -> None:
    result = FitResult(steps=3, epochs=1)
    assert (result.metrics, result.stop_reason, result.checkpoint) == ({}, "", None)
    assert FitResult(3, 1, {"loss": 0.5}, "max_steps", Path("here")).checkpoint == Path("here")


@pytest.mark.parametrize(
    "metric",
    [
        "val_acc",
        "val/accuracy",
        "val_F1",
        "top5_acc",
        "mAP",
        "val_pearson",
        "hits@10",
        "val_m_MulticlassAccuracy",
        "F1Score",
        "CLIPScore",
        "rougeLsum",
        "val_mAP50",
        "BinaryAUROC",
        "elbo",
        "win_rate",
        "val_hr@10",
        "val_c_index",
    ],
)
def test_a_metric_whose_name_says_that_higher_is_better_needs_a_mode(metric: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^keep: is a higher or a lower '{metric}' better\?"):
        metric_mode("keep", metric, None)
    assert metric_mode("keep", metric, "min") == "min"


@pytest.mark.parametrize(
    "metric",
    [
        "val_loss",
        "val_error",
        "perplexity",
        "val_mae",
        "wer",
        "val_dice_loss",
        "top1_error",
        "MeanSquaredError",
        "negative_log_likelihood",
    ],
)
def test_any_other_metric_is_best_when_it_is_lowest(metric: str) -> None:
    assert metric_mode("keep", metric, None) == "min"
    assert metric_mode("keep", metric, "max") == "max"
