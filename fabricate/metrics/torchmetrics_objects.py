"""The torchmetrics objects inside a module: their state, for a checkpoint or to put it back, and the ranks that they gather from.

Owns the private names of torchmetrics that this needs; never imports it. Must not know what is logged (`reduction`), nor
checkpoints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
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
