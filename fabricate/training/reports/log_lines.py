"""The line of metrics of a log boundary: its values are copied from the device together, and it is written when they have arrived.

On a CPU this is at once. On a GPU it is at the next boundary, so that the device has another update to work on and never idles because of a
line. Must not know: when a line is due (`boundary`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from fabricate.errors import ConfigurationError, FabricateError, few
from fabricate.module import refusing_logs
from fabricate.registry.hook_calls import Call
from fabricate.training.state.journal import Begun
from fabricate.training.state.run_state import Run

_WRITTEN = (
    "on_log is called with metrics that are already reduced and written; log the value before, for example in on_step"
)
_ONLY_SHOW = {"progress_bar"}
"""Listeners of `on_log` that may be called one update later. Others may act there (stop, change a learning rate), and have to act at the
same update after a resume from a checkpoint in between."""


def may_wait(run: Run) -> bool:
    """Whether a line may be written one update later. The same on every rank."""
    return run.engine.device.type != "cpu" and _ONLY_SHOW.issuperset(run.calls.manager.order("on_log"))


def begin_line(run: Run, norm: torch.Tensor | float | None, epoch: int, *, rest: bool = False) -> None:
    """Begin to copy the values of a line from the device: metrics, the norm, learning rates, tokens. Does not wait. `rest`: whether this is
    the line at the end of a fit, which is omitted if it has no metrics."""
    beside: dict[str, Any] = {} if norm is None else {"grad_norm": norm}
    optimizers, progress = run.optim.optimizers, run.progress
    for name, optimizer in optimizers.items():
        beside |= _rates("lr" if len(optimizers) == 1 else f"lr_{name}", optimizer)
    run.metrics.begin([*beside.values(), run.journal.tokens.take()])
    run.journal.begun = Begun(progress.step, progress.samples, epoch, tuple(beside), rest)


def _rates(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The learning rate of the first group, and those of groups that began with another one ("lr_group_1", ...)."""
    rates: dict[str, Any] = {}
    first = optimizer.param_groups[0]
    for number, group in enumerate(optimizer.param_groups):
        if group.get("lr") is not None and (
            not number or _initial(group) != _initial(first)
        ):  # some optimizers have none
            rates[f"{name}_group_{number}" if number else name] = group["lr"]
    return rates


def _initial(group: dict[str, Any]) -> Any:
    rate = group.get("initial_lr", group.get("lr"))
    return None if isinstance(rate, torch.Tensor) else rate  # comparing tensors would wait for the device


def write_line(run: Run) -> None:
    """Write the line that was begun, if there is one. All ranks; waits for its values from the device."""
    begun, run.journal.begun = run.journal.begun, None
    if begun is None:
        return
    metrics, (*beside, tokens) = run.metrics.complete()
    run.progress.tokens += tokens
    if begun.rest and not metrics:
        return
    _note_taken_names(run, metrics, begun.names)
    # a value that a step logged under the same name takes precedence
    metrics = dict(zip(begun.names, beside, strict=True)) | metrics
    run.journal.write_metrics("train", metrics, begun.epoch, begun)
    if run.calls.on_log is not None:
        _show(run, run.calls.on_log, metrics, begun.step)
    if not begun.rest:
        stop_if_nonfinite(run, metrics, begun.step)


def _note_taken_names(run: Run, logged: dict[str, float], of_the_loop: Collection[str]) -> None:
    """Note values that a step or a hook logged under names of the loop: learning rates, the norm, means of epochs, validation metrics."""
    taken = [
        name
        for name in logged
        if name in of_the_loop or name in run.journal.validated or (name.startswith("epoch_") and name[6:] in logged)
    ]
    if taken:
        run.journal.note(
            f"a step or a hook logs {few(taken)}, a name under which the loop records a value too: lines of the training have your value, "
            "and not that of the loop. Log it under another name, unless that is meant"
        )


def _show(run: Run, on_log: Call, metrics: dict[str, float], step: int) -> None:
    """Call `on_log`. `ConfigurationError` if a listener adds to the metrics, which are already reduced and written."""
    shown = dict(metrics)
    with refusing_logs(run.module, _WRITTEN):
        on_log(run.trainer, run.module, shown, step)
    if added := [name for name, value in shown.items() if metrics.get(name) is not value]:
        raise ConfigurationError(f"on_log writes {added[0]!r} into its metrics: {_WRITTEN}")


def log_rest(run: Run) -> None:
    """Write the metrics since the last line at the end of a fit. Call it after the last save, so that a fit which continues from there logs
    as if it had not ended. All ranks."""
    progress = run.progress
    begin_line(run, run.journal.last_norm, progress.epoch - (progress.position == 0 and progress.epoch > 0), rest=True)
    write_line(run)


def _saved_before(run: Run) -> str:
    return "; the last checkpoint was saved before that" if run.checkpoints.newest is not None else ""


def stop_if_nonfinite(run: Run, metrics: dict[str, float], step: int) -> None:
    """Raise `FabricateError` if nonfinite="stop" and the mean loss of the updates up to `step` is not finite."""
    loss = metrics.get("loss", 0.0)
    if run.settings.nonfinite == "stop" and not math.isfinite(loss):
        raise FabricateError(
            f"the loss became {loss} in the updates up to step {step}{_saved_before(run)}. Lower the learning "
            "rate, clip with max_grad_norm=, or skip such updates with nonfinite='skip'"
        )
