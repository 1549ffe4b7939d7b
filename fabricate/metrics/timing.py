"""The time of a fit: steps and samples per second, and the share of the time spent waiting for data. Times are in seconds.

Must not know what is trained, nor torch.
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
        """Count time from here on."""
        self._at = time.monotonic()

    def tick(self) -> float:
        """Add the time since the last call to `Progress.seconds`. Returns the present time of the monotonic clock."""
        now = time.monotonic()
        self._progress.seconds += now - self._at
        self._at = now
        return now


class Stopwatch:
    """Measures laps: the time from one log boundary to the next. Each rank has its own; nothing is shared.

    `waited`: the seconds of this lap spent waiting for data, which `timed` adds up.
    """

    def __init__(self) -> None:
        self.start(0, 0)

    def start(self, step: int, samples: int) -> None:
        """Begin a lap at these counts of updates and samples."""
        self._began, self._step, self._samples = time.perf_counter(), step, samples
        self._apart_since = self._began
        self.waited = self._apart = 0.0

    def timed(self, data: Iterable[T]) -> Iterator[T]:
        """Yield the items of `data`. The time until each arrives counts as waiting for data."""
        began = time.perf_counter()
        for item in data:
            self.waited += time.perf_counter() - began
            yield item
            began = time.perf_counter()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """A context whose time does not count as training: an evaluation, a save."""
        began = self._apart_since = time.perf_counter()
        try:
            yield
        finally:
            self._apart += time.perf_counter() - began

    def apart_so_far(self) -> float:
        """The seconds since the last `apart` began."""
        return time.perf_counter() - self._apart_since

    def lap(self, step: int, samples: int, communicated: float | None = None) -> dict[str, float]:
        """End the lap. Returns the rates and shares of training in it; empty for a lap without an update.

        communicated: the seconds per update in which communication did not overlap with computation; None if the strategy does not measure
        them.
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
    """A point in a device's queue of work, such as a `torch.Event` with timing."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds on the device's clock from this moment to `end`. The device must have passed both."""


class DeviceStopwatch(Stopwatch):
    """A `Stopwatch` for a host that runs ahead of its device: only the time in which the device had no work counts as waiting.

    One moment is queued when a batch is requested, and another when it arrives. Both are queued after earlier work and before the work on
    the batch. So the time between them on the device's clock is 0 if the device still has work when the batch arrives.
    """

    def __init__(self, mark: Callable[[], Moment]) -> None:
        """`mark` queues a moment and returns it. Nothing here waits."""
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
        """Add the waits that the device has passed to `waited`. A wait in progress counts in the lap in which it ends."""
        while self._waits and self._waits[0][1].query():
            began, there = self._waits.popleft()
            self.waited += began.elapsed_time(there) / 1000
