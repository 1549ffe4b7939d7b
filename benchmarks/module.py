"""The compared work as a TrainModule, and listeners that do almost nothing."""

from __future__ import annotations

from typing import Any

import torch

import fabricate
from benchmarks.works import Clock, Work


class Module(fabricate.TrainModule):
    """`work` as a TrainModule."""

    def __init__(self, work: Work, clock: Clock) -> None:
        super().__init__()
        self.work = work
        self.model = work.build(clock)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return self.model(x, y)

    def configure_optimizers(self) -> Any:
        optimizer = self.work.optimizer(self.model)
        return optimizer, self.work.schedule(optimizer)


class Steps(fabricate.Callback):
    """A listener that counts updates."""

    count = 0

    def on_step(self, step: int, loss: torch.Tensor) -> None:
        self.count = step


class MicroBatches(fabricate.Callback):
    """A listener that counts micro-batches."""

    count = 0

    def on_accumulate(self, batch: Any, micro_step: int) -> None:
        self.count += 1
