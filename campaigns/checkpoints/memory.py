"""The memory that a save and a resume need if the state is in shards: no rank may ever hold the whole state.

The figure is the largest increase of a rank's resident memory, by the kernel's high-water mark, after freed memory was returned to the
kernel.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from fabricate import Callback, Trainer, TrainModule
from fabricate.testing import run_ranks

LAYERS, WIDTH, RANKS = 24, 1024, 2
WHOLE = LAYERS * WIDTH * WIDTH * 4 * 3
"""Bytes of the weights and of AdamW's two moments."""
STRATEGIES = ("fsdp", "zero3")
"""The strategies that also shard the weights: under the others every rank always holds all weights."""


class Big(TrainModule):
    """A module of large layers, which are sharded while they are built if the strategy supports it."""

    def configure_model(self) -> None:
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def training_step(self, batch: Any) -> torch.Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Peak:
    """The largest increase of resident memory since this object was made."""

    def __init__(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # sets the mark to the present resident memory
        self._before = self._mark()

    @staticmethod
    def _mark() -> int:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    def rise(self) -> int:
        """The increase in bytes."""
        return self._mark() - self._before


class Measure(Callback):
    """Measures the increase during a save, and from before the state is read until before the first update."""

    def __init__(self) -> None:
        self.saving, self.loading = 0, 0
        self._peak: Peak | None = None

    def on_fit_start(self) -> None:
        self._peak = Peak()

    def on_epoch_start(self) -> None:
        if self._peak is not None:
            self.loading, self._peak = self._peak.rise(), None

    def on_step(self, step: int) -> None:
        if step == 2:
            self._peak = Peak()

    def on_saved(self) -> None:
        if self._peak is not None:
            self.saving, self._peak = self._peak.rise(), None


def measured(strategy: str, save: str, run_dir: str) -> tuple[int, int]:
    """Bytes by which this rank's memory rose while it saved, and while it resumed."""
    measures = []
    for steps in (2, 3):
        measure = Measure()
        trainer = Trainer(
            strategy=strategy, max_steps=steps, run_dir=run_dir, save=save, save_every=2, seed=1, progress=False,
            log_every=100, plugins=[measure],
        )  # fmt: skip
        rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(steps))
        trainer.fit(Big(), TensorDataset(rows), batch_size=1)
        measures.append(measure)
    return measures[0].saving, measures[1].loading


def run(saves: Sequence[str] = ("sync", "async")) -> dict[str, dict[str, float]]:
    """The increase in MiB, by strategy. AssertionError if it is more than the bound, a share of a rank's own part of the state."""
    rises: dict[str, dict[str, float]] = {}
    own = WHOLE // RANKS
    for strategy in STRATEGIES:
        for save in saves:
            with tempfile.TemporaryDirectory() as folder:
                by_rank = run_ranks(measured, RANKS, strategy, save, folder, timeout=300)
            saving, loading = (max(values) for values in zip(*by_rank, strict=True))
            rises[f"{strategy}, {save}"] = {"saving": round(saving / 2**20, 1), "loading": round(loading / 2**20, 1)}
            most = own // 8 if save == "sync" else own * 5 // 4
            if saving > most or loading > own:
                raise AssertionError(
                    f"{strategy}, {save}: memory rose by {saving:,} bytes to save and {loading:,} to load; a rank's own part "
                    f"of the state is {own:,}"
                )
    return rises
