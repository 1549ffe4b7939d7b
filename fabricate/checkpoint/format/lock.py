"""One run at a time in a run directory: the file RUN_DIR/run.lock, held by the operating system's lock for a process.

Such a lock ends with its process, however that ends, so nothing is ever stale. It must not know what is in the directory.
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
_WAIT_SECONDS: Final = 5.0  # for a process that was killed a moment ago and is not gone yet
_POLL_SECONDS: Final = 0.1
_REFUSED: Final = (errno.EACCES, errno.EAGAIN)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[str]:
    """Hold the directory's lock while inside. Called by one process of a run.

    Yields a note for the user where the file system has no locks; empty otherwise.

    Raises:
        CheckpointError: another process holds it; names it.
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
        with contextlib.suppress(OSError):  # removed while it is held, so that nobody loses a lock that he has
            path.unlink()
        os.close(descriptor)


def _take(path: Path) -> int | None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # Not flock: a child of a killed run, forked to load data, would go on holding that one.
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
    """Whether the file that was opened is still the one of this name: its last holder removes it."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
