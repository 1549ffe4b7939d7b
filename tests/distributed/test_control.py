"""Messages between ranks: here every rank is a thread, because the connections are the same."""

from __future__ import annotations

import datetime
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from fabricate import RankError
from fabricate.distributed.control import _CHILDREN, _FRAME, _GREETING, _NUMBERS, Control, PeerLost

TWO_LEVELS = _CHILDREN + 5
pytestmark = pytest.mark.timeout(120)


@contextmanager
def connected(number: int, seconds: float = 60) -> Iterator[list[Control]]:
    """One end per rank."""
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=seconds)
    controls = on_each(list(range(number)), lambda rank: Control(rank, number, store, "test", timeout))
    try:
        yield controls
    finally:
        for control in controls:
            control.close()


def on_each(items: list[Any], function: Callable[[Any], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(function, items))


def call(place: dict[str, Any], rank: int) -> socket.socket:
    """As a rank calls the one above."""
    connection = socket.create_connection(("127.0.0.1", place["port"]), 60)
    connection.sendall(_GREETING.pack(bytes.fromhex(place["token"]), rank))
    return connection


@pytest.mark.parametrize("number", [2, 3, TWO_LEVELS])
def test_every_rank_hears_what_all_say(number: int) -> None:
    def talk(item: tuple[int, Control]) -> list[Any]:
        rank, control = item
        return [
            control.maximum([rank, -rank, 2**62 if rank == number - 1 else -(2**62)]),
            [bytes(part) for part in control.gather(bytes([rank]) * rank, everywhere=True)],
            [bytes(part) for part in control.gather(bytes([rank]) * 100_000, everywhere=False)],
            control.maximum([]),
            [len(part) for part in control.gather(bytes(300_000 * (rank == number - 1)), everywhere=True)],
        ]

    with connected(number) as controls:
        answers = on_each(list(enumerate(controls)), talk)
    for rank, (largest, parts, rows, nothing, sizes) in enumerate(answers):
        assert largest == [number - 1, 0, 2**62]
        assert parts == [bytes([each]) * each for each in range(number)]
        assert rows == ([bytes([each]) * 100_000 for each in range(number)] if rank == 0 else [])
        assert nothing == []
        assert sizes == [0] * (number - 1) + [300_000]


@pytest.mark.parametrize("number", [2, TWO_LEVELS])
def test_all_notice_at_once_when_a_rank_leaves(number: int) -> None:
    """Also while another process holds a copy of its connection, as a forked worker does."""
    with connected(number) as controls:
        leaving = controls[-1]
        copy = leaving._parent[0][1].dup()
        leaving.close()

        def talk(control: Control) -> None:
            with pytest.raises(PeerLost, match=r"rank \d+ lost rank \d+: it closed the connection"):
                control.maximum([1])
            control.close()  # as a rank does that cannot go on

        on_each(controls[:-1], talk)
        copy.close()


def test_a_rank_that_says_nothing_is_lost_after_the_time_out() -> None:
    with (
        connected(2, seconds=5) as controls,
        pytest.raises(PeerLost, match=r"rank 0 lost rank 1: nothing came for 0:00:05"),
    ):
        controls[0].maximum([1])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda control: control.gather(b"x", everywhere=True), "rank 1 sent values where rank 0 expects numbers"),
        (lambda control: control.maximum([1, 2, 3]), "rank 1 sent 3 numbers where rank 0 expects 2"),
    ],
)
def test_ranks_that_are_not_at_the_same_are_told_so(other: Callable[[Control], Any], message: str) -> None:
    with connected(2) as controls, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(other, controls[1])
        with pytest.raises(RankError, match=message):
            controls[0].maximum([1, 2])
        controls[0].close()
        assert isinstance(answer.exception(), PeerLost)


def test_a_message_may_come_in_pieces() -> None:
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=60)
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(Control, 0, 2, store, "test", timeout)
        place = json.loads(store.get("test/0"))
        with call(place, 1) as connection:
            connection.sendall(_FRAME.pack(_NUMBERS, 0))
            control = zero.result()
            connection.recv(16 + _FRAME.size, socket.MSG_WAITALL)
            answer = pool.submit(control.maximum, [1])
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in _FRAME.pack(_NUMBERS, 8) + (7).to_bytes(8, "little"):
                connection.sendall(bytes([byte]))
                time.sleep(0.002)
            assert answer.result() == [7]
            control.close()


def test_strangers_are_not_taken_in() -> None:
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(Control, 0, 2, store, "test", timeout)
        place = json.loads(store.get("test/0"))
        for said in (b"", b"GET /", b"no rank, and no token"[:20]):
            with socket.create_connection(("127.0.0.1", place["port"])) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(100) == b""
        with call(place, 77) as nobody:
            assert nobody.recv(100) == b"", "there is no such rank"
        one = Control(1, 2, store, "test", timeout)
        answer = pool.submit(zero.result().maximum, [1])
        assert one.maximum([2]) == answer.result() == [2]
        for control in (one, zero.result()):
            control.close()


def test_a_stranger_who_says_nothing_keeps_nobody_waiting() -> None:
    """Each would have cost a time-out."""
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=60)
    with ThreadPoolExecutor(2) as pool, ExitStack() as strangers:
        zero = pool.submit(Control, 0, 2, store, "test", timeout)
        place = json.loads(store.get("test/0"))
        for _ in range(40):
            strangers.enter_context(socket.create_connection(("127.0.0.1", place["port"]), 60))
        controls = [Control(1, 2, store, "test", timeout), zero.result()]
        strangers.close()
        assert on_each(controls, lambda control: control.maximum([1])) == [[1], [1]]
        for control in controls:
            control.close()


def test_an_address_that_does_not_answer_keeps_nobody_waiting() -> None:
    """One accepts connections and says nothing; another rank has the token, at the last of the addresses."""
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=60)
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        port = silent.getsockname()[1]
        with socket.create_server(("127.0.0.2", port)) as right:
            place = {"port": port, "token": "ab" * 16, "addresses": ["127.0.0.1", "127.0.0.2"]}
            store.set("test/0", json.dumps(place))
            answer = pool.submit(Control, 1, 2, store, "test", timeout)
            connection, _ = right.accept()
            with connection:
                assert connection.recv(100) == _GREETING.pack(bytes.fromhex(place["token"]), 1)
                connection.sendall(bytes.fromhex(place["token"]))
                assert connection.recv(100) == _FRAME.pack(_NUMBERS, 0)
                connection.sendall(_FRAME.pack(_NUMBERS, 0))
                answer.result().close()


def test_while_ranks_connect_all_hear_of_one_that_is_gone() -> None:
    """It would come to the time-out otherwise. Of rank 33 only rank 1 knows, which has no connection to the others yet."""
    store, timeout = dist.HashStore(), datetime.timedelta(minutes=30)
    with connected(TWO_LEVELS) as known:
        known[33].close()
        rest = [rank for rank in range(TWO_LEVELS) if rank != 33]

        def again(rank: int) -> str:
            with pytest.raises(PeerLost) as found:
                Control(rank, TWO_LEVELS, store, "again", timeout, known[rank])
            return str(found.value)

        messages = on_each(rest, again)
    assert set(messages) == {"rank 1 lost rank 33: it closed the connection"}


def test_while_ranks_connect_all_hear_of_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> socket.socket:
        raise OSError(24, "Too many open files")

    store, timeout = dist.HashStore(), datetime.timedelta(minutes=30)
    with ThreadPoolExecutor(1) as pool:
        two = pool.submit(Control, 2, 3, store, "test", timeout)
        monkeypatch.setattr("fabricate.distributed.control._listening", refused)
        with pytest.raises(OSError, match="Too many"):
            Control(0, 3, store, "test", timeout)
        with pytest.raises(PeerLost, match=r"rank 0 on .* failed first: OSError\(24, 'Too many open files'\)"):
            two.result()


def test_a_rank_that_never_comes_is_named() -> None:
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=0.5)
    with pytest.raises(PeerLost, match=r"rank 1 and rank 2 did not meet rank 0 on .* within 0:00:00\.5"):
        Control(0, 3, store, "test", timeout)
    with pytest.raises(PeerLost, match=r"rank 0 did not meet rank 2 on .* within 0:00:00\.5"):
        Control(2, 3, store, "another", timeout)


def test_a_host_that_is_not_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    store.set("test/0", json.dumps({"port": port, "token": "00" * 16, "addresses": ["127.0.0.1", "127.0.0.2"]}))
    with pytest.raises(
        PeerLost,
        match=rf"does not reach rank 0 at port {port} \(127.0.0.1: .*refused; 127.0.0.2: .*refused\); ranks need",
    ):
        Control(1, 2, store, "test", datetime.timedelta(minutes=30))
