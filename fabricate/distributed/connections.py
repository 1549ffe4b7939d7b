"""The connections through which ranks agree: a process group of torch on the CPU (gloo), apart from the one that carries gradients.

Owns: opening and closing such groups, waiting for them so that signals and failures elsewhere are noticed. Must not know: what the
messages mean (`fabricate.distributed.group`), hooks, the loop. No pickle travels.
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
"""How long a wait goes on before signals are handled and the store is read."""
_NEVER_SENT = 2**20 + 7
"""A tag of messages between two ranks that nobody uses."""
_FIRST_PAUSE_SECONDS, _PAUSE_SECONDS = 0.001, 0.5


class PeerLost(RankError):
    """Another rank is gone or does not answer; what happened there is not known yet."""


class Connections:
    """One process group of all ranks. Every method but `close` is called by all ranks, in the same order, by one thread.

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
        """The rows of all ranks, which have one size, on rank 0; None elsewhere."""
        rows = row.new_empty(self.group.size(), *row.shape) if self.group.rank() == 0 else None
        self._wait(dist.gather(row, None if rows is None else list(rows), dst=0, group=self.group, async_op=True))
        return rows

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, which have one size, on every rank."""
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
        """Waiting for all the time in one call would leave signals unhandled: torch returns to Python only when it has finished."""
        try:
            while not _finished(work):
                self._look()
        except RuntimeError as exc:
            raise PeerLost(f"a message between ranks failed: {str(exc).partition(chr(10))[0]}") from exc

    def _look(self) -> None:
        """Whether a rank failed whose connections stay open, because a process that it forked holds them as well. In a thread,
        because a store on a host that is gone never answers."""
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
    """Wait one slice. Raises the error of the work."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises what happened, unless it succeeded just now
    return True


def break_connections(group: ProcessGroup) -> None:
    """Close this rank's gloo connections of `group`; what still uses them fails here and on the other ranks. One rank.

    torch has no call for it: `abort` leaves connections open, and destroying the group waits for messages in progress. A receive
    that times out closes all connections of its group; one from a rank that is gone fails before.
    """
    for other in set(range(group.size())) - {group.rank()}:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], other, _NEVER_SENT).wait(datetime.timedelta(milliseconds=1))


class Opened:
    """What was opened beside torch's default process group, and stays as long as that does."""

    def __init__(self) -> None:
        self.connections: dict[str, Connections] = {}
        self.counterparts: dict[int, ProcessGroup] = {}
        self.of_strategies: set[ProcessGroup] = set()
        """What strategies opened: those of meshes, DeepSpeed's."""
        self.broken = False
        """Whether the connections of the default group broke."""
        self._count = 0
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME")

    def connect(self, name: str, rank: int, host: str, timeout: datetime.timedelta, watched: str = "") -> Connections:
        """The connections called `name`, opened where there are none or an earlier failure closed them. All ranks."""
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
        """A gloo group for connections of fabricate's own, one of torch's default kind for some `ranks`. All ranks."""
        with self._same_interface():
            group: ProcessGroup = dist.new_group(ranks, timeout=timeout, backend="gloo" if ranks is None else None)
            return group

    def close(self) -> None:
        """Break all connections of fabricate's own. One rank."""
        for connections in self.connections.values():
            connections.close()

    @contextlib.contextmanager
    def _same_interface(self) -> Iterator[None]:
        """With the network interface that the default group has: gloo would take that of this host's name."""
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
    """What belongs to torch's default process group."""
    return _opened.setdefault(dist.distributed_c10d._get_default_group(), Opened())


def await_all(store: Store, name: str, rank: int, world_size: int, host: str, timeout: datetime.timedelta) -> None:
    """Return when all ranks have called this with `name`, which is new in the store. Unlike torch's own waiting, which opening a
    group begins with, it lets signals through and names who is missing."""
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
