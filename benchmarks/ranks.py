"""The overhead on several ranks over torch's DistributedDataParallel and fully_shard by hand: all loops of a case alternate in one process
group, on this machine's ranks.

    python -m benchmarks.ranks                       # every case, two ranks
    python -m benchmarks.ranks quiet --rounds 21 --nproc 2

The figures are milliseconds of wall-clock time, because a rank that waits for another uses no CPU time: run it on an idle machine with a
core for each rank. The rows of a micro-batch are per rank. After every update, fabricate's ranks agree whether to log, validate, save or
stop.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import io
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.loops import forget_accelerator, work_model
from benchmarks.overhead import hold_heap
from benchmarks.scaling import torchrun
from benchmarks.tables import table
from benchmarks.works import WORKS, Clock, Work

ROUNDS = {"quiet": 11, "gpt": 7, "gpt-fsdp": 7}
"""The rounds of each case: the work, and after a dash the strategy."""


class Wall(Clock):
    """A clock of wall-clock time instead of CPU time."""

    def stamp(self) -> None:
        self.stamps.append(time.perf_counter_ns())


def by_hand(work: Work, model: torch.nn.Module) -> None:
    """Train as in torch's documentation."""
    optimizer = work.optimizer(model)
    rows = work.dataset()
    model.train()
    for x, y in DataLoader(rows, batch_size=work.batch_size, sampler=DistributedSampler(rows, shuffle=False)):
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def replicated(work: Work, clock: Clock) -> torch.nn.Module:
    """Train replicas by hand."""
    model = work.build(clock)
    by_hand(work, torch.nn.parallel.DistributedDataParallel(model))
    return model


def sharded(work: Work, clock: Clock) -> torch.nn.Module:
    """Train shards by hand: each block, then the rest."""
    model: Any = work.build(clock)
    for block in model.gpt.transformer.h:
        fully_shard(block)
    fully_shard(model)
    by_hand(work, model)
    return model  # type: ignore[no-any-return]


def raw_accelerate(work: Work, clock: Clock) -> torch.nn.Module:
    """Train as in Accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = work.build(clock)
    model, optimizer, loader = accelerator.prepare(model, work.optimizer(model), work.loader())
    model.train()
    for x, y in loader:
        accelerator.backward(model(x, y))
        optimizer.step()
        optimizer.zero_grad()
    return work_model(model)


def fabricated(work: Work, clock: Clock, strategy: str = "ddp") -> torch.nn.Module:
    """Train with fabricate."""
    from benchmarks.module import Module
    from fabricate import Trainer

    module = Module(work, clock)
    trainer = Trainer(max_epochs=1, strategy=strategy, precision="fp32", progress=False, log_every=work.log_every)
    trainer.fit(module, work.loader())
    return module.model


LOOPS: dict[str, dict[str, Callable[[Work, Clock], torch.nn.Module]]] = {
    "ddp": {
        "DistributedDataParallel": replicated,
        "Accelerate": raw_accelerate,
        "fabricate": fabricated,
        "fabricate, looking for unused parameters": functools.partial(
            fabricated, strategy="ddp:find_unused_parameters=true"
        ),
    },
    "fsdp": {"fully_shard": sharded, "fabricate": functools.partial(fabricated, strategy="fsdp")},
}
"""The loops by strategy. An unused parameter is an error for all of them, except with find_unused_parameters."""


def train(loop: Callable[[Work, Clock], torch.nn.Module], work: Work) -> tuple[float, torch.Tensor]:
    """Milliseconds per micro-batch, and the final weights."""
    clock = Wall()
    with contextlib.redirect_stdout(io.StringIO()):
        model = loop(work, clock)
    forget_accelerator()
    gc.collect()
    dist.barrier()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return clock.mean() / 1000, torch.cat([p.detach().flatten() for p in whole])


def rank(cases: list[str], rounds: int | None, micro_batches: int | None, path: Path) -> None:
    """Run one rank; rank 0 writes the figures to the file `path`."""
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for case in cases:
        name, _, divided = case.partition("-")
        steps = (micro_batches or WORKS[name].steps) * dist.get_world_size()
        work = dataclasses.replace(WORKS[name], steps=steps)
        loops = LOOPS[divided or "ddp"]
        names = list(loops)
        reference = train(loops[names[0]], work)[1]
        apart = {name: float((train(loops[name], work)[1] - reference).abs().max()) for name in names}
        # DistributedSampler assigns the rows of a step to ranks differently, so that sums round differently.
        if max(apart.values()) > 1e-4:
            raise SystemExit(f"{case}: the loops trained different weights: {apart}")
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds or ROUNDS[case]):
            shift = number % len(names)
            order = names[shift:] + names[:shift]
            for name in order if number % 2 else reversed(order):
                times[name].append(train(loops[name], work)[0])
        results[case] = times
    if dist.get_rank() == 0:
        path.write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def text(results: dict[str, Any], ranks: int) -> str:
    """The table."""
    rows = []
    for case, times in results.items():
        base = next(iter(times.values()))
        for name, own in times.items():
            differences = [a - b for a, b in zip(own, base, strict=True)]
            low, middle, high = statistics.quantiles(differences, n=4) if len(own) > 1 else differences * 3
            over = f"{middle:+.3f} [{low:+.3f}, {high:+.3f}]" if own is not base else "0"
            ratio = statistics.median(a / b for a, b in zip(own, base, strict=True))
            rows.append([f"{case}, {name}", f"{statistics.median(own):.3f}", over, f"{ratio:.3f}"])
    head = ["case and loop", "ms per step", "over the first, median [quartiles]", "ratio"]
    return table(head, rows) + f"\n{ranks} ranks, gloo, one thread each.\n"


def main() -> None:
    """Start the ranks, and print what they found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(ROUNDS), help=f"of {', '.join(ROUNDS)}; all")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--micro-batches", type=int, help="of each training, more than the 40 that are not counted")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.found is not None:
        hold_heap()
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)
        rank(options.cases, options.rounds, options.micro_batches, options.found)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or Path(folder, "found.json")
        arguments = [*options.cases, "--found", str(path.absolute())]
        arguments += ["--rounds", str(options.rounds)] if options.rounds else []
        arguments += ["--micro-batches", str(options.micro_batches)] if options.micro_batches else []
        torchrun(options.nproc, "benchmarks.ranks", *arguments)
        print(text(json.loads(path.read_text()), options.nproc))


if __name__ == "__main__":
    main()
