"""The line of a log boundary: its numbers leave the device together, and it is written when they have arrived.

On a CPU that is at once. On a device it is at the boundary after, when the device has one more update to work on: it never runs
dry because of a line. Must not know: when a line is due (`boundary`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fabricate.errors import ConfigurationError, FabricateError
from fabricate.module import refusing_logs
from fabricate.registry.hook_calls import Call
from fabricate.training.state.journal import Begun
from fabricate.training.state.run_state import Run

_WRITTEN = (
    "on_log is called with metrics that are already reduced and written; log the value before, for example in on_step"
)
_ONLY_SHOW = {"progress_bar"}
"""Listeners of `on_log` that may run an update later. What any other does there (stop, change a rate) has to come at the same update
after a resume from a checkpoint that was taken in between."""


def may_wait(run: Run) -> bool:
    """Whether a line that was begun may be written after the next update. The same on every rank."""
    return run.engine.device.type != "cpu" and _ONLY_SHOW.issuperset(run.calls.manager.order("on_log"))


def begin_line(run: Run, norm: torch.Tensor | None, epoch: int, *, rest: bool = False) -> None:
    """Let the numbers of a line leave the device: metrics, the norm, learning rates, tokens. No wait. `rest`: of the end of a fit,
    where a line without metrics is left out."""
    beside: dict[str, Any] = {} if norm is None else {"grad_norm": norm}
    optimizers, progress = run.optim.optimizers, run.progress
    for name, optimizer in optimizers.items():
        if (rate := optimizer.param_groups[0].get("lr")) is not None:  # some find their own
            beside["lr" if len(optimizers) == 1 else f"lr_{name}"] = rate
    run.metrics.begin([*beside.values(), run.journal.tokens.take()])
    run.journal.begun = Begun(progress.step, progress.samples, epoch, tuple(beside), rest)


def write_line(run: Run) -> None:
    """Write the line that was begun, if there is one. All ranks; waits until the device has come as far."""
    begun, run.journal.begun = run.journal.begun, None
    if begun is None:
        return
    metrics, (*beside, tokens) = run.metrics.complete()
    run.progress.tokens += tokens
    if begun.rest and not metrics:
        return
    metrics = dict(zip(begun.names, beside, strict=True)) | metrics  # what a step logs under such a name counts
    run.journal.write_metrics("train", metrics, begun.epoch, begun)
    if run.calls.on_log is not None:
        _show(run, run.calls.on_log, metrics, begun.step)
    if not begun.rest:
        stop_if_nonfinite(run, metrics, begun.step)


def _show(run: Run, on_log: Call, metrics: dict[str, float], step: int) -> None:
    """Call `on_log`, which cannot add to what is reduced and written already."""
    shown = dict(metrics)
    with refusing_logs(run.module, _WRITTEN):
        on_log(run.trainer, run.module, shown, step)
    if added := [name for name, value in shown.items() if metrics.get(name) is not value]:
        raise ConfigurationError(f"on_log writes {added[0]!r} into its metrics: {_WRITTEN}")


def log_rest(run: Run) -> None:
    """Log what was not logged yet when the fit came to its end. After the last save: a fit that continues from there logs as if it
    had never ended. All ranks."""
    progress = run.progress
    begin_line(run, None, progress.epoch - (progress.position == 0 and progress.epoch > 0), rest=True)
    write_line(run)


def stop_if_nonfinite(run: Run, metrics: dict[str, float], step: int) -> None:
    """End the fit if the mean loss of the updates up to `step` is not a number and that is not to be lived with."""
    loss = metrics.get("loss", 0.0)
    if run.settings.nonfinite == "stop" and not math.isfinite(loss):
        raise FabricateError(
            f"the loss became {loss} in the updates up to step {step}; the last checkpoint was saved before that. Lower the "
            "learning rate, clip with max_grad_norm=, or skip such updates with nonfinite='skip'"
        )
