"""The time of the sections of a micro-batch: the same marks in the hand-written loop and in fabricate's, in one run.

    python -m benchmarks.sections                    # quiet and accumulation
    python -m benchmarks.sections quiet --rounds 5

The data set, the network, hooks of autograd and the optimizer set the marks in both loops. Between two marks is either their work, which
has to take equally long in both loops, or the work of a loop. The figures are microseconds of wall-clock time, medians of medians; other
load on the machine is included.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import io
import itertools
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.loops import LOOPS, forget_accelerator
from benchmarks.tables import table
from benchmarks.works import WARMUP, WORKS, Clock, Network, Work

CASES = {"quiet": 21, "accumulation": 21}
COMPARED = ("bare PyTorch", "fabricate")
MARKS = ("fetch", "fetched", "forward", "loss", "backward", "gradients", "step", "stepped")


class Marks(Clock):
    """The times at which marks were reached."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[tuple[str, int]] = []

    def mark(self, name: str) -> None:
        """Record that `name` is reached."""
        self.reached.append((name, time.perf_counter_ns()))

    def stamp(self) -> None:
        """Record that a forward begins."""
        self.stamps.append(0)
        self.mark("forward")

    def sections(self) -> dict[tuple[str, str], float]:
        """Median microseconds between successive marks, without the first micro-batches."""
        begin = [at for at, (name, _) in enumerate(self.reached) if name == "forward"][WARMUP]
        durations = collections.defaultdict(list)
        for (name, began), (following, ended) in itertools.pairwise(self.reached[begin:]):
            durations[name, following].append((ended - began) / 1000)
        return {pair: statistics.median(times) for pair, times in durations.items() if len(times) > 20}


class Marked(Network):
    """The network, with marks at both ends of forward and backward."""

    clock: Marks

    def __init__(self, clock: Marks) -> None:
        super().__init__(clock)
        first = next(self.parameters())  # its gradient is computed last
        first.register_post_accumulate_grad_hook(lambda parameter: clock.mark("gradients"))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x, y)
        loss.register_hook(lambda gradient: self.clock.mark("backward"))
        self.clock.mark("loss")
        return loss


class MarkedRows(Dataset[Any]):
    """A data set, with marks at both ends of a batch."""

    def __init__(self, rows: Dataset[Any], clock: Marks) -> None:
        self._rows, self._clock = rows, clock

    def __len__(self) -> int:
        return len(self._rows)  # type: ignore[arg-type]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self._clock.mark("fetch")
        rows = [self._rows[index] for index in indices]
        self._clock.mark("fetched")
        return rows


class MarkedSGD(torch.optim.SGD):
    """SGD, with marks at both ends of an update."""

    clock: Marks

    def step(self, closure: Any = None) -> Any:
        self.clock.mark("step")
        super().step(closure)
        self.clock.mark("stepped")


@dataclasses.dataclass(frozen=True)
class MarkedWork(Work):
    """A case over the small network, with marks on `clock`."""

    clock: Marks = dataclasses.field(default_factory=Marks)

    def dataset(self) -> Dataset[Any]:
        return MarkedRows(super().dataset(), self.clock)

    def build(self, clock: Clock) -> torch.nn.Module:
        torch.manual_seed(0)
        return Marked(self.clock)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        sgd = MarkedSGD(model.parameters(), lr=0.01)
        sgd.clock = self.clock
        return sgd


def trained(loop: str, case: str) -> dict[tuple[str, str], float]:
    """The sections of one training."""
    work = MarkedWork(**{**vars(WORKS[case]), "network": Network, "clock": Marks()})
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        LOOPS[loop](work, work.clock, Path(folder))
    forget_accelerator()
    gc.collect()
    return work.clock.sections()


def measure(case: str, rounds: int) -> list[dict[str, Any]]:
    """Each section's microseconds by loop, in the order of the sections."""
    runs: dict[str, list[dict[tuple[str, str], float]]] = {loop: [] for loop in COMPARED}
    for loop in COMPARED:  # one run that is not counted, for lazy imports
        trained(loop, case)
    gc.freeze()
    for number in range(rounds):
        for loop in COMPARED if number % 2 else COMPARED[::-1]:
            runs[loop].append(trained(loop, case))
    gc.unfreeze()
    pairs = sorted(runs[COMPARED[0]][0], key=lambda pair: (MARKS.index(pair[0]), MARKS.index(pair[1])))
    return [
        {"from": pair[0], "to": pair[1], **{loop: statistics.median(f[pair] for f in runs[loop]) for loop in COMPARED}}
        for pair in pairs
    ]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}; both")
    parser.add_argument("--rounds", type=int, help="trainings of each loop")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    by_case = {case: measure(case, options.rounds or CASES[case]) for case in options.cases}
    bare, own = COMPARED
    rows = [
        [f"{case}: {f['from']} → {f['to']}", f"{f[bare]:.1f}", f"{f[own]:.1f}", f"{f[own] - f[bare]:+.1f}"]
        for case, sections in by_case.items()
        for f in sections
    ]
    print(table(["section", f"{bare}, us", f"{own}, us", "difference"], rows))
    if options.json:
        options.json.write_text(json.dumps(by_case, indent=1))


if __name__ == "__main__":
    main()
