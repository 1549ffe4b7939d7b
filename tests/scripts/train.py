"""A training script as users write it, without code for ranks. The launcher tests start it with every launcher."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from fabricate import Callback, FitResult, Trainer, TrainModule

ROWS, GLOBAL_BATCH = 46, 12  # the last window of an epoch has 10 rows


class Net(TrainModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)])
        self.drop = torch.nn.Dropout(dropout)
        self.head = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        for block in self.blocks:
            x = self.drop(torch.tanh(block(x)))
        return mse_loss(self.head(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Failing(Net):
    """Rank 1 raises in its third update, while rank 0 waits for its gradients."""

    def training_step(self, batch: Any) -> torch.Tensor:
        if self.trainer.step == 2 and os.environ.get("RANK") == "1":
            print("failing now", flush=True)
            raise ValueError("rank 1 has had enough")
        return super().training_step(batch)


class Slow(Callback):
    """Slow enough to be told to end, and once told not done before the file "told" in the run directory says that all is sent."""

    def on_step(self) -> None:
        time.sleep(0.1)

    def on_preempt(self, trainer: Trainer) -> None:
        assert trainer.run_dir is not None
        while not (trainer.run_dir / "told").exists():
            time.sleep(0.05)


def fit(
    run_dir: Path,
    steps: int,
    *,
    dropout: float = 0.0,
    fails: bool = False,
    slow: bool = False,
    workers: int = 0,
    kind: type[Net] = Net,
) -> FitResult:
    """Train on `ROWS` rows in global batches of `GLOBAL_BATCH`, on however many ranks there are."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, 4)
    trainer = Trainer(
        max_steps=steps,
        global_batch_size=GLOBAL_BATCH,
        max_grad_norm=1.0,
        seed=2,
        run_dir=run_dir,
        log_every=1,
        progress=False,
        plugins=[Slow()] if slow else [],
    )
    module = Failing() if fails else kind(dropout)
    return trainer.fit(module, TensorDataset(x, x.sum(1, keepdim=True)), batch_size=3, num_workers=workers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--fails", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--exit-code", action="store_true", help="end with the fit's exit code")
    options = vars(parser.parse_args())
    says = options.pop("exit_code")
    result = fit(**options)
    if says:
        sys.exit(result.exit_code)
