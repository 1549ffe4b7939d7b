"""Operations on tensors that have a shape, a dtype and no memory: torch's fake tensors, on the CPU.

Results computed from a fake tensor are fake, and so are new floating-point tensors with at least one dimension. Integer tensors and 0-dim
tensors are real, so that masks, positions and counters have values. Reading a value of a fake tensor gives 1 or False. If a shape depends
on values, the largest possible shape is used.

Must not know: the computation, ranks, strategies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves

from fabricate.errors import ConfigurationError

_MAKERS = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "empty_permuted", "full", "full_like", "normal"),
        *("ones", "ones_like", "zeros", "zeros_like", "rand", "rand_like", "randn", "randn_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    }
)
"""Operations that make a tensor from a shape, without other tensors' values."""

_READS = frozenset({"aten._local_scalar_dense.default", "aten.item.default", "aten.is_nonzero.default"})


class Fakes:
    """The function `run` runs operations, with fake tensors where they are needed."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._special: dict[str, Callable[..., Any]] = {
            "aten.equal.default": lambda *tensors: True,
            "aten.nonzero.default": self._nonzero,
            "aten.masked_select.default": self._masked_select,
            "aten.index.Tensor": self._index,
            # torch's fake result would be a new tensor, which a real rank does not allocate.
            "_c10d_functional.wait_tensor.default": lambda tensor: tensor,
            # DDP reads the result from the work object, and torch's fake group provides none.
            "c10d.allreduce_.default": lambda tensors, *rest, **options: (tensors, _finished(tensors)),
        }

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor of this shape and dtype."""
        with self._mode:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of the operation `func`."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        if not inputs and func.overloadpacket.__name__ in _MAKERS:
            with self._mode:
                result = func(*args, **kwargs)
            if result.device.type == "cpu" and result.ndim and (result.is_floating_point() or result.is_complex()):
                return result
        if not inputs:
            return func(*args, **kwargs)
        name = str(func)
        if name in _READS:
            return _value(inputs[0].dtype)
        if special := self._special.get(name):
            return special(*args, **kwargs)
        try:
            with self._mode:
                return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as exc:
            raise ConfigurationError(
                f"a dry run has shapes but no values, and {func} needs values. Avoid this operation in the script, or measure "
                "a real run on few ranks"
            ) from exc

    def _nonzero(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty((tensor.numel(), tensor.ndim), torch.int64)

    def _masked_select(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
        return self.empty((math.prod(shape),), tensor.dtype)

    def _index(self, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The result of indexing, where a mask selects all of its elements."""
        places: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                places += [self.empty((index.numel(),), torch.int64) for _ in range(index.ndim)]
            else:
                places.append(index)
        with self._mode:
            rows: torch.Tensor = torch.ops.aten.index.Tensor(tensor, places)
        return rows


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no memory and no values."""
    return isinstance(tensor, FakeTensor)


def _value(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 1


def _finished(tensors: list[torch.Tensor]) -> Any:
    """The work object of a finished collective with the result `tensors`."""
    result: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    result.set_result(tensors)
    return _create_work_from_future(result).boxed()
