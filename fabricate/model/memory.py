"""Memory per rank, estimated before anything is built: the need of a module, its division by a strategy, and the memory that is available.

Parameters, gradients, optimizer state and the strategy's additional tensors are counted. Activations are not, because they depend on the
batch. Must not know: the engine, the loop.
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
"""Bytes of optimizer state per trainable parameter (two float32 averages), assumed if the optimizer cannot be tried out."""


@dataclass(frozen=True)
class Need:
    """The bytes that `module` needs in total, by kind ("parameters", "gradients", "optimizer state"), and how they were counted."""

    module: TrainModule
    whole: dict[str, int]
    counted: str
    optimizers: Mapping[str, torch.optim.Optimizer]
    multiplied: int
    """Number of float32 elements in weights that layers multiply by: autocast copies them."""
    states: Mapping[str, State] = field(default_factory=dict)
    """The state of each optimizer, if it could be tried out."""

    def computed_in(self, precision: Precision) -> Need:
        """The need including the copies of weights that autocast makes under `precision`."""
        # With a `convert` of its own, layers cast their weights themselves, or do not need to.
        converts = type(precision).convert is not Precision.convert
        if precision.mixed_precision not in ("bf16", "fp16") or converts:
            return self
        return dataclasses.replace(self, whole={**self.whole, CAST_COPIES: 2 * self.multiplied})

    def per_rank(self, strategy: Strategy, world_size: int) -> dict[str, int]:
        """Bytes of each kind on one rank."""
        return strategy.memory_per_rank(self.module, self.whole, world_size)


def total(per_rank: Mapping[str, int], on_device: bool) -> int:
    """The bytes in the device's memory, or in the host's if there is no device."""
    return sum(count for kind, count in per_rank.items() if not (on_device and kind.startswith("host ")))


def halved(needed: Need, strategy: Strategy, world_size: int) -> tuple[int, int]:
    """The bytes on one rank for training in half precision, without and with float32 master weights. Weights and gradients take half, the
    optimizer state is unchanged, and `strategy` (not settled yet) divides them as it divides float32."""
    held = needed.per_rank(strategy, world_size)
    share = {kind: held.get(kind, held.get(f"host {kind}", 0)) / (count or 1) for kind, count in needed.whole.items()}
    narrow = (needed.whole["parameters"] * share["parameters"] + needed.whole["gradients"] * share["gradients"]) / 2
    state = share["optimizer state"]
    counted = narrow + needed.whole["optimizer state"] * state
    return math.ceil(counted), math.ceil(counted + needed.whole["gradients"] * state)


def available(device: torch.device, local_ranks: int) -> tuple[int, str]:
    """The bytes that a rank can use in total, and where: the memory that is free on its device or held by this process, or a share of the
    host's."""
    if device.type == "cpu":
        return host_memory(local_ranks)
    if device.type == "mps":
        return torch.mps.recommended_max_memory(), "of the host's memory, for the GPU"
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device), f"free on {_name(device)}"


def capacity(device: torch.device, local_ranks: int) -> tuple[int, str]:
    """Like `available`, but with the whole memory of the device, free or not: all ranks get the same number and make the same choice."""
    if device.type in ("cpu", "mps"):
        return available(device, local_ranks)
    return torch.accelerator.get_memory_info(device)[1], _name(device)


def _name(device: torch.device) -> str:
    module: Any = torch.get_device_module(device)
    return str(getattr(module, "get_device_name", str)(device))


def outline(module: TrainModule) -> TrainModule:
    """A copy of `module` on the meta device, with the layers that `configure_model` builds; `module` itself is not changed.

    The copy shares attributes that are not modules, tensors or containers. Raises the errors of `configure_model` on the meta device.
    """
    shadow: TrainModule = _shadow(module, {})
    object.__setattr__(shadow, "_trainer", None)
    if overrides(module, "configure_model") and not getattr(module, "_built", False):
        build_on_meta(shadow)
    return shadow


def _shadow(part: torch.nn.Module, copies: dict[int, Any]) -> Any:
    if id(part) in copies:
        return copies[id(part)]
    if isinstance(part, torch.jit.ScriptModule):  # its tensors are in C++, where no other ones can be set
        copied = torch.nn.Module()
    else:
        copied = object.__new__(type(part))  # without its constructor
        held = part.__dict__.items()
        copied.__dict__.update((k, copy.copy(v) if type(v) in (list, dict, set) else v) for k, v in held)
    copies[id(part)] = copied
    for table in ("_parameters", "_buffers"):
        tensors = {
            key: None if tensor is None else copies.setdefault(id(tensor), _meta(tensor))
            for key, tensor in getattr(part, table).items()
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
    """The memory that training `module` needs. `optimizers`: None for an evaluation, an exception if they are not known. `shape`: a
    function that gives the whole shape of a parameter, which may be sharded."""
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
        except Exception as exc:  # optimizers may raise anything on the meta device
            reason = exc
    whole["optimizer state"] = ADAM_BYTES * sum(empty.numel() for empty in trainable)
    counted = f"{ADAM_BYTES} bytes of state per parameter assumed, as for Adam, because: {first_line(reason)}"
    return Need(module, whole, counted, {}, multiplied)


def _bytes_of_weights(module: torch.nn.Module, parameters: Mapping[torch.Tensor, torch.Tensor]) -> dict[str, int]:
    """The bytes of the weights, by kind; for quantised weights, those of their inner tensors."""
    quantised = quantised_weights(module).values()
    inside = {id(each.weight): sum(map(_bytes, each.tensors())) for each in quantised if each.kind == TORCHAO}
    # Some weights share scales.
    scales = {tensor.data_ptr(): _bytes(tensor) for each in quantised for tensor in each.scales}
    whole = {"parameters": sum(inside.get(id(p), _bytes(empty)) for p, empty in parameters.items())}
    return {**whole, SCALES: sum(scales.values())} if scales else whole


def _multiplied(module: torch.nn.Module, parameters: Mapping[torch.Tensor, torch.Tensor]) -> int:
    """Number of elements in the float32 weights that layers multiply by; not those of embeddings, which only look up rows."""
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
    """The object in place of the trainer while `configure_optimizers` is called on an outline."""

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
        except Exception as exc:  # it may use objects that exist only during a fit
            return need(outlined, exc)
        return need(outlined, optimizers.optimizers)
    finally:
        set_rng_state(before)
