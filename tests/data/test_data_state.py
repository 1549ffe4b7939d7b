"""Data with its own position resumes from there exactly; data that may have changed is reported."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    SubsetRandomSampler,
)
from transformers import BatchEncoding

from fabricate import Callback, CheckpointError, ConfigurationError, Trainer, TrainModule
from fabricate.data.source import Loading, Source
from fabricate.data.user_data import open_source

BATCHES = 9


class Remembers:
    """Batches of two rows in an order that no second reading finds again: it depends on how often this was read, on a
    generator of its own and on the global ones. Reading is counted."""

    def __init__(self) -> None:
        self.epoch = -1
        self.own = random.Random(3)
        self.at = 0
        self.begun = False
        self.reads = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.begun:
            self.epoch, self.at = self.epoch + 1, 0
        self.begun = False
        while self.at < BATCHES:
            self.at += 1
            self.reads += 1
            row = 1000 * self.epoch + 10 * self.at
            yield torch.tensor([[row, self.own.random(), random.random()], [row + 1, 0, float(torch.rand(()))]])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "own": self.own.getstate(), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at, self.begun = state["epoch"], state["at"], True
        self.own.setstate(state["own"])


class Stream(IterableDataset[Any]):
    """The same, a row at a time."""

    def __init__(self) -> None:
        self.inner = Remembers()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self.inner:
            yield batch[0]

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class Rolls(IterableDataset[Any]):
    """Rows of a stream that counts its epochs: when a row is requested after the last one, or, if `late`, when it is read again."""

    def __init__(self, late: bool) -> None:
        self.late = late
        self.at = self.epoch = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._roll(self.late)
        while self.at < BATCHES:
            self.at += 1
            yield torch.tensor([self.epoch * 100 + self.at, 0, 0])
        self._roll(not self.late)

    def _roll(self, is_due: bool) -> None:
        if is_due and self.at == BATCHES:
            self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


class Restarts:
    """Batches in an order that is drawn when an iterator is made. An iterator holds the position and knows without another request that it
    is at its end; a state from the end begins the next pass at once, with the generator of that state (as loaders of torchdata do)."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.saved: Any = None
        self.latest: Any = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.latest = _Pass(self, self.saved)
        self.saved = None
        return self.latest

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.latest.at, "order": list(self.latest.order), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state


class _Pass:
    def __init__(self, data: Restarts, saved: Any) -> None:
        if saved is not None:
            data.generator.set_state(saved["generator"])
        ended = saved is None or saved["at"] == BATCHES
        self.order = torch.randperm(BATCHES, generator=data.generator).tolist() if ended else saved["order"]
        self.at = 0 if ended else saved["at"]

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == BATCHES:
            raise StopIteration
        self.at += 1
        return torch.tensor([[self.order[self.at - 1]] * 3])


def opened(data: Any, loading: Loading | None, rank: int, world_size: int, **settings: Any) -> Source:
    return open_source(
        data, argument="train", loading=loading or Loading(), training=True, rank=rank, world_size=world_size, seed=5,
        **settings,
    )  # fmt: skip


def read(source: Source, epoch: int, start: int) -> Iterator[tuple[list[Any], int, Any]]:
    """Per window: the rows, the position after it, the state there."""
    for window in source.windows(epoch, start):
        rows = [batch.tolist() for batch, count in window.micro_batches if count]
        yield rows, (0 if window.last else window.end), copy.deepcopy(source.state)


@pytest.mark.parametrize(
    ("data", "loading", "settings"),
    [
        (Remembers, None, {}),
        (Remembers, None, {"limit": 2}),
        (Stream, Loading(2), {}),
        (Stream, Loading(2, drop_last=True), {}),
        (Stream, Loading(2, num_workers=1), {}),
        (Restarts, None, {}),
        (Restarts, None, {"accumulation": 2}),
        *(
            (partial(Rolls, late), Loading(rows, drop_last=drop), {})
            for late in (False, True)
            for rows in (2, 3)
            for drop in (False, True)
        ),
    ],
    ids=[
        "iterable",
        "limited",
        "stream",
        "stream, drop last",
        "stream in a worker",
        "own iterators",
        "own iterators, accumulation",
    ]
    + [
        f"rolls {when}, {rows} rows{drop}"
        for when in ("at its end", "when read")
        for rows in (2, 3)
        for drop in ("", ", drop last")
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_from_every_position_goes_on_without_reading_again(
    data: Any, loading: Loading | None, settings: dict[str, Any], world_size: int
) -> None:
    for rank in range(world_size):
        source = opened(data(), loading, rank, world_size, **settings)
        assert source.resumes == "by its own state"
        assert not any("the epoch is read again" in note for note in source.notes)
        whole = [[*read(source, epoch, 0)] for epoch in range(3)]
        for epoch, windows in enumerate(whole[:2]):
            for number, (_, end, state) in enumerate(windows):
                fresh = data()
                again = opened(fresh, loading, rank, world_size, **settings)
                again.state = state
                then = epoch + (end == 0)
                following = whole[then] if end == 0 else windows[number + 1 :]
                assert [rows for rows, *_ in read(again, then, end)] == [rows for rows, *_ in following]
                if isinstance(fresh, Remembers) and not settings:
                    assert fresh.reads == (BATCHES + state["left"] if end == 0 else BATCHES - state["taken"])


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.drop = torch.nn.Dropout(0.3)

    def training_step(self, batch: Any) -> torch.Tensor:
        x = batch["row"][:, None].float().expand(-1, 3) if isinstance(batch, dict) else batch
        return self.layer(self.drop(x / 1000)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, loss: torch.Tensor) -> None:
        self.values.append(float(loss))


def fit(run_dir: Path, steps: int, data: Any, **options: Any) -> tuple[list[float], list[float]]:
    torch.manual_seed(1)
    module, losses = Net(), Losses()
    trainer = Trainer(
        max_steps=steps, run_dir=run_dir, seed=2, gradient_accumulation_steps=2, progress=False, plugins=[losses],
        save_every=None, **options,
    )  # fmt: skip
    trainer.fit(module, data, **({} if isinstance(data, Remembers | DataLoader) else {"batch_size": 2}))
    return losses.values, module.layer.weight.flatten().tolist()


@pytest.mark.parametrize("save", ["sync", "async"])
@pytest.mark.parametrize("stop", [2, 5, 7])  # five updates an epoch: inside the first, at its end, inside the second
def test_a_run_over_such_data_ends_as_one_that_never_stopped(tmp_path: Path, stop: int, save: str) -> None:
    wanted = fit(tmp_path / "straight", 12, Remembers())
    first, _ = fit(tmp_path / "parts", stop, Remembers(), save=save)
    then, weights = fit(tmp_path / "parts", 12, Remembers(), save=save)
    assert (first + then, weights) == wanted


def test_a_state_that_is_not_as_it_was_written_is_an_error() -> None:
    source = opened(Remembers(), None, 0, 1, limit=2)
    source.state = {"data": Remembers().state_dict(), "taken": 8, "random": (), "generators": []}
    with pytest.raises(ConfigurationError, match="cannot resume at row 4"):
        next(iter(source.windows(0, 4)))


def test_a_stream_that_depends_on_what_training_changes_is_refused_on_resume_with_the_remedy(tmp_path: Path) -> None:
    class Plays(IterableDataset[Any]):
        rows = 20

        def __iter__(self) -> Iterator[Any]:
            return iter(torch.arange(self.rows * 3.0).view(-1, 3))

    played = Plays()
    fit(tmp_path, 3, played)
    played.rows = 4
    with pytest.raises(ConfigurationError, match="give it state_dict") as caught:
        fit(tmp_path, 5, played)
    assert any(note.startswith("after this change, the same command continues from") for note in caught.value.__notes__)


def test_a_stream_of_datasets_is_read_again_since_its_state_forgets_a_shuffle_buffer() -> None:
    stream = datasets.Dataset.from_dict({"row": list(range(8))}).to_iterable_dataset(2)
    interleaved = datasets.interleave_datasets([stream, stream.shuffle(seed=1, buffer_size=3)])
    for data in (stream, interleaved):
        source = opened(data, Loading(2), 0, 1)
        assert source.resumes == "by replay"
        assert any("the epoch is read again" in note for note in source.notes)
        whole = [batch["row"].tolist() for window in source.windows(0) for batch, _ in window.micro_batches]
        for count in range(1, len(whole)):
            again = opened(data, Loading(2), 0, 1)
            rest = [
                batch["row"].tolist() for window in again.windows(0, 2 * count) for batch, _ in window.micro_batches
            ]
            assert rest == whole[count:]


def test_other_rows_of_the_same_number_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, others = (datasets.Dataset.from_dict({"row": list(range(first, first + 16))}) for first in (0, 1))
    fit(tmp_path, 2, rows)
    fit(tmp_path, 3, rows)
    assert "fingerprint" not in capsys.readouterr().err
    fit(tmp_path, 4, others)
    assert "was saved with train data of fingerprint" in capsys.readouterr().err
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("data_changed") == 1
    fit(tmp_path, 5, rows, accept_changes=("train",))
    assert "fingerprint" not in capsys.readouterr().err


TABLE = torch.arange(48.0).view(16, 3)
OTHER = TABLE + 1


class Columns(Dataset[torch.Tensor]):
    """A data set of the user's, over a tensor."""

    def __init__(self, column: torch.Tensor) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.column[index]


@pytest.mark.parametrize("kind", [list, Columns, lambda rows: StackDataset(row=Columns(rows[:, 0]))])
def test_other_tensors_of_the_same_length_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any
) -> None:
    fit(tmp_path, 2, kind(TABLE))
    fit(tmp_path, 3, kind(TABLE))
    assert "fingerprint" not in capsys.readouterr().err
    fit(tmp_path, 4, kind(OTHER))
    assert "was saved with train data of fingerprint" in capsys.readouterr().err


class Held(Dataset[torch.Tensor]):
    """A data set that holds its rows, or the data set with its rows, in any attribute."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return TABLE[index]


@dataclass
class Sized:
    row: torch.Tensor


class Closed(Mapping[str, Any]):
    """A file that a data set has not opened: nothing of it can be read."""

    def __getattr__(self, name: str) -> Any:
        raise OSError("closed")

    def __getitem__(self, name: str) -> Any:
        raise OSError("closed")

    def __len__(self) -> int:
        raise OSError("closed")

    def __iter__(self) -> Iterator[str]:
        raise OSError("closed")


class Validated(Net):
    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}


class Opens(Held):
    """A data set that opens its files when the first row is read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        self.rows = self.rows or [0, 1, 2]
        return super().__getitem__(index)


class Inside(Held):
    """A data set that transforms the rows of another."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return -self.rows[index]


HELD: dict[str, Any] = {
    "a list of tensors": lambda rows: [rows[:4], rows[4:]],
    "a tuple of arrays": lambda rows: (rows.numpy(),),
    "names and columns": lambda rows: {"one": rows[:, 0].tolist(), "two": rows[:, 1]},
    "a list of paths": lambda rows: [Path("/data", f"{float(row[0])}.png") for row in rows],
    "rows of a class": lambda rows: [Sized(each) for each in rows],
    "columns and a number": lambda rows: {"rows": rows, "version": 1},
    "numbers of words": lambda rows: {word: number for number, word in enumerate(map(str, rows[:, 0].tolist()))},
    "rows by number": lambda rows: {number: row for number, row in enumerate(rows.tolist())},
    "what a tokenizer returns": lambda rows: BatchEncoding({"input_ids": rows.tolist()}),
    "a table": lambda rows: pandas.DataFrame(rows.numpy()),
    "another data set": Columns,
    "a data set of another library": lambda rows: datasets.Dataset.from_dict({"row": rows.tolist()}),
}


@pytest.mark.parametrize("kind", HELD)
def test_other_rows_in_any_attribute_of_a_data_set_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    fit(tmp_path, 2, Held(HELD[kind](TABLE)))
    fit(tmp_path, 3, Held(HELD[kind](TABLE)))
    assert "fingerprint" not in capsys.readouterr().err
    fit(tmp_path, 4, Held(HELD[kind](OTHER)))
    warning = capsys.readouterr().err
    assert "was saved with train data of fingerprint" in warning
    assert "(in its rows)" in warning


@dataclass
class Sample:
    path: str
    label: int = 0


MOVED: dict[str, Any] = {
    "array": np.array,
    "column": lambda paths: pandas.DataFrame({"path": paths, "label": 1}),
    "dataclass": lambda paths: [Sample(path) for path in paths],
}


def test_files_in_another_folder_and_a_cache_are_the_same_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, 2, Held([f"/scratch/1/{number}.png" for number in range(16)]))
    fit(tmp_path, 3, Held([f"/scratch/2/{number}.png" for number in range(16)]))
    for kind in MOVED:
        for number in (1, 2):
            paths = [f"/scratch/{number}/{row}.png" for row in range(16)]
            fit(tmp_path / kind, number + 1, Held(MOVED[kind](paths)))
    fit(tmp_path / "cached", 2, Held({}))
    fit(tmp_path / "cached", 3, Held({0: TABLE[0]}))
    for steps in (2, 3):
        rows = Opens(None)
        options: Any = {"run_dir": tmp_path / "opened", "progress": False, "save_every": 2, "validate_every": 1}
        Trainer(max_steps=steps, **options).fit(Validated(), rows, rows, batch_size=4)
    for _ in range(2):
        fit(tmp_path / "closed", 2, Held(Closed()))
        fit(tmp_path / "several", 2, Held([Closed(), Closed()]))
    noted = capsys.readouterr().err
    assert "fingerprint" not in noted
    assert "has other rows" not in noted


@pytest.mark.parametrize("through", ["data set", "loader", "sampler", "a data set inside"])
def test_other_rows_drawn_from_the_same_data_are_an_error(tmp_path: Path, through: str) -> None:
    """A second `random_split` without a seed, or the next fold in the run directory of the one before."""

    def rows(picked: list[int]) -> Any:
        if through == "sampler":
            return DataLoader(Columns(OTHER), 4, sampler=SubsetRandomSampler(picked))
        part = Subset(ConcatDataset([Columns(OTHER), Columns(TABLE)]), picked)
        if through == "a data set inside":
            return Inside(part)
        return DataLoader(part, 4) if through == "loader" else part

    fit(tmp_path, 2, rows([*range(12)]))
    fit(tmp_path, 2, rows([*range(12)]))  # complete; the same rows
    with pytest.raises(
        CheckpointError, match="was saved with other rows of the data set than train has now: the indices of"
    ):
        fit(tmp_path, 2, rows([*range(2, 14)]))
    fit(tmp_path, 3, rows([*range(2, 14)]), accept_changes=("train",))
