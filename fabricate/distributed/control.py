"""Small messages between ranks, over connections of their own, which never wait for the device.

Owns: the sockets of a run, who talks to whom, how a message is framed. Must not know: tensors, hooks, what the messages mean.

The ranks form a tree rooted in rank 0: what each says goes up, the answer comes down. That is two messages one after the
other on up to `_CHILDREN` + 1 ranks, four on up to a thousand. A collective of gloo wakes two threads at each end of every
message, which takes five to ten times as long. No pickle travels.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

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
_FIRST_PAUSE_SECONDS, _PAUSE_SECONDS = 0.005, 0.5
_LONGEST_SECONDS = 2_000_000.0  # a socket counts milliseconds in 32 bits


class PeerLost(RankError):
    """Another rank is gone or does not answer: an echo of what happened there."""


class Control:
    """The connections of this rank. Every method but `close` is called by all ranks, in the same order, by one thread.

    Raises `PeerLost` when a connection breaks or nothing comes for `timeout`, `RankError` when two ranks are not at the same place.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        name: str,
        timeout: datetime.timedelta,
        known: Control | None = None,
    ) -> None:
        """Connect. `name` is new in `store`, and the same on every rank. known: connections of the same ranks on which nothing
        is said meanwhile; one that ends tells who is gone. Where a rank fails before all are connected, the others raise its reason.
        """
        self._rank, self._timeout = rank, timeout
        self._parent: list[_Connection]
        self._children: list[_Connection]
        first = _CHILDREN * rank + 1
        children = range(first, max(first, min(first + _CHILDREN, world_size)))
        with _Meeting(rank, children, store, name, timeout) as meeting:
            found = meeting.meet(known._parent + known._children if known else [])
            for connection in found.values():
                connection.settimeout(min(timeout.total_seconds(), _LONGEST_SECONDS))
            self._parent = [(other, connection) for other, connection in found.items() if other not in children]
            self._children = [(child, found[child]) for child in children]
            self.maximum([])  # until all are connected

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


class _Meeting:
    """A rank on its way to its neighbours: it lets in those below, calls the one above, and notices meanwhile who is gone.

    All at once, so that neither a stranger who says nothing nor an address that does not answer keeps it waiting.
    """

    def __init__(self, rank: int, children: range, store: Store, name: str, timeout: datetime.timedelta) -> None:
        self._rank, self._children, self._above = rank, children, (rank - 1) // _CHILDREN
        self._store, self._name, self._timeout = store, name, timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._pause = _FIRST_PAUSE_SECONDS
        """Until the store is asked again, or the next address is called: each is twice as long as the one before."""
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._token = secrets.token_bytes(16)
        self._found: dict[int, socket.socket] = {}
        self._strangers: dict[socket.socket, tuple[str, bytes]] = {}
        """Connections whose other end is not known yet: at which address (of those that were called), what came so far."""
        self._place: dict[str, Any] = {}
        """Where the one above is; empty as long as that is not known."""
        self._addresses: list[tuple[Any, ...]] = []
        """Of that place, those that were not called yet."""
        self._failures: list[str] = []

    def __enter__(self) -> _Meeting:
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        try:
            if exc is not None:
                self._tell(exc)
        finally:
            self._selector.close()
            for connection in [*self._strangers, *(self._found.values() if exc else ())]:
                connection.close()
            if self._listener is not None:
                self._listener.close()

    def meet(self, known: Sequence[_Connection]) -> dict[int, socket.socket]:
        """The connections, by the rank at the other end."""
        try:
            self._listen()
            for other, connection in known:
                self._watch(other, connection)
            neighbours = [*self._children, *([self._above] if self._rank else [])]
            while missing := [other for other in neighbours if other not in self._found]:
                if self._rank and self._above in missing:
                    self._call([c.getpeername()[0] for other, c in known if other == self._above])
                self._wait(missing)
        except dist.DistError as exc:
            raise PeerLost(f"rank {self._rank} lost rank 0, which keeps the store where ranks meet: {exc}") from exc
        return self._found

    def _wait(self, missing: list[int]) -> None:
        """For the next event, one only: it may end what others are about."""
        events = self._selector.select(self._pause)
        for key, _ in events[:1]:
            try:
                key.data()
            except OSError as exc:
                if key.fileobj not in self._strangers:
                    raise
                self._drop(key.fileobj, exc)
        if not events:
            self._pause = min(2 * self._pause, _PAUSE_SECONDS)
            if self._store.check([f"{self._name}/failed"]):
                raise PeerLost(self._store.get(f"{self._name}/failed").decode())
        if time.monotonic() >= self._deadline:
            names = " and ".join(f"rank {other}" for other in missing)
            raise PeerLost(f"{names} did not meet rank {self._rank} on {socket.gethostname()} within {self._timeout}")

    def _tell(self, exc: BaseException) -> None:
        """Those who wait would not notice. Raises, in place of an echo, what happened first."""
        echo = isinstance(exc, PeerLost)
        mine = str(exc) if echo else f"rank {self._rank} on {socket.gethostname()} failed first: {exc!r}"
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0
            first = self._store.compare_set(f"{self._name}/failed", "", mine).decode()
            if echo and first != mine:
                raise PeerLost(first) from exc

    def _watch(self, other: int, connection: socket.socket) -> None:
        def look() -> None:
            try:
                gone = "" if connection.recv(1, socket.MSG_PEEK) else "it closed the connection"
            except OSError as exc:
                gone = str(exc)
            if gone:
                raise PeerLost(f"rank {self._rank} lost rank {other}: {gone}")
            self._selector.unregister(connection)  # it has met all of its own, and speaks already

        self._selector.register(connection, selectors.EVENT_READ, look)

    def _listen(self) -> None:
        if not self._children:
            return
        listener = self._listener = _listening()

        def accept() -> None:
            with contextlib.suppress(ConnectionError):  # it went away again
                connection, _ = listener.accept()
                self._hear(connection, "", _GREETING.size, partial(self._welcome, connection))

        self._selector.register(listener, selectors.EVENT_READ, accept)
        place = {"port": listener.getsockname()[1], "token": self._token.hex(), "addresses": _addresses()}
        self._store.set(f"{self._name}/{self._rank}", json.dumps(place))

    def _hear(self, connection: socket.socket, address: str, size: int, then: Callable[[bytes], None]) -> None:
        """Call `then` with the first `size` bytes that come."""

        def hear() -> None:
            said = self._strangers[connection][1]
            piece = connection.recv(size - len(said))
            if not piece:
                raise ConnectionError("it closed the connection")
            self._strangers[connection] = (address, said + piece)
            if len(said + piece) == size:
                then(said + piece)

        connection.setblocking(False)
        self._strangers[connection] = (address, b"")
        self._selector.register(connection, selectors.EVENT_READ, hear)

    def _welcome(self, connection: socket.socket, said: bytes) -> None:
        """Somebody called: let it in if it is one of those below, and the first to say so."""
        token, child = _GREETING.unpack(said)
        if token != self._token or child not in self._children or child in self._found:
            raise ConnectionError("a stranger")
        connection.sendall(token)
        self._settle(child, connection)

    def _call(self, likely: list[str]) -> None:
        """Try one more address of the one above, as soon as it is known where that is."""
        if not self._place:
            if not self._store.check([f"{self._name}/{self._above}"]):  # waiting there would watch nothing, and warns
                return
            self._place = json.loads(self._store.get(f"{self._name}/{self._above}"))
            master = os.environ.get("MASTER_ADDR") if self._above == 0 else None
            hosts = dict.fromkeys([*likely, *([master] if master else []), *self._place["addresses"]])
            for host in hosts:
                try:
                    self._addresses += socket.getaddrinfo(host, self._place["port"], type=socket.SOCK_STREAM)
                except OSError as exc:
                    self._failures.append(f"{host}: {exc}")
        if self._addresses:
            family, kind, protocol, _, address = self._addresses.pop(0)
            try:
                self._dial(socket.socket(family, kind, protocol), address)
            except OSError as exc:  # no such protocol, no way
                self._failures.append(f"{address[0]}: {exc}")
        elif not any(address for address, _ in self._strangers.values()):
            raise PeerLost(
                f"rank {self._rank} on {socket.gethostname()} does not reach rank {self._above} at port {self._place['port']} ("
                f"{'; '.join(self._failures)}); ranks need a network on which all ports of their hosts are open to each other"
            )

    def _dial(self, connection: socket.socket, address: tuple[Any, ...]) -> None:
        def greet() -> None:
            if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            self._selector.unregister(connection)
            self._hear(connection, address[0], len(self._token), partial(self._answered, connection))
            connection.sendall(_GREETING.pack(bytes.fromhex(self._place["token"]), self._rank))

        connection.setblocking(False)
        self._strangers[connection] = (address[0], b"")
        self._selector.register(connection, selectors.EVENT_WRITE, greet)
        code = connection.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._drop(connection, OSError(code, os.strerror(code)))

    def _answered(self, connection: socket.socket, said: bytes) -> None:
        if said != bytes.fromhex(self._place["token"]):
            raise ConnectionError("another program answers there")
        self._settle(self._above, connection)
        for other in [each for each, (address, _) in self._strangers.items() if address]:
            self._drop(other, ConnectionError("not needed"))

    def _drop(self, connection: Any, exc: OSError) -> None:
        address, _ = self._strangers.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        if address:
            self._failures.append(f"{address}: {exc}")

    def _settle(self, other: int, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        del self._strangers[connection]
        self._selector.unregister(connection)
        self._found[other] = connection
        self._watch(other, connection)


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


def _listening() -> socket.socket:
    """On a free port of every address."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


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
