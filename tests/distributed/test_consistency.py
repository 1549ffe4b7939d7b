"""Ranks that would not run the same: one error, the same on every rank, that names the difference and its place."""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import random
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import torch
import torch.distributed as dist
from datasets.distributed import split_dataset_by_node
from torch.utils.data import BatchSampler, DataLoader, Subset, random_split

from fabricate import Callback, ConfigurationError, RankError, Trainer, TrainModule
from fabricate.distributed import meeting
from fabricate.distributed.meeting import compare_builds, meet
from fabricate.testing import run_ranks
from fabricate.testing.ranks import free_port
from fabricate.training import preparation


class Regression(TrainModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, width)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hears(Callback):
    def on_step(self) -> None: ...


class HearsToo(Callback):
    def on_step(self) -> None: ...


def _told(case: str) -> str:
    """What `Trainer.fit` raises where the last rank differs in `case`."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    listed: list[Callback] = [Hears(), HearsToo()]
    arguments: dict[str, Any] = {"max_steps": 3, "plugins": listed}
    if last and case == "plugin":
        arguments["plugins"] = listed[:1]
    elif last and case == "order":
        arguments["plugins"] = listed[::-1]
    elif last and case == "steps":
        arguments["max_steps"] = 2
    elif last and case.endswith(("_every", "_norm")):
        arguments[case] = 2
    module = Regression(1)
    if last and case == "frozen":
        module.layer.bias.requires_grad_(False)
    with pytest.raises(RankError) as caught:
        Trainer(progress=False, **arguments).fit(module, torch.ones(12, 4), batch_size=2)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "plugin",
            "ranks [2] differ from rank 0 in listeners of hooks: on_step is ['Hears', 'HearsToo'] on rank 0 and ['Hears'] on rank 2",
        ),
        ("order", "on_step is ['Hears', 'HearsToo'] on rank 0 and ['HearsToo', 'Hears'] on rank 2"),
        ("steps", "ranks [2] differ from rank 0 in settings: total steps is 3 on rank 0 and 2 on rank 2"),
        ("log_every", "differ from rank 0 in settings: log_every is 10 steps on rank 0 and 2 steps on rank 2"),
        ("save_every", "differ from rank 0 in settings: save_every is 1 epoch on rank 0 and 2 steps on rank 2"),
        ("max_grad_norm", "differ from rank 0 in settings: max_grad_norm is None on rank 0 and 2 on rank 2"),
        ("frozen", "layer.bias is [[1], True] on rank 0 and [[1], False] on rank 2"),
    ],
)
def test_what_differs_is_told_on_every_rank(case: str, message: str) -> None:
    messages = run_ranks(_told, 3, case)
    assert message in messages[0]
    assert messages[1:] == messages[:1] * 2


def _in_a_directory_of_its_own(folder: Path) -> str:
    """What `Trainer.fit` raises where the last rank sees another directory at `run_dir`, as a node without the shared file system does."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    preparation._SHOWN_SECONDS = 0.5
    place = folder / ("here" if not last else "elsewhere")
    place.mkdir(exist_ok=True)
    os.chdir(place)
    try:
        with pytest.raises(ConfigurationError if last else RankError) as caught:
            Trainer(progress=False, max_steps=3, run_dir="run").fit(Regression(1), torch.ones(12, 4), batch_size=2)
    finally:
        preparation._SHOWN_SECONDS = 10.0
    return str(caught.value)


def test_a_run_directory_that_one_node_does_not_share_is_refused_before_the_first_step(tmp_path: Path) -> None:
    zero, _, last = run_ranks(_in_a_directory_of_its_own, 3, tmp_path)
    assert re.match(r"run_dir='\S+/elsewhere/run' on \S+ is not the directory in which rank 0 writes", last)
    assert "give every rank the same path, on a file system that all nodes share" in last
    assert zero.startswith("rank 2 failed first, and this rank 0 stopped because of that")
    assert not list(tmp_path.glob("*/run/checkpoints/*"))


class Places(Callback):
    def on_save(self, trainer: Trainer) -> None:
        self.folder = trainer.run_dir


def _tried_on_two_nodes(folder: Path) -> Path:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    places = Places()
    trainer = Trainer(strategy="ddp", fast_dev_run=True, run_dir=folder / "runs" / "one", max_steps=9, plugins=[places])
    trainer.fit(Regression(1), torch.ones(12, 4), batch_size=2)
    assert places.folder is not None
    return places.folder.parent


def test_nodes_try_a_save_beside_the_run_directory_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_ranks(_tried_on_two_nodes, 2, tmp_path) == [tmp_path / "runs"] * 2
    assert not list((tmp_path / "runs").iterdir()), "nothing stays"
    monkeypatch.setattr(preparation, "_SHOWN_SECONDS", 0)
    monkeypatch.setattr(preparation, "is_written_by", lambda run_dir, fit: False)  # as on another host
    with pytest.raises(
        ConfigurationError, match=r"fast_dev_run on several nodes needs a directory that all.* Set run_dir="
    ):
        Trainer(fast_dev_run=True).fit(Regression(1), torch.ones(12, 4), batch_size=2)


def _compared(*ranks: dict[str, str], devices: Sequence[str] = ("", "", "")) -> list[str]:
    """What each rank is told before there is a process group; a thread stands for each process, the store is real."""
    store, errors = dist.HashStore(), [""] * len(ranks)

    def compare(rank: int, built: dict[str, str]) -> None:
        try:
            compare_builds(store, rank, len(ranks), built, devices[rank])
        except RankError as exc:
            errors[rank] = str(exc)

    threads = [threading.Thread(target=compare, args=each) for each in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_another_build_of_torch_or_another_device_is_named_before_ranks_wait_for_each_other() -> None:
    ours = {"torch": "2.13.0", "the device": "cuda"}
    assert _compared(ours, ours, ours) == ["", "", ""]
    older = _compared(ours, ours, ours | {"torch": "2.12.1"})
    assert older == older[:1] * 3
    assert older[0].startswith("torch is 2.13.0 on rank 0 on ")
    assert " and 2.12.1 on rank 2 on " in older[0]
    without = _compared(ours, ours | {"the device": "cpu"})
    assert without == without[:1] * 2
    assert "the device is cuda on rank 0" in without[0]
    assert "and cpu on rank 1" in without[0]


def test_two_ranks_on_one_device_are_named_before_nccl_waits_for_them() -> None:
    ours = {"torch": "2.13.0"}
    assert _compared(ours, ours, ours, devices=("here 1", "here 2", "there 1")) == ["", "", ""]
    messages = _compared(ours, ours, ours, devices=("here 1", "here 2", "here 1"))
    assert messages == messages[:1] * 3
    assert "compute on one device (1)" in messages[0]
    assert {"rank 0", "rank 2"} <= set(re.findall(r"rank \d", messages[0]))
    assert "init_process_group('cpu:gloo,cuda:gloo')" in messages[0]


@pytest.mark.parametrize(("rank", "reason"), [(0, "1/2 clients joined"), (1, "timed out")])
def test_a_rank_that_meets_nobody_says_where_it_waited(
    rank: int, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meeting, "_LONG_WAIT_SECONDS", 0.3)
    port = str(free_port())
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError) as caught:
        meet(rank, 2, {}, datetime.timedelta(seconds=1))
    assert f"did not find all 2 ranks at 127.0.0.1:{port} within 0:00:01: start one process per rank" in str(
        caught.value
    )
    assert reason in str(caught.value)
    note = f"note: rank {rank} has waited 0.3 seconds for the other ranks to begin a fit or an evaluation. Every rank has to call it"
    assert capsys.readouterr().err.count(note) == 1


class Drifts(Callback):
    """Rank 0 does something of its own in the second update, or from the start."""

    def __init__(self, what: str, first: bool) -> None:
        self.what, self.first, self.saved = what, first, list[int]()

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.first:
            if self.what == "lr":
                trainer.optimizers["main"].param_groups[0]["lr"] = 0.2
            elif self.what == "weight":
                self.on_step(module, 2)

    def on_before_step(self, trainer: Trainer, module: TrainModule) -> None:
        if self.first and self.what == "gradient" and trainer.step == 1:
            parameter = next(module.parameters())
            assert parameter.grad is not None
            parameter.grad.mul_(2)

    def on_step(self, module: TrainModule, step: int) -> None:
        if self.first and self.what == "weight" and step == 2:
            with torch.no_grad():
                local = next(module.parameters())
                getattr(local, "_local_tensor", local).add_(1.0)

    def on_saved(self, step: int) -> None:
        self.saved.append(step)


def _drifted(what: str, strategy: str, run_dir: str) -> tuple[str, list[int]]:
    drifts = Drifts(what, os.environ["RANK"] == "0")
    trainer = Trainer(
        strategy=strategy,
        max_steps=6,
        progress=False,
        plugins=[drifts],
        run_dir=run_dir,
        save_every="1 steps",
        log_every=1,
    )
    with pytest.raises(RankError) as caught:
        trainer.fit(Regression(1), torch.linspace(-0.5, 0.5, 144).reshape(36, 4), batch_size=2)
    return str(caught.value), drifts.saved


@pytest.mark.parametrize(
    ("what", "strategy", "message", "saved"),
    [
        (
            "gradient",
            "ddp",
            "hold different weights at step 2; at step 1 they were equal: layer.weight (ranks [0] and",
            [1],
        ),
        ("weight", "ddp", "hold different weights at step 0: layer.weight (ranks [0] and ranks [1] differ)", []),
        ("lr", "fsdp", "at step 0: lr of group 0 of optimizer 'main' is 0.2 on rank 0 and 0.1 on rank 1", []),
    ],
)
def test_replicas_that_drift_apart_are_an_error_before_they_are_saved(
    what: str, strategy: str, message: str, saved: list[int], tmp_path: Path
) -> None:
    for rank, (text, announced) in enumerate(run_ranks(_drifted, 2, what, strategy, str(tmp_path / "run"))):
        assert message in text, rank
        assert announced == saved


# ------------------------------------------------------------------------------------------- data that is divided already


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """The rows of one rank: of all of them, a part."""

    def __init__(self, rank: int, world_size: int, *, own_noise: bool = False) -> None:
        self.rows = torch.arange(24.0).reshape(24, 1).repeat(1, 4)[rank::world_size]
        self.generator = torch.Generator().manual_seed(rank) if own_noise else None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self.rows[index]
        return row if self.generator is None else row + torch.randn((), generator=self.generator)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __init__(self, rank: int, world_size: int) -> None:
        self.rows = Rows(rank, world_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.rows.rows)


class Files(Rows):
    """Rows that are read from files, in a random order."""

    def __init__(self, generator: random.Random, folder: str) -> None:
        super().__init__(0, 1)
        self.files = [(f"{folder}/{number}.png", number) for number in range(24)]
        generator.shuffle(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[self.files[index][1]]


class Shuffled(torch.utils.data.Sampler[int]):
    """Draws from a generator that it brings."""

    def __init__(self, generator: Any) -> None:
        self.own = generator

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        yield from self.own.sample(range(24), 24)


def _data(kind: str) -> Any:
    """The data that this rank passes."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    whole = datasets.Dataset.from_dict({"x": torch.arange(24.0).tolist()})
    return {
        "data set": lambda: Rows(rank, world_size),
        "uneven": lambda: Rows(0, 1).rows[: 13 - rank],
        "stream": lambda: Stream(rank, world_size),
        "batches": lambda: Rows(rank, world_size).rows.split(2),
        "split": lambda: split_dataset_by_node(whole, rank, world_size),
        "split stream": lambda: split_dataset_by_node(whole.to_iterable_dataset(), rank, world_size),
        "noise": lambda: Rows(0, 1, own_noise=True),
        "whole": lambda: whole,
        "sampler": lambda: DataLoader(Rows(0, 1), 2, sampler=Shuffled(random.Random(rank))),
        "batch sampler": lambda: DataLoader(
            Rows(0, 1), batch_sampler=BatchSampler(Shuffled(random.Random(rank)), 2, True)
        ),
        "seeded sampler": lambda: DataLoader(Rows(0, 1), 2, sampler=Shuffled(random)),
        "random split": lambda: DataLoader(
            random_split(Rows(0, 1), [20, 4], torch.Generator().manual_seed(rank))[0], 2, num_workers=1
        ),
        "random files": lambda: DataLoader(Files(random.Random(rank), "/data"), 2, num_workers=1),
        "random rows": lambda: DataLoader(Rows(rank, world_size), 2, num_workers=1),
        "other folders": lambda: DataLoader(Files(random.Random(0), f"/data/{rank}"), 2, num_workers=1),
    }[kind]()


class AnyRows(Regression):
    def training_step(self, batch: Any) -> torch.Tensor:
        rows = batch["x"][:, None].expand(-1, 4) if isinstance(batch, dict) else batch
        return 1e-3 * super().training_step(rows)

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}


def _with_own_data(kinds: list[str], evaluate: bool) -> list[str]:
    errors = []
    for kind in kinds:
        trainer = Trainer(max_epochs=1, seed=1, progress=False)
        data = _data(kind)
        size = {} if kind == "batches" or isinstance(data, DataLoader) else {"batch_size": 2}
        try:
            if evaluate:
                trainer.validate(AnyRows(1), data, **size)
            else:
                trainer.fit(AnyRows(1), data, **size)
            errors.append("")
        except ConfigurationError as exc:
            errors.append(str(exc))
    return errors


DIVIDED = {
    "data set": "has other rows on rank 1 than on rank 0. Every rank has to pass the same, whole data",
    "uneven": "has another number of rows on rank 1 than on rank 0 (13 on rank 0, 12 on rank 1)",
    "stream": "has other first rows on rank 1",
    "batches": "has other first rows on rank 1",
    "split": "has other rows on rank 1",
    "split stream": "is a stream that split_dataset_by_node has already divided over the ranks",
    "noise": "",
    "whole": "",
    "sampler": "is read in another order on rank 1 than on rank 0",
    "batch sampler": "is read in another order on rank 1 than on rank 0",
    "seeded sampler": "",
    "random split": "has other rows on rank 1 than on rank 0",
    "random files": "has other rows on rank 1 than on rank 0",
    "random rows": "has other rows on rank 1 than on rank 0",
    "other folders": "",
}


@pytest.mark.parametrize("evaluate", [False, True])
def test_data_that_is_divided_already_is_refused_and_its_own_noise_is_not(evaluate: bool) -> None:
    for errors in run_ranks(_with_own_data, 2, list(DIVIDED), evaluate):
        for text, (kind, wanted) in zip(errors, DIVIDED.items(), strict=True):
            assert (wanted in text) if wanted else not text, (kind, text)


class Counts(Rows):
    """Counts how often each row is read."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.reads = [0] * 24

    def __getitem__(self, row: int) -> torch.Tensor:
        self.reads[row] += 1
        return super().__getitem__(row)


def _reads() -> tuple[list[int], list[int]]:
    train, val = Counts(), Counts()
    options: dict[str, Any] = {"progress": False, "print_plan": "none", "sanity_batches": 0}
    Trainer(max_epochs=1, **options).fit(AnyRows(1), train, Subset(val, range(24)), batch_size=2)
    return train.reads, val.reads


def test_the_comparison_of_rows_between_ranks_leaves_no_trace_in_the_data() -> None:
    for reads in zip(*run_ranks(_reads, 2), strict=True):
        assert [sum(of_row) for of_row in zip(*reads, strict=True)] == [1] * 24


def _with_own_validation(sets: list[Any]) -> str:
    rows = Rows(0, 1)
    names = sets[int(os.environ["RANK"])]
    val = rows if names == "" else None if names is None else dict.fromkeys(names, rows)
    with pytest.raises(ConfigurationError) as caught:
        Trainer(max_steps=1, progress=False).fit(AnyRows(1), rows, val, batch_size=2)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ["", None],
            "val is one data set on rank 0 and no data on rank 1. Every rank has to pass the same, whole data",
        ),
        (
            [["a", "b"], ["b"]],
            "val is the sets a, b on rank 0 and the sets b on rank 1. Every rank has to pass the same",
        ),
    ],
)
def test_validation_sets_that_a_rank_lacks_are_refused(sets: list[Any], message: str) -> None:
    for text in run_ranks(_with_own_validation, 2, sets):
        assert message in text


# ------------------------------------------------------------------------------------------------------------ copies of a generator


class Crops(Rows):
    """Rows that are drawn from a generator of the data set, whatever the index."""

    def __init__(self, seed: int) -> None:
        super().__init__(0, 1)
        self.own = numpy.random.default_rng(seed)

    def __getitem__(self, index: int) -> torch.Tensor:
        return sum(self.rows[self.own.integers(24)] for _ in range(2))


class Shifts:
    """A transformation with a generator of its own."""

    def __init__(self) -> None:
        self.own = numpy.random.default_rng(0)

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        return row + self.own.random()


class Shifted(Rows):
    def __init__(self) -> None:
        super().__init__(0, 1)
        self.transforms = [Shifts()]

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transforms[0](super().__getitem__(index))


class DrawnOnce(Crops):
    """Draws in its constructor only."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.order = self.own.permutation(24)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[self.order[index]]


def _reseed(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.own = numpy.random.default_rng(worker)


def _notes_about_copies(cases: list[tuple[Any, dict[str, Any]]]) -> list[list[str]]:
    notes = []
    for data, options in cases:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            Trainer(max_steps=2, progress=False, print_plan="full").fit(AnyRows(1), DataLoader(data, 2, **options))
        notes.append([line for line in printed.getvalue().splitlines() if "has a copy of " in line])
    return notes


def test_equal_generators_of_the_data_on_ranks_or_in_worker_processes_get_a_note() -> None:
    every, own = (
        [(Crops(0), {}), (torch.utils.data.Subset(Crops(0), range(8)), {}), (Shifted(), {})],
        [(Rows(0, 1), {}), (DrawnOnce(0), {})],
    )
    [zero, _] = run_ranks(_notes_about_copies, 2, [*every, *own])
    assert [len(lines) for lines in zero] == [1, 1, 1, 0, 0]
    assert "has a copy of Shifted (train).transforms[0].own, so" in zero[2][0]
    assert "train: each rank has a copy of Crops.own, so all of them draw the same numbers from it" in zero[0][0]
    reseeded = {"num_workers": 2, "worker_init_fn": _reseed}
    alone = _notes_about_copies([(Crops(0), {"num_workers": n}) for n in (0, 1, 2)] + [(Crops(0), reseeded)])
    assert [len(lines) for lines in alone] == [0, 0, 1, 0]
    assert "each worker process has a copy" in alone[2][0]


def test_a_generator_that_is_seeded_with_the_rank_gets_no_note() -> None:
    assert run_ranks(_notes_of_own_seed, 2)[0] == [[]]


def _notes_of_own_seed() -> list[list[str]]:
    return _notes_about_copies([(Crops(int(os.environ["RANK"])), {})])
