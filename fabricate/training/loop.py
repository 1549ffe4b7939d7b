"""The loop: which steps a fit consists of, and in which order. `fabricate.hooks` shows the same loop with its hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from fabricate.data.batches import Window
from fabricate.data.source import Source
from fabricate.errors import ConfigurationError, FabricateError
from fabricate.metrics.torchmetrics_objects import snapshot_torchmetrics
from fabricate.training.agenda import Agenda
from fabricate.training.boundary import boundary, complete, interruption, limit_reached
from fabricate.training.evaluations.evaluation import check_first, note_changes, validate
from fabricate.training.evaluations.sanity import check_validation
from fabricate.training.first_update import FirstUpdate
from fabricate.training.interruptions.overdue import data_overdue, waiting
from fabricate.training.interruptions.requests import SignalWhileWaiting
from fabricate.training.preparation import take_groups
from fabricate.training.state.run_state import Run, Update
from fabricate.training.updates import freezing
from fabricate.training.updates.losses import Losses, WindowLosses
from fabricate.training.updates.step_output import leave_out_mean
from fabricate.training.updates.turns import turn_of, turns

MOST_SKIPPED = 100
"""The number of updates skipped in a row after which the fit raises an error."""

T = TypeVar("T")
Clip = Callable[[Sequence[torch.nn.Parameter], torch.Tensor | None], None]
Apply = Callable[[torch.optim.Optimizer, torch.Tensor | None], bool]


def fit(run: Run) -> str:
    """Train until a limit, a request or a signal; returns the reason. All ranks."""
    state, agenda, accumulate_window = LoopState(run), Agenda(run), accumulation(run)
    try:
        if reason := _before_updates(run, agenda):
            return reason
        while not (reason := limit_reached(run)):
            for window in windows(run):  # one window of micro-batches makes one update (or one turn of each optimizer)
                state.begin_update()
                losses = accumulate_window(state, window)  # forward, backward, on_accumulate, for each micro-batch
                result = update(state, losses)  # normalise, clip, on_before_step, optimizer_step
                account(state, window, losses, result)  # counters, on_step or on_step_skipped
                if reason := boundary(run, agenda, window, result, state.first_update):
                    return reason  # log, validate, save, stop: what is due or requested, agreed by all ranks
        return reason
    except SignalWhileWaiting:
        if run.engine.world_size > 1:
            raise data_overdue(run.requests) from None
        run.now.at_boundary = True  # no update is in progress, so the state can be saved as at a boundary
        return interruption(run)


def _before_updates(run: Run, agenda: Agenda) -> str:
    """What comes before the first update: a complete fit prints that it is complete; a new fit validates, or tries its validation on a few
    batches. Returns the reason if there is nothing to train, else "". All ranks."""
    if run.checkpoints.restored:
        if run.now.owed and (reason := complete(run, agenda)):
            return reason
        requested = run.requests.stop if run.is_long_enough() else ""  # by a plugin in on_load
        stopped = next(filter(None, run.engine.gather_if(bool(requested), requested)), "")
        if limit := limit_reached(run):
            run.module.print(f"already complete: nothing to train ({limit} reached at step {run.progress.step})")
        elif stopped:
            run.module.print(f"already complete: nothing to train ({stopped}, at step {run.progress.step})")
        else:
            _note_model(run)
        return limit or stopped
    elif run.progress.step == 0 and not limit_reached(run):
        with run.journal.stopwatch.apart():
            if run.settings.validate_first and run.validation:
                validate(run, run.progress.epoch)
            else:
                check_validation(run)
    return ""


def _note_model(run: Run) -> None:
    if run.run_dir is not None and (run.run_dir / "model").exists():
        run.journal.note(
            f"training continues at step {run.progress.step}. Until this fit completes, RUN_DIR/model/ holds the weights of an earlier fit"
        )


def windows(run: Run) -> Iterator[Window]:
    """The remaining windows of the current epoch: all of them, or those after the checkpoint."""
    progress, source = run.progress, run.source
    assert source is not None
    run.now.epoch = progress.epoch
    if run.calls.on_epoch_start is not None:
        run.calls.on_epoch_start(run.trainer, run.module, progress.epoch)
    note_changes(run, source)
    freezing.compare(run)  # what hooks have frozen or unfrozen since the last update must be the same on all ranks
    run.metrics.take(run.module._logged, 1)  # what hooks logged before the first update of the epoch
    if not progress.position:  # otherwise this epoch continues from a checkpoint
        progress.micro_step = 0
    timed = run.journal.stopwatch.timed  # measures how long each batch takes to arrive
    remaining = _interruptible(run, source.windows(run.data_epoch(), progress.position, timed))
    if run.engine.world_size > 1:
        remaining = _same_on_all_ranks(run, remaining) if source.num_samples is None else remaining
        remaining = _beginning_alike(run, source, remaining)
    if not progress.position and run.optim.total_steps not in (None, run.settings.max_steps):
        remaining = _as_long_as_said(run, source, remaining)
    begun = progress.position
    yield from turns(run, remaining) if run.optim.turns else remaining
    if begun and progress.position == begun:
        raise ConfigurationError(
            f"train has no update left after position {begun}, at which this epoch continues. If drop_last=True leaves out the "
            "rest because it is smaller than the new global batch: continue with that of the checkpoint, or set drop_last=False"
        )
    # The position is also 0 after the last window, but then micro-batches were counted.
    if progress.position == 0 and not progress.micro_step:
        raise ConfigurationError(
            "train yielded no batch in this epoch; an exhausted iterator cannot be read again: "
            "pass an object whose __iter__ starts from the beginning"
        )


def accumulation(run: Run) -> Callable[[LoopState, Window], WindowLosses]:
    """The function that accumulates a window: `accumulate`, or, if optimizers take turns, `accumulate` with the parameters of the other
    optimizers frozen."""
    return _accumulate_in_turn if run.optim.turns else accumulate


def _accumulate_in_turn(state: LoopState, window: Window) -> WindowLosses:
    assert window.turn is not None
    with turn_of(state.run, window.turn):
        return accumulate(state, window)


def accumulate(state: LoopState, window: Window) -> WindowLosses:
    """Forward and backward of every micro-batch of `window`. All ranks."""
    run = state.run
    trainer, module, engine, calls, progress = run.trainer, run.module, run.engine, run.calls, run.progress
    losses = WindowLosses(state.losses, window, state.wants_loss)
    run.now.batch = None  # no batch while the next one is read
    batches: Iterable[tuple[Any, int | None]] = window.micro_batches
    if state.may_wait:
        batches = _interruptible(run, batches, 1 if window.first_turn else 0)
    for micro_step, (batch, rows) in enumerate(batches):
        is_last = micro_step == window.num_micro_steps - 1
        run.reached(progress.step + 1, progress.micro_step, -1)
        run.now.batch = batch = engine.to_device(batch)
        engine.moment.rows = rows
        restore = snapshot_torchmetrics(module) if rows == 0 else None
        with engine.gradient_sync(is_last):
            wrapped = calls.train_step  # None: no plugin wraps the forward
            output = wrapped(trainer, module, batch) if wrapped else engine.forward(batch, progress.micro_step)
            if state.first_update.under_way:
                state.first_update.after_forward(micro_step)
            for_backward, loss, weight, logged_weight = losses.add(output, batch, rows, is_last)
            run.metrics.add_loss(loss, weight)
            engine.scaling.backward(for_backward)
        if calls.on_accumulate is not None:
            calls.on_accumulate(trainer, module, batch, loss, weight, micro_step, window.num_micro_steps, is_last)
        if restore is not None:  # a stand-in ran only because collectives need every rank: discard its results
            restore()
            module._logged[:] = [entry for entry in module._logged if entry[3] == "object"]
        if module._logged:
            run.metrics.take(module._logged, logged_weight)
        progress.micro_step += 1
        if not is_last:
            run.now.batch = None
    return losses


def update(state: LoopState, losses: WindowLosses) -> Update:
    """Normalise the accumulated gradients to those of the global batch, clip them, and let the optimizer apply them. All ranks."""
    run = state.run
    engine, calls = run.engine, run.calls
    optimizer, parameters, _ = run.optim.updates[losses.optimizer]
    engine.scaling.unscale(optimizer)
    engine.moment.rows = None
    losses.normalise(parameters)
    norm = engine.strategy.grad_norm(parameters) if state.wants_norm else None
    state.clip(parameters, norm)
    engine.moment.gradients_final = True
    if calls.on_before_step is not None:
        calls.on_before_step(run.trainer, run.module, optimizer, norm)
        state.refuse_new_groups()
    if run.checkpoints.background is not None:
        run.checkpoints.background.before_step()
    applied = state.apply(optimizer, norm)
    engine.moment.gradients_final, engine.moment.skipped = False, not applied
    return Update(applied, norm)


def account(state: LoopState, window: Window, losses: WindowLosses, result: Update) -> None:
    """Count the update, advance its schedules, clear the gradients and call the listeners. All ranks."""
    run = state.run
    progress = run.progress
    if result.applied:
        for schedule in run.optim.updates[losses.optimizer].schedules:
            schedule.updated()
        progress.step += window.last_turn
    else:
        progress.skipped += 1
        run.metrics.forget_update()
    state.first_update.look(losses, result.applied)
    run.engine.strategy.clear_gradients(state.parameters)
    if window.last_turn:  # otherwise another optimizer makes its update on the same rows
        progress.position = window.end
        progress.samples += window.rows
        run.journal.tokens.add(losses.total)
    if not result.applied:
        run.module._logged.clear()
        state.skipped(window.last_turn)
    elif window.last_turn:
        state.skipped_in_a_row = 0
        if run.calls.on_step is not None:
            run.calls.on_step(run.trainer, run.module, progress.step, losses.mean, result.norm)
    if run.module._logged:  # by hooks of this update
        leave_out_mean(run, losses.mean)
        run.metrics.take(run.module._logged, losses.total)
    state.mark_whole()


class LoopState:
    """What is decided before the first update, and what the loop keeps from one update to the next."""

    def __init__(self, run: Run) -> None:
        self.run = run
        engine, settings = run.engine, run.settings
        self.losses = Losses(run)
        self.first_update = FirstUpdate(run)
        self.parameters = list(run.module.parameters())
        self.may_wait = run.engine.world_size > 1 or (run.source is not None and run.source.in_workers)
        """Whether a signal may end a wait for data."""
        self.clip = _clipping(run)
        self.skip_reason = "loss scale overflow" if engine.scales_loss else "non-finite gradients"
        # The loop skips non-finite updates itself, unless a loss scaler or the strategy does.
        skips_here = settings.nonfinite == "skip" and not (engine.scales_loss or engine.strategy.skips_nonfinite)
        self.apply: Apply = self._apply_if_finite if skips_here else self._apply
        self._always_norm = run.max_grad_norm is not None or settings.nonfinite == "skip"
        self.skipped_in_a_row = 0
        self._groups = run.optim.number_of_groups()
        self._look_at_listeners()
        self.mark_whole()

    def mark_whole(self) -> None:
        """Mark that no update is in progress, and remember the position of the data, to which a failed update returns."""
        run = self.run
        assert run.source is not None
        run.now.whole = run.progress.micro_step, run.source.state
        run.now.in_update = False

    def begin_update(self) -> None:
        """Begin an update without gradients. Listeners that were added or removed, and parameters that were frozen or unfrozen, take effect
        here and nowhere else."""
        run = self.run
        if run.calls.manager.changes != run.calls.changes:
            run.calls.refresh()
            self._look_at_listeners()
        if run.optim.changing:
            freezing.take_effect(run)
        if run.optim.number_of_groups() != self._groups:
            self._groups = take_groups(run)
            self.parameters = list(run.module.parameters())  # because a hook may have added layers
        run.calls.step = run.progress.step + 1
        run.metrics.begin_update()
        for parameter in self.parameters:
            if parameter.grad is not None:  # from a backward pass in a validation or a hook
                parameter.grad = None
        run.now.at_boundary, run.now.in_update = False, True

    def refuse_new_groups(self) -> None:
        """Raise an error if on_before_step added a parameter group: its gradients would be neither normalised nor clipped."""
        if self.run.optim.number_of_groups() != self._groups:
            raise ConfigurationError(
                "on_before_step added a parameter group after this update's gradients were normalised and clipped; add the group "
                "in on_step or on_epoch_start"
            )

    def _look_at_listeners(self) -> None:
        wants = self.run.calls.manager.wants
        self.wants_loss = wants("on_step", "loss")
        self.wants_norm = self._always_norm or wants("on_step", "grad_norm") or wants("on_before_step", "grad_norm")

    def _apply(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor | None) -> bool:
        run = self.run
        if run.calls.optimizer_step is None:  # no plugin wraps the update
            return run.engine.scaling.step(optimizer)
        applied: bool = run.calls.optimizer_step(run.trainer, run.module, optimizer)
        return applied

    def _apply_if_finite(self, optimizer: torch.optim.Optimizer, norm: torch.Tensor | None) -> bool:
        """Like `_apply`, but skip the update if the gradients are not finite. Waits for the device once per update."""
        assert norm is not None
        return math.isfinite(float(norm)) and self._apply(optimizer, norm)

    def skipped(self, last_turn: bool) -> None:
        """Report an update that was not applied; raise an error after too many in a row. `last_turn`: see `Window`."""
        run, self.skipped_in_a_row = self.run, self.skipped_in_a_row + 1
        run.journal.event("skipped", reason=self.skip_reason, last_turn=last_turn)
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise FabricateError(
                f"{self.skipped_in_a_row} updates in a row were skipped ({self.skip_reason}) after step {run.progress.step}: training "
                "does not continue automatically. Lower the learning rate, look at the data, or resume from an earlier checkpoint"
            )
        if run.calls.on_step_skipped is not None:
            run.calls.on_step_skipped(run.trainer, run.module, run.progress.step, self.skip_reason)


def _clipping(run: Run) -> Clip:
    """The function that clips gradients, given their norm."""
    strategy, max_norm, max_value = run.engine.strategy, run.max_grad_norm, run.settings.max_grad_value
    if max_norm is not None:
        return lambda parameters, norm: strategy.clip(parameters, max_norm, norm)  # type: ignore[arg-type]
    if max_value is not None:
        return lambda parameters, norm: strategy.clip_by_value(parameters, max_value)
    return lambda parameters, norm: None


def _interruptible(run: Run, items: Iterable[T], most: float = math.inf) -> Iterable[T]:
    """`items`; a signal may end the wait for the next one.

    One rank with data workers: a signal ends the wait for each of the first `most` items, before any part of an update has run. One rank
    that reads in this process: a signal does not end the wait, because the reading code may be drawing random numbers. Several ranks: other
    ranks may be in the middle of an update, so only a wait that takes too long ends, with an error."""
    assert run.source is not None
    if run.engine.world_size > 1:
        return waiting(run.requests, iter(items))
    return waiting(run.requests, iter(items), most) if run.source.in_workers else items


def _beginning_alike(run: Run, source: Source, windows: Iterable[Window]) -> Iterator[Window]:
    """Check that the ranks read the same first rows, if every rank reads all the data."""
    for number, window in enumerate(windows):
        if not number and source.first:
            check_first(run, source)
        yield window


def _as_long_as_said(run: Run, source: Source, windows: Iterable[Window]) -> Iterator[Window]:
    """Note an epoch whose number of updates is not that of its length, if the updates of the fit were computed from that length."""
    said, epoch = source.updates_per_epoch or 0, run.progress.epoch
    for number, window in enumerate(windows, 1):
        if window.last and number != said:
            units, total = "batches" if source.batch_size is None else "rows", run.optim.total_steps
            ends = (
                "do not reach their end, because max_epochs ends the fit before"
                if number < said
                else "end before the fit"
            )
            run.journal.note(
                f"train: its __len__ says {source.num_units} {units}, {said} updates, but epoch {epoch} ended after {window.end} rows, "
                f"{number} updates. Schedules over trainer.total_steps ({total}) {ends}. Let __len__ return what __iter__ yields in "
                "every epoch; or set max_steps instead of max_epochs",
                topic="length of train",
            )
        yield window


def _same_on_all_ranks(run: Run, windows: Iterable[Window]) -> Iterator[Window]:
    """Check that all ranks read the same windows of data without a length; otherwise their collectives would not match."""
    for window in windows:
        mine = [window.num_micro_steps, window.rows, int(window.last)]
        largest = run.engine.agree([*mine, *(-n for n in mine)])
        if any(most != -least for most, least in zip(largest[:3], largest[3:], strict=True)):
            everyone = run.engine.gather_json(mine)
            raise ConfigurationError(
                f"train: the training data differs between ranks at step {run.progress.step + 1}; each rank has (micro-batches, "
                f"rows, whether the window is the last): {everyone}. Every rank has to iterate over the same data, which "
                "fabricate splits"
            )
        yield window
