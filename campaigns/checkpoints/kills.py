"""Real SIGKILLs of whole runs, which are then started again until they complete: they have to end bit for bit like an undisturbed run.

Every rank is forked from this process, which has imported everything and stays single-threaded; nothing is shared with it. A kill is at a
random time from the first instruction to after the end, or at an operation: before the n-th call of the file system by a save, a deletion
or a resume, or in the middle of it if it is a write. A kill hits one rank or all ranks. Some runs are killed again while they resume.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fabricate.checkpoint.format.files import Files, Writer

_MOST_SECONDS = 300.0
_OPERATIONS = (
    "create", "write", "fsync", "fsync_directory", "fsync_path", "close_writer", "make_directory", "rename", "unlink",
    "remove_directory", "open", "read_into", "size", "listdir",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of run: the strategy, the number of ranks, how it saves, and the number of worker processes for data."""

    strategy: str
    ranks: int
    save: str
    workers: int = 0

    def __str__(self) -> str:
        workers = f", {self.workers} workers" if self.workers else ""
        return f"{self.strategy} x{self.ranks}, {self.save}{workers}"


@dataclass
class Ended:
    """How the ranks of one start ended: "done", "failed" or "killed", and the number of calls of the file system by each rank, if all are
    done."""

    ways: list[str]
    operations: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def warm(strategies: Iterable[str]) -> None:
    """Import the modules that the runs need, so that a fork of this process starts at once."""
    import accelerate
    import torch
    import torch.distributed.fsdp

    from campaigns.checkpoints import runs
    from fabricate import Trainer

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # the first optimizer imports the compiler
    if any(strategy.startswith("zero") for strategy in strategies):
        import fabricate_deepspeed.stage3
        import fabricate_deepspeed.stage12

        assert fabricate_deepspeed
    assert accelerate
    assert runs
    assert Trainer


def start(kind: Kind, run_dir: Path, at: dict[int, int]) -> list[int]:
    """Fork the ranks; rank r kills itself before its at[r]-th call of the file system. Returns their process ids."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(kind.ranks):
        child = os.fork()
        if not child:
            _be_a_rank(kind, run_dir, rank, port, at.get(rank, 0))
        children.append(child)
    return children


def _be_a_rank(kind: Kind, run_dir: Path, rank: int, port: int, at: int) -> None:
    log = run_dir.with_name(f"{run_dir.name}-{rank}.txt")
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.dump_traceback_later(_MOST_SECONDS - 20, exit=True)
        if kind.ranks > 1:
            os.environ |= {
                "RANK": str(rank), "WORLD_SIZE": str(kind.ranks), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(kind.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        counted = _count(at)
        from campaigns.checkpoints import runs

        runs.fit(run_dir, kind.strategy, kind.save, kind.workers)
        log.with_suffix(".operations").write_text(str(counted[0]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if code == 0 and kind.ranks > 1:
            import torch.distributed as dist

            with contextlib.suppress(RuntimeError):  # another rank may be killed meanwhile
                dist.barrier()  # a rank that leaves first breaks the connections of the others
        os._exit(code)


def _count(at: int) -> list[int]:
    """Count the calls of the file system, and end this process before the `at`-th."""
    counted = [0]

    def counting(name: str) -> Callable[..., Any]:
        real = getattr(Files, name)

        def call(self: Files, *arguments: Any) -> Any:
            counted[0] += 1
            if counted[0] == at:
                if name == "write":
                    writer, data = arguments
                    assert isinstance(writer, Writer)
                    os.write(writer.descriptor, memoryview(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(self, *arguments)

        return call

    for name in _OPERATIONS:
        setattr(Files, name, counting(name))
    return counted


def wait(run_dir: Path, children: list[int], killed_at: float | None = None, victims: list[int] | None = None) -> Ended:
    """Wait for the ranks, killing `victims` (process ids) after `killed_at` seconds. After one rank was killed or failed, the others get a
    short time, as from a launcher, and are then killed."""
    began, ways = time.monotonic(), [""] * len(children)
    deadline = began + _MOST_SECONDS
    while not all(ways):
        now = time.monotonic()
        if killed_at is not None and now >= began + killed_at:
            for victim in victims or ():
                if not ways[children.index(victim)]:
                    os.kill(victim, signal.SIGKILL)
            killed_at = None
        for number, child in enumerate(children):
            if ways[number]:
                continue
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                ways[number] = "done" if code == 0 else "killed" if code == -signal.SIGKILL else "failed"
                if code:
                    deadline = min(deadline, now + 0.3)
        if now > deadline:
            for number, child in enumerate(children):
                if not ways[number]:
                    os.kill(child, signal.SIGKILL)
            deadline = now + 30
        time.sleep(0.001)
    logs = [run_dir.with_name(f"{run_dir.name}-{rank}.txt") for rank in range(len(children))]
    counts = [log.with_suffix(".operations") for log in logs]
    operations = [int(file.read_text()) for file in counts] if ways == ["done"] * len(ways) else []
    return Ended(ways, operations, [log.read_text(errors="replace") if log.exists() else "" for log in logs])


@dataclass
class Straight:
    """An undisturbed run of a kind: its outcome, its duration, and the calls of the file system of each rank."""

    outcome: dict[str, Any]
    seconds: float
    operations: list[int]


def straight(kind: Kind, root: Path) -> Straight:
    """Run `kind` without kills."""
    from campaigns.checkpoints import runs

    run_dir = root / "straight"
    began = time.monotonic()
    ended = _attempt(kind, run_dir, {})
    seconds = time.monotonic() - began
    if ended.ways != ["done"] * kind.ranks:
        raise AssertionError(f"{kind}: it does not even run undisturbed\n" + "\n".join(ended.texts))
    outcome = runs.outcome(run_dir)
    shutil.rmtree(run_dir)
    return Straight(outcome, seconds, ended.operations)


def _attempt(
    kind: Kind,
    run_dir: Path,
    at: dict[int, int],
    moment: float | None = None,
    victim: int = 0,
    all_of_them: bool = False,
) -> Ended:
    """Start the ranks and wait for their end. Repeated if another program took their port in the meantime."""
    while True:
        children = start(kind, run_dir, at)
        ended = wait(run_dir, children, moment, children if all_of_them else [children[victim]])
        if not any("EADDRINUSE" in text for text in ended.texts):
            return ended


def trial(kind: Kind, root: Path, rng: random.Random, undisturbed: Straight, plan: list[int]) -> int:
    """Kill one run by `plan` (0: at a random time, n: before operation n of a random rank), then start it until it is done. Returns the
    number of kills that hit. Raises AssertionError if anything is lost or different."""
    from campaigns.checkpoints import runs

    run_dir = root / "run"
    hits, newest, lines = 0, 0, []
    for by in [*plan, None, None, None]:
        at: dict[int, int] = {}
        moment, victim = None, rng.randrange(kind.ranks)
        if by:
            at = {victim: by}
        elif by == 0:
            moment = rng.uniform(0.0, 1.05 * undisturbed.seconds)
        ended = _attempt(kind, run_dir, at, moment, victim, all_of_them=rng.random() < 0.4)
        hits += "killed" in ended.ways
        there = runs.saved(run_dir)
        lines.append(f"{by}: {ended.ways}, then {there}")
        where = f"{kind}: " + "; ".join(lines)
        if newest and (not there or there[-1] < newest):
            raise AssertionError(f"{where}: the checkpoint of step {newest} is lost")
        newest = there[-1] if there else newest
        if ended.ways == ["done"] * kind.ranks:
            if by is None or newest == runs.STEPS:
                break
        elif by is None and "killed" not in ended.ways:
            raise AssertionError(f"{where}: it does not start again\n" + "\n".join(ended.texts))
    else:
        raise AssertionError(f"{where}: it does not come to its end\n" + "\n".join(ended.texts))
    changed = runs.differences(undisturbed.outcome, runs.outcome(run_dir))
    if changed:
        raise AssertionError(f"{where}: it ended with other {', '.join(changed[:10])}")
    leftovers = [path.name for path in (run_dir / "checkpoints").iterdir() if not path.name.startswith("step-")]
    if leftovers:
        raise AssertionError(f"{where}: {leftovers} is left in the directory")
    shutil.rmtree(run_dir)
    return hits


def run(kinds: dict[Kind, int], seed: int = 0, every: int = 0, say: Callable[[str], None] = print) -> dict[str, int]:
    """Make the number of kills that `kinds` gives for each kind; with `every`, also one at each `every`-th operation of a run. Returns the
    number of kills that hit, by kind. Raises AssertionError as `trial`."""
    warm(kind.strategy for kind in kinds)
    hits: Counter[str] = Counter()
    for kind, wanted in kinds.items():
        rng = random.Random(f"{seed} {kind}")
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            undisturbed = straight(kind, root)
            say(f"{kind}: undisturbed {undisturbed.seconds:.2f} s, operations by rank {undisturbed.operations}")
            if every:
                for operation in range(1, max(undisturbed.operations) + 1, every):
                    hits[str(kind)] += trial(kind, root, rng, undisturbed, [operation])
            planned = hits[str(kind)] + wanted
            while hits[str(kind)] < planned:
                length = rng.choice([1, 1, 2, 3, 5])
                by = [0 if rng.random() < 0.5 else rng.randrange(1, max(undisturbed.operations)) for _ in range(length)]
                hits[str(kind)] += trial(kind, root, rng, undisturbed, by)
        say(f"{kind}: {hits[str(kind)]} kills, every run ended as if undisturbed")
    return dict(hits)
