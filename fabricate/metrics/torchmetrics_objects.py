"""The torchmetrics objects inside a module: how their state is saved and restored, and from which ranks they gather.

Owns the private names of torchmetrics that are used here; never imports torchmetrics. Must not know what is logged (`reduction`), nor
checkpoints.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch


def is_torchmetric(value: object) -> bool:
    """Whether `value` is a torchmetrics object, without importing torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, module.Metric)


def move_torchmetrics(module: torch.nn.Module, device: torch.device) -> None:
    """Move the state of every torchmetrics object inside `module` to `device`. This state is neither a parameter nor a buffer, so code that
    moves only these leaves it behind."""
    for part in module.modules():
        if is_torchmetric(part):
            part.to(device)


def computes(value: object) -> bool:
    """Whether `value` is a torchmetrics object or a collection of them, whose method `compute` returns the results."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, module.Metric | module.MetricCollection)


def path_inside(module: torch.nn.Module, metric: object) -> str | None:
    """The name of a torchmetrics object or collection in `module`; None if it is not in `module`."""
    return next((name for name, child in module.named_modules() if child is metric), None)


def torchmetrics_state(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Copies of the state of every torchmetrics object inside `module`, by the name of the object in the module."""
    state: dict[str, dict[str, Any]] = {}
    for name, metric in module.named_modules():
        if is_torchmetric(metric):
            # No public snapshot exists.
            fields: Any = [*metric._defaults, "_update_count", "_computed", *_beside(metric)]
            values = {field: getattr(metric, field) for field in fields}
            state[name] = {field: _copy(value) for field, value in values.items()}
    return state


_BESIDE = {"MinMaxMetric": ("min_val", "max_val"), "Running": ("_num_vals_seen",)}
"""What classes of torchmetrics count in attributes that are no states."""


def _beside(metric: Any) -> tuple[str, ...]:
    return next((_BESIDE[kind.__name__] for kind in type(metric).__mro__ if kind.__name__ in _BESIDE), ())


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def load_torchmetrics_state(module: torch.nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Restore what `torchmetrics_state` returned. Tensors are moved to the device of their object."""
    _resize_trackers(module, state)
    for name, metric in module.named_modules():
        for field, value in state.get(name, {}).items():
            if isinstance(value, torch.Tensor):
                value = value.to(metric.device)
            elif isinstance(value, list):
                value = [v.to(metric.device) if isinstance(v, torch.Tensor) else v for v in value]
            object.__setattr__(metric, field, value) if field.startswith("_") else setattr(metric, field, value)


def _resize_trackers(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Give every `MetricTracker` as many objects as it had when the objects `names` were saved: one for each call of `increment`."""
    library: Any = sys.modules.get("torchmetrics")
    for path, tracker in list(module.named_modules()) if library is not None else ():
        prefix = f"{path}." if path else ""
        if isinstance(tracker, library.MetricTracker):
            saved = {name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)}
            while len(tracker) < len(saved):
                tracker.increment()
            while len(tracker) > len(saved) > 0:
                tracker._modules.popitem()  # del tracker[-1] would give the others new names
            tracker._increment_called = len(tracker) > 1


def take_over_torchmetrics_state(
    module: torch.nn.Module, states: Sequence[dict[str, dict[str, Any]]], *, counts: bool
) -> list[str]:
    """Set the state of every torchmetrics object inside `module` to the combined state of several ranks on the rank that `counts`, and on
    others to its initial state. `states`: what `torchmetrics_state` returned on each rank. Returns the names of the objects whose states
    cannot be combined on one rank; they have their initial state."""
    lost = []
    _resize_trackers(module, {name for state in states for name in state})
    for name, metric in module.named_modules():
        if not is_torchmetric(metric):
            continue
        metric.reset()
        first = states[0].get(name, {})
        load_torchmetrics_state(metric, {"": {field: first[field] for field in _beside(metric) if field in first}})
        counted = [state[name] for state in states if state.get(name, {}).get("_update_count")]
        if not counted or not counts:
            continue
        if (merged := counted[0] if len(counted) == 1 else _merged(metric, counted)) is None:
            lost.append(name)
        else:
            # A rank with a result would not take part in computing it.
            load_torchmetrics_state(metric, {"": {**merged, "_computed": None}})
    return lost


def _merged(metric: Any, states: list[dict[str, Any]]) -> dict[str, Any] | None:
    """One state that combines several; None if only the object itself can combine them."""
    merged: dict[str, Any] = {"_update_count": sum(state["_update_count"] for state in states)}
    for field, reduction in metric._reductions.items():
        values, kind = [state[field] for state in states], getattr(reduction, "__name__", "")
        if isinstance(values[0], list) and kind == "dim_zero_cat":
            merged[field] = [each for value in values for each in value]
        elif isinstance(values[0], torch.Tensor) and kind in _OVER_RANKS:
            merged[field] = _OVER_RANKS[kind](torch.stack(values))
        else:
            return None
    return merged


_OVER_RANKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dim_zero_sum": lambda values: values.sum(0, dtype=values.dtype),
    "dim_zero_max": lambda values: values.amax(0),
    "dim_zero_min": lambda values: values.amin(0),
}
"""The reductions that torchmetrics applies to the states of ranks, by the names of its functions."""


def allow_uneven_rows() -> Callable[[], None]:
    """Until the returned function is called, torchmetrics can compute an object of which ranks have different numbers of rows.

    torchmetrics concatenates some lists before it gathers them. For an empty one it sends a vector of floats, which cannot be gathered
    with whole numbers, for instance, and for a single number no vector. Of other lists it gathers one item after the other, and waits
    forever for a rank that has fewer."""
    library: Any = sys.modules.get("torchmetrics")
    if library is None:
        return lambda: None
    gather_all = sys.modules["torchmetrics.utilities.distributed"].gather_all_tensors
    original = library.Metric._sync_dist

    @functools.wraps(original)
    def synchronise(metric: Any, dist_sync_fn: Any = gather_all, process_group: Any = None) -> None:
        if fields := [field for field in metric._defaults if _is_gathered_list(metric, field)]:
            everyone = gather_all(_described(metric, fields), process_group or metric.process_group)
            for index, field in enumerate(fields):
                _even(metric, field, [_Held.read(each[index].tolist()) for each in everyone])
        original(metric, _gather if dist_sync_fn is gather_all else dist_sync_fn, process_group)

    library.Metric._sync_dist = synchronise

    def undo() -> None:
        library.Metric._sync_dist = original

    return undo


def _is_gathered_list(metric: Any, field: str) -> bool:
    return isinstance(getattr(metric, field), list) and (
        metric._reductions[field] is None or _concatenates(metric, field)
    )


def _concatenates(metric: Any, field: str) -> bool:
    return getattr(metric._reductions[field], "__name__", "") == "dim_zero_cat"


_DTYPES = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
_MOST_DIMENSIONS = 16


class _Held(NamedTuple):
    """What a rank holds in a list."""

    number: int
    dtype: int
    """The index of the first item's dtype in `_DTYPES`; -1 if it is no tensor."""
    shape: list[int]
    """That of the first item."""

    def row(self) -> list[int]:
        """All of it in a fixed number of whole numbers."""
        return [self.number, self.dtype, len(self.shape), *self.shape, *[0] * (_MOST_DIMENSIONS - len(self.shape))]

    @classmethod
    def read(cls, row: list[int]) -> _Held:
        """What `row` returned."""
        number, dtype, dimensions, *sizes = row
        return cls(number, dtype, sizes[:dimensions])


def _described(metric: Any, fields: list[str]) -> torch.Tensor:
    """A row of `_Held` for each list. int64, on the device of the object."""
    rows = []
    for items in (getattr(metric, field) for field in fields):
        held = _Held(len(items), -1, [])
        if items and isinstance(items[0], torch.Tensor):
            held = _Held(len(items), _DTYPES.index(items[0].dtype), list(items[0].shape))
        rows.append(held.row())
    return torch.tensor(rows, dtype=torch.int64, device=metric.device)


def _even(metric: Any, field: str, ranks: list[_Held]) -> None:
    """Change a list so that all ranks gather equally often, and tensors that can be joined. `ranks`: what each rank holds."""
    items, filled = getattr(metric, field), [rank for rank in ranks if rank.number]
    numbers = [rank.number for rank in ranks]
    if min(numbers) == max(numbers) or any(rank.dtype < 0 for rank in filled):
        return
    shape, options = filled[0].shape, {"dtype": _DTYPES[filled[0].dtype], "device": metric.device}
    if not _concatenates(metric, field):
        nothing = torch.zeros([0] * len(shape), **options)
        longer = [*items, *[nothing] * (max(numbers) - len(items))]
        setattr(metric, field, [_held_by(item, [index < n for n in numbers]) for index, item in enumerate(longer)])
    elif not items:
        setattr(metric, field, [torch.zeros([0, *shape[1:]], **options)])
    elif not shape:
        setattr(metric, field, [torch.stack(items)])


def _held_by(item: torch.Tensor, ranks: list[bool]) -> torch.Tensor:
    """The item, with whether each rank has it: `_gather` leaves out what the others send."""
    marked = item.detach().view_as(item)
    marked.holders = ranks  # type: ignore[attr-defined]
    return marked


def _gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of the ranks of `group` that have one."""
    gathered = sys.modules["torchmetrics.utilities.distributed"].gather_all_tensors(tensor, group)
    holders = getattr(tensor, "holders", None)
    return gathered if holders is None else [each for each, holds in zip(gathered, holders, strict=True) if holds]


def synchronise_torchmetrics(module: torch.nn.Module, group: Any) -> Callable[[], None]:
    """Make every torchmetrics object inside `module` synchronise over the ranks of `group` only, unless it has its own group. The returned
    function undoes this."""
    ungrouped: list[Any] = [m for m in module.modules() if is_torchmetric(m) and m.process_group is None]

    def use(process_group: Any) -> None:
        for metric in ungrouped:
            metric.process_group = process_group

    use(group)
    return lambda: use(None)


def snapshot_torchmetrics(module: torch.nn.Module) -> Callable[[], None]:
    """Copy the state of every torchmetrics object inside `module`. The returned function restores it."""
    state = torchmetrics_state(module)
    return lambda: load_torchmetrics_state(module, state)


class SetApart:
    """Torchmetrics objects and collections whose counts are kept while the objects are used for something else."""

    def __init__(self, metrics: Iterable[Any]) -> None:
        self._kept = {id(metric): (metric, snapshot_torchmetrics(metric)) for metric in metrics}

    def reset(self) -> None:
        """Let something else begin without counts."""
        for metric, _ in self._kept.values():
            metric.reset()

    def put_back(self) -> None:
        """Restore the counts."""
        for _, restore in self._kept.values():
            restore()

    def put_back_unused(self, used: Collection[str], module: torch.nn.Module) -> None:
        """Restore the counts of objects that have no new ones: in `module` those that are not among `used`, the paths of those that have
        new ones on some rank."""
        for metric, restore in self._kept.values():
            path = path_inside(module, metric)
            new = updated(metric) if path is None else [each for each in used if f"{each}.".startswith(f"{path}.")]
            if not new:
                restore()


def updated(module: torch.nn.Module) -> list[str]:
    """The paths of the torchmetrics objects in `module` that were updated since their last reset."""
    return [name for name, part in module.named_modules() if is_torchmetric(part) and part._update_count]
