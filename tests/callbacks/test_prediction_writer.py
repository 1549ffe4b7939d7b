"""Predictions that are written to disk are those that `predict` returns, in the order of the data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

from fabricate import ConfigurationError, PredictionWriter, Trainer, TrainModule
from fabricate.callbacks import prediction_writer
from fabricate.testing import run_ranks

ROWS = 23


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 2)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.net(batch).sum()

    def predict_step(self, batch: Any) -> Any:
        scores = self.net(batch).to(torch.bfloat16)
        return {"scores": scores, "pair": (batch[:, 0], [f"{value:.3f}" for value in batch[:, 0].tolist()])}


class Wrong(Net):
    def predict_step(self, batch: Any) -> Any:
        return self.net(batch)[:1]


class Objects(Net):
    def predict_step(self, batch: Any) -> Any:
        return [object() for _ in batch]


class Pairs(Net):
    """Lists, which JSON makes of them, would not be equal."""

    def predict_step(self, batch: Any) -> Any:
        return [(1, 2) for _ in batch]


class Numbered(Net):
    def predict_step(self, batch: Any) -> Any:
        return {0: batch[:, 0], 1: [{"nan": math.nan, "text": ["a"]} for _ in batch]}


def rows() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, 3)


def compare(
    folder: Path, strategy: str = "auto", shuffle: bool = False, part_bytes: int = 300
) -> tuple[Any, int, bool]:
    """What `predict` returns with the writer, how many files there are, and whether what it wrote is what `predict` returns without."""
    before, prediction_writer.PART_BYTES = prediction_writer.PART_BYTES, part_bytes
    try:
        arguments: dict[str, Any] = {"progress": False, "strategy": strategy}
        loader = torch.utils.data.DataLoader(rows(), batch_size=4, shuffle=shuffle)
        module = Net()
        returned = Trainer(**arguments, plugins=[PredictionWriter(folder)]).predict(module, loader)
        expected = Trainer(**arguments).predict(module, loader)
    finally:
        prediction_writer.PART_BYTES = before
    predictions = list(PredictionWriter.read(folder)) if expected is not None else []
    same = expected is None or (len(predictions) == ROWS and all(map(equal, predictions, expected)))
    return returned, len(list(folder.glob("rank-*/*.safetensors"))), same


def equal(one: Any, other: Any) -> bool:
    return (
        one.keys() == other.keys()
        and one["scores"].dtype == other["scores"].dtype
        and torch.equal(one["scores"], other["scores"])
        and torch.equal(one["pair"][0], other["pair"][0])
        and one["pair"][1] == other["pair"][1]
    )


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_predictions_are_written_in_parts_and_read_in_the_order_of_the_data(tmp_path: Path, shuffle: bool) -> None:
    returned, parts, same = compare(tmp_path / "predictions", shuffle=shuffle)
    assert returned == []
    assert same
    assert parts > 1


@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_reading_opens_each_file_once_for_its_rows_and_once_for_its_batches(
    tmp_path: Path, shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    really = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda path, **how: opened.append(path) or really(path, **how))
    _, parts, same = compare(tmp_path / "predictions", shuffle=shuffle)
    assert same
    assert parts > 1
    assert len(opened) == 2 * parts


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_each_rank_writes_its_rows_once(tmp_path: Path, strategy: str) -> None:
    (first, parts, same), (second, *_) = run_ranks(compare, 2, tmp_path / "predictions", strategy)
    assert (first, second) == ([], None)
    assert same
    assert parts > 2


def test_a_folder_that_holds_something_is_refused_and_so_are_predictions_that_are_not_complete(tmp_path: Path) -> None:
    (tmp_path / "rank-00000").mkdir()
    with pytest.raises(ConfigurationError, match="is not empty"):
        Trainer(progress=False, plugins=[PredictionWriter(tmp_path)]).predict(Net(), rows(), batch_size=4)
    with pytest.raises(ConfigurationError, match="incomplete predictions"):
        next(PredictionWriter.read(tmp_path))
    with pytest.raises(
        ConfigurationError, match=r"given a mapping of several \(this is 'a'\). Call predict once for each data set"
    ):
        Trainer(progress=False, plugins=[PredictionWriter(tmp_path / "p")]).predict(Net(), {"a": rows()}, batch_size=4)


@pytest.mark.parametrize(
    ("module", "words"), [(Wrong, r"shape \(1, 2\) for a batch of 4 rows"), (Objects, "JSON"), (Pairs, "come back as")]
)
def test_predictions_that_cannot_be_written_are_refused(tmp_path: Path, module: type[Net], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Trainer(progress=False, plugins=[PredictionWriter(tmp_path / "p")]).predict(module(), rows(), batch_size=4)


class Arrays(Net):
    def predict_step(self, batch: Any) -> Any:
        first = batch[:, 0]
        boxes = [{"boxes": torch.ones(number % 3, 4), "text": "a"} for number in range(len(batch))]
        alone = ([*first], [np.float32(value) for value in first.numpy()], boxes, [np.str_("b")] * len(batch))
        return {"flat": first.numpy(), "array": batch.double().numpy(), "alone": alone}


class Words(Net):
    def predict_step(self, batch: Any) -> Any:
        return np.array(["a"] * len(batch))


def test_arrays_and_tensors_of_single_rows_come_back_as_predict_returns_them(tmp_path: Path) -> None:
    Trainer(progress=False, plugins=[PredictionWriter(tmp_path / "p")]).predict(Arrays(), rows(), batch_size=4)
    read: Any = list(PredictionWriter.read(tmp_path / "p"))
    expected = Trainer(progress=False).predict(Arrays(), rows(), batch_size=4)
    assert str(read) == str(expected).replace("np.str_('b')", "'b'")
    assert type(read[0]["flat"]) is np.float32
    assert read[0]["array"].dtype == np.float64
    assert type(read[0]["alone"][1]) is np.float32
    assert read[2]["alone"][2]["boxes"].shape == (2, 4)
    with pytest.raises(ConfigurationError, match="returned an array that cannot be stored"):
        Trainer(progress=False, plugins=[PredictionWriter(tmp_path / "w")]).predict(Words(), rows(), batch_size=4)


def test_keys_that_are_numbers_come_back_as_numbers(tmp_path: Path) -> None:
    Trainer(progress=False, plugins=[PredictionWriter(tmp_path)]).predict(Numbered(), rows()[:3], batch_size=2)
    first = next(PredictionWriter.read(tmp_path))
    assert list(first) == [0, 1]
    assert math.isnan(first[1].pop("nan"))
    assert first[1] == {"text": ["a"]}
