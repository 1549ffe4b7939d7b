"""The check that a script resumes exactly: run it undisturbed, run it again and kill it, resume it, and report the differences.

Owns the three starts, the order of the comparisons, and the verdict. Must not know torch or the loop: it reads the checkpoints and notes
that `fabricate.selfcheck.plugins` writes.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fabricate.checkpoint.format.comparing import Difference, compare
from fabricate.checkpoint.format.directory import Reader
from fabricate.errors import ConfigurationError, FabricateError
from fabricate.selfcheck.requests import TRAIN_DATA, Rehearsal, start_script, write_requests

__all__ = ["Verdict", "verify_resume"]

_SHOWN_LINES = 30


@dataclass(frozen=True)
class Verdict:
    """The result of `verify_resume`. `differences`: the component that differs first is listed first; empty if the resume is exact.

    when: "before the kill" (two undisturbed runs differ: the training itself is not deterministic), "after the resume" (a compared value
    was not restored), or "at the end" (all compared values were restored, but the runs end differently).
    """

    steps: int
    resumed_from: int
    when: str = ""
    differences: list[Difference] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All values, as JSON."""
        rows = [difference.to_json() for difference in self.differences]
        return {"exact": not rows, **vars(self), "differences": rows}


def verify_resume(
    command: Sequence[str], environment: Mapping[str, str], at: int, folder: Path, tell: Callable[[str], None]
) -> Verdict:
    """Start a script three times (undisturbed, killed in the update after `at`, resumed) and compare.

    command, environment: the same for all three; `command` is a launcher's, with the script and its arguments after "--". folder: an empty
    directory for logs, run directories and notes. tell: called with a line per start.

    Raises ConfigurationError for a script that cannot be checked, FabricateError if the script itself fails.
    """
    separator = command.index("--") + 1
    # With several ranks, the launcher starts this module, and the script follows it.
    separator += command[separator] == "fabricate.cli.rank"
    script = command[separator]
    starts = _Starts(command[:separator], command[separator:], environment, at, folder, tell)
    whole = starts.run("whole", runs="whole")
    fits = sorted(path.name for path in whole.glob("fit-*"))
    steps = _check_whole(whole, fits, script, at)
    if not any(folder.rglob("whole/**/checkpoints")):
        raise ConfigurationError(
            f"{script} saves no checkpoint. Set run_dir in its Trainer; the check replaces it with its own directory"
        )
    killed = starts.run("killed", runs="killed", kill=True)
    marks = list(killed.glob("fit-*/killed-*"))
    if not marks:
        raise FabricateError(f"the second run did not reach step {at}, but the first did. See {folder / 'killed.log'}")
    fit = marks[0].parent.name
    if drift := _before_the_kill(whole / fit, killed / fit):
        return Verdict(steps, 0, "before the kill", drift)
    resumed = starts.run("resumed", runs="killed")
    if not (resumed / fit / "resumed").is_dir():
        raise ConfigurationError(
            f"{script} did not resume when it was started a second time, but started from the beginning. Use the same "
            "run_dir in every start, and resume='auto'"
        )
    resumed_from = _step(resumed / fit / "resumed")
    lost = _after_the_resume(whole / fit, killed / fit, resumed / fit) if resumed_from == at else []
    ends = [difference for name in fits for difference in _differences(whole / name / "end", resumed / name / "end")]
    ends += _metrics(folder / "whole", folder / "killed")
    when = "after the resume" if lost else "at the end" if ends else ""
    return Verdict(steps, resumed_from, when, lost + ends)


def _check_whole(whole: Path, fits: Sequence[str], script: str, at: int) -> int:
    """The number of steps of the undisturbed start. Raises ConfigurationError if it has no fit, or not more than `at` steps."""
    if not fits:
        raise ConfigurationError(f"{script} ended without a fit. Give a script that calls Trainer.fit")
    steps = max(_step(whole / fit / "end") for fit in fits)
    if steps <= at:
        raise ConfigurationError(f"--at {at}: the run has only {steps} steps. Give a smaller step")
    return steps


def _before_the_kill(whole: Path, killed: Path) -> list[Difference]:
    """The differences of two undisturbed starts. Generators of the training data are first: if they differ, they are the cause."""
    before = _differences(whole / "at", killed / "at")
    if not before:
        return []
    drifting = _unlike(_held(whole, "at"), _held(killed, "at"), "in one start", "in the other")
    generators = [d for d in drifting if d.component == TRAIN_DATA]
    return [*generators, *before, *(d for d in drifting if d.component != TRAIN_DATA)]


def _after_the_resume(whole: Path, killed: Path, resumed: Path) -> list[Difference]:
    """The values that were not restored: parts of the checkpoint, and values of user objects."""
    return _differences(whole / "at", resumed / "resumed") + _lost(whole, killed, resumed)


@dataclass(frozen=True)
class _Starts:
    """The starts of a script, with all files in one folder."""

    launcher: Sequence[str]
    script: Sequence[str]
    environment: Mapping[str, str]
    at: int
    folder: Path
    tell: Callable[[str], None]

    def run(self, name: str, *, runs: str, kill: bool = False) -> Path:
        """Run the script and return the folder with the notes of its fits. A non-zero exit code without a kill is an error."""
        notes = self.folder / f"notes-{name}"
        rehearsal = Rehearsal(runs=str(self.folder / runs), notes=str(notes), save_at=self.at, kill=kill)
        start = [str(start_script(self.folder)), write_requests([rehearsal])]
        log, began = self.folder / f"{name}.log", time.monotonic()
        with log.open("wb") as output:
            command = [*self.launcher, *start, *self.script]
            code = subprocess.run(command, env=self.environment, stdout=output, stderr=output).returncode
        was_killed = bool(list(notes.glob("fit-*/killed-*")))
        if code and not was_killed:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
            raise FabricateError(
                f'the script ended with exit code {code} in its start "{name}". The last lines of its output:\n'
                + "\n".join(lines)
            )
        begin = "".join(f"from step {_step(path)} " for path in notes.glob("fit-*/resumed"))
        last = max((_step(path) for path in notes.glob("fit-*/end")), default=0)
        end = f"to step {self.at} and into the next" if was_killed else f"to step {last}"
        self.tell(f"{name:<8} {begin}{end}, {time.monotonic() - began:.1f} s")
        return notes


def _step(checkpoint: Path) -> int:
    with Reader(checkpoint) as reader:
        return reader.manifest.step


def _differences(one: Path, other: Path) -> list[Difference]:
    if not other.is_dir():
        return [Difference("data position", other.name, "the second start did not reach this point")]
    with Reader(one) as a, Reader(other) as b:
        return compare(a, b)


_Held = dict[tuple[str, str], str]
"""The values in user objects, as text, by object and path."""


def _held(fit: Path, moment: str) -> _Held:
    values_by_path: _Held = {}
    for file in sorted(fit.glob(f"{moment}-*.json")):
        rank = int(file.stem.rpartition("-")[2])
        for owner, values in json.loads(file.read_text())["held"].items():
            values_by_path |= {
                (owner, f"{path} on rank {rank}" if rank else path): text for path, text in values.items()
            }
    return values_by_path


def _unlike(one: _Held, other: _Held, here: str, there: str) -> list[Difference]:
    pairs = {place: (one.get(place, "nothing"), other.get(place, "nothing")) for place in dict.fromkeys([*one, *other])}
    return [Difference(owner, path, f"{a} {here}, {b} {there}") for (owner, path), (a, b) in pairs.items() if a != b]


def _lost(whole: Path, killed: Path, resumed: Path) -> list[Difference]:
    """The values of user objects that the resume did not restore, and that also differ at the end. Values that differ between two
    undisturbed starts (clocks, paths) do not count."""
    before, again = _held(whole, "at"), _held(killed, "at")
    same = {place for place in before if before[place] == again.get(place)}
    ends = {(d.component, d.name) for d in _unlike(_held(whole, "end"), _held(resumed, "end"), "", "")}
    differences = _unlike(before, _held(resumed, "resumed"), "before the kill", "after the resume")
    return [d for d in differences if (d.component, d.name) in same & ends]


def _metrics(whole: Path, killed: Path) -> list[Difference]:
    """The first different line of each metrics.jsonl, without its "clock"."""
    differences = []
    for file in sorted(whole.rglob("metrics.jsonl")):
        name = file.relative_to(whole)
        one, other = (_lines(root / name) for root in (whole, killed))
        if one != other:
            number = next(n for n, pair in enumerate(zip([*one, {}], [*other, {}], strict=False)) if pair[0] != pair[1])
            pair = [lines[number] if number < len(lines) else "nothing" for lines in (one, other)]
            differences.append(Difference("metrics", f"{name}, line {number + 1}", f"{pair[0]} against {pair[1]}"))
    return differences


def _lines(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key != "clock"} for line in lines]
