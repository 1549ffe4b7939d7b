"""How much of a stage runs: limits of each stage, shares of an epoch, fast_dev_run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, ConfigurationError, Every, Trainer
from tests.support.regression import ROWS, Regression, fit


class Counts(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def validation_step(self, batch: Any) -> None:
        self.rows.append(len(batch[0]))

    test_step = validation_step

    def predict_step(self, batch: Any) -> Any:
        return batch[1]


def test_each_stage_has_a_limit_of_its_own() -> None:
    module = Counts()
    Trainer(limit_val_batches=1, progress=False).test(module, ROWS, batch_size=2)
    assert module.rows == [2, 2, 2, 2]
    predictions = Trainer(limit_val_batches=1, progress=False).predict(module, ROWS, batch_size=2)
    assert predictions is not None
    assert len(predictions) == 8
    limited = Trainer(limit_test_batches=3, limit_predict_batches=0.5, progress=False)
    limited.test(module, ROWS, batch_size=2)
    assert module.rows[4:] == [2, 2, 2]
    predictions = limited.predict(module, ROWS, batch_size=2)
    assert predictions is not None
    assert len(predictions) == 4


def test_a_limit_of_no_validation_batches_leaves_validation_out() -> None:
    module = Counts()
    fit(module, val=ROWS, max_steps=4, limit_val_batches=0, sanity_batches=2)
    assert module.rows == []
    with pytest.raises(ConfigurationError, match=r"limit=0 \(for data\)"):
        Trainer(limit_val_batches=0, progress=False).validate(module, ROWS, batch_size=2)


@pytest.mark.parametrize(("every", "steps"), [(0.25, [2, 4, 6, 8]), ("0.5 epochs", [4, 8]), (0.3, [3, 5, 8])])
def test_a_share_of_an_epoch_comes_round_within_it(every: Any, steps: list[int]) -> None:
    step_numbers: list[int] = []

    class Looks(Callback):
        def on_eval_end(self, trainer: Trainer) -> None:
            step_numbers.append(trainer.step)

    rows = [row for row in ROWS for _ in range(2)]
    Trainer(max_epochs=1, validate_every=every, plugins=[Looks()], progress=False).fit(
        Regression(), rows, ROWS, batch_size=2
    )
    assert step_numbers == steps
    assert str(Every.parse("validate_every", 0.25)) == "0.25 epochs"


def test_a_skipped_update_does_not_move_the_shares_of_an_epoch() -> None:
    moments: list[tuple[int, int, int]] = []

    class Looks(Callback):
        def on_eval_end(self, trainer: Trainer) -> None:
            moments.append((trainer.step, trainer.progress.skipped, trainer.progress.epoch))

    class Overflows(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            progress = self.trainer.progress
            second = self.training and (progress.step, progress.skipped) == (1, 0)
            return super().training_step(batch) * (math.inf if second else 1.0)

    result = Trainer(
        max_epochs=2, validate_every=0.5, save_every=0.5, nonfinite="skip", plugins=[Looks()], progress=False
    ).fit(Overflows(), ROWS, ROWS, batch_size=2)
    assert moments == [(1, 1, 0), (3, 1, 1), (5, 1, 1), (7, 1, 2)]
    assert result.steps == 7


def test_shares_of_an_epoch_stay_where_they_are_if_a_resumed_run_has_longer_epochs(tmp_path: Path) -> None:
    def evaluated_at(rows: int, epochs: int) -> list[tuple[int, int]]:
        moments: list[tuple[int, int]] = []

        class Looks(Callback):
            def on_eval_end(self, trainer: Trainer) -> None:
                moments.append((trainer.progress.epoch, trainer.progress.position))

        options: dict[str, Any] = {"validate_every": 0.5, "sanity_batches": 0, "progress": False}
        trainer = Trainer(max_epochs=epochs, run_dir=tmp_path, plugins=[Looks()], accept_changes=("train",), **options)
        trainer.fit(Regression(), ROWS[:rows], ROWS, batch_size=2)
        return moments

    assert evaluated_at(6, 1) == [(0, 4), (1, 0)]
    assert evaluated_at(8, 3) == [(1, 4), (2, 0), (2, 4), (3, 0)]


@pytest.mark.parametrize("batched", [False, True])
def test_the_end_of_an_epoch_is_validated_also_if_the_global_batch_changed_within_it(
    tmp_path: Path, batched: bool
) -> None:
    ended = []

    class Looks(Callback):
        def __init__(self, stop: int) -> None:
            self.stop = stop

        def on_step(self, trainer: Trainer, step: int) -> None:
            if step == self.stop:
                trainer.stop("enough")

        def on_eval_end(self, trainer: Trainer) -> None:
            ended.append(trainer.step)

    def train(accumulation: int, stop: int) -> int:
        options: dict[str, Any] = {
            "gradient_accumulation_steps": accumulation,
            "accept_changes": ("global_batch_size",),
        }
        options |= {"max_epochs": 1, "validate_every": 0.5, "sanity_batches": 0, "progress": False, "run_dir": tmp_path}
        rows: Any = torch.utils.data.DataLoader(ROWS[:8], batch_size=1) if batched else ROWS[:8]
        trainer = Trainer(plugins=[Looks(stop)], **options)
        return trainer.fit(Regression(), rows, ROWS, batch_size=None if batched else 1).steps

    train(2, stop=1)
    assert train(4, stop=0) == 3
    assert ended[-1] == 3


def test_an_epoch_whose_rest_is_smaller_than_the_new_global_batch_is_an_error_and_no_endless_loop(
    tmp_path: Path,
) -> None:
    def train(accumulation: int, steps: int, drop_last: bool) -> int:
        options: dict[str, Any] = {"run_dir": tmp_path, "progress": False, "accept_changes": ("global_batch_size",)}
        rows = torch.utils.data.DataLoader(ROWS[:8], batch_size=2, drop_last=drop_last)
        trainer = Trainer(max_steps=steps, gradient_accumulation_steps=accumulation, **options)
        return trainer.fit(Regression(), rows).steps

    train(1, 3, drop_last=True)
    with pytest.raises(ConfigurationError, match="no update left after position 6, at which this epoch continues"):
        train(2, 9, drop_last=True)
    assert train(2, 9, drop_last=False) == 9


def test_a_share_of_an_epoch_without_a_length_is_refused() -> None:
    class Endless:
        def __iter__(self) -> Any:
            while True:
                yield torch.utils.data.default_collate(ROWS)

    with pytest.raises(ConfigurationError, match=r"validate_every='0.5 epochs': train has no length"):
        fit(train=Endless(), val=ROWS, validate_every=0.5)


def test_fast_dev_run_makes_as_many_updates_as_it_says() -> None:
    module = Counts()
    result = Trainer(max_epochs=9, fast_dev_run=3, progress=False).fit(module, ROWS, ROWS, batch_size=2)
    assert (result.steps, module.rows) == (3, [2, 2, 2])
    with pytest.raises(ConfigurationError, match="fast_dev_run=-1: give True, False or a number of updates"):
        Trainer(fast_dev_run=-1)
