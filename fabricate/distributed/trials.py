"""Work that every rank tries in a forked process, so that an error does no harm; above all, an error for lack of memory.

Owns the forked processes, the port at which they meet, and the exchange of results between ranks. Must not know what is tried.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from fabricate.errors import ConfigurationError, FabricateError, RankError, first_line
from fabricate.launch.ranks import Launch

NO_ROOM = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "STATUS_ALLOC_FAILED")
"""Words in the errors of torch and of the libraries below it when there is no memory left."""
_DONE, _NO_ROOM, _FAILED = "done", "no room", "failed"
_kept: list[Store] = []
"""The stores, kept until the process ends: other ranks still read from rank 0's store, and meet there again when the process group is
opened."""
_END_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of <linux/prctl.h>."""
_GRACE_SECONDS, _LOOK_SECONDS = 15.0, 0.05


def out_of_memory(exc: BaseException) -> bool:
    """Whether `exc` says that there is no memory left, on a device or on the host."""
    if isinstance(exc, torch.OutOfMemoryError | MemoryError) or (
        isinstance(exc, OSError) and exc.errno == errno.ENOMEM
    ):
        return True
    # A RankError repeats the error of the rank that failed first.
    return isinstance(exc, RuntimeError | RankError) and any(word in str(exc) for word in NO_ROOM)


class Trials:
    """Runs work in forked processes. All ranks call the methods, in the same order, before they open a process group.

    Raises `ConfigurationError` if a forked process could not compute: outside Linux, or after the first use of a GPU or of a process
    group."""

    def __init__(self, launch: Launch, timeout: datetime.timedelta) -> None:
        self._launch = launch
        self._timeout = timeout
        self._count = 0
        _check_can_fork()
        self._store: Store | None = None
        if launch.world_size > 1:
            with _environment(launch.environment):
                try:
                    self._store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
                except dist.DistError as exc:
                    raise RankError(
                        f"rank {launch.rank} on {socket.gethostname()} did not connect to the other ranks within {timeout}: "
                        f"{first_line(exc)}"
                    ) from exc
            self._store.set_timeout(timeout)
            _kept.append(self._store)

    def ask(self, work: Callable[[], Any]) -> Any:
        """The JSON value that `work` returns in a forked process of rank 0, on every rank; None if it raised."""
        kind, value = self._forked(work, {}, "") if self._launch.rank == 0 else (_DONE, None)
        return self._exchange(value if kind == _DONE else None)[0]

    def fits(self, work: Callable[[], None]) -> bool:
        """Whether `work` succeeds in a forked process of every rank; False if one of them runs out of memory. The forked processes have the
        same ranks, and meet at another port. Raises `FabricateError`, on every rank, if one fails for another reason."""
        port = self._exchange(_free_port() if self._launch.rank == 0 else None)[0]
        name = f"fabricate/trial/{self._count}"
        ended = self._exchange(self._forked(work, {"MASTER_PORT": str(port)}, name))
        kinds = [kind for kind, _ in ended]
        if _NO_ROOM in kinds:
            return False
        if _FAILED in kinds:
            rank = kinds.index(_FAILED)
            raise FabricateError(
                f"rank {rank} failed for another reason than lack of memory, so the search ends:\n{ended[rank][1]}"
            )
        return True

    def _exchange(self, mine: Any) -> list[Any]:
        """The JSON value of every rank, in rank order."""
        if self._store is None:
            return [mine]
        self._count += 1
        name = f"fabricate/trials/{self._count}"
        try:
            self._store.set(f"{name}/{self._launch.rank}", json.dumps(mine))
            return [json.loads(self._store.get(f"{name}/{rank}")) for rank in range(self._launch.world_size)]
        except dist.DistError as exc:
            raise RankError(f"rank {self._launch.rank} lost another rank during a trial: {first_line(exc)}") from exc

    def _forked(self, work: Callable[[], Any], variables: dict[str, str], name: str) -> tuple[str, Any]:
        """How `work` ends in a forked process, and its result, or the end of its output if it fails."""
        with tempfile.TemporaryDirectory(prefix="fabricate-trial-") as directory:
            arguments = (work, {**self._launch.environment, **variables}, Path(directory))
            process = multiprocessing.get_context("fork").Process(target=_run, args=arguments, name="fabricate-trial")
            process.start()
            try:
                ended = self._wait(process, name)
            finally:
                process.kill()
                process.join()
            kind, value = (
                _ended(Path(directory), process.exitcode or 0) if ended else (_FAILED, "it waited for another rank")
            )
            process.close()
        if kind != _DONE and name and self._store is not None:
            self._store.set(name, "")
        return kind, value

    def _wait(self, process: ForkProcess, name: str) -> bool:
        """Wait until `process` ends, but only some seconds after the process of another rank has failed. Returns whether it ended."""
        deadline = None
        while process.exitcode is None and (deadline is None or time.monotonic() < deadline):
            process.join(_LOOK_SECONDS)
            if deadline is None and name and self._store is not None and self._store.check([name]):
                deadline = time.monotonic() + _GRACE_SECONDS
        return process.exitcode is not None


def _check_can_fork() -> None:
    why = ""
    if not sys.platform.startswith("linux"):
        why = "processes are forked safely on Linux only"
    elif dist.is_initialized():
        why = "this process has a process group already, of an earlier fit or the script; run the fit with the BatchSizeFinder first"
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        why = "this process has already used a GPU, so a forked one cannot; leave the module on the CPU before the fit"
    if why:
        raise ConfigurationError(
            f"a batch size cannot be tried in a forked process: {why}. Or give a number, for instance batch_size=16"
        )


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _run(work: Callable[[], Any], variables: dict[str, str], directory: Path) -> None:
    """Run `work` in the forked process, and write into `directory` how it ended and what it printed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it, and ends this process
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    file = os.open(directory / "printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    with contextlib.suppress(OSError):
        # If the host runs out of memory, the kernel ends this process first.
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.environ.update(variables)
    if variables:
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # rank 0 of the trial opens a store at the port
    tempfile.tempdir = str(directory)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        ended = [_DONE, work()]
    except SystemExit:
        ended = [_DONE, None]
    except BaseException as exc:
        traceback.print_exc()
        ended = [_NO_ROOM if out_of_memory(exc) else _FAILED, ""]
    (directory / "ended").write_text(json.dumps(ended), encoding="utf-8")


def _ended(directory: Path, code: int) -> tuple[str, Any]:
    """The result that `_run` wrote. If the kernel ended the process for lack of memory, there is none, and this is `_NO_ROOM`."""
    file, text = directory / "ended", directory / "printed"
    printed = text.read_text(encoding="utf-8", errors="replace")[-4000:].strip() if text.exists() else ""
    if file.exists():
        kind, value = json.loads(file.read_text(encoding="utf-8"))
        return kind, value if kind == _DONE else printed
    no_room = code == -signal.SIGKILL or any(word in printed for word in NO_ROOM)
    return (_NO_ROOM if no_room else _FAILED), f"{printed}\n(its process ended with exit code {code})"
