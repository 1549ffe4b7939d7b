"""Modules, callbacks and scripts in further shapes of public projects, run by Lightning and by fabricate with the same results."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import fabricate_lightning
import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from lightning_shapes import CLASSES, Classifier, Trained, apart, both, by_fabricate, loader, rows
from test_data import Data
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from fabricate import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 1e-6


def alike(theirs: Trained, ours: Trained) -> None:
    """Losses, weights, what callbacks see, and learning rates."""
    assert apart(theirs, ours) < TOLERANCE
    assert ours.metrics == pytest.approx(theirs.metrics, abs=TOLERANCE)
    rates = [[group["lr"] for o in run.trainer.optimizers for group in o.param_groups] for run in (theirs, ours)]
    assert rates[1] == pytest.approx(rates[0], rel=1e-12)


# ------------------------------------------------------------------- a backbone that thaws, groups, two schedules, two validation sets


class Transfer(lightning.LightningModule):
    def __init__(self, thaw_at: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
        self.head = torch.nn.Linear(8, CLASSES)
        self.losses: list[float] = []
        self.backbone.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))

    def on_fit_start(self) -> None:
        for parameter in self.backbone.parameters():
            parameter.requires_grad = False

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.hparams.thaw_at:
            self.backbone.requires_grad_(True)
            self.backbone.train()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = cross_entropy(self(batch[0]), batch[1], label_smoothing=0.1)
        self.losses.append(loss.item())
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/lr", self.lr_schedulers()[0].get_last_lr()[0])
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        scores = self(batch[0])
        name = ("clean", "shifted")[dataloader_idx]
        self.log("val/loss", cross_entropy(scores, batch[1]), on_epoch=True, sync_dist=True)
        self.log(f"val/{name}", (scores.argmax(1) == batch[1]).float().mean(), add_dataloader_idx=False)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.backbone.parameters(), "lr": 0.01, "weight_decay": 0.0},
            {"params": [p for p in self.head.parameters() if p.requires_grad], "name": "head"},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.05)
        warm = lr_scheduler.LambdaLR(optimizer, [lambda n: min(1.0, n / 5), lambda n: 1.0])
        return [optimizer], [
            {"scheduler": warm, "interval": "step", "frequency": 2, "name": "warm-up"},
            {"scheduler": lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "epoch"},
            {
                "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
                "monitor": "val/loss/dataloader_idx_1",
                "frequency": 2,
            },
        ]


def two_sets() -> tuple[Any, ...]:
    return loader(), [loader(number=20, seed=1), loader(number=12, seed=2)]


def test_a_backbone_thaws_under_schedules_by_step_by_epoch_and_by_a_metric() -> None:
    alike(*both(Transfer, two_sets, max_epochs=5))


class FrozenBefore(Transfer):
    def __init__(self) -> None:
        super().__init__(thaw_at=1)
        self.backbone.requires_grad_(False)


def test_what_was_frozen_before_the_fit_and_thaws_in_it_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"backbone\.0\.weight was frozen when the fit began"):
        by_fabricate(FrozenBefore(), *two_sets(), max_epochs=2)


# ----------------------------------------------------------------------------------- collections of metrics at the ends of epochs


class Collects(Classifier):
    def __init__(self) -> None:
        super().__init__()
        kinds = {"acc": torchmetrics.Accuracy, "f1": torchmetrics.F1Score}
        metrics = torchmetrics.MetricCollection(
            {name: kind(task="multiclass", num_classes=CLASSES, average="macro") for name, kind in kinds.items()}
        )
        self.train_metrics, self.val_metrics = metrics.clone(prefix="train/"), metrics.clone(postfix="_val")
        self.val_best = torchmetrics.MaxMetric()
        self.outputs: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        loss = cross_entropy(scores, batch[1])
        self.losses.append(loss.item())
        self.log_dict({f"{name}_step": value for name, value in self.train_metrics(scores, batch[1]).items()})
        return {"loss": loss, "scores": scores.detach()}

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.train_metrics.compute())
        self.train_metrics.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self(batch[0])
        self.val_metrics.update(scores, batch[1])
        self.outputs.append({"loss": cross_entropy(scores, batch[1]), "right": scores.argmax(1) == batch[1]})

    def on_validation_epoch_end(self) -> None:
        metrics = self.val_metrics.compute()
        self.val_best.update(metrics["acc_val"])
        self.log_dict(metrics, prog_bar=True)
        self.log("best", self.val_best.compute(), prog_bar=True)
        self.log("val_loss", torch.stack([output["loss"] for output in self.outputs]).mean())
        self.log("val_right", torch.cat([output["right"] for output in self.outputs]).float().mean())
        self.val_metrics.reset()
        self.outputs.clear()

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, torch.Tensor]:
        self.val_metrics.update(self(batch[0]), batch[1])
        return {"rows": torch.tensor(len(batch[0]))}

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("rows", outputs["rows"].float(), reduce_fx=torch.sum)

    def on_test_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()


def test_metrics_that_are_computed_at_the_ends_of_epochs_are_those_of_lightning() -> None:
    theirs, ours = both(
        Collects,
        lambda: (loader(), loader(number=20, seed=1)),
        callbacks=lambda: [callbacks.EarlyStopping("best", mode="max", patience=1, check_finite=True)],
        max_epochs=6,
    )
    alike(theirs, ours)
    assert ours.trainer.current_epoch == theirs.trainer.current_epoch
    tested = [run.trainer.test(run.module, two_sets()[1], verbose=False) for run in (theirs, ours)]
    for one, other in zip(*tested, strict=True):
        assert other == pytest.approx(one, abs=TOLERANCE)


# ------------------------------------------------------------------------------------------------- callbacks of the user's


class Averages(lightning.Callback):
    """Validates with an exponential mean of the weights, in the way of many projects."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.stored: dict[str, torch.Tensor] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.shadow = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, value in pl_module.state_dict().items():
            mean = self.shadow[name]
            mean.copy_(mean * 0.8 + value * 0.2 if mean.is_floating_point() else value)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.stored = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict(self.shadow)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.stored)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shadow = state_dict["shadow"]


class Looks(lightning.Callback):
    """Notes what callbacks read of the trainer and the module."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def _note(self, trainer: Any, module: Any, where: str) -> None:
        numbers = (trainer.global_step, trainer.current_epoch, trainer.max_epochs, trainer.num_training_batches)
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        metrics = {name: round(float(value), 5) for name, value in sorted(trainer.callback_metrics.items())}
        self.notes.append((where, *numbers, trainer.estimated_stepping_batches, rates, metrics, module.training))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        data = trainer.datamodule
        self.notes.append(
            (str.__str__(stage), data.hparams.batch_size, data.trainer is trainer, trainer.is_global_zero)
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        rows = len(trainer.train_dataloader.dataset), len(trainer.datamodule.train), len(trainer.val_dataloaders)
        self.notes.append((rows, trainer.num_val_batches, [type(c).__name__ for c in trainer.callbacks][:2]))
        self._note(trainer, pl_module, "start")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % 3 == 0 or trainer.is_last_batch:
            self._note(trainer, pl_module, f"batch {batch_idx}")
        pl_module.log("progress", trainer.global_step / trainer.estimated_stepping_batches, on_epoch=True)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            pl_module.log("halved", trainer.callback_metrics["val_loss"] / 2)
            self._note(trainer, pl_module, "validation")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer, pl_module, "epoch")
        if trainer.callback_metrics["val_loss"] < 0.75 and trainer.current_epoch >= 2:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer, pl_module, "end")


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_callbacks_that_read_the_trainer_and_exchange_weights_see_what_they_see_in_lightning() -> None:
    looks: list[Looks] = []

    def looks_and_averages() -> list[Any]:
        looks.append(Looks())
        return [looks[-1], Averages()]

    theirs, ours = both(Scheduled, lambda: (Data(),), callbacks=looks_and_averages, max_epochs=6)
    alike(theirs, ours)
    for one, other in zip(looks[0].notes, looks[1].notes, strict=True):
        assert other == one


# ------------------------------------------------------------------------ state from batch to batch, gradients of its own, checkpoints


class Recurrent(lightning.LightningModule):
    """Truncated backpropagation: each batch is the next piece of the same sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = torch.nn.LSTM(2, 6, batch_first=True), torch.nn.Linear(6, 2)
        self.hidden: tuple[torch.Tensor, torch.Tensor] | None = None
        self.example_input_array = torch.zeros(1, 3, 2)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0])

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        states, hidden = self.lstm(x[:, :-1], self.hidden)
        self.hidden = hidden[0].detach(), hidden[1].detach()
        loss = mse_loss(self.out(states), x[:, 1:])
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=0.1 if self.global_step < 4 else 0.5, gradient_clip_algorithm="norm"
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def pieces() -> tuple[Any, ...]:
    x = torch.randn(24, 7, 2, generator=torch.Generator().manual_seed(5)).cumsum(1)
    return (DataLoader(TensorDataset(x), batch_size=4),)


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_state_that_goes_from_batch_to_batch_and_norms_of_gradients_are_those_of_lightning(
    arguments: dict[str, Any],
) -> None:
    alike(*both(Recurrent, pieces, **arguments))


# -------------------------------------------------------- a script with arguments, a logger, the best by a training loss, predictions


class Script(lightning.LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.save_hyperparameters(args)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, self.hparams.width), torch.nn.Tanh(), torch.nn.Linear(self.hparams.width, CLASSES)
        )
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def on_train_epoch_end(self) -> None:
        self.logger.log_metrics({"own": float(self.current_epoch)}, step=self.global_step)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self(batch[0]).softmax(1)


class Writes(callbacks.BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__(write_interval="batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, *values: Any) -> None:
        prediction, indices, _, batch_idx, dataloader_idx = values
        self.written.append((tuple(prediction.shape), list(indices), batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.written.append((batch_indices, [[tuple(one.shape) for one in each] for each in predictions]))


def script(trainer_of: Any, folder: Path, **quiet: Any) -> tuple[Any, Any, Any, Any]:
    args = argparse.Namespace(width=6, lr=0.05, note="x")
    torch.manual_seed(0)
    logger, module, writer = CSVLogger(folder, name="runs", version="one"), Script(args), Writes()
    best = callbacks.ModelCheckpoint(monitor="train_loss_epoch", mode="min", save_last=True, filename="{epoch}")
    trainer = trainer_of(
        max_epochs=3, logger=logger, callbacks=[best, writer], log_every_n_steps=1, enable_progress_bar=False, **quiet
    )
    logger.log_hyperparams(vars(args))
    trainer.fit(module, loader())
    sets = [DataLoader(rows(10), batch_size=4), DataLoader(rows(5, seed=1), batch_size=4)]
    assert trainer.predict(module, sets, return_predictions=False) is None
    predicted = trainer.predict(module, sets)
    return module, best, writer, predicted


def test_a_script_with_a_namespace_a_logger_and_a_writer_of_predictions_runs_as_under_lightning(tmp_path: Path) -> None:
    theirs, their_best, their_writer, predicted = script(
        lightning.Trainer, tmp_path / "theirs", accelerator="cpu", enable_model_summary=False
    )
    ours, best, writer, our_predictions = script(fabricate_lightning.Trainer, tmp_path / "ours")
    assert ours.losses == theirs.losses
    assert float(best.best_model_score) == pytest.approx(float(their_best.best_model_score), abs=TOLERANCE)
    assert writer.written == their_writer.written
    for one, other in zip(predicted, our_predictions, strict=True):
        assert torch.allclose(torch.cat(one), torch.cat(other), atol=TOLERANCE)
    own = [path.read_text().splitlines()[0].split(",") for path in sorted(tmp_path.glob("*/runs/one/metrics.csv"))]
    assert "own" in own[0]
    assert "own" in own[1]
    assert "note: x" in (tmp_path / "ours/runs/one/hparams.yaml").read_text()
    loaded = fabricate_lightning.load_from_checkpoint(Script, best.best_model_path)
    assert (loaded.hparams.width, loaded.hparams.note) == (6, "x")
