"""The torchmetrics objects inside a module: how their state is saved and restored, and from which ranks they gather.

Owns the private names of torchmetrics that are used here; never imports torchmetrics. Must not know what is logged (`reduction`), nor
checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

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
            fields: Any = [*metric._defaults, "_update_count", "_computed"]  # no public snapshot exists
            values = {field: getattr(metric, field) for field in fields}
            state[name] = {field: _copy(value) for field, value in values.items()}
    return state


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def load_torchmetrics_state(module: torch.nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Restore what `torchmetrics_state` returned. Tensors are moved to the device of their object."""
    for name, metric in module.named_modules():
        for field, value in state.get(name, {}).items():
            if isinstance(value, torch.Tensor):
                value = value.to(metric.device)
            elif isinstance(value, list):
                value = [v.to(metric.device) if isinstance(v, torch.Tensor) else v for v in value]
            object.__setattr__(metric, field, value) if field.startswith("_") else setattr(metric, field, value)


def take_over_torchmetrics_state(module: torch.nn.Module, states: Sequence[dict[str, dict[str, Any]]]) -> list[str]:
    """Set the state of every torchmetrics object inside `module` to the combined state of several ranks, or to its initial state if there
    is none. `states`: what `torchmetrics_state` returned on each rank. Returns the names of the objects whose states cannot be combined on
    one rank; they have their initial state."""
    lost = []
    for name, metric in module.named_modules():
        if not is_torchmetric(metric):
            continue
        metric.reset()
        counted = [state[name] for state in states if state.get(name, {}).get("_update_count")]
        if not counted:
            continue
        if (merged := counted[0] if len(counted) == 1 else _merged(metric, counted)) is None:
            lost.append(name)
        else:
            load_torchmetrics_state(metric, {"": merged})
    return lost


def _merged(metric: Any, states: list[dict[str, Any]]) -> dict[str, Any] | None:
    """One state that combines several; None if only the object itself can combine them."""
    merged: dict[str, Any] = {"_update_count": sum(state["_update_count"] for state in states), "_computed": None}
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


def kinds_of_rows(metric: Any) -> dict[str, list[Any] | None]:
    """For every list of rows that a torchmetrics object or collection keeps, by name: the dtype of a row and its shape; None if the list
    holds no tensor. The names are the same on every rank."""
    if hasattr(metric, "compute_groups"):
        # Equal objects of a collection share one list, which only the first of them has until then.
        metric.items(copy_state=False)
    kinds: dict[str, list[Any] | None] = {}
    for name, owner, field in _lists_of_rows(metric):
        first = next(iter(getattr(owner, field)), None)
        kinds[name] = None
        if isinstance(first, torch.Tensor):
            kinds[name] = [str(first.dtype).removeprefix("torch."), list(first.shape[1:])]
    return kinds


def give_kinds_of_rows(metric: torch.nn.Module, kinds: dict[str, list[Any]]) -> None:
    """Give every empty list of rows of a torchmetrics object or collection an empty tensor of the kind that another rank has.
    torchmetrics itself sends a vector of floats for it, which cannot be gathered with whole numbers, for instance."""
    for name, owner, field in _lists_of_rows(metric):
        if name in kinds and not len(getattr(owner, field)):
            dtype, shape = kinds[name]
            setattr(owner, field, [torch.empty((0, *shape), dtype=getattr(torch, dtype), device=owner.device)])


def _lists_of_rows(metric: torch.nn.Module) -> Iterator[tuple[str, Any, str]]:
    """The lists that torchmetrics concatenates over ranks: a name for each, its object, and the name of its attribute."""
    for path, part in metric.named_modules():
        for field, reduction in part._reductions.items() if is_torchmetric(part) else ():
            if isinstance(part._defaults.get(field), list) and getattr(reduction, "__name__", "") == "dim_zero_cat":
                yield f"{path}.{field}", part, field


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
