"""The trained work: the same model, data, optimizer and seeds for every compared loop.

Every forward records the process's CPU time, so that everything between two forwards counts for the loop.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

WARMUP = 40
"""Micro-batches at the beginning that are not counted: lazy imports, caches, the first optimizer step."""


class Network(torch.nn.Module):
    """A network 10 -> 16 -> 1 with the squared error: as little work as possible in a step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        self.clock = clock

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.clock.stamp()
        return torch.nn.functional.mse_loss(self.layers(x), y)


class Language(torch.nn.Module):
    """A GPT-2 of two layers of width 128, on 64 tokens from a vocabulary of 4096."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=2, n_embd=128, n_head=4, n_positions=64, vocab_size=4096, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )  # fmt: skip
        config.use_cache = False
        self.gpt = GPT2LMHeadModel(config)
        self.clock = clock

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.clock.stamp()
        logits = self.gpt(input_ids=x).logits
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


@dataclass
class Clock:
    """CPU nanoseconds of this process (all its threads) at each forward; frames: the files and functions on the stack at the first
    forward."""

    stamps: list[int] = field(default_factory=list)
    frames: list[str] = field(default_factory=list)

    def stamp(self) -> None:
        """Record that a forward begins."""
        self.stamps.append(time.process_time_ns())
        if not self.frames:
            frame: Any = sys._getframe(1)
            while frame is not None:
                self.frames.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
                frame = frame.f_back

    def typical(self) -> float:
        """CPU microseconds of the median micro-batch, which does not include work that is done every n steps."""
        counted = self.stamps[WARMUP:]
        return statistics.median(after - before for before, after in itertools.pairwise(counted)) / 1000

    def mean(self) -> float:
        """CPU microseconds per micro-batch over the whole run, which includes work that is done every n steps."""
        counted = self.stamps[WARMUP:]
        return (counted[-1] - counted[0]) / (len(counted) - 1) / 1000


class Rows(Dataset[Any]):
    """A data set as users write it: one row per `__getitem__`, on the CPU."""

    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(column[index] for column in self.columns)


@dataclass(frozen=True)
class Work:
    """One case. steps: micro-batches. output: progress bar, metrics file, TensorBoard and checkpoints are on. row_by_row: the data set is
    of a user's class, so that no framework reads a batch with one index."""

    name: str
    network: Callable[[Clock], torch.nn.Module]
    steps: int
    accumulation: int = 1
    clip: float | None = None
    cosine: bool = False
    output: bool = False
    listeners: bool = False
    row_by_row: bool = False
    compile: bool = False
    log_every: int = 50
    save_every: int = 500
    batch_size: int = 8
    workers: int = 0

    def build(self, clock: Clock) -> torch.nn.Module:
        """A new model, with the same weights every time."""
        torch.manual_seed(0)
        return self.network(clock)

    def dataset(self) -> Dataset[Any]:
        """The rows of one epoch."""
        generator = torch.Generator().manual_seed(1)
        rows = self.steps * self.batch_size
        if self.network is Network:
            x = torch.randn(rows, 10, generator=generator)
            return (Rows if self.row_by_row else TensorDataset)(x, x.sum(1, keepdim=True).sin())
        tokens = torch.randint(4096, (rows, 65), generator=generator)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def loader(self) -> DataLoader[Any]:
        """A loader that does not shuffle, so that every framework reads the same order."""
        return DataLoader(self.dataset(), batch_size=self.batch_size, num_workers=self.workers)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """SGD for the small network, AdamW for the language model."""
        if self.network is Network:
            return torch.optim.SGD(model.parameters(), lr=0.01)
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    @property
    def updates(self) -> int:
        """The total number of updates."""
        return self.steps // self.accumulation

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR | None:
        """A cosine schedule over all updates, or None if the case has none."""
        if not self.cosine:
            return None
        updates = self.updates
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda u: 0.5 * (1 + math.cos(math.pi * min(u, updates) / updates))
        )


WORKS: Mapping[str, Work] = {
    work.name: work
    for work in (
        Work("quiet", Network, steps=440),
        Work("rows", Network, steps=440, row_by_row=True),
        Work("listeners", Network, steps=440, listeners=True),
        Work("output", Network, steps=1040, output=True),
        Work("accumulation", Network, steps=640, accumulation=4, clip=1.0, cosine=True),
        Work("gpt", Language, steps=WARMUP + 30),
    )
}
