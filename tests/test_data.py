"""The data room, with ranks simulated in one process: a source per rank, compared row by row."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
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
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from fabricate.data import Loading, Source, open_source, rows_of
from fabricate.errors import ConfigurationError

# (world size, accumulation, batch size) with the same global batch of 12
FACTORS = [(1, 1, 12), (1, 3, 4), (2, 3, 2), (2, 1, 6), (3, 1, 4), (3, 2, 2), (4, 3, 1), (6, 2, 1), (12, 1, 1)]


class Numbers(Dataset[int]):
    """Rows that are their own index."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Augmentation that draws from all three global generators."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Stream(IterableDataset[int]):
    def __init__(self, rows: int, shuffled: bool = False) -> None:
        self.rows = rows
        self.shuffled = shuffled

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.rows).tolist() if self.shuffled else range(self.rows)


class Rereadable:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def opened(data: Any, loading: Loading | None = None, **settings: Any) -> Source:
    defaults: dict[str, Any] = {"argument": "train", "training": True, "rank": 0, "world_size": 1, "seed": 5}
    return open_source(data, loading=loading or Loading(), **{**defaults, **settings})


def ranks(data: Callable[[], Any], loading: Loading | None, world_size: int, **settings: Any) -> list[Source]:
    return [opened(data(), loading, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]


def values(batch: Any) -> list[int]:
    batch = torch.cat(list(batch)) if isinstance(batch, list | tuple) and isinstance(batch[0], torch.Tensor) else batch
    return [int(value) for value in (batch.flatten().tolist() if isinstance(batch, torch.Tensor) else batch)]


def updates(sources: list[Source], epoch: int = 0, start: int = 0) -> list[tuple[list[int], int, int, bool]]:
    """Per update: the rows that count, micro-step by micro-step and rank by rank; window rows; end; last."""
    found = []
    for windows in zip(*(source.windows(epoch, start) for source in sources), strict=True):
        heads = {(window.num_micro_steps, window.rows, window.end, window.last) for window in windows}
        assert len(heads) == 1, "ranks disagree about a window"
        steps = [list(window.micro_batches) for window in windows]
        assert {len(step) for step in steps} == {windows[0].num_micro_steps}
        rows: list[int] = []
        for micro_step in zip(*steps, strict=True):
            real = [values(batch) for batch, count in micro_step if count]
            assert [len(batch) for batch in real] == [count for _, count in micro_step if count]
            step_rows = [row for batch in real for row in batch]
            for batch, count in micro_step:
                if not count:
                    assert set(values(batch)) <= set(step_rows), "a stand-in is made of the micro-step's own rows"
            rows += step_rows
        assert len(rows) == windows[0].rows
        found.append((rows, windows[0].rows, windows[0].end, windows[0].last))
    return found


def flat(found: list[tuple[list[int], int, int, bool]]) -> list[int]:
    return [row for rows, *_ in found for row in rows]


def in_twos(rows: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(rows), batch_size=2, **options)


# ------------------------------------------------------------------------------------------------------------ the order


@pytest.mark.parametrize("rows", [5, 12, 40])
@pytest.mark.parametrize(
    ("data", "batched"),
    [
        (Numbers, True),
        (Stream, True),
        (lambda rows: Stream(rows, shuffled=True), True),
        (lambda rows: Rereadable([torch.tensor([row]) for row in range(rows)]), False),
    ],
    ids=["dataset", "stream", "shuffled stream", "iterable"],
)
def test_an_update_holds_the_same_rows_in_the_same_order_however_it_is_split(
    data: Any, batched: bool, rows: int
) -> None:
    expected = None
    for world_size, accumulation, batch_size in FACTORS:
        if not batched:  # of 12 batches of one row
            world_size, accumulation = world_size, 12 // world_size
        loading = Loading(batch_size=batch_size) if batched else None
        found = updates(ranks(lambda: data(rows), loading, world_size, accumulation=accumulation), epoch=3)
        expected = expected or found
        assert found == expected
    assert expected is not None
    assert sorted(flat(expected)) == list(range(rows))
    assert [last for *_, last in expected] == [False] * (len(expected) - 1) + [True]
    assert expected[-1][2] == rows


def test_more_ranks_than_rows_leave_the_rest_standing_in() -> None:
    sources = ranks(lambda: Numbers(2), Loading(batch_size=4), world_size=5)
    counts = [next(iter(next(iter(source.windows(0))).micro_batches))[1] for source in sources]
    assert counts == [1, 1, 0, 0, 0]


def test_training_data_sets_are_shuffled_anew_each_epoch_and_evaluation_ones_are_not() -> None:
    source = opened(Numbers(30), Loading(batch_size=4))
    assert flat(updates([source], epoch=0)) != flat(updates([source], epoch=1))
    assert flat(updates([source], epoch=0)) == flat(updates([source], epoch=0))
    unshuffled = opened(Numbers(30), Loading(batch_size=4, shuffle=False))
    assert flat(updates([unshuffled], epoch=1)) == list(range(30))
    seen = [
        index
        for batch in opened(Numbers(30), Loading(4), training=False).batches(stand_ins=True)
        for index in batch.indices
    ]
    assert seen == list(range(30))


@pytest.mark.parametrize(
    ("data", "loading"),
    [
        (lambda: Numbers(29), Loading(batch_size=2)),
        (lambda: Stream(29, shuffled=True), Loading(batch_size=2)),
        (lambda: Rereadable([torch.full((size,), size) for size in (2, 1, 4, 2, 3, 2, 2)]), None),
        (lambda: DataLoader(Numbers(29), batch_sampler=BatchSampler(range(29), 3, False)), None),
        (lambda: DataLoader(Numbers(29), batch_size=2, sampler=SubsetRandomSampler(range(29))), None),
    ],
    ids=["dataset", "shuffled stream", "iterable", "batches", "sampler"],
)
def test_a_resume_from_every_position_continues_with_the_rows_that_were_left(
    data: Any, loading: Loading | None
) -> None:
    whole = updates(ranks(data, loading, 2, accumulation=2), epoch=1)
    for done, (_, _, end, _) in enumerate(whole, start=1):
        assert updates(ranks(data, loading, 2, accumulation=2), epoch=1, start=end) == whole[done:]


def test_a_resume_with_another_world_size_loses_and_repeats_nothing() -> None:
    head = updates(ranks(lambda: Numbers(50), Loading(2), 3, accumulation=2), epoch=2)[:2]
    tail = updates(ranks(lambda: Numbers(50), Loading(3), 2, accumulation=2), epoch=2, start=head[-1][2])
    assert flat(head) + flat(tail) == flat(updates([opened(Numbers(50), Loading(12))], epoch=2))


def test_a_position_that_is_no_multiple_of_a_changed_global_batch_still_continues() -> None:
    source = opened(Numbers(20), Loading(batch_size=6, shuffle=False))
    assert [rows for rows, *_ in updates([source], start=7)] == [list(range(7, 13)), list(range(13, 19)), [19]]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_do_not_change_the_order(num_workers: int) -> None:
    assert updates([opened(Numbers(23), Loading(4, num_workers=num_workers), accumulation=2)], epoch=1) == updates(
        [opened(Numbers(23), Loading(4), accumulation=2)], epoch=1
    )


def test_a_stream_read_in_a_worker_is_the_same_stream() -> None:
    for world_size in (1, 2):
        here = updates(ranks(lambda: Stream(23, shuffled=True), Loading(2), world_size, accumulation=2), epoch=1)
        there = updates(
            ranks(lambda: Stream(23, shuffled=True), Loading(2, num_workers=1), world_size, accumulation=2), epoch=1
        )
        assert here == there


def noise(num_workers: int, start: int = 0) -> list[Any]:
    source = opened(Noisy(14), Loading(3, num_workers=num_workers), accumulation=2)
    return [batch.tolist() for window in source.windows(1, start) for batch, _ in window.micro_batches]


def test_augmentation_depends_neither_on_the_number_of_workers_nor_on_where_a_run_resumed() -> None:
    one = noise(1)
    assert noise(2) == one
    assert noise(2, start=6) == one[2:]
    draws = [row[1:] for batch in one for row in batch]
    assert len({tuple(row) for row in draws}) == len(draws)


@pytest.mark.parametrize(
    ("data", "loading"),
    [
        (lambda: Numbers(9), Loading(2)),
        (lambda: Numbers(9), Loading(2, num_workers=1)),
        (lambda: in_twos(9, shuffle=True), None),
        (lambda: DataLoader(Numbers(9), batch_size=2, sampler=WeightedRandomSampler([1.0] * 9, 9)), None),
        (lambda: Stream(9, shuffled=True), Loading(2)),
        (lambda: DataLoader(Stream(9, shuffled=True), batch_size=2), None),
    ],
    ids=["dataset", "workers", "shuffled loader", "sampler", "stream", "loader over a stream"],
)
def test_iterating_leaves_the_global_random_state_alone(data: Any, loading: Loading | None) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    source = opened(data(), loading)
    for window in source.windows(0):
        list(window.micro_batches)
    list(opened(data(), loading, training=False).batches(stand_ins=True))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    np.testing.assert_equal(before[2], np.random.get_state(legacy=False))


def test_without_workers_rows_are_fetched_when_asked_for_and_draw_from_the_global_generators() -> None:
    torch.manual_seed(1)
    source = opened(Noisy(8), Loading(4, shuffle=False))
    first = next(iter(next(iter(source.windows(0))).micro_batches))[0]
    torch.manual_seed(1)
    assert first[:, 3].tolist() == [torch.rand(()).item() for _ in range(4)]


def test_leaving_a_window_early_does_not_shift_the_next_one() -> None:
    for data in (Numbers(12), Stream(12)):
        source = opened(data, Loading(2, shuffle=False if isinstance(data, Numbers) else None), accumulation=2)
        firsts = [values(next(window.micro_batches)[0]) for window in source.windows(0)]
        assert firsts == [[0, 1], [4, 5], [8, 9]]


# --------------------------------------------------------------------------------------------------- counts and limits


def test_the_counts_of_a_data_set_are_global() -> None:
    source = opened(Numbers(29), Loading(2), world_size=3, accumulation=2)
    assert (source.kind, source.batch_size, source.num_samples, source.global_batch, source.updates_per_epoch) == (
        "dataset",
        2,
        29,
        12,
        3,
    )
    assert source.resumes == "exactly, by position"


@pytest.mark.parametrize(
    ("data", "loading"),
    [
        (lambda: Numbers(29), Loading(2, drop_last=True)),
        (lambda: in_twos(29, drop_last=True, shuffle=True), None),
        (lambda: Stream(29), Loading(2, drop_last=True)),
    ],
)
def test_drop_last_leaves_out_the_incomplete_global_batch(data: Any, loading: Loading | None) -> None:
    sources = ranks(data, loading, 3, accumulation=2)
    found = updates(sources)
    assert [(rows, last) for _, rows, _, last in found] == [(12, False), (12, True)]
    if sources[0].kind != "stream":
        assert (sources[0].num_samples, sources[0].updates_per_epoch) == (24, 2)


def test_drop_last_is_not_applied_to_evaluation_and_the_plan_says_so() -> None:
    for source in (
        opened(in_twos(5, drop_last=True), argument="val", training=False),
        opened(Numbers(5), Loading(2, drop_last=True), argument="val", training=False),
        opened(Stream(5), Loading(2, drop_last=True), argument="val", training=False),
    ):
        assert [index for batch in source.batches(stand_ins=True) for index in batch.indices] == [0, 1, 2, 3, 4]
        assert "val: drop_last=True is not applied, evaluation reads every row once" in source.notes


@pytest.mark.parametrize(("limit", "rows"), [(3, 12), (100, 50), (0.1, 5), (0.58, 29), (0.0001, 1), (1.0, 50)])
def test_a_limit_counts_micro_steps_or_a_share_of_the_data(limit: int | float, rows: int) -> None:
    sources = ranks(lambda: Numbers(50), Loading(2), 2, accumulation=2, limit=limit)
    found = updates(sources)
    assert sources[0].num_samples == len(flat(found)) == rows
    assert sources[0].updates_per_epoch == len(found)
    assert found[-1][3]


def test_a_limit_in_micro_steps_also_ends_an_endless_stream() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            row = 0
            while True:
                yield row
                row += 1

    sources = ranks(Endless, Loading(2), 2, accumulation=2, limit=3)
    assert [(rows, last) for _, rows, _, last in updates(sources)] == [(8, False), (4, True)]


@pytest.mark.parametrize("limit", [0, -1, 0.0, 1.5, True, "10"])
def test_a_limit_that_means_nothing_is_refused(limit: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"limit=.* \(for train\) must be a number of micro-steps .* or a share"
    ):
        opened(Numbers(4), Loading(2), limit=limit)


def test_a_share_of_data_without_a_length_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"train has no length, so limit=0.5 .* pass a number of micro-steps"):
        opened(Stream(4), Loading(2), limit=0.5)


# -------------------------------------------------------------------------------------------------------- DataLoaders


def test_a_loader_is_rebuilt_with_everything_but_its_sampler() -> None:
    def collate(rows: list[int]) -> list[int]:
        return [row + 100 for row in rows]

    source = opened(in_twos(5, collate_fn=collate))
    assert flat(updates([source])) == [100, 101, 102, 103, 104]
    assert (source.kind, source.batch_size, source.global_batch) == ("dataloader", 2, 2)
    assert source.notes == ("train: the DataLoader is rebuilt around a global order; not shuffled",)


def test_a_shuffled_loader_takes_the_same_order_as_its_data_set() -> None:
    loader = in_twos(31, shuffle=True)
    by_hand = DataLoader(Numbers(31), batch_sampler=BatchSampler(RandomSampler(Numbers(31)), 2, False))
    expected = flat(updates([opened(Numbers(31), Loading(2))], epoch=4))
    assert flat(updates(ranks(lambda: loader, None, 3), epoch=4)) == expected
    assert flat(updates(ranks(lambda: by_hand, None, 3), epoch=4)) == expected


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1, -1, -1))


class Told:
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
    found = updates(ranks(lambda: next(loaders), None, 3), epoch=2)
    assert len(flat(found)) == len(sampler())
    again = DataLoader(Numbers(10), batch_size=6, sampler=sampler())
    assert flat(updates([opened(again)], epoch=2)) == flat(found)
    assert flat(updates([opened(again)], epoch=3)) != flat(found)


def test_a_random_sampler_that_draws_some_rows_or_repeats_them_is_asked_too() -> None:
    some = opened(DataLoader(Numbers(10), sampler=RandomSampler(Numbers(10), num_samples=4)))
    assert max(flat(updates([some], epoch=1)) + flat(updates([some], epoch=2))) > 3
    repeating = opened(DataLoader(Numbers(10), sampler=RandomSampler(Numbers(10), replacement=True)))
    assert len(set(flat(updates([repeating])))) < 10


def test_samplers_are_asked_for_their_order_even_when_they_derive_from_torchs_own() -> None:
    assert flat(updates([opened(DataLoader(Numbers(4), sampler=Backwards(Numbers(4))))])) == [3, 2, 1, 0]
    source = opened(DataLoader(Numbers(6), sampler=Told()))
    assert flat(updates([source], epoch=2)) == [2, 3, 4, 5, 0, 1]
    assert "the rows of Told, drawn per epoch" in source.notes[0]


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
    found = updates(sources)
    assert [rows for rows, *_ in found] == [[0, 1, 2], [3, 4, 5, 6], [7, 8]]
    assert [end for _, _, end, _ in found] == [3, 7, 9]
    assert (sources[0].batch_size, sources[0].global_batch, sources[0].num_samples) == (None, None, None)
    assert sources[0].updates_per_epoch == 3
    with pytest.raises(
        ConfigurationError, match="cannot resume at row 4: an epoch has 9 rows and no batch begins there"
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
    found = updates(ranks(lambda: OwnLoop(Numbers(20), batch_size=2, shuffle=True), None, 2), epoch=1)
    assert sorted(flat(found)) == list(range(20))
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
    assert not torch.multiprocessing.active_children()


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
    with pytest.raises(ConfigurationError, match=f"{name}=.* has no effect: train is a DataLoader, which has its own"):
        opened(in_twos(4), Loading(**{name: value}))


def test_a_distributed_sampler_is_refused() -> None:
    sampler: Any = DistributedSampler(Numbers(4), num_replicas=2, rank=0)
    for loader in (
        DataLoader(Numbers(4), sampler=sampler),
        DataLoader(Numbers(4), batch_sampler=BatchSampler(sampler, 2, False)),
    ):
        with pytest.raises(
            ConfigurationError, match=r"DistributedSampler, but fabricate splits .* drop the sampler and pass"
        ):
            opened(loader)


def test_a_loader_that_accelerate_prepared_is_refused() -> None:
    from accelerate.data_loader import DataLoaderShard

    with pytest.raises(ConfigurationError, match="train is a DataLoaderShard that accelerate has already split"):
        opened(DataLoaderShard(Numbers(4), batch_size=2))


# ------------------------------------------------------------------------------------------------- data sets, streams


def test_lists_tensors_and_subsets_are_data_sets_when_a_batch_size_is_given() -> None:
    for data in ([5, 6, 7], (5, 6, 7), torch.tensor([5, 6, 7]), Subset(Numbers(9), [5, 6, 7])):
        source = opened(data, Loading(2, shuffle=False))
        assert source.kind == "dataset"
        assert flat(updates([source])) == [5, 6, 7]


def test_a_hugging_face_data_set_yields_tensors_and_the_plan_says_so() -> None:
    table = datasets.Dataset.from_dict({"ids": [[1, 2], [3, 4], [5, 6]]})
    source = opened(table, Loading(2, shuffle=False))
    window = next(iter(source.windows(0)))
    assert next(window.micro_batches)[0]["ids"].tolist() == [[1, 2], [3, 4]]
    assert 'with_format("torch")' in source.notes[0]
    assert opened(table.with_format("numpy"), Loading(2)).notes == ()
    collated = opened(table, Loading(2, shuffle=False, collate_fn=lambda rows: [row["ids"] for row in rows]))
    assert next(next(iter(collated.windows(0))).micro_batches)[0] == [[1, 2], [3, 4]]


def hugging_face_stream(rows: int = 40) -> Any:
    return datasets.Dataset.from_dict({"row": list(range(rows))}).to_iterable_dataset(num_shards=4)


def stream_rows(sources: list[Source], epoch: int, start: int = 0) -> list[list[int]]:
    found = []
    for windows in zip(*(source.windows(epoch, start) for source in sources), strict=True):
        pairs = [pair for window in windows for pair in window.micro_batches]
        found.append([row for batch, count in pairs if count for row in batch["row"].tolist()])
    return found


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shuffled_hugging_face_stream_is_replayed_per_epoch(num_workers: int) -> None:
    def sources() -> list[Source]:
        stream = hugging_face_stream().shuffle(seed=3, buffer_size=7)
        return ranks(lambda: stream, Loading(3, num_workers=num_workers), 2)

    first, second = stream_rows(sources(), 0), stream_rows(sources(), 1)
    assert sorted(row for rows in first for row in rows) == list(range(40))
    assert first != second
    assert stream_rows(sources(), 1, start=12) == second[2:]
    assert sources()[0].resumes == "by replay"


def test_a_hugging_face_stream_shuffled_without_a_seed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"shuffled without a seed: .* Call .shuffle\(seed=...\)"):
        opened(hugging_face_stream().shuffle(), Loading(2))


def test_collating_a_stream_in_a_worker_is_random_by_position_and_leaves_the_order_alone() -> None:
    def masked(rows: list[int]) -> torch.Tensor:
        return torch.tensor([[row, random.random(), np.random.rand(), torch.rand(()).item()] for row in rows])

    def read(start: int) -> list[Any]:
        source = opened(Stream(12, shuffled=True), Loading(2, num_workers=1, collate_fn=masked), accumulation=2)
        return [batch.tolist() for window in source.windows(0, start) for batch, _ in window.micro_batches]

    assert read(4) == read(0)[2:]
    assert sorted(row[0] for batch in read(0) for row in batch) == list(range(12))


@pytest.mark.parametrize(
    ("data", "loading", "message"),
    [
        (Numbers(3), Loading(), r"train is a dataset: pass batch_size="),
        (Stream(3), Loading(), r"train is a stream of rows \(Stream\): pass batch_size="),
        (Stream(3), Loading(2, shuffle=True), r"shuffle=True cannot reorder: shuffle in the data set itself"),
        (Stream(3), Loading(2, num_workers=2), r"num_workers=2: each worker process would read the whole stream"),
        (Numbers(0), Loading(2), r"train has no rows"),
        (Numbers(1), Loading(2, drop_last=True), r"fewer rows than one global batch \(1 of 2\) and drop_last=True"),
        (Numbers(3), Loading(0), r"batch_size=0 \(for train\) must be a whole number, 1 or more"),
        (Numbers(3), Loading(2, num_workers=-1), r"num_workers=-1 \(for train\) must be a whole number"),
        ({"a": 1}, Loading(2), r"train is a dict, which holds no rows"),
        ("train.csv", Loading(2), r"train is a str, which holds no rows"),
        (None, Loading(2), r"train is a NoneType, which holds no rows"),
        (3, Loading(2), r"train is a int, neither a data set .* nor iterable"),
        ([], Loading(), r"train has no rows"),
        (iter([1]), Loading(batch_size=2), r"batch_size=2 has no effect: train is an iterable of batches"),
        ([torch.ones(1)], Loading(num_workers=2), r"num_workers=2 has no effect: train is an iterable of batches"),
        ([torch.ones(1)], Loading(shuffle=True), r"shuffle=True has no effect: train is an iterable of batches"),
        (DataLoader(Numbers(0)), Loading(), r"train has no rows"),
    ],
)
def test_data_that_cannot_be_read_as_asked_is_refused(data: Any, loading: Loading, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        opened(data, loading)


def test_a_data_set_without_a_length_is_refused() -> None:
    class Unsized(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ConfigurationError, match="train is a Unsized without a length: give it __len__"):
        opened(Unsized(), Loading(2))


@pytest.mark.parametrize("data", [Stream(0), Rereadable([])])
def test_sequential_data_that_turns_out_empty_is_named(data: Any) -> None:
    loading = Loading(2) if isinstance(data, Stream) else None
    with pytest.raises(ConfigurationError, match="train has no rows"):
        next(iter(opened(data, loading).windows(0)))
    with pytest.raises(ConfigurationError, match="val has no rows"):
        list(opened(data, loading, argument="val", training=False).batches(stand_ins=True))


def test_a_position_beyond_the_data_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot resume at row 9: an epoch has 8 rows"):
        next(iter(opened(Numbers(8), Loading(2)).windows(0, start=9)))
    with pytest.raises(ConfigurationError, match="cannot resume at row 9: reading it again reached row 8"):
        next(iter(opened(Stream(8), Loading(2)).windows(0, start=9)))
    assert list(opened(Numbers(8), Loading(2)).windows(0, start=8)) == []
    assert list(opened(Stream(8), Loading(2)).windows(0, start=8)) == []


def test_an_exception_of_the_data_keeps_its_type_and_the_random_state() -> None:
    class Broken(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            torch.rand(3)
            raise KeyError("file 7")
            yield 0

    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="file 7"):
        next(iter(opened(Broken(), Loading(2)).windows(0)))
    assert torch.equal(before, torch.get_rng_state())


# ------------------------------------------------------------------------------------------------ iterables of batches


def test_batches_of_an_iterable_are_dealt_in_turn_with_their_own_rows() -> None:
    batches = [torch.arange(size) for size in (3, 1, 2, 4, 1)]
    sources = ranks(lambda: batches, None, 2, accumulation=2)
    windows = [[(window.rows, window.end, window.last) for window in source.windows(0)] for source in sources]
    assert windows == [[(10, 10, False), (1, 11, True)]] * 2
    counts = [[count for window in source.windows(0) for _, count in window.micro_batches] for source in sources]
    assert counts == [[3, 2, 1], [1, 4, 0]]
    assert (sources[0].kind, sources[0].updates_per_epoch, sources[0].num_samples) == ("iterable", 2, None)


def test_an_iterable_may_be_told_not_to_shuffle() -> None:
    assert flat(updates([opened([torch.tensor([1]), torch.tensor([2])], Loading(shuffle=False))])) == [1, 2]


def test_a_generator_serves_one_epoch_and_the_second_is_an_error() -> None:
    source = opened(torch.tensor([row]) for row in range(3))
    assert source.updates_per_epoch is None
    assert flat(updates([source])) == [0, 1, 2]
    for epoch in (0, 1):
        with pytest.raises(ConfigurationError, match=r"train is a one-shot iterator \(generator\)"):
            next(iter(source.windows(epoch)))


def test_a_batch_that_does_not_show_its_rows_is_passed_on_without_a_count() -> None:
    source = opened(["a prompt", "another", "third"], accumulation=2)
    windows = [(window.rows, window.end, list(window.micro_batches)) for window in source.windows(0)]
    assert windows == [(2, 2, [("a prompt", None), ("another", None)]), (1, 3, [("third", None)])]


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="train yielded a batch without rows after row 0"):
        next(iter(opened([torch.zeros(0, 3)]).windows(0)))


@dataclass
class Pair:
    scale: float
    image: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(4, 2), 4),
        (np.zeros((3, 2)), 3),
        ({"scale": torch.tensor(1.0), "image": torch.zeros(5, 2)}, 5),
        ((torch.zeros(6), torch.zeros(2)), 6),
        ([[{"deep": torch.zeros(7)}], 1], 1),
        ([{"x": torch.zeros(9)}, {"x": torch.zeros(8)}], 2),
        (["a", "b", "c"], 3),
        ({"text": ["a", "b"]}, 2),
        ({"text": ["a", "b"], "label": torch.zeros(4)}, 4),
        (Pair(1.0, torch.zeros(3, 1)), 3),
    ],
)
def test_rows_are_read_off_the_batch(batch: Any, rows: int) -> None:
    assert rows_of(batch) == rows


@pytest.mark.parametrize("batch", ["text", torch.tensor(1.0), {"a": 1}, object(), None])
def test_a_batch_without_visible_rows_is_an_error_that_asks_for_the_weight(batch: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r'cannot tell how many rows .* Return \{"loss": loss, "weight": weight\}'
    ):
        rows_of(batch)


# ---------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [1, 4, 17])
@pytest.mark.parametrize(
    ("data", "loading"),
    [
        (Numbers, Loading(2)),
        (Numbers, Loading(2, num_workers=1)),
        (lambda rows: DataLoader(Numbers(rows), batch_size=2, shuffle=True), None),
        (lambda rows: DataLoader(Numbers(rows), batch_sampler=BatchSampler(range(rows), 3, False)), None),
        (Stream, Loading(2)),
        (lambda rows: Rereadable([torch.tensor([row]) for row in range(rows)]), None),
    ],
    ids=["dataset", "worker", "shuffled loader", "batches", "stream", "iterable"],
)
def test_evaluation_covers_every_row_exactly_once(
    data: Any, loading: Loading | None, rows: int, world_size: int
) -> None:
    if loading and loading.num_workers and (rows, world_size) != (17, 3):
        loading = Loading(loading.batch_size)  # processes are slow to start: once is enough
    sources = ranks(lambda: data(rows), loading, world_size, training=False, accumulation=4)
    for stand_ins in (True, False):
        found = [list(source.batches(stand_ins=stand_ins)) for source in sources]
        real = [batch for batches in found for batch in batches if batch.rows]
        assert sorted(row for batch in real for row in values(batch.batch)) == list(range(rows))
        assert all(list(batch.indices) == values(batch.batch) for batch in real)
        assert all(batch.rows == len(batch.indices) for batches in found for batch in batches)
        if stand_ins:
            assert len({len(batches) for batches in found}) == 1
        else:
            assert sum(len(batches) for batches in found) == len(real)


def test_evaluation_counts_micro_steps_and_ignores_accumulation() -> None:
    source = opened(Numbers(17), Loading(2), training=False, world_size=2, accumulation=4)
    assert (source.updates_per_epoch, source.global_batch, source.num_samples) == (5, 4, 17)


def test_tensor_data_sets_work_end_to_end() -> None:
    data = TensorDataset(torch.arange(10.0).unsqueeze(1), torch.arange(10))
    window = next(iter(opened(data, Loading(4)).windows(0)))
    features, labels = next(window.micro_batches)[0]
    assert features.shape == (4, 1)
    assert torch.equal(features.squeeze(1).long(), labels)
