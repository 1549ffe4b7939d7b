"""Sharded parameters in user code: `parameter.data = value`, and numbers read from them; and contiguous memory for parameters that a
strategy will cut. Must not know: hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fabricate.errors import ConfigurationError
from fabricate.strategies.base import Strategy
from fabricate.strategies.sharding import Part, is_sharded, is_wrapper

ASSIGN = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""The function that `tensor.data = value` calls."""
_READS = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__format__"})
"""The methods of a tensor that return its values."""


def lay_out(module: torch.nn.Module, strategy: Strategy) -> list[str]:
    """Make parameters contiguous if `strategy` computes with copies of them, because it cuts the copies from a flat tensor. Convolutions in
    `channels_last` and transposed weights are not contiguous. Values stay the same. Returns a list with a note, or an empty list."""
    names = []
    for name, parameter in module.named_parameters():
        if not parameter.is_contiguous() and not is_wrapper(parameter) and not strategy.keeps_written(parameter):
            parameter.data = parameter.data.contiguous()
            names.append(name)
    text = f"strategy={strategy.name!r} needs contiguous parameters: {', '.join(names[:4])} are converted, with the same values"
    return [text] if names else []


def refuse_part(func: Any, args: Any) -> None:
    """Raise `ConfigurationError` if `func` returns values of a tensor of which this rank has only a part, a norm of a shard for example.
    torch alone would silently return those of the part."""
    if getattr(func, "__name__", "") not in _READS or not args or not is_sharded(args[0]):
        return
    if args[0].device_mesh.size() > 1 and not all(placement.is_replicate() for placement in args[0].placements):
        raise ConfigurationError(
            f"{func.__name__} of a tensor that was computed from sharded parameters: this rank has only its part of the value. Call "
            ".full_tensor() first, on all ranks, or give the tensor itself to self.log"
        )


class Assigning(TorchFunctionMode):
    """A context in which `parameter.data = value` writes `value` into the shard of the parameter, and in which a value read from a shard
    is an error; torch alone would silently do nothing, and return the value of the part.

    part_of: returns the part of a parameter that this rank holds. All ranks must assign the same values.
    """

    def __init__(self, part_of: Callable[[torch.Tensor], Part]) -> None:
        super().__init__()
        self._part_of = part_of

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == ASSIGN and is_sharded(args[0]):
            return self._assign(*args)
        refuse_part(func, args)
        return func(*args, **(kwargs or {}))

    def _assign(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        if (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
            raise ConfigurationError(
                f"parameter.data = a tensor of shape {tuple(value.shape)}, {value.dtype}: the parameter is sharded and cannot "
                f"change its shape {tuple(parameter.shape)} and dtype {parameter.dtype}; assign a tensor with this shape and dtype"
            )
        with torch.no_grad():
            if is_sharded(value):
                parameter.copy_(value)
            else:
                part = self._part_of(parameter)
                part.write(value.detach().flatten()[part.start : part.start + part.count])
