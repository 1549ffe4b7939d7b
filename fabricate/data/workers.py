"""The worker processes of torch's DataLoader: how they start, which signals they ignore, and how they end."""

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
"""The longest time that a worker outlives a main process that was killed."""
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
"""The signals that launchers and schedulers send to whole process groups."""


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """An iterator over `loader`, whose workers begin with a `WorkerStart`. Until then signals are blocked in the workers, because a process
    inherits the blocked signals of the thread that starts it."""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method() if loader.num_workers else ""
    if method not in ("fork", "spawn"):  # all later children of a fork server would inherit the blocked signals
        return iter(loader)
    if method == "spawn":
        resource_tracker.ensure_running()  # started first, because its start unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Workers:
    """The worker processes of a DataLoader's iterator, if it has any."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def close(self) -> None:
        """End the worker processes now. torch ends them when the iterator is collected, but a traceback may keep the iterator for long."""
        shutdown = getattr(self._batches, "_shutdown_workers", None)  # torch has no public method for this
        if shutdown is not None:
            shutdown()
        for worker in getattr(self._batches, "_workers", ()):
            if worker.is_alive():  # stuck in code that holds the interpreter's lock, where SIGTERM has no effect
                worker.kill()
                worker.join()


class WorkerStart:
    """The `worker_init_fn` of fabricate: replaces the wrapper in `get_worker_info()` by the user's data set, calls `live_with`, then the
    user's `worker_init_fn`. Made in the main process, called in the worker."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then
        self._main = os.getpid()

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo forbids plain assignment
        live_with(self._main)
        if self._then is not None:
            self._then(worker)


def live_with(main: int) -> None:
    """Ignore signals that are meant for the process `main`, and end when `main` has ended. Called in a worker.

    Launchers and schedulers send signals to whole process groups, and a worker that ends would make the fit fail before it can save.
    SIGTERM ends the worker only if the main process sends it, as torch does if a worker does not end otherwise. torch's own check compares
    the parent with the one at the worker's start, so it misses a parent that was killed before.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Signals that arrived before are ignored now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGUSR1})
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
