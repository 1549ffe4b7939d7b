"""The messages between ranks when a run starts, agrees and saves, counted on up to 64 ranks, each of which is a thread."""

from __future__ import annotations

import datetime
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from campaigns import scale
from fabricate import CheckpointError, ConfigurationError, RankError
from fabricate.checkpoint.format.directory import Chunk, Reader, TensorRecord, committed
from fabricate.checkpoint.format.files import Files, Source
from fabricate.checkpoint.state import commit
from fabricate.checkpoint.state.contents import Content
from fabricate.checkpoint.state.logical import Saver, read, read_whole
from fabricate.distributed import group, meeting
from fabricate.distributed.connections import await_all
from fabricate.distributed.consistency import check_alike
from fabricate.distributed.group import Group
from fabricate.distributed.meeting import compare_builds
from fabricate.strategies.sharding import Part
from fabricate.strategies.single import Single
from fabricate.testing import run_ranks

SIZES = (16, 32, 64)
BUILT = {"torch": "2.13.0", "the device": "cpu"}
TIMEOUT = datetime.timedelta(seconds=60)
MANIFEST = {"step": 5, "run_id": "a run", "created": "2031-05-01T12:00:00Z"}


class Traffic:
    """Messages and bytes of one rank, in both directions."""

    def __init__(self) -> None:
        self.messages = self.bytes = 0

    def count(self, messages: int, size: int) -> None:
        self.messages += messages
        self.bytes += messages * size


class Exchange:
    """Where the threads of all ranks meet."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.rows: list[torch.Tensor] = [torch.empty(0)] * world_size

    def swap(self, rank: int, row: torch.Tensor) -> torch.Tensor:
        self.rows[rank] = row
        self.barrier.wait()
        rows = torch.stack(self.rows)
        self.barrier.wait()
        return rows


class Counted:
    """In place of `Connections`: the same messages, between threads."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank, self.traffic = exchange, rank, Traffic()
        self.peers = len(exchange.rows) - 1

    def gather(self, row: torch.Tensor) -> torch.Tensor | None:
        self.traffic.count(1 if self.rank else self.peers, row.nbytes)
        rows = self.exchange.swap(self.rank, row)
        return None if self.rank else rows

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        self.traffic.count(self.peers, row.nbytes)
        return self.exchange.swap(self.rank, row)

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        self.traffic.count(1 if self.rank else self.peers, values.nbytes)
        return self.exchange.swap(self.rank, values)[0]


class CountedStore:
    """torch's store, as one rank uses it: each call is a message there and one back."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.traffic = store, Traffic()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            answer = getattr(self.store, name)(*arguments)
            self.traffic.count(2, (len(str(arguments)) + len(str(answer))) // 2)
            return answer

        return call


def on_each(world_size: int, work: Callable[[Group], Any]) -> tuple[list[Any], list[Traffic]]:
    """What `work` returned, or raised, on each rank, and what it sent and received."""
    exchange = Exchange(world_size)
    connections: list[Any] = [Counted(exchange, rank) for rank in range(world_size)]

    def run(rank: int) -> Any:
        try:
            return work(Group(rank, world_size, connections[rank]))
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size))), [each.traffic for each in connections]


def on_each_at_the_store(world_size: int, work: Callable[[Any, int], None]) -> list[Traffic]:
    store = dist.HashStore()
    stores: list[Any] = [CountedStore(store) for _ in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(work, stores, range(world_size)))
    return [each.traffic for each in stores]


def alike(group: Group, settings: Mapping[str, Any]) -> None:
    module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(50)))
    check_alike(group, {"on_step": ["Progress", "Ema"]}, module, settings)


def save(group: Group, folder: Path, before: Callable[[], None] = lambda: None) -> None:
    shape = (4 * group.world_size,)
    chunk = Chunk("model/w", start=4 * group.rank, count=4, dtype="F32", shape=shape, data=lambda: bytes(16))
    content = Content([chunk], {}, {}, {"model/w": TensorRecord("F32", shape)}, dict(MANIFEST), [])
    commit.write(group, content, folder / "step-00000005", [], before)


def settle(traffic: Mapping[int, list[Traffic]]) -> None:
    """Rank 0 sends and receives in proportion to the number of ranks; each of the others the same on any number."""
    zero = {size: ranks[0] for size, ranks in traffic.items()}
    assert zero[64].messages - zero[32].messages <= 2 * (zero[32].messages - zero[16].messages)
    assert zero[64].bytes / 64 <= 1.1 * zero[16].bytes / 16
    others = [rank for ranks in traffic.values() for rank in ranks[1:]]
    assert len({rank.messages for rank in others}) == 1
    assert max(rank.bytes for rank in others) <= 1.1 * min(rank.bytes for rank in others)


def test_agreeing_takes_one_row_of_each_rank_and_one_answer() -> None:
    traffic = {}
    for size in SIZES:
        answers, traffic[size] = on_each(size, lambda group: group.agree([group.rank, -group.rank, 2**62, -(2**62)]))
        assert answers == [[size - 1, 0, 2**62, -(2**62)]] * size
        assert (traffic[size][0].messages, traffic[size][-1].messages) == (2 * (size - 1), 2)
        assert traffic[size][-1].bytes < 300
    settle(traffic)


def test_values_of_rank_0_and_values_for_rank_0_travel_no_further() -> None:
    def work(group: Group) -> list[Any]:
        return [group.broadcast_json("x" * 1000 if group.rank == 0 else "y"), group.send_json([group.rank % 7] * 100)]

    traffic = {}
    for size in SIZES:
        answers, traffic[size] = on_each(size, work)
        assert [value for value, _ in answers] == ["x" * 1000] * size
        assert answers[0][1] == [[rank % 7] * 100 for rank in range(size)]
        assert all(values == [] for _, values in answers[1:])
    settle(traffic)


def test_ranks_compare_digests_when_a_run_begins() -> None:
    traffic = {}
    for size in SIZES:
        answers, traffic[size] = on_each(size, lambda group: alike(group, {"seed": 1}))
        assert answers == [None] * size
        assert traffic[size][-1].messages == 2
    settle(traffic)


def test_what_differs_travels_and_is_named_on_every_rank() -> None:
    answers, traffic = on_each(64, lambda group: alike(group, {"seed": int(group.rank in (40, 50))}))
    assert {type(answer) for answer in answers} == {RankError}
    wanted = "ranks [40, 50] differ from rank 0 in settings: seed is 0 on rank 0 and 1 on rank 40; start every rank"
    assert all(str(answer).startswith(wanted) for answer in answers)
    assert max(each.bytes for each in traffic[1:]) < 64 * 1000, "the table of parameters, which is the same, is longer"


def test_builds_are_compared_at_the_store() -> None:
    """With the same number of calls on each rank, except the last one, which leaves the result."""
    for size in SIZES:
        traffic = on_each_at_the_store(size, lambda store, rank, size=size: compare_builds(store, rank, size, BUILT))
        assert max(rank.messages for rank in traffic) <= 12  # 10, or 12 if rank 0 is the last to compare
        assert sum(rank.messages for rank in traffic) == 2 * 3 * size + 2 * 2 + 2


def test_ranks_wait_for_each_other_at_the_store_with_few_messages() -> None:
    """How often each reads the store depends on how long it waits: at most twice a second."""

    def meet(store: Any, rank: int, world_size: int) -> None:
        await_all(store, "test", rank, world_size, "here", TIMEOUT)

    for size in SIZES:
        traffic = on_each_at_the_store(size, lambda store, rank, size=size: meet(store, rank, size))
        assert max(each.messages for each in traffic) < 2 * 3 + 2 * 30


def test_records_of_a_checkpoint_go_to_rank_0_only(tmp_path: Path) -> None:
    traffic = {}
    for size in SIZES:
        folder = tmp_path / str(size)
        answers, traffic[size] = on_each(size, lambda group, folder=folder: save(group, folder))
        assert answers == [None] * size
        assert [path.name for path in committed(folder)] == ["step-00000005"]
    settle(traffic)


def test_the_reason_of_a_save_that_one_rank_refuses_reaches_every_rank(tmp_path: Path) -> None:
    def work(group: Group) -> None:
        def refuse() -> None:
            if group.rank == 3:
                raise CheckpointError("not here")

        save(group, tmp_path, before=refuse)

    answers, _ = on_each(16, work)
    assert {type(answer) for answer in answers} == {CheckpointError}
    assert all("rank 3: not here. The previous checkpoint is intact" in str(answer) for answer in answers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda group: group.gather_json("x"), "rank 40 sent values where rank 0 expects numbers"),
        (lambda group: group.agree([1, 2, 3]), "rank 40 sent 3 numbers where rank 0 expects 2"),
    ],
)
def test_ranks_that_are_not_at_the_same_place_all_report_who_is_where(
    other: Callable[[Group], Any], message: str
) -> None:
    answers, _ = on_each(64, lambda group: other(group) if group.rank == 40 else group.agree([1, 2]))
    assert {type(answer) for answer in answers} == {RankError}
    assert all(message in str(answer) for answer in answers)


def test_values_are_combined_on_rank_0_alone_among_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_FEW", 0)
    traffic = {}
    for size in SIZES:
        answers, traffic[size] = on_each(
            size,
            lambda ranks: ranks.combine_json([ranks.rank, 0.1], lambda everyone: [sum(n for n, _ in everyone), 0.1]),
        )
        assert answers == [[size * (size - 1) // 2, 0.1]] * size
    settle(traffic)


@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize("kind", [ConfigurationError, RankError])
def test_what_cannot_be_combined_is_an_error_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, few: int, kind: type[Exception]
) -> None:
    monkeypatch.setattr(group, "_FEW", few)

    def combine(everyone: list[Any]) -> Any:
        raise kind(f"{len(everyone)} values")

    answers, _ = on_each(8, lambda ranks: ranks.combine_json(1, combine))
    assert [(type(answer), str(answer)) for answer in answers] == [(kind, "8 values")] * 8


def test_checking_that_all_ranks_have_one_value_takes_one_round() -> None:
    for odd, same in ((-1, True), (40, False)):
        answers, traffic = on_each(64, lambda ranks, odd=odd: ranks.all_have({"rows": int(ranks.rank == odd)}))
        assert answers == [same] * 64
        assert traffic[-1].messages == 2


def test_values_that_no_rank_wants_do_not_travel() -> None:
    answers, traffic = on_each(64, lambda ranks: ranks.gather_if(False, "x" * 1000))
    assert answers == [[]] * 64
    assert traffic[-1].messages == 2
    answers, _ = on_each(16, lambda ranks: ranks.gather_if(ranks.rank == 3, ranks.rank))
    assert answers == [list(range(16))] * 16


class Asked(Files):
    """Counts by name whose size was asked for, what was opened, and the directories whose names were read."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.opened: Counter[str] = Counter()
        self.listed = 0

    def size(self, path: Path) -> int:
        self.names[path.name] += 1
        return super().size(path)

    def open(self, path: Path) -> Source:
        self.opened[path.name] += 1
        return super().open(path)

    def listdir(self, path: Path) -> list[str]:
        self.listed += 1
        return super().listdir(path)


WEIGHTS = {f"model/w{number}": torch.arange(301.0) + number for number in range(20)}


def save_copies(group: Group, folder: Path, shards: int) -> None:
    """Tensors in `shards` shards, of each of which there are as many copies as the ranks allow."""
    saver = Saver(Single(), group.rank, group.world_size)
    copy, shard = divmod(group.rank, shards)
    for name, tensor in WEIGHTS.items():
        start, end = (len(tensor) * number // shards for number in (shard, shard + 1))
        part = Part(tensor[start:end], start, (301,), shards == 1, copy, group.world_size // shards)
        saver.part(name, part)
        saver.whole(f"{name}/steps", torch.tensor(4.0))
    content = Content(saver.chunks, {}, {}, saver.tensors, dict(MANIFEST), [])
    commit.write(group, content, folder / "step-00000005", [])


@pytest.mark.parametrize("shards", [1, 4])
def test_of_many_ranks_with_equal_parts_at_most_eight_write_them(tmp_path: Path, shards: int) -> None:
    start = 301 * (shards - 1) // shards
    for size in SIZES:
        folder = tmp_path / str(size)
        on_each(size, lambda ranks, folder=folder: save_copies(ranks, folder, shards))
        (path,) = committed(folder)
        files = Asked()
        with Reader(path, files) as reader:
            writers = min(8, size // shards)
            assert sum(len(record.chunks) for record in reader.manifest.files) == (writers * shards + 1) * len(WEIGHTS)
            for name, tensor in WEIGHTS.items():
                assert torch.equal(read(reader, name, start), tensor[start:])
                assert read_whole(reader, f"{name}/steps") == 4
        del files.opened["manifest.json"]
        assert set(files.opened.values()) == {1}
        assert len(files.opened) == writers + (shards > 1), (
            "rank 0 writes what is whole, and is the first of the copies"
        )
        with Reader(path) as reader:
            assert all(torch.equal(read_whole(reader, name), tensor) for name, tensor in WEIGHTS.items())


def test_ranks_that_open_a_checkpoint_together_look_at_each_file_once(tmp_path: Path) -> None:
    on_each(16, lambda ranks: save(ranks, tmp_path))
    (path,) = committed(tmp_path)
    files = Asked()
    for rank in range(16):
        Reader(path, files, part=(rank, 16)).close()
    assert files.listed == 1
    assert files.names.pop("manifest.json") == 16
    assert set(files.names.values()) == {1}
    assert len(files.names) == 16 + 16 + 1, "tensors and values of each rank, values of all"
    (path / "data-00005-of-00016.safetensors").write_bytes(b"short")
    messages = [fault(path, rank) for rank in range(16)]
    assert len(messages) - messages.count("") == 1
    assert "data-00005-of-00016.safetensors has 5 bytes" in max(messages)


def fault(path: Path, rank: int) -> str:
    try:
        Reader(path, part=(rank, 16)).close()
    except CheckpointError as exc:
        return str(exc)
    return ""


def test_a_rank_does_no_more_in_a_fit_on_three_ranks_than_on_two(tmp_path: Path) -> None:
    """Rank 0 may: each sends it something."""
    last = {size: run_ranks(scale.fits, size, tmp_path / str(size), "fsdp")[-1]["found"] for size in (2, 3)}
    for phase in ("start", "agree", "log over rank 0", "save", "resume"):
        for what in ("messages", "files"):
            two, three = (last[size].get(phase, {}).get(what, 0) for size in (2, 3))
            assert three == two, (phase, what)


def test_a_process_may_open_a_connection_to_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each of three groups; a shell allows 1,024 files by default."""
    limits = {"now": (1024, 10_000)}
    monkeypatch.setattr(meeting.resource, "getrlimit", lambda what: limits["now"])
    monkeypatch.setattr(meeting.resource, "setrlimit", lambda what, new: limits.update(now=new))
    meeting.allow_connections(64)
    assert limits["now"] == (1024, 10_000)
    meeting.allow_connections(1024)
    assert limits["now"] == (3 * 1024 + 512, 10_000)
    with pytest.raises(
        RankError, match=r"with 10000 ranks, a rank may need 30512 open files .* allows 10000 \(ulimit -Hn\). Raise"
    ):
        meeting.allow_connections(10_000)
