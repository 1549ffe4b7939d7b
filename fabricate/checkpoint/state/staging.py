"""Tensors as bytes on the host: read when they are written, or copied first so that training continues meanwhile.

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

_HUGE = 2**22  # from here on a copy takes whole huge pages, of 2 MiB
_ALIGNMENT = 64
_POLL_SECONDS = 0.001


class Values:
    """The bytes of a tensor, on the host when they are asked for."""

    def __init__(self, tensor: Callable[[], torch.Tensor]) -> None:
        self.tensor = tensor

    def __call__(self) -> Any:
        return bytes_of(self.tensor())


class Staging:
    """Host memory for copies of chunks, so that training continues while the copies are written. One block for all of them, kept from one
    save to the next: getting memory from the system takes longer than the copy."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copies: list[tuple[str, torch.Tensor]] = []

    def copy(
        self, chunks: Sequence[Chunk], weights: Callable[[str], bool] = lambda name: True
    ) -> tuple[list[Chunk], Callable[[], None]]:
        """The same chunks over copies, and a function that waits until the copies are there, for the thread that writes. `weights`: whether
        a logical tensor changes in the optimizer's step only."""
        sizes = [each.count * ITEM_SIZES[each.dtype] for each in chunks]
        starts = [0, *itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        if starts[-1] > self._memory.numel():
            self._copies, self._memory = [], torch.empty(0, dtype=torch.uint8)  # the old one goes first
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
        """The copies, 1-D on the host, by the name of their logical tensor; once they are there."""
        return iter(self._copies)

    def before_step(self) -> None:
        """Called before the optimizer changes weights: they change once they are copied. No wait."""

    def _allocate(self, size: int) -> torch.Tensor:
        return _host_memory(size)

    def _put(self, buffer: torch.Tensor, values: torch.Tensor, weights: bool) -> None:
        buffer.copy_(values)

    def _begun(self) -> Callable[[], None]:
        """The copies are queued; what is returned waits for them."""
        return lambda: None


class DeviceStaging(Staging):
    """`Staging` for chunks on `device`, whose copies are queued only. Those of weights and of optimizer state run beside the forward and
    backward of the next update, on a stream of their own, and the optimizer's step waits for them on the device; anything else may
    change in a forward, and is copied in the order of the computation."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._beside = torch.Stream(device)
        self._in_use: list[torch.Tensor] = []
        """What is being copied: its memory may not be used again meanwhile."""
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
        if values.is_cpu:  # offloaded
            buffer.copy_(values)
            return
        with self._beside if weights else contextlib.nullcontext():
            buffer.copy_(values, non_blocking=True)
        self._in_use.append(values)

    def _begun(self) -> Callable[[], None]:
        in_order = torch.accelerator.current_stream(self._device).record_event()
        beside = self._weights_copied = self._beside.record_event()

        def wait() -> None:
            torch.accelerator.set_device_index(
                self._device
            )  # of this thread: else it would open one on the first device
            while not (in_order.query() and beside.query()):
                time.sleep(_POLL_SECONDS)  # an event's own wait keeps a core busy
            self._in_use = []

        return wait


def _host_memory(size: int) -> torch.Tensor:
    """`size` bytes of memory on the host; where it is large, in huge pages if the system has them: the first copy then waits for the kernel
    a fifth as long."""
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pinned_memory(size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes of memory on the host that `device` copies to by itself."""
    if device.type != "cuda" or size < _HUGE:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    memory = _host_memory(size)  # torch's own would round the size up to a power of two
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    place = memory.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(place, size, 0)))
    weakref.finalize(memory, runtime.cudaHostUnregister, place)
    return memory


class _Ahead:
    """The bytes of a tensor on a device, whose copy is begun when those before it are asked for."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._begun: tuple[torch.Tensor, torch.Event | None] | None = None
        self.following: _Ahead | None = None

    def begin(self) -> tuple[torch.Tensor, torch.Event | None]:
        """Queue the copy."""
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
    """The same chunks of a device, for a writer that takes them by falling item size: while it writes one, the next is on its way."""
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
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")  # type: ignore[arg-type]
