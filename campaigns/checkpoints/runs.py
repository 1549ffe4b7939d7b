"""A short run with all kinds of state that a resume restores, and its outcome, to be compared bit for bit."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from fabricate import Callback, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader, committed

STEPS, ROWS, GLOBAL_BATCH = 14, 22, 8


class Noisy(Dataset[Any]):
    """Rows with small changes drawn from every random generator."""

    def __init__(self) -> None:
        self.x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.x[row] + 0.1 * (torch.randn(4) + random.random() + np.random.rand())


class Net(TrainModule):
    """A module with dropout, running statistics, a schedule, and a metric that is collected over several steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)])
        self.drop = torch.nn.Dropout(0.3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 1)

    def training_step(self, x: Any) -> torch.Tensor:
        y = x
        for block in self.blocks:
            y = self.drop(torch.tanh(block(y)))
        y = self.head(self.norm(y) if len(y) > 1 else y)
        self.log("rows", float(len(x)), reduce="sum")
        return mse_loss(y, x.sum(1, keepdim=True))

    def validation_step(self, x: Any) -> dict[str, torch.Tensor]:
        return {"loss": x.square().mean()}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


class History(Callback):
    """A plugin with its own state."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []

    def on_step(self, step: int, loss: torch.Tensor) -> None:
        self.losses.append((step, float(loss)))

    def on_save(self, state: dict[str, Any]) -> None:
        state["losses"] = self.losses

    def on_load(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


def fit(run_dir: Path, strategy: str, save: str, workers: int = 0) -> None:
    """Run the fit, or the rest of it."""
    torch.manual_seed(11)
    # the last batch of an epoch is one row, with which the layer of running statistics is not used
    if strategy == "ddp":
        strategy = "ddp:find_unused_parameters=true"
    trainer = Trainer(
        max_steps=STEPS, strategy=strategy, save=save, run_dir=run_dir, seed=5, save_every=2, keep=2, log_every=3,
        validate_every=5, global_batch_size=GLOBAL_BATCH, plugins=[History()], progress=False,
    )  # fmt: skip
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    trainer.fit(Net(), Noisy(), Noisy(), batch_size=4 // world_size, num_workers=workers)


def saved(run_dir: Path) -> list[int]:
    """The steps of the checkpoints in `run_dir`."""
    return [int(path.name[5:]) for path in committed(run_dir / "checkpoints")]


def outcome(run_dir: Path) -> dict[str, Any]:
    """Everything that a finished run leaves, without values that depend on the clock."""
    contents: dict[str, Any] = {"checkpoints": saved(run_dir)}
    for path in committed(run_dir / "checkpoints"):
        with Reader(path) as reader:
            reader.verify()
            for name in reader.manifest.tensors:
                contents[f"{path.name}/{name}"] = bytes(reader.read(name))
            for file in reader.manifest.files:
                if file.name.endswith(".json"):
                    contents[f"{path.name}/{file.name}"] = reader.json(file.name)
        state = contents[f"{path.name}/state.json"]
        state["progress"].pop("seconds")
        state.pop("metrics_bytes")  # its size depends on the digits of the clock
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    contents["metrics"] = [{key: value for key, value in line.items() if key != "clock"} for line in lines]
    contents["model"] = {path.name: path.read_bytes() for path in sorted((run_dir / "model").iterdir())}
    return contents


def differences(wanted: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """The names of the values that differ."""
    return [name for name in sorted({*wanted, *actual}) if wanted.get(name) != actual.get(name)]
