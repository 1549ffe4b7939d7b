"""Where the time of a fit goes: steps and samples per second, the share spent waiting for data. In seconds.

Pure arithmetic on a clock; must not know what is trained, nor torch.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from fabricate.metrics.counters import Progress

T = TypeVar("T")


class Clock:
    """Adds the seconds of a fit to `Progress.seconds`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.start()

    def start(self) -> None:
        """Time from here counts."""
        self._at = time.monotonic()

    def tick(self) -> float:
        """Bring `Progress.seconds` up to now, which is returned: seconds of the monotonic clock."""
        now = time.monotonic()
        self._progress.seconds += now - self._at
        self._at = now
        return now


class Stopwatch:
    """Times the way from one log boundary to the next, its lap. This rank's; nothing is shared.

    `waited`: seconds of this lap spent waiting for data, which `timed` adds up.
    """

    def __init__(self) -> None:
        self.start(0, 0)

    def start(self, step: int, samples: int) -> None:
        """A lap begins, at these counts of updates and samples."""
        self._began, self._step, self._samples = time.perf_counter(), step, samples
        self._apart_since = self._began
        self.waited = self._apart = 0.0

    def timed(self, data: Iterable[T]) -> Iterator[T]:
        """The items of `data`; the time until each arrives counts as waiting for data."""
        began = time.perf_counter()
        for item in data:
            self.waited += time.perf_counter() - began
            yield item
            began = time.perf_counter()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What runs inside (an evaluation, a save) is no time of training."""
        began = self._apart_since = time.perf_counter()
        try:
            yield
        finally:
            self._apart += time.perf_counter() - began

    def apart_so_far(self) -> float:
        """Seconds since what runs apart began."""
        return time.perf_counter() - self._apart_since

    def lap(self, step: int, samples: int, communicated: float | None = None) -> dict[str, float]:
        """Rates and shares of training since the last lap, which ends here; a lap without an update has none.

        communicated: seconds per update in which communication hid behind nothing, where the strategy knows.
        """
        steps, rows, waited = step - self._step, samples - self._samples, self.waited
        seconds = time.perf_counter() - self._began - self._apart
        self.start(step, samples)
        if not steps or seconds <= 0:
            return {}
        rates = {
            "seconds_per_step": seconds / steps,
            "steps_per_second": steps / seconds,
            "samples_per_second": rows / seconds,
            "data_share": min(waited / seconds, 1.0),
        }
        if communicated is not None:
            rates["communication_share"] = min(communicated * steps / seconds, 1.0)
        return rates


class Moment(Protocol):
    """A point in the work that a device was given. As `torch.Event`, with timing."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds of the device's clock between this and `end`, both passed."""


class DeviceStopwatch(Stopwatch):
    """A `Stopwatch` of a host that runs ahead of its device: waiting is only the time in which the device had nothing to do.

    A moment is queued when a batch is asked for, and another when it is there. Both are behind the work queued before and before that
    of the batch; so what lies between them on the device's clock is 0 as long as it still works when the batch arrives.
    """

    def __init__(self, mark: Callable[[], Moment]) -> None:
        """`mark` queues a moment. None of it waits."""
        self._mark = mark
        self._waits: deque[tuple[Moment, Moment]] = deque()
        super().__init__()

    def timed(self, data: Iterable[T]) -> Iterator[T]:
        begins = self._mark()
        for item in data:
            self._waits.append((begins, self._mark()))
            self._count()
            yield item
            begins = self._mark()

    def lap(self, step: int, samples: int, communicated: float | None = None) -> dict[str, float]:
        self._count()
        return super().lap(step, samples, communicated)

    def _count(self) -> None:
        """Add up the waits that the device has passed; what is in progress counts in the lap that it ends in."""
        while self._waits and self._waits[0][1].query():
            began, there = self._waits.popleft()
            self.waited += began.elapsed_time(there) / 1000
