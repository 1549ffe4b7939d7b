"""A run with everything that its files can record: validation, a skipped update, a failure, a resume that computes some updates again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from fabricate import Callback, Trainer, TrainModule

STEPS, SAVED, FAILED, SKIPPED = 10, 4, 7, 2
"""Updates of the run; the checkpoint it resumes from; the step after which it failed; the step after which one was skipped."""
HOSTILE = "</script><img src=x onerror=alert(1)>"
"""The name of a metric, and an argument of the module."""

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from fabricate import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

data = TensorDataset(torch.arange(72.0).view(18, 4), torch.arange(18))
if "--weighted" in sys.argv:
    sampler = WeightedRandomSampler(torch.arange(1.0, 19.0), 18, replacement=True)
    train, options = DataLoader(data, batch_size=4, sampler=sampler), {}
else:
    train, options = data, {"batch_size": 4}
try:
    Trainer(max_steps=6, run_dir="never", seed=1, progress=False).fit(Net(), train, **options)
    raise SystemExit("it trained")
except Exception:
    raise SystemExit("it caught what is not for it")
"""
"""A script with the data of `record`, or, with --weighted, with its own sampler. Its fit must not train."""


class Recorded(TrainModule):
    def __init__(self, name: str = HOSTILE, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layer = torch.nn.Linear(4, 1)
        self.rows: list[list[int]] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        x, row = batch
        self.rows.append(row.tolist())
        loss: torch.Tensor = (self.layer(x) - 1).square().mean()
        self.log(HOSTILE, loss.detach())
        spoilt = self.trainer.step == SKIPPED and not self.trainer.progress.skipped
        return loss * float("nan") if spoilt else loss

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(batch[0]) - 1).square().mean()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class Fails(Callback):
    """Raises after `FAILED` updates."""

    def on_step(self, step: int) -> None:
        if step == FAILED:
            raise RuntimeError(f"{HOSTILE} fell over")


def rows_of(number: int = 18) -> TensorDataset:
    """Rows followed by their number: with four rows per batch, five updates per epoch, the last of two rows."""
    return TensorDataset(torch.randn(number, 4, generator=torch.Generator().manual_seed(1)), torch.arange(number))


def record(
    run_dir: Path, *, seed: int = 1, learning_rate: float = 0.01, fails: bool = True, log_every: int = 1
) -> list[list[int]]:
    """Write a run of `STEPS` updates to `run_dir`. Returns the rows of every micro-batch, those before the failure first."""
    data, batches = rows_of(), []
    for again in range(1 + fails):
        module = Recorded(learning_rate=learning_rate)
        trainer = Trainer(
            max_steps=STEPS,
            seed=seed,
            run_dir=run_dir,
            nonfinite="skip",
            max_grad_norm=1.0,
            save_every=SAVED,
            keep="all",
            validate_every=SAVED,
            log_every=log_every,
            progress=False,
            plugins=[Fails()] if fails and not again else [],
        )
        if fails and not again:
            with pytest.raises(RuntimeError, match="fell over"):
                trainer.fit(module, data, data, batch_size=4)
        else:
            trainer.fit(module, data, data, batch_size=4)
        batches += module.rows
    return batches
