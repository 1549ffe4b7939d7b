"""Where a run is: counters that survive a resume, and moments that fall due. Plain numbers, no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fabricate.values import Every


@dataclass(slots=True)
class Progress:
    """Counters of a run, the same on every rank.

    step: applied updates. epoch: the pass in progress, from 0; at its end it counts completed passes. position: rows of the
    global order consumed in this pass (batches, for iterables of batches). micro_step: micro-batches of this rank in this
    pass. samples: rows consumed by all ranks since the beginning. tokens: sum of the weights of all ranks; behind by up to
    one log interval and an update when weights are device tensors. skipped: updates that were not applied. seconds: time in `fit`.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    micro_step: int = 0
    samples: int = 0
    tokens: float = 0.0
    skipped: int = 0
    seconds: float = 0.0

    def state(self) -> dict[str, Any]:
        """As stored in a checkpoint."""
        return asdict(self)

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state()` gave."""
        for name in asdict(self):
            setattr(self, name, type(getattr(self, name))(state[name]))


_COUNTERS = {
    "steps": ("step", 1),
    "epochs": ("epoch", 1),
    "tokens": ("tokens", 1),
    "minutes": ("seconds", 60),
    "hours": ("seconds", 3600),
}
"""The counter that a unit of `Every` reads, and how much of it makes one."""


class Due:
    """Tells at each update boundary whether an `Every` is due since it was last asked. None never falls due.

    Asking is one comparison, which the loop makes for several at once through `next`. Moments are multiples of the amount
    counted from the beginning of the run, so that a resumed run keeps the rhythm of one that never stopped.
    """

    __slots__ = ("amount", "by_clock", "counter", "next")

    def __init__(self, every: Every | None, progress: Progress, updates_per_epoch: int | None = None) -> None:
        """A share of an epoch falls due by steps; `updates_per_epoch` is needed for it."""
        self.counter, size = _COUNTERS[every.unit] if every is not None else ("step", 1)
        self.amount = every.amount * size if every is not None else math.inf
        if self.counter == "epoch" and self.amount < 1:
            assert updates_per_epoch is not None
            self.counter, self.amount = "step", max(1.0, self.amount * updates_per_epoch)
        self.by_clock = self.counter == "seconds"
        """Rank 0's clock decides: the ranks have to agree."""
        self.next = math.inf
        """The count at which it falls due."""
        self.start(progress)

    def start(self, progress: Progress) -> None:
        """Count from where `progress` is."""
        if self.amount is not math.inf:
            self.next = (getattr(progress, self.counter) // self.amount + 1) * self.amount

    def reached(self, progress: Progress) -> bool:
        """True once per moment."""
        if getattr(progress, self.counter) < self.next:
            return False
        self.start(progress)
        return True


class Tokens:
    """Adds weights to `Progress.tokens` without a wait: those on a device are added up there until they are read."""

    def __init__(self, progress: Progress, exact: Any) -> None:
        """`exact`: the dtype in which a device adds up; float32 would miss whole numbers from 2**24 on."""
        self._progress = progress
        self._exact = exact
        self._unread: Any = 0

    def add(self, weight: Any) -> None:
        """Count `weight`, a number or a 0-dim tensor."""
        if getattr(weight, "is_cpu", True):
            self._progress.tokens += float(weight)
        else:
            self._unread = self._unread + weight.to(self._exact)

    def take(self) -> Any:
        """What was added up on the device and not read yet; it is the caller's to read and to add to `Progress.tokens`."""
        unread, self._unread = self._unread, 0
        return unread

    def read(self) -> None:
        """Bring `Progress.tokens` up to now. Waits for the device."""
        self._progress.tokens += float(self.take())
