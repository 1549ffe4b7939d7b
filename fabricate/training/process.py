"""The process of a run: its one thread, random generators, deterministic algorithms and environment variables.

What is set here is undone when the run ends. Must not know: runs, engines.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch

from fabricate.configuration.arguments import Settings
from fabricate.configuration.resolve import Resolved
from fabricate.errors import FabricateError
from fabricate.seeding import rng_state, seed_everything, set_rng_state

_LATE = (
    "deterministic=True: this process has used CUDA before, and torch reads CUBLAS_WORKSPACE_CONFIG only at the first matrix "
    "product. If torch refuses matrix products, set CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts"
)
_PROCESS = threading.RLock()
"""Held by the thread that executes a run."""


def hold_process(stack: contextlib.ExitStack) -> None:
    """Raise an error if another thread executes a run; until `stack` ends, other threads get this error. A run inside a hook belongs to the
    same thread and is allowed."""
    if not _PROCESS.acquire(blocking=False):
        raise FabricateError(
            "a fit or an evaluation is running in another thread of this process. Both would share torch's random generators and "
            "Accelerate's state, so the results of both would be wrong. Run one after the other, or each in its own process"
        )
    stack.callback(_PROCESS.release)


def set_process_up(stack: contextlib.ExitStack, settings: Settings, resolved: Resolved, *, training: bool) -> list[str]:
    """Seed the generators and set torch's options of the process; `stack` undoes both. Returns notes for the plan."""
    stack.enter_context(environment_restored())
    # not in other cases: a search that draws random numbers would draw the same ones after every fit
    if settings.seed is not None or resolved.launch.world_size > 1:
        stack.callback(set_rng_state, rng_state())
    if settings.seed is not None:
        seed_everything(settings.seed)
    late = settings.deterministic and _chose_workspace(resolved.device)
    stack.enter_context(_determinism(settings.deterministic))
    if settings.detect_anomaly and training:
        stack.enter_context(torch.autograd.set_detect_anomaly(True))
    return [_LATE] if late else []


@contextlib.contextmanager
def environment_restored() -> Iterator[None]:
    """Remove the environment variables that torch sets for its compiler when the first optimizer is built."""
    before = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            if name.startswith(("TORCHINDUCTOR_", "TRITON_")):
                del os.environ[name]


def _chose_workspace(device: torch.device) -> bool:
    """Whether cuBLAS may already have chosen its workspace: torch reads the variable only once per process."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return device.type == "cuda" and used and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@contextlib.contextmanager
def _determinism(on: bool) -> Iterator[None]:
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # torch would fill every new tensor, although gathers and copies overwrite theirs at once
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        memory.fill_uninitialized_memory = filled
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
