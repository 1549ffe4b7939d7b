"""A disk that can be stopped after any operation: operations are recorded, and replayed to a state that may be found after a crash.

There are two kinds of crash. A killed process leaves everything that it did, the last write perhaps in part. A stopped machine leaves what
was made durable and any part of the rest: some of the unsynced bytes of each file, and the changes of each directory up to some point. Only
fsync of a file makes its bytes durable, and only fsync of a directory its names.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fabricate.checkpoint.format.files import Files, Writer

_PAGE = 512


@dataclass
class File:
    """The bytes of a file for the process, the durable bytes, and the writes that are not durable."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def after_stop(self, rng: random.Random | None) -> bytes:
        """Random content after the machine stopped; with rng=None, only what is durable."""
        data = bytearray(self.durable)
        if rng is None:
            return bytes(data)
        for start, piece in self.pending:
            way = rng.randrange(4)
            if way == 0:
                continue
            if way == 1:
                piece = piece[: rng.randrange(len(piece) + 1)]
            data.extend(bytes(max(0, start + len(piece) - len(data))))
            for page in range(0, len(piece), _PAGE):
                if way != 2 or rng.random() < 0.5:
                    data[start + page : start + page + _PAGE] = piece[page : page + _PAGE]
        return bytes(data)


@dataclass
class Directory:
    """The names in a directory for the process, the durable names, and the changes that are not durable: (old name or None, new name or
    None, node)."""

    names: dict[str, File | Directory] = field(default_factory=dict)
    durable: dict[str, File | Directory] = field(default_factory=dict)
    pending: list[tuple[str | None, str | None, File | Directory]] = field(default_factory=list)

    def change(self, old: str | None, new: str | None, node: File | Directory) -> None:
        _apply(self.names, (old, new, node))
        self.pending.append((old, new, node))

    def sync(self) -> None:
        self.durable, self.pending = dict(self.names), []

    def after_stop(self, rng: random.Random | None) -> dict[str, File | Directory]:
        names = dict(self.durable)
        count = 0 if rng is None else rng.choice([len(self.pending), rng.randrange(len(self.pending) + 1)])
        for change in self.pending[:count]:
            _apply(names, change)
        return names


def _apply(names: dict[str, File | Directory], change: tuple[str | None, str | None, File | Directory]) -> None:
    old, new, node = change
    if old is not None:
        names.pop(old, None)
    if new is not None:
        names[new] = node


Operation = tuple[str, Path, Path | bytes | None]


class Recording(Files):
    """The local file system, which records every change below `root` in `operations`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self.marks: dict[str, int] = {}

    def mark(self, name: str) -> None:
        """Store the number of operations so far under `name`."""
        self.marks[name] = len(self.operations)

    def _note(self, kind: str, path: Path, more: Path | bytes | None = None) -> None:
        if path == self.root or self.root in path.parents:
            self.operations.append((kind, path.relative_to(self.root), more))

    def create(self, path: Path) -> Writer:
        writer = super().create(path)
        self._note("create", path)
        return writer

    def write(self, writer: Writer, data: bytes | bytearray | memoryview) -> None:
        super().write(writer, data)
        self._note("write", writer.path, bytes(data))

    def fsync(self, writer: Writer) -> None:
        super().fsync(writer)
        self._note("fsync", writer.path)

    def make_directory(self, path: Path) -> None:
        there = path.is_dir()
        super().make_directory(path)
        if not there:
            self._note("make", path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._note("rename", source, target.relative_to(self.root))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._note("remove", path)

    def remove_directory(self, path: Path) -> None:
        super().remove_directory(path)
        self._note("remove", path)

    def fsync_directory(self, path: Path) -> None:
        super().fsync_directory(path)
        self._note("sync", path)


class Hasty(Files):
    """The local file system without fsync, for files that need not be durable."""

    def fsync(self, writer: Writer) -> None:
        """Left out."""

    def fsync_directory(self, path: Path) -> None:
        """Left out."""


class Disk:
    """A tree of files in memory, to which recorded operations are applied one by one."""

    def __init__(self, root: Path | None = None) -> None:
        self.top = _load(root) if root is not None else Directory()

    def apply(self, operation: Operation) -> None:
        kind, path, more = operation
        if kind == "sync":
            node = self._at(path)
            assert isinstance(node, Directory)
            node.sync()
            return
        parent = self._at(path.parent)
        assert isinstance(parent, Directory)
        if kind in ("create", "make"):
            parent.change(None, path.name, File() if kind == "create" else Directory())
        elif kind == "remove":
            parent.change(path.name, None, parent.names[path.name])
        elif kind == "rename":
            assert isinstance(more, Path)
            assert more.parent == path.parent
            parent.change(path.name, more.name, parent.names[path.name])
        else:
            file = parent.names[path.name]
            assert isinstance(file, File)
            if kind == "fsync":
                file.durable, file.pending = bytes(file.data), []
            else:
                assert isinstance(more, bytes)
                file.pending.append((len(file.data), more))
                file.data += more

    def _at(self, path: Path) -> File | Directory:
        node: File | Directory = self.top
        for part in path.parts:
            assert isinstance(node, Directory)
            node = node.names[part]
        return node

    def after_a_kill(self) -> dict[Path, bytes | None]:
        """The content after a kill, path to bytes, with all operations; directories as None."""
        return dict(_walk(self.top, Path(), lambda node: node.names, lambda file: bytes(file.data)))

    def after_a_stop(self, rng: random.Random | None) -> dict[Path, bytes | None]:
        """A random content after a stop of the machine; with rng=None, only what is durable."""
        return dict(_walk(self.top, Path(), lambda node: node.after_stop(rng), lambda file: file.after_stop(rng)))


def _walk(node: Directory, path: Path, names: object, data: object) -> Iterator[tuple[Path, bytes | None]]:
    for name, child in names(node).items():  # type: ignore[operator]
        if isinstance(child, Directory):
            yield path / name, None
            yield from _walk(child, path / name, names, data)
        else:
            yield path / name, data(child)  # type: ignore[operator]


def _load(path: Path) -> Directory:
    names: dict[str, File | Directory] = {}
    for child in sorted(path.iterdir()):
        if child.is_dir():
            names[child.name] = _load(child)
        else:
            data = child.read_bytes()
            names[child.name] = File(bytearray(data), data)
    return Directory(names, dict(names))


def put(state: dict[Path, bytes | None], root: Path) -> None:
    """Write `state` into the empty directory `root`."""
    for path, data in state.items():
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)
