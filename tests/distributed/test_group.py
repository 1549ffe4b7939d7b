"""Messages between ranks, which are processes connected through torch. `test_scale.py` counts them on many ranks."""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fabricate import RankError
from fabricate.distributed.connections import await_all, opened
from fabricate.distributed.group import Group
from fabricate.distributed.meeting import open_process_group
from fabricate.testing import run_ranks
from fabricate.testing.ranks import close_pools

pytestmark = pytest.mark.timeout(300)


def joined(seconds: float = 60) -> Group:
    """This process, which `run_ranks` started, as one of its ranks."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=seconds)
    if not dist.is_initialized():
        open_process_group(rank, world_size, torch.device("cpu"), timeout)
    group = Group(rank, world_size)
    group.join(timeout)
    return group


@contextlib.contextmanager
def failing(group: Group) -> Iterator[list[Any]]:
    """What the ranks' messages raise, what it turns out to be, after how many seconds; the work then ends as a failed fit does."""
    answer: list[Any] = []
    began = time.monotonic()
    try:
        yield answer
    except Exception as exc:
        seconds = time.monotonic() - began
        answer += [type(exc).__name__, str(group.report_failure(exc) or exc), seconds]
        group.leave(exc)


@pytest.fixture
def own_processes() -> Iterator[None]:
    """For a test after which the processes cannot work together any more."""
    close_pools()
    yield
    close_pools()


def talk() -> list[Any]:
    group = joined()
    rank, last = group.rank, group.rank == group.world_size - 1
    group.barrier()
    return [
        group.agree([rank, -rank, 2**62 if last else -(2**62)]),
        group.gather_json([rank] * rank),
        [bytes(part) for part in group.send(bytes([rank]) * 100_000 * rank)],
        group.agree([]),
        group.send_json("é" * rank),
        [len(value) for value in group.gather_json("x" * (300_000 * last))],
        group.broadcast_json({"rank": rank}),
        group.beside().agree([rank]),
    ]


@pytest.mark.parametrize("number", [2, 3])
def test_every_rank_gets_the_values_of_all_ranks(number: int) -> None:
    ranks = range(number)
    for rank, answers in enumerate(run_ranks(talk, number)):
        largest, values, parts, nothing, texts, sizes, first, beside = answers
        assert largest == [number - 1, 0, 2**62]
        assert values == [[each] * each for each in ranks]
        assert parts == ([bytes([each]) * 100_000 * each for each in ranks] if rank == 0 else [])
        assert nothing == []
        assert texts == (["é" * each for each in ranks] if rank == 0 else [])
        assert sizes == [0] * (number - 1) + [300_000]
        assert first == {"rank": 0}
        assert beside == [number - 1]


def large() -> list[tuple[int, int]]:
    group = joined()
    size = 2**26 + 3 if group.rank else 5
    return [(len(part), sum(part[-3:])) for part in group.send(memoryview(bytes([1]) * size))]


def test_large_data_travels_in_pieces() -> None:
    assert run_ranks(large, 2) == [[(5, 3), (2**26 + 3, 3)], []]


def left() -> list[Any]:
    """The last rank fails while a process that it forked holds copies of its connections; then all begin again."""
    group = joined()
    with failing(group) as answer:
        if group.rank == group.world_size - 1:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            try:
                raise ValueError("mine alone")
            finally:
                group.leave(ValueError("mine alone"))
                time.sleep(5)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        group.agree([1])
    return [*answer, joined().agree([group.rank])]


def test_all_ranks_notice_at_once_when_one_fails_and_can_begin_again() -> None:
    *others, own = run_ranks(left, 3)
    for kind, message, seconds, again in others:
        assert kind == "PeerLost"
        assert message.startswith("rank 2 failed first, and this rank ")
        assert "ValueError: mine alone" in message
        assert seconds < 5
        assert again == [2]
    assert own[0] == "ValueError"


def silent() -> list[Any]:
    group = joined(seconds=5)
    with failing(group) as answer:
        if group.rank == 1:
            time.sleep(30)
        group.agree([1])
    return answer


@pytest.mark.usefixtures("own_processes")
def test_a_rank_that_sends_nothing_is_named_after_the_time_out() -> None:
    kind, message, seconds = run_ranks(silent, 3)[0]
    assert kind == "PeerLost"
    assert message.startswith("rank 1 on ")
    assert re.match(r"rank 1 on \S+ did not answer rank [02] on ", message), "by the first that noticed"
    assert 5 <= seconds < 29


def lost_between() -> list[Any]:
    """The last rank is as good as dead after one piece of work."""
    group = joined()
    group.agree([1])
    if group.rank == group.world_size - 1:
        opened().close()
        time.sleep(20)
        return []
    try:
        joined()
    except RankError as exc:
        return [str(exc)]
    return ["joined"]


@pytest.mark.usefixtures("own_processes")
def test_a_rank_that_was_lost_between_two_fits_is_named_when_the_next_begins() -> None:
    *others, _ = run_ranks(lost_between, 3)
    for (message,) in others:
        assert message.startswith("rank 2 on ")
        assert "dead, unreachable or stuck" in message


def apart() -> list[Any]:
    group = joined()
    answers = []
    for case in ("values", "numbers"):
        with failing(group) as answer:
            if group.rank == 0:
                group.agree([1, 2])
            elif case == "values":
                group.gather_json("x")
            else:
                group.agree([1, 2, 3])
        answers.append(answer[:2])
        group = joined()
    return answers


def test_ranks_that_are_not_at_the_same_place_report_it() -> None:
    for values, numbers in run_ranks(apart, 2):
        assert values[0] == numbers[0] == "RankError"
        assert "rank 1 sent values where rank 0 expects numbers" in values[1]
        assert "rank 1 sent 3 numbers where rank 0 expects 2" in numbers[1]


def interrupted() -> float:
    group = joined()
    began = time.monotonic()
    if group.rank == 1:
        time.sleep(6)
    else:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        noticed: list[float] = []
        before = signal.signal(signal.SIGUSR2, lambda *_: noticed.append(time.monotonic() - began))
        group.agree([1])
        signal.signal(signal.SIGUSR2, before)
        return noticed[0]
    group.agree([1])
    return 0


def test_a_signal_is_handled_while_a_rank_waits() -> None:
    assert run_ranks(interrupted, 2)[0] < 3


def limited() -> float:
    """A second piece of work has a time-out of its own."""
    joined(seconds=100)
    group = joined(seconds=3)
    with failing(group) as answer:
        if group.rank == 1:
            time.sleep(8)
        group.agree([1])
    return float(answer[2])


@pytest.mark.usefixtures("own_processes")
def test_each_fit_has_its_own_time_out() -> None:
    assert 3 <= run_ranks(limited, 2)[0] < 7


def test_a_rank_that_never_comes_is_named() -> None:
    store, timeout = dist.HashStore(), datetime.timedelta(seconds=0.5)
    with pytest.raises(RankError, match=r"rank 1 and rank 2 did not connect to rank 0 on here within "):
        await_all(store, "test", 0, 3, "here", timeout)
    store.set("another/1", "")
    with pytest.raises(RankError, match=r"rank 0 did not connect to rank 2 on here within "):
        await_all(store, "another", 2, 3, "here", timeout)
