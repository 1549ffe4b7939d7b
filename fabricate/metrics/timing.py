"""Where the time of a fit goes: steps and samples per second, the share spent waiting for data. Seconds of the host's clock.

Pure arithmetic on a clock; must not know what is trained, nor torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

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
        began = time.perf_counter()
        try:
            yield
        finally:
            self._apart += time.perf_counter() - began

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
