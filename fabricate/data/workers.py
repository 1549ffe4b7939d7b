"""What our own use of torch's DataLoader needs to know and to do about its worker processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, get_worker_info


class Workers:
    """The worker processes that may be behind a DataLoader's iterator."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def close(self) -> None:
        """End them now. Left to itself torch waits for the garbage collector, and a traceback keeps iterators for long."""
        shutdown = getattr(self._batches, "_shutdown_workers", None)  # torch has no public way
        if shutdown is not None:
            shutdown()


class WorkerStart:
    """Puts the user's data set, not our wrapper, into `get_worker_info()`, then calls the user's `worker_init_fn`."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the info refuses plain assignment
        _leave_signals_to_the_main_process()
        if self._then is not None:
            self._then(worker)


def _leave_signals_to_the_main_process() -> None:
    """Launchers and schedulers signal whole process groups, and a worker that dies of it takes the fit along before it can
    save. SIGTERM counts only when the main process sends it, as torch does to a worker that does not end by itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):  # macOS
        return
    main = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != main:
            pass
        os._exit(0)

    threading.Thread(target=wait, name="fabricate-signals", daemon=True).start()


def has_own_loop(loader: DataLoader[Any]) -> bool:
    kind = type(loader)
    return kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator
