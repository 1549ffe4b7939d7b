"""Where a run is: counters that survive a resume, and moments that fall due. Plain numbers, no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from fabricate.records import Every


@dataclass(slots=True)
class Progress:
    """Counters of a run, the same on every rank.

    step: applied updates. epoch: the pass under way, from 0; at its end it counts completed passes. position: rows of the
    global order consumed in this pass (batches, for iterables of batches). micro_step: micro-batches of this rank in this
    pass. samples: rows consumed by all ranks since the beginning. tokens: sum of the weights of all ranks; behind by up to
    one log interval when weights are device tensors. skipped: updates that were not applied. seconds: time in `fit`.
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


class Due:
    """Tells at each update boundary whether an `Every` has come round since it was last asked. None never falls due.

    For steps the test is one comparison of integers. Moments are multiples of the amount counted from the beginning of the
    run, so that a resumed run keeps the rhythm of one that never stopped.
    """

    __slots__ = ("amount", "every", "next_step", "passed")

    def __init__(self, every: Every | None, progress: Progress) -> None:
        self.every = every
        self.amount = (every.amount * 60 if every.unit == "hours" else every.amount) if every else math.inf
        self.passed = 0
        self.next_step = math.inf
        self.start(progress)

    @property
    def by_clock(self) -> bool:
        """Whether rank 0's clock decides, so that the ranks have to agree."""
        return self.every is not None and self.every.unit in ("minutes", "hours")

    def start(self, progress: Progress) -> None:
        """Count from where `progress` is (after a resume)."""
        self.passed = int(self._value(progress) // self.amount)
        if self.every is not None and self.every.unit == "steps":
            self.next_step = (self.passed + 1) * self.amount

    def _value(self, progress: Progress) -> float:
        if self.every is None:
            return 0.0
        unit = self.every.unit
        if unit == "steps":
            return progress.step
        if unit == "epochs":
            return progress.epoch
        if unit == "tokens":
            return progress.tokens
        return progress.seconds / 60

    def reached(self, progress: Progress) -> bool:
        """True once per moment. Cheap: call it after every update and at every end of an epoch."""
        if self.next_step is not math.inf and progress.step < self.next_step:
            return False
        passed = int(self._value(progress) // self.amount)
        if passed <= self.passed:
            return False
        self.start(progress)
        return True
