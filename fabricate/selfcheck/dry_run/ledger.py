"""The memory of tensors that are alive: in total, by kind, and its peak.

Must not know: what runs, ranks, strategies. Sizes are those of torch's storages; overhead of the allocator is not included.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
BUFFERS, BATCH, KEPT = "buffers", "batch", "kept between updates"
GATHERED, SENT, ACTIVATIONS = "gathered units", "gradients in flight", "activations"
KINDS = (PARAMETERS, GRADIENTS, STATE, KEPT, BUFFERS, BATCH, GATHERED, SENT, ACTIVATIONS)
"""The kinds of memory, in the order of the report. Activations are all tensors of no other kind: those that backward needs, and
temporaries."""


@dataclass(slots=True)
class _Held:
    """A storage that is alive."""

    reference: weakref.ref[Any]
    size: int
    kind: str


class Ledger:
    """The bytes of all storages that were seen and still exist. `see` and `ran` have to be called after each operation."""

    def __init__(self) -> None:
        self._alive: dict[int, _Held] = {}
        self.by_kind: Counter[str] = Counter()
        self.bytes = 0
        self.gradients: Callable[[], Iterable[torch.Tensor]] = tuple
        """A function that returns the current gradients. It is called at looks, because no operation marks a tensor as a gradient."""
        self.in_forward, self.watching = False, True
        self.begin()

    def begin(self, looks: Iterable[int] = ()) -> None:
        """Restart the count of operations. looks: the numbers of the operations after which memory is sorted by kind."""
        self.operations = 0
        self.peak = (0, 0)
        """The largest total of bytes, and the number of the operation after which it occurred."""
        self.most_activations = (0, 0)
        """The same for activations while a forward runs."""
        self.looks: dict[int, dict[str, int] | None] = dict.fromkeys(looks)

    def see(self, tensor: torch.Tensor, kind: str = "") -> None:
        """Record that `tensor` exists. kind: its kind, if it is known; otherwise a new storage counts as activations."""
        if not self.watching or tensor.device.type == "meta":
            return
        storage: Any = tensor.untyped_storage()
        key: int = storage._cdata
        held = self._alive.get(key)
        if held is None:
            reference = weakref.ref(storage, lambda _: self._freed(key))
            held = self._alive[key] = _Held(reference, storage.nbytes(), kind or ACTIVATIONS)
            self.bytes += held.size
            self.by_kind[held.kind] += held.size
        elif kind and held.kind != kind:
            self._move(held, kind)

    def ran(self) -> None:
        """Record that an operation ran, after its results were seen."""
        self.operations += 1
        if self.bytes > self.peak[0]:
            self.peak = (self.bytes, self.operations)
        if self.in_forward and self.by_kind[ACTIVATIONS] > self.most_activations[0]:
            self.most_activations = (self.by_kind[ACTIVATIONS], self.operations)
        if self.operations in self.looks:
            self.looks[self.operations] = self._sorted()

    def sort(self, known: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Sort the storages between updates: by kind, as in `known`; others count as kept between updates."""
        for held in self._alive.values():
            self._move(held, GATHERED if held.kind == GATHERED else KEPT)
        for kind, tensors in known.items():
            for tensor in tensors:
                self.see(tensor, kind)

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """The bytes of the storages of `tensors`, each counted once."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(held.size for key in keys if (held := self._alive.get(key)))

    def _sorted(self) -> dict[str, int]:
        by_kind = Counter(self.by_kind)
        for key in {tensor.untyped_storage()._cdata for tensor in self.gradients()}:
            if held := self._alive.get(key):
                by_kind[held.kind] -= held.size
                by_kind[GRADIENTS] += held.size
        return {kind: by_kind[kind] for kind in KINDS if by_kind[kind]}

    def _move(self, held: _Held, kind: str) -> None:
        self.by_kind[held.kind] -= held.size
        self.by_kind[kind] += held.size
        held.kind = kind

    def _freed(self, key: int) -> None:
        if held := self._alive.pop(key, None):
            self._resize(held, 0)

    def _resize(self, held: _Held, size: int) -> None:
        self.bytes += size - held.size
        self.by_kind[held.kind] += size - held.size
        held.size = size

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """A context that records resizes of storages. FSDP frees and allocates the memory of gathered parameters in this way, without
        operations."""
        original: Any = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            answer = original(storage, size)
            if held := self._alive.get(storage._cdata):
                self._resize(held, storage.nbytes())
            return answer

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
