"""A plugin in a process of its own: `python -m fabricate.testing._clean REPORT` with the question on stdin, as JSON.

Owns what importing, building and planning with a plugin may touch. `checks` asks and judges.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import fabricate
from fabricate import Trainer
from fabricate.testing.reference import Learner, Probe, Subject, random_digest, rows

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
"""Packages that cost seconds to import or print, and that a plugin imports inside the functions that need them."""
FLAGS = ("exposes_gradients", "lockstep", "shards_parameters", "several_optimizers", "distributed_types")


def main() -> None:
    """Answer one question and write the answer to the file named on the command line."""
    question = json.load(sys.stdin)
    subject, kind, sizes = Subject(**question["subject"]), question["kind"], question["world_sizes"]
    for name in fabricate.__all__:
        getattr(fabricate, name)
    learner = Learner()
    Trainer(max_steps=1, progress=False).plan(learner, rows(2), batch_size=1)  # what any plan imports is nobody's fault
    before = _state()
    answer: dict[str, Any] = {"error": "", "refused": {}, "accepted": [], "declared": {}}
    with tempfile.TemporaryFile("w+b") as output:
        with _captured(output.fileno()):
            try:
                for size in sizes:
                    _plan(subject, kind, size, learner, answer)
                bounds = [answer["declared"].get(name) for name in ("min_world_size", "max_world_size")]
                for size in filter(None, bounds if not answer["accepted"] else []):
                    _plan(subject, kind, size, learner, answer)
            except Exception:
                answer["error"] = traceback.format_exc()
        output.seek(0)
        answer["printed"] = output.read().decode(errors="replace")
    after = _state()
    answer["changed"] = {name: [str(before[name]), str(after[name])] for name in before if before[name] != after[name]}
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


def _plan(subject: Subject, kind: str, world_size: int, learner: Learner, answer: dict[str, Any]) -> None:
    """Import, build and plan, on rank 0 of `world_size` as a launcher would say it. No process group is opened for this."""
    before = dict(os.environ)
    made = subject.make()
    size = str(world_size)
    told = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    if world_size > 1:
        os.environ.update(told)
    probe = Probe()
    arguments: dict[str, Any] = {"strategy": made, "precision": probe} if kind == "strategy" else {}
    arguments |= {"precision": made} if kind == "precision" else {}
    arguments |= {"plugins": [made]} if kind == "plugin" else {}
    try:
        Trainer(max_steps=1, progress=False, **arguments).plan(learner, rows(2), batch_size=1)
        answer["accepted"].append(world_size)
    except fabricate.ConfigurationError as exc:
        answer["refused"][str(world_size)] = str(exc)
    finally:
        for name in told:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in told if name in before})
    if probe.strategy is not None:
        answer["declared"] = {
            name: getattr(probe.strategy, name) for name in (*FLAGS, "max_world_size", "min_world_size")
        }


def _state() -> dict[str, Any]:
    """What importing and building must leave alone."""
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
    """Everything that this process writes to stdout and stderr, C code included, goes to the file `target`."""
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


if __name__ == "__main__":
    main()
