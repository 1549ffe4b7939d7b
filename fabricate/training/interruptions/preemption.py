"""What asks a running fit to save its state and end: a signal, a time budget, a touched file.

Owns the signal handlers while a fit runs and the clock of its budget. All of it only sets a flag on this rank; the loop
acts at the next update boundary, where all ranks agree. It must not know ranks, checkpoints or the loop.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from fabricate.training.interruptions.requests import Requests, SignalWhileWaiting
from fabricate.values import Every

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LOOK_SECONDS: Final = 1.0  # a look costs a stat on what may be a network file system
_told: list[str] = []  # by the signals that ask the process to end, since it began


def told_to_end() -> str:
    """The name of the first SIGTERM or SIGUSR1 that a fit of this process heard; empty before."""
    return _told[0] if _told else ""


class Watch:
    """Looks at the clock and for the stop file, for the rank that does it for all; others leave both out.

    began: the monotonic time from which `max_time` counts. run_dir: where the stop file may appear.
    """

    def __init__(self, requests: Requests, began: float, max_time: Every | None, run_dir: Path | None) -> None:
        self._requests = requests
        self._stop_file = run_dir / "stop" if run_dir is not None else None
        self._deadline = began + (math.inf if max_time is None else max_time.seconds)
        self.look_at = self._deadline if self._stop_file is None else began
        """The monotonic time from which on `look` has something to do: one comparison per update until then."""

    def look(self, now: float) -> None:
        """Set the flag if the time is up or the file is there."""
        if self._stop_file is not None:
            self.look_at = min(now + _LOOK_SECONDS, self._deadline)
            if not self._requests.signal and self._stop_file.exists():
                self._requests.ask(signal="stop file")
        if now >= self._deadline:
            self._requests.ask(signal="max_time")
            self._deadline = self.look_at = math.inf

    def heard(self, what: str) -> None:
        """The state is safe: the file that asked for it goes, so that the next fit does not stop at once."""
        if what == "stop file" and self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)


@contextmanager
def signals_heard(requests: Requests) -> Iterator[list[str]]:
    """While inside, SIGTERM, SIGUSR1 and the first SIGINT set `requests.signal` and do nothing else, except to end a wait for data
    (`Requests.waiting`). Later ones of the first two change nothing, a second SIGINT interrupts at once. Afterwards the handlers are as
    before.

    Yields notes for the plan. A signal that the script handles itself stays its own, and outside the main thread, where
    Python receives no signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield [
            "fit runs outside the main thread and cannot handle signals: SIGTERM ends the process without a save. Call fit in the "
            "main thread to save on SIGTERM"
        ]
        return
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked child: not ours to hold back
            if number != signal.SIGINT:  # a terminal's Ctrl-C reaches it too; the parent ends it
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if requests.overdue:  # sent by this process, see `fabricate.training.interruptions.overdue`
            requests.overdue = False
            if requests.waits_since:
                requests.waits_since = 0.0  # a second one would cut off the end of the workers, which may take seconds
                raise SignalWhileWaiting
            return
        name = signal.Signals(number).name
        requests.ask(signal=name)
        if number == signal.SIGINT:
            # Not print: a handler may run in the middle of another write.
            os.write(2, b"Ctrl-C: the fit ends after the update or the evaluation in progress; once more to end now\n")
            signal.signal(signal.SIGINT, signal.default_int_handler)
        else:
            _told.append(name)
        if requests.waiting:
            requests.waiting = False
            raise SignalWhileWaiting

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = [number for number in _SIGNALS if before[number] in (signal.SIG_DFL, signal.default_int_handler)]
    for number in ours:
        signal.signal(number, handle)
    requests.handled = max(ours, default=0, key=lambda number: number != signal.SIGINT)
    try:
        yield [
            f"{number.name} is handled by the script, so fabricate does not save when this signal comes"
            for number in _SIGNALS
            if number not in ours and number != signal.SIGINT
        ]
    finally:
        for number in ours:
            signal.signal(number, before[number])
