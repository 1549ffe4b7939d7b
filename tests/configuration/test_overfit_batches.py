"""`overfit_batches`: the same first batches in every epoch, in their order, also as validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from fabricate import ConfigurationError, Trainer, TrainModule
from fabricate.testing import run_ranks

ROWS = torch.arange(40.0).reshape(40, 1)


class Notes(TrainModule):
    """Keeps the rows that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.rows: list[list[int]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.rows.append(batch.flatten().int().tolist())
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        self.validated.append(batch.flatten().int().tolist())
        return {"loss": batch.mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(train: Any = ROWS, val: Any = None, batch_size: int | None = 4, few: Any = 2, **arguments: Any) -> Notes:
    module = Notes()
    options = {name: arguments.pop(name, None) for name in ("shuffle", "collate_fn")}
    defaults = {"max_epochs": 2, "overfit_batches": few, "sanity_batches": 0, "progress": False, "print_plan": "none"}
    Trainer(**{**defaults, **arguments}).fit(module, train, val, batch_size=batch_size, **options)
    return module


FIRST = [[0, 1, 2, 3], [4, 5, 6, 7]]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


class ByEpoch(Dataset[Any]):
    """Has other rows in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, row: int) -> torch.Tensor:
        return ROWS[row] + 1000 * self.epoch


class StreamByEpoch(IterableDataset[Any]):
    """Has other rows in each epoch, in a random order."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS[torch.randperm(len(ROWS))] + 1000 * self.epoch)


@pytest.mark.parametrize(
    ("train", "batch_size"),
    [
        (ROWS, 4),
        (DataLoader(ROWS, batch_size=4, shuffle=True), None),
        (DataLoader(ROWS, batch_size=4), None),
        (list(ROWS.split(4)), None),
        (Stream(), 4),
        (ByEpoch(), 4),
        (DataLoader(ByEpoch(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True), None),
    ],
    ids=["data set", "shuffled loader", "loader", "list of batches", "stream", "set_epoch", "set_epoch in a loader"],
)
def test_every_epoch_and_the_validation_read_the_same_first_batches(train: Any, batch_size: int | None) -> None:
    module = fit(train, ROWS + 100, batch_size)
    assert module.rows == FIRST * 2
    assert module.validated == FIRST * 2


def test_a_stream_of_another_order_in_each_pass_yields_the_same_batches_in_every_epoch() -> None:
    module = fit(DataLoader(StreamByEpoch(), batch_size=4), ROWS, batch_size=None)
    assert module.rows[:2] == module.rows[2:]
    assert module.validated == module.rows
    assert all(row < len(ROWS) for batch in module.rows for row in batch)


def test_a_shuffled_stream_of_datasets_yields_the_same_batches_in_every_epoch() -> None:
    rows = datasets.Dataset.from_dict({"x": [[float(row)] for row in range(40)]}).to_iterable_dataset()
    stream = rows.shuffle(seed=1, buffer_size=40).map(lambda row: row)
    module = fit(stream, ROWS, collate_fn=lambda batch: torch.tensor([row["x"] for row in batch]))
    assert module.rows[:2] == module.rows[2:] == module.validated[:2] == module.validated[2:]
    assert module.rows[:2] != FIRST


def test_a_share_counts_batches_and_without_val_nothing_is_validated() -> None:
    module = fit(few=0.2)
    assert (module.rows, module.validated) == (FIRST * 2, [])
    assert fit(few=0).rows[:2] != FIRST, "0 turns it off, as in Lightning"


def on_ranks() -> tuple[list[list[int]], list[list[int]]]:
    module = fit(ROWS, ROWS + 100, 2, strategy="ddp")
    return module.rows, module.validated


def test_ranks_share_the_batches() -> None:
    first, second = run_ranks(on_ranks, 2)
    assert first == ([[0, 1], [4, 5]] * 2,) * 2
    assert second == ([[2, 3], [6, 7]] * 2,) * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shuffle": True}, "overfit_batches=2 .* shuffle=True"),
        ({"limit_train_batches": 3}, "overfit_batches=2 and limit_train_batches=3"),
        ({"few": 1.5}, "overfit_batches=1.5: give a number of batches"),
        (
            {"train": DataLoader(ROWS, 4, sampler=WeightedRandomSampler([1.0] * 40, 40)), "batch_size": None},
            "train has its own sampler",
        ),
    ],
)
def test_what_would_not_be_the_same_batches_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        fit(**arguments)
