"""The conditions of every test: no GPU, one torch thread, nothing left behind, and the rank pools closed at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

# The tests mean the same on every machine: GPUs are hidden before torch looks for them, from the processes that tests start as well.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.pop("ACCELERATE_TORCH_DEVICE", None)

import psutil
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from fabricate.testing.ranks import close_pools, worker_process_ids

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # by a shell that started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ACCELERATE = (PartialState, AcceleratorState, GradientState)
_SETTLE_SECONDS = 60.0  # at most, for what is already ending: a joined pool's threads, a data loader's workers

_HOSTS = (
    os.geteuid() == 0
    and subprocess.run(["sh", "-c", "ip -Version && unshare --net true"], capture_output=True).returncode == 0
)
collect_ignore = [] if _HOSTS else ["distributed/test_hosts.py"]


def pytest_report_header() -> list[str]:
    """Says what this machine cannot run, so that it is no secret."""
    return [] if _HOSTS else ["not run here: test_hosts.py, which makes network namespaces (root and iproute2)"]


@pytest.fixture(scope="session", autouse=True)
def _session() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    close_pools()


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail a test that leaves threads, processes or process-wide settings changed; the settings are then put back."""
    threads, processes = _threads(), _processes()
    environment, handlers, directory = _environment(), _handlers(), os.getcwd()
    accelerate = [dict(kind._shared_state) for kind in _ACCELERATE]
    yield
    leaks = []
    if environment != (after := _environment()):
        names = sorted(name for name in environment | after if environment.get(name) != after.get(name))
        leaks.append(f"environment variables {names}")
        for name in names:
            os.environ.pop(name, None)
        os.environ.update({name: environment[name] for name in names if name in environment})
    if handlers != (now := _handlers()):
        leaks.append(f"handlers of {[number.name for number in _SIGNALS if now[number] != handlers[number]]}")
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if directory != os.getcwd():
        leaks.append(f"working directory {os.getcwd()!r}")
        os.chdir(directory)
    for kind, state in zip(_ACCELERATE, accelerate, strict=True):
        if state != kind._shared_state:
            leaks.append(f"accelerate's {kind.__name__}")
            kind._shared_state.clear()
            kind._shared_state.update(state)
    leaks += [f"thread {name!r}" for name in _left(_threads, threads)]
    leaks += [f"process {command!r}" for command in _left(_processes, processes)]
    if leaks:
        pytest.fail("left behind: " + ", ".join(leaks), pytrace=False)


def _environment() -> dict[str, str]:
    # pytest's own word for the running test, and what scikit-learn and DeepSpeed set when they are first imported.
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK") and not name.startswith("KMP_")
    }


def _handlers() -> dict[signal.Signals, object]:
    return {number: signal.getsignal(number) for number in _SIGNALS}


def _threads() -> dict[int, str]:
    return {id(thread): thread.name for thread in threading.enumerate() if not thread.daemon}


def _processes() -> dict[int, str]:
    """Child processes by id, without the rank pools and the helper that multiprocessing keeps for the session."""
    commands = {}
    for child in psutil.Process().children():
        try:
            if child.pid in worker_process_ids() or child.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "multiprocessing.resource_tracker" not in command:
            commands[child.pid] = command
    return commands


def _left(look: Callable[[], dict[int, str]], before: dict[int, str]) -> list[str]:
    """What `look` finds that was not there `before` and does not go away by itself."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (new := {key: name for key, name in look().items() if key not in before}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return list(new.values())
