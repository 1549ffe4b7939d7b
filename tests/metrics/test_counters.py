"""Counters that survive a resume, and intervals."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest

from fabricate import Every
from fabricate.metrics.counters import Due, Progress


def _moments(every: Every | None, states: list[Progress], start: Progress | None = None) -> list[int]:
    """The positions in `states` at which `every` came round."""
    due = Due(every, start or Progress())
    return [number for number, state in enumerate(states) if due.reached(state)]


def _steps(*numbers: int) -> list[Progress]:
    return [Progress(step=number) for number in numbers]


def test_counters_come_back_as_they_were() -> None:
    progress = Progress(step=3, epoch=1, position=40, micro_step=5, samples=120, tokens=1.5, skipped=2, seconds=9.25)
    again = Progress()
    again.load(progress.state())
    assert again == progress


def test_every_counter_is_stored() -> None:
    assert set(Progress().state()) == {field.name for field in dataclasses.fields(Progress)}


def test_a_counter_that_is_missing_is_an_error() -> None:
    state = Progress().state()
    del state["samples"]
    with pytest.raises(KeyError, match="samples"):
        Progress().load(state)


def test_steps_fall_due_at_multiples() -> None:
    assert _moments(Every(steps=3), _steps(1, 2, 3, 4, 5, 6, 7, 8, 9)) == [2, 5, 8]


def test_a_moment_falls_due_once() -> None:
    assert _moments(Every(steps=2), _steps(2, 2, 3, 3, 4, 4)) == [0, 4]


def test_moments_that_were_jumped_over_count_once() -> None:
    assert _moments(Every(tokens=10), [Progress(tokens=tokens) for tokens in (5, 35, 39, 40, 41)]) == [1, 3]


def test_a_resumed_run_keeps_the_rhythm() -> None:
    assert _moments(Every(steps=4), _steps(6, 7, 8, 9, 12), start=Progress(step=5)) == [2, 4]


def test_a_resume_at_a_moment_does_not_repeat_it() -> None:
    assert _moments(Every(epochs=1), [Progress(epoch=2), Progress(epoch=3)], start=Progress(epoch=2)) == [1]


@pytest.mark.parametrize(
    ("every", "states", "due"),
    [
        (Every(epochs=2), [Progress(epoch=1), Progress(epoch=2), Progress(epoch=3), Progress(epoch=4)], [1, 3]),
        (
            Every(minutes=2),
            [Progress(seconds=119), Progress(seconds=120), Progress(seconds=239), Progress(seconds=241)],
            [1, 3],
        ),
        (Every(hours=0.5), [Progress(seconds=1799), Progress(seconds=1800)], [1]),
        (Every(tokens=1e3), [Progress(tokens=999), Progress(tokens=1000.5)], [1]),
    ],
)
def test_every_unit_falls_due(every: Every, states: list[Progress], due: list[int]) -> None:
    assert _moments(every, states) == due


def test_an_interval_of_never_does_not_fall_due() -> None:
    assert _moments(None, [Progress(step=10**9, epoch=10**6, tokens=1e18, seconds=1e9)]) == []


@pytest.mark.parametrize(
    ("every", "by_clock"),
    [
        (None, False),
        (Every(steps=1), False),
        (Every(tokens=1), False),
        (Every(minutes=1), True),
        (Every(hours=1), True),
    ],
)
def test_only_minutes_and_hours_go_by_the_clock(every: Every | None, by_clock: bool) -> None:
    assert Due(every, Progress()).by_clock is by_clock


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.25, 0.3, 1 / 3, 0.5, 0.7, 0.9])
def test_a_share_of_an_epoch_is_due_at_the_first_update_that_completes_it(share: float) -> None:
    exact = Fraction(share).limit_denominator(1000)
    for updates in range(1, 60):
        progress, epochs = Progress(), 7
        due, seen = Due(Every(epochs=share), progress, updates, lambda progress: progress.step), []
        while progress.step < epochs * updates:
            progress.step += 1
            if due.reached(progress):
                seen.append(progress.step)
        amount = max(Fraction(1), exact * updates)
        assert seen == [math.ceil(k * amount) for k in range(1, int(epochs * updates / amount) + 1)], updates
