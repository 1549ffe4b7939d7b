"""The check that only the global batch size matters: the same global batches, split in every way, compared with one process.

Owns the factorisations, their starts, and the comparison. Must not know torch or the loop: it reads the losses and weights that
`fabricate.selfcheck.plugins` writes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabricate.checkpoint.format.comparing import compare
from fabricate.checkpoint.format.directory import Reader
from fabricate.errors import ConfigurationError, FabricateError
from fabricate.launch import commands
from fabricate.registry.registry import Registry
from fabricate.registry.validation import ranks_per_row
from fabricate.selfcheck.requests import Trial, start_script, write_requests

__all__ = ["Invariance", "Split", "measure"]

_SHOWN_LINES = 30
_CLEAR_CHANGE = 10  # tolerances: by so much the updates have to change the weights for a wrong gradient to show


@dataclass(frozen=True)
class Split:
    """One way to split a global batch, and its difference from the reference: one process that takes the batch whole.

    loss: the largest relative difference of an update's loss; weights: the largest difference of an element, relative to the largest
    magnitude in its tensor, `tensor`. Both are 0.0 for the reference itself.
    """

    world_size: int
    micro_batch: int
    accumulation: int
    loss: float = 0.0
    weights: float = 0.0
    tensor: str = ""

    def __str__(self) -> str:
        return f"{self.world_size} x {self.micro_batch} x {self.accumulation}"


@dataclass(frozen=True)
class Invariance:
    """The measurements: every split (the first is the reference), the number of updates, and notes for the reader.

    unseen: the note if the updates changed the weights so little that a wrong gradient stays below the tolerance, else "".
    """

    splits: tuple[Split, ...]
    steps: int
    notes: tuple[str, ...]
    unseen: str

    @property
    def largest(self) -> float:
        """The largest relative difference of all losses and weights."""
        return max((max(split.loss, split.weights) for split in self.splits), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """All values, as JSON."""
        return {"largest": self.largest, **vars(self), "splits": [vars(split) for split in self.splits]}


def measure(
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    global_batch_size: int,
    steps: int,
    world_sizes: Sequence[int],
    strategy: str,
    precision: str,
    tolerance: float,
    tell: Callable[[str], None] = lambda text: None,
) -> Invariance:
    """Run `script` with the same global batches in every split, and compare with one process that takes them whole.

    folder: an empty directory. environment: for all starts. world_sizes: those that do not divide the global batch are left out. strategy:
    used with more than one rank. steps: the maximum number of updates. tolerance: the largest difference that counts as rounding. tell:
    called with a line per start.

    Raises ConfigurationError for a script that cannot be split, FabricateError if the script itself fails.
    """
    if not script.is_file():
        raise ConfigurationError(f"SCRIPT {str(script)!r} is not a file. Give a Python script")
    chosen = None if strategy == "auto" else Registry().resolve("strategy", strategy)[0]
    splits = _factorisations(
        global_batch_size, world_sizes, lambda n: 1 if chosen is None or n == 1 else ranks_per_row(chosen, n)
    )
    for world_size in dict.fromkeys(split.world_size for split in splits):
        mine = [split for split in splits if split.world_size == world_size]
        tell(f"{world_size} rank{'s' if world_size > 1 else ''}: {', '.join(map(str, mine))}")
        _start(script, arguments, folder, environment, mine, steps, strategy if world_size > 1 else "single", precision)
    notes = {split: _notes(folder, split) for split in splits}
    first = splits[0]
    if not notes[first]["losses"]:
        raise ConfigurationError(
            f"{script} made no update, so there is nothing to compare. Give a script whose fit makes at least one update"
        )
    compared = tuple(_compared(folder, first, split, notes) for split in splits)
    remarks = dict.fromkeys(remark for each in notes.values() for remark in each["notes"])
    unseen = _unseen(folder, first, tolerance)
    return Invariance(compared, len(notes[first]["losses"]), (*remarks, *filter(None, [unseen])), unseen)


def _factorisations(
    global_batch_size: int, world_sizes: Sequence[int], sharing: Callable[[int], int] = lambda world_size: 1
) -> list[Split]:
    """Every world size x micro-batch x accumulation that makes the global batch, first one process that takes it whole. sharing: by world
    size, how many ranks read the same rows."""
    if global_batch_size < 1 or not world_sizes or min(world_sizes) < 1:
        raise ConfigurationError(
            f"--global-batch {global_batch_size} --worlds {','.join(map(str, world_sizes))}: give positive whole numbers"
        )
    splits = [Split(1, global_batch_size, 1)]
    for world_size in sorted(set(world_sizes)):
        share, rest = divmod(global_batch_size, world_size // sharing(world_size))
        for micro_batch in range(share, 0, -1) if not rest else ():
            if share % micro_batch == 0:
                splits.append(Split(world_size, micro_batch, share // micro_batch))
    return list(dict.fromkeys(splits))


def _trial(folder: Path, split: Split, steps: int) -> Trial:
    name = f"{split.world_size}-{split.micro_batch}-{split.accumulation}"
    return Trial(
        notes=str(folder / name),
        begin=str(folder / "begin"),
        steps=steps,
        micro_batch=split.micro_batch,
        accumulation=split.accumulation,
    )


def _start(
    script: Path,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    splits: Sequence[Split],
    steps: int,
    strategy: str,
    precision: str,
) -> None:
    """Run the script in all splits of one world size, in one process per rank."""
    nproc = splits[0].world_size
    trials = write_requests([_trial(folder, split, steps) for split in splits])
    command = commands.command(str(start_script(folder)), [trials, str(script), *arguments], nproc=nproc)
    variables = commands.environment(environment, nproc=nproc, strategy=strategy, precision=precision)
    log = folder / f"ranks-{nproc}.log"
    with log.open("wb") as output:
        code = subprocess.run(command, env=variables, stdout=output, stderr=output).returncode
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
        raise FabricateError(
            f"the script ended with exit code {code} on {nproc} ranks. The last lines of its output:\n"
            + "\n".join(lines)
        )


def _notes(folder: Path, split: Split) -> dict[str, Any]:
    file = Path(_trial(folder, split, 0).notes, "notes.json")
    if not file.exists():
        raise ConfigurationError("the script ended without a fit. Give a script that calls Trainer.fit")
    notes: dict[str, Any] = json.loads(file.read_text())
    return notes


def _unseen(folder: Path, first: Split, tolerance: float) -> str:
    trial = _trial(folder, first, 0)
    with Reader(Path(trial.notes, "end")) as end, Reader(Path(trial.begin)) as begin:
        change = max((d.relative or 0.0 for d in compare(begin, end) if d.name.startswith("model/")), default=0.0)
    if change >= _CLEAR_CHANGE * tolerance:
        return ""
    return (
        f"the updates changed the weights by {change:.1e} of their size at most, so a wrong gradient may stay below the tolerance of "
        f"{tolerance:.0e}. Give the script a larger learning rate for the check, and no warm-up"
    )


def _of_further_rank(name: str) -> bool:
    """Whether `name` is a buffer of a rank that has no counterpart in one process."""
    return name.startswith("rank/") and not name.startswith("rank/00000/")


def _compared(folder: Path, first: Split, split: Split, notes: Mapping[Split, dict[str, Any]]) -> Split:
    ours, whole = notes[split]["losses"], notes[first]["losses"]
    if len(ours) != len(whole):
        raise FabricateError(
            f"split as {split}, the script made {len(ours)} updates, but {len(whole)} in one process. Let the number of updates not depend "
            "on the number of ranks"
        )
    loss = max(abs(a - b) / max(abs(b), 1e-30) if a != b else 0.0 for a, b in zip(ours, whole, strict=True))
    ends = [Path(_trial(folder, each, 0).notes, "end") for each in (split, first)]
    with Reader(ends[0]) as a, Reader(ends[1]) as b:
        differences = [d for d in compare(a, b) if d.component == "weights" and not _of_further_rank(d.name)]
    odd = next((d for d in differences if d.relative is None), None)
    if odd is not None:
        raise FabricateError(f"split as {split}, {odd.name} is {odd.text}")
    worst = max(differences, key=lambda d: d.relative or 0.0, default=None)
    if worst is None:
        return Split(split.world_size, split.micro_batch, split.accumulation, loss)
    tensor = worst.name.removeprefix("model/")
    return Split(split.world_size, split.micro_batch, split.accumulation, loss, worst.relative or 0.0, tensor)
