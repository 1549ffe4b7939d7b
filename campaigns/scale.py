"""Scale: the messages, reads and writes of ranks when a run starts, agrees, logs, saves and resumes, by the number of ranks.

A small fit on real ranks (gloo, one process each), whose messages, store requests and file operations are counted where they leave
fabricate. A count is the sum of a constant, a term per other rank and a term that the ranks share; from these three follow the figures for
1,024 and 10,000 ranks. `bytes` are those of the messages, and those read from the checkpoint.

    python -m campaigns.scale                       # 2, 4, 8 and 16 ranks; --ranks 2 4 8 16 32 for others, --out FILE writes the page
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from fabricate import Callback, RankError, Trainer, TrainModule
from fabricate.checkpoint.format.files import Files
from fabricate.distributed import group
from fabricate.distributed.connections import Connections
from fabricate.launch.ranks import detect
from fabricate.testing import run_ranks
from fabricate.testing.ranks import close_pools

PHASES = {
    "start": "a run starts",
    "agree": "an agreement of the ranks (stop, save, evaluate)",
    "log": "a log boundary",
    "log over rank 0": "a log boundary, with the method for more than 64 ranks",
    "save": "a checkpoint",
    "resume": "a run resumes",
}
COUNTED = ("messages", "bytes", "store", "files")
FAR = (8, 64, 1024, 10_000)

PAGE = """# Scale

This page shows how many messages, bytes and files a rank sends, reads and writes, depending on the number of ranks: as
measured on one machine, and as a cost model predicts for larger numbers. The last section lists the costs that grow
faster than the number of ranks.

`python -m campaigns.scale --ranks {measured} --out docs/scale.md` wrote this page. It fits a small model (8 linear
layers of 64 x 64, AdamW) under `{strategy}` on real ranks. The ranks are processes on one machine with two cores (CPU, gloo),
forked from a process that has already imported torch. Messages and file operations are counted where fabricate issues
them.

Columns marked *measured* contain these counts. The other columns come from the cost model, which has three terms: a
constant, a cost per other rank, and a cost that the ranks share. It is fitted to the measured points. "-" means that
the model does not cover the value.

- *Messages*: the messages that a rank sends and receives, one for each rank that it communicates with. The gradients
  and gathered parameters of a strategy are not included; the [dry run](dry-run.md) shows them.
- *Bytes*: the bytes of these messages, and the bytes that are read from the checkpoint.
- *Store*: requests to torch's store at MASTER_ADDR. A starting run needs about 10 per rank. A rank that waits for
  others sends two requests per second, so a slow machine shows more.
- *Files*: how many files of the checkpoint a rank creates, opens, or reads the size of.
"""

CLOSING = """
The machine has fewer cores than ranks, and other programs ran at the same time. So the seconds do not predict the times
on a cluster.

## What the numbers say

- Between updates, each rank other than 0 exchanges two short messages with rank 0, for any number of ranks. In such a
  round the ranks compare digests: when they agree on an action, when they compare data, parameters and settings at the
  start, and when they compare replicas. The compared values themselves are sent only if the digests differ.
- At a log boundary, the values of all ranks are summed. With more than 64 ranks, rank 0 does this. With up to 64 ranks,
  every rank does it, because that needs fewer messages in sequence.
- A save adds one tensor file and one JSON file per rank; rank 0 collects the records, writes `manifest.json`, and then
  checks the listed files.
- When a run resumes, the ranks divide the verification: each checks the sizes of its share of the files, and reads its
  share of the blocks.
- If several ranks hold the same values (`ddp`, copies of `fsdp:shard=N`), at most eight of them write a slice of each
  tensor. A resuming rank opens each of these files once. With `--strategy ddp`, on 8, 16 and 32 ranks, a resumed run
  accessed 21, 22 and 22 files per rank. (The cost model does not fit these points, because they are not on a line.)

## Known costs that grow faster than the number of ranks

If every one of n ranks does something once per rank, all ranks together do it n x n times. These cases remain:

- **The manifest under full sharding.** The manifest has one record of about 75 bytes for each tensor and each rank that
  holds a part of it, and every rank reads the whole manifest. For a model of 500 tensors with AdamW on 1,024 ranks
  under `fsdp`, that is 1,500 x 1,024 records, 115 MB. At about 4,500 ranks, the manifest reaches the size limit of a
  JSON file, 512 MiB, and a save ends with an error. With `fsdp:shard=8`, a tensor has at most 64 records and the
  manifest takes 7 MB, on any number of ranks. With `ddp`, it has at most 8 records, and the manifest takes less than
  1 MB. `fsdp:shard=N` also sends fewer bytes between nodes.
- **Connections.** gloo opens a connection between every two ranks of a group, and fabricate has up to three groups of
  all ranks. With 1,024 ranks, that is 3 x 1,024 open connections per rank. Each rank raises its limit of open files
  accordingly; if `ulimit -Hn` is too small, an error says so.
- **Resuming on far fewer ranks.** If the checkpoint was saved by more than sixteen times as many ranks as resume from
  it, a rank opens the files again for each tensor. It may read a block of 1 MiB for a small slice.
"""


class Net(TrainModule):
    def configure_model(self) -> None:
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))

    def training_step(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        return self.layers(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Counts:
    """The counts of one rank, by phase."""

    def __init__(self) -> None:
        self.phase = "start"
        self.by_phase: dict[str, Counter[str]] = {}
        self.seconds: dict[str, float] = {}
        self.entered: Counter[str] = Counter()
        self._began = time.monotonic()

    def enter(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._began
        self.phase, self._began = phase, now
        self.entered[phase] += 1

    def add(self, **counts: int) -> None:
        self.by_phase.setdefault(self.phase, Counter()).update(counts)


@contextlib.contextmanager
def counting(counts: Counts, rank: int, world_size: int) -> Iterator[None]:
    """While the context is open, count messages, store requests and file operations of this rank."""
    peers = world_size - 1

    def message(original: Any, to_all: bool) -> Callable[..., Any]:
        def counted(self: Any, row: torch.Tensor) -> Any:
            number = peers if to_all or rank == 0 else 1
            counts.add(messages=number, bytes=number * row.nbytes)
            return original(self, row)

        return counted

    def operation(original: Any, name: str) -> Callable[..., Any]:
        def counted(self: Any, *arguments: Any, **options: Any) -> Any:
            answer = original(self, *arguments, **options)
            counts.add(
                **{name: 1} if name != "bytes" else {"bytes": len(answer) if isinstance(answer, bytes) else answer}
            )
            return answer

        return counted

    with contextlib.ExitStack() as stack:
        for name, to_all in (("gather", False), ("all_gather", True), ("broadcast", False)):
            stack.enter_context(mock.patch.object(Connections, name, message(getattr(Connections, name), to_all)))
        for kind, name in (
            ("create", "files"),
            ("open", "files"),
            ("size", "files"),
            ("read", "bytes"),
            ("read_into", "bytes"),
        ):
            stack.enter_context(mock.patch.object(Files, kind, operation(getattr(Files, kind), name)))
        for store, kind in itertools.product(
            (dist.PrefixStore, dist.TCPStore), ("set", "get", "add", "check", "wait", "compare_set")
        ):
            stack.enter_context(mock.patch.object(store, kind, operation(getattr(store, kind), "store")))
        yield


class Phases(Callback):
    """Sets the phase, and does the work that a fit does only sometimes."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def on_epoch_start(self) -> None:
        self.counts.enter("updates")

    def on_step(self, trainer: Any, step: int) -> None:
        run = trainer._live()
        self.counts.enter("agree")
        run.engine.agree([1, 2, 3])
        for phase, few in (("log", group._FEW), ("log over rank 0", 0)):
            with mock.patch.object(group, "_FEW", few):
                self.counts.enter(phase)
                run.metrics.look()
        self.counts.enter("updates")
        if step == 1:
            trainer.request_save()

    def on_save(self, state: Any) -> None:
        self.counts.enter("save")

    def on_saved(self) -> None:
        self.counts.enter("updates")


def fits(folder: Path, strategy: str) -> dict[str, Any]:
    """Run a fit that saves once, and one that resumes from its checkpoint. All ranks."""

    launch = detect(os.environ)
    counts, answers = Counts(), {}
    with counting(counts, launch.rank, launch.world_size):
        for steps, phase in ((1, "start"), (2, "resume")):
            counts.enter(phase)
            trainer = Trainer(
                strategy=strategy,
                max_steps=steps,
                plugins=[Phases(counts)],
                run_dir=folder,
                save_every=None,
                log_every=1000,
                seed=1,
                progress=False,
                print_plan="none",
            )
            trainer.fit(Net(), TensorDataset(torch.zeros(4 * launch.world_size, 64)), batch_size=1)
            counts.enter("end")
            if phase == "start":
                (path,) = (folder / "checkpoints").iterdir()
                answers = {"files": len(list(path.iterdir())), "manifest": (path / "manifest.json").stat().st_size}
    phases = {phase: dict(each) for phase, each in counts.by_phase.items()}
    return {"found": phases, "entered": dict(counts.entered), "seconds": counts.seconds, **answers}


def measured(ranks: Sequence[int], strategy: str, timeout: float) -> dict[int, list[dict[str, Any]]]:
    """The counts of rank 0 and of the last rank, by number of ranks. Ends before the first number of ranks that this machine does not
    complete in time."""
    every = {}
    for number in ranks:
        try:
            with tempfile.TemporaryDirectory(prefix="fabricate-scale-") as folder:
                answers = run_ranks(fits, number, Path(folder) / "run", strategy, timeout=timeout)
        except RankError as exc:
            print(f"{number} ranks: {exc}"[:2000], file=sys.stderr)
            break
        every[number] = [answers[0], answers[-1]]
        print(f"{number} ranks: {answers[0]['seconds']}", file=sys.stderr)
        close_pools()
    return every


def value(answers: list[dict[str, Any]], place: int, phase: str, what: str) -> int:
    counts = answers[place]["found"].get(phase, {})
    return int(counts.get(what, 0)) // answers[place]["entered"].get(phase, 1)


def model(points: Sequence[tuple[int, int]]) -> Callable[[int], int]:
    """The function of the number of ranks that fits the points best: a constant, a term per other rank and a term that the ranks share,
    none of them negative."""
    terms: list[Callable[[int], float]] = [lambda n: 1.0, lambda n: n - 1.0, lambda n: 1.0 / n]
    numbers, values = np.array([n for n, _ in points]), np.array([float(y) for _, y in points])
    best: tuple[float, Callable[[int], int]] = (math.inf, round)
    for chosen in itertools.chain.from_iterable(itertools.combinations(terms, size) for size in (1, 2, 3)):
        if len(chosen) <= len(points):
            of_points = np.array([[term(n) for term in chosen] for n in numbers.tolist()])
            factors = np.linalg.lstsq(of_points, values, rcond=None)[0]
            far = float(np.abs(of_points @ factors - values).max())
            if (factors >= -1e-6).all() and far < best[0] - 1e-6:
                best = far, functools.partial(_sum, chosen, factors)
    return best[1]


def _sum(terms: Sequence[Callable[[int], float]], factors: Any, n: int) -> int:
    return round(sum(term(n) * factor for term, factor in zip(terms, factors.tolist(), strict=True)))


def far(phase: str, what: str, points: Sequence[tuple[int, int]], ranks: int) -> str:
    """The model's count for `ranks`; "-" where it does not apply: the store is read repeatedly while a rank waits, and a log boundary works
    differently on few ranks."""
    if what == "store" or (phase == "log" and ranks > group._FEW):
        return "-"
    return f"{model(points)(ranks):,}"


def tables(every: dict[int, list[dict[str, Any]]]) -> Iterator[str]:
    ranks = sorted(every)
    for place, title in ((0, "Rank 0"), (1, "Each rank except rank 0")):
        yield f"\n## {title}\n"
        columns = [*(f"{n:,} measured" for n in ranks), *(f"{n:,}" for n in FAR if n not in ranks)]
        yield f"| when | what | {' | '.join(columns)} |"
        yield f"|---|---|{'---|' * len(columns)}"
        for phase, text in PHASES.items():
            for what in COUNTED:
                points = [(n, value(every[n], place, phase, what)) for n in ranks]
                if any(y for _, y in points):
                    others = [far(phase, what, points, n) for n in FAR if n not in ranks]
                    yield f"| {text} | {what} | {' | '.join([*(f'{y:,}' for _, y in points), *others])} |"
    yield "\n## The checkpoint, and seconds on this machine\n"
    yield "| ranks | files | manifest.json, bytes | seconds to start | to save | to resume |"
    yield "|---|---|---|---|---|---|"
    for n in ranks:
        first = every[n][0]
        seconds = " | ".join(f"{first['seconds'].get(phase, 0.0):.2f}" for phase in ("start", "save", "resume"))
        yield f"| {n} | {first['files']} | {first['manifest']:,} | {seconds} |"


def main() -> int:
    """Count, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each number of ranks")
    options = parser.parse_args()
    every = measured(sorted(options.ranks), options.strategy, options.timeout)
    text = "\n".join(tables(every))
    print(text)
    if options.out is not None:
        head = PAGE.format(strategy=options.strategy, measured=" ".join(map(str, sorted(every))))
        options.out.write_text(f"{head}{text}\n{CLOSING}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
