"""A small checkpoint without torch, for campaigns that write and read thousands of them: several files, blocks and dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fabricate.checkpoint.format import directory, writing
from fabricate.checkpoint.format.directory import Chunk, FileRecord, Manifest, Reader
from fabricate.checkpoint.format.files import LOCAL, Files

BLOCK = 4096
"""The smallest block size of the format, so that a file of some kilobytes has several blocks."""
RANKS = 2
_CODES = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8"}


def tensors(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """The content of the checkpoint of `step`."""
    rng = np.random.default_rng(step)
    return {
        "model/weight": rng.standard_normal((61, 71)).astype(np.float32),
        "model/bias": rng.standard_normal(61).astype(np.float16),
        "model/empty": np.zeros((0, 3), dtype=np.float32),
        "optimizer/main/weight/step": np.array(float(step), dtype=np.float32),
        "rank/00000/rng": rng.integers(0, 255, 1003).astype(np.uint8),
        "model/count": rng.integers(0, 2**60, 3),
    }


def save(root: Path, step: int, files: Files = LOCAL) -> Path:
    """Write the checkpoint of `step` as `RANKS` ranks do, one after the other, and commit it."""
    nonce = f"{step:04x}"
    staging = directory.stage(root, step, nonce, files)
    records: list[FileRecord] = []
    before, writing.BLOCK_SIZE = writing.BLOCK_SIZE, BLOCK  # type: ignore[misc]
    try:
        for rank in range(RANKS):
            chunks = []
            for name, tensor in tensors(step).items():
                start, end = (tensor.size * r // RANKS for r in (rank, rank + 1))
                if end > start or (rank == 0 and not tensor.size):
                    part = tensor.reshape(-1)[start:end]
                    code = _CODES[str(tensor.dtype)]
                    chunks.append(Chunk(name, start, part.size, code, tensor.shape, lambda part=part: part))  # type: ignore[misc]
            records.append(directory.write_tensors(staging / f"data-{rank:05d}.safetensors", chunks, files))
        records.append(directory.write_json(staging / "state.json", {"step": step, "lr": [0.1, {"$": "tuple"}]}, files))
    finally:
        writing.BLOCK_SIZE = before  # type: ignore[misc]
    manifest = Manifest(
        step=step,
        run_id="campaign",
        nonce=nonce,
        created="2031-05-01T12:00:00Z",
        tensors=directory.tensors_of(records),
        files=tuple(records),
        aliases={"model/tied": "model/weight"},
        metrics={"loss": 1.0 / (step + 1)},
    )
    return directory.commit(staging, manifest, files)


def content(path: Path, files: Files = LOCAL) -> dict[str, bytes]:
    """All tensors and values of a checkpoint, with every block verified. Raises `CheckpointError` for damage."""
    with Reader(path, files) as reader:
        reader.verify()
        contents = {name: bytes(reader.read(name)) for name in reader.manifest.tensors}
        return contents | {
            "state.json": repr(reader.json("state.json")).encode(),
            "step": str(reader.manifest.step).encode(),
        }


def expected(step: int) -> dict[str, bytes]:
    """The correct `content` of the checkpoint of `step`."""
    contents = {name: tensor.tobytes() for name, tensor in tensors(step).items()}
    return contents | {
        "state.json": repr({"lr": [0.1, {"$": "tuple"}], "step": step}).encode(),
        "step": str(step).encode(),
    }
