"""The connections over which ranks exchange messages: torch process groups on the CPU (gloo), apart from the one that carries gradients.

Owns: opening and closing such groups, and waits during which signals and failures of other ranks are noticed. Must not know: what the
messages mean (`fabricate.distributed.group`), hooks, the loop. No pickle is sent.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Store

from fabricate.errors import RankError

_SLICE = datetime.timedelta(seconds=0.5)
"""The time after which a wait is interrupted to handle signals and to read the store."""
_NEVER_SENT = 2**20 + 7
"""A message tag that no rank uses."""
_FIRST_PAUSE_SECONDS, _PAUSE_SECONDS = 0.001, 0.5


class PeerLost(RankError):
    """Another rank is gone or does not answer; what happened there is not known yet."""


class Connections:
    """One process group of all ranks. All ranks call the methods except `close`, in the same order, each from one thread.

    Raises `PeerLost` when a connection breaks, when a message takes longer than the time-out, or when `watched`, a key of the store,
    was set by a rank that failed.
    """

    def __init__(self, group: ProcessGroup, store: Store, watched: str = "") -> None:
        self.group = group
        self.watched = watched or f"fabricate/{group.group_name}/over"
        self.closed = False
        self._store = store
        self._over = threading.Event()
        self._looking: threading.Thread | None = None

    def gather(self, row: torch.Tensor) -> torch.Tensor | None:
        """The rows of all ranks, all of the same size, on rank 0; None on the other ranks."""
        rows = row.new_empty(self.group.size(), *row.shape) if self.group.rank() == 0 else None
        self._wait(dist.gather(row, None if rows is None else list(rows), dst=0, group=self.group, async_op=True))
        return rows

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, all of the same size, on every rank."""
        rows = row.new_empty(self.group.size(), *row.shape)
        self._wait(dist.all_gather(list(rows), row, group=self.group, async_op=True))
        return rows

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Overwrite `values` with those of rank 0."""
        self._wait(dist.broadcast(values, src=0, group=self.group, async_op=True))
        return values

    def close(self) -> None:
        """Break the connections, so that ranks that wait for this one notice. One rank."""
        if not self.closed:
            self.closed = True
            break_connections(self.group)

    def _wait(self, work: Any) -> None:
        """Wait for `work` in slices, because Python handles no signals while torch waits. Raises `PeerLost` if `work` or another rank
        fails."""
        try:
            while not _finished(work):
                self._look()
        except RuntimeError as exc:
            raise PeerLost(f"a message between ranks failed: {str(exc).partition(chr(10))[0]}") from exc

    def _look(self) -> None:
        """Raise `PeerLost` if a rank failed whose connections stay open, because a process that it forked holds them too. A thread reads
        the store, because the read would not end if the store's host is gone."""
        if self._over.is_set():
            raise PeerLost("another rank failed")
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self._read_store, name="fabricate-failures", daemon=True)
            self._looking.start()

    def _read_store(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, and the store with it
            if self._store.check([self.watched]):
                self._over.set()


def _finished(work: Any) -> bool:
    """Wait one slice; return whether `work` has finished. Raises the error of `work`."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises its error, unless it has succeeded in the meantime
    return True


def break_connections(group: ProcessGroup) -> None:
    """Close this rank's gloo connections of `group`; messages in progress fail here and on the other ranks. One rank.

    torch has no function for this: `abort` leaves connections open, and destroying the group waits for messages in progress. A receive that
    times out closes all connections of its group. A receive from a rank that is gone fails without that, so every rank is tried.
    """
    for other in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], other, _NEVER_SENT).wait(datetime.timedelta(milliseconds=1))


class Opened:
    """The process groups opened in addition to torch's default group, which stay open as long as that group."""

    def __init__(self) -> None:
        self.connections: dict[str, Connections] = {}
        self.counterparts: dict[int, ProcessGroup] = {}
        self.of_strategies: set[ProcessGroup] = set()
        """The groups that strategies opened, such as those of device meshes and of DeepSpeed."""
        self.broken = False
        """Whether the connections of the default group broke."""
        self._count = 0
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME")

    def connect(self, name: str, rank: int, host: str, timeout: datetime.timedelta, watched: str = "") -> Connections:
        """The connections called `name`, which are opened if there are none or if an earlier failure closed them. All ranks."""
        known = self.connections.get(name)
        if known is not None and not known.closed:
            dist.distributed_c10d._set_pg_timeout(timeout, known.group)
            known.watched = watched or known.watched
            return known
        self._count += 1
        store = dist.distributed_c10d._get_default_store()
        await_all(store, f"fabricate/opening/{self._count}", rank, dist.get_world_size(), host, timeout)
        opened = Connections(self.new_group(None, timeout), store, watched)
        self.connections[name] = opened
        if known is not None:
            dist.destroy_process_group(known.group)
        return opened

    def new_group(self, ranks: list[int] | None, timeout: datetime.timedelta | None = None) -> ProcessGroup:
        """A new process group: a gloo group of all ranks if `ranks` is None, else a group of `ranks` with torch's default backend. All
        ranks."""
        with self._same_interface():
            group: ProcessGroup = dist.new_group(ranks, timeout=timeout, backend="gloo" if ranks is None else None)
            return group

    def close(self) -> None:
        """Break all connections that `connect` opened. One rank."""
        for connections in self.connections.values():
            connections.close()

    @contextlib.contextmanager
    def _same_interface(self) -> Iterator[None]:
        """A context in which gloo uses the network interface of the default group, and not the interface of this host's name."""
        name = "GLOO_SOCKET_IFNAME"
        added = name not in os.environ and self._interface is not None
        if added:
            os.environ[name] = str(self._interface)
        try:
            yield
        finally:
            if added:
                del os.environ[name]


_opened: weakref.WeakKeyDictionary[ProcessGroup, Opened] = weakref.WeakKeyDictionary()


def opened() -> Opened:
    """The `Opened` of torch's default process group."""
    return _opened.setdefault(dist.distributed_c10d._get_default_group(), Opened())


def await_all(store: Store, name: str, rank: int, world_size: int, host: str, timeout: datetime.timedelta) -> None:
    """Wait until all ranks have called this with `name`, which must be new in the store. Raises `RankError` with the missing ranks. torch's
    function that opens a group waits too, but handles no signals and names no ranks. All ranks."""
    store.set(f"{name}/{rank}", "")
    if store.add(f"{name}/count", 1) == world_size:
        store.set(f"{name}/all", "")
    deadline, pause = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE_SECONDS
    while not store.check([f"{name}/all"]):
        if time.monotonic() > deadline:
            missing = [other for other in range(world_size) if not store.check([f"{name}/{other}"])]
            names = " and ".join(f"rank {other}" for other in missing)
            raise RankError(f"{names} did not connect to rank {rank} on {host} within {timeout}")
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_SECONDS)
