"""The gain of torch.compile: the small language model, eager and compiled, by hand and by fabricate; all alternate in one process.

python -m benchmarks.compiling [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo

from benchmarks.loops import bare, fabricated
from benchmarks.overhead import hold_heap, train
from benchmarks.tables import table
from benchmarks.works import WARMUP, WORKS, Clock, Work

EAGER = dataclasses.replace(WORKS["gpt"], name="eager", steps=WARMUP + 40)
COMPILED = dataclasses.replace(EAGER, name="compiled", compile=True)
LOOPS: dict[str, tuple[Callable[[Work, Clock, Path], torch.nn.Module], Work]] = {
    "bare, eager": (bare, EAGER),
    "bare, blocks compiled": (bare, COMPILED),
    "fabricate, eager": (fabricated, EAGER),
    "fabricate, compile=True": (fabricated, COMPILED),
}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    hold_heap()
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    first, graphs = {}, {}
    for name, (loop, work) in LOOPS.items():  # the first run compiles
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        began = time.perf_counter()
        train(loop, work)
        first[name] = time.perf_counter() - began
        graphs[name] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    times: dict[str, list[float]] = {name: [] for name in LOOPS}
    names = list(LOOPS)
    for number in range(options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(train(*LOOPS[name])[0].mean() / 1000)
    base = statistics.median(times[names[0]])
    loops = {
        name: {
            "milliseconds": statistics.median(own),
            "best": min(own),
            "of_eager": statistics.median(a / b for a, b in zip(own, times[names[0]], strict=True)),
            "first_run_seconds": first[name],
            "graphs": graphs[name],
        }
        for name, own in times.items()
    }
    if options.json:
        options.json.write_text(json.dumps({"base": base, "loops": loops}, indent=1))
    rows = [
        [
            name,
            f"{f['milliseconds']:.2f} [{f['best']:.2f}]",
            f"{f['of_eager']:.2f}",
            f"{f['graphs']}",
            f"{f['first_run_seconds']:.0f}",
        ]
        for name, f in loops.items()
    ]
    header = ["loop", "ms per micro-batch, median [best]", "of bare eager", "graphs", "seconds of the first run"]
    print(table(header, rows))
    print(f"{options.rounds} rounds of {EAGER.steps} micro-batches; inductor on the CPU, one thread.")


if __name__ == "__main__":
    main()
