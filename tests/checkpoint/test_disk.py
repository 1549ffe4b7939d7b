"""Disks that are full, slow or read-only, and directories that another run uses: a clear error, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from fabricate import Callback, CheckpointError, FitResult, Trainer, TrainModule
from fabricate.checkpoint.format import lock
from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.format.files import Files, Writer

STEPS = 10


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 128), torch.nn.Linear(128, 128), torch.nn.Linear(128, 1)])

    def training_step(self, batch: Any) -> torch.Tensor:
        x = batch[0]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(run_dir: Path, *plugins: object, steps: int = STEPS, **options: Any) -> FitResult:
    settings = {"save_every": 2, "log_every": 3, "seed": 1, "keep": "all"}
    torch.manual_seed(11)
    trainer = Trainer(max_steps=steps, run_dir=run_dir, progress=False, plugins=plugins, **{**settings, **options})
    rows = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    return trainer.fit(Net(), rows, batch_size=4)


def content(path: Path) -> dict[str, Any]:
    with Reader(path) as reader:
        reader.verify()
        return {name: bytes(reader.read(name)) for name in reader.manifest.tensors}


def committed(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {int(path.name[5:]): content(path) for path in sorted((run_dir / "checkpoints").glob("step-*"))}


def leftovers(run_dir: Path) -> list[str]:
    return [path.name for path in (run_dir / "checkpoints").glob(".tmp-*")]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("straight")
    fit(run_dir)
    return committed(run_dir)


# ------------------------------------------------------------------------------------------------- full


class Full:
    """No byte goes into a checkpoint any more from the `after`-th write on, until `free` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int, number: int = errno.ENOSPC) -> None:
        self.written, self.full = 0, True
        write = Files.write

        def refusing(files: Files, writer: Writer, data: Any) -> None:
            self.written += 1
            if self.full and self.written > after:
                os.write(writer.descriptor, memoryview(data)[: len(data) // 2])  # some of it still fits
                raise OSError(number, os.strerror(number))
            write(files, writer, data)

        monkeypatch.setattr(Files, "write", refusing)


@pytest.mark.parametrize("save", ["sync", "async"])
@pytest.mark.parametrize("after", range(0, 15, 2))
def test_a_disk_that_is_full_at_any_write_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: dict[int, dict[str, Any]], after: int, save: str
) -> None:
    disk = Full(monkeypatch, after)
    before: dict[int, dict[str, Any]] = {}

    class Looks(Callback):
        def on_step(self, step: int) -> None:
            if step % 2 and (tmp_path / "checkpoints").exists():
                before.update(committed(tmp_path))

    with pytest.raises(
        CheckpointError, match=r"was not written: .*No space left.*\. The previous checkpoint is intact"
    ):
        fit(tmp_path, Looks(), save=save)
    checkpoints = committed(tmp_path)
    assert before.items() <= checkpoints.items()
    assert all(checkpoints[step] == straight[step] for step in checkpoints)
    assert leftovers(tmp_path) == []
    disk.full = False
    assert fit(tmp_path).stop_reason == "max_steps"
    assert committed(tmp_path)[STEPS] == straight[STEPS]


def test_one_refusal_is_survived_and_three_in_a_row_end_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Full(monkeypatch, 0, errno.EIO)

    class Frees(Callback):
        def on_step(self, step: int) -> None:
            disk.full = step < 5 or step > 6

    with pytest.raises(CheckpointError, match="Input/output error"):
        fit(tmp_path, Frees(), steps=20)
    assert list(committed(tmp_path)) == [6]
    assert [event["path"][-2:] for event in events(tmp_path, "save_failed")] == ["02", "04", "08", "10", "12"]
    assert [(event["step"], event["failed"]) for event in events(tmp_path, "retried")] == [(6, 2)]
    output = capsys.readouterr().err
    assert output.count("Training goes on; the next save that is due tries again") == 4


def test_the_free_space_is_asked_for_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[str] = []
    create = Files.create
    monkeypatch.setattr(Files, "create", lambda self, path: created.append(path.name) or create(self, path))
    monkeypatch.setattr(Files, "free_bytes", lambda self, path: 123_456)
    with pytest.raises(
        CheckpointError, match=r"has 123,456 bytes free, the checkpoint takes 1,\d\d\d,\d\d\d: free space"
    ):
        fit(tmp_path)
    assert created == []
    assert leftovers(tmp_path) == []


def small_disk(path: Path) -> bool:
    """Mount a file system of 1 MiB on `path`, if this process may."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], capture_output=True)
    return mounted.returncode == 0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for three checkpoints; without the right to mount one, a limit on the size of files instead."""
    import resource

    path = tmp_path / "small"
    mounted = small_disk(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield path
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if mounted:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("looks", [True, False], ids=["asked for space", "full in the middle"])
def test_a_small_disk_fills_up_and_the_run_goes_on_when_there_is_room(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: dict[int, dict[str, Any]], looks: bool
) -> None:
    import resource

    if not looks:
        monkeypatch.setattr(Files, "free_bytes", lambda self, path: 2**40)
    with pytest.raises(CheckpointError, match=r"The previous checkpoint is intact"):
        fit(small / "run", steps=30)
    checkpoints = committed(small / "run")
    assert all(checkpoints[step] == straight[step] for step in checkpoints)
    assert leftovers(small / "run") == []
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    shutil.copytree(small / "run", tmp_path / "larger")
    assert fit(tmp_path / "larger").stop_reason == "max_steps"
    assert committed(tmp_path / "larger")[STEPS] == straight[STEPS]


# ------------------------------------------------------------------------------------------------- read-only, slow


def in_child(work: Callable[[], object]) -> str:
    """What `work` raised in a forked child of an ordinary user, as text; empty if nothing."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        text = ""
        try:
            if os.geteuid() == 0:
                os.seteuid(65534)
            work()
        except BaseException as exc:
            text = f"{type(exc).__name__}: {exc}"
        os.write(there, text.encode()[:4000])
        os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as answers:
        text = answers.read().decode()
    os.waitpid(child, 0)
    return text


def test_a_directory_without_permission_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    for path in (tmp_path, *list(tmp_path.parents)[:3]):
        if path.stat().st_uid == os.getuid() and path != Path("/tmp"):
            path.chmod(0o755)
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o555)
    error = in_child(lambda: fit(tmp_path / "run"))
    assert error.startswith("CheckpointError: cannot use")
    assert "Permission denied; give this user write permission, or point run_dir elsewhere" in error
    error = in_child(lambda: fit(tmp_path / "run" / "deeper"))
    assert error.startswith("CheckpointError: cannot use")


def test_a_checkpoint_directory_that_becomes_read_only_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: dict[int, dict[str, Any]]
) -> None:
    make = Files.make_directory

    def refusing(self: Files, path: Path) -> None:
        if "step-00000006" in path.name or "step-00000008" in path.name:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        make(self, path)

    monkeypatch.setattr(Files, "make_directory", refusing)
    assert fit(tmp_path).stop_reason == "max_steps"
    checkpoints = committed(tmp_path)
    assert list(checkpoints) == [2, 4, 10]
    assert checkpoints[10] == straight[10]
    assert all("Read-only file system; give this user" in e["reason"] for e in events(tmp_path, "save_failed"))


@pytest.mark.parametrize("save", ["sync", "async"])
def test_a_slow_disk_only_takes_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, straight: dict[int, dict[str, Any]], save: str
) -> None:
    sync = Files.fsync

    def slow(self: Files, writer: Writer) -> None:
        time.sleep(0.05)
        sync(self, writer)

    monkeypatch.setattr(Files, "fsync", slow)
    fit(tmp_path, save=save)
    assert committed(tmp_path) == straight
    assert all(event["seconds"] >= 0.2 for event in events(tmp_path, "saved"))


# ------------------------------------------------------------------------------------------------- two runs


HOLDER = """
import os, sys, time
from pathlib import Path
from fabricate.checkpoint.format.lock import locked
with locked(Path(sys.argv[1])):
    child = os.fork()
    if not child:
        time.sleep(600)  # as a worker that loads data and has not noticed yet
        os._exit(0)
    print(child, flush=True)
    time.sleep(600)
"""


def test_a_second_run_in_the_directory_is_refused_until_the_first_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.2)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(CheckpointError, match=rf"is in use by another run .*\"process\": {holder.pid}"):
            fit(tmp_path)
        assert not (tmp_path / "checkpoints").exists()
        holder.kill()
        holder.wait()
        assert fit(tmp_path).stop_reason == "max_steps"
        assert not (tmp_path / "run.lock").exists()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
        os.kill(child, signal.SIGKILL)


def test_the_lock_is_free_after_a_fit_that_failed(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_step(self, step: int) -> None:
            raise KeyError("enough")

    for _ in range(2):
        with pytest.raises(KeyError):
            fit(tmp_path, Stops())
    assert not (tmp_path / "run.lock").exists()


def test_a_file_system_without_locks_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "lockf", refuse)
    fit(tmp_path)
    assert "this file system has no locks" in capsys.readouterr().err
