"""Saves of a run, and what follows: the checkpoint is reported, older ones are deleted, and a failed write is tried again at the next save.

Must not know: the loop; what the state consists of (`saved_state`); how it becomes durable (`fabricate.checkpoint.state.commit`); how it is
restored (`resuming`).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from fabricate.checkpoint.format import directory as format
from fabricate.checkpoint.format.files import StorageError
from fabricate.checkpoint.format.retention import among_best, best_checkpoints, kept
from fabricate.checkpoint.state import commit as committing
from fabricate.checkpoint.state.contents import Content, not_finite, refusal
from fabricate.checkpoint.state.staging import read_ahead
from fabricate.distributed.failures import is_echo
from fabricate.errors import CheckpointError, PluginError
from fabricate.hooks import PROJECT
from fabricate.training.reports.log_lines import write_line
from fabricate.training.saves.replicas import compare, note_states_apart
from fabricate.training.saves.saved_state import assemble, own_buffers, sums_of_bits
from fabricate.training.saves.unsaved import note_changed
from fabricate.training.state.run_state import Run
from fabricate.training.updates.optimizer_modes import meant_weights

MOST_FAILED = 3
"""The number of failed writes in a row after which the fit raises an error."""
_DRAIN_SECONDS = 60.0  # the longest wait for a save in progress when the fit fails: other ranks may have ended


def checkpoints(run: Run) -> Path:
    """The directory of the run's checkpoints."""
    assert run.run_dir is not None
    return run.run_dir / "checkpoints"


def save(run: Run, *, last: bool = False) -> None:
    """Save into the run directory, unless this update is already saved. At a boundary, all ranks.

    With save="async" this begins a save, after waiting for the one before. If a listener fails in `on_save`, the save is aborted and the
    error is raised on every rank. If the file system refuses a write, this is reported, and the next save that is due tries again; the
    third failure in a row, or a failure with `last`, is raised. The previous checkpoint then stays the newest.
    """
    finish_background_save(run)
    if run.run_dir is None or run.checkpoints.saved_step == run.progress.step:
        return
    path, began = checkpoints(run) / f"step-{run.progress.step:08d}", time.monotonic()
    run.checkpoints.last_save = last
    # The loop has checked the weights at its end, and a background save checks its copies.
    if not last and (run.checkpoints.background is None or run.calls.write_checkpoint is not None):
        check_weights(run)
    try:
        if run.calls.write_checkpoint is None:
            write(run, path)
        else:
            run.calls.write_checkpoint(run.trainer, path)
            _check_written(run, path)
    except StorageError as exc:
        _refused(run, path, exc, last)
        return
    run.checkpoints.saved_step = run.progress.step
    if run.checkpoints.background is None or not run.checkpoints.background.busy:
        _saved(run, path, run.progress.step, time.monotonic() - began)


def request_best(run: Run, metrics: Mapping[str, float]) -> None:
    """Request a save if the validation that gave `metrics` is among the best, so that the best checkpoint has the validated weights. Only
    rank 0 requests; all ranks save."""
    keep = run.settings.keep
    value = metrics.get(keep["metric"], math.nan)
    if run.run_dir is None or run.engine.rank != 0 or "best" not in keep:
        return
    if not math.isfinite(value):
        if value == (math.inf if keep["mode"] == "max" else -math.inf):
            run.journal.note(
                f"{keep['metric']}={value} is not counted among the best, because checkpoints record finite metrics only; log a value that "
                "stays finite, for example with clamp"
            )
        return
    if not among_best(format.committed(checkpoints(run)), keep, value):
        return
    # saved by SaveOnException, or before an update that was skipped
    if run.checkpoints.saved_step == run.progress.step:
        run.journal.note(
            f"the checkpoint of step {run.progress.step} was saved before the validation that gave {keep['metric']}={value:g}, so "
            "this checkpoint is not counted among the best"
        )
    run.requests.ask(save=True)


def save_requested(run: Run) -> None:
    """Save into the run directory if any rank requests it or a save is due, and to the paths that hooks requested. All ranks."""
    requests = run.requests
    wanted, paths = requests.save, requests.paths
    # Cleared before the ranks wait for each other; a request made meanwhile is for the next boundary.
    requests.save, requests.paths = False, []
    save_wanted, paths_wanted = run.engine.agree([int(wanted), int(bool(paths))])
    everywhere = run.engine.gather_json(paths) if paths_wanted else []
    if save_wanted:
        save(run)
    for path in dict.fromkeys(path for paths in everywhere for path in paths):
        write_now(run, Path(path))


def write(run: Run, path: Path) -> None:
    """Write the checkpoint `path` of the run directory, or begin to write it in the background. All ranks."""
    with meant_weights(run):
        content, logs = _assemble(run, path), _logs(run)
        run.checkpoints.written = None
        if run.checkpoints.background is None or run.checkpoints.last_save:
            _write(run, content, path, logs)
        else:
            trained = {f"model/{n}": n for n, p in run.module.named_parameters() if p.requires_grad}
            run.checkpoints.background.start(content, path, logs, trained)
    run.checkpoints.written = path
    # a checkpoint with weights only cannot be resumed, so missing state does not matter
    if not run.settings.save_weights_only:
        note_changed(run)


def _check_written(run: Run, path: Path) -> None:
    """Raise `PluginError` unless `path` is a good checkpoint after the listeners of write_checkpoint. If a listener wrote it instead of the
    loop, it is read in full, each rank its share. All ranks."""
    ours = run.checkpoints.written == path
    if ours and run.checkpoints.background is not None and run.checkpoints.background.busy:
        return  # `finish_background_save` reports the result
    fault = ""
    try:
        if not ours:
            with format.Reader(path) as reader:
                reader.verify(run.engine.rank, run.engine.world_size)
        elif run.engine.rank == 0:  # all files have to be there, which one rank can check
            format.Reader(path).close()
    except CheckpointError as exc:
        fault = str(exc)
    if fault := next(filter(None, run.engine.gather_if(bool(fault), fault)), ""):
        listeners = [name for name in run.calls.manager.order("write_checkpoint") if name != PROJECT]
        raise PluginError(
            f"hook write_checkpoint of plugin {', '.join(map(repr, listeners))} returned without a good checkpoint at {path}: {fault}. "
            "Wrap the hook with @hookimpl(wrapper=True) and `return (yield)`, or write all of the checkpoint; the previous one is intact"
        )


def write_now(run: Run, path: Path) -> None:
    """Write the checkpoint `path` and return when it is durable. All ranks."""
    check_weights(run)
    compare(run)
    with meant_weights(run):
        replaced = _replaced(run)
        _write(run, _assemble(run, path, replaced=replaced), path, _logs(run))
    if replaced:
        newest = run.checkpoints.newest
        where = f". The state after the last update is in {newest}" if newest else ""
        run.journal.note(
            f"{path} holds the weights and buffers that the module has now. They are not those of the last update (load_best, an average, "
            f"or a hook changed them), so it holds nothing else, and a fit cannot resume from it{where}"
        )


def _replaced(run: Run) -> bool:
    """Whether the fit has ended and the module holds other weights or buffers than after the last update. All ranks."""
    trained = run.checkpoints.trained
    return trained is not None and any(run.engine.agree([int(sums_of_bits(run) != trained)]))


def write_last_update(run: Run, path: Path) -> None:
    """During a failure of the run: write the checkpoint `path` of the state after the last complete update, and return when it is durable.
    The caller makes sure that weights and optimizers are in this state. `CheckpointError` unless every rank fails and calls this within
    some seconds of the others."""
    assert run.now.failure is not None
    drain(run)
    together = not is_echo(run.now.failure) and run.engine.all_failed(f"{run.progress.step} {path}")
    if not together:
        raise CheckpointError(
            "all ranks have to write a checkpoint together, but another rank is still running, failed elsewhere or has ended"
        )
    if path.exists():  # the background save has just written it
        return
    if run.now.in_update:
        run.metrics.forget_update()
        run.module._logged.clear()
    assert run.source is not None
    run.progress.micro_step, run.source.state = run.now.whole
    run.engine.strategy.after_evaluation(run.engine.model)  # a forward may have left gathered parameters
    write_now(run, path)
    run.journal.event("saved", step=run.progress.step, path=path.name)
    if run.run_dir is not None and path.parent == run.run_dir / "checkpoints":
        run.checkpoints.newest = path  # the message of the failure names it


def _write(run: Run, content: Content, path: Path, logs: list[Path]) -> None:
    if run.engine.device.type != "cpu":
        content.chunks = read_ahead(content.chunks)
    committing.write(run.engine, content, path, logs)


def check_weights(run: Run) -> None:
    """Raise an error if a trained weight is not finite, before a checkpoint or the end: a finite loss may have an infinite gradient. All
    ranks; waits for the device."""
    strategy, trained = run.engine.strategy, ((n, p) for n, p in run.module.named_parameters() if p.requires_grad)
    wrong = not_finite(((name, strategy.local_part(p).memory) for name, p in trained), run.engine.device)
    if any(run.engine.agree([len(wrong)])):
        named = sorted({name for names in run.engine.gather_json(wrong[:5]) for name in names})
        raise refusal(run.progress.step, named)


def finish_background_save(run: Run) -> None:
    """Wait for a background save in progress, and report its success or failure. At a boundary, all ranks."""
    background = run.checkpoints.background
    if background is None or not background.busy:
        return
    failure = background.finish()
    assert background.path is not None
    if failure is None:
        _saved(run, background.path, background.step, background.seconds, background=True)
        return
    run.checkpoints.saved_step = -1
    if not isinstance(failure, StorageError):
        run.journal.event("save_failed", path=background.path.name, reason=str(failure))
        raise failure
    _refused(run, background.path, failure, last=False)


def drain(run: Run) -> None:
    """Wait for a background save in progress while the fit fails. One rank; does not raise an error of the save."""
    if run.checkpoints.background is not None and run.checkpoints.background.busy:
        failure = run.checkpoints.background.finish(_DRAIN_SECONDS)
        name = run.checkpoints.background.path.name if run.checkpoints.background.path is not None else ""
        if failure is None:
            run.journal.event("saved", step=run.checkpoints.background.step, path=name)
        else:
            run.journal.event("save_failed", step=run.checkpoints.background.step, path=name, reason=str(failure))


def _assemble(run: Run, path: Path, *, replaced: bool = False) -> Content:
    write_line(run)
    run.journal.tokens.read()  # a save waits for the device in any case
    run.journal.clock.tick()
    buffers = own_buffers(run)
    content, failure = None, None
    try:
        content = assemble(run, buffers, replaced=replaced)
    except Exception as exc:
        failure = exc
    committing.agree(run.engine, path, failure)
    assert content is not None
    content.exchange()
    note_states_apart(run)
    return content


def _logs(run: Run) -> list[Path]:
    file = run.run_dir / "metrics.jsonl" if run.run_dir is not None else None
    return [file] if file is not None and file.exists() else []


def _saved(run: Run, path: Path, step: int, seconds: float, background: bool = False) -> None:
    """Report a durable checkpoint. seconds: the time that the save took; background: whether training continued meanwhile."""
    if run.checkpoints.failed_saves:
        run.journal.event("retried", step=step, path=path.name, failed=run.checkpoints.failed_saves)
    run.checkpoints.newest, run.checkpoints.failed_saves = path, 0
    meanwhile = {"background": True} if background else {}
    run.journal.event("saved", step=step, path=path.name, seconds=round(seconds, 3), **meanwhile)
    if run.calls.on_saved is not None:
        run.calls.on_saved(run.trainer, run.module, path, step)
    prune(run)


def _refused(run: Run, path: Path, failure: StorageError, last: bool) -> None:
    run.checkpoints.failed_saves += 1
    run.journal.event("save_failed", path=path.name, reason=str(failure))
    if last or run.checkpoints.failed_saves >= MOST_FAILED:
        raise failure
    if run.engine.rank == 0:
        print(
            f"warning: {failure}. Training goes on; the next save that is due tries again", file=sys.stderr, flush=True
        )


def _waits_for_metric(run: Run, found: list[Path]) -> bool:
    """Whether the metric of `keep` is one of the training that no checkpoint has yet; until then nothing is deleted."""
    keep = run.settings.keep
    if (
        "best" not in keep
        or keep["metric"].startswith("val")
        or best_checkpoints(found, keep["metric"], keep["mode"], [])
    ):
        return False
    recorded = ", ".join(run.journal.latest) or "nothing yet"
    run.journal.note(
        f"keep: the best checkpoints are to be kept by {keep['metric']!r}, but no checkpoint has this metric yet, and until one has "
        f"it, none is deleted. Metrics that are recorded so far: {recorded}"
    )
    return True


def prune(run: Run) -> None:
    """Delete the checkpoints that `keep` does not cover, on rank 0. The newest is durable by now, so no older one is needed for safety. A
    failed deletion is reported, and tried again after the next save."""
    if run.engine.rank != 0 or run.settings.keep["last"] is None:
        return
    try:
        committed = format.committed(checkpoints(run))
        if _waits_for_metric(run, committed):
            return
        held = kept(committed, run.settings.keep)
        format.prune(path for path in committed if path not in held)
    except StorageError as exc:
        run.journal.event("prune_failed", reason=str(exc))
        print(f"warning: {exc}. Training goes on; the next save tries again", file=sys.stderr, flush=True)
