"""A kill at any time leaves a complete checkpoint, the old or the new one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fabricate.checkpoint.format.directory import clean, committed, prune
from fabricate.checkpoint.format.files import Files, Writer
from tests.support.checkpoints import content, expected, save


class Killed(BaseException):
    """Stands for the end of the process."""


class Mortal(Files):
    """Dies at operation `fatal`; a write is torn. What was done before stays."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.operations = 0

    def _live(self) -> None:
        self.operations += 1
        if self.operations >= self.fatal:
            raise Killed

    def create(self, path: Path) -> Writer:
        self._live()
        return super().create(path)

    def write(self, writer: Writer, data: bytes | bytearray | memoryview) -> None:
        if self.operations + 1 == self.fatal:
            os.write(writer.descriptor, memoryview(data)[: len(data) // 2])
        self._live()
        super().write(writer, data)

    def fsync(self, writer: Writer) -> None:
        self._live()
        super().fsync(writer)

    def close_writer(self, writer: Writer) -> None:
        super().close_writer(writer)  # a dead process has no open files
        self._live()

    def make_directory(self, path: Path) -> None:
        self._live()
        super().make_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._live()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._live()
        super().unlink(path)

    def remove_directory(self, path: Path) -> None:
        self._live()
        super().remove_directory(path)

    def fsync_directory(self, path: Path) -> None:
        self._live()
        super().fsync_directory(path)


def test_after_a_kill_at_any_operation_the_newest_checkpoint_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    """A save of step 2 that prunes step 1, killed at operation 1, 2, 3, ... until it gets through; then once more."""
    old = save(tmp_path / "old", 1)
    before, after = expected(0), expected(1)
    outcomes = []
    for fatal in range(1, 1000):
        root = tmp_path / f"killed-{fatal}"
        shutil.copytree(old, root / old.name)
        files = Mortal(fatal)
        try:
            save(root, 2, seed=1, files=files)
            prune([root / old.name], files)
            finished = True
        except Killed:
            finished = False
        checkpoints = committed(root)
        for path in checkpoints:
            assert content(path) == (before if path.name == old.name else after)
        outcomes.append([path.name for path in checkpoints])
        assert checkpoints, f"nothing is left after a kill at operation {fatal}"
        clean(root)
        assert sorted(path.name for path in root.iterdir()) == outcomes[-1]
        if outcomes[-1] == [old.name]:
            assert content(save(root, 2, seed=1)) == after
        shutil.rmtree(root)
        if finished:
            break
    assert finished
    assert len(outcomes) > 25
    assert [outcomes[0], outcomes[-1]] == [["step-00000001"], ["step-00000002"]]
    assert ["step-00000001", "step-00000002"] in outcomes


def test_every_file_is_durable_before_the_manifest_and_the_manifest_before_the_name(tmp_path: Path) -> None:
    operations: list[str] = []

    class Recording(Files):
        def create(self, path: Path) -> Writer:
            operations.append(f"create {path.name}")
            return super().create(path)

        def fsync(self, writer: Writer) -> None:
            operations.append(f"fsync {writer.path.name}")
            super().fsync(writer)

        def rename(self, source: Path, target: Path) -> None:
            operations.append("rename")
            super().rename(source, target)

        def fsync_directory(self, path: Path) -> None:
            operations.append(f"fsync {path.name}")
            super().fsync_directory(path)

    save(tmp_path / "run" / "checkpoints", files=Recording())
    assert operations == [
        f"fsync {tmp_path.name}",
        "fsync run",
        "create data-00000.safetensors",
        "fsync data-00000.safetensors",
        "create data-00001.safetensors",
        "fsync data-00001.safetensors",
        "create state.json",
        "fsync state.json",
        "create manifest.json",
        "fsync manifest.json",
        "fsync .tmp-step-00000500-9f3a",
        "rename",
        "fsync checkpoints",
    ]
