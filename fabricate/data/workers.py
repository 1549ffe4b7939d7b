"""What our own use of torch's DataLoader needs to know and to do about its worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

_LOOK_SECONDS = 5.0
"""How long a worker may outlive a main process that was killed."""
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
"""What launchers and schedulers send to whole process groups."""


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator over `loader`. Its workers begin with a `WorkerStart` and hear no signal before it: a process inherits what
    the thread that starts it blocks."""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method() if loader.num_workers else ""
    if method not in ("fork", "spawn"):  # all later children of a fork server would inherit it
        return iter(loader)
    if method == "spawn":
        resource_tracker.ensure_running()  # whose start lets signals through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Workers:
    """The worker processes that may be behind a DataLoader's iterator."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def close(self) -> None:
        """End them now. Left to itself torch waits for the garbage collector, and a traceback keeps iterators for long."""
        shutdown = getattr(self._batches, "_shutdown_workers", None)  # torch has no public way
        if shutdown is not None:
            shutdown()
        for worker in getattr(self._batches, "_workers", ()):
            if worker.is_alive():  # stuck in code that holds the interpreter's lock, where SIGTERM has no effect
                worker.kill()
                worker.join()


class WorkerStart:
    """Puts the user's data set, not our wrapper, into `get_worker_info()`, then calls the user's `worker_init_fn`. Made by the
    main process, called in the worker."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then
        self._main = os.getpid()

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the info refuses plain assignment
        live_with(self._main)
        if self._then is not None:
            self._then(worker)


def live_with(main: int) -> None:
    """Leave signals to the process `main`, and end when it is gone. Called in a worker.

    Launchers and schedulers signal whole process groups, and a worker that dies of it takes the fit along before it can
    save. SIGTERM counts only when the main process sends it, as torch does to a worker that does not end by itself. Torch's own
    watch asks whether the parent is still the one of the worker's start, and does not see one that was killed before that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGUSR1})  # what came before is ignored now
    if not hasattr(signal, "sigtimedwait"):  # macOS
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return
    method = getattr(multiprocessing.current_process(), "_start_method", None) or multiprocessing.get_start_method()
    parent = os.getppid() if method == "forkserver" else main
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while os.getppid() == parent:
            received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_SECONDS)
            if received is not None and received.si_pid == main:
                break
        os._exit(0)

    threading.Thread(target=wait, name="fabricate-signals", daemon=True).start()


def has_own_loop(loader: DataLoader[Any]) -> bool:
    kind = type(loader)
    return kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator
