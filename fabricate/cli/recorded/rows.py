"""The rows that made a step, and the steps that saw a row: computed from seed and position, because they are not logged.

Every fit of a run records the description of its data's order (event "started"). If a later fit resumed from a step before the end of a
fit, the steps after it belong to the later fit. A skipped update used rows but made no step. Must not know: how the order is drawn
(`data.order`, or the script's sampler), the output. Imports no torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fabricate.cli.recorded.files import RunFiles
from fabricate.errors import ConfigurationError, FabricateError, few

__all__ = ["EpochOrder", "Fit", "Orders", "Part", "Use", "fits", "recorded_order", "rows_of_step", "uses_of_row"]

_KINDS = {"stream": "a stream", "iterable": "an iterable of batches"}


class EpochOrder(Protocol):
    """An epoch's order, in units: rows, or the batches of a batch sampler."""

    def __len__(self) -> int: ...
    def fetch(self, place: tuple[int, int, int]) -> list[Any]:
        """The rows of the units ``place[0]:place[1]``."""

    def unit(self, position: int) -> int | None:
        """The unit that begins after `position` rows; None if none does."""


class Orders(Protocol):
    """The order of an epoch, from the description of a fit's data."""

    def __call__(self, data: Mapping[str, Any], epoch: int) -> EpochOrder: ...


class _Rows:
    """An order that depends only on seed and epoch."""

    def __init__(self, indices: Any) -> None:
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def fetch(self, place: tuple[int, int, int]) -> list[Any]:
        return self._indices[place[0] : place[1]].tolist()  # type: ignore[no-any-return]

    def unit(self, position: int) -> int | None:
        return position


def recorded_order(data: Mapping[str, Any], epoch: int) -> EpochOrder:
    """The order of an epoch, computed only from what the run recorded."""
    shuffle = data["drawn"] == "permutation"
    from fabricate.data.order import epoch_order  # imports NumPy, which other commands do not need

    return _Rows(epoch_order(data["units"], seed=data["seed"], epoch=epoch, shuffle=shuffle))


@dataclass
class Fit:
    """One fit of a run, with the steps after `begin` up to and including `end`. `skipped`: for each skipped update, the step after which it
    was skipped. Of optimizers in turns, the last one on the same rows counts."""

    begin: int
    epoch: int
    position: int
    data: dict[str, Any]
    end: int = 0
    skipped: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of units in a full window."""
        return int((self.data["batch_size"] or 1) * self.data["ranks"] * self.data["accumulation"])

    def window(self, step: int) -> int:
        """The number of the window that made a step, counted within this fit."""
        return step - 1 - self.begin + bisect.bisect_left(self.skipped, step)

    def step(self, window: int) -> tuple[int, bool]:
        """The inverse of `window`: (step that the window made, True), or (step after which it was skipped, False)."""
        skips = [step - self.begin + number for number, step in enumerate(self.skipped)]
        before = bisect.bisect_left(skips, window)
        if before < len(skips) and skips[before] == window:
            return self.skipped[before], False
        return self.begin + window - before + 1, True


class Part(NamedTuple):
    """The rows of one rank in one micro-batch of a step. `rank`: the first of the ranks that read the same rows."""

    rank: int
    micro_step: int
    rows: list[Any]


class Use(NamedTuple):
    """A use of a row: in the update that made `step`; if not `applied`, in a skipped update after `step`."""

    step: int
    applied: bool
    epoch: int
    rank: int
    micro_step: int


def fits(run: RunFiles, *, sampler: bool = False) -> list[Fit]:
    """The fits of a run that made steps, in order. `sampler`: whether the script's sampler is available. Raises FabricateError if the order
    cannot be computed."""
    recorded: list[Fit] = []
    for event in run.events:
        if event["event"] == "started" and "data" in event:
            recorded.append(Fit(event["step"], event["epoch"], event["position"], event["data"]))
        elif event["event"] == "skipped" and recorded and event.get("last_turn", True):
            recorded[-1].skipped.append(event["step"])
    if not recorded:
        raise FabricateError(
            f"{str(run.run_dir)!r} does not record in what order its data was read: no event 'started' in events.jsonl has "
            "'data'. Only runs with this or a later version of fabricate record it"
        )
    ends = [*(fit.begin for fit in recorded[1:]), run.last_step]
    for number, fit in enumerate(recorded):
        fit.end = min(ends[number:])
    with_updates = [fit for fit in recorded if fit.end > fit.begin]
    for fit in with_updates:
        _check(fit, sampler)
    return with_updates


def _check(fit: Fit, sampler: bool) -> None:
    kind, drawn = fit.data["kind"], fit.data["drawn"]
    if not drawn:
        raise FabricateError(
            f"steps {fit.begin + 1} to {fit.end} were trained on {_KINDS.get(kind, kind)}, which decides the order of its rows itself. "
            "This order cannot be computed from seed and position, so the rows of a step are not known. Give each row a number, and log it"
        )
    if drawn == "sampler" and not sampler:
        raise ConfigurationError(
            f"steps {fit.begin + 1} to {fit.end} took their rows from a sampler that the script defines. Add the "
            "script to the command, so that the sampler can draw them again: fabricate rows RUN_DIR --step N SCRIPT [ARGS]"
        )


def _epochs(fit: Fit, orders: Orders) -> Iterator[tuple[int, int, int, int, EpochOrder]]:
    """(number, first unit, end, number of windows before it in the fit, order) of every epoch of a fit."""
    from fabricate.data.order import num_windows

    epoch, position, before = fit.epoch, fit.position, 0
    while True:
        order = orders(fit.data, epoch)
        first, stop = order.unit(position), min(len(order), fit.data["limit"] or len(order))
        if first is None or first > stop:
            raise FabricateError(
                f"the run had a batch that began after {position} rows of epoch {epoch}, but with this script and these arguments none "
                "begins there: the data or the batch size differs. Repeat the command with the script and the arguments of the run"
            )
        windows = num_windows(stop - first, fit.size, fit.data["drop_last"])
        yield epoch, first, min(stop, first + windows * fit.size), before, order
        epoch, position, before = epoch + 1, 0, before + windows


def rows_of_step(recorded: list[Fit], step: int, orders: Orders = recorded_order) -> tuple[int, list[Part]]:
    """The epoch of a step, and the rows of every rank in every micro-batch. Ranks without rows are left out."""
    fit = next((fit for fit in recorded if fit.begin < step <= fit.end), None)
    if fit is None:
        there = [f"{fit.begin + 1} to {fit.end}" for fit in recorded]
        raise ConfigurationError(
            f"--step {step}: the run has no such step. Give one of its steps: {few(there) or 'none'}"
        )
    window = fit.window(step)
    for epoch, first, stop, before, order in _epochs(fit, orders):
        begin = first + (window - before) * fit.size
        if begin < stop:
            return epoch, list(_parts(fit, order, begin, min(begin + fit.size, stop)))
    raise AssertionError("epochs do not end")


def _parts(fit: Fit, order: EpochOrder, begin: int, end: int) -> Iterator[Part]:
    from fabricate.data.order import plan_window

    data = fit.data
    for reader in range(data["ranks"]):
        shares = plan_window(end - begin, data["batch_size"] or 1, data["ranks"], reader)
        for micro_step, share in enumerate(shares):
            if share.rows:
                rows = order.fetch((begin + share.start, begin + share.stop, share.rows))
                yield Part(reader * data["ranks_per_row"], micro_step, rows)


def uses_of_row(recorded: list[Fit], row: Any, orders: Orders = recorded_order) -> Iterator[Use]:
    """The uses of a row in the run, by ascending step."""
    for fit in recorded:
        windows = fit.window(fit.end) + 1
        for epoch, first, stop, before, order in _epochs(fit, orders):
            if before >= windows:
                break
            seen = {(unit - first) // fit.size for unit in _units(order, first, stop, row)}
            for window in sorted(window for window in seen if before + window < windows):
                begin = first + window * fit.size
                step, applied = fit.step(before + window)
                for part in _parts(fit, order, begin, min(begin + fit.size, stop)):
                    if row in part.rows:
                        yield Use(step, applied, epoch, part.rank, part.micro_step)


def _units(order: EpochOrder, first: int, stop: int, row: Any) -> list[int]:
    """Those of the units ``first:stop`` of an epoch that contain `row`."""
    if isinstance(order, _Rows):
        return [first + place for place, each in enumerate(order.fetch((first, stop, stop - first))) if each == row]
    return [unit for unit in range(first, stop) if row in order.fetch((unit, unit + 1, 1))]
