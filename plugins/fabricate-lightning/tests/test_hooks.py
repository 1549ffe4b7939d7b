"""The hooks of modules and callbacks: called in Lightning's order with Lightning's arguments, or refused by name."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator
from typing import Any

import fabricate_lightning
import lightning
import pytest
import torch
from fabricate_lightning import adapt
from lightning_shapes import Classifier, both, by_fabricate, by_lightning, loader

import fabricate
from fabricate import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")


class Calls:
    """A queue, which the check of validation before training does not put back, as it does lists in global variables."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Any, ...]] = queue.Queue()

    @property
    def made(self) -> deque[tuple[Any, ...]]:
        return self._queue.queue

    def append(self, call: tuple[Any, ...]) -> None:
        self._queue.put(call)


CALLS = Calls()


def noting(kind: type, who: str, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Methods that note every hook of `kind`, with the types of its arguments."""

    def method(hook: str) -> Any:
        def note(self: Any, *arguments: Any, **named: Any) -> None:
            values = [*arguments, *named.values()]
            CALLS.append(
                (
                    who,
                    hook,
                    [type(each).__name__ for each in values[2 if who == "callback" and len(values) > 1 else 0 :]],
                )
            )

        return note

    return {name: method(name) for name in _hooks(kind) if name not in but}


def _hooks(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        for name in vars(base):
            if name.startswith("on_") and name not in (
                "on_gpu",
                "on_exception",
                "on_save_checkpoint",
                "on_load_checkpoint",
            ):
                yield name


_MODULE_ONLY = tuple(
    f"on_{stage}_model_{what}" for stage in ("validation", "test", "predict") for what in ("eval", "train", "zero_grad")
)
_TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer")


class Steps(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        CALLS.append(("training_step", batch_idx, self.global_step, self.current_epoch, self.trainer.is_last_batch))
        return {"loss": super().training_step(batch, batch_idx), "more": 1}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        CALLS.append(("validation_step", batch_idx, dataloader_idx))
        super().validation_step(batch, batch_idx)
        return {"scores": 1}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        CALLS.append(("test_step", batch_idx, self.trainer.testing, self.trainer.state.fn == "test"))

    def predict_step(self, batch: Any) -> Any:
        return self(batch[0])


Noting: Any = type("Noting", (Steps,), noting(lightning.LightningModule, "module", _MODULE_ONLY + _TRANSFER))
Callback: Any = type("Callback", (lightning.Callback,), noting(lightning.Callback, "callback"))


def _run(trainer: Any) -> tuple[list[Any], Any]:
    CALLS.made.clear()
    torch.manual_seed(0)
    module = Noting()
    trainer.fit(module, loader(), [loader(number=20), loader(number=12)])
    trainer.validate(module, loader(number=20), verbose=False)
    trainer.test(module, loader(number=20), verbose=False)
    predicted = trainer.predict(module, loader(number=20))
    return list(CALLS.made), predicted


def test_hooks_are_called_in_the_order_of_lightning() -> None:
    options: dict[str, Any] = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accumulate_grad_batches": 2,
    }
    theirs, predicted = _run(
        lightning.Trainer(**options, accelerator="cpu", enable_model_summary=False, callbacks=[Callback()])
    )
    ours, our_predictions = _run(fabricate_lightning.Trainer(**options, callbacks=[Callback()]))
    assert ours == theirs
    assert [p.shape for p in our_predictions] == [p.shape for p in predicted]


def test_a_hook_that_changes_nothing_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    class Clears(Classifier):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            optimizer.zero_grad(set_to_none=True)

    class Old(lightning.Callback):
        def on_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    by_fabricate(Clears(), loader(), max_epochs=1, callbacks=[Old()])
    printed = capsys.readouterr().out
    assert "optimizer_zero_grad of Clears is not called: gradients are cleared after each update" in printed
    assert "on_epoch_end of Old is not called: Lightning 2 does not call it either" in printed


def test_a_part_that_came_in_eval_mode_and_trains_in_train_mode_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    by_fabricate(Classifier().eval(), loader(), max_epochs=1)
    line = "in train mode, where Lightning leaves them in the eval mode in which they came: Classifier\n"
    assert line in capsys.readouterr().out


def test_setup_and_teardown_get_the_stage() -> None:
    class Stages(Classifier):
        def setup(self, stage: str) -> None:
            self.losses.append(len(stage))

        def teardown(self, stage: str) -> None:
            self.losses.append(len(stage))

        def configure_callbacks(self) -> Any:
            return lightning.pytorch.callbacks.LambdaCallback(
                on_train_start=lambda trainer, module: module.losses.append(99.0)
            )

    losses = by_fabricate(Stages(), loader(), max_epochs=1).module.losses
    assert (losses[0], losses[1], losses[-1]) == (3, 99.0, 3)


class SkipsTheEpoch(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class OwnBackward(Classifier):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class OwnModes(Classifier):
    def on_validation_model_eval(self) -> None: ...


class OldHook(Classifier):
    def validation_epoch_end(self, outputs: Any) -> None: ...


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            OldHook,
            "OldHook.validation_epoch_end would not be called: Lightning 2 has removed it; use on_validation_epoch_end",
        ),
        (SkipsTheEpoch, "on_train_batch_start returned -1, which skips the rest of an epoch and is not"),
        (
            OwnModes,
            "OwnModes.on_validation_model_eval would not be called: an evaluation puts every part into eval mode",
        ),
        (OwnBackward, "OwnBackward.backward would not be called: the loop calls it"),
    ],
)
def test_a_hook_that_fabricate_cannot_follow_is_named(kind: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        by_fabricate(kind(), loader())


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda self, dataloader_iter: None, "the loop reads the data"),
        (lambda self, batch, batch_idx, optimizer_idx: None, "Lightning 2 does not pass"),
    ],
)
def test_arguments_of_steps_that_are_not_passed_are_named(step: Any, message: str) -> None:
    kind = type("Odd", (Classifier,), {"training_step": step})
    with pytest.raises(ConfigurationError, match=message):
        by_fabricate(kind(), loader())


def test_only_a_lightning_module_is_adapted() -> None:
    for wrong, message in ((Classifier, "the class Classifier"), (torch.nn.Linear(1, 1), r"adapt\(Linear\)")):
        with pytest.raises(ConfigurationError, match=message):
            adapt(wrong)


def test_fabricates_own_trainer_names_adapt() -> None:
    with pytest.raises(
        ConfigurationError, match=r"module=Classifier is not a fabricate\.TrainModule;.* adapt\(module\)"
    ):
        fabricate.Trainer(max_steps=1).fit(Classifier(), loader())


# --------------------------------------------------------------------------------------------------- self.trainer


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 1},
        {"overfit_batches": 2, "max_epochs": 1},
        {"fast_dev_run": 2},
        {"max_steps": 7, "max_epochs": None},
    ],
    ids=str,
)
def test_attributes_of_the_trainer_are_those_of_lightning(options: dict[str, Any]) -> None:
    names = """max_epochs max_steps min_epochs global_step current_epoch world_size num_devices num_nodes global_rank local_rank node_rank
        is_global_zero estimated_stepping_batches num_training_batches num_val_batches accumulate_grad_batches gradient_clip_val
        log_every_n_steps val_check_interval check_val_every_n_epoch sanity_checking training validating testing predicting evaluating
        should_stop fast_dev_run barebones received_sigterm limit_train_batches limit_val_batches limit_test_batches limit_predict_batches
        overfit_batches
        enable_validation loggers logger early_stopping_callback progress_bar_callback"""
    attributes: list[dict[str, Any]] = []

    class Looks(Classifier):
        def on_train_epoch_end(self) -> None:
            attributes.append({name: getattr(self.trainer, name) for name in names.split()})
            assert self.trainer.lightning_module is self
            assert self.trainer.model is not None
            assert self.trainer.optimizers[0] is not None
            assert self.trainer.strategy.root_device == self.device

    by_lightning(Looks(), loader(), loader(number=20), **options)
    by_fabricate(Looks(), loader(), loader(number=20), **options)
    theirs, ours = attributes
    assert ours == theirs


def test_a_callback_logs_as_under_lightning() -> None:
    class Counts(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("number", float(batch_idx), on_epoch=True)
            self.log_dict({"square": float(batch_idx**2)})

    theirs, ours = both(Classifier, lambda: (loader(),), max_epochs=1, callbacks=lambda: [Counts()])
    assert {"number_step", "number_epoch", "square"} <= theirs.metrics.keys()
    assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-6)


class LooksAhead(Classifier):
    def setup(self, stage: str) -> None:
        self.losses.append(self.trainer.estimated_stepping_batches)


@pytest.mark.parametrize("arguments", [{"accumulate_grad_batches": 2}, {"max_steps": 5}, {"limit_train_batches": 3}])
def test_the_length_of_a_fit_is_known_in_setup(arguments: dict[str, Any]) -> None:
    trained = by_fabricate(LooksAhead(), loader(), **arguments)
    assert trained.module.losses[0] == trained.trainer.global_step


def test_other_attributes_of_the_trainer_are_named() -> None:
    class Looks(Classifier):
        def on_train_start(self) -> None:
            assert not hasattr(self.trainer, "fit_loop")
            _ = self.trainer.strategy.lightning_optimizers

    with pytest.raises(
        AttributeError, match=r"trainer\.strategy\.lightning_optimizers is not available under fabricate"
    ):
        by_fabricate(Looks(), loader())
