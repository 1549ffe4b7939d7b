"""The ranks of a run as one group: the messages between them, and how a process leaves the group.

Must not know: strategies, hooks, the loop, how connections are opened and broken (`fabricate.distributed.connections`). No pickle is sent
between ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from fabricate.data.flat_bytes import flat_bytes
from fabricate.distributed.connections import Connections, PeerLost, break_connections, opened
from fabricate.distributed.failures import Failures, is_echo
from fabricate.distributed.hang_report import Listener
from fabricate.distributed.stacks import Address, here
from fabricate.errors import ConfigurationError, RankError
from fabricate.strategies.sharding import broadcast

_exit_handlers: list[object] = []
_reported: list[str] = []
"""The failures of this process since the last `Group.join`."""
_MOST_NUMBERS = 16
_VALUES, _VALUE, _BYTES, _BARRIER, _END = range(-1, -6, -1)
_ROUNDS = {
    _VALUES: "values",
    _VALUE: "the value of rank 0",
    _BYTES: "bytes for rank 0",
    _BARRIER: "a barrier",
    _END: "the end of its process",
}
"""The kinds of round among ranks. A round that agrees on numbers has no entry: its kind is their count."""
_BUFFER_BYTES = 2**26
_FEW = 64
"""Up to this number of ranks, each rank gets the values of all: that takes fewer successive messages than the way over rank 0."""
_TASKS, _QUIET_LOOKS, _REST_SECONDS = Path("/proc/self/task"), 3, 10.0


def leave_at_exit() -> None:
    """Register, once, that the process group is closed when the interpreter ends. Otherwise the process could end while the group is in
    use."""
    if dist.is_initialized() and not _exit_handlers:
        _exit_handlers.append(atexit.register(_leave))


@contextlib.contextmanager
def looking_alone() -> Iterator[None]:
    """A context for user code that runs on one rank only: inside, `torch.distributed.is_initialized()` is False for libraries. Otherwise
    torchmetrics would wait in `compute` for ranks that do not compute. torch's own functions are not changed."""
    before = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = before


def remembered_buffers(module: torch.nn.Module) -> Callable[[], None]:
    """Record the buffers of `module`. The returned function gives each layer the same buffers again, if code has assigned others, with
    their earlier values and shapes: an observer of torch.ao grows in its first forward."""
    # A module of torch.jit does not let others be assigned.
    held = [(layer, dict(layer._buffers)) for layer in module.modules() if isinstance(layer._buffers, dict)]
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def restore() -> None:
        for layer, buffers in held:
            layer._buffers.clear()
            layer._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                if buffer.shape != value.shape:
                    buffer.resize_(value.shape)
                buffer.copy_(value)

    return restore


def _restore_unless_written(buffer: torch.Tensor, own: torch.Tensor, shared: torch.Tensor) -> None:
    """Give those elements of `buffer` their value in `own` that still have their value in `shared`. Does not wait for the device."""
    if buffer.shape != shared.shape or not buffer.numel():
        return
    now, before, mine = (flat_bytes(each).view(-1, own.element_size()) for each in (buffer, shared, own))
    kept = torch.where((now == before).all(1, keepdim=True), mine, now)
    with torch.no_grad():
        buffer.copy_(kept.flatten().view(own.dtype).reshape(own.shape))


def _leave() -> None:
    if dist.is_initialized():
        connections = opened().connections.get("main")
        if connections is not None and not connections.closed:
            # If a rank closes while another rank still sends to it, the other process aborts.
            with contextlib.suppress(RankError):  # a rank that is gone sends nothing
                Group(dist.get_rank(), dist.get_world_size(), connections).wait_for_the_end()
        opened().close()
        if not _reported:  # after a failure other ranks may be gone, and closing could wait for them
            dist.destroy_process_group()
    _let_threads_rest()


def _let_threads_rest() -> None:
    """Wait until gloo's threads sleep. A thread that releases a tensor needs the interpreter, and aborts the process if the interpreter is
    ending. The threads cannot be joined, because a DistributedDataParallel keeps its process group for ever."""
    if not _TASKS.is_dir():
        time.sleep(0.1)  # not on Linux: the time that this takes on an idle machine
        return
    quiet, deadline = 0, time.monotonic() + _REST_SECONDS
    while quiet < _QUIET_LOOKS and time.monotonic() < deadline:
        time.sleep(0.005)  # a thread that waits for the interpreter's lock sleeps too; it gets the lock now
        quiet = 0 if _gloo_works() else quiet + 1


def _gloo_works() -> bool:
    """Whether a thread of gloo runs, or is ready to run."""
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name, _, state = (task / "stat").read_text().partition("(")[2].rpartition(") ")
            if name.startswith("pt_gloo") and state[0] != "S":
                return True
    return False


class Group:
    """This rank and the other ranks of a run; a single process is a group too. All ranks call the methods, in the same order, unless a
    docstring says otherwise.

    Every exchange begins with a round: rank 0 gathers a row from each rank with the kind of its exchange, and broadcasts the result. If the
    kinds differ, every rank raises `RankError`.
    """

    def __init__(self, rank: int, world_size: int, connections: Connections | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self._connections = connections
        self._failures: Failures | None = None

    def join(self, timeout: datetime.timedelta) -> None:
        """Connect the ranks for a fit or another piece of work that they do together. `timeout`: how long a rank waits for the others."""
        _reported.clear()
        if self.world_size == 1 or not dist.is_initialized():
            return
        leave_at_exit()
        self._timeout = timeout
        # A group that an earlier fit opened may have another timeout.
        dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)
        self._connections = self._connect("main")
        try:
            self._failures = self._exchange_hosts(self._connections)
            broken = self.agree([int(opened().broken)])[0]
        except RuntimeError as exc:
            raise RankError(f"rank 0, which coordinates the ranks, is gone (look at its output): {exc}") from exc
        except PeerLost as exc:
            raise (self.report_failure(exc) or exc) from exc
        if broken:
            raise RankError(
                "the connections of torch's process group broke in an earlier fit of these processes; start the processes again"
            )

    def _connect(self, name: str, watched: str = "") -> Connections:
        try:
            return opened().connect(name, self.rank, socket.gethostname(), self._timeout, watched)
        except RuntimeError as exc:
            raise RankError(
                f"rank {self.rank} on {socket.gethostname()} could not open connections to the other ranks; ranks need a network on which "
                f"all ports of their hosts are open to each other. On this rank: {exc}"
            ) from exc

    def _exchange_hosts(self, connections: Connections) -> Failures:
        """Write this rank's host and process into the store. Only errors that name ranks read those of all ranks."""
        store, name = dist.distributed_c10d._get_default_store(), f"fabricate/{connections.group.group_name}"
        return Failures(store, name, connections.watched, self.rank, self.world_size)

    def addresses(self) -> list[Address]:
        """The address of each rank, at which `stacks.ask` finds what it is doing. One rank, after `join`."""
        return [here().address] if self._failures is None else self._failures.addresses()

    def leave(self, exc: BaseException | None = None) -> None:
        """After a failure `exc`, report it and close the connections, so that ranks that wait for this rank notice. Without a failure, do
        nothing. One rank."""
        if exc is None or self.world_size == 1 or not dist.is_initialized():
            return
        if not _reported:
            self.report_failure(exc)
        opened().close()

    def agree(self, flags: list[int]) -> list[int]:
        """Element-wise maximum of up to 16 integers of 64 bits over all ranks. No wait for the device."""
        if self.world_size == 1:
            return flags
        return self._round(len(flags), flags)[0]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.world_size > 1:
            self._round(_BARRIER, [])

    def wait_for_the_end(self) -> None:
        """Wait until the process of every rank is about to end."""
        self._round(_END, [])

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank. No pickle."""
        if self.world_size == 1:
            return [value]
        data = json.dumps(value).encode()
        (longest,), _ = self._round(_VALUES, [len(data)])
        rows = self._links.all_gather(_row(data.ljust(longest), longest))
        return [json.loads(row.numpy().tobytes()) for row in rows]

    def gather_if(self, wanted: bool, value: Any) -> list[Any]:
        """`gather_json(value)` if `wanted` is true on any rank; else an empty list, after one short round."""
        return self.gather_json(value) if self.agree([int(wanted)])[0] else []

    def all_have(self, value: Any) -> bool:
        """Whether every rank has the same JSON value. Ranks compare digests."""
        # 63 bits, so that its negative fits into 64 bits too.
        digest = xxhash.xxh3_64_intdigest(json.dumps(value, sort_keys=True).encode()) >> 1
        most, least = self.agree([digest, -digest])
        return most == -least

    def combine_json(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """The result of `combine` (JSON) for the list of every rank's JSON value, in rank order, on every rank. With many ranks `combine`
        runs on rank 0 only, and its `ConfigurationError` or `RankError` is raised on every rank; so the other ranks do not receive the
        values of all."""
        if self.world_size <= _FEW:
            return combine(self.gather_json(value))
        everyone, answer = self.send_json(value), [None, "", ""]
        if self.rank == 0:
            try:
                answer[0] = combine(everyone)
            except (ConfigurationError, RankError) as exc:
                answer[1:] = [type(exc).__name__, str(exc)]
        made, kind, text = self.broadcast_json(answer)
        if kind:
            raise (ConfigurationError if kind == "ConfigurationError" else RankError)(text)
        return made

    def send_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on rank 0; an empty list on the other ranks. No pickle."""
        return (
            [value] if self.world_size == 1 else [json.loads(bytes(p)) for p in self.send(json.dumps(value).encode())]
        )

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank; `value` is not used on the others. No pickle."""
        if self.world_size == 1:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        (size,), _ = self._round(_VALUE, [len(data)])
        return json.loads(self._links.broadcast(_row(data, size)).numpy().tobytes())

    def send(self, data: bytes | memoryview) -> list[memoryview]:
        """Every rank's bytes, in rank order, on rank 0; an empty list on the other ranks. They are sent in pieces, so that rank 0 needs
        little more memory than the result takes."""
        mine = memoryview(data).cast("B")
        if self.world_size == 1:
            return [mine]
        (longest,), rows = self._round(_BYTES, [len(mine)])
        sizes = [] if rows is None else [int(size) for size in rows[:, 1]]
        parts = [memoryview(bytearray(size)) for size in sizes]
        step = max(_BUFFER_BYTES // self.world_size, 1)
        for begin in range(0, longest, step):
            pieces = self._links.gather(_row(mine[begin : begin + step], min(step, longest - begin)))
            for part, size, piece in zip(parts, sizes, () if pieces is None else pieces.numpy(), strict=False):
                part[begin : begin + step] = piece[: max(size - begin, 0)].data
        return parts

    @property
    def _links(self) -> Connections:
        assert self._connections is not None
        return self._connections

    def _round(self, kind: int, numbers: list[int]) -> tuple[list[int], torch.Tensor | None]:
        """The maximum of each number over the ranks, and on rank 0 also every rank's row: kind, numbers. Raises `RankError` if the kinds
        differ."""
        assert len(numbers) <= _MOST_NUMBERS
        row = torch.tensor([kind, *numbers, *[0] * (_MOST_NUMBERS - len(numbers))])
        rows = self._links.gather(row)
        if rows is None:
            answer = torch.empty(3 + _MOST_NUMBERS, dtype=torch.int64)
        else:
            kinds = rows[:, 0].tolist()
            other = next((rank for rank, other_kind in enumerate(kinds) if other_kind != kind), 0)
            answer = torch.tensor([other, kinds[other], kind, *rows[:, 1:].amax(0).tolist()])
        other, sent, due, *largest = self._links.broadcast(answer).tolist()
        if other:
            _apart(other, sent, due)
        return largest[: len(numbers)], rows

    def counterparts(self, number: int) -> Any:
        """The process group of the ranks with the same place as this rank among `number` successive ranks. It stays open as long as the
        default group."""
        known = opened().counterparts
        if number not in known:
            for place in range(number):
                group = opened().new_group(list(range(place, self.world_size, number)))
                if self.rank % number == place:
                    known[number] = group
        dist.distributed_c10d._set_pg_timeout(self._timeout, known[number])
        return known[number]

    @contextlib.contextmanager
    def opening_groups(self) -> Iterator[None]:
        """A context in which a strategy opens process groups. Afterwards these, and the groups that strategies opened earlier, have the
        timeout of `join` instead of torch's default. This rank alone."""
        if not dist.is_initialized():
            yield
            return
        known, every = opened().of_strategies, dist.distributed_c10d._world.pg_map
        before = set(every)
        try:
            yield
        finally:
            known |= set(every) - before
            known &= set(every)  # without groups that were closed
            for group in known:
                dist.distributed_c10d._set_pg_timeout(self._timeout, group)

    def beside(self) -> Group:
        """A second group of the same ranks, for a thread of each rank, whose messages are separate from those of the main thread."""
        if self.world_size == 1:
            return Group(self.rank, self.world_size)
        return Group(self.rank, self.world_size, self._connect("beside", self._links.watched))

    def post(self, name: str) -> None:
        """Set the flag `name`, which must be new, in the store, where every rank can read it. Any thread of one rank, never raises."""
        if self._failures is not None:
            self._failures.post(name)

    def posted(self, name: str) -> bool:
        """Whether a rank has set the flag `name`. Any thread of one rank, never raises."""
        return self._failures is not None and self._failures.posted(name)

    def share_buffers(self, module: torch.nn.Module) -> Callable[[], None]:
        """Copy rank 0's buffers to every rank, because running statistics differ between ranks. Buffers of unequal shapes (tables that
        grow with the longest sequence of a rank) stay as they are. Returns a function that restores this rank's own values of the elements
        that were not written since, so that an evaluation keeps what its steps and hooks write and changes nothing else. All ranks."""
        if self.world_size == 1:
            return lambda: None
        buffers = dict(module.named_buffers())
        first, *others = self.gather_json({name: [str(b.dtype), *b.shape] for name, b in buffers.items()})
        replaced = []
        for buffer in (buffers[name] for name, kind in first.items() if all(kind == each.get(name) for each in others)):
            own = buffer.clone()
            broadcast(buffer)
            if self.rank:
                replaced.append((buffer, own, buffer.clone()))

        def restore() -> None:
            for each in replaced:
                _restore_unless_written(*each)

        return restore

    def report_failure(self, exc: BaseException, listeners: Sequence[Listener] = ()) -> RankError | None:
        """Write this rank's failure into the store, for the other ranks. If `exc` is only an echo of a failure on another rank (see
        `is_echo`), wait some seconds for reports instead, and return an error that says what happened and what each rank was doing.
        listeners: the code of the hooks, which the error names. One rank, never raises."""
        if self._failures is None:
            return None
        _reported.append(type(exc).__name__)
        kept = opened()
        if not is_echo(exc):
            self._failures.tell(exc)
            self._links.close()
            return None
        self._links.close()  # so that the other ranks notice as well, and report while this rank waits
        kept.broken = kept.broken or not isinstance(exc, PeerLost)

        def release_others() -> None:
            """Break the connections over which ranks wait for the sum of gradients."""
            kept.broken = True
            break_connections(dist.distributed_c10d._get_default_group())

        return self._failures.ask(exc, release_others, listeners)

    def all_failed(self, place: str) -> bool:
        """Whether every rank fails at the same `place` within some seconds, so that the ranks can still work together. Called while a
        failure is handled, before it is reported. The same on every rank; never raises."""
        return self.world_size == 1 or (self._failures is not None and self._failures.meet(place))


def _row(data: bytes | memoryview, size: int) -> torch.Tensor:
    """A tensor of `size` bytes that begins with `data`."""
    row = np.zeros(size, np.uint8)
    row[: len(data)] = np.frombuffer(data, np.uint8)
    return torch.from_numpy(row)


def _apart(other: int, sent: int, due: int) -> NoReturn:
    if sent > 0 and due > 0:
        there, here = f"{sent} numbers", str(due)
    else:
        there, here = (_ROUNDS.get(kind, "numbers") for kind in (sent, due))
    raise RankError(
        f"ranks made different calls: rank {other} sent {there} where rank 0 expects {here}; call the same methods of the trainer "
        "on every rank, in the same order"
    )
