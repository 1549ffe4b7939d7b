"""The torchmetrics objects inside a module: how their state is saved and restored, and from which ranks they gather.

Owns the private names of torchmetrics that are used here; never imports torchmetrics. Must not know what is logged (`reduction`), nor
checkpoints.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist


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
            fields: Any = [
                *metric._defaults,
                "_update_count",
                "_computed",
                *_beside(metric),
            ]  # no public snapshot exists
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


def rows_of(metric: Any) -> dict[str, list[Any]]:
    """What this rank has of every list of rows that a torchmetrics object or collection keeps, by name: the number of items, and the dtype
    and the shape of the first one, None without one. The names are the same on every rank."""
    if hasattr(metric, "compute_groups"):
        # Equal objects of a collection share one list, which only the first of them has until then.
        metric.items(copy_state=False)
    rows: dict[str, list[Any]] = {}
    for name, owner, field in _lists_of_rows(metric):
        items = getattr(owner, field)
        first = next(iter(items), None)
        kind = [str(first.dtype).removeprefix("torch."), list(first.shape)] if isinstance(first, torch.Tensor) else None
        rows[name] = [len(items), kind]
    return rows


@contextlib.contextmanager
def evened(metric: torch.nn.Module, everyone: Sequence[dict[str, list[Any]]]) -> Iterator[None]:
    """While the body runs, a torchmetrics object or collection can be computed though ranks have different numbers of rows. `everyone`:
    what `rows_of` returned on each rank.

    torchmetrics concatenates some lists before it gathers them. For an empty one it sends a vector of floats, which cannot be gathered
    with whole numbers, for instance. Of other lists it gathers one item after the other, and waits forever for a rank that has fewer."""
    gathering = []
    try:
        for name, owner, field in _lists_of_rows(metric):
            kind = next((each[name][1] for each in everyone if each[name][1] is not None), None)
            numbers = [each[name][0] for each in _members(owner, everyone)]
            if kind is None or min(numbers) == max(numbers):
                continue
            if _concatenates(owner, field):
                if not getattr(owner, field):
                    setattr(owner, field, [_nothing(owner, kind[0], [0, *kind[1][1:]])])
            elif owner.dist_sync_fn is None or owner.dist_sync_fn is _gather:
                owner.dist_sync_fn = _gather
                gathering.append(owner)
                setattr(
                    owner, field, _filled(getattr(owner, field), numbers, _nothing(owner, kind[0], [0] * len(kind[1])))
                )
        yield
    finally:
        for owner in gathering:
            owner.dist_sync_fn = None


def _members(owner: Any, everyone: Sequence[Any]) -> list[Any]:
    """Of the values of all ranks, those of the ranks that an object gathers from."""
    group = owner.process_group
    return list(everyone) if group is None else [everyone[rank] for rank in dist.get_process_group_ranks(group)]


def _nothing(owner: Any, dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=owner.device)


def _filled(items: list[torch.Tensor], numbers: list[int], filling: torch.Tensor) -> list[torch.Tensor]:
    """`items` and as many of `filling` as make the list the longest of all. Those that not every rank has carry who has them."""
    longer = [item.detach() for item in items] + [filling.clone() for _ in range(max(numbers) - len(items))]
    for index in range(min(numbers), len(longer)):
        longer[index].holders = [index < number for number in numbers]  # type: ignore[attr-defined]
    return longer


def _gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of the ranks of `group`, without those that `_filled` added."""
    gathered = sys.modules["torchmetrics.utilities.distributed"].gather_all_tensors(tensor, group)
    holders = getattr(tensor, "holders", None)
    return gathered if holders is None else [each for each, holds in zip(gathered, holders, strict=True) if holds]


def _lists_of_rows(metric: torch.nn.Module) -> Iterator[tuple[str, Any, str]]:
    """The lists that torchmetrics gathers from ranks: a name for each, its object, and the name of its attribute."""
    for path, part in metric.named_modules():
        for field in part._reductions if is_torchmetric(part) else ():
            if isinstance(part._defaults.get(field), list) and (
                _concatenates(part, field) or part._reductions[field] is None
            ):
                yield f"{path}.{field}", part, field


def _concatenates(metric: Any, field: str) -> bool:
    return getattr(metric._reductions[field], "__name__", "") == "dim_zero_cat"


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


def set_apart(metrics: Iterable[Any]) -> Callable[[], None]:
    """Reset torchmetrics objects and collections. The returned function restores their state."""
    undo = []
    for metric in metrics:
        undo.append(snapshot_torchmetrics(metric))
        metric.reset()

    def put_back() -> None:
        for each in undo:
            each()

    return put_back
