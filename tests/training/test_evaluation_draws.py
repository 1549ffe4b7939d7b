"""Outside of a fit, every rank and every evaluation draws random numbers of its own; a seed makes them repeatable."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fabricate import Trainer, TrainModule
from fabricate.testing import run_ranks

ROWS = 8


class Rows(Dataset[Any]):
    """Eight rows, augmented at random."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + 0.1 * torch.rand(())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        rows = Rows()
        return (rows[index] for index in range(ROWS))


class Noise(TrainModule):
    """Predicts random numbers, or the rows of the data."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.rand(len(batch)) if self.source == "step" else batch


SOURCES = ["step", "data set", "data set in a worker", "stream"]


def predict(trainer: Trainer, source: str) -> list[float] | None:
    data = Stream() if source == "stream" else Rows()
    outputs = trainer.predict(Noise(source), data, batch_size=2, num_workers=int(source.endswith("worker")))
    return None if outputs is None else [float(output) for output in outputs]


@pytest.mark.parametrize("source", SOURCES)
def test_without_a_seed_no_evaluation_repeats_the_numbers_of_another(source: str) -> None:
    trainer, other = Trainer(progress=False), Trainer(progress=False)
    results = [predict(each, source) for each in (trainer, trainer, other, other)]
    assert all(one != two for one, two in combinations(results, 2))


@pytest.mark.parametrize("source", SOURCES)
def test_with_a_seed_the_second_evaluation_differs_from_the_first_and_both_are_repeatable(source: str) -> None:
    one, two = Trainer(seed=0, progress=False), Trainer(seed=0, progress=False)
    before = torch.get_rng_state()
    first, second = predict(one, source), predict(one, source)
    assert torch.equal(torch.get_rng_state(), before)
    assert first != second
    assert [predict(two, source), predict(two, source)] == [first, second]
    assert predict(Trainer(seed=1, progress=False), source) != first


def test_without_a_seed_evaluations_draw_the_numbers_of_a_loop_by_hand() -> None:
    torch.manual_seed(0)
    trainer = Trainer(progress=False)
    drawn = [predict(trainer, "step"), predict(trainer, "step")]
    torch.manual_seed(0)
    by_hand = [torch.cat([torch.rand(len(batch)) for batch in DataLoader(Rows(), 2)]).tolist() for _ in range(2)]
    assert drawn == by_hand


def predicted_twice(seeds: list[int | None]) -> list[list[Any]]:
    """For each seed the predictions of two calls for each source."""
    return [
        [predict(trainer, source) for source in SOURCES[:3] for _ in range(2)]
        for trainer in (Trainer(seed=seed, progress=False) for seed in seeds)
    ]


def test_every_rank_draws_its_own_numbers_in_an_evaluation() -> None:
    with_seed, without = run_ranks(predicted_twice, 2, [0, None])[0]
    for results in (with_seed, without):
        drawn = [number % 1 for result in results for number in result]
        assert len(set(drawn)) == len(drawn) == 6 * ROWS


class Rowwise(TrainModule):
    """Keeps the rows that it was trained on and those that it was validated on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.rows: dict[str, list[float]] = {"train": [], "validate": []}

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.rows["train"] += (batch % 1).tolist()
        return self.linear(batch[:, None]).square().mean()

    def validation_step(self, batch: torch.Tensor) -> None:
        self.rows["validate"] += (batch % 1).tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize(("data", "num_workers"), [(Rows(), 1), (Stream(), 0), (Stream(), 1)])
def test_a_validation_does_not_draw_the_rows_that_were_trained_on(data: Any, num_workers: int) -> None:
    module = Rowwise()
    trainer = Trainer(max_epochs=2, seed=0, sanity_batches=0, progress=False)
    trainer.fit(module, data, {"a": data, "b": data}, batch_size=2, num_workers=num_workers, shuffle=False)
    trained, validated = module.rows["train"], module.rows["validate"]
    assert len(set(trained)) == 2 * ROWS
    assert not set(trained) & set(validated)
    assert len(set(validated)) == 2 * ROWS  # the same at every validation, others for each set
