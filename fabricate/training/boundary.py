"""The boundary between two updates: what falls due or was requested is done, on all ranks alike.

Most boundaries have nothing to do. Must not know: how gradients come about (`fabricate.training.loop`), how ranks agree (`agenda`).
"""

from __future__ import annotations

import torch

from fabricate.checkpoint.state.logical import optimizer_groups
from fabricate.data.batches import Window
from fabricate.metrics.reduction import Metrics
from fabricate.module import refusing_logs
from fabricate.training.agenda import Agenda, Wanted
from fabricate.training.evaluations.evaluation import validate
from fabricate.training.first_update import FirstUpdate
from fabricate.training.reports.log_lines import begin_line, may_wait, stop_if_nonfinite, write_line
from fabricate.training.saves.replicas import compare, compare_now_and_then
from fabricate.training.saves.saving import check_weights, finish_background_save, request_best, save_requested
from fabricate.training.state.run_state import Run, Update
from fabricate.training.updates.freezing import check_trained

_SAVED = "the checkpoint is written already and would not hold this value; log it before, for example in on_step or on_epoch_end"


EPOCH_METRICS, EVALUATION, EPOCH_END = "epoch metrics", "evaluation", "epoch end"
"""What a boundary may owe, in `Now.owed`."""


def limit_reached(run: Run) -> str:
    """The limit that the fit has reached, or nothing."""
    settings, progress = run.settings, run.progress
    if settings.max_steps is not None and progress.step >= settings.max_steps:
        return "max_steps"
    return "max_epochs" if settings.max_epochs is not None and progress.epoch >= settings.max_epochs else ""


def boundary(run: Run, agenda: Agenda, window: Window, result: Update, first: FirstUpdate) -> str:
    """Do what is due or requested after an update, or after the last of those that optimizers make in turn. Why the fit ends here, or
    nothing. All ranks."""
    if run.journal.begun is not None:
        write_line(run)  # of the update before, while the device works on this one
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
    """Do what was left of a boundary when the run failed in it, in a validation, say; as `boundary`. Resuming, before the next update."""
    epoch = run.now.epoch = run.progress.epoch - (EPOCH_END in run.now.owed)
    return _complete(run, agenda, Wanted(evaluate=EVALUATION in run.now.owed), epoch, limit_reached(run))


def _complete(run: Run, agenda: Agenda, wanted: Wanted, epoch: int, limit: str) -> str:
    """What comes after the report: the end of an epoch, a validation, a save. What is done is no longer owed."""
    owed = run.now.owed
    last = EPOCH_END in owed
    if EPOCH_METRICS in owed:
        _log_epoch(run, epoch)
        owed.remove(EPOCH_METRICS)
    if EVALUATION in owed:
        _validate(run, epoch)
        owed.remove(EVALUATION)
    if last:
        if run.calls.on_epoch_end is not None:
            run.calls.on_epoch_end(run.trainer, run.module, epoch)
            _log_late(run, epoch)
        owed.remove(EPOCH_END)
    wanted = agenda.decide_again(wanted, hooks_ran=wanted.log or wanted.evaluate or last)
    _check(run, wanted, ends=wanted.end or bool(limit), last=last)
    run.now.at_boundary = True
    if wanted.save or run.checkpoints.background is not None:
        _save(run, wanted)
    return _stop_reason(run, wanted, limit) if wanted.end else limit


def _save(run: Run, wanted: Wanted) -> None:
    """Save, and announce a save that ended in the background."""
    with refusing_logs(run.module, _SAVED):
        if not wanted.writing:
            finish_background_save(run)
        if wanted.save:
            with run.journal.stopwatch.apart():
                save_requested(run)


def _stop_reason(run: Run, wanted: Wanted, limit: str) -> str:
    """Why the fit ends. One that has reached a limit is complete, also when a signal came in the same update."""
    write_line(run)  # one that was begun before a hook of this boundary requested the end
    stops = run.engine.gather_json(run.requests.stop) if wanted.stop else []  # else one may be waiting for min_steps
    reasons = [*stops, limit]
    return next(filter(None, reasons), interruption(run))


def interruption(run: Run) -> str:
    """The reason of a fit that a signal, a clock or a file ended."""
    return "interrupted" if run.requests.signal == "SIGINT" else "preempted"


def _end_epoch(run: Run) -> None:
    run.progress.epoch += 1
    run.progress.position = 0
    for schedule in run.optim.schedules.values():
        schedule.epoch_ended()


def _log_epoch(run: Run, epoch: int) -> None:
    averages = {f"epoch_{name}": value for name, value in run.metrics.finish().items()}
    run.journal.write_metrics("epoch", averages, epoch)


def _log_late(run: Run, epoch: int) -> None:
    """Log what `on_epoch_end` logged: it is of the epoch as a whole, whose averages are written already. All ranks."""
    late = Metrics(run.engine, run.engine.device, run.engine.ranks_per_row)
    late.take(run.module._logged, 1)
    if metrics := late.finish():
        run.journal.write_metrics("epoch", metrics, epoch)


def _validate(run: Run, epoch: int) -> None:
    if run.validation:
        with run.journal.stopwatch.apart():
            request_best(run, validate(run, epoch))


def _report(run: Run, first: FirstUpdate, wanted: Wanted, epoch: int, norm: torch.Tensor | None, last: bool) -> None:
    """Log if that is due. `last`: of an epoch or the fit, whose loss is looked at in any case."""
    if wanted.log:
        begin_line(run, norm, epoch)
        if last or wanted.evaluate or not may_wait(run):
            write_line(run)
    elif last:
        stop_if_nonfinite(run, run.metrics.look(), run.progress.step)
    if wanted.log or last:
        first.report()


def _check(run: Run, wanted: Wanted, ends: bool, last: bool) -> None:
    """Refuse to log, save or end with parameters that are not what they seem. `last`: of an epoch."""
    if wanted.save or ends or last:
        compare(run)
    elif wanted.log:
        compare_now_and_then(run)
    if wanted.log or wanted.save or ends:
        check_trained(run)
    if ends or last:
        optimizer_groups(
            run.module, run.optim.optimizers, run.engine.strategy
        )  # an error where a hook replaced a parameter
    if ends:
        check_weights(run)
