"""DataLoaders as data: the settings that are kept, the source of the order, and refused loaders."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from fabricate.data.source import Loading, Source
from fabricate.errors import ConfigurationError
from tests.support.sources import Numbers, Stream, flat, in_twos, opened, ranks, updates, values
from tests.support.workers import own_children


def test_a_loader_is_rebuilt_with_everything_but_its_sampler() -> None:
    def collate(rows: list[int]) -> list[int]:
        return [row + 100 for row in rows]

    source = opened(in_twos(5, collate_fn=collate))
    assert flat(updates([source])) == [100, 101, 102, 103, 104]
    assert (source.kind, source.batch_size, source.global_batch) == ("dataloader", 2, 2)
    assert (source.shuffle, source.notes) == (False, ())


def test_options_of_a_loader_that_are_not_applied_are_named() -> None:
    source = opened(in_twos(5, num_workers=1, persistent_workers=True, in_order=False))
    assert source.notes == (
        "train: persistent_workers=True of the DataLoader is not applied, because worker processes are started again for each epoch",
        "train: in_order=False of the DataLoader is not applied, because batches are read in order",
    )


def test_a_generator_that_does_not_determine_the_order_is_named() -> None:
    """The order follows from the seed of the fit, and nothing said that the generator of the loader has no effect on it."""
    orders = []
    for seed in (1, 2):
        source = opened(in_twos(5, shuffle=True, generator=torch.Generator().manual_seed(seed)))
        orders.append(flat(updates([source])))
        (note,) = source.notes
        assert note.startswith("train: the generator of the DataLoader is not applied to the order of the rows")
    assert orders[0] == orders[1]
    assert opened(in_twos(5, generator=torch.Generator())).notes == opened(in_twos(5, shuffle=True)).notes == ()


class Epochs(IterableDataset[list[int]]):
    """Rows that show the epoch which its workers know."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([self.epoch, row] for row in range(4))


def test_workers_of_a_stream_see_each_epoch_though_the_loader_would_keep_them() -> None:
    loader = DataLoader(Epochs(), batch_size=2, num_workers=1, persistent_workers=True, collate_fn=list)
    source = opened(loader)
    assert any("persistent_workers=True of the DataLoader is not applied" in note for note in source.notes)
    for epoch in range(3):
        batches = [batch for window in source.windows(epoch) for batch, _ in window.micro_batches]
        assert batches == [[[epoch, 0], [epoch, 1]], [[epoch, 2], [epoch, 3]]]
    assert loader.persistent_workers, "the user's own loader is unchanged"


class Nested(Numbers):
    """Rows of several tensors and text."""

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((2,), float(index)), "pair": (index, str(index)), "half": torch.ones(1).half() * index}


@pytest.mark.parametrize("collate", [None, list, lambda rows: [row["pair"] for row in rows]])
def test_batches_are_those_of_the_loader(collate: Any) -> None:
    """Without workers and pinning no DataLoader reads: what comes has to be what it would give."""
    loader = DataLoader(Nested(7), batch_size=3, collate_fn=collate)
    batches = [batch for window in opened(loader).windows(0) for batch, _ in window.micro_batches]
    assert len(batches) == 3
    assert str(batches) == str(list(loader))  # values, types, shapes


def test_a_shuffled_loader_takes_the_same_order_as_its_data_set() -> None:
    loader = in_twos(31, shuffle=True)
    by_hand = DataLoader(Numbers(31), batch_sampler=BatchSampler(RandomSampler(Numbers(31)), 2, False))
    expected = flat(updates([opened(Numbers(31), Loading(2))], epoch=4))
    assert flat(updates(ranks(lambda: loader, None, 3), epoch=4)) == expected
    assert flat(updates(ranks(lambda: by_hand, None, 3), epoch=4)) == expected


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1, -1, -1))


class OwnEpoch:
    """A sampler without random numbers that wants to be told the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        return iter([(row + self.epoch) % 6 for row in range(6)])


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: SubsetRandomSampler([1, 3, 5, 7, 9]),
        lambda: SubsetRandomSampler([1, 3, 5, 7, 9], generator=torch.Generator()),
        lambda: WeightedRandomSampler([1.0, 5.0] * 5, 7),
        lambda: RandomSampler(Numbers(10), replacement=True, num_samples=9),
        lambda: RandomSampler(Numbers(10), num_samples=4),
    ],
)
def test_any_other_sampler_gives_one_global_order_that_a_resume_finds_again(sampler: Any) -> None:
    data = [DataLoader(Numbers(10), batch_size=2, sampler=sampler()) for _ in range(3)]
    loaders = iter(data)
    torch.rand(3)  # the global state is elsewhere by now: it must not matter
    steps = updates(ranks(lambda: next(loaders), None, 3), epoch=2)
    assert len(flat(steps)) == len(sampler())
    again = DataLoader(Numbers(10), batch_size=6, sampler=sampler())
    assert flat(updates([opened(again)], epoch=2)) == flat(steps)
    assert flat(updates([opened(again)], epoch=3)) != flat(steps)


def test_a_random_sampler_that_draws_some_rows_or_repeats_them_is_asked_too() -> None:
    some = opened(DataLoader(Numbers(10), sampler=RandomSampler(Numbers(10), num_samples=4)))
    assert max(flat(updates([some], epoch=1)) + flat(updates([some], epoch=2))) > 3
    repeating = opened(DataLoader(Numbers(10), sampler=RandomSampler(Numbers(10), replacement=True)))
    assert len(set(flat(updates([repeating])))) < 10


def test_a_random_sampler_may_draw_more_rows_than_memory_holds() -> None:
    """minGPT trains on RandomSampler(data, replacement=True, num_samples=int(1e10)) until a number of updates is made."""

    def loader() -> DataLoader[Any]:
        return DataLoader(
            Numbers(1000), batch_size=32, sampler=RandomSampler(Numbers(1000), replacement=True, num_samples=10**10)
        )

    def rows(sources: list[Source], updates: int, start: int = 0, epoch: int = 0) -> list[int]:
        windows = zip(*(islice(source.windows(epoch, start), updates) for source in sources), strict=True)
        return [
            value for each in windows for window in each for batch, _ in window.micro_batches for value in values(batch)
        ]

    [source] = whole = ranks(loader, None, 1)
    first = rows(whole, 2100)  # beyond a block of 65536 rows
    assert source.updates_per_epoch == 10**10 // 32
    assert len(set(first[:2000])) < 1000 == len(set(first))
    assert first[-320:] == rows(ranks(loader, None, 2), 5, start=32 * 2090)
    assert first[:32] != first[2**16 : 2**16 + 32]
    assert first[:320] != rows(whole, 10, epoch=1)


def test_samplers_are_asked_for_their_order_even_when_they_derive_from_torchs_own() -> None:
    assert flat(updates([opened(DataLoader(Numbers(4), sampler=Backwards(Numbers(4))))])) == [3, 2, 1, 0]
    source = opened(DataLoader(Numbers(6), sampler=OwnEpoch()))
    assert flat(updates([source], epoch=2)) == [2, 3, 4, 5, 0, 1]
    assert "the rows of OwnEpoch, drawn for each epoch" in source.notes[0]


def test_keys_that_are_not_numbers_reach_the_data_set_as_they_are() -> None:
    class ByKey(Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, key: tuple[str, int]) -> int:
            return {("a", 1): 7, ("b", 2): 8}[key]

    assert flat(updates([opened(DataLoader(ByKey(), sampler=[("b", 2), ("a", 1)]))])) == [8, 7]


def test_the_batches_of_a_batch_sampler_are_dealt_to_the_ranks_whole() -> None:
    batches = [[0], [1, 2], [3, 4, 5], [6], [7, 8]]
    sources = ranks(lambda: DataLoader(Numbers(9), batch_sampler=batches), None, 2)
    steps = updates(sources)
    assert [rows for rows, *_ in steps] == [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
    assert [end for _, _, end, _ in steps] == [3, 7, 9]
    assert (sources[0].batch_size, sources[0].global_batch, sources[0].num_samples) == (None, None, None)
    assert sources[0].updates_per_epoch == 3
    with pytest.raises(
        ConfigurationError, match="cannot resume at row 4: an epoch has 9 rows, and no batch begins at that row"
    ):
        next(iter(sources[0].windows(0, start=4)))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda: DataLoader(Stream(6), batch_size=2), "its data set is a stream"),
        (
            lambda: DataLoader(TensorDataset(torch.arange(6).unsqueeze(1)), batch_size=None),
            "batch_size=None turns",
        ),
        (lambda: OwnLoop(Numbers(6), batch_size=4), "OwnLoop has an iterator of its own"),
    ],
)
def test_loaders_that_cannot_be_rebuilt_are_read_as_iterables(loader: Any, reason: str) -> None:
    sources = ranks(loader, None, 2)
    assert sorted(flat(updates(sources))) == list(range(6))
    assert sources[0].kind == "iterable"
    assert sources[0].resumes == "by replay"
    assert any(reason in note for note in sources[0].notes)


class OwnLoop(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


def test_a_shuffled_iterable_comes_in_the_same_order_on_every_rank() -> None:
    steps = updates(ranks(lambda: OwnLoop(Numbers(20), batch_size=2, shuffle=True), None, 2), epoch=1)
    assert sorted(flat(steps)) == list(range(20))
    generator = torch.Generator()
    used = OwnLoop(Numbers(20), batch_size=2, shuffle=True, generator=generator)
    first = flat(updates([opened(used)], epoch=1))
    assert flat(updates([opened(used)], epoch=1)) == first
    assert flat(updates([opened(used)], epoch=2)) != first


def test_the_users_worker_init_fn_runs_and_sees_the_users_data_set() -> None:
    class Late(Numbers):
        offset = 0

        def __getitem__(self, index: int) -> int:
            return index + self.offset

    def start(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.offset = 50  # type: ignore[attr-defined]

    source = opened(DataLoader(Late(4), batch_size=2, num_workers=1, worker_init_fn=start))
    assert flat(updates([source])) == [50, 51, 52, 53]


def test_rows_are_fetched_together_where_the_data_set_can() -> None:
    class Together(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [index + 1000 * len(indices) for index in indices]

    for num_workers in (0, 1):
        source = opened(Together(4), Loading(2, num_workers=num_workers, shuffle=False))
        assert flat(updates([source])) == [2000, 2001, 2002, 2003]


def test_worker_processes_are_gone_after_an_epoch() -> None:
    source = opened(Numbers(8), Loading(2, num_workers=2))
    flat(updates([source]))
    gc.collect()
    assert not own_children()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 4),
        ("num_workers", 2),
        ("collate_fn", list),
        ("shuffle", True),
        ("shuffle", False),
        ("drop_last", True),
    ],
)
def test_settings_that_a_loader_already_has_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=f"{name}=.* has no effect: train is a DataLoader, which has this setting itself"
    ):
        opened(in_twos(4), Loading(**{name: value}))


def test_a_distributed_sampler_is_refused() -> None:
    sampler: Any = DistributedSampler(Numbers(4), num_replicas=2, rank=0)
    for loader in (
        DataLoader(Numbers(4), sampler=sampler),
        DataLoader(Numbers(4), batch_sampler=BatchSampler(sampler, 2, False)),
    ):
        with pytest.raises(
            ConfigurationError, match=r"DistributedSampler, but fabricate splits .* Remove the sampler and pass"
        ):
            opened(loader)


def test_a_loader_that_accelerate_prepared_is_refused() -> None:
    from accelerate.data_loader import DataLoaderShard
    from accelerate.state import GradientState

    with pytest.raises(ConfigurationError, match="train is a DataLoaderShard that accelerate has already split"):
        opened(DataLoaderShard(Numbers(4), batch_size=2))
    GradientState._reset_state()  # a DataLoaderShard makes one for the process


class Grows(Dataset[int]):
    """Rows that depend on the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return 10 * self.epoch + index


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_gets_the_epoch_as_a_sampler_does(workers: int) -> None:
    source = opened(DataLoader(Grows(), batch_size=2, num_workers=workers))
    assert [flat(updates([source], epoch=epoch)) for epoch in (0, 3)] == [[0, 1, 2, 3], [30, 31, 32, 33]]
