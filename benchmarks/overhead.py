"""CPU time per micro-batch over a hand-written loop: all loops alternate in one process, and differences are paired.

    python -m benchmarks.overhead quiet --rounds 15

In every round each loop trains the same work once, in an order that rotates. The figures are the median and quartiles, over rounds, of the
difference to the bare loop of the same round. They are CPU time of the process from the 40th forward to the last one, so they include log
boundaries and other threads.

The heap keeps freed memory (see `hold_heap`), for all loops.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import logging
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.loops import LOOPS, forget_accelerator
from benchmarks.peers import Loop, available
from benchmarks.works import WORKS, Clock, Work

ROUNDS = {"quiet": 15, "rows": 15, "listeners": 15, "accumulation": 15, "output": 7, "gpt": 7}


def hold_heap() -> None:
    """Make glibc keep freed memory. Otherwise it returns the top of the heap to the system when it gets large. A step of the language model
    then has between 0 and 2700 page faults, depending on the addresses of its blocks: 10 per cent from run to run."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its largest: blocks come from the heap
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Put stdout and stderr on a pseudo-terminal that another process reads, so that progress bars are drawn."""
    master, slave = pty.openpty()
    with subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as reader:
        os.close(master)
        out = os.fdopen(slave, "w", buffering=1)
        with out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            yield
        reader.terminate()


def train(loop: Loop, work: Work) -> tuple[Clock, torch.Tensor]:
    """Run `loop` once; return the clock, and the final weights as one vector."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, terminal(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = loop(work, clock, Path(folder))
    forget_accelerator()
    gc.collect()
    return clock, torch.cat([p.detach().flatten() for p in model.parameters()])


def measure(work: Work, loops: dict[str, Loop], rounds: int) -> dict[str, Any]:
    """Figures by loop, all in microseconds per micro-batch. Raises when a loop did not train the same weights."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    typical: dict[str, list[float]] = {name: [] for name in loops}
    equal: dict[str, str] = {}
    names = list(loops)
    reference = train(loops[names[0]], work)[1]
    for name in names:  # one run that is not counted, for lazy imports
        clock, weights = train(loops[name], work)
        difference = float((weights - reference).abs().max())
        if len(clock.stamps) != work.steps or difference > 1e-5:
            raise SystemExit(
                f"{name} trained something else: {len(clock.stamps)} forwards, weights differ by {difference}"
            )
        equal[name] = "bit-identical" if difference == 0 else f"within {difference:.0e}"
    gc.collect()
    gc.freeze()  # garbage collections skip the objects of imported frameworks
    for number in range(rounds):
        shift = number % len(names)
        order = names[shift:] + names[:shift]
        for name in order if number % 2 else reversed(order):
            clock, _ = train(loops[name], work)
            times[name].append(clock.mean())
            typical[name].append(clock.typical())
    base = times[names[0]]
    figures = {}
    for name in names:
        differences = [own - other for own, other in zip(times[name], base, strict=True)]
        quarters = statistics.quantiles(differences, n=4) if rounds > 1 else [differences[0]] * 3
        figures[name] = {
            "micro_batch": statistics.median(times[name]),
            "overhead": quarters[1],
            "quartiles": [quarters[0], quarters[2]],
            "best_case": min(times[name]) - min(base),
            "typical": statistics.median(
                own - other for own, other in zip(typical[name], typical[names[0]], strict=True)
            ),
            "ratio": statistics.median(own / other for own, other in zip(times[name], base, strict=True)),
            "weights": equal[name],
        }
    return {"rounds": rounds, "micro_batches": work.steps, "loops": figures}


def main() -> None:
    """Measure the named cases, and print a line for each loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("cases", nargs="*", default=list(WORKS), help=f"of {', '.join(WORKS)}; all")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--micro-batches", type=int, help="of each training, more than the 40 that are not counted")
    parser.add_argument("--workers", type=int, default=0, help="processes that read the rows, for every loop")
    parser.add_argument("--only", nargs="*", help="loops to compare, the bare one always first")
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    hold_heap()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    everything = {**LOOPS, **available()}
    loops = {
        n: loop for n, loop in everything.items() if options.only is None or n in options.only or n == "bare PyTorch"
    }
    results = {}
    for case in options.cases:
        work = WORKS[case]
        work = dataclasses.replace(work, steps=options.micro_batches or work.steps, workers=options.workers)
        chosen = {name: loop for name, loop in loops.items() if name in LOOPS or not work.listeners}
        results[case] = measure(work, chosen, options.rounds or ROUNDS[case])
        print(f"{case}: {results[case]['rounds']} rounds x {work.steps} micro-batches", file=sys.stderr)
        for name, row in results[case]["loops"].items():
            low, high = row["quartiles"]
            print(
                f"  {name:22} {row['micro_batch']:9.1f} us  {row['overhead']:+8.1f} [{low:+.1f}, {high:+.1f}]"
                f"  best {row['best_case']:+.1f}  typical {row['typical']:+.1f}  x{row['ratio']:.3f}  {row['weights']}",
                file=sys.stderr,
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
