"""The requests of hooks, signals and clocks to a running fit, on one rank; `fabricate.training.boundary` acts on them.

Must not know: ranks, checkpoints, the loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class SignalWhileWaiting(BaseException):
    """Raised by a signal to end a wait for data: at once between two updates of a single rank; on several ranks when the wait takes too
    long."""


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
    """Whether the main thread waits for data workers between two updates, so that a signal may end the wait."""
    waits_since: float = 0.0
    """The monotonic time at which the main thread began to wait for data; 0 while it does not wait."""
    handled: int = 0
    """The number of a signal that the fit handles; 0 if it handles none."""
    overdue: bool = False
    """Whether the wait for data has taken too long after a signal: the next signal only ends the wait."""
    signal: str = ""
    """The source of a request to save and end: the name of a signal, "max_time" or "stop file"."""

    def ask(
        self, *, stop: str = "", save: bool = False, path: str = "", evaluate: bool = False, signal: str = ""
    ) -> None:
        """Request something for the next update boundary. Of several signals the first counts."""
        # Only the requested fields are set: a signal handler or a thread may be setting others at this moment.
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
        # set last, so that a boundary that looks meanwhile sees the whole request now or at its next look
        self.pending = True
