"""The order in which batch sizes are tried, and the refusals. tests/training/test_batch_size.py runs real trials."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fabricate import BatchSizeFinder, ConfigurationError, Trainer, TrainModule
from fabricate.configuration.batch_size_finder import sizes


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def search(most: int, allowed: Any = None, **options: Any) -> tuple[int, list[int]]:
    """What is found where `most` rows fit, and what was tried."""
    finder = BatchSizeFinder(**options)
    largest = finder.search(allowed or sizes(1, None, None), lambda size: size <= most)
    assert finder.results == {size: size <= most for size in finder.results}
    return largest, list(finder.results)


@pytest.mark.parametrize(
    ("most", "options", "largest", "tried"),
    [
        (21, {}, 16, [2, 4, 8, 16, 32]),
        (21, {"mode": "binsearch", "margin": 0}, 21, [2, 4, 8, 16, 32, 24, 20, 22, 21]),
        (200, {"mode": "binsearch"}, 190, [2, 4, 8, 16, 32, 64, 128, 256, 192, 224, 208, 200, 204, 202, 201]),
        (21, {"init_val": 10}, 20, [10, 20, 40]),
        (3, {"init_val": 32}, 2, [32, 16, 8, 4, 2]),
        (1000, {"max_trials": 3}, 8, [2, 4, 8]),
        (1000, {"max_val": 24}, 24, [2, 4, 8, 16, 24]),
        (1, {"mode": "binsearch"}, 1, [2, 1]),
    ],
)
def test_sizes_are_doubled_until_one_does_not_fit_and_then_searched_for_in_between(
    most: int, options: dict[str, Any], largest: int, tried: list[int]
) -> None:
    assert search(most, **options) == (largest, tried)


def test_only_sizes_that_divide_the_global_batch_are_tried() -> None:
    allowed = sizes(2, 1000, 96)
    assert list(allowed) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    assert search(13, allowed) == (8, [2, 4, 8, 16])
    assert search(13, allowed, mode="binsearch", margin=0) == (12, [2, 4, 8, 16, 12])
    assert search(100, allowed) == (48, [2, 4, 8, 16, 48])


def test_a_size_is_at_most_the_rows_that_a_rank_has() -> None:
    assert search(10**9, sizes(4, 50, None)) == (12, [2, 4, 8, 12])
    assert search(10**9, sizes(4, 3, None)) == (1, [1])


def test_the_plan_says_how_it_was_found() -> None:
    finder = BatchSizeFinder(max_val=8)
    finder.search(sizes(1, None, None), lambda size: size < 5)
    assert finder.described() == "found by BatchSizeFinder(mode='power'): 8 ran out of memory"
    finder.search(sizes(1, None, None), lambda size: True)
    assert finder.described() == "found by BatchSizeFinder(mode='power'): no larger one was tried"


def test_a_model_with_which_not_one_row_fits_is_an_error() -> None:
    with pytest.raises(
        ConfigurationError, match=r"batch_size=1 does not fit into memory\. What helps: strategy='fsdp'"
    ):
        search(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "linear"}, "mode='linear'\\): give 'power' or 'binsearch'"),
        ({"init_val": 0}, "init_val=0\\): give a whole number of at least 1"),
        ({"steps_per_trial": 1.5}, "steps_per_trial=1.5"),
        ({"max_trials": None}, "max_trials=None"),
        ({"margin": 1}, "margin=1\\): give a share"),
        ({"max_val": 1}, "init_val=2, max_val=1"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BatchSizeFinder(**options)


def test_a_batch_size_finder_is_accepted_only_as_a_batch_size() -> None:
    with pytest.raises(ConfigurationError, match=r"fit\(module, train, batch_size=BatchSizeFinder\(mode='power'"):
        Trainer(plugins=[BatchSizeFinder()])
    with pytest.raises(ConfigurationError, match=r"batch_size=BatchSizeFinder\(.*\(for data\) must be a whole number"):
        Trainer(progress=False).validate(Net(), torch.ones(4, 1), batch_size=BatchSizeFinder())  # type: ignore[arg-type]


def test_a_plan_tries_nothing_and_shows_where_the_search_begins() -> None:
    plan = Trainer(max_steps=1).plan(Net(), torch.ones(9, 1), batch_size=BatchSizeFinder(init_val=3))
    assert plan["micro_batch_size"] == 3
    assert plan.source("micro_batch_size").endswith("tries; a fit searches for the size that fits")
