"""Resuming a run: choose the newest good checkpoint, compare it with the running fit, and restore it. A checkpoint is verified before
anything of it is used.

Owns: the choice, the files that are set or moved aside, the values that have to be equal, the order in which state is restored. Must not
know: the loop; how a save works (fabricate.training.saves.saving); the bytes of the format (fabricate.checkpoint.format.directory).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fabricate.checkpoint.format import directory as format
from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.format.files import explained
from fabricate.checkpoint.format.lock import locked
from fabricate.checkpoint.format.retention import best_checkpoints, keep_of
from fabricate.checkpoint.format.schema import saved_world_size, shared_state
from fabricate.checkpoint.state.constants import about_constants, set_otherwise
from fabricate.checkpoint.state.logical import (
    compare_frozen,
    compare_model,
    compare_optimizer,
    decode_mapping,
    load_model,
    optimizer_groups,
)
from fabricate.errors import CheckpointError
from fabricate.metrics.counters import Progress
from fabricate.module import beside_weights, not_taken, overrides
from fabricate.training.saves.changes import Change, check_changes, take_over
from fabricate.training.saves.saved_state import data_identity, restore
from fabricate.training.saves.saving import checkpoints, prune
from fabricate.training.state.run_state import Run

LINES = 2
"""The largest number of lines that `resume` prints."""


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


def surplus_updates(run: Run, resume: str) -> int:
    """The updates that the epochs before the checkpoint of `choose` had in addition to those that they would have with the rows and the
    global batch of this run; negative if they had fewer. Reads counters alone, before anything is verified, because schedules need the
    number of all updates. All ranks."""
    return int(by_main(run, partial(_surplus_updates, run, resume)))


def _surplus_updates(run: Run, resume: str) -> int:
    source = run.source
    assert source is not None
    if resume == "never" or source.num_samples is None or source.global_batch is None:
        return 0
    newest_first = [] if run.run_dir is None else format.committed(checkpoints(run))[::-1]
    for path in newest_first if resume == "auto" else [Path(resume)]:
        # `choose` reports what is damaged
        with contextlib.suppress(CheckpointError, OSError), Reader(format.find(path)) as reader:
            tree = shared_state(reader)
            if "progress" not in tree or None in (tree["data"]["num_samples"], tree["data"]["global_batch_size"]):
                return 0
            before = _updates_until(tree["progress"], tree["data"]["num_samples"], tree["data"]["global_batch_size"])
            now = _updates_until(tree["progress"], source.num_samples, source.global_batch)
            return int(tree.get("surplus_updates", 0) + before - now)
    return 0


def _updates_until(progress: dict[str, Any], rows: int, batch: int) -> int:
    """The updates until a point of a fit whose epochs have `rows` rows in batches of `batch`, counted back from the end of its epoch."""
    epoch, position = int(progress["epoch"]), int(progress["position"])
    return (epoch + 1) * math.ceil(rows / batch) - math.ceil((rows - position) / batch)


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
    _cut_metrics(run, 0)  # lines of a run that ended before its first checkpoint


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


@contextlib.contextmanager
def _saying_how_to_start_over() -> Iterator[None]:
    try:
        yield
    except CheckpointError as exc:
        if "resume='never'" not in str(exc):
            exc.add_note("to start over instead of resuming: fit(..., resume='never'), or another run_dir")
        raise


@_saying_how_to_start_over()
def resume(run: Run, path: Path) -> None:
    """Restore the checkpoint `path`. All ranks. Everything is compared before anything changes, so that an error has no effect."""
    with Reader(path, part=(run.engine.rank, run.engine.world_size)) as reader:
        tree = shared_state(reader)
        if "optimizers" not in tree:
            raise CheckpointError(
                f"{path} holds weights only, so a fit cannot resume from it. Start a new fit from these weights, with "
                f"{type(run.module).__name__}.load_from_checkpoint({str(path)!r}), or start over with resume='never'"
            )
        saved_world_size(reader)  # raises an error before anything changes if the manifest has none
        of_data = list(_compare_data(run, path, tree))
        _compare_parts(run, path, tree)
        compare_model(reader, run.module, run.engine.strategy)
        compare_frozen(reader, run.module, run.engine.strategy)
        groups = optimizer_groups(run.module, run.optim.optimizers, run.engine.strategy)
        for label, optimizer in run.optim.optimizers.items():
            compare_optimizer(path, label, optimizer, tree["optimizers"][label], groups[label])
        changes = [*of_data, *check_changes(run, path, tree)]
        take_constants = _constants(run, reader, tree)
        restore(run, reader, tree)
        take_over(run, changes)
        changes += take_constants()
        saved = reader.manifest.topology
    if run.run_dir is not None and path.resolve().parent == checkpoints(run).resolve():
        run.checkpoints.newest, run.checkpoints.saved_step = path, run.progress.step
        prune(run)  # a kill may have come after the last save and before the deletion of old checkpoints
        _cut_metrics(run, tree["metrics_bytes"])
    now = run.engine.topology()
    run.journal.event("resumed", path=path.name, saved=saved, now=now, changed=[str(change) for change in changes])
    changed = [f"{name} {value} -> {now.get(name, 1)}" for name, value in saved.items() if value != now.get(name)]
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    run.module.print("; ".join([f"resumed from {shown} (step {run.progress.step})", *changed]))
    if changes:
        run.module.print(f"changed since it was saved: {'; '.join(map(str, changes))}")


def _compare_data(run: Run, path: Path, tree: Any) -> Iterator[Change]:
    """Refuse other data than that of the checkpoint, and yield the accepted changes."""
    accept_changes = run.settings.accept_changes
    now, then = data_identity(run), tree["data"]
    compared = {
        "global_batch_size": "global_batch_size",
        "num_samples": "train",
        "shuffle": "train",
        "samplers": "train",
    }
    for key, argument in compared.items():
        if key in then and now[key] != then[key]:
            if argument not in accept_changes:
                raise CheckpointError(
                    f"{path} was saved with {key}={then[key]}, but this run has {now[key]}: samples would be lost or repeated. Use "
                    f"the same {argument}, or accept the change: Trainer(accept_changes=({argument!r},))"
                )
            yield Change(argument, key, str(then[key]), str(now[key]))
    if _differ("batches_per_update", then, now):
        if "global_batch_size" not in accept_changes:
            raise CheckpointError(
                f"{path} was saved with {then['batches_per_update']} batches of train per update, but this run has "
                f"{now['batches_per_update']} (ranks x gradient_accumulation_steps), so an update would get different batches. Choose "
                "gradient_accumulation_steps so that the number is the same, or accept the change: "
                "Trainer(accept_changes=('global_batch_size',))"
            )
        yield Change(
            "global_batch_size", "batches per update", str(then["batches_per_update"]), str(now["batches_per_update"])
        )
    _compare_rows(run, path, tree, now)
    seed = run.settings.seed
    if seed is not None and seed != tree["seed"]:
        if "seed" not in accept_changes:
            raise CheckpointError(
                f"{path} was saved with seed={tree['seed']}, but this run has seed={seed}; use the same seed, or "
                "Trainer(accept_changes=('seed',))"
            )
        yield Change("seed", "seed", str(tree["seed"]), str(seed))


def _compare_rows(run: Run, path: Path, tree: Any, now: dict[str, Any]) -> None:
    """Refuse other rows than those of the checkpoint, or another order. Rows that may only have been computed again get a warning."""
    then, accept_changes = tree["data"], run.settings.accept_changes
    if _differ("stream_readers", then, now) and tree["progress"]["position"] and "train" not in accept_changes:
        raise CheckpointError(
            f"{path} was saved in the middle of an epoch, with a stream that {then['stream_readers']} process(es) of its DataLoader read; "
            f"now {now['stream_readers']} would read it, in another order, so samples would be lost or repeated. Use the same num_workers "
            "(0 and 1 are the same), or accept the change: Trainer(accept_changes=('train',))"
        )
    if _differ("indices", then, now) and "train" not in accept_changes:
        raise CheckpointError(
            f"{path} was saved with other rows of the data set than train has now: the indices of the Subset or sampler differ, "
            "so training could use rows that were held out for validation. Draw the same rows, for instance with "
            "random_split(..., generator=torch.Generator().manual_seed(0)). For another fold, use another run_dir. Or accept the "
            "change: Trainer(accept_changes=('train',))"
        )
    other = next((name for name in ("fingerprint", "attributes") if _differ(name, then, now)), None)
    if other and "train" not in accept_changes:
        note = (
            f"{path} was saved with train data of fingerprint {then[other]}, but train now has fingerprint "
            f"{now[other]}: the rows differ, or the same rows were computed again. With different rows, samples would be "
            "lost or repeated. Pass the same data, or accept the change: Trainer(accept_changes=('train',))"
        )
        run.journal.event("data_changed", reason=note)
        if run.engine.rank == 0:
            print(f"warning: {note}", file=sys.stderr, flush=True)
    for name, val in now["validation"].items():
        saved = then.get("validation", {}).get(name, {})
        if any(_differ(key, saved, val) for key in val):
            run.journal.note(
                f"{f'the set {name!r} of val' if name else 'val'} has other rows than when {path} was saved, or they were computed again. "
                "With other rows, metrics from before and after this point cannot be compared, as keep and EarlyStopping do"
            )


def _constants(run: Run, reader: Reader, tree: Any) -> Callable[[], list[Change]]:
    """Note buffers and frozen weights that the script sets otherwise than the checkpoint has them. If this change is accepted, the returned
    function, called after the rest is restored, gives them the values of the script. All ranks."""
    saved = tree["module"].get("constants")
    names = list(set_otherwise(reader, saved, run.checkpoints.constants))
    if "constants" not in run.settings.accept_changes:
        run.checkpoints.constants |= {name: saved[name] for name in names}
        if names:
            run.journal.note(
                f"{about_constants(names)}. To use the values of the script: Trainer(accept_changes=('constants',))"
            )
        return list
    tensors = dict((*run.module.named_buffers(), *run.module.named_parameters()))
    part = run.engine.strategy.local_part
    values = {name: part(tensors[name]).memory.detach().clone() for name in names}

    def take() -> list[Change]:
        for name, value in values.items():
            part(tensors[name]).write(value.reshape(-1))
        return [Change("constants", name, "as in the checkpoint", "as in the script") for name in names]

    return take


def _differ(name: str, then: Any, now: Any) -> bool:
    """Whether a value that identifies the data is known on both sides and differs."""
    return None not in (then.get(name), now[name]) and then[name] != now[name]


def _compare_parts(run: Run, path: Path, tree: Any) -> None:
    if set(run.optim.optimizers) != set(tree["optimizers"]):
        raise CheckpointError(
            f"{path} has the optimizers {sorted(tree['optimizers'])}, but this run has {sorted(run.optim.optimizers)}; return the "
            "same optimizers from configure_optimizers, or start over with resume='never'"
        )
    schedulers = {label: s.kind for label, s in run.optim.schedules.items()}
    saved_schedulers = {label: s["kind"] for label, s in tree["schedulers"].items()}
    if schedulers != saved_schedulers:
        raise CheckpointError(
            f"{path} has the schedulers {saved_schedulers}, but this run has {schedulers}; return the same schedulers from "
            "configure_optimizers, or start over with resume='never'"
        )
    listening = {name for name, _ in run.calls.listeners("on_save")}
    missing = sorted(n for n in tree["plugins"] if n not in listening)
    surplus = sorted(n for n in listening if n not in tree["plugins"])
    for names, text in ((missing, "holds the state of"), (surplus, "has no state for")):
        if names and "plugins" not in run.settings.accept_changes:
            raise CheckpointError(
                f"{path} {text} the plugin {', '.join(names)}; use the same plugins, or Trainer(accept_changes=('plugins',))"
            )


def _cut_metrics(run: Run, size: int) -> None:
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


def load_weights_only(run: Run, path: Path) -> dict[str, Any]:
    """Load the weights of a checkpoint, and the state that listeners save with the weights, into the prepared module. Return its
    counters, in the form of `Progress.state()`. All ranks."""
    with Reader(format.find(path)) as reader:
        reader.verify()
        compare_model(reader, run.module, run.engine.strategy)
        compare_frozen(reader, run.module, run.engine.strategy)
        load_model(reader, run.module, run.engine.strategy)
        tree = shared_state(reader)
        if names := list(set_otherwise(reader, tree["module"].get("constants"), run.checkpoints.constants)):
            run.journal.note(about_constants(names))
        saved = tree.get("plugins", {})  # an imported checkpoint has none
        listeners = dict(run.calls.listeners("on_load_weights"))
        for name, call in listeners.items():
            if name in saved:
                call(trainer=run.trainer, module=run.module, state=decode_mapping(reader, saved[name], name))
        if absent := [name for name in tree.get("beside_weights", ()) if name not in {*listeners, "module"}]:
            run.journal.note(beside_weights(absent, path))
        if saved.get("module") and not overrides(run.module, "on_load_weights"):
            run.journal.note(not_taken(run.module, path))
        return {
            **Progress().state(),
            "step": reader.manifest.step,
            **tree.get("progress", {}),
        }  # an imported one has a step only


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
