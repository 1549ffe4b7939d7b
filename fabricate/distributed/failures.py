"""The search for the rank that failed first or does not answer, and for what each rank was doing. Ranks write this into torch's store, and
read it when they lose a connection.

Must not know: how connections are opened, what ranks send each other, hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fabricate.distributed import stacks
from fabricate.distributed.connections import PeerLost
from fabricate.distributed.hang_report import Listener, report
from fabricate.distributed.stacks import Address, Seen
from fabricate.errors import RankError
from fabricate.launch import uncaught

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
_REPORT_SECONDS, _BREAK_SECONDS, _ANSWER_SECONDS, _MEET_SECONDS, _TELL_SECONDS = 5.0, 2.0, 15.0, 10.0, 5.0
_NEWLINE = "\n"


def is_echo(exc: BaseException) -> bool:
    """Whether `exc` is only a consequence of a failure on another rank: a broken connection, or a message without an answer."""
    return isinstance(exc, PeerLost | dist.DistError) or (
        isinstance(exc, RuntimeError) and any(word in str(exc) for word in _ECHOES)
    )


class Failures:
    """The failures of one `Group.join`. `name`: the prefix of its keys in the store, under which no failure is stored yet; `over`: the key
    that ends the waits of the other ranks."""

    def __init__(self, store: Store, name: str, over: str, rank: int, world_size: int) -> None:
        """Write this rank's address into the store, and wait for the address of rank 0, because an error that names rank 0 may have to be
        raised without the store. All ranks."""
        self._store, self._name, self._over = store, name, over
        self._rank, self._world_size = rank, world_size
        self._addresses = {rank: stacks.here().address}
        store.set(f"{name}/host/{rank}", json.dumps(dataclasses.asdict(self._addresses[rank])))
        self._address(0)

    def tell(self, exc: BaseException) -> None:
        """Write this rank's failure into the store, if it is the first, and end the waits of the other ranks. One rank, never raises."""

        def leave() -> None:
            text = "".join(traceback.format_exception_only(exc))[-8000:]
            left = {"rank": self._rank, "error": text, "gist": uncaught.gist(exc, self._rank)}
            self._store.compare_set(f"{self._name}/first", "", json.dumps(left))
            self._store.set(self._over, "")

        self._aside(leave)

    def ask(
        self, exc: BaseException, break_connections: Callable[[], None], listeners: Sequence[Listener] = ()
    ) -> RankError:
        """An error that says what happened on the other ranks, if `exc` is only an echo of it (see `is_echo`). Waits some seconds for their
        reports. One rank, never raises.

        break_connections: called if a rank has not answered after some seconds, because it may wait for this rank. listeners: the code of
        the hooks, which are the same on every rank."""
        answer: list[RankError] = []
        own = json.dumps(stacks.here().after(exc).to_json())

        def look() -> None:
            self._store.set(f"{self._name}/here/{self._rank}", own)
            self._store.set(self._over, "")
            answer.append(self._first() or self._silent(_reason(exc), break_connections, listeners))

        self._aside(look)
        if answer:
            return answer[0]
        return RankError(
            f"rank {self._rank} on {self._host(self._rank)} lost its connection to rank 0 on {self._host(0)}, which coordinates "
            f"the ranks: the process of rank 0 or its host is gone (look at its output). On this rank: {_reason(exc)}"
        )

    def meet(self, place: str) -> bool:
        """Whether every rank fails at this `place` within some seconds. False if the store is gone; otherwise the same on every rank. Never
        raises."""
        answer: list[bool] = []

        def look() -> None:
            keys = [f"{self._name}/failed/{rank}" for rank in range(self._world_size)]
            decision = f"{self._name}/together"
            self._store.set(keys[self._rank], place)
            deadline = time.monotonic() + _MEET_SECONDS
            while not (here := self._store.check(keys)) and time.monotonic() < deadline:
                if self._store.check([decision]):
                    break
                time.sleep(0.05)
            same = here and all(self._store.get(key).decode() == place for key in keys)
            answer.append(self._store.compare_set(decision, "", "yes" if same else "no") == b"yes")

        self._aside(look)
        return bool(answer) and answer[0]

    def post(self, name: str) -> None:
        """Set the flag `name` in the store, for the other ranks. Any thread of one rank, never raises."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._name}/note/{name}", "")

    def posted(self, name: str) -> bool:
        """Whether a rank has set the flag `name`. Any thread of one rank, never raises."""
        with contextlib.suppress(RuntimeError):
            return bool(self._store.check([f"{self._name}/note/{name}"]))
        return False

    def _aside(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread. If the store's host is gone, calls of the store never end; then the thread is abandoned."""

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # the process with the store is gone
                work()

        thread = threading.Thread(target=run, name="fabricate-failures", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory for a thread
            run()
        else:
            thread.join(_ANSWER_SECONDS + _TELL_SECONDS + 5)

    def _first(self) -> RankError | None:
        if not self._store.check([f"{self._name}/first"]):
            return None
        report = json.loads(self._store.get(f"{self._name}/first"))
        error = RankError(
            f"rank {report['rank']} failed first, and this rank {self._rank} stopped because of that (the traceback is in the "
            f"output of rank {report['rank']}):\n{report['error']}"
        )
        error.first = tuple(report["gist"])
        return error

    def _silent(self, reason: str, break_connections: Callable[[], None], listeners: Sequence[Listener]) -> RankError:
        """Wait until a failure is reported, every rank has answered or another rank has ended its search. Returns the reported failure, or
        an error with the ranks that did not answer."""
        silent = set(range(self._world_size)) - {self._rank}
        begin, broken, over = time.monotonic(), False, f"{self._name}/found"
        while (waited := time.monotonic() - begin) < (_ANSWER_SECONDS if silent else _REPORT_SECONDS):
            if first := self._first():
                return first
            if self._store.check([over]):
                break
            silent = {rank for rank in silent if not self._store.check([f"{self._name}/here/{rank}"])}
            if silent and waited > _BREAK_SECONDS and not broken:
                broken = True
                self._ask_neighbours(silent)  # before their waits end and their stacks change
                break_connections()
            time.sleep(0.1)
        report = self._found(silent, listeners)
        seen = f"\n{report['seen']}" if report["seen"] else ""
        if not report["silent"]:
            return RankError(
                f"all ranks still answer and none reported an error: they waited for each other at different places, or the network "
                f"between them failed. Rank {self._rank} on {self._host(self._rank)}: {reason}{seen}"
            )
        names = " and ".join(f"rank {rank} on {self._host(rank)}" for rank in report["silent"])
        return RankError(
            f"{names} did not answer rank {report['by']} on {self._host(report['by'])}: dead, unreachable or stuck (look at its "
            f"output; if it only needs more time, set Trainer(timeout=...)). On this rank: {reason}{seen}"
        )

    def _ask_neighbours(self, silent: Iterable[int]) -> None:
        """Write what the silent ranks of this host are doing into the store. Each is examined by only one of the ranks that answer."""
        host = self._host(self._rank)
        near = [rank for rank in sorted(silent) if self._host(rank) == host]
        mine = [rank for rank in near if self._claimed(f"asked/{rank}")]
        for rank, seen in zip(mine, stacks.ask([self._address(rank) for rank in mine]), strict=True):
            self._store.set(f"{self._name}/seen/{rank}", json.dumps(seen.to_json()))

    def _found(self, silent: Iterable[int], listeners: Sequence[Listener]) -> dict[str, Any]:
        """The ranks that did not answer ("silent"), the rank that found this ("by"), and the text of what each rank was doing ("seen"). One
        rank reads all reports, and the others read its result."""
        key = f"{self._name}/found"
        finding = {"by": self._rank, "silent": sorted(silent), "seen": ""}
        if self._claimed("finds"):
            finding["seen"] = report({rank: self._seen(rank) for rank in range(self._world_size)}, listeners)
            self._store.set(key, json.dumps(finding))
            return finding
        deadline = time.monotonic() + _TELL_SECONDS
        while not (there := self._store.check([key])) and time.monotonic() < deadline:
            time.sleep(0.1)
        return dict(json.loads(self._store.get(key))) if there else finding

    def _seen(self, rank: int) -> Seen:
        """What a rank reported of itself, or what another rank saw of it."""
        for key in (f"{self._name}/here/{rank}", f"{self._name}/seen/{rank}"):
            if self._store.check([key]):
                return Seen.from_json(json.loads(self._store.get(key)))
        address = self._address(rank)
        return Seen(address.host, address.process, "unknown")

    def _claimed(self, what: str) -> bool:
        """Whether this rank is the first to claim `what`, which only one rank does."""
        mine = str(self._rank)
        return bool(self._store.compare_set(f"{self._name}/{what}", "", mine) == mine.encode())

    def _address(self, rank: int) -> Address:
        if rank not in self._addresses:
            self._addresses[rank] = Address(**json.loads(self._store.get(f"{self._name}/host/{rank}")))
        return self._addresses[rank]

    def _host(self, rank: int) -> str:
        return self._address(rank).host

    def addresses(self) -> list[Address]:
        """The address of each rank, at which `stacks.ask` finds what it is doing. One rank, while no rank has failed."""
        return [self._address(rank) for rank in range(self._world_size)]


def _reason(exc: BaseException) -> str:
    return str(exc).partition(_NEWLINE)[0]
