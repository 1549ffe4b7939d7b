"""The charts of the page: which values of metrics.jsonl they show, thinned to the resolution of a screen, and their marks.

Pure data. Must not know: HTML, how charts are drawn. Imports no torch.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fabricate.cli.recorded.files import RunFiles

__all__ = ["MOST_POINTS", "Chart", "Curve", "Mark", "charts", "marks", "representative"]

MOST_POINTS = 4000
"""The maximum number of points of a curve. A longer curve is divided into half as many intervals; the smallest and the largest value of
each are kept."""
_MOST_MARKS = 1000
"""The maximum number of marks of a kind and a run."""
_GIB = 2**30
_PLANNED = "plan, without activations"

T = TypeVar("T")


@dataclass
class Curve:
    """Values over steps and over the seconds in `fit`. `y` is None if the value was not finite. `points`: their number before thinning."""

    run: int
    name: str
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    y: list[float | None] = field(default_factory=list)
    points: int = 0

    def add(self, line: dict[str, Any], value: Any) -> None:
        """Append the point from a line of metrics.jsonl."""
        finite = isinstance(value, int | float) and math.isfinite(value)
        self.steps.append(line["step"])
        self.seconds.append(round(line["clock"].get("seconds", 0.0), 3))
        self.y.append(float(f"{value:.6g}") if finite else None)
        self.points += 1

    def keep(self, places: list[int]) -> None:
        """Drop all points except those at `places`."""
        self.steps = [self.steps[place] for place in places]
        self.seconds = [self.seconds[place] for place in places]
        self.y = [self.y[place] for place in places]


def representative(values: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """The indices of about `most` values: the smallest and the largest of each interval, and one that is not finite."""
    if len(values) <= most:
        return list(range(len(values)))
    intervals = most // 2
    places = {0, len(values) - 1}
    for number in range(intervals):
        start, stop = (edge * len(values) // intervals for edge in (number, number + 1))
        finite = [(value, start + offset) for offset, value in enumerate(values[start:stop]) if value is not None]
        if finite:
            places |= {min(finite)[1], max(finite)[1]}
        if len(finite) < stop - start:
            places.add(next(place for place in range(start, stop) if values[place] is None))
    return sorted(places)


@dataclass(frozen=True)
class Chart:
    """Curves that share axes. stacked: each curve is drawn on top of the previous ones."""

    title: str
    curves: list[Curve]
    unit: str = ""
    stacked: bool = False

    def thin(self) -> None:
        """Thin every curve to the resolution of a screen; stacked curves keep the same points."""
        if self.stacked:
            tops = [sum(y or 0.0 for y in values) for values in zip(*(curve.y for curve in self.curves), strict=True)]
            shared = representative(tops)
        for curve in self.curves:
            curve.keep(shared if self.stacked else representative(curve.y))


@dataclass(frozen=True)
class Mark:
    """An event at a step of a run: "resumed", "skipped", "not finite", "saved", "best"."""

    run: int
    kind: str
    step: int
    seconds: float
    text: str


def charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """The charts of `runs`, the most important first. Charts without points are left out."""
    curves = [curve for number, run in enumerate(runs) for curve in _metrics(number, run)]
    grouped: dict[str, list[Curve]] = {"loss": [], "learning rate": [], "gradient norm": []}
    for curve in sorted(curves, key=lambda each: each.name.startswith(("val_", "epoch_"))):  # training first
        grouped.setdefault(_topic(curve.name), []).append(curve)
    health = [Chart(topic, grouped.pop(topic)) for topic in ("loss", "learning rate", "gradient norm")]
    drawn = [
        *health,
        *_of_time(runs),
        Chart("throughput", _clock(runs, "samples_per_second", "samples"), "samples/s"),
        Chart("tokens", _clock(runs, "tokens_per_second", "tokens"), "tokens/s"),
        Chart("utilisation", _clock(runs, "mfu", "MFU", lambda share: 100 * share), "% of the peak FLOPs"),
        Chart("memory", _memory(runs), "GiB"),
        *(Chart(topic, curves) for topic, curves in grouped.items()),
    ]
    for chart in drawn:
        chart.thin()
    return [chart for chart in drawn if any(curve.points for curve in chart.curves)]


def _metrics(number: int, run: RunFiles) -> Iterator[Curve]:
    """A curve for every metric of a run."""
    curves: dict[str, Curve] = {}
    for line in run.lines:
        for name, value in line["metrics"].items():
            if name not in curves:
                curves[name] = Curve(number, name)
            curves[name].add(line, value)
    yield from curves.values()


def _topic(metric: str) -> str:
    """The title of the chart for a metric. A name shares a chart with its val_ and epoch_ forms."""
    if metric == "lr" or metric.startswith("lr_"):
        return "learning rate"
    if metric == "grad_norm" or metric.startswith("grad_norm/"):
        return "gradient norm"
    base = metric.removeprefix("val_").removeprefix("epoch_")
    return "loss" if base == "loss" or (metric.startswith("val_") and base.endswith("_loss")) else base


def _clock(runs: Sequence[RunFiles], figure: str, name: str, value: Callable[[float], float] = float) -> list[Curve]:
    """A curve per run of the value `figure` that log boundaries recorded under "clock"."""
    curves = []
    for number, run in enumerate(runs):
        curve = Curve(number, name)
        for line in run.train():
            if figure in line["clock"]:
                curve.add(line, value(line["clock"][figure]))
        curves.append(curve)
    return [curve for curve in curves if curve.points]


def _of_time(runs: Sequence[RunFiles]) -> Iterator[Chart]:
    """The charts of the time of a step: for one run divided into parts, for several runs side by side."""
    if len(runs) == 1:
        yield Chart("time of a step", _parts(runs[0]), "ms", stacked=True)
        return
    yield Chart("time of a step", _clock(runs, "seconds_per_step", "step", lambda s: 1000 * s), "ms")
    for title, figure in (("waiting for data", "data_share"), ("communication", "communication_share")):
        yield Chart(title, _clock(runs, figure, title, lambda share: 100 * share), "% of a step")


def _parts(run: RunFiles) -> list[Curve]:
    """The milliseconds of a step in each of its parts."""
    parts = {name: Curve(0, name) for name in ("data", "communication", "compute")}
    for line in run.train():
        clock = line["clock"]
        if "seconds_per_step" not in clock:
            continue
        whole = 1000 * clock["seconds_per_step"]
        data, communication = (whole * clock.get(share, 0.0) for share in ("data_share", "communication_share"))
        for name, value in (("data", data), ("communication", communication)):
            parts[name].add(line, value)
        parts["compute"].add(line, max(0.0, whole - data - communication))
    measured = any("communication_share" in line["clock"] for line in run.train())
    return [curve for name, curve in parts.items() if measured or name != "communication"]


def _memory(runs: Sequence[RunFiles]) -> list[Curve]:
    """The peak memory of the device (on a CPU, the memory of the process from `DeviceStats`), and the memory expected by the plan."""
    if held := _gibibytes(runs, "peak_memory_bytes", "peak"):
        return held + _gibibytes(runs, "planned_memory_bytes", _PLANNED)
    held = _gibibytes(runs, "process_memory_bytes", "process")
    return held + _planned(runs) if held else []


def _gibibytes(runs: Sequence[RunFiles], figure: str, name: str) -> list[Curve]:
    return _clock(runs, figure, name, lambda size: size / _GIB)


def _planned(runs: Sequence[RunFiles]) -> list[Curve]:
    """The memory expected by the plan, for runs on a CPU, whose lines do not contain it."""
    curves = []
    for number, run in enumerate(runs):
        total = (run.plan.get("memory_per_rank", {}).get("value") or {}).get("total")
        if total is None:
            continue
        curves.append(Curve(number, _PLANNED))
        for line in run.train():
            curves[-1].add(line, total / _GIB)
    return [curve for curve in curves if curve.points]


def marks(runs: Sequence[RunFiles]) -> list[Mark]:
    """The marks of all runs, run by run."""
    return [mark for number, run in enumerate(runs) for mark in _marks(number, run)]


def _marks(number: int, run: RunFiles) -> Iterator[Mark]:
    steps, seconds = ([line["step"] for line in run.lines], [line["clock"].get("seconds", 0.0) for line in run.lines])

    def mark(kind: str, step: int, text: str) -> Mark:
        place = bisect.bisect_right(steps, step)
        return Mark(number, kind, step, round(seconds[place - 1], 3) if place else 0.0, text)

    for event in run.of_kind("resumed"):
        yield mark("resumed", event["step"], f"resumed from {event.get('path', 'a checkpoint')}")
    skipped = {event["step"]: event.get("reason", "") for event in run.of_kind("skipped")}
    for step, reason in _some(list(skipped.items())):
        yield mark("skipped", step, f"update after step {step} skipped: {reason}")
    odd = [(line["step"], [n for n, value in line["metrics"].items() if isinstance(value, str)]) for line in run.lines]
    for step, names in _some([each for each in odd if each[1]]):
        yield mark("not finite", step, f"not finite: {', '.join(names)}")
    best = run.best()
    for checkpoint in run.checkpoints:
        kind = "best" if checkpoint is best else "saved"
        yield mark(kind, checkpoint.step, f"{'best ' if kind == 'best' else ''}checkpoint of step {checkpoint.step}")


def _some(found: list[T]) -> list[T]:
    """All elements of `found`, or an even selection of at most `_MOST_MARKS`."""
    return found[:: -(-len(found) // _MOST_MARKS) or 1]
