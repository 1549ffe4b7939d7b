"""Memory per rank before anything is built: what a module needs, how a strategy divides it, whether that fits.

Counted are parameters, gradients, optimizer state and what the strategy keeps in addition. Activations are not: they depend on
the batch. Must not know: the engine, the loop.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fabricate.errors import first_line
from fabricate.model.building import build_on_meta
from fabricate.model.host_memory import host_memory
from fabricate.module import TrainModule, overrides, takes_turns
from fabricate.optim.optimizers import read_optimizers
from fabricate.optim.trial import State, tried_state
from fabricate.precisions.base import Precision
from fabricate.seeding import rng_state, set_rng_state
from fabricate.strategies.base import CAST_COPIES, Strategy
from fabricate.strategies.quantised import SCALES, TORCHAO, quantised_weights
from fabricate.strategies.sharding import inner_tensors, is_wrapper

ADAM_BYTES = 8
"""Bytes of optimizer state per trainable parameter where the optimizer cannot be tried out: two float32 averages."""


@dataclass(frozen=True)
class Need:
    """Bytes in all, by kind ("parameters", "gradients", "optimizer state"), of `module`, and how they were counted."""

    module: TrainModule
    whole: dict[str, int]
    counted: str
    optimizers: Mapping[str, torch.optim.Optimizer]
    multiplied: int
    """Parameters in float32 that are multiplied as matrices: autocast copies them."""
    states: Mapping[str, State] = field(default_factory=dict)
    """What each optimizer will keep, where that could be tried."""

    def computed_in(self, precision: Precision) -> Need:
        """The same with the copies that `precision` makes of weights by autocast."""
        converts = (
            type(precision).convert is not Precision.convert
        )  # layers that cast their weights themselves, or have no need
        if precision.mixed_precision not in ("bf16", "fp16") or converts:
            return self
        return dataclasses.replace(self, whole={**self.whole, CAST_COPIES: 2 * self.multiplied})

    def per_rank(self, strategy: Strategy, world_size: int) -> dict[str, int]:
        """Bytes of each kind on one rank."""
        return strategy.memory_per_rank(self.module, self.whole, world_size)


def total(per_rank: Mapping[str, int], on_device: bool) -> int:
    """Bytes that count against a device's memory, or against the host's where there is no device."""
    return sum(count for kind, count in per_rank.items() if not (on_device and kind.startswith("host ")))


def halved(needed: Need, strategy: Strategy, world_size: int) -> tuple[int, int]:
    """Bytes on one rank of a training in half precision, without and with float32 master weights: weights and gradients of
    half the width beside the whole optimizer state, divided as `strategy`, which is not settled, divides float32."""
    held = needed.per_rank(strategy, world_size)
    share = {kind: held.get(kind, held.get(f"host {kind}", 0)) / (count or 1) for kind, count in needed.whole.items()}
    narrow = (needed.whole["parameters"] * share["parameters"] + needed.whole["gradients"] * share["gradients"]) / 2
    state = share["optimizer state"]
    counted = narrow + needed.whole["optimizer state"] * state
    return math.ceil(counted), math.ceil(counted + needed.whole["gradients"] * state)


def available(device: torch.device, local_ranks: int) -> tuple[int, str]:
    """Bytes that a rank can have in all, and where: what is free on its device or held by this process already, or its share of the
    host."""
    if device.type == "cpu":
        return host_memory(local_ranks)
    if device.type == "mps":
        return torch.mps.recommended_max_memory(), "of the host's memory, for the GPU"
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device), f"free on {_name(device)}"


def capacity(device: torch.device, local_ranks: int) -> tuple[int, str]:
    """As `available`, whatever else lies on the device at the moment: the same on every rank, so that ranks choose alike."""
    if device.type in ("cpu", "mps"):
        return available(device, local_ranks)
    return torch.accelerator.get_memory_info(device)[1], _name(device)


def _name(device: torch.device) -> str:
    module: Any = torch.get_device_module(device)
    return str(getattr(module, "get_device_name", str)(device))


def outline(module: TrainModule) -> TrainModule:
    """A copy of `module` on the meta device with what `configure_model` builds; `module` is neither built nor changed.

    Attributes that are no modules or tensors are shared with it. Raises what `configure_model` raises there.
    """
    shadow: TrainModule = _shadow(module, {})
    object.__setattr__(shadow, "_trainer", None)
    if overrides(module, "configure_model") and not getattr(module, "_built", False):
        build_on_meta(shadow)
    return shadow


def _shadow(part: torch.nn.Module, copies: dict[int, Any]) -> Any:
    if id(part) in copies:
        return copies[id(part)]
    copied = copies[id(part)] = object.__new__(type(part))  # no constructor, whatever the class
    copied.__dict__.update((k, copy.copy(v) if type(v) in (list, dict, set) else v) for k, v in part.__dict__.items())
    for table in ("_parameters", "_buffers"):
        tensors = {
            key: None if tensor is None else copies.setdefault(id(tensor), _meta(tensor))
            for key, tensor in part.__dict__[table].items()
        }
        copied.__dict__[table] = tensors
    copied.__dict__["_modules"] = {
        key: None if child is None else _shadow(child, copies) for key, child in part._modules.items()
    }
    return copied


def _meta(tensor: torch.Tensor, shape: Iterable[int] | None = None) -> torch.Tensor:
    empty = torch.empty(tuple(tensor.shape if shape is None else shape), dtype=tensor.dtype, device="meta")
    return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty


def need(
    module: TrainModule,
    optimizers: Mapping[str, torch.optim.Optimizer] | Exception | None,
    shape: Callable[[torch.Tensor], Iterable[int]] = lambda tensor: tensor.shape,
) -> Need:
    """What training `module` takes. `optimizers`: None for an evaluation, or why they are not known. `shape`: of the whole of
    a parameter that may be sharded."""
    parameters: dict[torch.Tensor, torch.Tensor] = {p: _meta(p, shape(p)) for p in module.parameters()}
    whole = _bytes_of_weights(module, parameters)
    multiplied = _multiplied(module, parameters)
    if optimizers is None:
        return Need(module, whole, "no gradients, no optimizer", {}, multiplied)
    trainable = [empty for empty in parameters.values() if empty.requires_grad]
    whole["gradients"] = sum(_bytes(empty) for empty in trainable)
    if isinstance(optimizers, Exception):
        reason = optimizers
    else:
        try:
            states = {name: tried_state(optimizer, parameters) for name, optimizer in optimizers.items()}
            whole["optimizer state"] = _bytes_of_state(states.values())
            kinds = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers.values()))
            return Need(module, whole, f"state of {kinds}", optimizers, multiplied, states)
        except Exception as exc:  # any optimizer, tried where it was not meant to run
            reason = exc
    whole["optimizer state"] = ADAM_BYTES * sum(empty.numel() for empty in trainable)
    counted = f"{ADAM_BYTES} bytes of state per parameter assumed, as for Adam, because: {first_line(reason)}"
    return Need(module, whole, counted, {}, multiplied)


def _bytes_of_weights(module: torch.nn.Module, parameters: Mapping[torch.Tensor, torch.Tensor]) -> dict[str, int]:
    """By kind; of quantised weights, what they are made of."""
    quantised = quantised_weights(module).values()
    inside = {id(each.weight): sum(map(_bytes, each.tensors())) for each in quantised if each.kind == TORCHAO}
    scales = {tensor.data_ptr(): _bytes(tensor) for each in quantised for tensor in each.scales}  # some share a table
    whole = {"parameters": sum(inside.get(id(p), _bytes(empty)) for p, empty in parameters.items())}
    return {**whole, SCALES: sum(scales.values())} if scales else whole


def _multiplied(module: torch.nn.Module, parameters: Mapping[torch.Tensor, torch.Tensor]) -> int:
    """Elements of the weights in float32 that layers multiply by. An embedding only looks up rows of its own."""
    looked_up = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    layers = (layer for layer in module.modules() if not isinstance(layer, looked_up))
    weights = {parameters[p] for layer in layers for p in layer.parameters(recurse=False) if not is_wrapper(p)}
    return sum(w.numel() for w in weights if w.ndim > 1 and w.dtype == torch.float32)


def _bytes_of_state(states: Iterable[State]) -> int:
    values = (value for state in states for of_parameter in state.values() for value in of_parameter.values())
    return sum(_bytes(inner) for value in values if isinstance(value, torch.Tensor) for inner in inner_tensors(value))


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Ahead:
    """What `configure_optimizers` sees as its trainer while it is tried on an outline."""

    running = False
    is_main = False

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps or 1


def need_ahead(module: TrainModule, training: bool, total_steps: int | None) -> Need:
    """`need` of a module that is not built yet, with the optimizers that `configure_optimizers` makes for its outline."""
    before = rng_state()
    try:
        outlined = outline(module)
        if not training:
            return need(outlined, None)
        object.__setattr__(outlined, "_trainer", _Ahead(total_steps))
        try:
            optimizers = read_optimizers(
                "configure_optimizers", outlined.configure_optimizers(), total_steps, in_turn=takes_turns(outlined)
            )
        except Exception as exc:  # it may ask for what exists in a fit only
            return need(outlined, exc)
        return need(outlined, optimizers.optimizers)
    finally:
        set_rng_state(before)
