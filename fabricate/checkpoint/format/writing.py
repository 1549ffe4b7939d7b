"""Write one file of a checkpoint: streamed, with a digest for each block, and durable before its record is returned.

Owns the bytes of tensor files (safetensors) and JSON files. Each rank writes its own files; there is no collective here. Must not know
torch, or which files a checkpoint consists of.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from fabricate.checkpoint.format import canonical_json
from fabricate.checkpoint.format.files import LOCAL, Files, explained
from fabricate.checkpoint.format.manifest import FILE_NAME, ITEM_SIZES, Chunk, ChunkRecord, FileRecord, require, text
from fabricate.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["write_json", "write_plain_safetensors", "write_tensors"]

BLOCK_SIZE: Final = 2**20
_WRITE_BEHIND: Final = 2**26  # bytes per request for writeback, so that fsync waits for little
HEADER_LIMIT: Final = 100_000_000  # the limit of the safetensors library


def write_tensors(
    path: Path, chunks: Iterable[Chunk], files: Files = LOCAL, metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Stream `chunks` into the new safetensors file `path`, one at a time, and make its content durable.

    The entries are one-dimensional and called ``tensor|start``. Each rank calls this function for its own files; there is no collective.
    Chunks are written by falling item size, so that every chunk is aligned for readers that map the file.

    Raises:
        CheckpointError: `path` exists, the disk is full, a chunk is out of range or its data has another size.
    """
    entries = [(f"{chunk.tensor}|{chunk.start}", [chunk.count], chunk) for chunk in chunks]
    return _write_safetensors(path, entries, files, metadata)


def write_plain_safetensors(
    path: Path, chunks: Iterable[Chunk], files: Files = LOCAL, metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Stream whole tensors into the new safetensors file `path`, under their own names and shapes, to export weights.

    Like `write_tensors`, but every chunk must be a whole tensor. `metadata` defaults to ``{"format": "pt"}``, which other libraries
    require.
    """
    entries = []
    for chunk in chunks:
        whole, actual = (0, math.prod(chunk.shape)), (chunk.start, chunk.count)
        require(actual == whole, f"(start, count) of {chunk.tensor!r}", actual, f"{whole}: exports hold whole tensors")
        entries.append((chunk.tensor, list(chunk.shape), chunk))
    return _write_safetensors(path, entries, files, {"format": "pt"} if metadata is None else metadata)


def write_json(path: Path, tree: object, files: Files = LOCAL) -> FileRecord:
    """Write a JSON tree (from `codec.encode`) in canonical form to the new file `path`, and make it durable.

    Raises:
        CheckpointError: `path` exists, the disk is full, or `tree` is not JSON.
    """
    return _write(path, [canonical_json.dumps(tree)], files)


def _write_safetensors(
    path: Path, entries: list[tuple[str, list[int], Chunk]], files: Files, metadata: Mapping[str, str] | None
) -> FileRecord:
    for _, _, chunk in entries:  # a ChunkRecord checks the values of the chunk, before anything is written
        ChunkRecord(chunk.tensor, chunk.start, chunk.count, chunk.dtype, tuple(chunk.shape), offset=8)
    entries = sorted(entries, key=lambda entry: -ITEM_SIZES[entry[2].dtype])
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key, shape, chunk in entries:
        require(key not in header, "the chunk", key, "written once per file")
        start, end = end, end + chunk.count * ITEM_SIZES[chunk.dtype]
        header[key] = {"dtype": chunk.dtype, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode("ascii")
    head += b" " * (-len(head) % 8)
    if len(head) > HEADER_LIMIT:
        raise CheckpointError(
            f"{path}: {len(entries)} entries in one file are too many: spread them over several files"
        )

    records, offset = [], 8 + len(head)
    for _, _, chunk in entries:
        record = ChunkRecord(chunk.tensor, chunk.start, chunk.count, chunk.dtype, tuple(chunk.shape), offset)
        records.append(record)
        offset = record.end

    def parts() -> Iterator[Buffer]:
        yield struct.pack("<Q", len(head)) + head
        for _, _, chunk in entries:
            if chunk.count:
                yield _bytes_of(chunk)

    return replace(_write(path, parts(), files), chunks=tuple(records))


def _bytes_of(chunk: Chunk) -> memoryview:
    data = chunk.data()
    try:
        view = memoryview(data).cast("B")
    except (TypeError, ValueError) as exc:
        message = f"the data of {chunk.tensor!r} is not a contiguous buffer of bytes ({exc}): view it as uint8"
        raise CheckpointError(message) from exc
    wanted = chunk.count * ITEM_SIZES[chunk.dtype]
    require(len(view) == wanted, f"the number of bytes in the data of {chunk.tensor!r}", len(view), wanted)
    return view


def _write(path: Path, parts: Iterable[Buffer], files: Files) -> FileRecord:
    """Write the concatenation of `parts`, one block per write, and fsync. After a failure the incomplete file stays."""
    text(path.name, "a file name", FILE_NAME)
    digests, size, ahead = [], 0, 0
    with explained("write", path), files.create(path) as writer:
        for block in _blocks(parts):
            writer.write(block)
            digests.append(xxhash.xxh3_128_hexdigest(block))  # while the block is in the processor's cache
            size += len(block)
            if size - ahead >= _WRITE_BEHIND:
                writer.start_writeback(ahead, size - ahead)
                ahead = size
        writer.fsync()
    return FileRecord(path.name, size, BLOCK_SIZE, tuple(digests))


def _blocks(parts: Iterable[Buffer]) -> Iterator[memoryview | bytearray]:
    """Cut the concatenation of `parts` into blocks. A block that lies inside one part is not copied."""
    pending = bytearray()
    for part in parts:
        rest = memoryview(part)
        while rest:
            if not pending and len(rest) >= BLOCK_SIZE:
                block, rest = rest[:BLOCK_SIZE], rest[BLOCK_SIZE:]
                yield block
                continue
            room = BLOCK_SIZE - len(pending)
            pending += rest[:room]
            rest = rest[room:]
            if len(pending) == BLOCK_SIZE:
                yield pending
                pending = bytearray()
    if pending:
        yield pending
