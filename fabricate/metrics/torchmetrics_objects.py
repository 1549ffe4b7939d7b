"""The torchmetrics objects inside a module: their state, for a checkpoint or to put it back, and the ranks that they gather from.

Owns the private names of torchmetrics that this needs; never imports it. Must not know what is logged (`reduction`), nor
checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def is_torchmetric(value: object) -> bool:
    """Whether `value` is a torchmetrics object, without importing torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, module.Metric)


def move_torchmetrics(module: torch.nn.Module, device: torch.device) -> None:
    """Put the state of every torchmetrics object inside `module` onto `device`. It is neither a parameter nor a buffer, so what
    moves those may leave it behind."""
    for part in module.modules():
        if is_torchmetric(part):
            part.to(device)


def computes(value: object) -> bool:
    """Whether `value` is a torchmetrics object or a collection of them, which `compute` makes numbers of."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, module.Metric | module.MetricCollection)


def path_inside(module: torch.nn.Module, metric: object) -> str | None:
    """The name of a torchmetrics object or collection in `module`; None for one that is elsewhere."""
    return next((name for name, child in module.named_modules() if child is metric), None)


def torchmetrics_state(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """The state of every torchmetrics object inside `module`, by its name in the module; copies."""
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
    """Put back what `torchmetrics_state` gave; tensors go to each object's device."""
    for name, metric in module.named_modules():
        for field, value in state.get(name, {}).items():
            if isinstance(value, torch.Tensor):
                value = value.to(metric.device)
            elif isinstance(value, list):
                value = [v.to(metric.device) if isinstance(v, torch.Tensor) else v for v in value]
            object.__setattr__(metric, field, value) if field.startswith("_") else setattr(metric, field, value)


def take_over_torchmetrics_state(module: torch.nn.Module, states: Sequence[dict[str, dict[str, Any]]]) -> list[str]:
    """Let the torchmetrics objects inside `module` continue from what several ranks had counted, whose `states`
    `torchmetrics_state` gave, as when they compute together; from nothing where there are none.
    The names of those of which one rank cannot hold that."""
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
    """One state of several, None where the object only knows what to make of all of them."""
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
"""What torchmetrics makes of the states of the ranks, by the name of its function."""


def synchronise_torchmetrics(module: torch.nn.Module, group: Any) -> Callable[[], None]:
    """Let every torchmetrics object inside `module` synchronise over the ranks of `group` only, unless it has a group of its
    own; the returned function undoes it."""
    ungrouped: list[Any] = [m for m in module.modules() if is_torchmetric(m) and m.process_group is None]

    def use(process_group: Any) -> None:
        for metric in ungrouped:
            metric.process_group = process_group

    use(group)
    return lambda: use(None)


def snapshot_torchmetrics(module: torch.nn.Module) -> Callable[[], None]:
    """Remember the state of every torchmetrics object inside `module`; the returned function restores it."""
    state = torchmetrics_state(module)
    return lambda: load_torchmetrics_state(module, state)


def set_apart(metrics: Iterable[Any]) -> Callable[[], None]:
    """Reset torchmetrics objects and collections; the returned function puts back what they had counted."""
    undo = []
    for metric in metrics:
        undo.append(snapshot_torchmetrics(metric))
        metric.reset()

    def put_back() -> None:
        for each in undo:
            each()

    return put_back
