"""A checkpoint that Lightning itself wrote becomes one that fabricate evaluates, with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fabricate import PluginError, Trainer, TrainModule, import_checkpoint

WIDTH = 7


class Theirs(lightning.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Ours(TrainModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])}


@pytest.fixture(scope="module")
def data() -> TensorDataset:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


@pytest.mark.filterwarnings("ignore")  # Lightning's own advice
def test_a_checkpoint_of_lightning_brings_its_weights_and_arguments(tmp_path: Path, data: TensorDataset) -> None:
    theirs = Theirs(WIDTH)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )
    trainer.fit(theirs, DataLoader(data, batch_size=8))
    trainer.save_checkpoint(tmp_path / "last.ckpt")

    imported = import_checkpoint(tmp_path / "last.ckpt", tmp_path / "imported")
    ours = Ours.load_from_checkpoint(imported)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name

    metrics = Trainer(progress=False).validate(ours, data, batch_size=64)
    with torch.no_grad():
        expected = torch.nn.functional.mse_loss(theirs.layers(data.tensors[0]), data.tensors[1])
    assert metrics["val_loss"] == pytest.approx(float(expected), abs=1e-6)


def test_a_callback_of_lightning_is_refused_with_what_does_the_same(data: TensorDataset) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler

    for callback, remedy in (
        (EarlyStopping("val_loss"), r"; use the object: plugins=\[EarlyStopping"),
        (GradientAccumulationScheduler({0: 1}), ""),
    ):
        with pytest.raises(PluginError, match=f"is a callback of Lightning, whose events are not called here{remedy}"):
            Trainer(plugins=[callback], max_steps=1).fit(Ours(WIDTH), data, batch_size=4)
