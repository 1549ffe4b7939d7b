"""Batches to the device, beside the computation: while the device works on one, the copy of the next is in progress.

On CUDA a copy gets a stream of its own. The loop asks for a batch as soon as it has queued the work on the one before, so
nothing has to be read ahead of its turn, which random state and position in an epoch would notice. Must not know:
Accelerate, the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


class Transfer:
    """Moves batches to `device` with `send(batch)`, which does not wait for the copies; a call is for one rank, no wait."""

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
            tensor.record_stream(
                computing
            )  # its memory is not the copying stream's to reuse before the computation is done
        return moved


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested mappings, lists, tuples and dataclasses."""
    if isinstance(batch, torch.Tensor):
        yield batch
    else:
        for part in _parts(batch):
            yield from tensors(part)


def opaque(batch: Any) -> bool:
    """Whether something in `batch` moves by a `to` of its own, so that the tensors in it cannot be found, or is a sparse tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.layout is not torch.strided  # a sparse one is several, none of which knows another stream
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
