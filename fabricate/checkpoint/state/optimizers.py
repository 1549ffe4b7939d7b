"""Restore an optimizer from a checkpoint: whether it is the saved one, and its state, matched by the names of parameters. Must not know:
how it was saved (`logical`), the loop."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.state.logical import (
    DTYPES,
    Groups,
    Orders,
    decode_mapping,
    decode_with,
    fill,
    in_order,
    read_whole,
)
from fabricate.errors import CheckpointError
from fabricate.optim.optimizers import reorder
from fabricate.optim.trial import State, rebuilt, tried_state
from fabricate.strategies.base import Strategy
from fabricate.strategies.sharding import is_wrapper


def compare_optimizer(
    path: Path, label: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], groups: Groups
) -> None:
    """Raise `CheckpointError` unless `optimizer` has the saved class, and the same parameters in the same groups."""
    where = f"checkpoint {path}, optimizer {label!r}"
    if saved["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{where}: the checkpoint has a {saved['kind']}, but this run has a {type(optimizer).__name__}. Use the same, or resume='never'"
        )
    live = [sorted(group) for group in groups]
    if [sorted(g["names"]) for g in saved["groups"]] != live:
        raise CheckpointError(
            f"{where}: the checkpoint has {len(saved['groups'])} groups of {sum(len(g['names']) for g in saved['groups'])} "
            "parameters in all, this "
            f"run has {len(live)} groups of {sum(map(len, live))}, or they are in other groups (frozen parameters "
            "are in no group). Build the optimizer as before, or resume='never'. A group that a hook adds (add_param_group) is not there "
            "when a run resumes: give the optimizer all parameters, and train those of a layer later with UnfreezeAt"
        )


def load_optimizer(
    reader: Reader,
    label: str,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    groups: Groups,
    strategy: Strategy,
) -> None:
    """Restore one optimizer after `compare_optimizer`: the options of each group and this rank's part of the state, matched by parameter
    name."""
    prefix, orders = f"optimizer/{label}/", _orders(reader, saved)
    keys = _keys(reader, prefix)
    _clear(optimizer.state)
    tried = functools.cache(functools.partial(_tried, optimizer, groups))
    for live, stored, group in zip(optimizer.param_groups, saved["groups"], groups, strict=True):
        _restore_order(live, group, stored["names"])
        live.update(decode_mapping(reader, stored["options"], f"a group of optimizer {label!r}"))
        on_device = bool(live.get("fused") or live.get("capturable"))
        for name, parameter in group.items():
            where, values = f"{prefix}{name}", saved["values"].get(name, {})
            # Prefixes of the tensors inside these values.
            inside = tuple(f"{key}{mark}" for key in values for mark in ".[{")
            own = [key for key in keys.get(name, []) if not key.startswith(inside)]
            shape = strategy.local_part(parameter).shape
            state = _saved_tensors(reader, where, own, shape, parameter.device, on_device, orders)
            for key, tree in values.items():
                value = decode_with(reader, tree, parameter.device, orders)
                if isinstance(value, dict):
                    value = _restored(
                        reader, f"{where}/{key}", value, tried().get(parameter, {}).get(key), parameter.device
                    )
                state[key] = value
            for key, part in strategy.restore_optimizer_state(optimizer, parameter, state).items():
                fill(reader, f"{where}/{key}", part)
                held = optimizer.state.get(parameter, {}).get(key)
                if f"{where}/{key}" in orders and type(held) is torch.Tensor and part.replicated:
                    optimizer.state[parameter][key] = in_order(held, orders[f"{where}/{key}"])
    strategy.after_load()


def _restore_order(live: dict[str, Any], group: Mapping[str, torch.nn.Parameter], names: Sequence[str]) -> None:
    """Put the parameters of a group in the saved order: the state of LBFGS, for instance, lies in one vector for all of them."""
    numbers = {id(parameter): number for number, parameter in enumerate(live["params"])}
    parameters = [id(group[name]) for name in names]
    if numbers.keys() == set(parameters):  # otherwise the strategy has put its own tensors into the group
        reorder(live, [numbers[parameter] for parameter in parameters])


def _keys(reader: Reader, prefix: str) -> dict[str, list[str]]:
    """The keys of the tensors in the state of each parameter of an optimizer, whose tensors have names with `prefix`."""
    keys: dict[str, list[str]] = {}
    for logical in reader.manifest.tensors:
        if logical.startswith(prefix):
            name, _, key = logical.removeprefix(prefix).rpartition("/")
            keys.setdefault(name, []).append(key)
    return keys


def _orders(reader: Reader, saved: Mapping[str, Any]) -> Orders:
    """The orders in memory of the tensors of an optimizer. `CheckpointError` for one that does not list the dimensions of its tensor."""
    orders: Orders = saved.get("memory_order", {})
    for name, order in orders.items():
        record = reader.manifest.tensors.get(name)
        if record is None or sorted(order) != list(range(len(record.shape))):
            raise CheckpointError(
                f"checkpoint {reader.path}: the order in memory of {name} is {list(order)}, which is not an order of its dimensions: the "
                "file is damaged or was not written by fabricate"
            )
    return orders


def _clear(state: dict[Any, Any]) -> None:
    """Remove the state of parameters; what an optimizer keeps under other keys is as its constructor set it."""
    for key in [key for key in state if isinstance(key, torch.Tensor)]:
        del state[key]


def _tried(optimizer: torch.optim.Optimizer, groups: Groups) -> State:
    """The state that a first step leaves; none if the step does not run on the meta device, where no tensor subclass is expected."""
    try:
        return tried_state(optimizer, {p: p for group in groups for p in group.values()})
    except Exception:  # optimizers may raise anything there
        return {}


def _saved_tensors(
    reader: Reader,
    where: str,
    keys: Iterable[str],
    shape: tuple[int, ...],
    device: torch.device,
    on_device: bool,
    orders: Orders,
) -> dict[str, Any]:
    """The state of one parameter: only the dtype of a tensor shaped like the parameter, and the whole value of any other. `on_device`:
    whether the counter of steps lies on the device too."""
    state: dict[str, Any] = {}
    for key in keys:
        record = reader.manifest.tensors[f"{where}/{key}"]
        if tuple(record.shape) == shape and (shape or key != "step"):
            state[key] = DTYPES[record.dtype]
        else:
            value = read_whole(reader, f"{where}/{key}", orders)
            state[key] = value if key == "step" and not on_device else value.to(device)
    return state


def _restored(reader: Reader, name: str, saved: Any, live: object, device: torch.device) -> Any:
    """Return the mapping `saved`, rebuilt as a tensor subclass if `live`, the state that a first step leaves, is one."""
    if not is_wrapper(live):
        return saved
    assert isinstance(live, torch.Tensor)
    try:
        return rebuilt(live, saved, device)
    except ValueError as exc:
        raise CheckpointError(f"checkpoint {reader.path}: {name}: {exc}. Build the optimizer as before") from exc
