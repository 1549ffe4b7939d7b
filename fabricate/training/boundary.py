"""The boundary between two updates: what falls due or was requested is done, on all ranks alike.

Most boundaries have nothing to do. Must not know: how gradients come about (`fabricate.training.loop`), how ranks agree (`agenda`).
"""

from __future__ import annotations

import math

import torch

from fabricate.data.batches import Window
from fabricate.errors import ConfigurationError, FabricateError
from fabricate.training.agenda import Agenda
from fabricate.training.evaluation import validate
from fabricate.training.first_update import FirstUpdate
from fabricate.training.run_state import Run, Update
from fabricate.training.saving import check_weights, finish_background_save, save_requested


def finished(run: Run) -> str:
    """The limit that the fit has reached, or nothing."""
    settings, progress = run.settings, run.progress
    if settings.max_steps is not None and progress.step >= settings.max_steps:
        return "max_steps"
    return "max_epochs" if settings.max_epochs is not None and progress.epoch >= settings.max_epochs else ""


def boundary(run: Run, agenda: Agenda, window: Window, result: Update, first: FirstUpdate) -> str:
    """Do what is due or requested after an update. Why the fit ends here, or nothing. All ranks."""
    if not agenda.due(window, result.route):
        run.metrics.limit()
        run.now.at_boundary = True
        return ""
    epoch = run.progress.epoch
    if window.last:
        _end_epoch(run)
    wanted, limit = agenda.decide(), finished(run)
    _report(run, first, wanted.log, epoch, result.norm, last=window.last or wanted.end or bool(limit))
    if window.last:
        _log_epoch(run, epoch)
    if wanted.evaluate:
        _validate(run, epoch)
    if window.last and run.calls.on_epoch_end is not None:
        run.calls.on_epoch_end(run.trainer, run.module, epoch)
    wanted = agenda.decide_again(wanted, hooks_ran=wanted.log or wanted.evaluate or window.last)
    _check(run, wanted.log or wanted.save, ends=wanted.end or bool(limit))
    run.now.at_boundary = True
    if not wanted.writing:
        finish_background_save(run)
    if wanted.save:
        with run.journal.stopwatch.apart():
            save_requested(run)
    return _stop_reason(run, limit) if wanted.end else limit


def _stop_reason(run: Run, limit: str) -> str:
    """A fit that has reached a limit is complete, also when a signal came in the same update."""
    reasons = [*run.engine.gather_json(run.requests.stop), limit]
    return next(filter(None, reasons), "interrupted" if run.requests.signal == "SIGINT" else "preempted")


def _end_epoch(run: Run) -> None:
    run.progress.epoch += 1
    run.progress.position = 0
    for schedule in run.optim.schedules.values():
        schedule.epoch_ended()


def _log_epoch(run: Run, epoch: int) -> None:
    averages = {f"epoch_{name}": value for name, value in run.metrics.finish().items()}
    run.journal.write_metrics("epoch", averages, epoch)


def _validate(run: Run, epoch: int) -> None:
    if run.validation:
        with run.journal.stopwatch.apart():
            validate(run, epoch)


def _report(run: Run, first: FirstUpdate, log: bool, epoch: int, norm: torch.Tensor | None, last: bool) -> None:
    """Log if that is due. `last`: of an epoch or the fit, whose loss is looked at in any case."""
    if log:
        metrics = run.metrics.reduce()
        _log(run, metrics, norm, epoch)
        _stop_if_nonfinite(run, metrics)
    elif last:
        _stop_if_nonfinite(run, run.metrics.look())
    else:
        run.metrics.limit()
        return
    first.report()


def _log(run: Run, metrics: dict[str, float], norm: torch.Tensor | None, epoch: int) -> None:
    optimizers = run.optim.optimizers
    if norm is not None:
        metrics["grad_norm"] = float(norm)
    for name, optimizer in optimizers.items():
        metrics["lr" if len(optimizers) == 1 else f"lr_{name}"] = float(optimizer.param_groups[0]["lr"])
    run.journal.tokens.read()
    run.journal.write_metrics("train", metrics, epoch)
    if run.calls.on_log is not None:
        run.calls.on_log(run.trainer, run.module, metrics, run.progress.step)


def log_rest(run: Run) -> None:
    """Log what was not logged yet when the fit came to its end. After the last save: a fit that goes on from there logs as if it
    had never ended. All ranks."""
    if metrics := run.metrics.reduce():
        progress = run.progress
        _log(run, metrics, None, progress.epoch - (progress.position == 0 and progress.epoch > 0))


def _check(run: Run, reports: bool, ends: bool) -> None:
    """Refuse to log, save (`reports`) or end with parameters that are not what they seem."""
    if reports or ends:
        _check_frozen(run)
    if ends:
        check_weights(run)


def _check_frozen(run: Run) -> None:
    """Optimizers and strategies took over what was trainable when the fit began."""
    for name, parameter in run.optim.frozen.items():
        if parameter.requires_grad:
            raise ConfigurationError(
                f"{name} was frozen when the fit began and requires a gradient at step {run.progress.step}: neither the optimizer nor the "
                "strategy knows of it. End the fit, unfreeze it, and fit the module again, with resume='never' or another run_dir"
            )


def _stop_if_nonfinite(run: Run, metrics: dict[str, float]) -> None:
    loss = metrics.get("loss", 0.0)
    if run.settings.nonfinite == "stop" and not math.isfinite(loss):
        raise FabricateError(
            f"the loss became {loss} in the updates up to step {run.progress.step}; the last checkpoint is from before. Lower the learning "
            "rate, clip with max_grad_norm=, or skip such updates with nonfinite='skip'"
        )
