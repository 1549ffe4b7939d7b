"""Small messages between ranks, over connections of their own, which never wait for the device.

Owns: the sockets of a run, who talks to whom, how a message is framed. Must not know: tensors, hooks, what the messages mean.

The ranks form a tree rooted in rank 0: what each says goes up, the answer comes down. That is two messages one after the
other on up to `_CHILDREN` + 1 ranks, four on up to a thousand. A collective of gloo wakes two threads at each end of every
message, which takes five to ten times as long. No pickle travels.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import psutil  # type: ignore[import-untyped]
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from fabricate.errors import RankError

Buffer = bytes | bytearray | memoryview
_Connection = tuple[int, socket.socket]
"""The rank at the other end, and the way there."""

_CHILDREN = 32
_FRAME = struct.Struct("<8sQ")  # what kind of round, how many bytes follow
_PART = struct.Struct("<IQ")  # whose bytes, how many
_GREETING = struct.Struct("<16sI")  # the token, who calls
_NUMBERS, _VALUES = b"numbers\0", b"values\0\0"
_SMALL = 2**16
_CONNECT_SECONDS, _GREET_SECONDS, _RETRY_SECONDS = 10.0, 60.0, 0.1
_LONGEST_SECONDS = 2_000_000.0  # a socket counts milliseconds in 32 bits


class PeerLost(RankError):
    """Another rank is gone or does not answer: an echo of what happened there."""


class Control:
    """The connections of this rank. Every method but `close` is called by all ranks, in the same order, by one thread.

    Raises `PeerLost` when a connection breaks or nothing comes for `timeout`, `RankError` when two ranks are not at the same place.
    """

    def __init__(self, rank: int, world_size: int, store: Store, name: str, timeout: datetime.timedelta) -> None:
        """Connect. `name` is new in `store`, and the same on every rank."""
        self._rank, self._timeout = rank, timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._parent: list[_Connection] = []
        self._children: list[_Connection] = []
        first = _CHILDREN * rank + 1
        try:
            if first < world_size:
                self._expect(range(first, min(first + _CHILDREN, world_size)), store, name)
            if rank:
                self._call((rank - 1) // _CHILDREN, store, name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """This rank says nothing more, which the others notice at once. One rank."""
        for _, connection in self._parent + self._children:
            with contextlib.suppress(OSError):  # broken already
                connection.shutdown(socket.SHUT_RDWR)  # closing alone does nothing while a forked child holds it too
            connection.close()

    def maximum(self, numbers: Sequence[int]) -> list[int]:
        """The element-wise maximum of integers of 64 bits, as many on each rank; on every rank."""
        layout = f"<{len(numbers)}q"
        found: Sequence[int] = numbers
        for child in self._children:
            found = list(map(max, found, self._numbers(child, layout)))
        for parent in self._parent:
            self._send(parent, _NUMBERS, struct.pack(layout, *found))
            found = self._numbers(parent, layout)
        for child in self._children:
            self._send(child, _NUMBERS, struct.pack(layout, *found))
        return list(found)

    def gather(self, mine: Buffer, *, everywhere: bool) -> list[memoryview]:
        """Every rank's bytes in the order of ranks: on all of them, or on rank 0, and nothing on the others."""
        whole: list[Buffer] = [_PART.pack(self._rank, len(mine)), mine]
        whole += [self._receive(child, _VALUES) for child in self._children]
        parts = {0: memoryview(mine)}
        received = whole[2:]
        for parent in self._parent:
            self._send(parent, _VALUES, *whole)
            whole = received = [self._receive(parent, _VALUES)]
            parts = {}
        for child in self._children:
            self._send(child, _VALUES, *(whole if everywhere else ()))
        for body in received:
            parts.update(_split(memoryview(body)))
        return [parts[rank] for rank in sorted(parts)]

    def _numbers(self, other: _Connection, layout: str) -> tuple[int, ...]:
        body = self._receive(other, _NUMBERS)
        if len(body) != struct.calcsize(layout):
            self._apart(other[0], f"{len(body) // 8} numbers", str(struct.calcsize(layout) // 8))
        return struct.unpack(layout, body)

    def _send(self, other: _Connection, kind: bytes, *pieces: Buffer) -> None:
        rank, connection = other
        size = sum(len(piece) for piece in pieces)
        frame: tuple[Buffer, ...] = (_FRAME.pack(kind, size), *pieces)
        try:
            for piece in (b"".join(frame),) if size <= _SMALL else frame:
                connection.sendall(piece)
        except OSError as exc:
            self._lost(rank, exc)

    def _receive(self, other: _Connection, kind: bytes) -> Buffer:
        """One frame: no more can be there, because each round is answered before the next begins."""
        rank, connection = other
        try:
            data = connection.recv(_SMALL)
            if len(data) < _FRAME.size:
                data += _exactly(connection, _FRAME.size - len(data))
            found, size = _FRAME.unpack_from(data)
            if found != kind:
                self._apart(rank, *(name.rstrip(b"\0").decode(errors="replace") for name in (found, kind)))
            body = data[_FRAME.size :]
            return body if len(body) == size else _exactly(connection, size, body)
        except OSError as exc:
            self._lost(rank, exc)

    def _lost(self, other: int, exc: OSError) -> NoReturn:
        what = f"nothing came for {self._timeout}" if isinstance(exc, TimeoutError) else str(exc)
        raise PeerLost(f"rank {self._rank} lost rank {other}: {what}") from exc

    def _apart(self, other: int, sent: str, due: str) -> NoReturn:
        raise RankError(
            f"ranks are not at the same place: rank {other} sent {sent} where rank {self._rank} expects {due}; call the same methods of "
            "the trainer on every rank, in the same order"
        )

    def _expect(self, children: range, store: Store, name: str) -> None:
        """Take in those below."""
        token, found = secrets.token_bytes(16), dict[int, socket.socket]()
        with _listening(len(children)) as listener:
            place = {"port": listener.getsockname()[1], "token": token.hex(), "addresses": _addresses()}
            store.set(f"{name}/{self._rank}", json.dumps(place))
            while missing := [child for child in children if child not in found]:
                listener.settimeout(self._left())
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    names = " and ".join(f"rank {child}" for child in missing)
                    raise PeerLost(f"{names} did not connect to rank {self._rank} within {self._timeout}") from None
                child = _welcome(connection, token)
                if child in children:
                    found[child] = self._settled(connection)
                    self._children = sorted(found.items())
                else:
                    connection.close()

    def _call(self, parent: int, store: Store, name: str) -> None:
        """Connect to the one above."""
        key = f"{name}/{parent}"
        try:
            store.wait([key], datetime.timedelta(seconds=self._left()))
        except dist.DistError as exc:
            raise PeerLost(f"rank {parent} was not there for rank {self._rank} within {self._timeout}") from exc
        place = json.loads(store.get(key))
        master = os.environ.get("MASTER_ADDR") if parent == 0 else None
        addresses = list(dict.fromkeys(([master] if master else []) + place["addresses"]))
        while True:
            failures = []
            for address in addresses:
                try:
                    connection = _greet(address, place["port"], bytes.fromhex(place["token"]), self._rank)
                except OSError as exc:
                    failures.append(f"{address}: {exc}")
                else:
                    self._parent = [(parent, self._settled(connection))]
                    return
            if time.monotonic() >= self._deadline:
                raise PeerLost(
                    f"rank {self._rank} on {socket.gethostname()} does not reach rank {parent} at port {place['port']} ("
                    f"{'; '.join(failures)}); ranks need a network on which all ports of their hosts are open to each other"
                )
            time.sleep(_RETRY_SECONDS)

    def _left(self) -> float:
        return min(max(self._deadline - time.monotonic(), 0.001), _LONGEST_SECONDS)

    def _settled(self, connection: socket.socket) -> socket.socket:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(min(self._timeout.total_seconds(), _LONGEST_SECONDS))
        return connection


def address_towards(host: str) -> str | None:
    """This host's own address on the way to `host`; None when that is not known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket sends nothing when it connects
        found: str = probe.getsockname()[0]
        return found
    return None


def _addresses() -> list[str]:
    """Where this host may be reached, the likeliest first."""
    master = os.environ.get("MASTER_ADDR")
    likely = address_towards(master) if master else None
    families = (socket.AF_INET, socket.AF_INET6)
    every = [each.address for found in psutil.net_if_addrs().values() for each in found if each.family in families]
    usable = [address for address in every if "%" not in address]  # that of a link only
    return list(dict.fromkeys(([likely] if likely else []) + sorted(usable, key=_is_loopback)))


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def _listening(backlog: int) -> socket.socket:
    """On a free port of every address."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _welcome(connection: socket.socket, token: bytes) -> int:
    """Which rank calls; -1 for a stranger."""
    try:
        connection.settimeout(_CONNECT_SECONDS)
        said, rank = _GREETING.unpack(_exactly(connection, _GREETING.size))
        if said != token:
            return -1
        connection.sendall(token)
    except OSError:
        return -1
    return int(rank)


def _greet(address: str, port: int, token: bytes, rank: int) -> socket.socket:
    """A connection to the rank that holds `token`; `OSError` where it is not."""
    connection = socket.create_connection((address, port), _CONNECT_SECONDS)
    try:
        connection.settimeout(_GREET_SECONDS)
        connection.sendall(_GREETING.pack(token, rank))
        if _exactly(connection, len(token)) != token:
            raise ConnectionError("another program answers there")
    except OSError:
        connection.close()
        raise
    return connection


def _exactly(connection: socket.socket, size: int, begun: bytes = b"") -> bytearray:
    """`size` bytes, the first of which may be there already."""
    found = bytearray(size)
    found[: len(begun)] = begun
    rest = memoryview(found)[len(begun) :]
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionError("it closed the connection")
        rest = rest[count:]
    return found


def _split(body: memoryview) -> Iterator[tuple[int, memoryview]]:
    while body:
        rank, size = _PART.unpack_from(body)
        begin = _PART.size
        yield rank, body[begin : begin + size]
        body = body[begin + size :]
