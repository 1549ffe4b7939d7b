"""Altered, truncated, swapped and forged checkpoints: every one has to be refused with a `CheckpointError`.

Altered bytes are as from a fault of a disk or a network. Forged manifests have the right digest and impossible content, which only an
attacker would write. A checkpoint that a mutation leaves unchanged by chance has to be read as before.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaigns.checkpoints.example import content, expected, save
from fabricate.checkpoint.format.files import Files, Source
from fabricate.errors import CheckpointError

STEP = 7
Folder = dict[str, bytes]


class Memory(Files):
    """A folder of files in memory, for reading."""

    def __init__(self, files: Folder) -> None:
        self.files = files

    def open(self, path: Path) -> Source:
        if path.name not in self.files:
            raise FileNotFoundError(2, "No such file or directory")
        return Source(self, path, -1)

    def read(self, source: Source, start: int, count: int) -> bytes:
        return self.files[source.path.name][start : start + count]

    def read_into(self, source: Source, start: int, buffer: memoryview) -> int:
        data = self.files[source.path.name][start : start + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def close_source(self, source: Source) -> None:
        """Nothing to do: no file is open."""

    def size(self, path: Path) -> int:
        if path.name not in self.files:
            raise FileNotFoundError(2, "No such file or directory")
        return len(self.files[path.name])

    def listdir(self, path: Path) -> list[str]:
        return sorted(self.files)


def load(path: Path) -> Folder:
    """A checkpoint directory as a `Folder`."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


# -- bytes


def _flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _remove(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, 600) :]


def _insert(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(1, 600)) + data[at:]


def _zero(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at, size = rng.randrange(len(data)), rng.choice([1, 8, 512, 4096])
    return data[:at] + bytes(len(data[at : at + size])) + data[at + size :]


def _splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at, size = rng.randrange(len(data)), rng.choice([1, 8, 512, 4096])
    piece = other[at : at + size]
    return data[:at] + piece + data[at + len(piece) :]


def _shift(rng: random.Random, data: bytes, other: bytes) -> bytes:
    first, second = sorted(rng.randrange(0, len(data) + 1, min(512, len(data))) for _ in range(2))
    return data[:first] + data[second:] + data[first:second]


def _append(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data + rng.choice([b"\0", b"\n", b" ", b"}", data[:4096], other])


def _header(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return struct.pack("<Q", rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1])) + data[8:]


BYTES: dict[str, Callable[[random.Random, bytes, bytes], bytes]] = {
    "bit flips": _flip, "cut": _cut, "removed": _remove, "inserted": _insert, "zeroed": _zero, "splice of another": _splice,
    "shifted": _shift, "appended": _append, "huge header": _header,
}  # fmt: skip

# -- files


def _missing(rng: random.Random, files: Folder, other: Folder) -> Folder:
    gone = rng.choice(sorted(files))
    return {name: data for name, data in files.items() if name != gone}


def _empty(rng: random.Random, files: Folder, other: Folder) -> Folder:
    return files | {rng.choice(sorted(files)): b""}


def _extra(rng: random.Random, files: Folder, other: Folder) -> Folder:
    name = rng.choice(["extra.json", "data.pkl", "model.pt", ".hidden", "state.json~", "Data-00000.safetensors"])
    return files | {name: rng.choice([b"", b"{}", b"\x80\x04."])}


def _of_another(rng: random.Random, files: Folder, other: Folder) -> Folder:
    names = rng.sample(sorted(files), rng.randrange(1, len(files)))
    return files | {name: other[name] for name in names}


def _exchanged(rng: random.Random, files: Folder, other: Folder) -> Folder:
    first, second = rng.sample(sorted(files), 2)
    return files | {first: files[second], second: files[first]}


FILES: dict[str, Callable[[random.Random, Folder, Folder], Folder]] = {
    "missing file": _missing, "empty file": _empty, "extra file": _extra, "files of another": _of_another,
    "exchanged files": _exchanged,
}  # fmt: skip

# -- manifests


def _seal(body: Any) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return ('{"manifest":' + text + ',"sha256":"' + hashlib.sha256(text.encode()).hexdigest() + '"}').encode()


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, child in children for place in _places(child, (*path, key)))]


def _free(path: tuple[Any, ...]) -> bool:
    """Whether any JSON is allowed at this place: values of the writer that are not checked."""
    return path[:1] in (("topology",), ("versions",), ("progress",)) and len(path) > 1


def _sizes(rng: random.Random, body: Any) -> None:
    """Make a number huge, negative or slightly different."""
    places = [p for p in _places(body) if p[:1] in (("files",), ("tensors",)) and type(_get(body, p)) is int]
    # In a file with one block, the size of a block has no effect.
    places = [p for p in places if p[-1] != "block_size" or len(body["files"][p[1]]["block_xxh3_128"]) > 1]
    place = rng.choice(places)
    value = _get(body, place)
    _set(body, place, rng.choice([-1, -value, value + 1, value - 1, 2 * value + 1, 2**31, 2**62, 2**63, 2**64, 10**30]))


def _gap(rng: random.Random, body: Any) -> None:
    """Remove a chunk, so that the bytes after it in its file belong to other tensors."""
    file = rng.choice([f for f in body["files"] if f["chunks"]])
    del file["chunks"][rng.randrange(len(file["chunks"]))]


def _overlap(rng: random.Random, body: Any) -> None:
    """Store a range twice, or change its start, its tensor or its length."""
    file = rng.choice([f for f in body["files"] if f["chunks"]])
    chunk = rng.choice(file["chunks"])
    way = rng.randrange(4)
    if way == 0:
        file["chunks"].insert(rng.randrange(len(file["chunks"]) + 1), list(chunk))
    elif way == 1:
        chunk[1] = max(0, chunk[1] + rng.choice([-1, 1, 2, 100]))
    elif way == 2:
        names = sorted(set(body["tensors"]) - {chunk[0]})
        chunk[0] = rng.choice(names)
    else:
        chunk[2] += rng.choice([-1, 1])


def _types(rng: random.Random, body: Any) -> None:
    """Change a dtype or shape, in one place or in all."""
    name = rng.choice(sorted(name for name, each in body["tensors"].items() if 0 not in each["shape"]))
    record = body["tensors"][name]
    size = math.prod(record["shape"])
    dtype = rng.choice([d for d in ("F64", "F32", "F16", "U8", "I64", "F4", "pickle") if d != record["dtype"]])
    shape = rng.choice([[size + 1], [2**40, 2**40], [*record["shape"], 2], [-1], [0]])
    which = rng.randrange(3)
    if which != 1:
        record["dtype"] = dtype
    if which != 0:
        record["shape"] = shape
    if rng.random() < 0.5:
        for file in body["files"]:
            for chunk in file["chunks"]:
                if chunk[0] == name:
                    chunk[3], chunk[4] = record["dtype"], record["shape"]


def _names(rng: random.Random, body: Any) -> None:
    """Give a file or a tensor a name that leads to another place, or the name of another one."""
    file = rng.choice(body["files"])
    bad = ["../state.json", "/etc/passwd", "a/../b.json", "manifest.json", ".x.json", "x.pkl", "", "a\0.json", "CON"]
    way = rng.randrange(3)
    if way == 0:
        file["name"] = rng.choice(bad)
    elif way == 1:
        file["name"] = rng.choice([f["name"] for f in body["files"] if f is not file]).upper()
    else:
        body["aliases"][rng.choice(sorted(body["tensors"]))] = "model/weight"


def _fields(rng: random.Random, body: Any) -> None:
    """Remove or add a field, or change its type."""
    place = rng.choice([p for p in _places(body) if p and not _free(p) and p[0] not in ("metrics", "aliases")])
    holder = _get(body, place[:-1])
    way = rng.randrange(3)
    if way == 0 and isinstance(holder, dict) and len(place) > 1 and place[0] == "files":
        holder["more"] = 1
    elif way == 1 and isinstance(holder, dict) and place[0] != "tensors":
        del holder[place[-1]]
    else:
        value = holder[place[-1]]
        kinds = [k for k in (None, True, 1.5, "text", [], {}, [[]]) if type(k) is not type(value)]
        holder[place[-1]] = rng.choice(kinds)


def _digests(rng: random.Random, body: Any) -> None:
    """Exchange or change digests, or make them too few or too many."""
    file = rng.choice(body["files"])
    digests = file["block_xxh3_128"]
    way = rng.randrange(4)
    if way == 0 and len(digests) > 1:
        digests[0], digests[-1] = digests[-1], digests[0]
    elif way == 1:
        digests.append(digests[0])
    elif way == 2:
        digests.pop()
    else:
        digests[rng.randrange(len(digests))] = rng.randbytes(16).hex()


def _get(tree: Any, place: tuple[Any, ...]) -> Any:
    for step in place:
        tree = tree[step]
    return tree


def _set(tree: Any, place: tuple[Any, ...], value: Any) -> None:
    _get(tree, place[:-1])[place[-1]] = value


FORGERIES: dict[str, Callable[[random.Random, Any], None]] = {
    "sizes": _sizes, "gaps": _gap, "overlaps": _overlap, "types": _types, "names": _names, "fields": _fields,
    "digests": _digests,
}  # fmt: skip


def _duplicate_key(rng: random.Random, text: bytes) -> bytes:
    """A manifest with a valid digest in which a key occurs twice."""
    body = json.loads(text)["manifest"]
    inner = json.dumps(body, sort_keys=True, separators=(",", ":"))
    key = rng.choice(sorted(body))
    inner = inner[:-1] + "," + json.dumps(key) + ":" + json.dumps(rng.choice([body[key], 1, {}])) + "}"
    return ('{"manifest":' + inner + ',"sha256":"' + hashlib.sha256(inner.encode()).hexdigest() + '"}').encode()


def mutate(rng: random.Random, files: Folder, other: Folder) -> tuple[str, Folder]:
    """The name and the result of one random mutation of `files`."""
    kind = rng.choice([*BYTES, *FILES, *FORGERIES, "duplicate key"])
    if kind in FILES:
        return kind, FILES[kind](rng, files, other)
    if kind in BYTES:
        name = rng.choice(sorted(files))
        return kind, files | {name: BYTES[kind](rng, files[name], other[name])}
    manifest = files["manifest.json"]
    if kind == "duplicate key":
        return kind, files | {"manifest.json": _duplicate_key(rng, manifest)}
    body = json.loads(manifest)["manifest"]
    FORGERIES[kind](rng, body)
    return kind, files | {"manifest.json": _seal(body)}


def run(number: int, seed: int = 0) -> dict[str, int]:
    """Make `number` mutations; return how many of each kind were refused. Raises AssertionError for one that was not."""
    good = expected(STEP)
    caught: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        first, second = (load(save(Path(folder, str(step)), step)) for step in (STEP, STEP + 1))
    for count in range(number):
        rng = random.Random(f"{seed} {count}")
        kind, files = mutate(rng, first, second)
        try:
            contents = content(Path(f"step-{STEP:08d}"), Memory(files))
        except CheckpointError:
            caught[kind] += 1
        else:
            assert files == first, f"mutation {count} ({kind}, seed {seed}) went unnoticed"
            assert contents == good, f"mutation {count} ({kind}, seed {seed}) changed what was read"
            caught["unchanged"] += 1
    return dict(caught)
