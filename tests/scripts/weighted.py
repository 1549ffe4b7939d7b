"""A script for `fabricate check-invariance`: rows that do not all count, weighted correctly, or wrongly with --mean."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from fabricate import EarlyStopping, Trainer, TrainModule

ROWS = 10  # the last global batch is smaller


class Net(TrainModule):
    """Learns from the rows that count. `mean`: does not tell the loop how many those are."""

    def __init__(self, mean: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)
        )
        self.mean = mean

    def training_step(self, batch: Any) -> Any:
        x, counts = batch
        total = (mse_loss(self.layers(x), x, reduction="none").mean(1) * counts).sum()
        loss = total / counts.sum().clamp(min=1)
        return loss if self.mean else {"loss": loss, "weight": counts.sum()}

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": mse_loss(self.layers(batch[0]), batch[0])}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # needs a validation


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mean", action="store_true")
    options = parser.parse_args()
    x, counts = torch.randn(ROWS, 3), (torch.arange(ROWS) % 3 > 0).float()  # not seeded: the check sees to it
    loader = DataLoader(TensorDataset(x, counts), batch_size=5, shuffle=True)
    trainer = Trainer(
        max_epochs=5,
        strategy="ddp",
        max_grad_norm=0.5,
        run_dir="never-made",
        save_every=1,
        progress=False,
        plugins=[EarlyStopping()],
    )
    result = trainer.fit(Net(options.mean), loader, loader)
    print(result.best_score)  # which a check that saves nothing does not have
