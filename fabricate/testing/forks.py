"""Processes forked from one that has imported torch and fabricate already: a rank starts in milliseconds, not seconds.

Owns the server, `python -m fabricate.testing.forks FD`, which imports, forks and reaps, and `Fork`, the handle of one
process. It must not know what a job is: what comes through a forked process's pipe is `_worker`'s affair. POSIX only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from typing import NoReturn

_REQUEST = struct.Struct("<cii")  # "f" fork (with three descriptors) or "k" kill; process id; signal
_NUMBER = struct.Struct("<i")
_IMPORTED = (
    "accelerate",
    "torch._dynamo",  # torch imports it when a process builds its first optimizer
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "fabricate.testing._clean",
    "fabricate.testing._worker",
)


class Fork:
    """A process that runs `_worker.main` with one end of a pipe, and prints into a file."""

    def __init__(self, connection: int, output: int) -> None:
        """connection, output: file descriptors, which the caller may close afterwards. Starts the server if there is none."""
        self._status, theirs = os.pipe()
        self._code: int | None = None
        try:
            _Server.running().ask(b"f", 0, 0, [connection, output, theirs])
        finally:
            os.close(theirs)
        self.pid = self._number()

    def _number(self) -> int:
        data = os.read(self._status, _NUMBER.size)
        return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else -signal.SIGKILL  # the server is gone

    def wait(self, seconds: float = 0.0) -> int | None:
        """The exit code (minus the signal's number for a signal), or None while it runs still after `seconds`."""
        if self._code is None and select.select([self._status], [], [], seconds)[0]:
            self._code = self._number()
            os.close(self._status)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process runs still."""
        if self.wait() is None:
            _Server.running().ask(b"k", self.pid, number)

    def kill(self) -> None:
        """End it at once, and wait for that."""
        self.send_signal(signal.SIGKILL)
        while self.wait(60.0) is None:
            pass


class _Server:
    """The process that forks, as the one that asks sees it."""

    _present: _Server | None = None

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        # What can be imported here can be imported there, installed or not.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", __name__, str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    @classmethod
    def running(cls) -> _Server:
        if cls._present is not None and cls._present.process.poll() is not None:
            cls.stop()
        cls._present = cls._present or cls()
        return cls._present

    def ask(self, what: bytes, pid: int, number: int, descriptors: list[int] | None = None) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died just now: the status pipes say so
            socket.send_fds(self._socket, [_REQUEST.pack(what, pid, number)], descriptors or [])

    @classmethod
    def stop(cls) -> None:
        if cls._present is not None:
            cls._present._socket.close()  # it ends with its processes
            cls._present.process.wait()
            cls._present = None


def stop_server() -> None:
    """End the server and every process that it forked. The next `Fork` starts a new one."""
    _Server.stop()


def server_process_id() -> int | None:
    """The server's process id, if there is one."""
    return _Server._present.process.pid if _Server._present is not None else None


# ------------------------------------------------------------------------------------------------------------ in the server


def _serve(asked: socket.socket) -> None:
    """Fork and kill as asked until the other end closes; then end what was forked."""
    import importlib

    for name in _IMPORTED:
        importlib.import_module(name)
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the ranks; this process ends with the one that asks
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    running: dict[int, int] = {}
    """The status pipe of each process, by id."""
    while True:
        ready, _, _ = select.select([asked, wake], [], [])
        if wake in ready:
            wake.recv(4096)
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = running.pop(ended[0])
            with contextlib.suppress(BrokenPipeError):
                os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(ended[1])))
            os.close(status)
        if asked not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(asked, _REQUEST.size, 3)
        if not message:
            break
        what, pid, number = _REQUEST.unpack(message)
        if what == b"k":
            if pid in running:  # not reaped yet, so that the number is still this process's
                os.kill(pid, number)
            continue
        connection, output, status = descriptors
        pid = os.fork()
        if pid == 0:
            for other in (asked, wake, woken):
                other.close()
            for pipe in (*running.values(), status):
                os.close(pipe)
            _become_worker(connection, output)
        for descriptor in (connection, output):
            os.close(descriptor)
        running[pid] = status
        os.write(status, _NUMBER.pack(pid))
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # taking torch down in order takes long


def _become_worker(connection: int, output: int) -> NoReturn:
    """What a fork inherits and must not share with its siblings is made its own; then it answers jobs."""
    import random

    import numpy

    from fabricate.testing import _worker

    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        random.seed()
        numpy.random.seed()
        _worker.main(connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # not the server's exit handlers


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
