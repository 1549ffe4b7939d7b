"""The part of a logical tensor that a rank holds, as a range of elements. Initial values and checkpoints use such parts.

Owns: the position of a DTensor's shard in the whole, and the exchange between ranks that hold columns of the same rows. Must not know:
strategies, checkpoints, how a strategy chooses the cut of a parameter.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from fabricate.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


class Part:
    """The part of a logical tensor that this rank holds: a range of its elements in row-major order."""

    memory: torch.Tensor
    """The detached tensor in which this rank holds its elements, of any shape. Use it for element-wise computation."""
    start: int
    """The index of the first element of the range in the whole tensor, flattened."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    replicated: bool
    """Whether every rank holds the whole tensor."""
    copy: int
    """The index of this rank among the ranks that hold the same range (all ranks if `replicated`)."""
    copies: int
    """The number of ranks that hold the same range."""

    def __init__(
        self,
        values: torch.Tensor,
        start: int,
        shape: tuple[int, ...],
        replicated: bool,
        copy: int = 0,
        copies: int = 1,
    ) -> None:
        """`values`: the memory, which holds the range."""
        self.memory, self.start, self.shape, self.replicated = values, start, shape, replicated
        self.copy, self.copies = copy, copies

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.memory.dtype

    @property
    def count(self) -> int:
        """The number of elements in the range."""
        return self.memory.numel()

    @property
    def in_place(self) -> bool:
        """Whether `values` is `memory` itself; then reading and writing need no communication."""
        return True

    @property
    def values(self) -> torch.Tensor:
        """The elements of the range, in any shape. If not `in_place`: a copy, which is created once, by all ranks together."""
        return self.memory

    def write(self, values: torch.Tensor) -> None:
        """Write `values`, of any shape, dtype and device, to the elements of the range. If not `in_place`: all ranks. Call
        `Strategy.after_load` after the last write."""
        import torch

        with torch.no_grad():
            self.memory.copy_(values.reshape(self.memory.shape))

    def over(self, memory: torch.Tensor) -> Part:
        """The same range of another tensor whose whole has the same shape. `memory`: this rank's memory of that tensor, shaped like
        the memory of this part."""
        return Part(memory, self.start, self.shape, self.replicated, self.copy, self.copies)


class Columns(Part):
    """A share of the rows of a tensor that is also cut by columns: the ranks that hold columns of the same rows exchange values, so that
    each has whole rows.

    `block` is this rank's memory (rows, columns, ...); rank t of the `group` owns the t-th share of the rows, which begin at
    row `first_row` of the whole.
    """

    def __init__(
        self, block: torch.Tensor, first_row: int, shape: tuple[int, ...], group: Any, copy: int, copies: int
    ) -> None:
        import torch.distributed as dist

        rank, number = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._first_row = group, first_row
        bounds = [len(block) * t // number for t in range(number + 1)]
        self._rows = [end - begin for begin, end in itertools.pairwise(bounds)]
        width = -(-shape[1] // number)
        self._widths = [max(0, min(width, shape[1] - t * width)) for t in range(number)]
        self._own = self._rows[rank]
        self._deep = math.prod(shape[2:])
        super().__init__(
            block, (first_row + bounds[rank]) * math.prod(shape[1:]), shape, replicated=False, copy=copy, copies=copies
        )
        self._values: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return self._own * math.prod(self.shape[1:])

    @property
    def in_place(self) -> bool:
        return False

    @property
    def values(self) -> torch.Tensor:
        import torch

        if self._values is None:
            width = self.memory.numel() // max(1, len(self.memory))
            pieces = self._exchange(
                self.memory.reshape(-1),
                [rows * width for rows in self._rows],
                [self._own * columns * self._deep for columns in self._widths],
            )
            blocks = [p.reshape(self._own, -1) for p in pieces] if self._own else []
            self._values = torch.cat(blocks, dim=1) if blocks else self.memory.new_empty(0)
        return self._values

    def write(self, values: torch.Tensor) -> None:
        import torch

        self._values = None
        values = values.detach().to(self.memory.dtype).reshape(self._own, -1)
        cut = torch.split(values, [columns * self._deep for columns in self._widths], dim=1)
        width = self.memory.numel() // max(1, len(self.memory))
        pieces = self._exchange(
            torch.cat([piece.reshape(-1) for piece in cut]),
            [piece.numel() for piece in cut],
            [rows * width for rows in self._rows],
        )
        with torch.no_grad():
            self.memory.copy_(torch.cat(pieces).reshape(self.memory.shape))

    def over(self, memory: torch.Tensor) -> Part:
        return Columns(memory, self._first_row, self.shape, self._group, self.copy, self.copies)

    def _exchange(self, flat: torch.Tensor, sent: list[int], received: list[int]) -> list[torch.Tensor]:
        """Send `sent[t]` elements of `flat`, in order, to rank t of the group; return the elements from each rank. Sends bytes, because not
        every backend sends every dtype, and uses the device of the group, because shards may be in host memory."""
        import torch
        import torch.distributed as dist

        from fabricate.data.flat_bytes import flat_bytes

        size = flat.element_size()
        backends = dist.get_backend_config(self._group)
        device = flat.device if flat.device.type in backends else torch.device("cuda", torch.cuda.current_device())
        data = flat_bytes(flat).to(device)
        answer = data.new_empty(sum(received) * size)
        dist.all_to_all_single(answer, data, [n * size for n in received], [n * size for n in sent], group=self._group)
        return list(torch.split(answer.to(flat.device).view(flat.dtype), received))


def part_of(tensor: torch.Tensor) -> Part:
    """This rank's part of a DTensor that is cut in dimension 0, and in dimension 1 by at most one mesh dimension; for any other tensor, the
    whole. Raises ValueError for other placements. This rank alone."""
    if not is_sharded(tensor):
        return Part(tensor.detach(), 0, tuple(tensor.shape), replicated=True)
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    cut = [getattr(placement, "dim", 0) for placement in tensor.placements]
    if any(dimension > 1 for dimension in cut) or cut.count(1) > 1:
        raise ValueError(
            f"a tensor with the placements {tensor.placements} cannot be saved in parts: only shards over the first dimension, and "
            "once over the second, are supported; use Shard(0), Shard(1) or Replicate()"
        )
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    local: torch.Tensor = tensor.to_local().detach()
    copy, copies = 0, 1
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            number = mesh.size(dimension)
            copy, copies = copy * number + mesh.get_local_rank(dimension), copies * number
    if 1 in cut:
        return Columns(local, offset[0], shape, mesh.get_group(cut.index(1)), copy, copies)
    start = offset[0] * (tensor.numel() // tensor.shape[0]) if local.numel() else 0
    return Part(local, start, shape, False, copy, copies)


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Whether `value` is a DTensor. Does not import the module of DTensor, which takes half a second: before it is imported, no DTensor
    exists."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def refuse_scripted(module: torch.nn.Module, strategy: str) -> None:
    """Raise `ConfigurationError` for modules of torch.jit with tensors, which a strategy that shards parameters cannot replace."""
    import torch

    scripted = [(name, child) for name, child in module.named_modules() if isinstance(child, torch.jit.ScriptModule)]
    for name, child in scripted:
        if next(itertools.chain(child.parameters(), child.buffers()), None) is not None:
            raise ConfigurationError(
                f"strategy={strategy!r} cannot replace the weights of {name}, a module of torch.jit (scripted or traced). Use the original "
                "module, or strategy='ddp' or 'single'"
            )


def broadcast(tensor: torch.Tensor) -> None:
    """Copy rank 0's values of `tensor` to every rank, in place. All ranks. Sends contiguous bytes, because NCCL does not support every
    dtype and layout."""
    import torch.distributed as dist

    from fabricate.data.flat_bytes import flat_bytes

    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dist.broadcast(flat_bytes(values), src=0)
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values)


def is_wrapper(value: object) -> bool:
    """Whether `value` is a tensor subclass that consists of other tensors, such as the state of low-bit optimizers. Its shape differs from
    that of these tensors."""
    return hasattr(value, "__tensor_flatten__") and not is_sharded(value)


def inner_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that hold the values of `tensor`: itself, or the tensors of which a tensor subclass consists."""
    if not is_wrapper(tensor):
        if tensor is not None:  # None: a subclass may leave out some of its tensors
            yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from inner_tensors(getattr(tensor, name))
