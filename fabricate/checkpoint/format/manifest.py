"""The description of a checkpoint: records of tensors, chunks and files, and the manifest that lists them.

Owns the schema of `docs/checkpoint-format.md`, the checks of every value in it, and the proof that the files of a checkpoint tile every
tensor exactly once. There is one kind of chunk, the flat range ``[start, start + count)`` of the row-major flattened logical tensor: a
slice of a replicated tensor, a shard along dimension 0 and a partition of a flattened parameter are all written as such ranges, and read
back in the ranges that the reader's layout needs.

It must not know torch, files or directories: it sees names, numbers and bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from fabricate.checkpoint.format import canonical_json, codec
from fabricate.checkpoint.format.canonical_json import JsonValue
from fabricate.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "FILE_NAME",
    "FORMAT",
    "ITEM_SIZES",
    "MANIFEST_NAME",
    "NONCE",
    "VERSION",
    "Chunk",
    "ChunkRecord",
    "FileRecord",
    "Manifest",
    "NewerFormatError",
    "TensorRecord",
    "integer",
    "require",
    "tensors_of",
    "text",
]

FORMAT: Final = "fabricate-checkpoint"
VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"

ITEM_SIZES: Final[Mapping[str, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of every dtype, by its safetensors code. Numbers are little-endian."""

FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.(safetensors|json)")
NONCE: Final = re.compile(r"[A-Za-z0-9]{1,64}")
_LARGEST: Final = 2**62
_BLOCK_SIZES: Final = (2**12, 2**24)
_XXH3: Final = re.compile(r"[0-9a-f]{32}")
_CREATED: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)")


class NewerFormatError(CheckpointError):
    """Raised for an intact checkpoint that only a newer fabricate can read. It is not damaged and must not be set aside."""


@dataclass(frozen=True)
class TensorRecord:
    """The dtype (a key of `ITEM_SIZES`) and the whole shape (``()`` for a scalar) of one logical tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        require(
            type(self.dtype) is str and self.dtype in ITEM_SIZES, "dtype", self.dtype, f"one of {', '.join(ITEM_SIZES)}"
        )
        require(len(self.shape) <= 64, "the number of dimensions", len(self.shape), "at most 64")
        for size in self.shape:
            integer(size, "a dimension of shape", 0, _LARGEST)
        integer(self.num_elements, "the number of elements", 0, _LARGEST)

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

    `data` is called once, while the file is being written, so that one chunk at a time is in host memory. It returns the elements
    ``[start, start + count)`` of the row-major flattened tensor as ``count * itemsize`` contiguous little-endian bytes. A chunk with
    ``count=0`` only records that a tensor without elements exists; its `data` is not called.

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
    """The place of a written chunk. `offset`: its first byte, counted from the beginning of the file."""

    tensor: str
    start: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        _tensor_name(self.tensor)
        whole = self.whole
        integer(self.start, f"start of {self.tensor!r}", 0, whole.num_elements)
        integer(self.count, f"count of {self.tensor!r}", 0, whole.num_elements - self.start)
        integer(self.offset, f"offset of {self.tensor!r}", 8, _LARGEST)

    @property
    def whole(self) -> TensorRecord:
        """The logical tensor that this chunk is a range of."""
        return TensorRecord(self.dtype, self.shape)

    @property
    def end(self) -> int:
        """The first byte after the chunk in the file."""
        return self.offset + self.count * ITEM_SIZES[self.dtype]

    def to_json(self) -> JsonValue:
        return [self.tensor, self.start, self.count, self.dtype, list(self.shape), self.offset]

    @classmethod
    def from_json(cls, tree: object) -> ChunkRecord:
        fields = _list(tree, "a chunk")
        require(len(fields) == 6, "a chunk", tree, "[tensor, start, count, dtype, shape, offset]")
        tensor, start, count, dtype, shape, offset = fields
        return cls(tensor, start, count, dtype, tuple(_list(shape, "shape")), offset)


@dataclass(frozen=True)
class FileRecord:
    """One written file: size in bytes, the xxh3_128 digest of each block, and the chunks in file order.

    JSON-able, because every rank sends its records to the rank that commits.
    """

    name: str
    size: int
    block_size: int
    block_digests: tuple[str, ...]
    chunks: tuple[ChunkRecord, ...] = ()

    def __post_init__(self) -> None:
        text(self.name, "a file name", FILE_NAME)
        require(self.name != MANIFEST_NAME, "a file name", self.name, "another: the manifest does not list itself")
        integer(self.size, f"size of {self.name}", 0, _LARGEST)
        integer(self.block_size, f"block_size of {self.name}", *_BLOCK_SIZES)
        actual, wanted = len(self.block_digests), -(-self.size // self.block_size)
        require(actual == wanted, f"number of block digests of {self.name}", actual, wanted)
        for digest in self.block_digests:
            text(digest, f"a block digest of {self.name}", _XXH3)
        tensor_file = self.name.endswith(".safetensors")
        require(tensor_file or not self.chunks, "a file with chunks", self.name, "a .safetensors file")
        # Chunks fill the file without gaps up to its end: no byte belongs to two tensors, and none to no tensor.
        position = self.chunks[0].offset if self.chunks else self.size
        for chunk in self.chunks:
            require(chunk.offset == position, f"offset of {chunk.tensor!r} in {self.name}", chunk.offset, position)
            position = chunk.end
        require(position == self.size, f"end of the last chunk of {self.name}", position, self.size)

    def to_json(self) -> JsonValue:
        return {
            "name": self.name,
            "size": self.size,
            "block_size": self.block_size,
            "block_xxh3_128": list(self.block_digests),
            "chunks": [chunk.to_json() for chunk in self.chunks],
        }

    @classmethod
    def from_json(cls, tree: object) -> FileRecord:
        """Rebuild a record that `to_json` made. Raises `CheckpointError` on anything else."""
        fields = _object(tree, "a file", {"name", "size", "block_size", "block_xxh3_128", "chunks"})
        return cls(
            fields["name"],
            fields["size"],
            fields["block_size"],
            tuple(_list(fields["block_xxh3_128"], "block_xxh3_128")),
            tuple(ChunkRecord.from_json(chunk) for chunk in _list(fields["chunks"], "chunks")),
        )


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint. The constructor checks every value and proves that the files tile every tensor.

    `topology`, `versions` and `progress` are any JSON; `metrics` are floats, including nan and inf. `aliases` maps the other names of a
    shared tensor to its name in `tensors`. `created` is a UTC time such as ``2031-05-01T12:00:00Z``.

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
        integer(self.step, "step", 0, 10**18 - 1)
        text(self.run_id, "run_id", re.compile(r"[^\0]{1,200}"))
        text(self.nonce, "nonce", NONCE)
        text(self.created, "created", _CREATED)
        try:
            datetime.fromisoformat(self.created.replace("Z", "+00:00"))
        except ValueError as exc:
            raise CheckpointError(f"created={self.created!r} is not a time: {exc}") from exc
        for name, value in self.metrics.items():
            require(type(value) in (int, float), f"the metric {name!r}", value, "a Python float")
        for alias, canonical in self.aliases.items():
            _tensor_name(alias)
            require(alias not in self.tensors, "an alias", alias, "a name that no tensor has")
            require(
                _tensor_name(canonical) in self.tensors, f"the tensor of alias {alias!r}", canonical, "in `tensors`"
            )
        _prove_coverage(self.tensors, self.files)

    def to_bytes(self) -> bytes:
        """Return the content of `manifest.json`: the canonical body and its SHA-256."""
        return _sealed(canonical_json.dumps(self._body()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse the content of a `manifest.json`; every byte of it is checked.

        Raises:
            NewerFormatError: intact, but its format version is newer than this fabricate.
            CheckpointError: `to_bytes` does not write such content.
        """
        body = _object(canonical_json.loads(data), "the manifest file", {"sha256", "manifest"})["manifest"]
        if _sealed(canonical_json.dumps(body)) != data:
            raise CheckpointError("its content does not match its sha256")
        if isinstance(body, dict) and body.get("format") == FORMAT:
            version = body.get("version")
            if type(version) is int and version > VERSION:
                raise NewerFormatError(
                    f"written by a newer fabricate (format version {version}, not {VERSION}): upgrade fabricate"
                )
        names = {"format", "version", *cls.__dataclass_fields__}
        fields = _object(body, "the manifest", names)
        require(fields["format"] == FORMAT, "format", fields["format"], FORMAT)
        integer(fields["version"], "version", VERSION, VERSION)
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
        """The SHA-256 of the canonical body in hexadecimal. It identifies the checkpoint, including every byte of its files."""
        return hashlib.sha256(canonical_json.dumps(self._body())).hexdigest()

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

    A tensor that no rank wrote is missing here. Take the tensors that must exist from the model if possible.

    Raises:
        CheckpointError: two chunks differ in the dtype or shape of one tensor.
    """
    tensors: dict[str, TensorRecord] = {}
    for record in files:
        for chunk in record.chunks:
            whole = tensors.setdefault(chunk.tensor, chunk.whole)
            if whole != chunk.whole:
                raise CheckpointError(
                    f"{record.name}: {chunk.tensor!r} is {chunk.whole} here and {whole} in another chunk"
                )
    return tensors


def _prove_coverage(tensors: Mapping[str, TensorRecord], files: Collection[FileRecord]) -> None:
    """Prove that every tensor is tiled exactly once by chunks of its own dtype and shape."""
    names = Counter(record.name.lower() for record in files)  # lower, because some file systems ignore case
    for name, occurrences in names.items():
        require(occurrences == 1, "the file name", name, "used once")
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
            ranges[chunk.tensor].append((chunk.start, chunk.count, record.name))
    for name, tensor in tensors.items():
        # An empty chunk only records that a tensor without elements exists.
        wanted = "1, of a tensor without elements, or 0"
        idle = sum(not count for _, count, _ in ranges[name])
        require(idle <= (tensor.num_elements == 0), f"the number of empty chunks of {name!r}", idle, wanted)
        position = 0
        for start, count, file in sorted(ranges[name]):
            if start != position:
                what = "nothing covers" if start > position else "two chunks cover"
                low, high = min(start, position), max(start, position)
                raise CheckpointError(f"{file}: {what} elements {low} to {high} of {name!r}")
            position += count
        if position != tensor.num_elements:
            raise CheckpointError(f"nothing covers elements {position} to {tensor.num_elements} of {name!r}")


# -- checking values


def require(holds: bool, what: str, value: object, wanted: object) -> None:
    if not holds:
        raise CheckpointError(f"{what} is {reprlib.repr(value)}, must be {wanted}")


def integer(value: Any, what: str, low: int, high: int) -> int:
    require(type(value) is int and low <= value <= high, what, value, f"an int from {low} to {high}")
    return int(value)


def text(value: Any, what: str, pattern: re.Pattern[str]) -> str:
    require(type(value) is str and pattern.fullmatch(value) is not None, what, value, f"text like {pattern.pattern}")
    return str(value)


def _tensor_name(value: Any) -> str:
    legal = type(value) is str and 0 < len(value) <= 1000 and value.isprintable() and value != "__metadata__"
    require(legal, "a tensor name", value, "1 to 1000 printable characters")
    return str(value)


def _object(tree: object, what: str, keys: Collection[str]) -> dict[str, Any]:
    fields = _mapping(tree, what)
    if fields.keys() != set(keys):
        missing, unknown = sorted(set(keys) - fields.keys()), sorted(fields.keys() - set(keys))
        raise CheckpointError(
            f"{what} lacks the fields {missing} and has the unknown fields {unknown}: another version of fabricate wrote it"
        )
    return fields


def _mapping(tree: object, what: str) -> dict[str, Any]:
    require(isinstance(tree, dict), what, tree, "a JSON object")
    return tree  # type: ignore[return-value]


def _list(tree: object, what: str) -> list[Any]:
    require(isinstance(tree, list), what, tree, "a JSON array")
    return tree  # type: ignore[return-value]


def _sealed(body: bytes) -> bytes:
    """Return the canonical bytes of ``{"manifest": body, "sha256": ...}``."""
    return b'{"manifest":' + body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode("ascii") + b'"}'


def _metric(tree: object) -> Any:
    return codec.decode(tree, _stored_nowhere)


def _stored_nowhere(name: str, value: object = None) -> None:
    raise CheckpointError(f"{name} is not a number: a metric is a float")
