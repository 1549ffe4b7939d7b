"""The ranks of a run as one group: small agreements, JSON and bytes between them, failures told, leaving together.

Owns: when the ranks' connections are opened and closed, and how a process leaves its group. Must not know: strategies, hooks,
the loop, how messages travel (`fabricate.distributed.control`). No pickle travels between ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from fabricate.distributed.control import Control, PeerLost, address_towards
from fabricate.errors import RankError

_counterparts: dict[tuple[int, int], Any] = {}
_alive: dict[int, Control] = {}
"""Of the process group: connections on which nothing is ever said, so that one ends when its process does, and only then."""
_exit_handlers: list[object] = []
_failures: list[str] = []
_opened = itertools.count()
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "gloo",
    "NCCL",
    "Socket",
    "Timed out",
    "timed out",
    "timeout",
)
_TOLD_SECONDS, _ANSWER_SECONDS = 5.0, 15.0
_TASKS, _QUIET_LOOKS, _REST_SECONDS = Path("/proc/self/task"), 3, 10.0
_NEWLINE = "\n"


def interface_towards(host: str) -> str | None:
    """The network interface through which this host reaches `host`; None when that is itself, or not known. gloo would take
    the interface of this host's name, which on many hosts is the loopback."""
    address = address_towards(host)
    if address is None or address.startswith("127."):
        return None
    return next((n for n, found in psutil.net_if_addrs().items() if any(a.address == address for a in found)), None)


def meet(rank: int, world_size: int, built: dict[str, str], timeout: datetime.timedelta) -> Store:
    """Compare what ranks are built of before they open a process group, in which they would wait for each other without a
    word. Returns the store at MASTER_ADDR, which rank 0 has to hold until the group is open. All ranks.

    built: what has to be the same everywhere, by what it is called. Raises `RankError`, the same on every rank.
    """
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        compare_builds(store, rank, world_size, built)
    except dist.DistError as exc:
        raise RankError(
            f"rank {rank} on {socket.gethostname()} did not meet all of {world_size} ranks at {address} within {timeout}: start one "
            f"process per rank, with an address that every host reaches, and a free port. Here: {str(exc).partition(_NEWLINE)[0]}"
        ) from exc
    met: Store = store
    return met


def compare_builds(store: Store, rank: int, world_size: int, built: dict[str, str]) -> None:
    """See `meet`. Nothing but the store is needed. All ranks."""
    store.set(f"fabricate/built/{rank}", json.dumps({"host": socket.gethostname(), **built}))
    everyone = [json.loads(store.get(f"fabricate/built/{other}")) for other in range(world_size)]
    store.set(f"fabricate/compared/{rank}", "")
    for topic in built:
        other = next((r for r, theirs in enumerate(everyone) if theirs[topic] != everyone[0][topic]), None)
        if other is None:
            continue
        if rank == 0:  # with whose process the store would go, before others have read what is in it
            with contextlib.suppress(dist.DistError):
                store.wait([f"fabricate/compared/{r}" for r in range(world_size)], datetime.timedelta(seconds=30))
        zero, theirs = everyone[0], everyone[other]
        raise RankError(
            f"{topic} is {zero[topic]} on rank 0 on {zero['host']} and {theirs[topic]} on rank {other} on {theirs['host']}; ranks that "
            "train together have the same: install the same packages on every host, and show each of them its GPUs, or none "
            "(CUDA_VISIBLE_DEVICES)"
        )


def leave_at_exit() -> None:
    """Close the process group when the interpreter ends, once: left open, a rank may be torn down in the midst of it."""
    if dist.is_initialized() and not _exit_handlers:
        _exit_handlers.append(atexit.register(_leave))


def _leave() -> None:
    for control in _alive.values():
        control.close()
    if not dist.is_initialized():
        return
    if not _failures:  # after a failure others may be gone, and closing could wait for them
        if dist.get_backend() == "gloo":
            with contextlib.suppress(RuntimeError):  # a rank that is gone breaks the connection: nothing to wait for
                dist.barrier()  # a rank that closes while another still talks to it aborts
        dist.destroy_process_group()
    _let_threads_rest()


def _let_threads_rest() -> None:
    """Wait until the threads of gloo sleep. One that lets go of a tensor needs the interpreter, and aborts the process where
    that is ending. They cannot be joined: a DistributedDataParallel keeps its process group for ever."""
    if not _TASKS.is_dir():
        time.sleep(0.1)  # no Linux: the moment that it takes on an idle machine
        return
    quiet, deadline = 0, time.monotonic() + _REST_SECONDS
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        time.sleep(0.005)  # one that waits for the interpreter's lock sleeps too, and gets it now
        quiet = 0 if _gloo_works() else quiet + 1


def _gloo_works() -> bool:
    """Whether a thread of gloo runs, or would if it got a core."""
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # ended since
            name, _, state = (task / "stat").read_text().partition("(")[2].rpartition(") ")
            if name.startswith("pt_gloo") and state[0] != "S":
                return True
    return False


class Group:
    """This rank among `world_size`; one process is a group too. Every method is called by all ranks, unless it says otherwise."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._controls: list[Control] = []

    def join(self, timeout: datetime.timedelta) -> None:
        """Begin a piece of work that ranks do together; failures told from here on are its own. `timeout`: how long a rank
        waits for the others."""
        self._name = f"fabricate/joined/{next(_opened)}"
        self._failure = f"{self._name}/failure"
        self._timeout = timeout
        self.hosts = [socket.gethostname()]
        _failures.clear()
        if self.world_size == 1 or not dist.is_initialized():
            return
        leave_at_exit()
        dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)  # one that an earlier fit opened had another
        number = id(dist.group.WORLD)
        self._control = self._connect("main", _alive.get(number))
        told = self.gather_json([self.rank, self.hosts[0], number in _alive])
        if [rank for rank, _, _ in told] != list(range(self.world_size)):
            raise RankError(f"the process group holds the ranks {told}, expected 0 to {self.world_size - 1}")
        self.hosts = [host for _, host, _ in told]
        if not all(known for _, _, known in told):
            while _alive:
                _alive.popitem()[1].close()
            _alive[number] = self._connect("alive", self._control)
            self._controls.pop()  # it outlives this work

    def leave(self) -> None:
        """End what `join` began: ranks that still wait for this one notice. One rank."""
        while self._controls:
            self._controls.pop().close()

    def _connect(self, name: str, known: Control | None) -> Control:
        store = dist.distributed_c10d._get_default_store()
        name = f"{self._name}/{name}"
        self._controls.append(Control(self.rank, self.world_size, store, name, self._timeout, known))
        return self._controls[-1]

    def agree(self, flags: list[int]) -> list[int]:
        """Element-wise maximum of small integers over all ranks. All ranks; no wait for the device."""
        return flags if self.world_size == 1 else self._control.maximum(flags)

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank. All ranks. No pickle."""
        if self.world_size == 1:
            return [value]
        return [json.loads(bytes(part)) for part in self._control.gather(json.dumps(value).encode(), everywhere=True)]

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank. All ranks."""
        return self.gather_json(value if self.rank == 0 else None)[0]

    def counterparts(self, number: int) -> Any:
        """The process group of the ranks that stand where this one does among `number` successive ones. All ranks; kept as
        long as the process group."""
        key = (id(dist.group.WORLD), number)
        if key not in _counterparts:
            for place in range(number):
                group = dist.new_group(list(range(place, self.world_size, number)))
                if self.rank % number == place:
                    _counterparts[key] = group
        return _counterparts[key]

    def beside(self) -> Group:
        """The same ranks once more, for a thread of each: its messages do not meet those of the main thread. All ranks."""
        other = Group(self.rank, self.world_size)
        if self.world_size > 1:
            other._control = self._connect("beside", self._control)
        return other

    def share_buffers(self, module: torch.nn.Module) -> Callable[[], None]:
        """Give every rank rank 0's buffers (running statistics differ between ranks); the returned function puts this
        rank's own back, so that evaluating changes nothing. All ranks."""
        if self.world_size == 1:
            return lambda: None
        buffers = list(module.buffers())
        own = [buffer.clone() for buffer in buffers]
        for buffer in buffers:
            dist.broadcast(buffer, src=0)

        def restore() -> None:
            for buffer, value in zip(buffers, own, strict=True):
                buffer.copy_(value)

        return restore

    def send(self, data: memoryview) -> list[memoryview]:
        """Every rank's bytes, in rank order, on rank 0; nothing elsewhere. All ranks."""
        return [data] if self.world_size == 1 else self._control.gather(data, everywhere=False)

    def report_failure(self, exc: BaseException) -> str:
        """Leave this rank's failure where the others find it. When `exc` is only an echo of what happened elsewhere (a broken
        connection, a collective that nobody answered), returns what did, waiting some seconds for it; else empty. One rank,
        never raises."""
        if self.world_size == 1 or not dist.is_initialized():
            return ""
        _failures.append(type(exc).__name__)
        said: list[str] = []
        echo = isinstance(exc, PeerLost) or (
            isinstance(exc, RuntimeError) and any(word in str(exc) for word in _ECHOES)
        )
        if echo:
            self._control.close()  # the others notice as well, and ask while this rank does
        # A store on a host that is gone answers nothing and ends no call: hence a thread, which is left behind then.
        telling = self._ask if echo else self._tell
        asking = threading.Thread(target=telling, args=(exc, said), daemon=True)
        try:
            asking.start()
        except RuntimeError:  # no memory for a thread
            telling(exc, said)
        else:
            asking.join(_ANSWER_SECONDS + 5)
        self._control.close()  # not later: a save in the background may have its time yet
        if said or not echo:
            return "".join(said)
        return (
            f"rank {self.rank} on {self.hosts[self.rank]} lost rank 0 on {self.hosts[0]}, where ranks meet: that process or host is gone "
            f"(look at its output). Here: {str(exc).partition(_NEWLINE)[0]}"
        )

    def _tell(self, exc: BaseException, said: list[str]) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone with its owner: nobody is left to be told
            store = dist.distributed_c10d._get_default_store()
            if not store.check([self._failure]):
                text = "".join(traceback.format_exception_only(exc))
                store.set(self._failure, json.dumps({"rank": self.rank, "error": text[-8000:]}))

    def _ask(self, exc: BaseException, said: list[str]) -> None:
        """Who failed first, or who does not answer any more; nothing is said when the store is gone."""
        with contextlib.suppress(RuntimeError):
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{self._failure}/{self.rank}", "here")
            silent = set(range(self.world_size)) - {self.rank}
            begin = time.monotonic()
            while time.monotonic() < begin + (_ANSWER_SECONDS if silent else _TOLD_SECONDS):
                if store.check([self._failure]):
                    found: dict[str, Any] = json.loads(store.get(self._failure))
                    said.append(
                        f"rank {found['rank']} failed first, this rank {self.rank} stopped with it (the traceback is in the "
                        f"output of rank {found['rank']}):\n{found['error']}"
                    )
                    return
                silent = {rank for rank in silent if not store.check([f"{self._failure}/{rank}"])}
                time.sleep(0.1)
            names = " and ".join(f"rank {rank} on {self.hosts[rank]}" for rank in sorted(silent))
            said.append(
                f"{names} did not answer rank {self.rank} on {self.hosts[self.rank]}: dead, unreachable or stuck (look at its output; a "
                f"rank that only needs longer gets it with Trainer(timeout=...)). Here: {str(exc).partition(_NEWLINE)[0]}"
                if silent
                else ""
            )

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.agree([0])
