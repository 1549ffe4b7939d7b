"""Data whose rows are their own numbers, one source per rank, and the rows that an update takes from all sources."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fabricate.data.source import Loading, Source
from fabricate.data.user_data import open_source

# (world size, accumulation, batch size) with the same global batch of 12
FACTORS = [(1, 1, 12), (1, 3, 4), (2, 3, 2), (2, 1, 6), (3, 1, 4), (3, 2, 2), (4, 3, 1), (6, 2, 1), (12, 1, 1)]


class Numbers(Dataset[int]):
    """Rows that are their own index."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Augmentation that draws from all three global generators."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Stream(IterableDataset[int]):
    def __init__(self, rows: int, shuffled: bool = False) -> None:
        self.rows = rows
        self.shuffled = shuffled

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.rows).tolist() if self.shuffled else range(self.rows)


class Rereadable:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def opened(data: Any, loading: Loading | None = None, **settings: Any) -> Source:
    defaults: dict[str, Any] = {"argument": "train", "training": True, "rank": 0, "world_size": 1, "seed": 5}
    return open_source(data, loading=loading or Loading(), **{**defaults, **settings})


def ranks(data: Callable[[], Any], loading: Loading | None, world_size: int, **settings: Any) -> list[Source]:
    return [opened(data(), loading, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]


def values(batch: Any) -> list[int]:
    batch = torch.cat(list(batch)) if isinstance(batch, list | tuple) and isinstance(batch[0], torch.Tensor) else batch
    return [int(value) for value in (batch.flatten().tolist() if isinstance(batch, torch.Tensor) else batch)]


def updates(sources: list[Source], epoch: int = 0, start: int = 0) -> list[tuple[list[int], int, int, bool]]:
    """For each update: the rows that count, by micro-step and rank; the number of rows of the window; its end; whether it is the last."""
    records = []
    for windows in zip(*(source.windows(epoch, start) for source in sources), strict=True):
        heads = {(window.num_micro_steps, window.rows, window.end, window.last) for window in windows}
        assert len(heads) == 1, "ranks disagree about a window"
        steps = [list(window.micro_batches) for window in windows]
        assert {len(step) for step in steps} == {windows[0].num_micro_steps}
        rows: list[int] = []
        for micro_step in zip(*steps, strict=True):
            real = [values(batch) for batch, count in micro_step if count]
            assert [len(batch) for batch in real] == [count for _, count in micro_step if count]
            step_rows = [row for batch in real for row in batch]
            for batch, count in micro_step:
                if not count:
                    assert set(values(batch)) <= set(step_rows), "a stand-in is made of the micro-step's own rows"
            rows += step_rows
        assert len(rows) == windows[0].rows
        records.append((rows, windows[0].rows, windows[0].end, windows[0].last))
    return records


def flat(steps: list[tuple[list[int], int, int, bool]]) -> list[int]:
    return [row for rows, *_ in steps for row in rows]


def in_twos(rows: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(rows), batch_size=2, **options)
