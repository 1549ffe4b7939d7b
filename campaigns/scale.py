"""Scale: what ranks send each other, read and write when a run starts, agrees, logs, saves and resumes, by the number of ranks.

A small fit on real ranks (gloo, one process each), whose messages, store requests and file operations are counted where they
leave fabricate. What is counted lies on a line over the number of ranks; the line gives 1,024 and 10,000. `bytes` are those of the
messages, and of what is read of the checkpoint.

    python -m campaigns.scale                       # 2, 4, 8 and 16 ranks; --ranks 2 4 8 16 32 for others, --out FILE writes the table
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from fabricate import Callback, Trainer, TrainModule
from fabricate.checkpoint.format.files import Files
from fabricate.distributed import group
from fabricate.distributed.connections import Connections
from fabricate.launch.ranks import detect
from fabricate.testing import run_ranks
from fabricate.testing.ranks import close_pools

PHASES = {
    "start": "a run starts",
    "agree": "ranks agree on numbers",
    "log": "a log boundary",
    "log over rank 0": "the same among more than 64 ranks",
    "save": "a checkpoint",
    "resume": "a run resumes",
}
COUNTED = ("messages", "bytes", "store", "files")
FAR = (8, 64, 1024, 10_000)

PAGE = """# Scale

`python -m campaigns.scale --out FILE` wrote these tables: a fit of a small model under `{strategy}` on real ranks (CPU,
gloo), counted where messages and file operations leave fabricate. {measured} ranks were measured; each number lies on a line over the
number of ranks, and the line gives the others. *Messages*: sent and received by a rank, one per other rank that it exchanges with. *Store*:
requests to torch's store at MASTER_ADDR. *Files*: files of the checkpoint that a rank creates, opens, or whose size it asks for.
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
    """What one rank did, by phase."""

    def __init__(self) -> None:
        self.phase = "start"
        self.found: dict[str, Counter[str]] = {}
        self.seconds: dict[str, float] = {}
        self.entered: Counter[str] = Counter()
        self._began = time.monotonic()

    def enter(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._began
        self.phase, self._began = phase, now
        self.entered[phase] += 1

    def add(self, **counts: int) -> None:
        self.found.setdefault(self.phase, Counter()).update(counts)


@contextlib.contextmanager
def counting(counts: Counts, rank: int, world_size: int) -> Iterator[None]:
    """While inside, messages, store requests and file operations of this rank count."""
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
    """Says which phase it is, and does what a fit does now and then."""

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
    """A fit that saves once, and one that resumes from there. On every rank."""

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
    found = {phase: dict(each) for phase, each in counts.found.items()}
    return {"found": found, "entered": dict(counts.entered), "seconds": counts.seconds, **answers}


def measured(ranks: Sequence[int], strategy: str) -> dict[int, list[dict[str, Any]]]:
    """By number of ranks, what rank 0 and the last rank counted."""
    every = {}
    for number in ranks:
        with tempfile.TemporaryDirectory(prefix="fabricate-scale-") as folder:
            answers = run_ranks(fits, number, Path(folder) / "run", strategy, timeout=110)
        every[number] = [answers[0], answers[-1]]
        close_pools()
    return every


def value(answers: list[dict[str, Any]], place: int, phase: str, what: str) -> int:
    found = answers[place]["found"].get(phase, {})
    return int(found.get(what, 0)) // answers[place]["entered"].get(phase, 1)


def line(points: Sequence[tuple[int, int]]) -> Callable[[int], int]:
    """The straight line through the first and the last point."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    slope = (y1 - y0) / (x1 - x0)
    return lambda x: round(y0 + slope * (x - x0))


def tables(every: dict[int, list[dict[str, Any]]]) -> Iterator[str]:
    ranks = sorted(every)
    for place, title in ((0, "Rank 0"), (1, "Every other rank")):
        yield f"\n## {title}\n"
        columns = [*(f"{n:,} measured" for n in ranks), *(f"{n:,}" for n in FAR if n not in ranks)]
        yield f"| when | what | {' | '.join(columns)} |"
        yield f"|---|---|{'---|' * len(columns)}"
        for phase, text in PHASES.items():
            for what in COUNTED:
                points = [(n, value(every[n], place, phase, what)) for n in ranks]
                if any(y for _, y in points):
                    through = line(points)
                    far = [f"{through(n):,}" for n in FAR if n not in ranks]
                    yield f"| {text} | {what} | {' | '.join([*(f'{y:,}' for _, y in points), *far])} |"
    yield "\n## The checkpoint, and seconds on this machine\n"
    yield "| ranks | files | manifest.json, bytes | seconds to start | to save | to resume |"
    yield "|---|---|---|---|---|---|"
    for n in ranks:
        first = every[n][0]
        seconds = " | ".join(f"{first['seconds'].get(phase, 0.0):.2f}" for phase in ("start", "save", "resume"))
        yield f"| {n} | {first['files']} | {first['manifest']:,} | {seconds} |"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    every = measured(sorted(options.ranks), options.strategy)
    text = "\n".join(tables(every))
    print(text)
    if options.out is not None:
        head = PAGE.format(strategy=options.strategy, measured=", ".join(map(str, sorted(every))))
        options.out.write_text(f"{head}{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
