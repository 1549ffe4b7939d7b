"""A crash of the process or the machine after every operation of saving, deleting and setting aside.

At every point: each listed checkpoint is complete; the newest earlier checkpoint exists until a newer one does; a save that has returned is
durable; and the next run cleans up and saves as usual.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from campaigns.checkpoints.disk import Disk, Hasty, Recording, put
from campaigns.checkpoints.example import content, expected, save
from fabricate.checkpoint.format.directory import clean, committed, prune, set_aside
from fabricate.checkpoint.format.files import LOCAL
from fabricate.errors import CheckpointError

ROOT = Path("run") / "checkpoints"


def first(files: Recording) -> None:
    """Make the first save of a run, which also makes its directories."""
    save(files.root / ROOT, 1, files)
    files.mark("1 is durable")


def next_one(files: Recording) -> None:
    """Save, and delete the previous checkpoint."""
    save(files.root / ROOT, 2, files)
    files.mark("2 is durable")
    prune([files.root / ROOT / "step-00000001"], files)
    files.mark("1 is gone")


def after_a_kill(files: Recording) -> None:
    """Start a run after a killed one, and make its first save."""
    clean(files.root / ROOT, files)
    save(files.root / ROOT, 2, files)
    files.mark("2 is durable")


def after_damage(files: Recording) -> None:
    """Start a run whose newest checkpoint is damaged."""
    set_aside(files.root / ROOT / "step-00000003", "torn", files)
    files.mark("3 is gone")
    save(files.root / ROOT, 2, files)
    files.mark("2 is durable")


def _nothing(root: Path) -> None:
    """Nothing to prepare: there is no run yet."""


def _one(root: Path) -> None:
    save(root / ROOT, 1)


def _one_and_a_leftover(root: Path) -> None:
    save(root / ROOT, 1)
    save(root / ROOT, 2).rename(root / ROOT / ".tmp-step-00000002-dead")
    (root / ROOT / ".trash-step-00000000").mkdir()
    (root / ROOT / ".trash-step-00000000" / "state.json").write_text("{}")


def _one_and_a_damaged(root: Path) -> None:
    save(root / ROOT, 1)
    (save(root / ROOT, 3) / "state.json").write_text("{}")


SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Recording], None], set[int]]] = {
    "the first save": (_nothing, first, set()),
    "a save that replaces another": (_one, next_one, {1}),
    "a start after a kill": (_one_and_a_leftover, after_a_kill, {1}),
    "a start after damage": (_one_and_a_damaged, after_damage, {1}),
}
"""By name: the preparation, the work, and the steps whose checkpoints exist before the work."""


def run(states: int, seed: int = 0) -> dict[str, int]:
    """Run every scenario with a crash after each of its operations: a kill, a kill in the middle of a write, and a machine stop with the
    least durable state and with `states` random ones. Returns the number of crashes by scenario. Raises AssertionError for a crash that was
    not survived."""
    counts = {}
    for name, (before, work, safe) in SCENARIOS.items():
        rng = random.Random(f"{seed} {name}")
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder, "disk")
            root.mkdir()
            before(root)
            disk, files = Disk(root), Recording(root)
            work(files)
            counts[name] = 0
            for number in range(len(files.operations) + 1):
                if number:
                    disk.apply(files.operations[number - 1])
                for end, state in _ends(disk, files, number, states, rng):
                    where = f"{name}, {end} after operation {number} of {len(files.operations)}"
                    _check(state, Path(folder, "found"), where, number, files.marks, safe)
                    counts[name] += 1
    return counts


def system_calls() -> dict[str, int]:
    """Check that the methods of `Files` make the system calls. Returns their number by call; AssertionError if one is missing."""
    calls: Counter[str] = Counter()
    real = {name: getattr(os, name) for name in ("fsync", "rename")}

    def counting(name: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            calls[name] += 1
            return real[name](*arguments)

        return call

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "disk")
        root.mkdir()
        files = Recording(root)
        try:
            for name in real:
                setattr(os, name, counting(name))
            next_one_after_first(files)
            LOCAL.fsync_path(root / ROOT / "step-00000002" / "state.json")
        finally:
            for name, function in real.items():
                setattr(os, name, function)
        kinds = Counter(kind for kind, _, _ in files.operations)
    counts = {"fsync": kinds["fsync"] + kinds["sync"] + 1, "rename": kinds["rename"]}
    assert dict(calls) == counts, f"the system was asked {dict(calls)}, {counts} was done"
    return counts


def next_one_after_first(files: Recording) -> None:
    """Make two saves and a deletion."""
    first(files)
    next_one(files)


def _ends(
    disk: Disk, files: Recording, number: int, states: int, rng: random.Random
) -> Iterator[tuple[str, dict[Path, bytes | None]]]:
    state = disk.after_a_kill()
    yield "killed", state
    if number < len(files.operations):
        kind, path, data = files.operations[number]
        if kind == "write":
            assert isinstance(data, bytes)
            yield "killed while writing", state | {path: (state[path] or b"") + data[: len(data) // 2]}
    yield "stopped, all lost", disk.after_a_stop(None)
    for _ in range(states):
        yield "stopped", disk.after_a_stop(rng)


def _check(
    state: dict[Path, bytes | None], root: Path, where: str, number: int, marks: dict[str, int], safe: set[int]
) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    put(state, root)
    listed = {int(path.name[5:]): path for path in committed(root / ROOT)}
    whole = set()
    for step, path in listed.items():
        try:
            contents = content(path)
        except CheckpointError as exc:
            if step == 3:  # damaged before; the start will set it aside
                continue
            raise AssertionError(f"{where}: step {step} is listed and damaged: {exc}") from exc
        assert contents == expected(step), f"{where}: step {step} holds something else"
        whole.add(step)
    must = set(safe)
    for mark, at in marks.items():
        if number >= at:
            step, _, what = mark.partition(" ")
            if what == "is durable":
                must.add(int(step))
            else:
                assert int(step) not in listed, f"{where}: step {step} was taken away and is listed again"
    if 2 in must:
        must.discard(1)  # it may be deleted from then on
    assert must <= whole, f"{where}: lost {sorted(must - whole)}, there is {sorted(whole)}"
    clean(root / ROOT)
    if (root / ROOT).exists():
        leftovers = {path.name for path in (root / ROOT).iterdir() if not path.name.startswith((".bad-", "step-"))}
        assert not leftovers, f"{where}: {leftovers} is left after the next start"
    if 2 not in listed:
        assert content(save(root / ROOT, 2, Hasty())) == expected(2), f"{where}: the next save"
