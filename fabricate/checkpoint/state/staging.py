"""Tensors as bytes on the host: read while they are written, or copied first so that training continues during the write.

Must not know: which tensors are saved, what they are called, files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import mmap
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fabricate.checkpoint.format.directory import ITEM_SIZES, Chunk
from fabricate.data.flat_bytes import flat_bytes

_HUGE = 2**22  # from this size on, copies use huge pages of 2 MiB
_ALIGNMENT = 64
_POLL_SECONDS = 0.001


class Values:
    """A callable that returns the bytes of a tensor on the host."""

    def __init__(self, tensor: Callable[[], torch.Tensor]) -> None:
        self.tensor = tensor

    def __call__(self) -> Any:
        return bytes_of(self.tensor())


class Staging:
    """Host memory for copies of chunks, so that training continues while the copies are written. One block of memory for all copies is kept
    from one save to the next, because allocating memory takes longer than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copies: list[tuple[str, torch.Tensor]] = []

    def copy(
        self, chunks: Sequence[Chunk], weights: Callable[[str], bool] = lambda name: True
    ) -> tuple[list[Chunk], Callable[[], None]]:
        """The same chunks with copied data, and a function that waits until the copies are complete, which the writing thread calls.
        `weights`: returns whether a logical tensor changes only in the optimizer's step."""
        sizes = [each.count * ITEM_SIZES[each.dtype] for each in chunks]
        starts = [0, *itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        if starts[-1] > self._memory.numel():
            # Frees the old block before the new one is allocated.
            self._copies, self._memory = [], torch.empty(0, dtype=torch.uint8)
            self._memory = self._allocate(starts[-1])
        self._copies, staged = [], []
        for each, start, size in zip(chunks, starts, sizes, strict=False):
            assert isinstance(each.data, Values)
            values = each.data.tensor().detach().reshape(-1)
            buffer = self._memory[start : start + size].view(values.dtype)
            self._put(buffer, values, weights(each.tensor))
            self._copies.append((each.tensor, buffer))
            staged.append(dataclasses.replace(each, data=held(buffer)))
        return staged, self._begun()

    def copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The copies, 1-D on the host, with the names of their logical tensors. Complete only after the wait."""
        return iter(self._copies)

    def before_step(self) -> None:
        """Called before the optimizer changes weights, which must be copied first. The host does not wait."""

    def _allocate(self, size: int) -> torch.Tensor:
        return _host_memory(size)

    def _put(self, buffer: torch.Tensor, values: torch.Tensor, weights: bool) -> None:
        buffer.copy_(values)

    def _begun(self) -> Callable[[], None]:
        """Called when the copies are queued. Returns a function that waits for them."""
        return lambda: None


class DeviceStaging(Staging):
    """`Staging` for chunks on `device`, where copies are only queued. Weights and optimizer state are copied on a separate stream, in
    parallel with the next forward and backward, and the optimizer's step waits on the device for these copies. Other tensors may change in
    a forward, so they are copied in order on the current stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._beside = torch.Stream(device)
        self._in_use: list[torch.Tensor] = []
        """The tensors that are being copied; holding them prevents the reuse of their memory."""
        self._weights_copied: torch.Event | None = None

    def copy(
        self, chunks: Sequence[Chunk], weights: Callable[[str], bool] = lambda name: True
    ) -> tuple[list[Chunk], Callable[[], None]]:
        self._in_use = []
        self._beside.wait_stream(torch.accelerator.current_stream(self._device))
        return super().copy(chunks, weights)

    def before_step(self) -> None:
        copied, self._weights_copied = self._weights_copied, None
        if copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(copied)

    def _allocate(self, size: int) -> torch.Tensor:
        return _pinned_memory(size, self._device)

    def _put(self, buffer: torch.Tensor, values: torch.Tensor, weights: bool) -> None:
        if values.is_cpu:  # offloaded to the host
            buffer.copy_(values)
            return
        with self._beside if weights else contextlib.nullcontext():
            buffer.copy_(values, non_blocking=True)
        self._in_use.append(values)

    def _begun(self) -> Callable[[], None]:
        in_order = torch.accelerator.current_stream(self._device).record_event()
        beside = self._weights_copied = self._beside.record_event()

        def wait() -> None:
            # The index belongs to this thread, which would otherwise create a context on the first device.
            torch.accelerator.set_device_index(self._device)
            while not (in_order.query() and beside.query()):
                time.sleep(_POLL_SECONDS)  # `Event.synchronize` would keep a core busy
            self._in_use = []

        return wait


def _host_memory(size: int) -> torch.Tensor:
    """`size` bytes of memory on the host. A large block uses huge pages if the system has them: the first copy then spends a fifth of the
    time in the kernel."""
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pinned_memory(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes of pinned host memory, to which `device` can copy without the host."""
    if device.type != "cuda" or size < _HUGE:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory = _host_memory(size)  # torch's pinned allocator would round the size up to a power of two
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    place = memory.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(place, size, 0)))
    weakref.finalize(memory, runtime.cudaHostUnregister, place)
    return memory


class _Ahead:
    """A callable that returns the bytes of a tensor on a device. The call for one tensor begins the copy of the following one."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._begun: tuple[torch.Tensor, torch.Event | None] | None = None
        self.following: _Ahead | None = None

    def begin(self) -> tuple[torch.Tensor, torch.Event | None]:
        """Queue the copy to the host."""
        tensor = self._values.tensor().detach()
        if tensor.is_cpu:
            self._begun = tensor, None
        else:
            copy = tensor.reshape(-1).contiguous().to("cpu", non_blocking=True)
            self._begun = copy, torch.accelerator.current_stream(tensor.device).record_event()
        return self._begun

    def __call__(self) -> Any:
        copy, arrived = self._begun or self.begin()
        self._begun = None
        if self.following is not None:
            self.following.begin()
        if arrived is not None:
            arrived.synchronize()
        return bytes_of(copy)


def read_ahead(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same chunks, sorted by falling item size, the order in which they are written. While one is written, the next is copied to the
    host."""
    ordered = sorted(chunks, key=lambda each: -ITEM_SIZES[each.dtype])
    data = []
    for each in ordered:
        assert isinstance(each.data, Values)
        data.append(_Ahead(each.data))
    for one, following in itertools.pairwise(data):
        one.following = following
    return [dataclasses.replace(each, data=own) for each, own in zip(ordered, data, strict=True)]


def held(tensor: torch.Tensor) -> Values:
    return Values(lambda: tensor)


def bytes_of(tensor: torch.Tensor) -> Any:
    flat = flat_bytes(tensor).cpu()
    return memoryview(flat.numpy() if flat.numel() else b"")  # type: ignore[arg-type]
