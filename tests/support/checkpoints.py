"""A checkpoint without torch, and its content: several blocks, several dtypes, odd sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabricate.checkpoint.format.directory import (
    Chunk,
    FileRecord,
    Manifest,
    Reader,
    commit,
    stage,
    tensors_of,
    write_json,
    write_tensors,
)
from fabricate.checkpoint.format.files import LOCAL, Files
from fabricate.errors import CheckpointError

CODES = {"float32": "F32", "float64": "F64", "int64": "I64", "uint8": "U8", "bool": "BOOL", "float16": "F16"}


def example(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Tensors of several blocks, several dtypes and odd sizes, a scalar and an empty tensor."""
    rng = np.random.default_rng(seed)
    return {
        "model/a.weight": rng.standard_normal((601, 701)).astype(np.float32),
        "model/a.bias": rng.standard_normal(601).astype(np.float16),
        "model/empty": np.zeros((0, 5), dtype=np.float32),
        "optimizer/main/a.weight/exp_avg": rng.standard_normal((601, 701)).astype(np.float32),
        "optimizer/main/a.weight/step": np.array(7.0, dtype=np.float32),
        "rank/00000/rng": rng.integers(0, 255, 5056).astype(np.uint8),
        "model/steps": rng.integers(0, 2**60, 3),
    }


def chunk(name: str, tensor: np.ndarray[Any, Any], start: int = 0, end: int | None = None) -> Chunk:
    part = tensor.reshape(-1)[start:end]
    return Chunk(name, start, part.size, CODES[str(tensor.dtype)], tensor.shape, lambda: part)


def slices(tensors: dict[str, np.ndarray[Any, Any]], rank: int, world_size: int) -> list[Chunk]:
    """The chunks that one of several ranks with replicated tensors writes."""
    chunks = []
    for name, tensor in tensors.items():
        start, end = (tensor.size * r // world_size for r in (rank, rank + 1))
        if end > start or (rank == 0 and not tensor.size):
            chunks.append(chunk(name, tensor, start, end))
    return chunks


def manifest(files: list[FileRecord], step: int = 500, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "step": step,
        "run_id": "run",
        "nonce": "9f3a",
        "created": "2031-05-01T12:00:00Z",
        "topology": {"world_size": 2, "strategy": "ddp"},
        "versions": {"fabricate": "0.1.0"},
        "progress": {"epoch": 1},
        "metrics": {"loss": 0.5, "worst": float("inf")},
        "aliases": {"model/head": "model/a.weight"},
        "files": tuple(files),
    } | changes
    if "tensors" not in fields:
        fields["tensors"] = tensors_of(files)
    return Manifest(**fields)


def save(root: Path, step: int = 500, seed: int = 0, world_size: int = 2, files: Files = LOCAL) -> Path:
    staging = stage(root, step, "9f3a", files)
    tensors = example(seed)
    records = [
        write_tensors(staging / f"data-{rank:05d}.safetensors", slices(tensors, rank, world_size), files)
        for rank in range(world_size)
    ]
    records.append(write_json(staging / "state.json", {"scheduler": {"last_epoch": seed}}, files))
    copies = [FileRecord.from_json(json.loads(json.dumps(record.to_json()))) for record in records]
    return commit(staging, manifest(copies, step), files)


def content(path: Path) -> dict[str, bytes]:
    """The whole content of a checkpoint, verified."""
    with Reader(path) as reader:
        reader.verify()
        contents = {name: bytes(reader.read(name)) for name in reader.manifest.tensors}
        return contents | {"state.json": json.dumps(reader.json("state.json")).encode()}


def expected(seed: int = 0) -> dict[str, bytes]:
    contents = {name: tensor.tobytes() for name, tensor in example(seed).items()}
    return contents | {"state.json": json.dumps({"scheduler": {"last_epoch": seed}}).encode()}


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        content(path)
    message = str(raised.value)
    assert str(path) in message
    return message
