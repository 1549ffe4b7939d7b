"""The use of a run's time over all of its fits: training that was kept, evaluating, saving, starting, lost, down.

Must not know: how it is shown. Imports no torch.
"""

from __future__ import annotations

import bisect
from itertools import pairwise
from typing import Any

from fabricate.cli.recorded.files import RunFiles

KINDS = {
    "training": "updates that the run kept",
    "evaluating": "validation",
    "saving": "checkpoints, while training waited",
    "starting": "from fit() to the first update: models, data, checkpoints to resume from",
    "lost": "computed after the last checkpoint before a stop, and computed again",
    "down": "between the end of one fit and the call of the next",
    "other": "all else: hooks, exporting, updates after the last log line",
}
"""The kinds of time, and their descriptions."""


def goodput(run: RunFiles) -> dict[str, float]:
    """The seconds of each kind in `KINDS`, and "wall", the time from the first fit to the last record. Empty for a run that did not record
    when its fits began."""
    fits = run.of_kind("started")
    if not fits:
        return {}
    moments = sorted(_moments(run))
    first, last = fits[0]["time"] - fits[0]["seconds"], moments[-1]
    sums = {
        "training": sum(training_seconds(line, before) for before, line in _laps(run)),
        "evaluating": sum(line["clock"].get("evaluation_seconds", 0.0) for line in run.lines),
        "saving": sum(event.get("seconds", 0.0) for event in run.of_kind("saved") if "background" not in event),
        "starting": sum(fit["seconds"] for fit in fits),
        "lost": sum(event["seconds"] for event in run.of_kind("repeated")),
        "down": sum(_down(moments, fit["time"] - fit["seconds"]) for fit in fits[1:]),
    }
    return {**sums, "other": max(0.0, last - first - sum(sums.values())), "wall": last - first}


def _laps(run: RunFiles) -> list[tuple[int, dict[str, Any]]]:
    """(step at which the interval began, line) of each log boundary."""
    lines = run.train()
    return [(0, line) for line in lines[:1]] + [(before["step"], line) for before, line in pairwise(lines)]


def training_seconds(line: dict[str, Any], before: int) -> float:
    """The seconds of the updates since the step `before`."""
    seconds: float = line["clock"].get("seconds_per_step", 0.0) * (line["step"] - before)
    return seconds


def _down(moments: list[float], began: float) -> float:
    """The seconds from the last record before a fit to the call of the fit."""
    before = bisect.bisect_right(moments, began)
    return began - moments[before - 1] if before else 0.0


def _moments(run: RunFiles) -> list[float]:
    """The times of all records."""
    cut = [event["until"] for event in run.of_kind("repeated")]
    return [*cut, *(event["time"] for event in run.events), *(line["clock"]["time"] for line in run.lines)]
