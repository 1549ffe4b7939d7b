"""A run with all kinds of state that a resume restores, and the content of its files without times."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from fabricate import Callback, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader

STEPS, SAVED, CRASH = 8, 4, 6

ROWS, GLOBAL_BATCH = 22, 8  # three updates per epoch, the last of six rows: step 4 is in the middle of the second


class Noisy(Dataset[Any]):
    """Rows that begin with their number, with small changes from every random generator."""

    def __init__(self, rows: int = ROWS) -> None:
        self.x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        noise = torch.randn(4) + random.random() + np.random.rand()
        return row, self.x[row] + 0.1 * noise


class Net(TrainModule):
    def __init__(self, optimizer: str = "adamw", dropout: float = 0.3, schedule: str = "") -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)])
        self.drop = torch.nn.Dropout(dropout)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 1)
        self.optimizer, self.schedule = optimizer, schedule
        self.rows: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.drop(torch.tanh(block(x)))
        return self.head(self.norm(x) if len(x) > 1 else x)

    def training_step(self, batch: Any) -> torch.Tensor:
        _, x = batch
        loss = mse_loss(self(x), x.sum(1, keepdim=True))
        self.log("rows", float(len(x)), reduce="sum")
        return loss

    def on_accumulate(self, batch: Any, weight: Any) -> None:
        self.rows.append(batch[0].tolist() if weight else [])

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": mse_loss(self(batch[1]), batch[1].sum(1, keepdim=True))}

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adamw":
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        if self.schedule == "cosine":
            return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        if self.schedule == "chain":
            warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
            after = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
            return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, after], [3])
        if self.schedule == "plateau":
            return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return optimizer


class Average(Callback):
    """A plugin with state of all kinds, sharded like the weights."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.history: list[tuple[int, float]] = []

    def on_fit_start(self, module: TrainModule) -> None:
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}

    def on_step(self, module: TrainModule, step: int, loss: torch.Tensor) -> None:
        self.history.append((step, float(loss)))
        for name, parameter in module.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)

    def on_save(self, state: dict[str, Any]) -> None:
        state.update(shadow=self.shadow, history=self.history, noise=np.arange(3.0), nothing=float("nan"))

    def on_load(self, module: TrainModule, state: dict[str, Any]) -> None:
        assert np.array_equal(state["noise"], np.arange(3.0))
        assert state["nothing"] != state["nothing"]
        self.history = state["history"]
        for name, whole in state["shadow"].items():
            mine = self.shadow[name]
            if hasattr(mine, "full_tensor"):
                from torch.distributed.tensor import distribute_tensor

                whole = distribute_tensor(whole, mine.device_mesh, mine.placements)
            mine.copy_(whole)


class Crash(Callback):
    def on_step(self, step: int) -> None:
        if step == CRASH:
            raise RuntimeError("power cut")


class Bounded(Callback):
    """Ends a fit that reads epochs without a step forever."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_epoch_start(self) -> None:
        self.epochs += 1
        assert self.epochs < 20, "the epochs go by without a step"


def fit(run_dir: Path | None, steps: int = STEPS, module: TrainModule | None = None, **options: Any) -> Any:
    """One run of the script that all tests share. options: arguments of the Trainer and of `fit`."""
    inner = {"batch_size": 4, "num_workers": 0, "resume": "auto", "val": None, "shuffle": None}
    inner = {name: options.pop(name, default) for name, default in inner.items()}
    data = options.pop("train", Noisy())
    torch.manual_seed(11)
    module = Net() if module is None else module
    defaults = {
        "keep": "all",
        "seed": 5,
        "save_every": "4 steps",
        "log_every": "3 steps",
        "global_batch_size": GLOBAL_BATCH,
    }
    if (
        options.get("strategy") == "ddp"
    ):  # the last batch of an epoch is one row, with which the layer of running statistics is not used
        options["strategy"] = "ddp:find_unused_parameters=true"
    trainer = Trainer(max_steps=steps, run_dir=run_dir, progress=False, **{**defaults, **options})
    trainer.fit(module, data, **inner)
    return module


def fit_until_the_crash(run_dir: Path, **options: Any) -> None:
    plugins = [*options.pop("plugins", []), Crash()]
    with pytest.raises(RuntimeError, match="power cut"):
        fit(run_dir, plugins=plugins, **options)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without values that depend on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "clock"} for line in lines]


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def step(run_dir: Path, number: int = STEPS) -> Path:
    return run_dir / "checkpoints" / f"step-{number:08d}"


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def content(path: Path) -> dict[str, Any]:
    """The content of a checkpoint without times: every tensor's bytes, every value, every rank's generators."""
    with Reader(path) as reader:
        contents: dict[str, Any] = {name: bytes(reader.read(name)) for name in reader.manifest.tensors}
        ranks = int(str(reader.manifest.topology["world_size"]))
        for file in ("state.json", *(f"rank-{rank:05d}.json" for rank in range(ranks))):
            contents[file] = reader.json(file)
    contents["state.json"]["progress"].pop("seconds")
    contents["state.json"].pop("metrics_bytes")  # its size depends on the digits of the clock
    return contents


def assert_same_run(first: Path, second: Path, number: int = STEPS) -> None:
    wanted, actual = content(step(first, number)), content(step(second, number))
    assert actual.keys() == wanted.keys()
    assert [name for name in wanted if actual[name] != wanted[name]] == []
    assert metrics(second) == metrics(first)


def weights(run_dir: Path, number: int = STEPS) -> dict[str, bytes]:
    return {name: value for name, value in content(step(run_dir, number)).items() if name.startswith("model/")}
