"""`run_ranks`: run a function on several gloo ranks of this machine, in processes that are kept for later calls.

Owns the worker processes, the messages to them, and the report of their failures. It must not know the framework: what a job does with its
rank (which group it opens, which module it trains) is up to the job. POSIX only.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import math
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]

from fabricate import ConfigurationError, RankError
from fabricate.testing import _worker

_Result = TypeVar("_Result")

_START_SECONDS = 120.0  # time to import torch on a busy machine
# Time after a failure in which the others may fail too. Then the failed rank is killed, as its script would end.
_ALIKE_SECONDS = 0.5
_GRACE_SECONDS = 3.0  # time for the others after that; a closed connection ends most collectives
_DUMP_SECONDS = 2.0  # time to write the stacks of all threads
_POLL_SECONDS = 0.1
_PORTS = range(10_000, 30_000)  # below the ephemeral ports of Linux (from 32768) and macOS (from 49152)
_OUTPUT_BYTES = 20_000  # the end of a failed rank's output that the message shows

# A server process imports these modules once. It forks the ranks, which then start in milliseconds.
_forks = multiprocessing.get_context("forkserver")
_IMPORTED = [
    "accelerate",
    "torch._dynamo",  # torch imports it when a process builds its first optimizer
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "fabricate.testing._clean",
    "fabricate.testing._worker",
]

_pools: dict[int, _Pool] = {}
_given: set[int] = set()


def run_ranks(
    function: Callable[..., _Result], world_size: int, *args: Any, timeout: float = 120.0, **kwargs: Any
) -> list[_Result]:
    """The results of ``function(*args, **kwargs)`` run on `world_size` ranks at once, in the order of the ranks.

    `function` is defined at the top level of a file; `args`, `kwargs` and the results are pickled. Every rank sees this
    process's environment (without ``ACCELERATE_USE_CPU``) and working directory plus ``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``; it has one thread and no accelerator.
    Imported modules and a process group that a job opens stay for the jobs after it: only the first call for a world
    size waits for processes to start. `timeout` is in seconds and does not count that start. One caller at a time.

    Raises ConfigurationError for a function that a rank could not import, and RankError when a rank raises, dies or
    does not finish in time: the message holds the ranks' numbers, tracebacks, what they printed and, for ranks that
    hung, the stacks of all threads. Ranks that hang are killed, and the next call starts new ones.

        def rank_plus(number):
            return int(os.environ["RANK"]) + number

        assert run_ranks(rank_plus, 2, 10) == [10, 11]
    """
    if world_size < 1:
        raise ConfigurationError(f"run_ranks(world_size={world_size!r}): give the number of ranks, 1 or more")
    if timeout <= 0:
        raise ConfigurationError(f"run_ranks(timeout={timeout!r}): give the seconds the ranks may take, more than 0")
    job = _job(function, args, kwargs)
    pool = _pools.get(world_size)
    if pool is not None and not pool.alive():
        _discard(pool)
        pool = None
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        return pool.run(job, timeout)
    except BaseException:  # KeyboardInterrupt and a test's time limit too: the ranks are still busy then
        if not pool.reusable:
            _discard(pool)
        raise


def run_alone(function: Callable[..., _Result], *args: Any, timeout: float = 120.0) -> _Result:
    """The result of ``function(*args)``, run like ``run_ranks(function, 1, ...)`` but in a new process that ends afterwards."""
    pool = _Pool(1)
    try:
        result: _Result = pool.run(_job(function, args, {}), timeout)[0]
        return result
    finally:
        pool.close()


def close_pools() -> None:
    """End every worker process of `run_ranks`. Also runs at exit; a later `run_ranks` starts new ones."""
    for pool in list(_pools.values()):
        _discard(pool)
    for server in _servers():
        server.kill()
        # multiprocessing reaps the server, and starts another when needed.
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


atexit.register(close_pools)


def free_port() -> int:
    """A free port of this machine, for ranks that open it a moment later. Each call returns a different port.

    Ephemeral ports are avoided: before the ranks open the port, the system could assign it to another program.
    """
    for port in random.Random().sample(_PORTS, 1000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port
    raise RankError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free on 127.0.0.1, where ranks would meet")


def worker_process_ids() -> set[int]:
    """The process ids of all workers and of the server that forks them, for a check that finds leaked processes."""
    workers = {worker.process.pid or 0 for pool in _pools.values() for worker in pool.workers}
    return workers | {server.pid for server in _servers()}


def _servers() -> list[psutil.Process]:
    """The fork server of multiprocessing, if it runs. It is found by its command line, because multiprocessing keeps its id private."""
    running = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("multiprocessing.forkserver" in word for word in child.cmdline()):
                running.append(child)
    return running


def _job(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    # Workers can import everything that this process can, installed or not.
    path = [os.path.abspath(entry) for entry in sys.path]
    arguments = pickle.dumps((args, kwargs))
    return {**_address(function), "arguments": arguments, "directory": os.getcwd(), "path": path}


def _discard(pool: _Pool) -> None:
    del _pools[len(pool.workers)]
    pool.close()


def _address(function: Callable[..., Any]) -> dict[str, str]:
    """The place of `function` for a worker: the file, the module's name in this process, and the qualified name."""
    qualname: str = getattr(function, "__qualname__", repr(function))
    if not inspect.isfunction(function) or "<" in qualname:
        raise ConfigurationError(
            f"run_ranks(function={qualname}): a rank imports the function from its file, so it has to be a def at the "
            "top level of a module; move it there and pass what it closes over as arguments"
        )
    file = inspect.getsourcefile(function)
    if file is None:
        raise ConfigurationError(f"run_ranks(function={qualname}): it has no source file that a rank could import")
    return {"module": function.__module__, "qualname": qualname, "file": os.path.abspath(file)}


class _Pool:
    """`world_size` workers that run one job at a time."""

    def __init__(self, world_size: int) -> None:
        self._port = free_port()
        self._started = False
        self.workers = [_Worker() for _ in range(world_size)]
        self.reusable = False  # true between jobs if all ranks are known to be idle and in step

    def alive(self) -> bool:
        return all(worker.process.is_alive() for worker in self.workers)

    def run(self, job: dict[str, Any], timeout: float) -> list[Any]:
        self.reusable = False
        if not self._started:
            outcome = _collect(self.workers, _START_SECONDS)
            if len(outcome.results) < len(self.workers):
                raise outcome.error(self.workers, f"did not start in {_START_SECONDS:g} s")
            self._started = True
        for rank, worker in enumerate(self.workers):
            # `end_after_seconds` matters only if this process is killed: then nothing else ends a hanging rank.
            environment = self._environment(rank, len(self.workers))
            worker.send({**job, "environment": environment, "end_after_seconds": timeout + 60})
        outcome = _collect(self.workers, timeout)
        # If all ranks failed with the same exception, they are still in step. If only some failed, their next
        # collectives would not match.
        kinds = [failure.kind for failure in outcome.failures.values()]
        self.reusable = not outcome.hanging and kinds in ([], kinds[:1] * len(self.workers))
        if len(outcome.results) < len(self.workers):
            late = f"did not finish in {timeout:g} s: does a hook run a collective on some ranks only?"
            raise outcome.error(self.workers, late)
        return [outcome.results[rank] for rank in range(len(self.workers))]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def _environment(self, rank: int, world_size: int) -> dict[str, str]:
        environment = dict(os.environ)
        environment.pop("ACCELERATE_USE_CPU", None)
        return environment | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }


class _Worker:
    """One process, the pipe to it, and the file for its output."""

    def __init__(self) -> None:
        self.connection, remote = _forks.Pipe()
        self.output = tempfile.NamedTemporaryFile("a+b")  # noqa: SIM115 - lives as long as the process
        self.process = _forks.Process(target=_worker.main, args=(remote, self.output.name))
        with remote, _environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""):
            _forks.set_forkserver_preload(_IMPORTED)
            self.process.start()  # the first time, this also starts the server, which inherits the environment

    def send(self, job: dict[str, Any]) -> None:
        self.output.truncate(0)
        with contextlib.suppress(BrokenPipeError):  # the process just died, which _collect reports
            # connection.send(job) would pass tensors as handles (torch's change) into memory that this process may
            # free.
            self.connection.send_bytes(pickle.dumps(job))

    def end_with_stacks(self) -> None:
        """Kill the process after it wrote the stacks of its threads to its output."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGABRT)
        self.process.join(_DUMP_SECONDS)
        self.kill()  # a stopped process does not receive SIGABRT

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        self.process.kill()
        self.process.join()

    def printed(self) -> str:
        self.output.seek(max(0, os.fstat(self.output.fileno()).st_size - _OUTPUT_BYTES))
        text = self.output.read().decode(errors="replace")
        # Remove faulthandler's text around the stacks: the signal, which the pool sent, and the list of extensions.
        return text.replace("Fatal Python error: Aborted\n\n", "").partition("\nExtension modules: ")[0].strip()

    def close(self) -> None:
        self.kill()
        self.connection.close()
        self.output.close()


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """A context with environment variables for the processes that start in it."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass
class _Failure:
    kind: str  # the type of the exception, or how the process ended
    summary: str
    traceback: str


@dataclass
class _Outcome:
    """The results and failures of the ranks, by rank."""

    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, _Failure] = field(default_factory=dict)  # in order of arrival: the first is probably the cause
    hanging: list[int] = field(default_factory=list)

    def error(self, workers: list[_Worker], late: str) -> RankError:
        """One error for all ranks without a result. `late`: the text about hanging ranks."""
        lines = [f"rank {rank} {failure.summary}" for rank, failure in self.failures.items()]
        if self.hanging and self.failures:
            late = f"were still running {_GRACE_SECONDS:g} s later and were ended"
        if self.hanging:
            lines.append(f"ranks {self.hanging} {late}")
        for rank in [*self.failures, *self.hanging]:
            if rank in self.failures and self.failures[rank].traceback:
                lines.append(f"\n--- rank {rank}: traceback ---\n{self.failures[rank].traceback.strip()}")
            if printed := workers[rank].printed():
                lines.append(f"\n--- rank {rank}: output{' and stacks' * (rank in self.hanging)} ---\n{printed}")
        return RankError("\n".join(lines))


def _collect(workers: list[_Worker], seconds: float) -> _Outcome:
    """Wait for one result of each worker; kill workers that hang. After a failure, wait only a short time for the others."""
    outcome = _Outcome()
    waiting = dict(enumerate(workers))
    deadline, alike = time.monotonic() + seconds, math.inf
    while waiting and (left := deadline - time.monotonic()) > 0:
        if time.monotonic() > alike:
            for rank in outcome.failures:
                workers[rank].kill()
        readable = wait([worker.connection for worker in waiting.values()], min(left, _POLL_SECONDS))
        for rank, worker in list(waiting.items()):
            # A dead worker's pipe can stay open, because processes that its job started may hold the other end.
            if worker.connection not in readable and worker.process.is_alive():
                continue
            del waiting[rank]
            answer = _receive(worker)
            if isinstance(answer, _Failure):
                outcome.failures[rank] = answer
                alike = min(alike, time.monotonic() + _ALIKE_SECONDS)
                deadline = min(deadline, alike + _GRACE_SECONDS)
            else:
                outcome.results[rank] = answer
    for rank, worker in waiting.items():
        worker.end_with_stacks()
        outcome.hanging.append(rank)
    return outcome


def _receive(worker: _Worker) -> Any:
    """The result of the worker, or a _Failure."""
    message = None
    # These errors mean that the pipe was closed, possibly inside a message: the process is about to end.
    with contextlib.suppress(EOFError, OSError):
        if worker.connection.poll():
            message = worker.connection.recv_bytes()
    if message is not None:
        returned, answer = pickle.loads(message)
        return answer if returned else _Failure(*answer)
    worker.process.join(_GRACE_SECONDS)
    code = worker.process.exitcode
    if code is None:  # it closed its pipe but is alive
        worker.kill()
        code = -signal.SIGKILL
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return _Failure(how, f"died: {how}", traceback="")
