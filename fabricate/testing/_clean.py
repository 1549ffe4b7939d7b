"""Examination of a plugin in a new process. Owns the list of what importing, building and planning must not change; `judge` starts it and
judges."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import fabricate
from fabricate import Precision, Strategy, Trainer
from fabricate.testing.reference import Learner, Subject, random_digest, rows

HEAVY = (
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "matplotlib",
    "pandas",
    "sklearn",
    "tensorboard",
    "tensorflow",
    "torchao",
    "torchvision",
    "transformer_engine",
    "transformers",
    "wandb",
)
"""Packages that take seconds to import, or print: a plugin should import them inside the functions that need them."""
FLAGS = (
    "exposes_gradients",
    "replicas_drift",
    "shards_parameters",
    "several_optimizers",
    "min_world_size",
    "max_world_size",
)


@dataclass
class Examined:
    """The result of an examination. `changed`: by name of what changed, its text before and after."""

    error: str = ""
    printed: str = ""
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    declared: dict[str, Any] = field(default_factory=dict)


class _Probe(Precision):
    """fp32; it records the strategy that a plan chose."""

    name = "fp32"

    def __init__(self) -> None:
        self.strategy: Strategy | None = None

    def check(self, device: torch.device, strategy: Strategy) -> Iterable[str]:
        self.strategy = strategy
        return ()


def examine(subject: Subject, kind: str, sizes: Sequence[int]) -> Examined:
    """Import `subject`, build it and make a plan with it for each number of ranks in `sizes`. Call it in a new process."""
    learner = Learner()
    # Imports that every plan makes must not count.
    Trainer(max_steps=1, progress=False).plan(learner, rows(2), batch_size=1)
    before, result = _state(), Examined()
    with tempfile.TemporaryFile("w+b") as output:
        with _captured(output.fileno()):
            try:
                for size in sizes:
                    _plan(subject, kind, size, learner, result)
                bounds = [result.declared.get(name) for name in ("min_world_size", "max_world_size")]
                for size in filter(None, bounds if not result.accepted else []):
                    _plan(subject, kind, size, learner, result)
            except Exception:
                result.error = traceback.format_exc()
        output.seek(0)
        result.printed = output.read().decode(errors="replace")
    after = _state()
    result.changed = {name: (str(before[name]), str(after[name])) for name in before if before[name] != after[name]}
    return result


def _plan(subject: Subject, kind: str, world_size: int, learner: Learner, result: Examined) -> None:
    """Import, build and plan, with a launcher's variables for rank 0 of `world_size`. No process group is opened."""
    before = dict(os.environ)
    instance = subject.make()
    size = str(world_size)
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    if world_size > 1:
        os.environ.update(environment)
    probe = _Probe()
    arguments: dict[str, Any] = {"strategy": instance, "precision": probe} if kind == "strategy" else {}
    arguments |= {"precision": instance} if kind == "precision" else {}
    arguments |= {"plugins": [instance]} if kind == "plugin" else {}
    try:
        Trainer(max_steps=1, progress=False, **arguments).plan(learner, rows(2), batch_size=1)
        result.accepted.append(world_size)
    except fabricate.ConfigurationError as exc:
        result.refused.append(str(exc))
    finally:
        for name in environment:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in environment if name in before})
    if probe.strategy is not None:
        result.declared = {name: getattr(probe.strategy, name) for name in FLAGS}


def _state() -> dict[str, Any]:
    """The state that importing and building must not change."""
    return {
        "environment variables": dict(os.environ),
        "the random generators": random_digest(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's default dtype": str(torch.get_default_dtype()),
        "running threads": [t.name for t in threading.enumerate()],
        "signal handlers": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "warning filters": len(warnings.filters),
        "the working directory": os.getcwd(),
        "CUDA's initialisation": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
        "the process group": torch.distributed.is_initialized(),
        "heavy packages": [name for name in HEAVY if name in sys.modules],
    }


@contextlib.contextmanager
def _captured(target: int) -> Iterator[None]:
    """A context that redirects stdout and stderr of this process, C code included, to the file descriptor `target`."""
    sys.stdout.flush()
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    for stream in kept:
        os.dup2(target, stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, copy in kept.items():
            os.dup2(copy, stream)
            os.close(copy)
