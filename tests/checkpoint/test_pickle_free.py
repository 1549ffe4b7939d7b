"""No strategy writes, reads or sends a pickle while it saves and resumes: the functions for it are removed, and Python's audit events are
checked."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import TensorDataset

from fabricate import Callback, Trainer, TrainModule
from fabricate.testing import run_ranks

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
PICKLES: list[tuple[Any, str]] = [
    *((pickle, name) for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler", "_Pickler", "_Unpickler")),
    *((torch, name) for name in ("save", "load")),
    *((torch.serialization, name) for name in ("save", "load")),
    *((distributed_c10d, name) for name in ("_pickler", "_unpickler")),
    *((dist, name) for name in dir(dist) if "object" in name and callable(getattr(dist, name))),
]
_heard: list[Any] = []
_listening = False


def _listen(event: str, arguments: Any) -> None:
    if _listening and event == "pickle.find_class":
        _heard.append(arguments)


@contextlib.contextmanager
def without_pickle() -> Iterator[None]:
    """Every way to pickle raises, and what C code unpickles is heard."""
    global _listening

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a checkpoint is data, not a program")

    if not _listening:
        sys.addaudithook(_listen)  # for the rest of this process
    with contextlib.ExitStack() as stack:
        for owner, name in PICKLES:
            stack.enter_context(patch.object(owner, name, refuse))
        _listening = True
        try:
            yield
        finally:
            _listening = False
    assert _heard == []


class Net(TrainModule):
    """Tied weights, a frozen layer, a running statistic of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)])
        self.blocks[1].weight = self.blocks[0].weight
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(5)

    def training_step(self, batch: Any) -> torch.Tensor:
        x = self.norm(self.frozen(batch[0]))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


class Remembers(Callback):
    """State of a plugin: values, an array's worth of tensor, and weights as they are sharded."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def on_save(self, module: TrainModule, state: dict[str, Any]) -> None:
        state |= {"list": [1, (2, 3.5)], "tensor": torch.arange(7), "weight": next(module.parameters())}

    def on_load(self, state: dict[str, Any]) -> None:
        self.loaded = state


def save_and_resume(root: str, strategy: str, save: str) -> tuple[int, Any]:
    """Two updates, then two more from the checkpoint; returns the steps of the second fit and what its plugin got back."""
    runs = []
    rows = TensorDataset(torch.randn(16, 5, generator=torch.Generator().manual_seed(0)))
    # Modules that are imported late derive classes from those of pickle.
    Trainer(strategy=strategy, max_steps=1, seed=1, progress=False).fit(Net(), rows, batch_size=2)
    for steps in (2, 4):
        remembers = Remembers()
        trainer = Trainer(
            strategy=strategy, max_steps=steps, run_dir=Path(root), save=save, save_every=1, seed=1, progress=False,
            plugins=[remembers],
        )  # fmt: skip
        with without_pickle():
            result = trainer.fit(Net(), rows, batch_size=2)
        runs.append((result.steps, remembers.loaded))
    return runs[1][0], runs[1][1]["list"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_pickles_anything_when_it_saves_and_resumes(strategy: str, tmp_path: Path) -> None:
    for save in ("sync", "async"):
        root = tmp_path / save
        assert run_ranks(save_and_resume, 2, str(root), strategy, save) == [(4, [1, (2, 3.5)])] * 2
        (path,) = (root / "checkpoints").glob("step-00000004")
        assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


def send(what: str) -> str:
    """What a rank is told when it pickles after all."""
    with without_pickle():
        try:
            if what == "collective":
                dist.broadcast_object_list([1])
            else:
                pickle.dumps(1)
        except AssertionError as exc:
            return str(exc)
    return "nothing"


@pytest.mark.parametrize("what", ["collective", "pickle"])
def test_the_pickle_of_these_tests_raises_when_it_is_loaded(what: str) -> None:
    assert run_ranks(send, 1, what) == ["a checkpoint is data, not a program"]
