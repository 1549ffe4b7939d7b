"""What hooks, signals and clocks ask of a running fit. Data of one rank; `fabricate.training.boundary` acts on it.

Must not know: ranks, checkpoints, the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class SignalWhileWaiting(BaseException):
    """A signal ends a wait for data: of a single rank between two updates, at once; of one among several, when it has lasted."""


@dataclass(slots=True)
class Requests:
    """What was requested on this rank since the last update boundary that looked."""

    pending: bool = False
    """Whether anything was requested since a boundary last looked."""
    stop: str = ""
    save: bool = False
    paths: list[str] = field(default_factory=list)
    evaluate: bool = False
    waiting: bool = False
    """Whether the main thread waits for worker processes between two updates. A signal then need not wait for them too."""
    waits_since: float = 0.0
    """The monotonic time since which the main thread waits for data; 0 while it does not."""
    handled: int = 0
    """The number of a signal that the fit handles; 0 where it handles none."""
    overdue: bool = False
    """Whether that wait has lasted too long after a signal: the next signal only ends it."""
    signal: str = ""
    """What requested a save and the end: a signal's name, "max_time" or "stop file"."""

    def ask(
        self, *, stop: str = "", save: bool = False, path: str = "", evaluate: bool = False, signal: str = ""
    ) -> None:
        """Request something for the next update boundary. Of several signals the first counts."""
        # Only what is requested is written: a signal handler or a thread may be requesting something else at this moment.
        if stop:
            self.stop = stop
        if save:
            self.save = True
        if path:
            self.paths.append(path)
        if evaluate:
            self.evaluate = True
        if signal and not self.signal:
            self.signal = signal
        self.pending = True  # last: a boundary that looks meanwhile sees all of it or looks again
