"""A script for `fabricate verify-resume`: exact without options, and inexact in the ways that its options name."""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fabricate import Callback, Trainer, TrainModule, seed_everything

ROWS = 20


class Rows(Dataset[Any]):
    """Rows with noise: from a generator of the data set's own, or from torch's, which is seeded for every batch."""

    def __init__(self, own: np.random.Generator | None = None) -> None:
        self.x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(7))
        self.own = own

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> torch.Tensor:
        noise = torch.randn(4) if self.own is None else torch.from_numpy(self.own.standard_normal(4)).float()
        return self.x[row] + 0.1 * noise


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(8, 4)
        )

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch), batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


class Careful(Callback):
    """Counts, and saves what it counted."""

    name = "careful"

    def __init__(self) -> None:
        self.seen = 0

    def on_step(self) -> None:
        self.seen += 1

    def on_save(self, state: dict[str, Any]) -> None:
        state["seen"] = self.seen

    def on_load(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Forgetful(Callback):
    """Keeps an average of the losses, does not save it, and does not change the training with it."""

    name = "forgetful"

    def __init__(self) -> None:
        self.average = 0.0
        self.process = os.getpid()  # another in every start, and nobody's fault

    def on_step(self, loss: torch.Tensor) -> None:
        self.average = 0.9 * self.average + 0.1 * float(loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir")
    parser.add_argument("--forgetful", action="store_true", help="a callback that keeps state and does not save it")
    parser.add_argument(
        "--drawing", choices=("seeded", "unseeded"), help="noise from a generator of the data set's own"
    )
    options = parser.parse_args()
    seed_everything(1)  # for the layers, which are built before the Trainer has a say
    own = {"seeded": np.random.default_rng(3), "unseeded": np.random.default_rng(), None: None}[options.drawing]
    trainer = Trainer(
        max_epochs=2,
        global_batch_size=4,
        seed=1,
        run_dir=options.run_dir,
        log_every=2,
        save_every=3,
        keep=1,
        progress=False,
        plugins=[Careful(), *([Forgetful()] if options.forgetful else [])],
    )
    trainer.fit(Net(), Rows(own), batch_size=2)
