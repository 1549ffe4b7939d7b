"""A tracker has one run over the resumes of a fit; access to the tracker's own object. (W&B, MLflow and Trackio: tests/extras.)"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from torch.utils.tensorboard import SummaryWriter

from fabricate import Callback, ConfigurationError, Trainer
from fabricate.distributed.accelerator import Silent
from tests.support.regression import ROWS, Regression, fit


class Asks(Callback):
    """Asks for a tracker's own object at the end of each evaluation, and draws with it."""

    def __init__(self, name: str = "tensorboard") -> None:
        self.name = name
        self.own: Any = None

    def on_eval_end(self, trainer: Trainer) -> None:
        self.own = trainer.tracker(self.name)
        self.own.add_text("sample", "text", trainer.step)


SETTINGS: dict[str, Any] = {
    "val": ROWS,
    "trackers": ["tensorboard:project=mine"],
    "log_every": 1,
    "validate_every": 2,
    "save_every": 2,
}


def test_a_resumed_fit_goes_on_in_the_same_curve_with_hyper_parameters_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Falls(Callback):
        def on_log(self, step: int) -> None:
            if step == 3:
                raise KeyboardInterrupt

    asks = Asks()
    with pytest.raises(KeyboardInterrupt):
        fit(Regression(0.125), asks, Falls(), run_dir=tmp_path, max_steps=4, **SETTINGS)
    assert isinstance(asks.own, SummaryWriter)
    fit(Regression(0.125), asks, run_dir=tmp_path, max_steps=4, **SETTINGS)
    accumulator = EventAccumulator(str(tmp_path / "trackers" / "mine"))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("loss")] == [1, 2, 3, 4], (
        "what came after the checkpoint is not there twice"
    )
    assert "sample/text_summary" in accumulator.Tags()["tensors"]
    assert len(list(tmp_path.rglob("hparams.yml"))) == 1


def test_a_fit_that_begins_again_has_one_curve(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Falls(Callback):
        def on_log(self, step: int) -> None:
            if step == 3:
                raise InterruptedError

    def steps(directory: Path) -> list[int]:
        accumulator = EventAccumulator(str(directory / "trackers" / "mine"))
        accumulator.Reload()
        return [event.step for event in accumulator.Scalars("loss")]

    settings = SETTINGS | {"run_dir": tmp_path, "save_every": 4, "max_steps": 4}
    with pytest.raises(InterruptedError):
        fit(Regression(0.125), Falls(), **settings)
    fit(Regression(0.125), **settings)
    assert steps(tmp_path) == [1, 2, 3, 4], "the one that was killed before its first checkpoint is hidden"
    settings |= {"max_steps": 2, "save_every": 2}
    val = settings.pop("val")
    Trainer(progress=False, **settings).fit(Regression(0.125), ROWS, val, batch_size=2, resume="never")
    assert steps(tmp_path) == [1, 2]
    assert steps(tmp_path / "before-1") == [1, 2, 3, 4]


def test_what_a_validation_before_training_draws_does_not_count(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Draws(Regression):
        def on_eval_end(self, trainer: Trainer) -> None:
            trainer.tracker("tensorboard").add_scalar("drawn", 1.0, trainer.step)
            trainer.accelerator.log({"sent": 1.0}, step=trainer.step)
            trainer.accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("drawn_too", 1.0, trainer.step)

    fit(Draws(), run_dir=tmp_path, max_steps=4, sanity_batches=2, **SETTINGS)
    accumulator = EventAccumulator(str(tmp_path / "trackers" / "mine"))
    accumulator.Reload()
    for name in ("drawn", "sent", "drawn_too"):
        assert [event.step for event in accumulator.Scalars(name)] == [2, 4], name


def test_a_tracker_that_the_fit_does_not_have_is_an_error_that_names_those_it_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tracker\('wandb'\): the trackers of this fit are 'tensorboard'"):
        fit(None, Asks("wandb"), run_dir=tmp_path, **SETTINGS)
    with pytest.raises(ConfigurationError, match=r"the trackers of this fit are none"):
        fit(None, Asks("wandb"), val=ROWS, validate_every=1)


def test_a_hook_that_uses_a_tracker_does_no_harm_in_an_evaluation_after_the_fit(tmp_path: Path) -> None:
    asks = Asks()
    trainer = Trainer(trackers=["tensorboard"], run_dir=tmp_path, plugins=[asks], progress=False)
    assert "val_loss" in trainer.validate(Regression(0.125), ROWS, batch_size=4)
    assert isinstance(asks.own, Silent)


def test_on_other_ranks_every_call_does_nothing() -> None:
    own: Any = Silent()
    own.log({"a": 1}, step=1)
    own.config["a"] = own.summary["b"]
    assert own.add_image("a", None) is own
    assert not hasattr(own, "__array__")


def test_a_tracker_that_draws_a_name_for_its_run_does_not_change_the_draws_of_training() -> None:
    class Names(GeneralTracker):
        name = "names"
        requires_logging_directory = False

        @property
        def tracker(self) -> None:
            return None

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            named.append(random.random())

        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            pass

    class Draws(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            drawn.append(random.random())
            return super().training_step(batch)

    named: list[float] = []
    fits = []
    for trackers in ((), (Names(),)):
        drawn: list[float] = []
        fit(Draws(), trackers=trackers, max_steps=2, seed=3)
        fits.append(drawn)
    assert named
    assert fits[0] == fits[1]
