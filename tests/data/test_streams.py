"""Data sets of other kinds, streams and iterables of batches as data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from fabricate.data.batches import rows_of, rows_that_came
from fabricate.data.source import Loading, Source
from fabricate.errors import ConfigurationError
from tests.support.sources import Numbers, Rereadable, Stream, flat, opened, ranks, updates

# ------------------------------------------------------------------------------------------------- data sets, streams


def test_lists_tensors_and_subsets_are_data_sets_when_a_batch_size_is_given() -> None:
    for data in ([5, 6, 7], (5, 6, 7), torch.tensor([5, 6, 7]), Subset(Numbers(9), [5, 6, 7])):
        source = opened(data, Loading(2, shuffle=False))
        assert source.kind == "dataset"
        assert flat(updates([source])) == [5, 6, 7]


def test_a_list_of_rows_without_a_batch_size_gets_a_note() -> None:
    note = "train: each of the 3 items of the list is taken as one batch, but the first looks like one row. For rows, pass batch_size="
    for row in [
        (torch.ones(4), 1),
        (torch.ones(4), torch.tensor(1)),
        [np.ones((2, 2)), np.int64(3)],
        (torch.ones(4), torch.ones(1)),
    ]:
        assert opened([row] * 3).notes[0] == note
    for batch in [(torch.ones(4), torch.ones(4, 2)), {"x": torch.ones(4), "scale": 2}, torch.ones(3), ("a", "b")]:
        assert not any("looks like one row" in text for text in opened([batch] * 3).notes)


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


def test_a_stream_whose_state_a_loader_does_not_use_gets_a_note_that_says_so() -> None:
    class Saving(Stream):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    remedy = "A DataLoader does not use the state_dict of Saving; torchdata's StatefulDataLoader does"
    assert any(remedy in note for note in opened(DataLoader(Saving(6), batch_size=2)).notes)
    for data in (Stream(6), hugging_face_stream()):
        assert not any("state_dict" in note for note in opened(DataLoader(data, batch_size=2)).notes)


def stream_rows(sources: list[Source], epoch: int, start: int = 0) -> list[list[int]]:
    rows_per_step = []
    for windows in zip(*(source.windows(epoch, start) for source in sources), strict=True):
        pairs = [pair for window in windows for pair in window.micro_batches]
        rows_per_step.append([row for batch, count in pairs if count for row in batch["row"].tolist()])
    return rows_per_step


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
    with pytest.raises(ConfigurationError, match=r"shuffled without a seed, .* Call .shuffle\(seed=...\)"):
        opened(hugging_face_stream().shuffle(), Loading(2))
    one, two = hugging_face_stream().shuffle(), hugging_face_stream()
    for joined in (datasets.concatenate_datasets([two, one]), datasets.interleave_datasets([one, two], seed=3)):
        with pytest.raises(ConfigurationError, match="shuffled without a seed"):
            opened(joined, Loading(2))


def test_collating_a_stream_in_a_worker_is_random_by_position_and_leaves_the_order_alone() -> None:
    def masked(rows: list[int]) -> torch.Tensor:
        return torch.tensor([[row, random.random(), np.random.rand(), torch.rand(()).item()] for row in rows])

    def read(start: int) -> list[Any]:
        source = opened(Stream(12, shuffled=True), Loading(2, num_workers=1, collate_fn=masked), accumulation=2)
        return [batch.tolist() for window in source.windows(0, start) for batch, _ in window.micro_batches]

    assert read(4) == read(0)[2:]
    assert sorted(row[0] for batch in read(0) for row in batch) == list(range(12))
    assert all(row[1] != row[2] for batch in read(0) for row in batch), "random and NumPy draw the same numbers"


@pytest.mark.parametrize(
    ("data", "loading", "message"),
    [
        (Numbers(3), Loading(), r"train is a data set, so a batch size is needed. Pass batch_size="),
        (Stream(3), Loading(), r"train is a stream of rows \(Stream\), so a batch size is needed. Pass batch_size="),
        (Stream(3), Loading(2, shuffle=True), r"shuffle=True cannot reorder. Shuffle in the data set itself"),
        (Stream(3), Loading(2, num_workers=2), r"num_workers=2 each worker process would read the whole stream"),
        (Numbers(0), Loading(2), r"train has no rows"),
        (Numbers(1), Loading(2, drop_last=True), r"fewer rows than one global batch \(1 of 2\), and drop_last=True"),
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

    with pytest.raises(ConfigurationError, match=r"train is a Unsized without a length\. Give it __len__"):
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
    with pytest.raises(ConfigurationError, match="cannot resume at row 9: reading the data again reached row 8"):
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


class Divided(IterableDataset[torch.Tensor]):
    """Rows 0 to 8, or of each worker process its part of them."""

    def __init__(self, *, divide: bool) -> None:
        self.divide = divide

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        return iter(torch.arange(9.0)[worker.id :: worker.num_workers] if self.divide and worker else torch.arange(9.0))


def test_a_stream_that_each_worker_of_a_loader_reads_whole_is_an_error() -> None:
    whole = opened(DataLoader(Divided(divide=False), 2, num_workers=2))
    with pytest.raises(ConfigurationError, match="reads as a whole, so every row comes 2 times"):
        updates([whole])
    assert sorted(flat(updates([opened(DataLoader(Divided(divide=True), 2, num_workers=2))]))) == [*range(9)]
    assert flat(updates([opened(DataLoader(Divided(divide=False), 2, num_workers=1))])) == [*range(9)]
    with pytest.raises(ConfigurationError, match="val is a stream that each of its 2 worker processes"):
        [
            *opened(DataLoader(Divided(divide=False), 2, num_workers=2), argument="val", training=False).batches(
                stand_ins=False
            )
        ]


class Refilled:
    """Seven batches, each in the buffer that `turns` names; after the last turn the first comes again."""

    def __init__(self, kind: str, turns: list[int]) -> None:
        self.kind, self.turns = kind, turns

    def __iter__(self) -> Iterator[Any]:
        arrays = [np.zeros((4, 2)) for _ in range(3)]
        for number in range(7):
            array = arrays[self.turns[number % len(self.turns)]]
            array[:] = number
            yield {
                "array": array,
                "tensor": torch.from_numpy(array),
                "mapping": {"x": [torch.from_numpy(array)], "y": (array, 3)},
            }[self.kind]


@pytest.mark.parametrize("kind", ["array", "tensor", "mapping"])
@pytest.mark.parametrize("turns", [[0], [0, 1], [0, 1, 2], [0, 1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("training", [True, False])
def test_batches_that_lie_in_the_same_memory_are_those_that_were_yielded(
    kind: str, turns: list[int], training: bool
) -> None:
    source = opened(Refilled(kind, turns), training=training, accumulation=5)

    def number(batch: Any) -> float:
        if not isinstance(batch, dict):
            return float(batch[0, 0])
        assert batch["x"][0][0, 0] == batch["y"][0][0, 0]
        return float(batch["x"][0][0, 0])

    if training:
        read = [number(batch) for window in source.windows(0) for batch, _ in window.micro_batches]
    else:
        read = [number(each.batch) for each in source.batches(stand_ins=False)]
    assert read == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_of_unusual_tensors_come_as_they_were_yielded() -> None:
    batch = {
        "rows": torch.zeros(2, 3),
        "sparse": torch.eye(2).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        "objects": np.array([np.zeros(1), None], dtype=object),
        "missing": torch.tensor([float("nan")]),
        "learned": torch.zeros(2, requires_grad=True),
    }

    class Unusual:
        def __iter__(self) -> Iterator[Any]:
            yield batch
            yield batch

    for window in opened(Unusual()).windows(0):
        for read, _ in window.micro_batches:
            same = [read[name] is batch[name] for name in ("sparse", "nested", "objects", "learned")]
            assert same == [True] * 4
            assert torch.equal(read["rows"], batch["rows"])


def test_batches_with_memory_of_their_own_are_not_copied() -> None:
    class Batches:
        def __init__(self) -> None:
            self.table, self.made = torch.arange(8.0), list[torch.Tensor]()

        def __iter__(self) -> Iterator[Any]:
            for _ in range(7):
                self.made.append(torch.rand(2, 3))
                yield self.made[-1], self.table

    data = Batches()
    source = opened(data)
    read = [batch for window in source.windows(0) for batch, _ in window.micro_batches]
    own = [batch[0] is made and batch[1] is data.table for batch, made in zip(read, data.made, strict=True)]
    assert own == [False] * 4 + [True] * 3  # nothing shows before the fifth is read whether copies are needed


def test_a_stream_of_equal_batches_may_have_several_workers() -> None:
    class Ones(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(6))

    assert len(flat(updates([opened(DataLoader(Ones(), 2, num_workers=2))]))) == 12


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


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


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
        (((torch.zeros(6, 3), torch.zeros(6, 3)), torch.zeros(6)), 6),  # views
        (((torch.zeros(6, 3), torch.zeros(2, 40)), torch.zeros(6)), 6),
        ((tuple(torch.zeros(5, 3, 4, 4)), tuple({"boxes": torch.zeros(n, 4)} for n in range(5))), 5),  # detection
        ({"images": list(torch.zeros(5, 3, 4, 4)), "targets": [{"label": 1}] * 5}, 5),
        ([(torch.zeros(3, 4, 4), 1)] * 5, 5),  # samples as the data set gives them
        ([(torch.zeros(3, 4, 4), torch.tensor(1))] * 2, 2),
        ([Pair(1.0, torch.zeros(3, 1))] * 2, 2),
        ([{"ids": torch.zeros(5, 9), "mask": torch.zeros(5, 9)}] * 2, 5),  # two batches: a query and an answer
        ([[{"ids": torch.zeros(5, 9)}, {"ids": torch.zeros(5, 7)}], torch.zeros(5)], 5),
        ([torch.zeros(n, 3) for n in (9, 4)], 9),  # a query and its documents, for example
        ([torch.zeros(30, 3), torch.zeros(2, 40, dtype=torch.long)], 30),  # nodes and edges
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


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ((torch.zeros(7, 3), torch.zeros(7)), 7),
        ({"x": torch.zeros(7, 3), "classes": torch.zeros(100)}, 7),
        (torch.zeros(0, 3), 0),
        ([{"x": 1}] * 7, 7),
        (["a"] * 7, 7),
        ((torch.zeros(5, 8, 4), torch.zeros(8)), 8),  # time first
        (torch.zeros(5, 8, 4), 8),
        ((torch.zeros(5, 7, 4), torch.zeros(7)), 7),
        ((torch.zeros(2, 40), torch.zeros(30, 3), torch.zeros(8)), 8),  # the edges, nodes and labels of graphs
        ({"classes": torch.zeros(3), "x": torch.zeros(8, 3)}, 8),
        ((torch.zeros(31, 3),), 8),  # packed
        (object(), 8),
        ((tuple(torch.zeros(8, 3, 4)), tuple(torch.zeros(8, 1))), 8),  # samples in lists
        ((list(torch.zeros(7, 3, 4)), list(torch.zeros(7))), 7),
        ([torch.zeros(n, 2) for n in range(3, 11)], 8),
        ([[torch.zeros(n, 2) for n in range(3, 11)], list(torch.zeros(8))], 8),
        ((torch.zeros(7, 3), [torch.zeros(7), torch.zeros(7, 2)]), 7),  # views
        ([(torch.zeros(3, 8, 8), torch.tensor(1))] * 8, 8),  # samples as the data set gives them
        ([(torch.zeros(3, 8, 8), 1)] * 7, 7),
        ([(torch.zeros(4), torch.zeros(1))] * 8, 8),
        ([Pair(1.0, torch.zeros(3, 1))] * 7, 7),
        ([Point(torch.zeros(4), torch.zeros(1))] * 7, 7),
        ([{"ids": torch.zeros(8, 9)}, {"ids": torch.zeros(8, 7)}], 8),  # two batches: a query and an answer
        (({"ids": torch.zeros(7, 9)}, {"ids": torch.zeros(7, 7)}), 7),
        (([torch.zeros(7, 9), torch.zeros(7)], [torch.zeros(7, 9), torch.zeros(7)]), 7),
        ([[[1, 2, 3]] * 8, [1] * 8], 8),
    ],
)
def test_the_rows_of_a_batch_of_at_most_eight_are_counted(batch: Any, rows: int) -> None:
    assert rows_that_came(batch, 8) == rows


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_short_last_batch_of_samples_has_its_rows(rows: int) -> None:
    for sample in ((torch.zeros(4), torch.zeros(1)), (torch.zeros(3, 8, 8), 1), Point(torch.zeros(4), torch.zeros(1))):
        assert rows_that_came([sample] * rows, rows) == rows


GREY = [torch.zeros(1, 8 + n, 8) for n in range(3)]


@pytest.mark.parametrize(
    ("batch", "planned", "rows"),
    [
        *((GREY[:rows], rows, rows) for rows in (1, 3)),
        *(([{"image": image, "mask": image} for image in GREY[:rows]], rows, rows) for rows in (1, 2, 3)),
        ([torch.zeros(2, 30)] * 3, 3, 2),  # fields of a collate_fn that left out a row
        ([torch.zeros(2, 5), torch.zeros(2, 1)], 2, 2),  # fields, all rows of which came
        ([torch.zeros(5, 2, 4), torch.zeros(7, 2, 4)], 2, 2),  # fields with time first
        ([torch.zeros(1, n) for n in (20, 21, 22)], 3, 3),
        ([torch.zeros(1, 4), torch.zeros(1)], 2, 1),  # fields of a collate_fn that left out a row
        ([torch.zeros(1, 4), torch.zeros(1, 3)], 2, 1),
        ((torch.zeros(1, 4), torch.zeros(1, 4)), 2, 1),
        ([torch.zeros(2, 40), torch.zeros(30, 3), torch.zeros(3)], 3, 3),  # the edges, nodes and labels of graphs
        ([torch.zeros(0, 3)], 1, 0),
    ],
)
def test_up_to_three_samples_in_a_list_are_told_from_fields(batch: Any, planned: int, rows: int) -> None:
    assert rows_that_came(batch, planned) == rows
