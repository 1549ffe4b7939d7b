"""Callbacks: EarlyStopping runs unchanged, others become arguments of fabricate's Trainer, and those that cannot run are refused by
name."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import fabricate_lightning
import pytest
import torch
from fabricate_lightning import adapt
from lightning.pytorch import callbacks
from lightning_shapes import Classifier, apart, both, by_fabricate, by_lightning, case, loader

from fabricate import ConfigurationError, Every

pytestmark = pytest.mark.filterwarnings("ignore")


def data() -> tuple[Any, ...]:
    return loader(), loader(number=20, seed=1)


@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "val/accuracy", "mode": "max", "patience": 2},
        {"monitor": "val_loss", "patience": 1, "min_delta": 0.05},
        {"monitor": "train_loss_epoch", "stopping_threshold": 0.8},
        {"monitor": "val_loss", "check_on_train_epoch_end": False, "patience": 2},
        {"monitor": "missing", "strict": False},
    ],
    ids=case,
)
def test_early_stopping_stops_where_lightning_does(options: dict[str, Any]) -> None:
    stopping: list[Any] = []

    def stop_early() -> list[Any]:
        stopping.append(callbacks.EarlyStopping(**options))
        return [stopping[-1]]

    theirs, ours = both(Classifier, data, max_epochs=12, callbacks=stop_early)
    assert apart(theirs, ours) == 0
    assert ours.trainer.current_epoch == theirs.trainer.current_epoch
    for name in ("stopped_epoch", "wait_count"):
        assert getattr(stopping[0], name) == getattr(stopping[1], name)
    assert float(stopping[0].best_score) == pytest.approx(float(stopping[1].best_score), abs=1e-6)


def test_a_metric_that_early_stopping_lacks_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="conditioned on metric `missing` which is not available"):
        by_fabricate(Classifier(), *data(), callbacks=[callbacks.EarlyStopping("missing")])


def test_a_model_checkpoint_keeps_the_best_and_says_where_they_are(tmp_path: Path) -> None:
    checkpoints = [
        callbacks.ModelCheckpoint(tmp_path / name, monitor="val_loss", save_top_k=2, save_last=True) for name in "ab"
    ]
    quiet: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 5}
    torch.manual_seed(0)
    theirs = by_lightning(Classifier(lr=0.3), *data(), callbacks=[checkpoints[0]], **quiet)
    torch.manual_seed(0)
    ours = by_fabricate(Classifier(lr=0.3), *data(), callbacks=[checkpoints[1]], **quiet)
    assert apart(theirs, ours) == 0
    assert float(checkpoints[1].best_model_score) == pytest.approx(float(checkpoints[0].best_model_score), abs=1e-6)
    ranked = [sorted(map(float, each.best_k_models.values())) for each in checkpoints]
    assert ranked[1] == pytest.approx(ranked[0], abs=1e-6)
    assert len(ranked[0]) == 2
    assert all((Path(path) / "manifest.json").exists() for path in checkpoints[1].best_k_models)
    assert float(checkpoints[1].kth_value) == pytest.approx(float(checkpoints[0].kth_value), abs=1e-6)
    assert checkpoints[1].kth_best_model_path in checkpoints[1].best_k_models
    assert ours.trainer.checkpoint_callback is checkpoints[1]
    best = Path(checkpoints[1].best_model_path)
    assert best.parent == tmp_path / "b" / "checkpoints"
    assert (best / "manifest.json").exists()
    metrics = [run.trainer.validate(run.module, data()[1], ckpt_path="best", verbose=False) for run in (theirs, ours)]
    assert metrics[1][0] == pytest.approx(metrics[0][0], abs=1e-6)
    assert metrics[1][0]["val_loss"] == pytest.approx(float(checkpoints[1].best_model_score), abs=1e-6)
    loaded = fabricate_lightning.load_from_checkpoint(Classifier, checkpoints[1].best_model_path)
    assert loaded.hparams.lr == 0.3
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, ours.weights[name])


def test_checkpoints_that_were_not_validated_are_not_among_the_best(tmp_path: Path) -> None:
    found = []
    for by, folder in ((by_lightning, "a"), (by_fabricate, "b")):
        torch.manual_seed(0)
        checkpoint = callbacks.ModelCheckpoint(tmp_path / folder, monitor="val_loss", save_top_k=2)
        quiet: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 8, "check_val_every_n_epoch": 2}
        by(Classifier(lr=0.3), *data(), callbacks=[checkpoint], **quiet)
        assert all(Path(path).exists() for path in checkpoint.best_k_models)
        found.append([*sorted(map(float, checkpoint.best_k_models.values())), float(checkpoint.kth_value)])
    assert found[1] == pytest.approx(found[0], abs=1e-6)


class OfAnotherName(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))


def test_the_best_checkpoint_is_the_last_one_if_nothing_is_monitored(tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 3}
    runs = []
    for by, folder in ((by_lightning, "a"), (by_fabricate, "b")):
        torch.manual_seed(0)
        runs.append(by(OfAnotherName(lr=0.3), *data(), default_root_dir=str(tmp_path / folder), **quiet))
    theirs, ours = (
        run.trainer.validate(run.module, data()[1], ckpt_path="best", verbose=False)[0]["score"] for run in runs
    )
    assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize(
    ("keywords", "settings"),
    [
        ({}, {"keep": {"last": 1, "metric": "val_loss", "mode": "min"}, "save_every": Every(epochs=1)}),
        ({"every_n_train_steps": 7, "save_top_k": -1}, {"save_every": Every(steps=7)}),
        ({"train_time_interval": datetime.timedelta(minutes=2, seconds=30)}, {"save_every": Every(minutes=2.5)}),
        ({"every_n_epochs": 3, "save_last": True}, {"save_every": Every(epochs=3), "save_weights_only": False}),
        ({"save_weights_only": True}, {"save_weights_only": True}),
        (
            {"monitor": "val_f1", "mode": "max", "save_top_k": 3},
            {"keep": {"last": 1, "best": 3, "metric": "val_f1", "mode": "max"}},
        ),
    ],
    ids=case,
)
def test_a_model_checkpoint_becomes_arguments(keywords: dict[str, Any], settings: dict[str, Any]) -> None:
    trainer = fabricate_lightning.Trainer(callbacks=[callbacks.ModelCheckpoint(**keywords)], logger=False)
    for name, value in settings.items():
        assert getattr(trainer.core.settings, name) == value


def test_other_callbacks_become_arguments_and_plugins() -> None:
    trainer = fabricate_lightning.Trainer(
        logger=False,
        callbacks=[
            callbacks.Timer(duration="00:01:00:00"),
            callbacks.DeviceStatsMonitor(),
            callbacks.RichModelSummary(),
            callbacks.TQDMProgressBar(),
        ],
    )
    assert str(trainer.core.settings.max_time) == "60 minutes"
    assert [type(plugin).__name__ for plugin in trainer.core.settings.plugins] == ["DeviceStats", "ModelSummary"]


def translated(callback: Any) -> Any:
    """What a callback becomes, a plugin of fabricate's Trainer."""
    (plugin,) = fabricate_lightning.Trainer(logger=False, callbacks=callback).core.settings.plugins
    return plugin


def test_stochastic_weight_averaging_is_fabricates() -> None:
    options: dict[str, Any] = {"swa_epoch_start": 3, "annealing_epochs": 2, "annealing_strategy": "linear"}
    averaging = translated(callbacks.StochasticWeightAveraging([0.1, 0.2], **options))
    assert (averaging.swa_lrs, averaging.annealing_strategy) == ([0.1, 0.2], "linear")
    assert (averaging.swa_epoch_start, averaging.annealing_epochs) == (3, Every(epochs=2))
    default = translated(callbacks.StochasticWeightAveraging(0.1))
    assert (default.swa_epoch_start, default.annealing_epochs) == (0.8, Every(epochs=10))


def test_a_fit_ends_with_the_average_of_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    averager = callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1)
    trained = by_fabricate(Classifier(), *data(), callbacks=[averager])
    (averaging,) = trained.trainer.core.settings.plugins
    assert averaging.averages == 2
    assert "averages weights at the end of each epoch " in capsys.readouterr().out


class KeepsMore(callbacks.ModelCheckpoint):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None: ...


@pytest.mark.parametrize(
    ("listeners", "message"),
    [
        ([callbacks.StochasticWeightAveraging(swa_lrs=0.1, avg_fn=max)], r"\(avg_fn=\.\.\.\) has no counterpart"),
        (
            [KeepsMore()],
            r"KeepsMore.on_train_end would not be called, because fabricate replaces ModelCheckpoint; put",
        ),
        ([callbacks.GradientAccumulationScheduler({0: 2})], "accumulate_grad_batches has one value"),
        ([callbacks.BackboneFinetuning()], r"fabricate\.UnfreezeAt"),
        ([callbacks.ModelCheckpoint(monitor=name) for name in ("a", "b")], "can be kept by one metric"),
        (
            [callbacks.ModelCheckpoint(every_n_epochs=n, monitor="a") for n in (1, 2)],
            ": a run has one interval for saves; leave one out",
        ),
    ],
    ids=case,
)
def test_callbacks_that_cannot_run_are_named(listeners: list[Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fabricate_lightning.Trainer(callbacks=listeners)


def test_an_adapted_module_leaves_what_is_the_trainers_to_the_trainer() -> None:
    with pytest.raises(ConfigurationError, match="adapt: ModelCheckpoint cannot be passed here"):
        adapt(Classifier(), callbacks=[callbacks.ModelCheckpoint()])


class Collects(callbacks.Callback):
    """A callback as users write them."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int, float]] = []
        self.pairs: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.records.append((trainer.global_step, batch_idx, float(trainer.callback_metrics["train_loss"])))
        pl_module.log("from_callback", float(batch_idx), on_step=True, on_epoch=True)
        assert float(outputs["loss"]) == pytest.approx(pl_module.losses[-1], abs=1e-6)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.pairs.append((trainer.current_epoch, len(trainer.callback_metrics)))


def test_a_callback_of_the_users_sees_what_it_sees_in_lightning() -> None:
    instances: list[Any] = []

    def callback() -> list[Any]:
        instances.append(Collects())
        return [instances[-1]]

    class ReturnsMapping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx)}

    theirs, ours = both(ReturnsMapping, data, callbacks=callback)
    assert [record[:2] for record in instances[1].records] == [record[:2] for record in instances[0].records]
    assert [record[2] for record in instances[1].records] == pytest.approx(
        [record[2] for record in instances[0].records], abs=1e-6
    )
    assert instances[1].pairs == instances[0].pairs
    assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-6)


class Returns(Classifier):
    """Returns another kind of output for each batch, and notes what the hook gets for it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        kinds = {1: {"loss": loss, "scores": loss.detach() + 1, "number": 3}, 2: None, 3: loss.reshape(1)}
        return kinds.get(batch_idx, loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)


class ReturnsManually(Returns):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            return None
        if batch_idx == 4:
            return {"seen": batch_idx}
        self.optimizers().zero_grad()
        self.manual_backward(output["loss"] if isinstance(output, dict) else output.sum())
        self.optimizers().step()
        return output


class NotesOutputs(callbacks.Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)


# The mean over a window in which a step returns None is another than in Lightning.
@pytest.mark.parametrize(
    ("kind", "accumulated", "apart_by"), [(Returns, 1, 1e-6), (Returns, 2, 0.02), (ReturnsManually, 1, 1e-6)]
)
def test_the_end_of_a_batch_gets_the_outputs_that_it_gets_in_lightning(
    kind: Any, accumulated: int, apart_by: float
) -> None:
    instances: list[Any] = []

    def callback() -> list[Any]:
        instances.append(NotesOutputs())
        return [instances[-1]]

    theirs, ours = both(kind, data, callbacks=callback, max_epochs=1, accumulate_grad_batches=accumulated)
    assert len(ours.module.outputs) == len(theirs.module.outputs) == 7
    assert ours.module.outputs[2] == theirs.module.outputs[2] == {}
    for noted in ((instances[0], instances[1]), (theirs.module, ours.module)):
        for one, other in zip(noted[0].outputs, noted[1].outputs, strict=True):
            assert one.keys() == other.keys()
            for key, value in one.items():
                if isinstance(value, torch.Tensor):
                    assert (other[key].shape, other[key].requires_grad) == (value.shape, value.requires_grad)
                    assert torch.allclose(other[key], value, atol=apart_by), key
                else:
                    assert other[key] == value


class StopsItself(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 9:
            self.trainer.should_stop = True


def test_the_module_may_end_the_fit() -> None:
    theirs, ours = both(StopsItself, data)
    assert ours.trainer.global_step == theirs.trainer.global_step
    assert ours.trainer.should_stop
    assert float(ours.trainer.callback_metrics["val_loss"]) == pytest.approx(
        float(theirs.trainer.callback_metrics["val_loss"]), abs=1e-6
    ), "validated before the end, in the middle of an epoch"


def test_a_fit_with_a_checkpoint_on_exceptions_saves_as_without(tmp_path: Path) -> None:
    on_exception = callbacks.OnExceptionCheckpoint(tmp_path / "failed")
    trainer = fabricate_lightning.Trainer(
        max_epochs=1, callbacks=[on_exception], default_root_dir=tmp_path, enable_progress_bar=False, logger=False
    )
    trainer.fit(Classifier(), loader())
    (kept,) = trainer.checkpoint_callbacks
    assert isinstance(kept, callbacks.ModelCheckpoint), "Lightning's default, beside the one on exceptions"
    assert Path(kept.best_model_path).is_dir()


def test_a_mapping_without_a_loss_is_an_error_that_names_the_step() -> None:
    class Lossless(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"error": super().training_step(batch, batch_idx)}

    with pytest.raises(ConfigurationError, match=r"Lossless.training_step returned a mapping without 'loss' \(error\)"):
        by_fabricate(Lossless(), loader(), max_epochs=1)
