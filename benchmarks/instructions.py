"""Instructions per micro-batch, counted by valgrind: the same on a busy machine as on an idle one, to about one per cent.

    python -m benchmarks.instructions                      # quiet, accumulation, output; needs valgrind
    python -m benchmarks.instructions quiet --micro-batches 100

Caches and branch prediction are not included: a loop that runs more different code takes longer with the same number of instructions.
System calls are not included either. Each loop runs in a separate process, and everything before its 60th micro-batch is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.loops import LOOPS
from benchmarks.tables import table
from benchmarks.works import WORKS, Clock

CASES = ("quiet", "accumulation", "output")
BEFORE = 60
"""Micro-batches that are not counted: lazy imports, and bytecode that the interpreter specialises."""


class Counter(Clock):
    """A clock that makes valgrind count from the forward `BEFORE` to the one `count` later."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def stamp(self) -> None:
        super().stamp()
        if len(self.stamps) == BEFORE:
            gc.collect()
            _control("--instr=on")
        elif len(self.stamps) == BEFORE + self._count:
            _control("--dump")


def _control(order: str) -> None:
    subprocess.run(["callgrind_control", order, str(os.getpid())], check=True, stdout=subprocess.DEVNULL)


def train(loop: str, case: str, count: int) -> None:
    """Train with `loop`, in the process that valgrind runs."""
    import torch

    torch.set_num_threads(1)
    work = dataclasses.replace(WORKS[case], steps=BEFORE + count + 4)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        LOOPS[loop](work, Counter(count), Path(folder))


def counted(loop: str, case: str, count: int) -> float:
    """Thousands of instructions per micro-batch."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out"]
        command += [sys.executable, "-m", "benchmarks.instructions", "--train", loop, case, str(count)]
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        dump = Path(folder, "out.1")
        if process.returncode or not dump.exists():
            raise SystemExit(f"{' '.join(command)} failed:\n{process.stderr[-2000:]}")
        lines = dump.read_text(errors="replace").splitlines()
    return int(next(line for line in lines if line.startswith("summary: ")).split()[1]) / count / 1000


def main() -> None:
    """Count and print the table, or train in the process that valgrind runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(WORKS)}; {', '.join(CASES)}")
    parser.add_argument("--micro-batches", type=int, default=500, help="that are counted")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--train", nargs=3, metavar=("LOOP", "CASE", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        loop, case, count = options.train
        train(loop, case, int(count))
        return
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed")
    counts = {case: {loop: counted(loop, case, options.micro_batches) for loop in LOOPS} for case in options.cases}
    bare = next(iter(LOOPS))
    rows = [
        [f"{case}, {loop}", f"{thousands:.0f}", f"{thousands / loops[bare]:.3f}"]
        for case, loops in counts.items()
        for loop, thousands in loops.items()
    ]
    print(table(["loop", "thousand instructions per micro-batch", "of bare"], rows))
    print(f"{options.micro_batches} micro-batches each, all threads, callgrind.")
    if options.json:
        options.json.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
