"""Ends, after a signal, a wait for data that takes too long, in a fit on several ranks.

A single rank ends such a wait at once (`preemption`). With several ranks, the others may be in the middle of an update, which only an error
can end. Must not know: the loop, checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

from fabricate.distributed.group import Group
from fabricate.errors import RankError
from fabricate.training.interruptions.requests import Requests

PATIENCE_SECONDS = 10.0
"""How long a rank waits for its data after a signal. Launchers kill ranks after 30."""
_LOOK_SECONDS = 0.5
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
_wakeup = [-1]
"""The file descriptor of this module to which Python writes the numbers of signals; -1 while there is none."""

T = TypeVar("T")


def waiting(requests: Requests, items: Iterator[T], most: float = 0) -> Iterator[T]:
    """`items`; during each wait for the next one, `requests.waits_since` is set. In the first `most` waits, a signal ends the wait at
    once."""
    for number in itertools.count():
        requests.waiting, requests.waits_since = number < most, time.monotonic()
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            requests.waiting, requests.waits_since = False, 0.0
        yield item


def data_overdue(requests: Requests) -> RankError:
    """The error for a rank whose data did not arrive."""
    return RankError(
        f"{requests.signal or 'a signal on another rank'} asked the fit to end, but this rank still waits for data after "
        f"{PATIENCE_SECONDS:g} seconds. Other ranks may be within an update, so nothing is saved now; the newest checkpoint is "
        "good. Look for a hanging worker process of this rank's DataLoader; with DataLoader(timeout=...) a hanging worker raises "
        "an error"
    )


@contextlib.contextmanager
def overdue_waits_end(requests: Requests, group: Group, name: str) -> Iterator[None]:
    """While the body runs, a wait for data that still lasts `PATIENCE_SECONDS` after a signal on any rank ends with `SignalWhileWaiting`.
    For a fit on several ranks, inside `signals_heard`; every rank calls it. name: a new one for each fit.
    """
    if not requests.handled:
        yield
        return
    own, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    if before != -1:  # the descriptor of an event loop, for example of a notebook: keep it
        signal.set_wakeup_fd(before)
    else:
        _leave_to_parent()
        _wakeup[0] = theirs.fileno()
    watch = threading.Thread(target=_watch, args=(requests, group, name, own), name="fabricate-overdue", daemon=True)
    watch.start()
    try:
        yield
    finally:
        if before == -1:
            signal.set_wakeup_fd(-1)
            _wakeup[0] = -1
        theirs.send(b"\0")
        watch.join(5)  # the thread ends within this time unless the store does not respond
        theirs.close()


@functools.cache
def _leave_to_parent() -> None:
    """Make forked children forget the descriptor, or they would write the numbers of their signals to it. Cannot be undone, so it is done
    once."""

    def forget() -> None:
        if _wakeup[0] != -1:
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=forget)


def _watch(requests: Requests, group: Group, name: str, wakeups: socket.socket) -> None:
    """Report a signal to the other ranks, and end this rank's wait when it takes too long. A thread does this, because Python runs signal
    handlers in the main thread, which may be inside a collective; the number of a signal arrives here at once."""
    asked_at = 0.0
    with wakeups:
        while True:
            ready, _, _ = select.select([wakeups], [], [], _LOOK_SECONDS)
            numbers = set(wakeups.recv(64)) if ready else set()
            if 0 in numbers:
                return
            since, now = requests.waits_since, time.monotonic()
            waits = bool(since) and now - since > _LOOK_SECONDS
            if not asked_at and (requests.signal or numbers & _SIGNALS):
                asked_at = now
                group.post(name)
            elif not asked_at and waits and group.posted(name):
                asked_at = now
            if asked_at and waits and now - max(since, asked_at) >= PATIENCE_SECONDS:
                requests.overdue = True
                signal.pthread_kill(threading.main_thread().ident or 0, requests.handled)
