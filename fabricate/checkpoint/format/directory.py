"""The checkpoint directory: how it is staged, committed in one step, listed, deleted, verified and read in ranges.

Together with `manifest` and `writing` this is the format of `docs/checkpoint-format.md`: a flat directory of safetensors and JSON files and
a manifest, written last, that lists every file with its size and digests. All names of the format can be imported from here.

It must not know torch, ranks or strategies: it sees names, numbers and bytes. The caller decides which rank writes which range, how ranks
communicate and what a name means.

A save, with the ranks that take each step::

    staging = stage(root, step, nonce)                        every rank
    records = [write_tensors(staging / ..., chunks), ...]     every rank, its own files
    path = commit(staging, Manifest(..., files=records))      rank 0, once it has every rank's records

``root/step-00000500`` exists only from the rename inside `commit` on. A run that ends before that leaves ``.tmp-...``, which `clean`
removes.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import xxhash

from fabricate.checkpoint.format import canonical_json
from fabricate.checkpoint.format.canonical_json import JsonValue
from fabricate.checkpoint.format.files import LOCAL, Files, Source, explained
from fabricate.checkpoint.format.manifest import (
    ITEM_SIZES,
    MANIFEST_NAME,
    NONCE,
    Chunk,
    ChunkRecord,
    FileRecord,
    Manifest,
    NewerFormatError,
    TensorRecord,
    integer,
    require,
    tensors_of,
    text,
)
from fabricate.checkpoint.format.writing import HEADER_LIMIT, write_json, write_plain_safetensors, write_tensors
from fabricate.errors import CheckpointError, did_you_mean

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
    "find",
    "prune",
    "set_aside",
    "stage",
    "tensors_of",
    "write_json",
    "write_plain_safetensors",
    "write_tensors",
]

_KEPT: Final = 16
"""The number of blocks that a reader keeps in memory, and of files that it keeps open. This is enough, because tensors that are read one
after another lie in the same few files."""
_WEIGHTS: Final = (".safetensors", ".bin", ".ckpt", ".pt", ".pth")
_STEP_NAME: Final = re.compile(r"step-(\d{8,18})")
_TARGET_NAME: Final = re.compile(r"[A-Za-z0-9_][^/\0]{0,199}")
_FALL_BACK: Final = "resume from an older checkpoint (resume='auto' does), or put an intact copy in its place"


def stage(root: Path, step: int, nonce: str, files: Files = LOCAL) -> Path:
    """Make the directory in which the checkpoint of `step` is assembled, and return it.

    All ranks may call it at the same time, with the same `nonce`: letters and digits that no other attempt uses.

    Example: ``stage(Path("run/checkpoints"), 500, "9f3a")`` returns ``run/checkpoints/.tmp-step-00000500-9f3a``.
    """
    staging = root / _staging_name(step, nonce)
    with explained("make", staging):
        files.make_directories(root)
        files.make_directory(staging)
    return staging


def commit(staging: Path, manifest: Manifest, files: Files = LOCAL, name: str | None = None) -> Path:
    """Turn a staging directory into a durable checkpoint in one step, and return its path.

    Called by one rank, after every file that `manifest` lists has been written. The checkpoint appears beside
    `staging`, as ``step-00000500`` or under `name`.

    Raises:
        CheckpointError: a file is missing, unlisted or of another size; the checkpoint exists already; the file system
            refuses. The staging directory is left for `discard`.
    """
    final = staging.parent / (_step_name(manifest.step) if name is None else text(name, "name", _TARGET_NAME))
    wanted = _staging_name(manifest.step, manifest.nonce)
    require(
        staging.name == wanted, "the staging directory", staging.name, f"{wanted}, for the manifest's step and nonce"
    )
    data = manifest.to_bytes()
    with explained("commit", staging):
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
            # A network file system may repeat the request, and report an error although the first request succeeded.
            if not _is_content(final / MANIFEST_NAME, data, files):
                raise
        files.fsync_directory(final.parent)
    return final


def discard(staging: Path, files: Files = LOCAL) -> None:
    """Remove a staging directory that will not be committed. Called by one rank, when no rank writes into it any more."""
    require(staging.name.startswith(".tmp-"), "the staging directory", staging.name, "one that stage() made")
    with explained("remove", staging):
        files.remove_tree(staging)


def committed(root: Path, files: Files = LOCAL) -> list[Path]:
    """Return the checkpoints in `root` by rising step, or an empty list if `root` does not exist. No checkpoint is opened."""
    numbered = [(int(match[1]), name) for name in _names(root, files) if (match := _STEP_NAME.fullmatch(name))]
    return [root / name for step, name in sorted(numbered) if name == _step_name(step)]


def find(path: Path, files: Files = LOCAL) -> Path:
    """Return `path` itself if it is a checkpoint, else the newest checkpoint in `path`/checkpoints or in `path`. No checkpoint is opened.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    names = [] if path.is_file() else _names(path, files)
    if MANIFEST_NAME in names:
        return path
    checkpoints = (committed(path / "checkpoints", files) or committed(path, files)) if names else []
    if checkpoints:
        return checkpoints[-1]
    raise CheckpointError(
        f"{str(path)!r} is neither a checkpoint nor a run directory with one. Give RUN_DIR or RUN_DIR/checkpoints/step-..."
        f"{_of_weights(path, names)}"
    )


def _of_weights(path: Path, names: Iterable[str]) -> str:
    """The hint to import `path`, if it looks like a file or a directory of weights; else ""."""
    files = [path] if path.is_file() else [path / name for name in names]
    file = next((file for file in files if file.suffix in _WEIGHTS), None)
    if file is None:
        return ""
    return (
        f". {file.name} holds weights only: import_checkpoint({str(file)!r}, out) makes a checkpoint of them, and "
        "load_from_checkpoint(out) loads this into a module to fit"
    )


def clean(root: Path, files: Files = LOCAL) -> list[Path]:
    """Remove what interrupted saves and prunes left in `root`, and return the removed paths. Called by one rank, while nothing is saved."""
    leftovers = [root / name for name in _names(root, files) if name.startswith((".tmp-", ".trash-"))]
    for path in leftovers:
        with explained("remove", path):
            files.remove_tree(path)
    return leftovers


def prune(paths: Iterable[Path], files: Files = LOCAL) -> None:
    """Delete checkpoints. Each is first renamed durably, so that an interrupted deletion never leaves an incomplete checkpoint under its
    name."""
    trash = []
    for path in paths:
        target = path.with_name(f".trash-{path.name}")
        with explained("delete", path):
            files.remove_tree(target)
            files.rename(path, target)
        trash.append(target)
    for parent in sorted({path.parent for path in trash}):
        with explained("delete checkpoints in", parent):
            files.fsync_directory(parent)
    for path in trash:
        with explained("remove", path):
            files.remove_tree(path)


def set_aside(path: Path, reason: str, files: Files = LOCAL) -> Path:
    """Rename a damaged checkpoint to ``.bad-...``, so that nothing resumes from it, and return its new path.

    Called by one rank. `reason` is written into the directory as ``reason.json``, if the disk still accepts writes.
    """
    with explained("set aside", path):
        taken = files.listdir(path.parent)
        name = f".bad-{path.name}"
        attempt = 1
        while name in taken:
            attempt += 1
            name = f".bad-{path.name}-{attempt}"
        target = path.with_name(name)
        files.rename(path, target)
        files.fsync_directory(path.parent)
    # The rename protects the run. A full or failing disk may lose reason.json, so the caller reports the reason too.
    with suppress(CheckpointError):
        write_json(target / "reason.json", {"reason": reason}, files)
    return target


def _step_name(step: int) -> str:
    return f"step-{integer(step, 'step', 0, 10**18 - 1):08d}"


def _staging_name(step: int, nonce: str) -> str:
    return f".tmp-{_step_name(step)}-{text(nonce, 'nonce', NONCE)}"


def _names(root: Path, files: Files) -> list[str]:
    with explained("list", root):
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


def _check_directory(
    directory: Path, records: Iterable[FileRecord], files: Files, *also: str, part: tuple[int, int] = (0, 1)
) -> None:
    """Check that a directory holds the files of `records`, as regular files of the recorded sizes, and otherwise only the files `also`.
    `part`: the index of this reader and the number of readers; the first one checks the names, and each one checks the sizes of its
    share."""
    sizes = {record.name: record.size for record in records}
    present = set(files.listdir(directory)).difference(also) if part[0] == 0 else sizes.keys()
    for name in sorted(sizes.keys() - present):
        raise CheckpointError(f"{name} is missing")
    for name in sorted(present - sizes.keys()):
        raise CheckpointError(f"{name} is not listed in the manifest")
    for name, size in list(sizes.items())[part[0] :: part[1]]:
        try:
            actual = files.size(directory / name)
        except OSError as exc:
            raise CheckpointError(f"{name}: {exc.strerror or exc}") from exc
        if actual != size:
            raise CheckpointError(f"{name} has {actual} bytes, the manifest says {size}")


# -- reading


class Reader:
    """A committed checkpoint, open for reading. Each rank opens its own and reads the ranges it needs.

    Opening makes the cheap checks: the manifest's digest and schema, that its files tile every tensor, and that exactly these files exist
    with the recorded sizes. Every byte that a method returns has been checked against the digest of its block.

    Args:
        path: the checkpoint directory.
        files: the file system.
        part: the index of this reader and the number of readers that open the checkpoint together: the first one checks the names of
            the files, and each one checks the sizes of its share.

    Raises:
        CheckpointError: here and in every method, for a checkpoint that is missing, torn, altered or unreadable; names
            the directory, the file and what to do. `NewerFormatError` if it is intact but too new.

    Example::

        with Reader(run / "checkpoints/step-00000500") as reader:
            shard = reader.read("model/blocks.0.weight", start=4096, count=4096)     # bytes of 4096 elements
            progress = reader.json("progress.json")
    """

    def __init__(self, path: Path, files: Files = LOCAL, part: tuple[int, int] = (0, 1)) -> None:
        self.path = path
        self._files = files
        self._sources: OrderedDict[str, Source] = OrderedDict()
        self._cache: OrderedDict[tuple[str, int], bytearray] = OrderedDict()
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
            _check_directory(path, self.manifest.files, files, MANIFEST_NAME, part=part)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open files and drop the cached blocks. The reader stays usable."""
        self._cache.clear()
        while self._sources:
            self._sources.popitem()[1].close()

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Check every block of every file, or one share of the blocks. All shares together read each block once."""
        total = sum(len(record.block_digests) for record in self.manifest.files)
        first, end, passed = total * share // shares, total * (share + 1) // shares, 0
        buffer = memoryview(bytearray(max((record.block_size for record in self.manifest.files), default=0)))
        for record in self.manifest.files:
            blocks = range(max(0, first - passed), min(len(record.block_digests), end - passed))
            for index in blocks:
                size = self._load_block(record, index, buffer)
                if index == 0 and record.name.endswith(".safetensors"):
                    self._check_header(record, buffer[:size])
            passed += len(record.block_digests)

    def _check_header(self, record: FileRecord, block: memoryview) -> None:
        """Check that the header of a tensor file, which other readers use, matches the manifest. `block`: the first block of the file."""
        end = record.chunks[0].offset if record.chunks else record.size
        wanted = {
            f"{chunk.tensor}|{chunk.start}": {
                "dtype": chunk.dtype,
                "shape": [chunk.count],
                "data_offsets": [chunk.offset - end, chunk.end - end],
            }
            for chunk in record.chunks
        }
        if not 8 < end <= HEADER_LIMIT + 8:
            raise self._damage(record.name, f"its data begins at byte {end}, which no header leads up to")
        head = bytearray(block[:end])
        if end > len(block):
            head = bytearray(end)
            self._fill(memoryview(head), record, 0, end)
        with self._blaming(record.name):
            (length,) = struct.unpack_from("<Q", head)
            if 8 + length != end:
                raise CheckpointError(f"its header claims {length} bytes, the manifest leaves it {end - 8}")
            header = canonical_json.loads(bytes(head[8:]))
            if isinstance(header, dict):
                header.pop("__metadata__", None)
            if header != wanted:
                raise CheckpointError("its header and the manifest do not say the same")

    def json(self, name: str) -> JsonValue:
        """Return the JSON tree in the file `name`, equal to the one given to `write_json`."""
        record = self._records.get(name)
        if record is None or not name.endswith(".json"):
            raise CheckpointError(
                f"checkpoint {self.path} holds no JSON file {name!r}{did_you_mean(name, self._records)}"
            )
        data = bytearray(record.size)
        self._fill(memoryview(data), record, 0, record.size)
        with self._blaming(name):
            return canonical_json.loads(bytes(data))

    def read(self, tensor: str, start: int = 0, count: int | None = None) -> bytearray:
        """Return elements ``[start, start + count)`` of the flattened tensor, as little-endian bytes of its own dtype.

        Args:
            tensor: its logical name, or an alias.
            start: the first element, in row-major order.
            count: the number of elements; None: all from `start` on.
        """
        record = self._tensor(tensor)
        count = record.num_elements - start if count is None else count
        self._check_range(tensor, start, count)
        out = bytearray(count * ITEM_SIZES[record.dtype])
        self.read_into(tensor, memoryview(out), start)
        return out

    def read_into(self, tensor: str, buffer: memoryview, start: int = 0) -> None:
        """Fill `buffer`, writable bytes, with the elements of a tensor from `start` on; see `read`. Whole blocks are read into it without a
        copy. After an error the content of `buffer` is not verified."""
        item = ITEM_SIZES[self._tensor(tensor).dtype]
        require(not len(buffer) % item, f"the size of the buffer for {tensor!r}", len(buffer), f"a multiple of {item}")
        end = start + len(buffer) // item
        self._check_range(tensor, start, end - start)
        for chunk, file in self._chunks[self.manifest.aliases.get(tensor, tensor)]:
            low, high = max(start, chunk.start), min(end, chunk.start + chunk.count)
            if low < high:
                first = chunk.offset + (low - chunk.start) * item
                self._fill(
                    buffer[(low - start) * item : (high - start) * item], file, first, first + (high - low) * item
                )

    def _tensor(self, tensor: str) -> TensorRecord:
        record = self.manifest.tensors.get(self.manifest.aliases.get(tensor, tensor))
        if record is None:
            names = [*self.manifest.tensors, *self.manifest.aliases]
            raise CheckpointError(f"checkpoint {self.path} holds no tensor {tensor!r}{did_you_mean(tensor, names)}")
        return record

    def _check_range(self, tensor: str, start: int, count: int) -> None:
        total = self._tensor(tensor).num_elements
        if not 0 <= start <= start + count <= total:
            raise CheckpointError(f"elements {start} to {start + count} of {tensor!r} were asked for, it has {total}")

    def _fill(self, out: memoryview, record: FileRecord, first: int, end: int) -> None:
        """Put bytes ``[first, end)`` of a file into `out`: whole blocks directly, other blocks through the cache."""
        size = record.block_size
        for index in range(first // size, -(-end // size)):
            begin, stop = index * size, min((index + 1) * size, record.size)
            if first <= begin and stop <= end:
                self._load_block(record, index, out[begin - first : stop - first])
            else:
                low, high = max(begin, first), min(stop, end)
                out[low - first : high - first] = memoryview(self._block(record, index))[low - begin : high - begin]

    def _block(self, record: FileRecord, index: int) -> bytearray:
        key = (record.name, index)
        if key in self._cache:
            self._cache.move_to_end(key)
        else:
            block = bytearray(record.block_size)
            del block[self._load_block(record, index, memoryview(block)) :]
            self._cache[key] = block
            if len(self._cache) > _KEPT:
                self._cache.popitem(last=False)
        return self._cache[key]

    def _open(self, name: str) -> Source:
        if name in self._sources:
            self._sources.move_to_end(name)
        else:
            if len(self._sources) == _KEPT:
                self._sources.popitem(last=False)[1].close()
            self._sources[name] = self._files.open(self.path / name)
        return self._sources[name]

    def _load_block(self, record: FileRecord, index: int, buffer: memoryview) -> int:
        """Read a block into the beginning of `buffer` and check its digest; returns its size."""
        with self._blaming(record.name):
            source = self._open(record.name)
            start = index * record.block_size
            wanted = buffer[: min(record.block_size, record.size - start)]
            count = source.read_into(start, wanted)
            if xxhash.xxh3_128_hexdigest(wanted[:count]) != record.block_digests[index]:
                raise CheckpointError(
                    f"block {index} (bytes {start} to {start + count}) is damaged: its digest does not match"
                )
        return count

    def _manifest_bytes(self) -> bytes:
        with self._files.open(self.path / MANIFEST_NAME) as source:
            size = self._files.size(self.path / MANIFEST_NAME)
            if size > canonical_json.MAXIMUM_BYTES:
                raise CheckpointError(f"{size} bytes, over the limit of {canonical_json.MAXIMUM_BYTES}")
            return source.read(0, size)

    @contextmanager
    def _blaming(self, name: str | None = None) -> Iterator[None]:
        """A context that adds the directory, the file and the remedy to every error raised inside it."""
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
