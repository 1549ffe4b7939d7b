"""Tensors as bytes on the host: read when they are written, or copied first so that training goes on meanwhile.

Must not know: which tensors are saved, what they are called, files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fabricate.checkpoint.format.directory import Chunk

_HUGE = 2**22  # from here on a copy takes whole huge pages, of 2 MiB


class Values:
    """The bytes of a tensor, on the host when they are asked for."""

    def __init__(self, tensor: Callable[[], torch.Tensor]) -> None:
        self.tensor = tensor

    def __call__(self) -> Any:
        return bytes_of(self.tensor())


class Staging:
    """Host memory for copies of chunks, so that training goes on while the copies are written. Kept from one save to the next:
    getting memory from the system takes longer than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}

    def copy(self, chunks: list[Chunk]) -> tuple[list[Chunk], Callable[[], None]]:
        """The same chunks over copies, and a function that waits until the copies are there. A copy from a GPU is only
        begun here: what is computed on its stream afterwards comes after it."""
        kept: dict[tuple[str, int], torch.Tensor] = {}
        staged, devices = [], set()
        for each in chunks:
            assert isinstance(each.data, Values)
            values = each.data.tensor().detach().reshape(-1)
            key = (each.tensor, each.start)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.dtype is not values.dtype or buffer.numel() != values.numel():
                buffer = _host_memory(values)
            kept[key] = buffer.copy_(values, non_blocking=values.is_cuda)
            if values.is_cuda:
                devices.add(values.device)
            staged.append(dataclasses.replace(each, data=held(buffer)))
        self._buffers = kept
        events = [torch.cuda.current_stream(device).record_event() for device in devices]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return staged, wait

    def copies(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The copies, 1-D on the host, by the name of their logical tensor; once they are there."""
        return ((name, buffer) for (name, _), buffer in self._buffers.items())


def _host_memory(values: torch.Tensor) -> torch.Tensor:
    """Memory on the host for a copy of `values`, 1-D; where it is large, in huge pages if the system has them: the first copy then waits
    for the kernel a fifth as long."""
    if values.is_cuda or values.nbytes < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(values.numel(), dtype=values.dtype, pin_memory=values.is_cuda)
    memory = mmap.mmap(-1, values.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=values.dtype)


def held(tensor: torch.Tensor) -> Values:
    return Values(lambda: tensor)


def bytes_of(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")  # type: ignore[arg-type]
