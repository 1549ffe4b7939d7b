"""Metrics: values stay where they are until a log boundary, then one reduction makes floats of all of them.

Owns: collecting (name, value, weight), weighted means over micro-batches and ranks, per-epoch means, torchmetrics objects.
Must not know: who writes or shows the floats.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fabricate.errors import ConfigurationError, RankError

MOST_PENDING = 1024
"""Entries that wait for a reduction before they are compacted."""

Entry = tuple[str, Any, Any, str]
"""(name, value, weight, "mean" or "sum"); value and weight are numbers or 0-dim tensors."""


class Collectives(Protocol):
    """What a reduction needs of the ranks."""

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order; all ranks."""


def is_torchmetric(value: object) -> bool:
    """Whether `value` is a torchmetrics object, without importing torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, module.Metric)


def check_value(name: str, value: object) -> None:
    """Refuse what cannot become one float, while the traceback still points at the user's line."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ConfigurationError(
                f"log({name!r}): a metric is one number, this tensor has shape {tuple(value.shape)}; reduce it first"
            )
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(
            f"log({name!r}): give a number, a 0-dim tensor or a torchmetrics object, not {type(value).__name__}"
        )


class Total(NamedTuple):
    """A sum over all ranks, already on the host: of weighted values and of weights, or of plain values."""

    total: float = 0.0
    weight: float = 0.0
    mean: bool = True

    def __add__(self, other: Total) -> Total:  # type: ignore[override]
        return Total(self.total + other.total, self.weight + other.weight, self.mean and other.mean)

    def value(self) -> float:
        """The mean, nan over nothing; or the sum."""
        if not self.mean:
            return self.total
        return self.total / self.weight if self.weight else math.nan


class Metrics:
    """Collects entries of one stage ("train", or one evaluation) and reduces them over the ranks."""

    def __init__(self, collectives: Collectives, device: torch.device, ranks_per_row: int = 1) -> None:
        """`ranks_per_row`: how many successive ranks see the same rows, of which the first counts."""
        self._collectives = collectives
        self._ranks_per_row = ranks_per_row
        self._device = device
        self.pending: list[Entry] = []
        self._since: dict[str, Total] = {}
        self._totals: dict[str, Total] = {}
        self._objects: dict[str, Any] = {}

    def take(self, logged: list[Any], weight: Any) -> None:
        """Move what a module logged during one micro-batch here; entries without a weight of their own get `weight`."""
        for name, value, own, reduce in logged:
            if reduce == "object":
                self._objects[name] = value
            else:
                counted = weight if own is None else own
                if self._device.type == "cpu":
                    # Nothing to wait for, and small tensors kept from step to step would lie between the large ones of every step
                    # and leave holes in the heap: it would grow until the log boundary.
                    value = value.item() if isinstance(value, torch.Tensor) else value
                    counted = counted.item() if isinstance(counted, torch.Tensor) else counted
                self.pending.append((name, value, counted, reduce))
        logged.clear()

    def reduce(self) -> dict[str, float]:
        """Means (or sums) since the last `reduce`, over micro-batches and ranks, as floats; a mean over nothing is left out.
        All ranks; the one wait for the device."""
        self._fold()
        since, self._since = self._since, {}
        return _values(since)

    def look(self) -> dict[str, float]:
        """What `reduce` would return, leaving everything as it is. All ranks; one wait for the device."""
        fresh = self._sums()
        return _values({n: self._since.get(n, Total()) + fresh.get(n, Total()) for n in {**self._since, **fresh}})

    def finish(self) -> dict[str, float]:
        """Means over everything since the last `finish` (an epoch, an evaluation), torchmetrics objects computed and
        reset. All ranks."""
        self._fold()
        totals, self._totals = self._totals, {}
        result = {name: totals[name].value() for name in sorted(totals)}
        for name, metric in sorted(self._objects.items()):
            value = metric.compute()
            check_value(name, value)
            result[name] = float(value)
            metric.reset()
        self._objects = {}
        return result

    def compact(self) -> None:
        """Make one pending entry per name of all that is pending, on the device, so that a long way to the next reduction
        costs no memory. This rank; no wait."""
        columns = self._columns((entry[1], entry[2]) for entry in self.pending)
        self.pending = []
        for (name, reduce), (values, weights) in columns.items():
            value, weight = self._column(values), self._column(weights)
            total = weight.sum()
            if reduce == "mean":
                value = torch.where(weight == 0, 0.0, value * weight) / total
            self.pending.append((name, value.sum(), total, reduce))

    def _fold(self) -> None:
        for name, total in self._sums().items():
            self._totals[name] = self._totals.get(name, Total()) + total
            self._since[name] = self._since.get(name, Total()) + total
        self.pending = []

    def _sums(self) -> dict[str, Total]:
        """Everything pending, summed over micro-batches and ranks. A rank that had no rows logged nothing, so names travel
        with their sums, and every rank adds them up in the same order."""
        own = []
        for (name, reduce), (values, weights) in self._columns(self._read()).items():
            weight = sum(weights)
            total = sum(map(operator.mul, values, weights)) if reduce == "mean" else sum(values)
            if total != total and reduce == "mean":
                # A weight of zero means "no rows here", whatever the value (it may be nan).
                total = sum(v * w for v, w in zip(values, weights, strict=True) if w)
            own.append([name, reduce, total, weight])
        everyone = self._collectives.gather_json(own)
        if self._ranks_per_row > 1:
            everyone = _once(everyone, self._ranks_per_row)
        sums: dict[str, Total] = {}
        for name, reduce, total, weight in sorted((entry for entries in everyone for entry in entries), key=_kind):
            mean = reduce == "mean"
            if sums.setdefault(name, Total(mean=mean)).mean != mean:
                raise ConfigurationError(
                    f"log({name!r}) is called with reduce='mean' and with reduce='sum'; choose one of them"
                )
            sums[name] += Total(total, weight, mean)
        return sums

    def _columns(
        self, numbers: Iterable[tuple[Any, Any]]
    ) -> dict[tuple[str, str], tuple[Sequence[Any], Sequence[Any]]]:
        """The values and weights of each name and reduction; `numbers`: those of each pending entry."""
        pairs: dict[tuple[str, str], list[tuple[Any, Any]]] = defaultdict(list)
        for (name, _, _, reduce), pair in zip(self.pending, numbers, strict=True):
            pairs[name, reduce].append(pair)
        columns: Any = {key: tuple(zip(*both, strict=True)) for key, both in pairs.items()}
        return columns  # type: ignore[no-any-return]

    def _read(self) -> Iterable[tuple[float, float]]:
        """Value and weight of each pending entry as floats: one copy from the device, the one wait."""
        if not self.pending:
            return ()
        _, values, weights, _ = zip(*self.pending, strict=True)
        if self._device.type != "cpu":
            tensors = [number for number in (*values, *weights) if isinstance(number, torch.Tensor)]
            read = iter(self._stack(tensors).tolist()) if tensors else iter(())
            values, weights = (
                tuple(next(read) if isinstance(n, torch.Tensor) else n for n in ns) for ns in (values, weights)
            )
        return zip(map(float, values), map(float, weights), strict=True)

    def _stack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if len({(t.dtype, t.device, t.ndim) for t in tensors}) > 1 or tensors[0].ndim:
            tensors = [t.reshape(()).to(self._device, torch.float64) for t in tensors]
        return torch.stack(list(tensors)).detach()

    def _column(self, numbers: Sequence[Any]) -> torch.Tensor:
        if any(isinstance(number, torch.Tensor) for number in numbers):
            numbers = [n if isinstance(n, torch.Tensor) else torch.tensor(n, dtype=torch.float64) for n in numbers]
            return self._stack(numbers).to(self._device, torch.float64)
        return torch.tensor(numbers, dtype=torch.float64, device=self._device)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: this rank's pending entries as floats, and the sums. Waits for the device."""
        pending = [[n, float(v), float(w), r] for n, v, w, r in self.pending]
        return {"pending": pending, "since": _lists(self._since), "totals": _lists(self._totals)}

    def load(self, state: dict[str, Any], *, same_rank: bool) -> None:
        """Take over what `state()` gave; pending entries only on the rank that had them."""
        self._since = {name: Total(*total) for name, total in state["since"].items()}
        self._totals = {name: Total(*total) for name, total in state["totals"].items()}
        self.pending = [(n, v, w, r) for n, v, w, r in state["pending"]] if same_rank else []


def _values(totals: dict[str, Total]) -> dict[str, float]:
    return {name: total.value() for name, total in totals.items() if total.weight or not total.mean}


def _kind(entry: list[Any]) -> tuple[str, str]:
    return entry[0], entry[1]


def _once(everyone: list[list[Any]], ranks_per_row: int) -> list[list[Any]]:
    """The sums of the first of each `ranks_per_row` successive ranks. Raises `RankError` where another of them came to another
    loss: it read other rows, and what they computed together was of neither."""
    for rank, entries in enumerate(everyone):
        first = rank - rank % ranks_per_row
        for mine, theirs in zip(_losses(entries), _losses(everyone[first]), strict=False):
            if not all(map(_close, mine[2:], theirs[2:])):
                means = [total / weight if weight else math.nan for _, _, total, weight in (theirs, mine)]
                raise RankError(
                    f"ranks {first} and {rank} share one copy of the model, and {mine[0]!r} came to {means[0]} on the one and "
                    f"{means[1]} on the other since the last log boundary: they read other rows. Let every rank iterate over the same "
                    "data, with whatever draws it seeded alike, or use a strategy whose ranks read rows of their own, 'fsdp' or 'ddp'"
                )
    return everyone[::ranks_per_row]


def _losses(entries: list[Any]) -> list[Any]:
    return [entry for entry in entries if entry[0] == "loss" or entry[0].endswith("_loss")]


def _close(one: float, other: float) -> bool:
    """Kernels may add up in another order; rows that differ give more than that."""
    return one == other or one != one or other != other or abs(one - other) <= 1e-4 * max(abs(one), abs(other))


def _lists(totals: dict[str, Total]) -> dict[str, list[Any]]:
    return {name: list(total) for name, total in totals.items()}


def torchmetrics_state(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """What every torchmetrics object inside `module` has seen so far, by its name in the module; copies."""
    state: dict[str, dict[str, Any]] = {}
    for name, metric in module.named_modules():
        if is_torchmetric(metric):
            fields: Any = [*metric._defaults, "_update_count", "_computed"]  # no public snapshot exists
            values = {field: getattr(metric, field) for field in fields}
            state[name] = {
                field: value.clone()
                if isinstance(value, torch.Tensor)
                else list(value)
                if isinstance(value, list)
                else value
                for field, value in values.items()
            }
    return state


def load_torchmetrics_state(module: torch.nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Put back what `torchmetrics_state` gave; tensors go to each object's device."""
    for name, metric in module.named_modules():
        for field, value in state.get(name, {}).items():
            if isinstance(value, torch.Tensor):
                value = value.to(metric.device)
            elif isinstance(value, list):
                value = [v.to(metric.device) if isinstance(v, torch.Tensor) else v for v in value]
            object.__setattr__(metric, field, value) if field.startswith("_") else setattr(metric, field, value)


def synchronise_torchmetrics(module: torch.nn.Module, group: Any) -> Callable[[], None]:
    """Let every torchmetrics object inside `module` meet those of `group` only, unless it has a group of its own; the returned
    function undoes it."""
    theirs: list[Any] = [m for m in module.modules() if is_torchmetric(m) and m.process_group is None]

    def meet(where: Any) -> None:
        for metric in theirs:
            metric.process_group = where

    meet(group)
    return lambda: meet(None)


def snapshot_torchmetrics(module: torch.nn.Module) -> Callable[[], None]:
    """Remember what every torchmetrics object inside `module` has; the returned function puts it back."""
    state = torchmetrics_state(module)
    return lambda: load_torchmetrics_state(module, state)
