"""The checkpoint directory: how its files are written, proven complete, committed at once, verified and read in ranges.

Owns the on-disk format of `docs/checkpoint-format.md`: a flat directory of safetensors and JSON files and a manifest,
written last, that lists every file with its size and digests. There is one kind of chunk, the flat range
``[start, start + count)`` of the row-major flattened logical tensor: a slice of a replicated tensor, a shard along
dimension 0 and a partition of a flattened parameter are all written as they are, and read back in whatever ranges the
reader's own layout asks for.

It must not know torch, ranks or strategies: it sees names, numbers and bytes. Who writes which range, who talks to whom
and what a name means is the caller's to decide.

A save, with the ranks that take each step::

    staging = stage(root, step, nonce)                        every rank
    records = [write_tensors(staging / ..., chunks), ...]     every rank, its own files
    path = commit(staging, Manifest(..., files=records))      rank 0, once it has every rank's records

``root/step-00000500`` exists only from the rename inside `commit` on. A run that dies before leaves ``.tmp-...``, which
`clean` removes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
import reprlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

from fabricate import codec
from fabricate.codec import JsonValue
from fabricate.errors import CheckpointError, did_you_mean
from fabricate.files import LOCAL, Files, Source

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "ITEM_SIZES",
    "MANIFEST_NAME",
    "Chunk",
    "ChunkRecord",
    "FileRecord",
    "Manifest",
    "NewerFormatError",
    "Reader",
    "TensorRecord",
    "clean",
    "commit",
    "committed",
    "discard",
    "prune",
    "set_aside",
    "stage",
    "tensors_of",
    "write_json",
    "write_plain_safetensors",
    "write_tensors",
]

FORMAT: Final = "fabricate-checkpoint"
VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"
BLOCK_SIZE: Final = 2**20

ITEM_SIZES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of every dtype, by its safetensors code. Numbers are little-endian."""

_LARGEST: Final = 2**62
_BLOCK_SIZES: Final = (2**12, 2**24)
_CACHED_BLOCKS: Final = 8
_HEADER_LIMIT: Final = 100_000_000  # what the safetensors library accepts
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.(safetensors|json)")
_STEP_NAME: Final = re.compile(r"step-(\d{8,18})")
_TARGET_NAME: Final = re.compile(r"[A-Za-z0-9_][^/\0]{0,199}")
_NONCE: Final = re.compile(r"[A-Za-z0-9]{1,64}")
_XXH3: Final = re.compile(r"[0-9a-f]{32}")
_CREATED: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)")
_FALL_BACK: Final = "resume from an older checkpoint (resume='auto' does), or put an intact copy in its place"


class NewerFormatError(CheckpointError):
    """An intact checkpoint that only a newer fabricate reads. Not damage: it must not be set aside."""


@dataclass(frozen=True)
class TensorRecord:
    """One logical tensor: a key of `ITEM_SIZES` and its full shape, ``()`` for a scalar."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        _require(
            type(self.dtype) is str and self.dtype in ITEM_SIZES, "dtype", self.dtype, f"one of {', '.join(ITEM_SIZES)}"
        )
        _require(len(self.shape) <= 64, "the number of dimensions", len(self.shape), "at most 64")
        for size in self.shape:
            _integer(size, "a dimension of shape", 0, _LARGEST)
        _integer(self.num_elements, "the number of elements", 0, _LARGEST)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def to_json(self) -> JsonValue:
        return {"dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, tree: object) -> TensorRecord:
        fields = _object(tree, "a tensor", {"dtype", "shape"})
        return cls(fields["dtype"], tuple(_list(fields["shape"], "shape")))


@dataclass(frozen=True)
class Chunk:
    """A flat range of a logical tensor that this process is about to write.

    `data` is called once, while the file is being written, and returns the elements ``[start, start + count)`` of the
    row-major flattened tensor as ``count * itemsize`` contiguous little-endian bytes, so that one chunk at a time is in
    host memory. A chunk with ``count=0`` only says that a tensor without elements exists; its `data` is not called.

    >>> weight = bytes(24)
    >>> Chunk("model/weight", start=0, count=6, dtype="F32", shape=(2, 3), data=lambda: weight).count
    6
    """

    tensor: str
    start: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Buffer] = field(repr=False, compare=False)


@dataclass(frozen=True)
class ChunkRecord:
    """Where a written flat range lies: `offset` is its first byte, counted from the beginning of the file."""

    tensor: str
    start: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        _tensor_name(self.tensor)
        whole = self.whole
        _integer(self.start, f"start of {self.tensor!r}", 0, whole.num_elements)
        _integer(self.count, f"count of {self.tensor!r}", 0, whole.num_elements - self.start)
        _integer(self.offset, f"offset of {self.tensor!r}", 8, _LARGEST)

    @property
    def whole(self) -> TensorRecord:
        """The tensor that this is a range of."""
        return TensorRecord(self.dtype, self.shape)

    @property
    def end(self) -> int:
        """The first byte after it in the file."""
        return self.offset + self.count * ITEM_SIZES[self.dtype]

    def to_json(self) -> JsonValue:
        return [self.tensor, self.start, self.count, self.dtype, list(self.shape), self.offset]

    @classmethod
    def from_json(cls, tree: object) -> ChunkRecord:
        fields = _list(tree, "a chunk")
        _require(len(fields) == 6, "a chunk", tree, "[tensor, start, count, dtype, shape, offset]")
        tensor, start, count, dtype, shape, offset = fields
        return cls(tensor, start, count, dtype, tuple(_list(shape, "shape")), offset)


@dataclass(frozen=True)
class FileRecord:
    """One written file: size in bytes, xxh3_128 digests of the whole and of each block, and the chunks in file order.

    JSON-able, because every rank sends its records to the rank that commits.
    """

    name: str
    size: int
    digest: str
    block_size: int
    block_digests: tuple[str, ...]
    chunks: tuple[ChunkRecord, ...] = ()

    def __post_init__(self) -> None:
        _text(self.name, "a file name", _FILE_NAME)
        _require(self.name != MANIFEST_NAME, "a file name", self.name, "another: the manifest does not list itself")
        _integer(self.size, f"size of {self.name}", 0, _LARGEST)
        _text(self.digest, f"xxh3_128 of {self.name}", _XXH3)
        _integer(self.block_size, f"block_size of {self.name}", *_BLOCK_SIZES)
        found, wanted = len(self.block_digests), -(-self.size // self.block_size)
        _require(found == wanted, f"number of block digests of {self.name}", found, wanted)
        for digest in self.block_digests:
            _text(digest, f"a block digest of {self.name}", _XXH3)
        tensor_file = self.name.endswith(".safetensors")
        _require(tensor_file or not self.chunks, "a file with chunks", self.name, "a .safetensors file")
        # Chunks lie end to end up to the end of the file: no byte is read as two tensors, none is out of reach.
        position = self.chunks[0].offset if self.chunks else self.size
        for chunk in self.chunks:
            _require(chunk.offset == position, f"offset of {chunk.tensor!r} in {self.name}", chunk.offset, position)
            position = chunk.end
        _require(position == self.size, f"end of the last chunk of {self.name}", position, self.size)

    def to_json(self) -> JsonValue:
        return {
            "name": self.name,
            "size": self.size,
            "xxh3_128": self.digest,
            "block_size": self.block_size,
            "block_xxh3_128": list(self.block_digests),
            "chunks": [chunk.to_json() for chunk in self.chunks],
        }

    @classmethod
    def from_json(cls, tree: object) -> FileRecord:
        """Rebuild a record that `to_json` made. Raises `CheckpointError` on anything else."""
        fields = _object(tree, "a file", {"name", "size", "xxh3_128", "block_size", "block_xxh3_128", "chunks"})
        return cls(
            fields["name"],
            fields["size"],
            fields["xxh3_128"],
            fields["block_size"],
            tuple(_list(fields["block_xxh3_128"], "block_xxh3_128")),
            tuple(ChunkRecord.from_json(chunk) for chunk in _list(fields["chunks"], "chunks")),
        )


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. Building one checks every value and proves that the files tile every tensor.

    `topology`, `versions` and `progress` are free JSON; `metrics` are floats, nan and inf allowed. `aliases` maps the
    other names of a shared tensor to the one in `tensors`. `created` is a UTC time such as ``2031-05-01T12:00:00Z``.

    Raises:
        CheckpointError: a value out of range; a tensor with a hole, an overlap or two dtypes; a chunk of an unlisted
            tensor.
    """

    step: int
    run_id: str
    nonce: str
    created: str
    tensors: Mapping[str, TensorRecord]
    files: tuple[FileRecord, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    topology: Mapping[str, JsonValue] = field(default_factory=dict)
    versions: Mapping[str, JsonValue] = field(default_factory=dict)
    progress: Mapping[str, JsonValue] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _integer(self.step, "step", 0, 10**18 - 1)
        _text(self.run_id, "run_id", re.compile(r"[^\0]{1,200}"))
        _text(self.nonce, "nonce", _NONCE)
        _text(self.created, "created", _CREATED)
        try:
            datetime.fromisoformat(self.created.replace("Z", "+00:00"))
        except ValueError as exc:
            raise CheckpointError(f"created={self.created!r} is not a time: {exc}") from exc
        for name, value in self.metrics.items():
            _require(type(value) in (int, float), f"the metric {name!r}", value, "a Python float")
        for alias, canonical in self.aliases.items():
            _tensor_name(alias)
            _require(alias not in self.tensors, "an alias", alias, "a name that no tensor has")
            _require(
                _tensor_name(canonical) in self.tensors, f"the tensor of alias {alias!r}", canonical, "in `tensors`"
            )
        _prove_coverage(self.tensors, self.files)

    def to_bytes(self) -> bytes:
        """Return the content of `manifest.json`: the canonical body and its sha256."""
        return _sealed(codec.dumps(self._body()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse the content of a `manifest.json`; every byte of it counts.

        Raises:
            NewerFormatError: intact, but of a format version that this fabricate does not know.
            CheckpointError: anything that `to_bytes` does not write.
        """
        body = _object(codec.loads(data), "the manifest file", {"sha256", "manifest"})["manifest"]
        if _sealed(codec.dumps(body)) != data:
            raise CheckpointError("its content does not match its sha256")
        if isinstance(body, dict) and body.get("format") == FORMAT:
            version = body.get("version")
            if type(version) is int and version > VERSION:
                raise NewerFormatError(
                    f"written by a newer fabricate (format version {version}, not {VERSION}): upgrade fabricate"
                )
        names = {"format", "version", *cls.__dataclass_fields__}
        fields = _object(body, "the manifest", names)
        _require(fields["format"] == FORMAT, "format", fields["format"], FORMAT)
        _require(fields["version"] == VERSION, "version", fields["version"], VERSION)
        tensors = _mapping(fields["tensors"], "tensors")
        return cls(
            step=fields["step"],
            run_id=fields["run_id"],
            nonce=fields["nonce"],
            created=fields["created"],
            tensors={name: TensorRecord.from_json(record) for name, record in tensors.items()},
            files=tuple(FileRecord.from_json(record) for record in _list(fields["files"], "files")),
            aliases=_mapping(fields["aliases"], "aliases"),
            topology=_mapping(fields["topology"], "topology"),
            versions=_mapping(fields["versions"], "versions"),
            progress=_mapping(fields["progress"], "progress"),
            metrics={name: _metric(value) for name, value in _mapping(fields["metrics"], "metrics").items()},
        )

    @property
    def digest(self) -> str:
        """The sha256 of the canonical body in hexadecimal: the identity of the checkpoint and of every byte in it."""
        return hashlib.sha256(codec.dumps(self._body())).hexdigest()

    def _body(self) -> JsonValue:
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "run_id": self.run_id,
            "nonce": self.nonce,
            "created": self.created,
            "topology": dict(self.topology),
            "versions": dict(self.versions),
            "progress": dict(self.progress),
            "metrics": {name: codec.encode(value, _stored_nowhere) for name, value in self.metrics.items()},
            "tensors": {name: record.to_json() for name, record in self.tensors.items()},
            "aliases": dict(self.aliases),
            "files": [record.to_json() for record in self.files],
        }


def tensors_of(files: Iterable[FileRecord]) -> dict[str, TensorRecord]:
    """Return the tensors that the chunks of `files` belong to.

    A tensor that no rank wrote is not among them: name those that must be there from the model, where that is possible.

    Raises:
        CheckpointError: two chunks that disagree about the dtype or shape of one tensor.
    """
    tensors: dict[str, TensorRecord] = {}
    for record in files:
        for chunk in record.chunks:
            known = tensors.setdefault(chunk.tensor, chunk.whole)
            if known != chunk.whole:
                raise CheckpointError(
                    f"{record.name}: {chunk.tensor!r} is {chunk.whole} here and {known} in another chunk"
                )
    return tensors


def _prove_coverage(tensors: Mapping[str, TensorRecord], files: Collection[FileRecord]) -> None:
    """Prove that every tensor is tiled exactly once by chunks of its own dtype and shape."""
    names = Counter(record.name.lower() for record in files)  # lower: some file systems fold case
    for name, occurrences in names.items():
        _require(occurrences == 1, "the file name", name, "used once")
    ranges: dict[str, list[tuple[int, int, str]]] = {name: [] for name in tensors}
    for name in tensors:
        _tensor_name(name)
    for record in files:
        for chunk in record.chunks:
            if chunk.tensor not in ranges:
                raise CheckpointError(f"{record.name} holds {chunk.tensor!r}, which `tensors` does not list")
            tensor = tensors[chunk.tensor]
            if (chunk.dtype, chunk.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"{record.name} holds {chunk.tensor!r} as {chunk.whole}, `tensors` lists {tensor}"
                )
            if chunk.count:
                ranges[chunk.tensor].append((chunk.start, chunk.count, record.name))
    for name, tensor in tensors.items():
        position = 0
        for start, count, file in sorted(ranges[name]):
            if start != position:
                what = "nothing covers" if start > position else "two chunks cover"
                low, high = min(start, position), max(start, position)
                raise CheckpointError(f"{file}: {what} elements {low} to {high} of {name!r}")
            position += count
        if position != tensor.num_elements:
            raise CheckpointError(f"nothing covers elements {position} to {tensor.num_elements} of {name!r}")


# -- writing


def write_tensors(
    path: Path, chunks: Iterable[Chunk], files: Files = LOCAL, metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Stream `chunks` into the new safetensors file `path`, one at a time, and make its content durable.

    The entries are one-dimensional and called ``tensor|start``. Each rank calls it for its own files; there is no
    collective. Chunks are written by falling item size, so that every one is aligned for readers that map the file.

    Raises:
        CheckpointError: `path` exists, the disk is full, a chunk is out of range or its data has another size.
    """
    entries = [(f"{chunk.tensor}|{chunk.start}", [chunk.count], chunk) for chunk in chunks]
    return _write_safetensors(path, entries, files, metadata)


def write_plain_safetensors(
    path: Path, chunks: Iterable[Chunk], files: Files = LOCAL, metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Stream whole tensors into the new safetensors file `path` under their own names and shapes: for exported weights.

    As `write_tensors`, but every chunk must be whole. `metadata` defaults to ``{"format": "pt"}``, which other
    libraries ask for.
    """
    entries = []
    for chunk in chunks:
        whole, found = (0, math.prod(chunk.shape)), (chunk.start, chunk.count)
        _require(found == whole, f"(start, count) of {chunk.tensor!r}", found, f"{whole}: exports hold whole tensors")
        entries.append((chunk.tensor, list(chunk.shape), chunk))
    return _write_safetensors(path, entries, files, {"format": "pt"} if metadata is None else metadata)


def write_json(path: Path, tree: object, files: Files = LOCAL) -> FileRecord:
    """Write a JSON tree, as `codec.encode` makes it, in canonical form to the new file `path`, and make it durable.

    Raises:
        CheckpointError: `path` exists, the disk is full, or `tree` is not JSON.
    """
    return _write(path, [codec.dumps(tree)], files)


def _write_safetensors(
    path: Path, entries: list[tuple[str, list[int], Chunk]], files: Files, metadata: Mapping[str, str] | None
) -> FileRecord:
    for _, _, chunk in entries:  # as records, chunks have their values checked; before anything is written
        ChunkRecord(chunk.tensor, chunk.start, chunk.count, chunk.dtype, tuple(chunk.shape), offset=8)
    entries = sorted(entries, key=lambda entry: -ITEM_SIZES[entry[2].dtype])
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key, shape, chunk in entries:
        _require(key not in header, "the chunk", key, "written once per file")
        start, end = end, end + chunk.count * ITEM_SIZES[chunk.dtype]
        header[key] = {"dtype": chunk.dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise CheckpointError(
            f"{path}: {len(entries)} entries in one file are too many: spread them over several files"
        )

    records, offset = [], 8 + len(text)
    for _, _, chunk in entries:
        record = ChunkRecord(chunk.tensor, chunk.start, chunk.count, chunk.dtype, tuple(chunk.shape), offset)
        records.append(record)
        offset = record.end

    def parts() -> Iterator[Buffer]:
        yield struct.pack("<Q", len(text)) + text
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
    _require(len(view) == wanted, f"the number of bytes in the data of {chunk.tensor!r}", len(view), wanted)
    return view


def _write(path: Path, parts: Iterable[Buffer], files: Files) -> FileRecord:
    """Write `parts` end to end, one block per write, and fsync. The file stays, incomplete, if that fails."""
    _text(path.name, "a file name", _FILE_NAME)
    whole, digests, size = xxhash.xxh3_128(), [], 0
    with _explained("write", path), files.create(path) as writer:
        for block in _blocks(parts):
            writer.write(block)
            whole.update(block)
            digests.append(xxhash.xxh3_128_hexdigest(block))
            size += len(block)
        writer.fsync()
    return FileRecord(path.name, size, whole.hexdigest(), BLOCK_SIZE, tuple(digests))


def _blocks(parts: Iterable[Buffer]) -> Iterator[memoryview | bytearray]:
    """Cut the concatenation of `parts` into blocks; what is a whole block inside one part is not copied."""
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


# -- committing


def stage(root: Path, step: int, nonce: str, files: Files = LOCAL) -> Path:
    """Make the directory in which the checkpoint of `step` is assembled, and return it.

    Every rank may call it at once, with the same `nonce`: letters and digits that no other attempt uses.

    Example: ``stage(Path("run/checkpoints"), 500, "9f3a")`` returns ``run/checkpoints/.tmp-step-00000500-9f3a``.
    """
    staging = root / _staging_name(step, nonce)
    with _explained("make", staging):
        files.make_directories(root)
        files.make_directory(staging)
    return staging


def commit(staging: Path, manifest: Manifest, files: Files = LOCAL, name: str | None = None) -> Path:
    """Turn a staging directory into a checkpoint, durably and at once, and return its path.

    Called by one rank, after every file that `manifest` lists has been written. The checkpoint appears beside
    `staging`, as ``step-00000500`` or under `name`.

    Raises:
        CheckpointError: a file is missing, unlisted or of another size; the checkpoint exists already; the file system
            refuses. The staging directory is left for `discard`.
    """
    final = staging.parent / (_step_name(manifest.step) if name is None else _text(name, "name", _TARGET_NAME))
    wanted = _staging_name(manifest.step, manifest.nonce)
    _require(
        staging.name == wanted, "the staging directory", staging.name, f"{wanted}, for the manifest's step and nonce"
    )
    data = manifest.to_bytes()
    with _explained("commit", staging):
        try:
            _check_directory(staging, manifest.files, files)
        except CheckpointError as exc:
            raise CheckpointError(f"{staging}: {exc}; nothing was committed") from exc
        if final.name in files.listdir(final.parent):
            raise CheckpointError(
                f"{final} exists already and is never overwritten: remove it or save under another name"
            )
        with files.create(staging / MANIFEST_NAME) as writer:
            writer.write(data)
            writer.fsync()
        files.fsync_directory(staging)
        try:
            files.rename(staging, final)
        except OSError:
            # A network file system may answer a repeated request with an error though the first one was carried out.
            if not _is_content(final / MANIFEST_NAME, data, files):
                raise
        files.fsync_directory(final.parent)
    return final


def discard(staging: Path, files: Files = LOCAL) -> None:
    """Remove a staging directory that will not be committed. Called by one rank, when no rank writes there any more."""
    _require(staging.name.startswith(".tmp-"), "the staging directory", staging.name, "one that stage() made")
    with _explained("remove", staging):
        files.remove_tree(staging)


def committed(root: Path, files: Files = LOCAL) -> list[Path]:
    """Return the checkpoints in `root` by rising step, none where `root` does not exist. None is opened."""
    found = [(int(match[1]), name) for name in _names(root, files) if (match := _STEP_NAME.fullmatch(name))]
    return [root / name for step, name in sorted(found) if name == _step_name(step)]


def clean(root: Path, files: Files = LOCAL) -> list[Path]:
    """Remove what killed saves and prunes left in `root`, and return it. For one rank, while nothing is saved."""
    leftovers = [root / name for name in _names(root, files) if name.startswith((".tmp-", ".trash-"))]
    for path in leftovers:
        with _explained("remove", path):
            files.remove_tree(path)
    return leftovers


def prune(paths: Iterable[Path], files: Files = LOCAL) -> None:
    """Delete checkpoints. Each first loses its name, durably, so that a kill never leaves half of one to be found."""
    trash = []
    for path in paths:
        target = path.with_name(f".trash-{path.name}")
        with _explained("delete", path):
            files.remove_tree(target)
            files.rename(path, target)
        trash.append(target)
    for parent in sorted({path.parent for path in trash}):
        with _explained("delete checkpoints in", parent):
            files.fsync_directory(parent)
    for path in trash:
        with _explained("remove", path):
            files.remove_tree(path)


def set_aside(path: Path, reason: str, files: Files = LOCAL) -> Path:
    """Rename a damaged checkpoint to ``.bad-...``, so that nothing resumes from it, and return its new path.

    Called by one rank. `reason` is put into the directory as ``reason.json``, where the disk still takes it.
    """
    with _explained("set aside", path):
        taken = files.listdir(path.parent)
        name = f".bad-{path.name}"
        attempt = 1
        while name in taken:
            attempt += 1
            name = f".bad-{path.name}-{attempt}"
        target = path.with_name(name)
        files.rename(path, target)
        files.fsync_directory(path.parent)
    # The rename is what protects the run. The caller reports the reason too: a full or failing disk may lose the note.
    with suppress(CheckpointError):
        write_json(target / "reason.json", {"reason": reason}, files)
    return target


def _step_name(step: int) -> str:
    return f"step-{_integer(step, 'step', 0, 10**18 - 1):08d}"


def _staging_name(step: int, nonce: str) -> str:
    return f".tmp-{_step_name(step)}-{_text(nonce, 'nonce', _NONCE)}"


def _names(root: Path, files: Files) -> list[str]:
    with _explained("list", root):
        try:
            return files.listdir(root)
        except FileNotFoundError:
            return []


def _is_content(path: Path, data: bytes, files: Files) -> bool:
    try:
        with files.open(path) as source:
            return source.read(0, len(data) + 1) == data
    except OSError:
        return False


def _check_directory(directory: Path, records: Iterable[FileRecord], files: Files, *also: str) -> None:
    """Check that a directory holds the files of `records`, regular and of their sizes, those of `also`, and no more."""
    sizes = {record.name: record.size for record in records}
    present = set(files.listdir(directory)).difference(also)
    for name in sorted(sizes.keys() - present):
        raise CheckpointError(f"{name} is missing")
    for name in sorted(present - sizes.keys()):
        raise CheckpointError(f"{name} is not listed in the manifest")
    for name, size in sizes.items():
        try:
            found = files.size(directory / name)
        except OSError as exc:
            raise CheckpointError(f"{name}: {exc.strerror or exc}") from exc
        if found != size:
            raise CheckpointError(f"{name} has {found} bytes, the manifest says {size}")


# -- reading


class Reader:
    """A committed checkpoint, open for reading. Each rank opens its own and reads the ranges it needs.

    Opening checks what is cheap: the manifest's digest and schema, that its files tile every tensor, and that exactly
    those files are there with the recorded sizes. Every byte that is returned later has been checked against its
    block's digest.

    Args:
        path: the checkpoint directory.
        files: the file system.

    Raises:
        CheckpointError: here and in every method, for a checkpoint that is missing, torn, altered or unreadable; names
            the directory, the file and what to do. `NewerFormatError` where it is intact but too new.

    Example::

        with Reader(run / "checkpoints/step-00000500") as reader:
            shard = reader.read("model/blocks.0.weight", start=4096, count=4096)     # bytes of 4096 elements
            progress = reader.json("progress.json")
    """

    def __init__(self, path: Path, files: Files = LOCAL) -> None:
        self.path = path
        self._files = files
        self._source: Source | None = None
        self._cache: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        with self._blaming(MANIFEST_NAME):
            self.manifest: Manifest = Manifest.from_bytes(self._manifest_bytes())
            match = _STEP_NAME.fullmatch(path.name)
            if match and int(match[1]) != self.manifest.step:
                raise CheckpointError(f"it belongs to step {self.manifest.step}")
        self._records = {record.name: record for record in self.manifest.files}
        self._chunks: dict[str, list[tuple[ChunkRecord, FileRecord]]] = {name: [] for name in self.manifest.tensors}
        for record in self.manifest.files:
            for chunk in record.chunks:
                self._chunks[chunk.tensor].append((chunk, record))
        for chunks in self._chunks.values():
            chunks.sort(key=lambda pair: pair[0].start)
        with self._blaming():
            _check_directory(path, self.manifest.files, files, MANIFEST_NAME)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the open file and the cached blocks. The reader stays usable."""
        self._cache.clear()
        if self._source is not None:
            source, self._source = self._source, None
            source.close()

    def verify(self) -> None:
        """Read every file once and check every block and the digest of the whole."""
        for record in self.manifest.files:
            whole = xxhash.xxh3_128()
            for index in range(len(record.block_digests)):
                whole.update(self._load_block(record, index))
            if whole.hexdigest() != record.digest:
                raise self._damage(record.name, "its digest is not the one in the manifest")

    def json(self, name: str) -> JsonValue:
        """Return the JSON tree in the file `name`, as `write_json` got it."""
        record = self._records.get(name)
        if record is None or not name.endswith(".json"):
            raise CheckpointError(
                f"checkpoint {self.path} holds no JSON file {name!r}{did_you_mean(name, self._records)}"
            )
        data = bytearray()
        for index in range(len(record.block_digests)):
            data += self._load_block(record, index)
        with self._blaming(name):
            return codec.loads(bytes(data))

    def read(self, tensor: str, start: int = 0, count: int | None = None) -> bytearray:
        """Return elements ``[start, start + count)`` of the flattened tensor, as little-endian bytes of its own dtype.

        Args:
            tensor: its logical name, or an alias.
            start: the first element, in row-major order.
            count: how many; None: all from `start` on.
        """
        name = self.manifest.aliases.get(tensor, tensor)
        record = self.manifest.tensors.get(name)
        if record is None:
            known = [*self.manifest.tensors, *self.manifest.aliases]
            raise CheckpointError(f"checkpoint {self.path} holds no tensor {tensor!r}{did_you_mean(tensor, known)}")
        total = record.num_elements
        end = total if count is None else start + count
        if not 0 <= start <= end <= total:
            raise CheckpointError(f"elements {start} to {end} of {tensor!r} were asked for, it has {total}")
        item, out = ITEM_SIZES[record.dtype], bytearray()
        for chunk, file in self._chunks[name]:
            low, high = max(start, chunk.start), min(end, chunk.start + chunk.count)
            if low < high:
                first = chunk.offset + (low - chunk.start) * item
                self._append(out, file, first, first + (high - low) * item)
        return out

    def _append(self, out: bytearray, record: FileRecord, first: int, end: int) -> None:
        """Append bytes ``[first, end)`` of a file. `out` grows by what was read, never by what a size claims."""
        size = record.block_size
        for index in range(first // size, -(-end // size)):
            block = self._block(record, index)
            out += memoryview(block)[max(0, first - index * size) : end - index * size]

    def _block(self, record: FileRecord, index: int) -> bytes:
        key = (record.name, index)
        if key in self._cache:
            self._cache.move_to_end(key)
        else:
            self._cache[key] = self._load_block(record, index)
            if len(self._cache) > _CACHED_BLOCKS:
                self._cache.popitem(last=False)
        return self._cache[key]

    def _load_block(self, record: FileRecord, index: int) -> bytes:
        with self._blaming(record.name):
            if self._source is None or self._source.path.name != record.name:
                if self._source is not None:
                    source, self._source = self._source, None
                    source.close()
                self._source = self._files.open(self.path / record.name)
            start = index * record.block_size
            data = self._source.read(start, min(record.block_size, record.size - start))
            if xxhash.xxh3_128_hexdigest(data) != record.block_digests[index]:
                raise CheckpointError(
                    f"block {index} (bytes {start} to {start + len(data)}) is damaged: its digest is another"
                )
        return data

    def _manifest_bytes(self) -> bytes:
        with self._files.open(self.path / MANIFEST_NAME) as source:
            size = self._files.size(self.path / MANIFEST_NAME)
            if size > codec.MAXIMUM_BYTES:
                raise CheckpointError(f"{size} bytes, over the limit of {codec.MAXIMUM_BYTES}")
            return source.read(0, size)

    @contextmanager
    def _blaming(self, name: str | None = None) -> Iterator[None]:
        """Name the directory, the file and the remedy in every error from below."""
        try:
            yield
        except NewerFormatError as exc:
            raise NewerFormatError(f"checkpoint {self.path}: {exc}") from exc
        except FileNotFoundError as exc:
            raise self._damage(name, "missing") from exc
        except OSError as exc:
            raise self._damage(name, f"cannot be read: {exc.strerror or exc}") from exc
        except CheckpointError as exc:
            raise self._damage(name, str(exc)) from exc

    def _damage(self, name: str | None, what: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.path}: {f'{name}: ' if name else ''}{what}; {_FALL_BACK}")


# -- checking values


@contextmanager
def _explained(doing: str, path: Path) -> Iterator[None]:
    """Turn the file system's refusal into a `CheckpointError` with a remedy."""
    try:
        yield
    except OSError as exc:
        remedy = "check the file system and the disk"
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free space there, keep fewer checkpoints, or point run_dir at another disk"
        elif exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "give this user write permission, or point run_dir elsewhere"
        raise CheckpointError(f"cannot {doing} {path}: {exc.strerror or exc}; {remedy}") from exc


def _require(holds: bool, what: str, value: object, wanted: object) -> None:
    if not holds:
        raise CheckpointError(f"{what} is {reprlib.repr(value)}, must be {wanted}")


def _integer(value: Any, what: str, low: int, high: int) -> int:
    _require(type(value) is int and low <= value <= high, what, value, f"an int from {low} to {high}")
    return int(value)


def _text(value: Any, what: str, pattern: re.Pattern[str]) -> str:
    _require(type(value) is str and pattern.fullmatch(value) is not None, what, value, f"text like {pattern.pattern}")
    return str(value)


def _tensor_name(value: Any) -> str:
    legal = type(value) is str and 0 < len(value) <= 1000 and value.isprintable() and value != "__metadata__"
    _require(legal, "a tensor name", value, "1 to 1000 printable characters")
    return str(value)


def _object(tree: object, what: str, keys: Collection[str]) -> dict[str, Any]:
    fields = _mapping(tree, what)
    if fields.keys() != set(keys):
        missing, unknown = sorted(set(keys) - fields.keys()), sorted(fields.keys() - set(keys))
        raise CheckpointError(
            f"{what} lacks {missing} and has the unknown {unknown}: it was written by another version"
        )
    return fields


def _mapping(tree: object, what: str) -> dict[str, Any]:
    _require(isinstance(tree, dict), what, tree, "a JSON object")
    return tree  # type: ignore[return-value]


def _list(tree: object, what: str) -> list[Any]:
    _require(isinstance(tree, list), what, tree, "a JSON array")
    return tree  # type: ignore[return-value]


def _sealed(body: bytes) -> bytes:
    """Return the canonical bytes of ``{"manifest": body, "sha256": ...}``."""
    return b'{"manifest":' + body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode("ascii") + b'"}'


def _metric(tree: object) -> Any:
    return codec.decode(tree, _stored_nowhere)


def _stored_nowhere(name: str, value: object = None) -> None:
    raise CheckpointError(f"{name} is not a number: a metric is a float")
