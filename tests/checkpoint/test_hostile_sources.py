"""Files of other tools made by an attacker: an import refuses each by name, and no code in it runs."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fabricate
from fabricate import CheckpointError, ConfigurationError
from fabricate.cli.main import main


class Payload:
    """Runs a command when it is unpickled, the way every attack on torch's files does."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def mark(tmp_path: Path) -> Any:
    """The file that exists once a payload ran: never."""
    yield tmp_path / "mark"
    assert not (tmp_path / "mark").exists()


def weights() -> dict[str, torch.Tensor]:
    return {"layer.weight": torch.ones(3, 4), "layer.bias": torch.ones(3)}


def safetensors(
    path: Path,
    change: Callable[[dict[str, Any]], object] = lambda tree: None,
    data: bytes = bytes(60),
    length: int | None = None,
    text: str | None = None,
) -> None:
    """A file of two tensors, as `change` describes them, or with `text` for a header."""
    tree = {
        "layer.weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "layer.bias": {"dtype": "F32", "shape": [3], "data_offsets": [48, 60]},
    }
    change(tree)
    head = (json.dumps(tree) if text is None else text).encode()
    path.write_bytes(struct.pack("<Q", len(head) if length is None else length) + head + data)


Make = Callable[[Path, Path], object]
"""Writes a hostile file: gets its path, and the file that a payload would leave behind."""


def entry(**values: Any) -> Make:
    return lambda path, mark: safetensors(path, lambda tree: tree["layer.bias"].update(values))


def file(**options: Any) -> Make:
    return lambda path, mark: safetensors(path, **options)


def saved(make: Callable[[Path], object]) -> Make:
    return lambda path, mark: torch.save(make(mark), path)


def pickled(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(mark)))


def lightning(mark: Path) -> Any:
    return {"state_dict": weights(), "pytorch-lightning_version": "2.6.0", "callbacks": Payload(mark)}


def expanded(path: Path, mark: Path) -> None:
    """Four bytes that claim to be a tensor of a billion gigabytes."""
    torch.save({"layer.bias": torch.ones(1).expand(2**60)}, path)


def squeezed(path: Path, mark: Path) -> None:
    """A file of torch.save whose records are compressed, as a few bytes that unpack to gigabytes would be."""
    torch.save(weights(), path)
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def cut(path: Path, mark: Path) -> None:
    torch.save(weights(), path)
    path.write_bytes(path.read_bytes()[:-300])


TWICE = '{"w":{"dtype":"U8","shape":[60],"data_offsets":[0,60]},"w":{"dtype":"U8","shape":[60],"data_offsets":[0,60]}}'
SOURCES: dict[str, tuple[str, Make, str]] = {
    "a pickle": ("w.bin", pickled, "could run code"),
    "a pickle in a file of torch.save": ("w.pt", saved(lambda mark: {"w": Payload(mark)}), "could run code"),
    "a pickle called safetensors": ("w.safetensors", pickled, "by its first bytes the header has"),
    "a Lightning file with a payload": ("w.ckpt", saved(lightning), "could run code"),
    "a module instead of its state": ("w.pt", saved(lambda mark: torch.nn.Linear(1, 1)), "could run code"),
    "a file that was cut": ("w.pt", cut, "cannot be read as tensors"),
    "compressed records": ("w.pt", squeezed, "is compressed, which torch.save never does"),
    "more than is stored": ("w.pt", expanded, "claims the shape (1152921504606846976,), but only 4 bytes are stored"),
    "a header of 2^60 bytes": (
        "w.safetensors",
        file(length=2**60),
        "by its first bytes the header has 1152921504606846976 bytes",
    ),
    "a header longer than the file": (
        "w.safetensors",
        file(length=1000),
        "by its first bytes the header has 1000 bytes",
    ),
    "a header that is no JSON": ("w.safetensors", file(text="{" * 200), "header: not valid JSON"),
    "a name twice": ("w.safetensors", file(text=TWICE), "the JSON key 'w' occurs twice"),
    "a type that does not exist": ("w.safetensors", entry(dtype="PICKLE"), "dtype is 'PICKLE'"),
    "a type of another width": (
        "w.safetensors",
        entry(dtype="F64"),
        "'layer.bias' has dtype F64 and shape [3], but 12 bytes",
    ),
    "a huge shape": ("w.safetensors", entry(shape=[2**61, 2**61]), "the number of elements"),
    "a huge tensor": ("w.safetensors", entry(shape=[2**60], data_offsets=[48, 48 + 2**62]), "the tensors end at byte"),
    "a negative shape": ("w.safetensors", entry(shape=[-3]), "a dimension of shape"),
    "tensors that overlap": (
        "w.safetensors",
        entry(data_offsets=[44, 56]),
        "begins at byte 44 of the data and not at 48",
    ),
    "a hole": ("w.safetensors", entry(data_offsets=[52, 64]), "begins at byte 52 of the data and not at 48"),
    "bytes after the end": ("w.safetensors", file(data=bytes(61)), "the tensors end at byte"),
    "an entry of another kind": (
        "w.safetensors",
        file(change=lambda tree: tree.update(x=[1])),
        "the header entry of 'x' does not consist of",
    ),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_hostile_source_is_refused_by_name(case: str, tmp_path: Path, mark: Path) -> None:
    name, make, complaint = SOURCES[case]
    make(tmp_path / name, mark)
    with pytest.raises(CheckpointError) as raised:
        fabricate.import_checkpoint(tmp_path / name, tmp_path / "out")
    assert complaint in str(raised.value)
    assert str(tmp_path / name) in str(raised.value)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        (
            {"weight_map": {"w": "../../etc/passwd.safetensors"}},
            "but only .safetensors and .bin files in the same folder are read",
        ),
        (
            {"weight_map": {"w": "/etc/passwd.safetensors"}},
            "but only .safetensors and .bin files in the same folder are read",
        ),
        ({"weight_map": {"w": "part.pkl"}}, "but only .safetensors and .bin files in the same folder are read"),
        ({"weight_map": {"w": ["part.safetensors"]}}, "weight_map is not a mapping from tensor names to file names"),
        ({"weight_map": ["part.safetensors"]}, "weight_map is not a mapping from tensor names to file names"),
        ({"weight_map": {"w": "link.safetensors"}}, "not a regular file"),
        ({"weight_map": {"w": "pipe.safetensors"}}, "not a regular file"),
        ({"weight_map": {"w": "gone.safetensors"}}, "No such file"),
        ({"weight_map": {"other": "part.safetensors"}}, "'layer.bias' is listed in one of them only"),
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(index: Any, complaint: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    safetensors(source / "part.safetensors")
    (source / "link.safetensors").symlink_to("part.safetensors")
    os.mkfifo(source / "pipe.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=complaint):
        fabricate.import_checkpoint(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_an_import_cannot_be_told_to_read_a_pickle(tmp_path: Path, mark: Path) -> None:
    torch.save({"weights": Payload(mark)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="could run code"):
        fabricate.import_checkpoint(tmp_path / "w.pt", tmp_path / "out", key="weights")
    shown = CliRunner().invoke(main, ["ckpt", "import", "--help"])
    assert "trust" not in shown.output.lower()
    with pytest.raises(ConfigurationError, match="does not exist"):
        fabricate.import_checkpoint(tmp_path / "nothing", tmp_path / "out")
