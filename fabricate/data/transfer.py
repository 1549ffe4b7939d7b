"""Copies of batches to the device, in parallel with the computation: while the device works on one batch, the next is copied.

On CUDA, copies run on a separate stream. The loop reads a batch as soon as it has queued the work on the previous one. So no batch has to
be read ahead, which would change random states and the position in the epoch. Must not know: Accelerate, the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


class Transfer:
    """Moves batches to `device` with `send(batch)`, which must not wait for the copies. This rank alone; no wait."""

    def __init__(self, device: torch.device, send: Callable[[Any], Any]) -> None:
        self._device = device
        self._send = send
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Any) -> Any:
        if self._stream is None or opaque(batch):
            return self._send(batch)
        with torch.cuda.stream(self._stream):
            moved = self._send(batch)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in tensors(moved):
            # The copying stream must not reuse the memory of the tensor before the computation is done.
            tensor.record_stream(computing)
        return moved


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested mappings, lists, tuples and dataclasses."""
    if isinstance(batch, torch.Tensor):
        yield batch
    else:
        for part in _parts(batch):
            yield from tensors(part)


def opaque(batch: Any) -> bool:
    """Whether `batch` contains a sparse tensor, or an object with a `to` method, whose tensors cannot be found."""
    if isinstance(batch, torch.Tensor):
        # A sparse tensor consists of several tensors, which record_stream does not cover.
        return batch.layout is not torch.strided
    moves_itself = hasattr(batch, "to") and not isinstance(batch, Mapping | list | tuple)
    return moves_itself or any(opaque(part) for part in _parts(batch))


def _parts(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return list(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in fields(batch)]
    return []
