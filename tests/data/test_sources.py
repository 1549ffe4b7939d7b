"""The data room, with ranks simulated in one process: the rows that an update or an evaluation takes, row by row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from fabricate.data.source import Loading
from fabricate.errors import ConfigurationError
from tests.support.sources import (
    FACTORS,
    Noisy,
    Numbers,
    Rereadable,
    Stream,
    flat,
    in_twos,
    opened,
    ranks,
    updates,
    values,
)

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
        steps = updates(ranks(lambda: data(rows), loading, world_size, accumulation=accumulation), epoch=3)
        expected = expected or steps
        assert steps == expected
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
    order = [
        index
        for batch in opened(Numbers(30), Loading(4), training=False).batches(stand_ins=True)
        for index in batch.indices
    ]
    assert order == list(range(30))


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
    for count, (_, _, end, _) in enumerate(whole, start=1):
        assert updates(ranks(data, loading, 2, accumulation=2), epoch=1, start=end) == whole[count:]


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
    steps = updates(sources)
    assert [(rows, last) for _, rows, _, last in steps] == [(12, False), (12, True)]
    if sources[0].kind != "stream":
        assert (sources[0].num_samples, sources[0].updates_per_epoch) == (24, 2)


def test_drop_last_says_so_where_it_leaves_out_whole_micro_batches() -> None:
    def notes(rows: int, **options: Any) -> list[str]:
        source = opened(in_twos(rows, drop_last=True), **options)
        return [note for note in source.notes if "leaves out the last" in note]

    text = (
        "train: drop_last=True leaves out the last 6 of 14 rows of each epoch, because they do not fill a global batch of 8; with "
        "drop_last=False, they are a smaller update"
    )
    assert notes(14, accumulation=4) == [text]
    assert notes(15, accumulation=2, world_size=2) == [text.replace("6 of 14", "7 of 15")]
    assert notes(13, accumulation=1) == notes(9, accumulation=4) == notes(16, accumulation=4) == []
    assert notes(14, accumulation=1, argument="val", training=False) == []


def test_drop_last_is_not_applied_to_evaluation_and_the_plan_says_so() -> None:
    for source in (
        opened(in_twos(5, drop_last=True), argument="val", training=False),
        opened(Numbers(5), Loading(2, drop_last=True), argument="val", training=False),
        opened(Stream(5), Loading(2, drop_last=True), argument="val", training=False),
    ):
        assert [index for batch in source.batches(stand_ins=True) for index in batch.indices] == [0, 1, 2, 3, 4]
        assert "val: drop_last=True is not applied, because an evaluation reads every row once" in source.notes


@pytest.mark.parametrize(("limit", "rows"), [(3, 12), (100, 50), (0.1, 5), (0.58, 29), (0.0001, 1), (1.0, 50)])
def test_a_limit_counts_micro_steps_or_a_share_of_the_data(limit: int | float, rows: int) -> None:
    sources = ranks(lambda: Numbers(50), Loading(2), 2, accumulation=2, limit=limit)
    steps = updates(sources)
    assert sources[0].num_samples == len(flat(steps)) == rows
    assert sources[0].updates_per_epoch == len(steps)
    assert steps[-1][3]


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
        ConfigurationError, match=r"limit=.* \(for train\) must be a number of micro-batches .* or a share"
    ):
        opened(Numbers(4), Loading(2), limit=limit)


def test_a_share_of_data_without_a_length_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"train has no length, so limit=0.5 .* Pass a number of micro-batches"
    ):
        opened(Stream(4), Loading(2), limit=0.5)


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
        by_rank = [list(source.batches(stand_ins=stand_ins)) for source in sources]
        real = [batch for batches in by_rank for batch in batches if batch.rows]
        assert sorted(row for batch in real for row in values(batch.batch)) == list(range(rows))
        assert all(list(batch.indices) == values(batch.batch) for batch in real)
        assert all(batch.rows == len(batch.indices) for batches in by_rank for batch in batches)
        if stand_ins:
            assert len({len(batches) for batches in by_rank}) == 1
        else:
            assert sum(len(batches) for batches in by_rank) == len(real)


def test_evaluation_counts_micro_steps_and_ignores_accumulation() -> None:
    source = opened(Numbers(17), Loading(2), training=False, world_size=2, accumulation=4)
    assert (source.updates_per_epoch, source.global_batch, source.num_samples) == (5, 4, 17)


def test_tensor_data_sets_work_end_to_end() -> None:
    data = TensorDataset(torch.arange(10.0).unsqueeze(1), torch.arange(10))
    window = next(iter(opened(data, Loading(4)).windows(0)))
    features, labels = next(window.micro_batches)[0]
    assert features.shape == (4, 1)
    assert torch.equal(features.squeeze(1).long(), labels)


class Doubled(TensorDataset):
    """A TensorDataset with rows of its own."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * value for value in super().__getitem__(index))


@pytest.mark.parametrize("kind", [TensorDataset, Doubled])
def test_a_batch_of_tensors_is_what_default_collate_makes_of_the_rows(kind: type[TensorDataset]) -> None:
    images = torch.arange(960.0).reshape(10, 6, 4, 4).to(memory_format=torch.channels_last)
    data = kind(images, torch.arange(10, dtype=torch.int32).double().half(), torch.ones(10, 3, dtype=torch.complex64))
    for window in opened(data, Loading(4)).windows(0):
        for batch, _ in window.micro_batches:
            picked = [int(row) for row in batch[1] / (2 if kind is Doubled else 1)]
            expected = default_collate([data[row] for row in picked])
            assert type(batch) is type(expected)
            for own, other in zip(batch, expected, strict=True):
                assert torch.equal(own, other)
                assert (own.dtype, own.stride()) == (other.dtype, other.stride())
