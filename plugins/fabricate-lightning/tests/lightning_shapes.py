"""LightningModules in the shapes that public projects have, and a comparison of their training by Lightning and by fabricate."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import fabricate_lightning
import lightning
import torch
import torchmetrics
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

ROWS, CLASSES = 52, 3


def case(value: object) -> str:
    """The name of a parameter of a test, the same in every process that collects it."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def rows(number: int = ROWS, seed: int = 0) -> TensorDataset:
    """The same rows wherever it is called: four numbers, and which of the first three is the largest."""
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def loader(batch_size: int = 8, number: int = ROWS, seed: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows(number, seed), batch_size=batch_size, **options)


class Classifier(lightning.LightningModule):
    """Logs a loss and torchmetrics objects. `losses`: what each training step returned."""

    def __init__(self, width: int = 8, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Tanh(), torch.nn.Linear(width, CLASSES)
        )
        self.train_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        loss = cross_entropy(scores, batch[1])
        self.losses.append(float(loss))
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.train_accuracy(scores, batch[1])
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self(batch[0])
        self.val_accuracy(scores, batch[1])
        self.log("val_loss", cross_entropy(scores, batch[1]), prog_bar=True, sync_dist=True)
        self.log("val/accuracy", self.val_accuracy)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Trained:
    """A module after a fit, and its trainer."""

    def __init__(self, module: Any, trainer: Any) -> None:
        self.module, self.trainer = module, trainer

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    @property
    def metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}


def by_lightning(module: Any, *data: Any, **arguments: Any) -> Trained:
    """Train `module` with Lightning's own Trainer."""
    quiet = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
    }
    trainer = lightning.Trainer(**{"max_epochs": 3, "accelerator": "cpu", **quiet, **arguments})
    trainer.fit(module, *data)
    return Trained(module, trainer)


def by_fabricate(module: Any, *data: Any, ckpt_path: Any = None, **arguments: Any) -> Trained:
    """Train `module` with `fabricate_lightning.Trainer`."""
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "logger": False}
    trainer = fabricate_lightning.Trainer(**{"max_epochs": 3, **quiet, **arguments})
    trainer.fit(module, *data, ckpt_path=ckpt_path)
    return Trained(module, trainer)


def both(make: Callable[[], Any], data: Callable[[], tuple[Any, ...]], **arguments: Any) -> tuple[Trained, Trained]:
    """The same module trained by Lightning and by fabricate, from the same weights on the same data. Callable arguments are "
    "called for each."""

    def called() -> dict[str, Any]:
        return {name: value() if callable(value) else value for name, value in arguments.items()}

    torch.manual_seed(0)
    one = make()
    other = copy.deepcopy(one)
    return by_lightning(one, *data(), **called()), by_fabricate(other, *data(), **called())


def apart(one: Trained, other: Trained) -> float:
    """The largest difference of a loss of a training step, or of a weight."""
    assert len(one.module.losses) == len(other.module.losses) > 0
    losses = max(abs(a - b) for a, b in zip(one.module.losses, other.module.losses, strict=True))
    assert one.weights.keys() == other.weights.keys()
    return max(losses, *(float((one.weights[n] - w).abs().max()) for n, w in other.weights.items()))


def regression_loss(module: Any, batch: Any) -> torch.Tensor:
    """A loss that is no cross-entropy."""
    return mse_loss(module.net(batch[0]), torch.nn.functional.one_hot(batch[1], CLASSES).float())
