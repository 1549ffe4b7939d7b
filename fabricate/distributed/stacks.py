"""The stacks of a process's threads and the progress of its fit, for another process on the same host. Linux only.

In a process that has called `here`, Python's faulthandler writes the stacks of all threads when SIGURG arrives. It does so in C, in the
signal handler, and therefore also while a thread waits in a collective, sleeps, or never returns to Python. It writes into an anonymous
memory file, which another process of the same user reads through /proc. Without a signal this costs nothing: there is no thread and no
port. Must not know: ranks, hooks, the loop; imports no torch.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import mmap
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

_SIGNAL = signal.SIGURG
"""A process without a handler ignores this signal, so it does no harm if it arrives too late."""
_MEMORY = "fabricate-stacks"
_PAGE_BYTES = 4096
"""The size of the first page of the memory file, in which a process writes its progress. The stacks follow."""
_THREAD, _REACHED = struct.Struct("3q"), struct.Struct("3q")
_SAMPLES, _SAMPLE_SECONDS = 10, 0.05
"""The number of samples that find whether a thread runs, and the time between two of them."""
_WRITE_SECONDS = 2.0
"""How long a process may take to write its stacks."""
_MOST_WORKERS = 16
_GONE, _STOPPED = "ZX", "Tt"
"""States of a process in proc(5)."""
_BLOCK = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LOADER, _SAVE = "/torch/utils/data/dataloader.py", "/fabricate/checkpoint/"


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Address:
    """The address of a process, for `ask`. `began`: its start time, in clock ticks of its host; `memory`: the descriptor of its memory
    file, -1 if it has none."""

    host: str
    process: int
    began: int
    memory: int


@dataclass(frozen=True)
class Reached:
    """The progress of a process. `running`: whether a fit or an evaluation is running; `update`: the current update, or the last one;
    `micro_step`: the number of micro-batches of its rank in this epoch before the current one; `batch`: the current batch of an evaluation,
    or -1."""

    running: bool
    update: int
    micro_step: int
    batch: int


@dataclass(frozen=True)
class Seen:
    """What is known of a process. Frames begin with the outermost call.

    state: "answers" (it reported itself), "runs", "waits", "stopped" (by a signal), "gone", "mute" (it writes no stacks: it waits for a
    disk or a device), "foreign" (of another user), "elsewhere" (on another host), "unknown"."""

    host: str
    process: int
    state: str
    frames: tuple[Frame, ...] = ()
    reached: Reached | None = None
    workers: tuple[Seen, ...] = ()
    """The worker processes of its DataLoader, if it is waiting for one of them."""
    save: tuple[Frame, ...] = ()
    """The frames of the thread that writes a checkpoint in the background."""

    def to_json(self) -> dict[str, Any]:
        """The JSON value for `from_json`."""
        return dataclasses.asdict(self) | {"workers": [worker.to_json() for worker in self.workers]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Seen:
        """The object from which `to_json` made `value`."""
        stacks = {name: tuple(Frame(*frame) for frame in value[name]) for name in ("frames", "save")}
        reached = None if value["reached"] is None else Reached(**value["reached"])
        workers = tuple(map(cls.from_json, value["workers"]))
        return cls(**value | stacks | {"reached": reached, "workers": workers})


class Here:
    """The address and the memory file of this process, from now until it ends."""

    def __init__(self) -> None:
        memory = _memory()
        self._page = mmap.mmap(memory, _PAGE_BYTES)  # with -1: memory that no other process sees
        status = _status(os.getpid())
        self.address = Address(socket.gethostname(), os.getpid(), status[1] if status else 0, memory)
        self._reached = memoryview(self._page)[_THREAD.size : _THREAD.size + _REACHED.size].cast("q")
        self._depth = 0
        self._note()

    def reached(self, update: int, micro_step: int, batch: int) -> None:
        """Set `Reached.update`, `micro_step` and `batch`."""
        noted = self._reached  # a Struct's pack_into costs 1.4 us more, in each micro-batch
        noted[0], noted[1], noted[2] = update, micro_step, batch

    def begun(self) -> None:
        """Record that a fit or an evaluation begins in this thread, perhaps inside another one."""
        self._depth += 1
        self._note()

    def ended(self) -> None:
        """Record that the fit or evaluation has ended. The next one is expected in the same thread."""
        self._depth -= 1
        self._note()

    def _note(self) -> None:
        _THREAD.pack_into(self._page, 0, self._depth, threading.get_ident(), threading.get_native_id())

    def after(self, exc: BaseException) -> Seen:
        """The `Seen` of this process, which is handling `exc`."""
        _, reached = _page(self._page[:])
        return Seen(self.address.host, self.address.process, "answers", _frames_of(exc), reached)


_here: list[Here] = []


def here() -> Here:
    """The `Here` of this process. The first call makes it; a forked process makes its own."""
    if not _here or _here[0].address.process != os.getpid():
        _here[:] = [Here()]
    return _here[0]


def _memory() -> int:
    """The descriptor of a memory file to which the stacks are written when the signal arrives; -1 if the system has no such files, or if
    the signal already has a handler."""
    if sys.platform != "linux" or signal.getsignal(_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
        return -1
    memory = os.memfd_create(_MEMORY)
    os.truncate(memory, _PAGE_BYTES)
    os.lseek(memory, _PAGE_BYTES, os.SEEK_SET)
    faulthandler.register(_SIGNAL, file=memory, all_threads=True)
    return memory


def _frames_of(exc: BaseException) -> tuple[Frame, ...]:
    """The frames from the outermost call to the place where `exc` was raised."""
    if exc.__traceback__ is None:
        return ()
    inner = list(traceback.walk_tb(exc.__traceback__))
    inner_frames = {id(frame) for frame, _ in inner}
    outer = [
        each for each in traceback.walk_stack(exc.__traceback__.tb_frame.f_back) if id(each[0]) not in inner_frames
    ]
    return tuple(
        Frame(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in [*reversed(outer), *inner]
    )


def ask(addresses: Sequence[Address]) -> list[Seen]:
    """What each process is doing. All processes of this host are examined at once: this takes half a second, and longer only if one of them
    writes nothing or waits for its data."""
    addressees = [_Asked(address) for address in addresses]
    for _ in range(_SAMPLES):
        time.sleep(_SAMPLE_SECONDS)
        for each in addressees:
            each.sample()
    return [each.seen() for each in addressees]


class _Asked:
    """A process that `ask` examines."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._reached: Reached | None = None
        self._ident = self._thread = self._size = 0
        self._running = 0
        try:
            self._state = self._send()
        except PermissionError:
            self._state = "foreign"
        except OSError:  # it has just ended
            self._state = "gone"

    def _send(self) -> str:
        """Send the signal. Returns "" if stacks will follow, else the state of the process."""
        address = self._address
        if address.host != socket.gethostname():
            return "elsewhere"
        status = _status(address.process)
        if status is None or status[1] != address.began or status[0] in _GONE:
            return "gone"
        if address.memory < 0:
            return "mute"
        if not _shows_itself(address.process, address.memory):
            return "gone"
        content = _read(address)
        self._size = len(content)
        (_, self._ident, self._thread), self._reached = _page(content)
        if status[0] in _STOPPED:
            return "stopped"
        os.kill(address.process, _SIGNAL)
        return ""

    def sample(self) -> None:
        """Count whether the thread of the fit runs, or is ready to run, at this moment."""
        if not self._state:
            status = _status(self._address.process, self._thread)
            self._running += status is not None and status[0] == "R"

    def seen(self) -> Seen:
        """What the process is doing, after all samples."""
        if self._state:
            return self._result(self._state)
        stacks = _stacks(self._address, self._size)
        if not stacks:
            letter, _ = _status(self._address.process) or ("X", 0)
            return self._result("gone" if letter in _GONE else "stopped" if letter in _STOPPED else "mute")
        frames = stacks.get(self._ident, ())
        state = "runs" if self._running >= _SAMPLES / 2 else "waits"
        loads = any(frame.file.endswith(_LOADER) for frame in frames)
        workers = tuple(_workers(self._address, self._ident)) if loads else ()
        others = (stack for ident, stack in stacks.items() if ident != self._ident)
        saves = (stack for stack in others if any(_SAVE in frame.file for frame in stack))
        return self._result(state, frames, workers, next(saves, ()))

    def _result(
        self,
        state: str,
        frames: tuple[Frame, ...] = (),
        workers: tuple[Seen, ...] = (),
        save: tuple[Frame, ...] = (),
    ) -> Seen:
        return Seen(self._address.host, self._address.process, state, frames, self._reached, workers, save)


def _workers(address: Address, ident: int) -> Iterator[Seen]:
    """The forked child processes of the process at `address`, one after the other; they write their stacks into its memory file. ident: its
    thread that forked them."""
    for process in _children(address.process)[:_MOST_WORKERS]:
        try:
            status = _status(process)
            if status is None or not _shows_itself(process, address.memory):
                continue
            if status[0] in _STOPPED:
                yield Seen(address.host, process, "stopped")
                continue
            size = len(_read(address))
            os.kill(process, _SIGNAL)
            stacks = _stacks(address, size)
            state = "runs" if (status := _status(process)) and status[0] == "R" else "waits"
            frames = stacks.get(ident, ())  # a forked process keeps the number of the thread that forked it
            yield Seen(address.host, process, state if stacks else "mute", frames)
        except OSError:  # it has just ended
            continue


def _stacks(address: Address, size: int) -> dict[int, tuple[Frame, ...]]:
    """The stacks, by thread, that a process writes after the first `size` bytes of its memory file; empty if it writes nothing."""
    deadline, before = time.monotonic() + _WRITE_SECONDS, -1
    while True:
        try:
            written = _read(address)[size:]
        except OSError:  # it has just ended
            return {}
        if len(written) == before or time.monotonic() > deadline:
            break
        before = len(written) or -1  # the text is complete when it no longer grows
        time.sleep(_SAMPLE_SECONDS)
    text = written.decode(errors="replace")
    stacks: dict[int, tuple[Frame, ...]] = {}
    begins = list(_BLOCK.finditer(text))
    ends = [*(block.start() for block in begins[1:]), len(text)]
    for block, end in zip(begins, ends, strict=False):
        lines = _FRAME.findall(text, block.end(), end)
        frames = tuple(Frame(file, int(line), function) for file, line, function in reversed(lines))
        stacks.setdefault(int(block[1], 16), frames)
    return stacks


def _page(content: bytes) -> tuple[tuple[int, int, int], Reached]:
    """From the first page: the number of nested fits that are running, Python's and the system's number of their thread, and the
    progress."""
    running, ident, thread = _THREAD.unpack_from(content, 0)
    return (running, ident, thread), Reached(bool(running), *_REACHED.unpack_from(content, _THREAD.size))


def _read(address: Address) -> bytes:
    return Path(f"/proc/{address.process}/fd/{address.memory}").read_bytes()


def _shows_itself(process: int, memory: int) -> bool:
    """Whether the descriptor `memory` of a process is a file that `_memory` made."""
    try:
        return os.readlink(f"/proc/{process}/fd/{memory}").startswith(f"/memfd:{_MEMORY}")
    except FileNotFoundError:
        return False


def _status(process: int, thread: int = 0) -> tuple[str, int] | None:
    """The state of a process or of one of its threads (a letter of proc(5)) and its start time; None if it does not exist."""
    try:
        text = Path(f"/proc/{process}/task/{thread}/stat" if thread else f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _children(process: int) -> list[int]:
    """The child processes of a process."""
    try:
        return sorted(child.pid for child in psutil.Process(process).children())
    except psutil.Error:
        return []
