"""Refuses writes that would be lost: a step that writes to a parameter although the strategy computes with a copy of it, and a layer that
writes to its own weight. Must not know: the loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fabricate.distributed.engine import Engine
from fabricate.errors import ConfigurationError
from fabricate.module import STEPS, TrainModule
from fabricate.strategies.assigning import ASSIGN, refuse_part
from fabricate.strategies.base import Strategy
from fabricate.strategies.sharding import is_sharded

_OURS = ("torch.distributed.", "deepspeed.", "fabricate.", "bitsandbytes.")
_HARMLESS = frozenset({"requires_grad_", "detach_", "share_memory_"})
"""Functions whose name ends in an underscore, but which do not write values."""


def refuse_max_norm(module: torch.nn.Module, strategy: Strategy, world_size: int) -> None:
    """Raise `ConfigurationError` for an embedding with max_norm, whose forward writes to its weight, if this would be lost or differ
    between ranks."""
    for name, layer in module.named_modules():
        if not isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) or layer.max_norm is None:
            continue
        kept = world_size == 1 and all(strategy.keeps_written(parameter) for parameter in layer.parameters())
        if layer.weight.requires_grad and not kept:
            raise ConfigurationError(
                f"{name} is {type(layer).__name__}(max_norm={layer.max_norm:g}), whose forward rewrites the rows of its weight that it "
                f"looks up: under strategy={strategy.name!r} these writes would be lost, or differ between ranks. Build it without max_norm"
                f" and look rows up in torch.renorm(weight, {layer.norm_type:g}, 0, {layer.max_norm:g}) with torch.nn.functional, or train "
                "in one process with strategy='single'"
            )


class Written(TorchFunctionMode):
    """While a step runs, raises an error for a write into a parameter that would be lost. Costs one Python call per call of torch."""

    def __init__(self, module: TrainModule, engine: Engine) -> None:
        super().__init__()
        self._module, self._strategy, self._stage = module, engine.strategy, ""
        self._hooks = [
            engine.root.register_forward_pre_hook(self._begin),
            engine.root.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, root: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._stage = inputs[0]
        self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, root: torch.nn.Module, inputs: object, output: object) -> None:
        if self._stage:
            self._stage = ""
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse_part(func, args)
        for tensor in _written(func, args, kwargs):
            if tensor.grad_fn is None and (name := self._parameter(func, tensor)) and not _called_by_us():
                self._refuse(name)
        return func(*args, **kwargs)

    def _parameter(self, func: Callable[..., Any], tensor: torch.Tensor) -> str:
        """The name of the parameter to which `func` writes through `tensor`, if the write would be lost; else ""."""
        if is_sharded(tensor) and func != ASSIGN:  # a shard: the parameter is gathered later, including this write
            return ""
        memory = None if is_sharded(tensor) else tensor.untyped_storage()._cdata
        for name, parameter in self._module.named_parameters():
            same = parameter is tensor or (
                memory is not None and not is_sharded(parameter) and parameter.untyped_storage()._cdata == memory
            )
            if same and not self._strategy.keeps_written(parameter):
                return name
        return ""

    def _refuse(self, name: str) -> None:
        raise ConfigurationError(
            f"{type(self._module).__name__}.{STEPS.get(self._stage, self._stage)} writes into the parameter {name}, but "
            f"strategy={self._strategy.name!r} computes with a copy of it, so the change would be lost. Change the parameter in "
            "on_step(self), within `with torch.no_grad(), self.trainer.strategy.changing(self.parameters()):`. If steps have to "
            "write to this tensor, register it as a buffer instead"
        )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that `func` writes to, as far as its name and arguments show."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    if in_place or func == ASSIGN or name == "__setitem__" or (name.startswith("__i") and name.endswith("__")):
        yield from _tensors(args[:1] or tuple(kwargs.values())[:1])
    yield from _tensors((kwargs.get("out"),))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _called_by_us() -> bool:
    """Whether the call comes from the strategy, which gathers and frees parameters during a step, or from bitsandbytes, whose layers change
    the layout of their codes."""
    frame: FrameType | None = inspect.currentframe()
    for _ in range(2):  # skip this function and `__torch_function__`
        frame = frame and frame.f_back
    while (
        frame is not None
        and _module(frame).startswith("torch.")
        and not _module(frame).startswith("torch.distributed.")
    ):
        frame = frame.f_back
    return frame is not None and _module(frame).startswith(_OURS)


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name
