"""The processes of multiprocessing that a test itself started."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process

from fabricate.testing.ranks import worker_process_ids


def own_children() -> list[multiprocessing.process.BaseProcess]:
    """The running child processes, without the ranks that earlier tests keep for the session."""
    ranks = worker_process_ids()
    return [child for child in multiprocessing.active_children() if child.pid not in ranks]
