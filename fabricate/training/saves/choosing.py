"""The checkpoint that a fit resumes from, or whose weights are loaded: the newest good one, a path, or the best. It is verified before
anything of it is used.

Owns: the lock of the run directory, the choice, the files that are set or moved aside. Must not know: what is compared (`compared`), how
state is restored (`resuming`), the bytes of the format (fabricate.checkpoint.format.directory).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fabricate.checkpoint.format import directory as format
from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.format.files import explained
from fabricate.checkpoint.format.lock import locked
from fabricate.checkpoint.format.retention import best_checkpoints, keep_of
from fabricate.errors import CheckpointError
from fabricate.training.saves.saving import checkpoints
from fabricate.training.state.run_state import Run


def occupy(run: Run, warn: Callable[[str], None]) -> None:
    """Create the run directory, and lock it against other runs until this one ends. All ranks."""
    if run.run_dir is not None:
        note = by_main(run, partial(_occupy, run, run.run_dir))
        if note and run.engine.rank == 0:
            warn(f"note: {note}")


def _occupy(run: Run, directory: Path) -> str:
    with explained("use", directory):
        directory.mkdir(parents=True, exist_ok=True)
        note = run.closing.enter_context(locked(directory))
        events = directory / "events.jsonl"
        if events.exists() and not (text := events.read_bytes()).endswith(b"\n"):  # a kill may leave half a line
            os.truncate(events, text.rfind(b"\n") + 1)
        return note


def choose(run: Run, resume: str | Path, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume from, verified in full, the same on every rank; None to start over. All ranks.

    "auto": the newest good checkpoint of the run directory; damaged ones are reported and set aside. A path: this checkpoint, or an error.
    Each rank verifies its share of the blocks, so that verifying a large checkpoint takes no longer than loading it.
    """
    automatic = str(resume) in ("auto", "never")
    candidates = [Path(path) for path in by_main(run, lambda: _candidates(run, resume, warn))]
    for path in candidates:
        mine = _fault(path, run.engine.rank, run.engine.world_size)
        fault = next((each for each in run.engine.gather_if(mine is not None, mine) if each), None)
        if fault is None:
            if not automatic and run.run_dir is not None:
                by_main(run, partial(_make_room, run.run_dir, path, warn))
            return path
        text, newer = fault
        if newer:  # intact, but written by a newer version: it is not set aside
            raise format.NewerFormatError(text)
        if not automatic:
            raise CheckpointError(text)
        by_main(run, partial(_set_aside, run, path, text, warn))
    if resume == "auto" and run.run_dir is not None:
        by_main(run, partial(_begin, run, started=bool(candidates)))
    return None


def _original(run: Run, path: Path) -> Path:
    """The checkpoint of this run of which `path` is a copy (Ray makes copies); else `path`."""
    if run.run_dir is None:
        return path
    manifest = (path / "manifest.json").read_bytes()
    own = (p for p in format.committed(checkpoints(run)) if (p / "manifest.json").read_bytes() == manifest)
    return next(own, path)


def by_main(run: Run, work: Callable[[], Any]) -> Any:
    """The result of `work` on rank 0, on every rank; its error is also raised on every rank. All ranks."""
    answer: list[Any] = [None, None]
    if run.engine.rank == 0:
        try:
            answer[0] = work()
        except (CheckpointError, OSError) as exc:
            answer[1] = str(exc)
    result, error = run.engine.broadcast_json(answer)
    if error:
        raise CheckpointError(error)
    return result


def _candidates(run: Run, resume: str | Path, warn: Callable[[str], None]) -> list[str]:
    """The checkpoints that the fit may resume from, the newest first."""
    if str(resume) not in ("auto", "never"):
        path = Path(resume)
        if not path.exists():
            raise CheckpointError(
                f"resume={str(resume)!r} does not exist; give 'auto', 'never' or the path of a checkpoint"
            )
        try:
            return [str(_original(run, format.find(path)))]
        except CheckpointError as exc:
            raise CheckpointError(f"resume: {exc}") from exc
    if run.run_dir is None:
        return []
    if resume == "never":
        _move_aside(run.run_dir, _EVERYTHING, "resume='never'", warn)
        return []
    format.clean(checkpoints(run))
    return [str(path) for path in reversed(format.committed(checkpoints(run)))]


def _fault(path: Path, rank: int, world_size: int) -> list[Any] | None:
    """The fault in this rank's share of a checkpoint, and whether a newer version wrote it; None if it is good."""
    try:
        with Reader(path, part=(rank, world_size)) as reader:
            reader.verify(rank, world_size)
    except CheckpointError as exc:
        return [str(exc), isinstance(exc, format.NewerFormatError)]
    return None


def _set_aside(run: Run, path: Path, fault: str, warn: Callable[[str], None]) -> None:
    aside = format.set_aside(path, fault)
    run.journal.event("rejected", path=path.name, reason=fault, moved_to=aside.name)
    warn(f"{fault}\n  this checkpoint is renamed to {aside.name}; trying the one before it")


def _begin(run: Run, started: bool) -> None:
    root = checkpoints(run)
    if started or any(root.glob(".bad-*")):  # also on later attempts: only the user may decide to start over
        raise CheckpointError(
            f"no checkpoint in {root} is good (they were set aside there); start over with resume='never', or restore one"
        )
    cut_metrics(run, 0)  # lines of a run that ended before its first checkpoint


_EVERYTHING = ("checkpoints", "metrics.jsonl", "events.jsonl", "model", "plan.json", "trackers", "samples.jsonl")


def _make_room(run_dir: Path, path: Path, warn: Callable[[str], None]) -> None:
    """Move aside the checkpoints that a run which starts from `path` would mix with its own."""
    root = run_dir / "checkpoints"
    if path.resolve().parent != root.resolve():
        _move_aside(run_dir, _EVERYTHING, f"resume={str(path)!r} is of another run", warn)
        return
    names = [p.name for p in format.committed(root)]
    newer = [f"checkpoints/{name}" for name in names[names.index(path.name) + 1 :]] if path.name in names else []
    _move_aside(run_dir, newer, f"resume={str(path)!r} goes back", warn)


def _move_aside(run_dir: Path, names: Iterable[str], why: str, warn: Callable[[str], None]) -> None:
    """Move the files that are in the way of a new run into a folder before-N, so that nothing is lost or mixed."""
    present = [name for name in names if (run_dir / name).exists()]
    if not present or present == ["plan.json"]:  # a plan alone is from a run that never began
        return
    number = next(n for n in range(1, 10_000) if not (run_dir / f"before-{n}").exists())
    target = run_dir / f"before-{number}"
    for name in present:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).rename(target / name)
    warn(f"{why}: {', '.join(present)} moved to {target}")


def cut_metrics(run: Run, size: int) -> None:
    """Truncate metrics.jsonl to its size at the checkpoint; the later lines will be written again."""
    file = run.run_dir / "metrics.jsonl" if run.run_dir is not None else None
    if run.engine.rank == 0 and file is not None and file.exists() and file.stat().st_size > size:
        with file.open("r+b") as handle:
            _note_repeated(run, handle, size)
            handle.truncate(size)


def _note_repeated(run: Run, log: BinaryIO, size: int) -> None:
    """Record the step that the run had reached, the seconds that this took, and when: the lines that hold them are about to be cut."""
    log.seek(size)
    step, seconds, until = run.progress.step, 0.0, 0.0
    for text in log.read().split(b"\n")[:-1]:  # the last part is an incomplete line, or empty
        with contextlib.suppress(ValueError, LookupError, TypeError):
            line = json.loads(text)
            clock, done = line["clock"], line["step"] - step
            seconds += clock.get("seconds_per_step", 0.0) * done + clock.get("evaluation_seconds", 0.0)
            step, until = line["step"], clock["time"]
    if step > run.progress.step:
        run.journal.event("repeated", through=step, seconds=round(seconds, 3), until=until)


def best(run: Run) -> tuple[Path, float] | None:
    """The best checkpoint of the run directory by the metric of `keep`, and its value. None if `keep` has no "best", or no checkpoint
    recorded the metric. All ranks."""
    keep = run.settings.keep
    if run.run_dir is None or "best" not in keep:
        return None

    def look() -> list[Any] | None:
        ranked = best_checkpoints(format.committed(checkpoints(run)), keep["metric"], keep["mode"], unreadable=[])
        if not ranked:
            return None
        with Reader(ranked[0]) as reader:
            return [str(ranked[0]), float(reader.manifest.metrics[keep["metric"]])]

    chosen = by_main(run, look)
    return None if chosen is None else (Path(chosen[0]), chosen[1])


def find(run_dir: Path, which: str, keep: dict[str, Any]) -> tuple[Path, str]:
    """The "last" or the "best" checkpoint of a run directory, and a description of it. The best is chosen by the metric of `keep`, or by
    the metric of the run if `keep` names none."""
    if "best" not in keep and keep["metric"] == "val_loss":  # the default value
        keep = keep_of(run_dir) or keep
    checkpoints = format.committed(run_dir / "checkpoints") if (run_dir / "checkpoints").is_dir() else []
    chosen = checkpoints[::-1] if which == "last" else best_checkpoints(checkpoints, keep["metric"], keep["mode"])
    if not chosen and which == "best" and checkpoints:
        with Reader(checkpoints[-1]) as reader:
            recorded = ", ".join(sorted(reader.manifest.metrics)) or "none"
        raise CheckpointError(
            f"checkpoint='best': no checkpoint in {run_dir} recorded {keep['metric']!r}; recorded are {recorded}: name one with "
            "Trainer(keep={'last': 2, 'best': 1, 'metric': ..., 'mode': 'min'})"
        )
    if not chosen:
        raise CheckpointError(
            f"checkpoint={which!r}: {run_dir} has no checkpoint; fit with this run_dir first, or give a path"
        )
    return chosen[0], "" if which == "last" else _about_best(chosen[0], keep)


def _about_best(path: Path, keep: dict[str, Any]) -> str:
    """A text that says by which metric, and among which checkpoints, a checkpoint is the best."""
    with Reader(path) as reader:
        text = f"the weights are those of {path} ({keep['metric']} {reader.manifest.metrics[keep['metric']]:g})"
    if "best" in keep or keep["last"] is None:
        return text
    return (
        f"{text}, the best of the checkpoints that still exist. The best one of the run may be deleted already; to keep it, fit "
        f"with Trainer(keep={{'last': 1, 'best': 1, 'metric': {keep['metric']!r}, ...}})"
    )
