"""`self.log`: names, defaults of on_step and on_epoch, reductions, torchmetrics objects, and the destinations of the values."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from fabricate_lightning.levels import LEVELS
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.core.hooks import ModelHooks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning_shapes import Classifier, both, by_fabricate, by_lightning, case, loader

from fabricate import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")


def data() -> tuple[Any, ...]:
    return loader(), [loader(number=20, seed=1), loader(number=12, seed=2)]


def test_the_levels_of_hooks_are_those_of_lightning() -> None:
    theirs = {name: options for name, options in _FxValidator.functions.items() if options is not None}
    assert LEVELS.keys() == theirs.keys()
    for name, level in LEVELS.items():
        options = theirs[name]
        assert (level.on_step, level.on_epoch) == (options["default_on_step"], options["default_on_epoch"]), name
        assert level.of_epoch == (options["allowed_on_step"] == (False,)), name
    assert {name for name in vars(ModelHooks) if name.startswith("on_")} >= {
        n for n in LEVELS if n.startswith("on_train_")
    }


class Everything(Classifier):
    """Logs in every way, in training and in evaluations of several sets."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        number = float(batch_idx)
        self.log("default", number)
        self.log("both", number, on_epoch=True)
        self.log("epoch_only", number, on_step=False, on_epoch=True, batch_size=batch_idx + 1)
        self.log("sum", 1, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("without_logger", number, logger=False)
        self.log_dict({"a": loss.detach(), "b": torch.tensor([2.0])}, prog_bar=True)
        return loss

    def on_train_start(self) -> None:
        self.log("at_start", 3.0)

    def on_train_epoch_end(self) -> None:
        self.log("at_epoch_end", 10.0 * self.current_epoch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after_batch", outputs["loss"] if isinstance(outputs, dict) else float(outputs))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        scores = self(batch[0])
        self.log("val", scores.mean(), on_step=True)
        for reduction in ("min", "max", "sum"):
            self.log(reduction, float(batch_idx + 1), reduce_fx=reduction)
        self.log(f"own/{dataloader_idx}", float(dataloader_idx), add_dataloader_idx=False)
        self.log("weighed", float(batch_idx), batch_size=batch_idx + 1)
        self.val_accuracy(scores, batch[1])
        self.log("accuracy", self.val_accuracy, add_dataloader_idx=False) if dataloader_idx == 0 else None

    def on_validation_epoch_end(self) -> None:
        self.log("val_late", 7.0)


def test_everything_that_is_logged_has_lightnings_name_and_value() -> None:
    theirs, ours = both(Everything, data)
    assert set(ours.metrics) == set(theirs.metrics)
    assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-6)
    for kind in ("logged_metrics", "progress_bar_metrics"):
        one, other = (
            {name: float(value) for name, value in getattr(run.trainer, kind).items()} for run in (theirs, ours)
        )
        assert other == pytest.approx(one, abs=1e-6), kind


class AfterBatch(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("number", float(batch_idx**2), on_step=False, on_epoch=True)


@pytest.mark.parametrize("accumulated", [1, 2, 3])
def test_a_value_that_is_logged_after_each_batch_is_weighed_by_its_rows(accumulated: int) -> None:
    theirs, ours = both(
        AfterBatch, lambda: (loader(), loader(number=20)), max_epochs=1, accumulate_grad_batches=accumulated
    )
    assert ours.metrics["number"] == pytest.approx(theirs.metrics["number"], abs=1e-6)


class AfterBatchAndIn(Classifier):
    """Logs the same number in the step and after it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("in_step", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("after_step", float(batch_idx))


def test_loggers_get_the_mean_over_rows_of_what_is_logged_after_each_batch(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    options = {"accumulate_grad_batches": 3, "log_every_n_steps": 1, "max_epochs": 1, "logger": logger}
    by_fabricate(AfterBatchAndIn(), loader(number=40), **options)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["in_step"]]
    assert [float(line["in_step"]) for line in lines] == [1.0, 3.5], "0 to 2, and 3 and 4"
    assert [float(line["after_step"]) for line in lines] == [1.0, 3.5]


class Collection(Classifier):
    def __init__(self) -> None:
        super().__init__()
        kinds = {"accuracy": torchmetrics.Accuracy, "recall": torchmetrics.Recall}
        self.collection = torchmetrics.MetricCollection(
            {name: kind(task="multiclass", num_classes=3, average="macro") for name, kind in kinds.items()},
            prefix="val_",
        )
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("mean_loss", self.mean, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.collection.update(self(batch[0]), batch[1])
        self.log_dict(self.collection)

    def on_validation_epoch_end(self) -> None:
        self.log("best", self.collection["recall"].compute())


def test_collections_of_metrics_and_their_values_within_an_epoch_are_those_of_lightning() -> None:
    theirs, ours = both(Collection, lambda: (loader(), loader(number=20, seed=1)), val_check_interval=3, max_epochs=2)
    assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-6)


@pytest.mark.parametrize(
    ("hook", "call", "message"),
    [
        ("on_fit_start", lambda m: m.log("x", 1), r"self\.log\('x'\) in on_fit_start: nothing can be logged there"),
        (
            "on_train_epoch_end",
            lambda m: m.log("x", 1, on_step=True),
            "this hook is called for an epoch, not for a batch; leave",
        ),
        ("on_train_start", lambda m: m.log("x", torch.zeros(2)), "a metric is one number"),
        ("on_train_start", lambda m: m.log("x", {"a": 1}), "use self.log_dict"),
        ("on_train_start", lambda m: m.log("x", 1, reduce_fx=len), r"reduce_fx=<built-in function len>\): give 'mean'"),
        ("on_train_start", lambda m: m.log("x", 1, reduce_fx="max"), "log a torchmetrics object"),
        (
            "on_train_start",
            lambda m: m.log("x/dataloader_idx_1", 1),
            "Lightning adds '/dataloader_idx_N' to the name itself; leave it out of the name",
        ),
    ],
)
def test_what_cannot_be_logged_is_named(hook: str, call: Any, message: str) -> None:
    kind = type("Wrong", (Classifier,), {hook: lambda self, *_: call(self)})
    with pytest.raises(ConfigurationError, match=message):
        by_fabricate(kind(), loader(), max_epochs=1)


class Finalized(CSVLogger):
    status = ""

    def finalize(self, status: str) -> None:
        self.status = status
        super().finalize(status)


def test_loggers_learn_that_a_fit_failed(tmp_path: Path) -> None:
    class Fails(Classifier):
        def on_train_epoch_end(self) -> None:
            raise ZeroDivisionError

    logger = Finalized(tmp_path)
    with pytest.raises(ZeroDivisionError):
        by_fabricate(Fails(), loader(), logger=logger, max_epochs=1)
    assert logger.status == "failed"


def test_values_go_to_the_run_and_to_loggers(tmp_path: Path) -> None:
    logger = Finalized(tmp_path, name="one", version=3)
    monitor = LearningRateMonitor()
    module = Classifier(width=6)
    trained = by_fabricate(
        module,
        loader(),
        loader(number=20),
        logger=logger,
        callbacks=[monitor],
        log_every_n_steps=2,
        enable_checkpointing=True,
        max_epochs=2,
    )
    assert logger.status == "success"
    run = tmp_path / "one" / "version_3"
    assert trained.trainer.log_dir == str(run)
    assert trained.trainer.logger is logger
    assert trained.module.logger is logger
    with (run / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    names = {name for line in lines for name, value in line.items() if value}
    assert names >= {"train_loss_step", "train_loss_epoch", "val_loss", "val/accuracy", "epoch", "lr-AdamW"}
    assert len(monitor.lrs["lr-AdamW"]) == 7
    assert "width: 6" in (run / "hparams.yaml").read_text()
    stages = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    validations = [line["metrics"] for line in stages if line["stage"] == "validate"]
    assert [set(metrics) for metrics in validations] == [{"val_loss", "val/accuracy"}] * 2


class Momenta(Classifier):
    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[0].parameters(), "name": "first"}, {"params": self.net[3].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_the_learning_rate_monitor_has_lightnings_names_and_values(tmp_path: Path) -> None:
    monitors: list[LearningRateMonitor] = []
    columns: list[set[str]] = []
    for by, folder in ((by_lightning, "a"), (by_fabricate, "b")):
        monitors.append(LearningRateMonitor(log_momentum=True, log_weight_decay=True))
        logger = CSVLogger(tmp_path / folder)
        by(Momenta(), loader(), logger=logger, callbacks=[monitors[-1]], log_every_n_steps=1, max_epochs=2)
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            columns.append({name for line in csv.DictReader(file) for name in line if name.startswith("lr-")})
    theirs, ours = monitors
    assert columns[1] == columns[0]
    assert set(ours.lrs) == set(theirs.lrs) == {"lr-SGD/first", "lr-SGD/pg2"}
    assert ours.last_momentum_values == theirs.last_momentum_values
    assert ours.last_weight_decay_values == theirs.last_weight_decay_values


class Where(Classifier):
    """Notes the step and the epoch that hooks of evaluations see, and writes to the logger's own object."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int]] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_rows", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def _note(self, hook: str) -> None:
        assert (self.global_step, self.current_epoch) == (self.trainer.global_step, self.trainer.current_epoch)
        self.seen.append((hook, self.global_step, self.current_epoch))

    def setup(self, stage: str) -> None:
        self._note(f"setup {str.__str__(stage)}")

    def on_validation_start(self) -> None:
        self._note("validate")

    def on_test_epoch_end(self) -> None:
        self._note("test")

    def on_predict_end(self) -> None:
        self._note("predict")

    def teardown(self, stage: str) -> None:
        self._note(f"teardown {str.__str__(stage)}")


def _evaluations(path: Path) -> list[tuple[str, ...]]:
    """Step, epoch and metrics of the lines of evaluations in a CSV file."""
    with path.open() as file:
        lines = list(csv.DictReader(file))
    names = ("step", "epoch", "val_loss", "test_rows")
    return [tuple(line.get(n, "")[:6] for n in names) for line in lines if line.get("test_rows") or line["val_loss"]]


class Destinations(Classifier):
    """Logs values for epochs only, for steps only, for both, and without the loggers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        number = float(self.global_step**2)
        self.log("mean_of_epoch", number, on_step=False, on_epoch=True)
        self.log("step_only", number)
        self.log("forked", number, on_step=True, on_epoch=True)
        self.log("hidden", number, on_step=True, on_epoch=True, logger=False)
        return loss


def _columns(logger: CSVLogger, names: tuple[str, ...]) -> dict[str, list[float]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    return {name: [float(line[name]) for line in lines if line.get(name)] for name in names}


@pytest.mark.parametrize("log_every", [1, 2, 5])
def test_loggers_get_a_value_of_an_epoch_once_for_each_epoch(tmp_path: Path, log_every: int) -> None:
    loggers: list[CSVLogger] = []

    def logger() -> CSVLogger:
        loggers.append(CSVLogger(tmp_path, version=len(loggers)))
        return loggers[-1]

    both(Destinations, lambda: (loader(),), logger=logger, log_every_n_steps=log_every, max_epochs=2)
    whole = ("mean_of_epoch", "forked_epoch", "forked", "hidden", "hidden_step", "hidden_epoch")
    theirs, ours = (_columns(each, whole) for each in loggers)
    assert ours == {name: pytest.approx(values, rel=1e-6) for name, values in theirs.items()}
    assert len(ours["mean_of_epoch"]) == 2
    steps = _columns(loggers[1], ("step_only", "forked_step"))
    assert steps["step_only"] == steps["forked_step"] != []


@pytest.mark.parametrize("length", [{"max_epochs": 2}, {"max_epochs": 2, "max_steps": 10}], ids=case)
def test_evaluations_after_a_fit_are_at_its_step_and_epoch(tmp_path: Path, length: dict[str, int]) -> None:
    loggers: list[CSVLogger] = []

    def logger() -> CSVLogger:
        loggers.append(CSVLogger(tmp_path, version=len(loggers)))
        return loggers[-1]

    runs = both(Where, lambda: (loader(), loader(number=20)), logger=logger, num_sanity_val_steps=0, **length)
    counted: list[list[tuple[int, int]]] = []
    for trained in runs:
        trainer, module = trained.trainer, trained.module
        counted.append([(trainer.global_step, trainer.current_epoch)])
        for evaluate in (trainer.test, trainer.validate, trainer.predict, trainer.test):
            evaluate(module, loader(number=20))
            counted[-1].append((trainer.global_step, trainer.current_epoch))
    theirs, ours = runs
    assert counted[1] == counted[0] == [(length.get("max_steps", 14), 2)] * 5
    assert ours.module.seen == theirs.module.seen
    found = [_evaluations(Path(each.log_dir) / "metrics.csv") for each in loggers]
    after = [[line for line in lines if line[1] == "2"] for lines in found]
    assert after[1] == after[0]
    assert len(after[0]) == 3
    # Lightning writes a validation within the fit one step lower, so steps are not compared.
    assert [line[1:] for line in found[1]] == [line[1:] for line in found[0]]


def test_an_evaluation_of_a_checkpoint_without_a_fit_is_at_step_0_as_in_lightning(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    runs = both(
        Where,
        lambda: (loader(),),
        callbacks=lambda: [ModelCheckpoint(tmp_path / str(len(list(tmp_path.iterdir()))))],
        enable_checkpointing=True,
        max_epochs=1,
    )
    modules = []
    for trained in runs:
        modules.append(Where())
        trainer = type(trained.trainer)(logger=False, enable_progress_bar=False)
        path = trained.trainer.checkpoint_callback.best_model_path
        trainer.test(modules[-1], loader(number=20), ckpt_path=path)
        assert (trainer.global_step, trainer.current_epoch) == (0, 0)
        assert torch.equal(modules[-1].net[0].weight, trained.module.net[0].weight)
    assert modules[1].seen == modules[0].seen == [("setup test", 0, 0), ("test", 0, 0), ("teardown test", 0, 0)]


def test_the_loggers_own_object_writes_into_the_event_file_of_the_run(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from lightning.pytorch.loggers import TensorBoardLogger

    class Writes(Where):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.logger.experiment.add_scalar("own", 10.0 * self.global_step, self.global_step)

    logger = TensorBoardLogger(tmp_path)
    trained = by_fabricate(Writes(), loader(), logger=logger, log_every_n_steps=2, max_epochs=1)
    trained.trainer.test(trained.module, loader(number=20))
    files = accumulators.EventAccumulator(logger.log_dir)
    files.Reload()
    assert [(event.step, event.value) for event in files.Scalars("own")] == [(n, 10.0 * n) for n in range(1, 8)]
    assert [event.step for event in files.Scalars("train_loss_step")] == [2, 4, 6, 7]
    assert [(event.step, event.value) for event in files.Scalars("test_rows")] == [(7, 20.0)]


def test_logging_without_a_trainer_warns_as_lightnings_module_does() -> None:
    module = Classifier()
    module.log("x", 1)
    assert isinstance(module, lightning.LightningModule)
