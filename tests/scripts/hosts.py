"""A script for two hosts: endless slow steps, and a short time-out."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import TensorDataset

from fabricate import Callback, Trainer, TrainModule


class Slow(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any) -> torch.Tensor:
        time.sleep(0.05)
        return self.layer(batch[0]).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Tells(Callback):
    def on_step(self, trainer: Trainer, step: int) -> None:
        if trainer.is_main:
            print(f"step {step} of {trainer.accelerator.num_processes} ranks", flush=True)


if __name__ == "__main__":
    rows = TensorDataset(torch.ones(64, 4))
    trainer = Trainer(max_steps=100_000, seed=1, progress=False, timeout="0.25 minutes", plugins=[Tells()])
    trainer.fit(Slow(), rows, batch_size=4)
