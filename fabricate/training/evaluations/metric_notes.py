"""Notes about the metrics of an evaluation: their texts, and when they are printed.

Owns the notes of one evaluation on one data set. Must not know: what steps compute (`metrics.step_watch`), how rows are read.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from fabricate.data.batches import several_labels
from fabricate.errors import few
from fabricate.module import STEPS
from fabricate.training.state.run_state import Run

_NUMBER = re.compile(r"(?<![\w'@.])-?\d[\d.]*(?![\w'])")
"""A number in a note, such as the count by which a step divides. It may differ between epochs, and the note is the same. The number in the
name of a metric, which is in quotes, is none."""
SIZE = "a metric depends on the batch size"
"""The topic of two notes, of which one is enough."""
_CLOSE = 1e-2
"""The relative difference between a metric and the mean over halves of its batch that gets a note. Kernels in low precision give other
roundings for another batch size."""
_SAME = 1e-4
"""The relative difference up to which such a comparison shows that a metric is a mean over rows."""


class Mean(NamedTuple):
    """A metric of some rows."""

    value: float
    weight: float


class Note(NamedTuple):
    """A note about a metric. Of notes with the same `topic`, one is printed."""

    text: str
    topic: str = ""


class Held(NamedTuple):
    """What there is to say about the first value of a metric on a rank, if it differs between ranks. As JSON, a list."""

    value: float
    notes: list[Note]
    is_unknown: bool
    """Whether it is not known as a mean over rows."""


class MetricNotes:
    """The notes about the metrics of one data set. Rank 0 prints; what other ranks saw in their batches is printed at the end."""

    def __init__(self, run: Run, stage: str) -> None:
        self._run, self._stage = run, stage
        self._said: dict[str, Note] = {}
        """By topic."""
        self._unknown: list[str] = []
        """The names of the metrics that were noted because they are not known as means over rows."""
        self._held: dict[str, Held] = {}

    def say(self, note: Note) -> bool:
        """Print a note, at the end if this is not rank 0. Does nothing and returns False if it has no text."""
        text = note.text
        if not text:
            return False
        topic = note.topic or _NUMBER.sub("#", text)
        self._run.journal.note(text, topic=topic)
        self._said.setdefault(topic, Note(text, topic))
        return True

    def say_unknown(self, names: list[str]) -> None:
        """Print a note about the metrics `names`, which are not known as means over rows, in the same way. Each is named once."""
        new = [name for name in dict.fromkeys(names) if name not in self._unknown]
        self._unknown += new
        if text := about_unknown(self._stage, new):
            self._run.journal.note(text)

    def has_no(self, name: str) -> bool:
        """Whether `hold` was not called for the metric `name`."""
        return name not in self._held

    def hold(self, name: str, first: Held) -> None:
        """Keep the notes about the first value of a metric on this rank until `join`."""
        self._held[name] = first

    def join(self) -> None:
        """Print what other ranks saw, and the held notes about metrics whose values differ between ranks. All ranks."""
        if self._run.engine.world_size == 1:
            return
        mine = [list(self._said.values()), self._unknown, self._held]
        everyone = self._run.engine.gather_json(mine)
        differing = _differing((name, value) for *_, held in everyone for name, (value, *_) in held.items())
        unknown: list[str] = []
        for said, names, held in everyone:
            notes = itertools.chain.from_iterable(held[name][1] for name in held if name in differing)
            for text, topic in [*said, *notes]:
                self.say(Note(text, topic))
            unknown += [*names, *(name for name in held if name in differing and held[name][2])]
        self.say_unknown(unknown)


def _differing(values: Iterable[tuple[str, float]]) -> set[str]:
    """The names that have several finite `values`."""
    found: dict[str, float] = {}
    return {name for name, value in values if math.isfinite(value) and found.setdefault(name, value) != value}


def about_rows(run: Run, stage: str, batch: Any, computed: str, one_per_row: bool) -> str:
    """A note about metrics that are weighted by rows but are probably means over something else; "" if there are none. `computed`: the
    operation from which the step seems to get them; `one_per_row`: whether the losses are means over one value per row."""
    shape = None if one_per_row else several_labels(batch)
    why = f"a batch holds whole numbers of the shape {shape}, several per row," if shape is not None else ""
    if computed:
        why = f"{STEPS[stage]} computes {computed},"
    elif not why and run.optim.gives_weights and any(name.endswith("loss") for name, *_ in run.module._logged):
        why = "training_step returns a weight with its loss,"
    if not why:
        return ""
    return (
        f"{why} and {STEPS[stage]} does not return a plain cross-entropy, so its metrics are weighted by rows. Where rows have "
        "unequal numbers of labels, return a weight too: {..., 'weight': what the means were taken over}"
    )


def about_function(stage: str, metric: str) -> str:
    """A note about a `metric` that is a function of a mean over a batch; "" if there is none."""
    if not metric:
        return ""
    return (
        f"{STEPS[stage]} gives {metric}, so its mean over batches depends on the batch size and the number of ranks. Log the mean "
        "itself, or compute the metric once from all rows: return 'outputs' and define compute_metrics, or log a torchmetrics object"
    )


def about_beside(stage: str, metric: str) -> str:
    """A note about a `metric` that has the weight of a cross-entropy in the same step; "" if there is none."""
    if not metric:
        return ""
    return (
        f"{STEPS[stage]} gives {metric}, but its weight in the mean over the data set is that of the cross-entropy in the same step, the "
        "number of its labels. Give it a weight of its own: self.log(name, value, weight=what its mean was taken over)"
    )


def about_sums(stage: str, names: list[str]) -> str:
    """A note about metrics, with these `names`, that are sums over the rows of a batch; "" if there are none."""
    if not names:
        return ""
    return (
        f"{STEPS[stage]} gives {few(names)} as a sum over the rows of a batch, and metrics are averaged: the result is the mean of the "
        f"sums. Log the mean instead, or add the sums up: self.log({names[0]!r}, value, reduce='sum')"
    )


def about_unknown(stage: str, names: list[str]) -> str:
    """A note about metrics that are not known as means over rows; "" if there are none."""
    if not names:
        return ""
    return (
        f"{STEPS[stage]} gives {few(names)}, and it is not known whether the mean over batches is that of all rows. If it is a mean over "
        "rows, say so: self.log(name, value, weight=the number of rows). Add up a count: self.log(name, value, reduce='sum'). Otherwise "
        "compute it once from all rows: return 'outputs' and define compute_metrics, or log a torchmetrics object"
    )


def about_halves(
    stage: str,
    rows: int,
    whole: dict[str, Mean],
    one: dict[str, Mean],
    other: dict[str, Mean],
    turned: dict[str, Mean],
) -> str:
    """A note about metrics of a batch of `rows` rows that are not the weighted means over its halves, `one` and `other`; "" if there are
    none. A metric that differs in `turned`, where the rows have another order, has random numbers in it and is not compared."""
    differing = {}
    for name in whole.keys() & turned.keys() & one.keys() & other.keys():
        halves, value = (one[name], other[name]), whole[name].value
        mean, noise = _mean_of(*halves), abs(turned[name].value - value)
        if abs(mean - value) > max(_CLOSE * max(abs(value), *(abs(half.value) for half in halves)), 20 * noise):
            differing[name] = (value, mean)
    if not differing:
        return ""
    names = sorted(differing)
    value, mean = differing[names[0]]
    return (
        f"{STEPS[stage]} gives {few(names)}, which averaged over batches depends on the batch size and the number of ranks: "
        f"{names[0]!r} of {rows} rows is {value:.6g}, and the mean over two halves of them is {mean:.6g}. To compute it once from all "
        "rows, return 'outputs' and define compute_metrics, or log a torchmetrics object. If it is a mean over something other than "
        "rows, log it with weight=what the mean was taken over"
    )


def shown_by_halves(whole: dict[str, Mean], one: dict[str, Mean], other: dict[str, Mean]) -> set[str]:
    """The names of metrics that are the mean over two halves of a batch up to rounding, although the halves differ."""
    names = whole.keys() & one.keys() & other.keys()
    return {
        name
        for name in names
        if one[name].value != other[name].value
        and math.isclose(_mean_of(one[name], other[name]), whole[name].value, rel_tol=_SAME)
    }


def _mean_of(one: Mean, other: Mean) -> float:
    """The weighted mean of a metric of two halves; nan if neither has a weight."""
    weight = one.weight + other.weight
    return (one.value * one.weight + other.value * other.weight) / weight if weight else math.nan
