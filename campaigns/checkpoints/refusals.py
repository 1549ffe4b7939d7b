"""Cases that the format refuses to write, commit or open. Raises AssertionError for a case that is not refused."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from campaigns.checkpoints.disk import Hasty
from campaigns.checkpoints.example import BLOCK, content, save
from fabricate.checkpoint.format import directory, writing
from fabricate.checkpoint.format.directory import Chunk, FileRecord, Manifest, Reader
from fabricate.errors import CheckpointError

_HASTY = Hasty()


def _chunk(count: int = 4, start: int = 0, **changes: object) -> Chunk:
    data = np.arange(count, dtype=np.float32)
    return dataclasses.replace(Chunk("w", start, count, "F32", (4,), lambda: data), **changes)  # type: ignore[arg-type]


def _manifest(files: list[FileRecord], **changes: object) -> Manifest:
    fields: dict[str, object] = {
        "step": 1, "run_id": "r", "nonce": "a", "created": "2031-05-01T12:00:00Z", "files": tuple(files),
        "tensors": directory.tensors_of(files),
    }  # fmt: skip
    return Manifest(**(fields | changes))  # type: ignore[arg-type]


def _commit(
    root: Path, spoil: Callable[[Path], object] = lambda staging: None, name: str | None = None, **changes: object
) -> Path:
    staging = directory.stage(root, 1, "a", _HASTY)
    record = directory.write_tensors(staging / "data.safetensors", [_chunk()], _HASTY)
    spoil(staging)
    return directory.commit(staging, _manifest([record], **changes), _HASTY, name)


def _renamed(root: Path) -> None:
    path = save(root, 2, _HASTY)
    path.rename(root / "step-00000003")
    content(root / "step-00000003")


def _link(root: Path, name: str) -> None:
    path = save(root, 2, _HASTY)
    (path / name).rename(root / "elsewhere")
    (path / name).symlink_to(root / "elsewhere")
    content(path)


def _pipe(root: Path, name: str) -> None:
    path = save(root, 2, _HASTY)
    (path / name).unlink()
    os.mkfifo(path / name)
    content(path)


def _too_long(root: Path) -> None:
    path = save(root, 2, _HASTY)
    os.truncate(path / "manifest.json", 2**40)  # a hole, which takes no space on the disk
    content(path)


def _read(root: Path, read: Callable[[Reader], object]) -> None:
    with Reader(save(root, 2, _HASTY)) as reader:
        read(reader)


def _write(root: Path, *chunks: Chunk, name: str = "data.safetensors", plain: bool = False) -> None:
    root.mkdir()
    (directory.write_plain_safetensors if plain else directory.write_tensors)(root / name, chunks, _HASTY)


class _NoRename(Hasty):
    """A file system whose renames fail."""

    def rename(self, source: Path, target: Path) -> None:
        raise OSError(5, "Input/output error")


def _not_renamed(root: Path) -> None:
    save(root, 2, _NoRename())


def _header(root: Path) -> None:
    """Write a file with a right digest and a wrong length of the header."""
    staging = directory.stage(root, 1, "a", _HASTY)
    file = staging / "data.safetensors"
    record = directory.write_tensors(file, [_chunk()], _HASTY)
    data = file.read_bytes()
    file.unlink()
    forged = writing._write(file, [(int.from_bytes(data[:8], "little") + 8).to_bytes(8, "little"), data[8:]], _HASTY)
    path = directory.commit(staging, _manifest([dataclasses.replace(forged, chunks=record.chunks)]), _HASTY)
    with Reader(path) as reader:
        reader.verify()


def _disagree(root: Path) -> None:
    root.mkdir()
    first = directory.write_tensors(root / "a.safetensors", [_chunk(2)], _HASTY)
    second = directory.write_tensors(root / "b.safetensors", [_chunk(2, 2, dtype="I32", data=lambda: bytes(8))], _HASTY)
    directory.tensors_of([first, second])


CASES: dict[str, Callable[[Path], object]] = {
    "a file that is missing": lambda root: _commit(root, lambda staging: (staging / "data.safetensors").unlink()),
    "a file that is not listed": lambda root: _commit(root, lambda staging: (staging / "x.json").touch()),
    "a file that is short": lambda root: _commit(root, lambda staging: os.truncate(staging / "data.safetensors", 9)),
    "a checkpoint that exists": lambda root: (_commit(root), _commit(root)),
    "another's staging directory": lambda root: _commit(root, nonce="b"),
    "a name that leads elsewhere": lambda root: _commit(root, name="../x"),
    "a step below zero": lambda root: _commit(root, step=-1),
    "a run without a name": lambda root: _commit(root, run_id=""),
    "a nonce that leads elsewhere": lambda root: directory.stage(root, 1, "../x"),
    "a time that is none": lambda root: _commit(root, created="2031-13-01T12:00:00Z"),
    "a time of another form": lambda root: _commit(root, created="today"),
    "a metric that is no number": lambda root: _commit(root, metrics={"loss": "low"}),
    "an alias of nothing": lambda root: _commit(root, aliases={"v": "x"}),
    "an alias that is a tensor": lambda root: _commit(root, aliases={"w": "w"}),
    "an alias without a name": lambda root: _commit(root, aliases={"": "w"}),
    "a tensor that nobody wrote": lambda root: _commit(
        root, tensors={"w": directory.TensorRecord("F32", (4,)), "v": directory.TensorRecord("F32", (1,))}
    ),
    "a tensor that is not listed": lambda root: _commit(root, tensors={}),
    "a tensor of another type": lambda root: _commit(root, tensors={"w": directory.TensorRecord("I32", (4,))}),
    "a tensor of too many dimensions": lambda root: directory.TensorRecord("F32", (1,) * 65),
    "a tensor of too many elements": lambda root: directory.TensorRecord("F32", (2**40, 2**40)),
    "a tensor of an unknown type": lambda root: directory.TensorRecord("F4", (1,)),
    "a tensor of a negative size": lambda root: directory.TensorRecord("F32", (-1, -1)),
    "a rename that failed": _not_renamed,
    "a header of another length": _header,
    "a directory without a checkpoint": lambda root: (root.mkdir(), directory.find(root)),
    "a chunk inside the header": lambda root: directory.ChunkRecord("w", 0, 1, "F32", (1,), 7),
    "a tensor in a JSON file": lambda root: FileRecord(
        "x.json", 12, BLOCK, ("0" * 32,), (directory.ChunkRecord("w", 0, 1, "F32", (1,), 8),)
    ),
    "a tensor whose name does not print": lambda root: _commit(
        root, tensors={"w": directory.TensorRecord("F32", (4,)), "v\0": directory.TensorRecord("F32", (0,))}
    ),
    "a digest that is none": lambda root: FileRecord("x.json", 4, BLOCK, ("0" * 31 + "g",)),
    "two files that some file systems take for one": lambda root: _manifest(
        [FileRecord("x.json", 0, BLOCK, ()), FileRecord("X.json", 0, BLOCK, ())]
    ),
    "ranks that disagree": _disagree,
    "a discarded directory that is none of ours": lambda root: (root.mkdir(), directory.discard(root)),
    "a chunk twice": lambda root: _write(root, _chunk(), _chunk()),
    "a chunk beyond its tensor": lambda root: _write(root, _chunk(4, 1)),
    "a chunk before its tensor": lambda root: _write(root, _chunk(4, -1)),
    "a chunk of other bytes": lambda root: _write(root, _chunk(data=lambda: bytes(3))),
    "a chunk without a name": lambda root: _write(root, _chunk(tensor="")),
    "a part of a tensor as an export": lambda root: _write(root, _chunk(2), plain=True),
    "a file of another kind": lambda root: _write(root, _chunk(), name="data.pkl"),
    "a file called as the manifest": lambda root: (root.mkdir(), directory.write_json(root / "manifest.json", {})),
    "a checkpoint under another step": _renamed,
    "a link to the manifest": lambda root: _link(root, "manifest.json"),
    "a link to a file": lambda root: _link(root, "state.json"),
    "a pipe as a file": lambda root: _pipe(root, "state.json"),
    "a pipe as the manifest": lambda root: _pipe(root, "manifest.json"),
    "a manifest of a terabyte": _too_long,
    "a tensor that is not there": lambda root: _read(root, lambda reader: reader.read("model/other")),
    "a file that is not there": lambda root: _read(root, lambda reader: reader.json("other.json")),
    "a tensor file as JSON": lambda root: _read(root, lambda reader: reader.json("data-00000.safetensors")),
    "elements beyond the end": lambda root: _read(root, lambda reader: reader.read("model/bias", 60, 2)),
    "more elements than there is memory": lambda root: _read(root, lambda reader: reader.read("model/bias", 0, 2**60)),
    "a buffer beyond the end": lambda root: _read(
        root, lambda reader: reader.read_into("model/bias", memoryview(bytearray(4)), 60)
    ),
    "elements before the beginning": lambda root: _read(root, lambda reader: reader.read("model/bias", -1, 2)),
    "a buffer that no elements fill": lambda root: _read(
        root, lambda reader: reader.read_into("model/weight", memoryview(bytearray(7)))
    ),
}  # fmt: skip


def run() -> int:
    """Run every case; return their number."""
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                case(Path(folder, "root"))
            except CheckpointError:
                continue
            finally:
                shutil.rmtree(Path(folder, "root"), ignore_errors=True)
            raise AssertionError(f"{name} was let through")
    return len(CASES)
