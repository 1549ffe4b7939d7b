"""The progress of a run: counters that continue after a resume, and the moments at which something is due. Plain numbers, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from fabricate.values import Every


@dataclass(slots=True)
class Progress:
    """Counters of a run, the same on every rank.

    step: applied updates. epoch: the pass in progress, from 0; at its end it counts completed passes. position: rows of the global order
    consumed in this pass; a batch that does not show its rows counts as one. micro_step: micro-batches of this rank in this pass. samples:
    rows consumed by all ranks since the beginning. tokens: the sum of the weights of all ranks; if weights are device tensors, it lags
    behind by up to one log interval and one update. skipped: updates that were not applied. seconds: time in `fit`.
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
        """The counters as a dictionary, for a checkpoint."""
        return asdict(self)

    def load(self, state: dict[str, Any]) -> None:
        """Set the counters to what `state()` returned."""
        for name in asdict(self):
            setattr(self, name, type(getattr(self, name))(state[name]))


_COUNTERS = {
    "steps": ("step", 1),
    "epochs": ("epoch", 1),
    "tokens": ("tokens", 1),
    "minutes": ("seconds", 60),
    "hours": ("seconds", 3600),
}
"""For each unit of `Every`, the counter that measures it, and the amount of this counter that makes one unit."""


class Due:
    """Finds at each boundary whether an `Every` has become due since the last check. `every=None` is never due.

    A check is one comparison; for several objects, the loop makes a single one, with the smallest `next`. An `Every` is due at the
    multiples of its amount, counted from the beginning of the run, so that a resumed run keeps the rhythm of one that never stopped.
    """

    __slots__ = ("_windows", "amount", "by_clock", "counter", "next")

    def __init__(
        self,
        every: Every | None,
        progress: Progress,
        updates_per_epoch: int | None = None,
        windows: Callable[[Progress], int] | None = None,
    ) -> None:
        """A share of an epoch is counted in windows: parts of the data that were used for an update, whether it was applied or skipped. It
        requires `updates_per_epoch` and `windows`, which returns the number of windows since the beginning of the run."""
        self._windows = windows
        self.counter, size = _COUNTERS[every.unit] if every is not None else ("step", 1)
        self.amount: float | Fraction = every.amount * size if every is not None else math.inf
        if self.counter == "epoch" and self.amount < 1:
            assert updates_per_epoch is not None
            # As a fraction, because ten times the float 0.1 * 12 is more than 12.
            share = Fraction(self.amount).limit_denominator(1_000_000)
            self.counter, self.amount = "windows", max(Fraction(1), share * updates_per_epoch)
        self.by_clock = self.counter == "seconds"
        """Whether rank 0's clock decides, so that the ranks have to agree."""
        self.next = math.inf
        """The value of the counter at which it is due."""
        self.start(progress)

    def start(self, progress: Progress) -> None:
        """Set `next` to the first multiple after the present value of the counter."""
        if self.amount is not math.inf:
            following = (self.value(progress) // self.amount + 1) * self.amount
            self.next = math.ceil(following) if isinstance(following, Fraction) else following

    def value(self, progress: Progress) -> float:
        """The present value of the counter."""
        if self.counter == "windows":
            assert self._windows is not None
            return self._windows(progress)
        value: float = getattr(progress, self.counter)
        return value

    def reached(self, progress: Progress) -> bool:
        """Whether it is due. True only once per multiple."""
        if self.value(progress) < self.next:
            return False
        self.start(progress)
        return True


class Tokens:
    """Adds weights to `Progress.tokens` without a wait: weights on a device are added up there until `read`."""

    def __init__(self, progress: Progress, exact: Any) -> None:
        """`exact`: the dtype of the sum on a device; float32 cannot hold all integers above 2**24."""
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
        """Return the unread sum on the device, and reset it. The caller must read it and add it to `Progress.tokens`."""
        unread, self._unread = self._unread, 0
        return unread

    def read(self) -> None:
        """Add the unread sum on the device to `Progress.tokens`. Waits for the device."""
        self._progress.tokens += float(self.take())
