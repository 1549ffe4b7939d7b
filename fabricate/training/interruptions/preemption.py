"""Requests from outside to save and end a fit: a signal, the time limit, the stop file.

Owns the signal handlers while a fit runs, and the clock of its time limit. Each only sets a flag on this rank; the loop acts at the next
boundary, where all ranks agree. Must not know: ranks, checkpoints, the loop.
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
_LOOK_SECONDS: Final = 1.0  # a look is one stat, perhaps on a network file system
_told: list[str] = []  # the names of the signals that requested the end of this process


def told_to_end() -> str:
    """The name of the first SIGTERM or SIGUSR1 that arrived during a fit of this process; "" if none did."""
    return _told[0] if _told else ""


class Watch:
    """Looks at the clock and for the stop file. Only rank 0 has one; the other ranks learn the result at the boundary.

    began: the monotonic time from which `max_time` counts. run_dir: where the stop file may appear.
    """

    def __init__(self, requests: Requests, began: float, max_time: Every | None, run_dir: Path | None) -> None:
        self._requests = requests
        self._stop_file = run_dir / "stop" if run_dir is not None else None
        self._deadline = began + (math.inf if max_time is None else max_time.seconds)
        self.look_at = self._deadline if self._stop_file is None else began
        """The monotonic time before which `look` need not be called, so that an update costs one comparison."""

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
        """Remove the stop file once the state is saved, so that the next fit does not stop at once."""
        if what == "stop file" and self._stop_file is not None:
            self._stop_file.unlink(missing_ok=True)


@contextmanager
def signals_heard(requests: Requests) -> Iterator[list[str]]:
    """While the body runs, SIGTERM, SIGUSR1 and the first SIGINT set `requests.signal`, and end a wait for data (`Requests.waiting`), but
    do nothing else. A further SIGTERM or SIGUSR1 has no effect; a second SIGINT interrupts at once. Afterwards the handlers are as before.

    Yields notes for the plan. A signal that the script handles keeps the script's handler. Outside the main thread nothing is changed,
    because only the main thread can set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield [
            "fit runs outside the main thread and cannot handle signals: SIGTERM ends the process without a save. Call fit in the "
            "main thread to save on SIGTERM"
        ]
        return
    process = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked child: the signal has its default effect
            if number != signal.SIGINT:  # Ctrl-C in a terminal reaches the child too, but the parent ends it
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if requests.overdue:  # sent by this process, see `fabricate.training.interruptions.overdue`
            requests.overdue = False
            if requests.waits_since:
                # so that a second signal does not interrupt the shutdown of the workers, which may take seconds
                requests.waits_since = 0.0
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
