"""The lock that allows one run at a time in a run directory: a lock of the operating system on the file RUN_DIR/run.lock.

Such a lock ends with its process in every case, so it is never stale. Must not know what is in the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fabricate.errors import CheckpointError

LOCK_NAME: Final = "run.lock"
_WAIT_SECONDS: Final = 5.0  # time for a process that was killed a moment ago to end
_POLL_SECONDS: Final = 0.1
_REFUSED: Final = (errno.EACCES, errno.EAGAIN)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[str]:
    """A context that holds the directory's lock. Entered by one process of a run.

    Yields a note for the user if the file system has no locks, else "".

    Raises:
        CheckpointError: another process holds the lock; names this process.
    """
    path = directory / LOCK_NAME
    descriptor = _take(path)
    if descriptor is None:
        yield f"{directory}: this file system has no locks, so a second run started in the same directory would not be refused"
        return
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode())
        yield ""
    finally:
        # Removed while the lock is held, so that no other process can hold a lock on the removed file.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


def _take(path: Path) -> int | None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # Not flock: a data worker, forked by a run that was killed, would keep that kind of lock.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except OSError as exc:
            if exc.errno not in _REFUSED:
                os.close(descriptor)
                return None
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "unknown"
                os.close(descriptor)
                raise CheckpointError(
                    f"{path.parent} is in use by another run ({holder}). Two runs in one directory would mix their "
                    "checkpoints. Wait for the other run, end it, or give this run another run_dir"
                ) from None
            time.sleep(_POLL_SECONDS)
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` is still the file that was opened: its last holder may have removed it."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
