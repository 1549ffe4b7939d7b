"""The end of a fit: its last checkpoint, RUN_DIR/model/, and the report. Must not know: the loop."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from fabricate.errors import ConfigurationError
from fabricate.launch.commands import tell_preempted
from fabricate.model.export import export_model
from fabricate.module import refusing_logs, writes_itself
from fabricate.training.evaluations.evaluation import validate
from fabricate.training.reports.log_lines import log_rest
from fabricate.training.saves import choosing, resuming, saving
from fabricate.training.saves.saved_state import sums_of_bits
from fabricate.training.state.run_state import Run
from fabricate.training.updates.optimizer_modes import eval_mode


def finish_fit(run: Run, reason: str) -> None:
    """Save for the last time; export the weights, or report why the fit ended early. All ranks."""
    with refusing_logs(
        run.module, "the fit is over, so the value would not be recorded; log it before, for example in on_epoch_end"
    ):
        _finish(run, reason)


def _finish(run: Run, reason: str) -> None:
    progress = run.progress  # of a fit that had nothing to train, too: a complete run that is started again
    run.now.epoch = progress.epoch - (progress.position == 0 and progress.epoch > 0)
    if progress.skipped and not progress.step:
        run.journal.note(
            f"no update was applied: all {progress.skipped} were skipped, so the weights are those of the beginning"
        )
    saving.save(run, last=True)
    eval_mode(run)  # the weights that are exported and that the module keeps
    preempted = reason == "preempted"
    if run.engine.launch.local_rank == 0:
        tell_preempted(os.environ, run.requests.signal if preempted else "")
    if preempted and run.watch is not None:
        run.watch.heard(run.requests.signal)
    if reason in ("interrupted", "preempted"):
        if run.calls.on_preempt is not None:
            run.calls.on_preempt(run.trainer, run.module, run.requests.signal)
        weights = f"the weights are saved in {run.checkpoints.newest}; a fit cannot resume from this checkpoint (save_weights_only=True)"
        state = f"the state is saved in {run.checkpoints.newest}; the same call continues from there"
        saved = weights if run.settings.save_weights_only else state
        run.module.print(
            f"{reason} by {run.requests.signal} at step {run.progress.step}: "
            + (saved if run.checkpoints.newest else "without a run_dir nothing is saved")
        )
    else:
        log_rest(run)
        if run.settings.load_best or run.calls.on_complete is not None:
            run.checkpoints.trained = sums_of_bits(run)
        step = _load_best(run) if run.settings.load_best else run.progress.step
        _complete(run)
        _export(run, step)
    if run.calls.on_fit_end is not None:
        run.requests.save = run.requests.evaluate = False  # the last save and the last validation are made
        run.calls.on_fit_end(run.trainer, run.module)
        _note_unmet(run, "on_fit_end", evaluates=False)
    run.journal.event("ended", reason=reason)


def _complete(run: Run) -> None:
    """Let listeners change the final weights, and validate these if a listener requests it. All ranks."""
    if run.calls.on_complete is None:
        return
    requests = run.requests
    requests.save = requests.evaluate = False  # discards requests that came after the last boundary
    run.now.complete = True
    run.calls.on_complete(run.trainer, run.module)
    run.now.complete = False
    _note_unmet(run, "on_complete", evaluates=True)
    if run.engine.agree([int(requests.evaluate)])[0] and run.validation:
        with refusing_logs(run.module, ""), run.journal.stopwatch.apart():
            assert run.now.epoch is not None
            validate(run, run.now.epoch)


def _note_unmet(run: Run, hook: str, *, evaluates: bool) -> None:
    """Note the requests of `hook` that nothing follows to meet. evaluates: whether a validation follows it."""
    if run.requests.save:
        run.journal.note(f"request_save() in {hook} has no effect, because no update follows: call trainer.save(path)")
    if run.requests.evaluate and not evaluates:
        run.journal.note(
            f"request_eval() in {hook} has no effect, because no update follows: call it in on_complete, or Trainer.validate after the fit"
        )


def _load_best(run: Run) -> int:
    """Load the weights of the best checkpoint into the module; RUN_DIR/model/ gets them too. Returns their step. All ranks."""
    best = choosing.best(run)
    if best is None:
        metric = run.settings.keep["metric"]
        if math.isnan(run.journal.latest.get(metric, 0.0)):
            raise ConfigurationError(
                f"load_best=True: {metric!r} was nan in every checkpoint of this run, so none is the best; correct the metric, or name "
                "another one in keep={'best': 1, 'metric': ...}"
            )
        raise ConfigurationError(
            f"load_best=True: no checkpoint of this run recorded {metric!r}; recorded are {', '.join(run.journal.latest) or 'none'}: "
            "name one in keep={'best': 1, 'metric': ...}"
        )
    path, score = best
    step: int = resuming.load_weights_only(run, path)["step"]
    run.module.print(
        f"the weights are those of {path} ({run.settings.keep['metric']} {score:g}); the metrics of the result are those of the last update"
    )
    return step


def _export(run: Run, step: int) -> None:
    """Write RUN_DIR/model/ with the weights of update `step`. All ranks."""
    if run.run_dir is None:
        return
    final = run.run_dir / "model"
    write_model(run, final)
    run.journal.event("exported", best=run.settings.load_best, of_step=step)
    if run.calls.on_export is not None:
        run.calls.on_export(run.trainer, run.module, final)


def write_model(run: Run, final: Path) -> None:
    """Write the exported model to a new folder next to `final`, then replace `final` by it. All ranks."""
    staging, old = (final.with_name(f".{final.name.lstrip('.')}-{which}") for which in ("new", "old"))
    if run.engine.rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    run.engine.barrier()
    if writes_itself(run.module):
        run.module.export(staging)
    else:
        export_model(run.module, run.engine.strategy, staging, main=run.engine.rank == 0)
    run.engine.barrier()
    if run.engine.rank == 0:
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        staging.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    run.engine.barrier()
