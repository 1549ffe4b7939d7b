"""The boundary between two updates: does what is due or was requested, in the same order on all ranks.

Most boundaries have nothing to do. Must not know: how gradients are computed (`fabricate.training.loop`), how ranks agree (`agenda`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fabricate.checkpoint.state.logical import optimizer_groups
from fabricate.data.batches import Window
from fabricate.errors import few
from fabricate.metrics.reduction import Metrics
from fabricate.module import refusing_logs
from fabricate.training.agenda import Agenda, Wanted
from fabricate.training.evaluations.evaluated import finish_metrics
from fabricate.training.evaluations.evaluation import validate
from fabricate.training.first_update import FirstUpdate
from fabricate.training.reports.log_lines import begin_line, may_wait, stop_if_nonfinite, write_line
from fabricate.training.saves.replicas import compare, compare_now_and_then
from fabricate.training.saves.saving import check_weights, finish_background_save, request_best, save_requested
from fabricate.training.state.run_state import Run, Update
from fabricate.training.updates.freezing import check_trained

_SAVED = "the checkpoint is written already and would not hold this value; log it before, for example in on_step or on_epoch_end"


EPOCH_METRICS, EVALUATION, EPOCH_END = "epoch metrics", "evaluation", "epoch end"
"""The parts of a boundary that `Now.owed` may list: those not done yet."""


def limit_reached(run: Run) -> str:
    """The name of the limit that the fit has reached, or ""."""
    settings, progress = run.settings, run.progress
    if settings.max_steps is not None and progress.step >= settings.max_steps:
        return "max_steps"
    return "max_epochs" if settings.max_epochs is not None and progress.epoch >= settings.max_epochs else ""


def boundary(run: Run, agenda: Agenda, window: Window, result: Update, first: FirstUpdate) -> str:
    """Do what is due or requested after an update; if optimizers take turns, after the last of them. Returns the reason if the fit ends
    here, else "". All ranks."""
    if run.journal.begun is not None:
        write_line(run)  # the line of the previous update, while the device works on this one
    due = agenda.due(window)
    if not window.last_turn:
        return ""
    if not due:
        run.now.at_boundary = True
        return ""
    epoch = run.progress.epoch
    if window.last:
        _end_epoch(run)
    wanted, limit = agenda.decide(), limit_reached(run)
    last = window.last or wanted.end or bool(limit)
    run.now.owed = [EPOCH_METRICS] * window.last + [EVALUATION] * wanted.evaluate + [EPOCH_END] * window.last
    _report(run, first, wanted, epoch, result.norm, last)
    return _complete(run, agenda, wanted, epoch, limit)


def complete(run: Run, agenda: Agenda) -> str:
    """On resume, before the next update: finish a boundary in which the run failed, for example in a validation. Returns what `boundary`
    returns."""
    epoch = run.now.epoch = run.progress.epoch - (EPOCH_END in run.now.owed)
    return _complete(run, agenda, Wanted(evaluate=EVALUATION in run.now.owed), epoch, limit_reached(run))


def _complete(run: Run, agenda: Agenda, wanted: Wanted, epoch: int, limit: str) -> str:
    """Everything after the report: the averages of an epoch, a validation, the end of an epoch, a save. Removes from `Now.owed` what is
    done."""
    owed = run.now.owed
    last = EPOCH_END in owed
    averages: dict[str, float] = {}
    if EPOCH_METRICS in owed:
        averages = _log_epoch(run, epoch)
        owed.remove(EPOCH_METRICS)
    if EVALUATION in owed:
        _validate(run, epoch)
        owed.remove(EVALUATION)
    if last:
        if run.calls.on_epoch_end is not None:
            run.calls.on_epoch_end(run.trainer, run.module, epoch)
            _log_late(run, epoch, averages)
        run.metrics.release()
        owed.remove(EPOCH_END)
    wanted = agenda.decide_again(wanted, hooks_ran=wanted.log or wanted.evaluate or last)
    _check(run, wanted, ends=wanted.end or bool(limit), last=last)
    run.now.at_boundary = True
    if wanted.save or run.checkpoints.background is not None:
        _save(run, wanted)
    return _stop_reason(run, wanted, limit) if wanted.end else limit


def _save(run: Run, wanted: Wanted) -> None:
    """Save, and report a background save that has ended."""
    if not wanted.writing:
        _finish_save(run)
    if wanted.save:
        with refusing_logs(run.module, _SAVED), run.journal.stopwatch.apart():
            save_requested(run)


def _finish_save(run: Run) -> None:
    with refusing_logs(run.module, _SAVED):
        finish_background_save(run)


def _stop_reason(run: Run, wanted: Wanted, limit: str) -> str:
    """The reason why the fit ends. A fit that has reached a limit is complete, even if a signal arrived in the same update."""
    write_line(run)  # a line may have been begun before a hook of this boundary requested the end
    # Without `wanted.stop` a request may exist that still waits for min_steps.
    stops = run.engine.gather_json(run.requests.stop) if wanted.stop else []
    reasons = [*stops, limit]
    return next(filter(None, reasons), interruption(run))


def interruption(run: Run) -> str:
    """The reason if a signal, a clock or a file ended the fit."""
    return "interrupted" if run.requests.signal == "SIGINT" else "preempted"


def _end_epoch(run: Run) -> None:
    run.progress.epoch += 1
    run.progress.position = 0
    for schedule in run.optim.schedules.values():
        schedule.epoch_ended()


def _log_epoch(run: Run, epoch: int) -> dict[str, float]:
    averages = {f"epoch_{name}": value for name, value in finish_metrics(run, run.metrics).items()}
    run.journal.write_metrics("epoch", averages, epoch)
    return averages


def _log_late(run: Run, epoch: int, averages: Mapping[str, float]) -> None:
    """Write what `on_epoch_end` logged on a line of its own, because the averages of the epoch are already written. All ranks."""
    late = Metrics(run.engine, run.engine.device, run.engine.ranks_per_row)
    late.take(run.module._logged, 1)
    if metrics := finish_metrics(run, late):
        if taken := [name for name in metrics if name in averages or name in run.journal.validated]:
            run.journal.note(
                f"on_epoch_end logs {few(taken)}, a name under which the loop records a value too: both are written, and your value, the "
                "later one, replaces that of the loop in FitResult.metrics and in checkpoints. Log it under another name, unless that is "
                "meant"
            )
        run.journal.write_metrics("epoch", metrics, epoch)
    late.release()


def _validate(run: Run, epoch: int) -> None:
    if run.validation:
        with run.journal.stopwatch.apart():
            metrics = validate(run, epoch)
            if "best" in run.settings.keep:  # which is chosen among the checkpoints that are complete
                _finish_save(run)
            request_best(run, metrics)


def _report(run: Run, first: FirstUpdate, wanted: Wanted, epoch: int, norm: torch.Tensor | None, last: bool) -> None:
    """Log if that is due. `last`: whether this is the last update of an epoch or of the fit, whose loss is always checked."""
    run.journal.last_norm = None if wanted.log else norm
    if wanted.log:
        begin_line(run, norm, epoch)
        if last or wanted.evaluate or not may_wait(run):
            write_line(run)
    elif last:
        stop_if_nonfinite(run, run.metrics.look(), run.progress.step)
    if wanted.log or last:
        first.report(last)


def _check(run: Run, wanted: Wanted, ends: bool, last: bool) -> None:
    """Raise an error if parameters differ between ranks, are not trained as declared, or were replaced. Runs when a log, a save or the end
    is due. `last`: whether this is the last update of an epoch."""
    if wanted.log or wanted.save or ends or last:
        check_trained(run)  # before the comparison: what only an optimizer knows differs between ranks
    if wanted.save or ends or last:
        compare(run)
    elif wanted.log:
        compare_now_and_then(run)
    if ends or last:
        # Raises an error if a hook replaced a parameter.
        optimizer_groups(run.module, run.optim.optimizers, run.engine.strategy)
    if ends:
        check_weights(run)
