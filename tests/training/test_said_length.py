"""A note about training data that has another length than it says."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fabricate import Trainer
from tests.support.regression import ROWS, Regression


class Said:
    """Four batches, or the indices of their rows; its length is `said`."""

    def __init__(self, said: int, items: list[Any]) -> None:
        self.said, self.items = said, items

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Any:
        return iter(self.items)


class SaidRows(Said, IterableDataset[Any]):
    pass


_PAIRS = [[2 * number, 2 * number + 1] for number in range(4)]
_BATCHES = [default_collate([ROWS[row] for row in pair]) for pair in _PAIRS]


@pytest.mark.parametrize(
    ("train", "units", "updates", "loading"),
    [
        (SaidRows(16, ROWS), "16 rows", 8, {"batch_size": 2}),
        (DataLoader(SaidRows(13, ROWS), batch_size=2), "7 batches", 7, {}),
        (Said(9, _BATCHES), "9 batches", 9, {}),
        (DataLoader(ROWS, batch_sampler=Said(5, _PAIRS)), "5 batches", 5, {}),  # type: ignore[arg-type]
    ],
)
def test_data_that_ends_before_its_length_gets_a_note(
    train: Any, units: str, updates: int, loading: Any, capsys: Any
) -> None:
    assert Trainer(max_epochs=1, progress=False).fit(Regression(), train, **loading).steps == 4
    said = f"note: train: its __len__ says {units}, {updates} updates, but epoch 0 ended after 8 rows, 4 updates. "
    assert said + f"Schedules over trainer.total_steps ({updates}) do not reach their end" in capsys.readouterr().err


class Varies(Said):
    """Batches of indices, in each epoch another number of them."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(lengths[0], _PAIRS)
        self.lengths = iter(lengths)

    def __iter__(self) -> Any:
        return iter(self.items[: next(self.lengths)])


@pytest.mark.parametrize(
    ("lengths", "epoch", "ends"), [((4, 3, 2), 1, "do not reach their end"), ((2, 2, 4), 2, "end before the fit")]
)
def test_an_epoch_of_another_length_than_the_first_gets_one_note(
    lengths: tuple[int, ...], epoch: int, ends: str, capsys: Any
) -> None:
    train: Any = DataLoader(ROWS, batch_sampler=Varies(*lengths))  # type: ignore[arg-type]
    assert Trainer(max_epochs=3, progress=False).fit(Regression(), train).steps == sum(lengths)
    said = f"{lengths[0]} batches, {lengths[0]} updates, but epoch {epoch} ended after {2 * lengths[epoch]} rows, {lengths[epoch]} updates"
    printed = capsys.readouterr().err
    assert printed.count(said) == printed.count("its __len__ says") == 1
    assert f"Schedules over trainer.total_steps ({3 * lengths[0]}) {ends}" in printed


@pytest.mark.parametrize(
    ("train", "arguments", "loading"),
    [
        (Said(9, _BATCHES), {"max_steps": 4}, {}),
        (Said(9, _BATCHES), {"max_epochs": 1, "limit_train_batches": 4}, {}),
        (SaidRows(8, ROWS), {"max_epochs": 2}, {"batch_size": 3}),
        (SaidRows(8, ROWS), {"max_epochs": 2, "gradient_accumulation_steps": 3}, {"batch_size": 2}),
        (DataLoader(ROWS, batch_size=3, drop_last=True), {"max_epochs": 2}, {}),  # type: ignore[arg-type]
        (DataLoader(SaidRows(8, ROWS), batch_size=3, drop_last=True), {"max_epochs": 2}, {}),
    ],
)
def test_data_of_the_right_length_gets_no_note(train: Any, arguments: Any, loading: Any, capsys: Any) -> None:
    Trainer(progress=False, **arguments).fit(Regression(), train, **loading)
    assert "__len__" not in capsys.readouterr().err
