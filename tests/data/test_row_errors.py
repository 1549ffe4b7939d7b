"""Errors in reading rows and in making batches of them name the data, the row and the remedy; wrong arguments for loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fabricate.data.source import Loading, Source
from fabricate.errors import ConfigurationError
from tests.support.sources import Numbers, opened


class Rows(Dataset[Any]):
    """Six rows; `make` makes the one with index 4."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.make() if index == 4 else torch.ones(3)


class AtOnce(Rows):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Streamed(IterableDataset[Any]):
    def __init__(self, make: Callable[[], Any]) -> None:
        self.rows = Rows(make)

    def __iter__(self) -> Any:
        return (self.rows[index] for index in range(6))


def fails() -> Any:
    raise ValueError("cut off")


def stops() -> Any:
    return next(iter(()))


def longer() -> Any:
    return torch.ones(5)


def nothing() -> Any:
    return None


def read(source: Source) -> None:
    for window in source.windows(0):
        list(window.micro_batches)


def error_of(data: Any, loading: Loading | None = None) -> str:
    """The error in reading `data`, with its type and its notes. An error of a worker process has its notes in the message."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        read(opened(data, loading or Loading(2, shuffle=False)))
    return "\n".join([f"{caught.type.__name__}: {caught.value}", *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (fails, "ValueError", "while reading row 4 of train"),
        (stops, "ConfigurationError", "row 4 of train: Rows raised StopIteration. Let it return the row, or raise"),
        (
            nothing,
            "ConfigurationError",
            "row 4 of train: Rows returned None. Leave it out of the data set, or pass a collate_fn",
        ),
        (longer, "RuntimeError", "train: torch's default_collate makes batches of tensors or arrays of equal shapes"),
    ],
)
def test_an_error_in_a_row_names_the_row_and_the_remedy(make: Any, kind: str, text: str, workers: int) -> None:
    for data, loading in (
        (Rows(make), Loading(2, shuffle=False, num_workers=workers)),
        (DataLoader(Rows(make), batch_size=2, num_workers=workers), Loading()),
    ):
        error = error_of(data, loading)
        assert error.startswith(kind)
        assert text in error


def test_rows_that_are_read_at_once_and_rows_of_a_stream_are_named_as_far_as_they_are_known() -> None:
    assert "while reading rows 4, 5 of train" in error_of(AtOnce(fails))
    assert "rows 4, 5 of train: AtOnce raised StopIteration" in error_of(AtOnce(stops))
    assert "row 4 of train: AtOnce returned None. Leave it out" in error_of(AtOnce(nothing))
    for data in (AtOnce(longer), Streamed(longer), Streamed(nothing)):
        assert "or pass a collate_fn that pads them" in error_of(data)


def test_a_collate_fn_may_leave_out_rows_that_are_none_and_its_errors_name_the_data() -> None:
    def collate(rows: list[Any]) -> Any:
        return torch.stack([row for row in rows if row is not None])

    def wrong(rows: list[Any]) -> Any:
        return next(iter(()))

    read(opened(Rows(nothing), Loading(2, shuffle=False, collate_fn=collate)))
    assert "train: the collate_fn got 2 rows" in error_of(Rows(longer), Loading(2, shuffle=False, collate_fn=collate))
    assert "ConfigurationError: train: the collate_fn raised StopIteration" in error_of(
        Rows(longer), Loading(2, shuffle=False, collate_fn=wrong)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shuffle": "no"}, r"shuffle='no' \(for train\) must be True, False or None"),
        ({"num_workers": None}, r"num_workers=None \(for train\) must be a whole number, 0 or more"),
        (
            {"collate_fn": "pad"},
            r"collate_fn='pad' \(for train\) must be a function that makes a batch of a list of rows",
        ),
    ],
)
def test_wrong_arguments_for_loading_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        opened(Numbers(8), Loading(2, **arguments))
