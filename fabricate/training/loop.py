"""The loop: one function that trains. What happens when, and nothing about how.

The outer loop is the optimizer update, the inner one its micro-batches. `fabricate.hooks` shows it as the hooks see it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fabricate.errors import ConfigurationError, FabricateError, RankError
from fabricate.metrics.counters import Due, Progress
from fabricate.metrics.loss_weight import last_operation
from fabricate.metrics.reduction import MOST_PENDING
from fabricate.strategies.base import Strategy
from fabricate.training.evaluation import validate
from fabricate.training.first_update import Activations, observe, tell_unreached
from fabricate.training.saving import check_weights, save_requested, settle
from fabricate.training.step_output import check_logged, check_loss, check_window, choose, other_weight, unpack, weigh

if TYPE_CHECKING:
    from fabricate.data.batches import Window
    from fabricate.distributed.engine import Engine
    from fabricate.training.run_state import Run

MOST_SKIPPED = 100
"""Updates skipped one after another before the fit gives up instead of running for ever."""


def fit(run: Run) -> str:
    """Train until a limit, a request or a signal; returns the reason. All ranks."""
    trainer, module, engine, calls, progress = run.trainer, run.module, run.engine, run.calls, run.progress
    model, forward, strategy, scaler = engine.model, engine.forward, engine.strategy, engine.scaler
    settings, world_size, source, moves = run.settings, engine.world_size, run.source, engine.device.type != "cpu"
    readers = engine.data_world_size
    assert source is not None
    stopwatch, metrics, now = run.stopwatch, run.metrics, time.perf_counter
    moments = tuple(
        Due(every, progress) for every in (settings.log_every, settings.validate_every, settings.save_every)
    )
    uncounted = tuple(due for due in moments if due.counter in ("tokens", "seconds"))
    clocked = any(due.by_clock for due in moments) or run.watch is not None
    wake, requests = _wake(run, moments), run.requests
    manager = calls.manager
    only = next(iter(run.optimizers)) if len(run.optimizers) == 1 else None
    everything = list(module.parameters())
    wants_loss, wants_norm = manager.wants("on_step", "loss"), _wants_norm(run)
    scales_loss = engine.scales_loss
    backward, step = strategy.backward, strategy.step if scaler is None else engine.step
    alike = type(strategy).no_sync is Strategy.no_sync  # the last micro-batch of a window is like the others
    look_at_norm = settings.nonfinite == "skip" and not (scales_loss or strategy.skips_nonfinite)
    weighing: dict[str, str] = {}  # by optimizer, where the weights of its losses come from, see `weigh`
    activations: Activations | None = Activations(module)
    run.activations = activations
    skipped_in_a_row = 0
    unsized = source.num_samples is None and world_size > 1
    local = run.closing.enter_context(contextlib.ExitStack())  # for no_sync; an error leaves it open to the run's end

    if settings.validate_first and run.validation and progress.step == 0 and not run.restored:
        validate(run, progress.epoch)
    while not (reason := _finished(run)):
        if calls.on_epoch_start is not None:
            calls.on_epoch_start(trainer, module, progress.epoch)
        progress.micro_step = progress.micro_step if progress.position else 0
        asked = now()
        for window in source.windows(progress.epoch, progress.position):
            # ---- one update ----------------------------------------------------------------------------------------
            if manager.changes != calls.changes:
                calls.refresh()
                wants_loss, wants_norm = manager.wants("on_step", "loss"), _wants_norm(run)
            calls.step = progress.step + 1
            run.at_boundary = False
            if unsized:
                _same_window(run, window)
            num_micro_steps, rows = window.num_micro_steps, window.rows
            last = num_micro_steps - 1
            name, sums = only, None
            losses: list[Any] = []
            weights: list[Any] = []
            known = weighing.get(name) if name is not None else None
            alone = last == 0 and readers == 1
            averaged = losses if wants_loss and not alone else ()
            keeps = moves or wants_loss or calls.on_accumulate is not None or activations is not None
            mark = len(metrics.pending)
            for micro_step, (batch, own_rows) in enumerate(window.micro_batches):
                stopwatch.waited += now() - asked
                run.batch = batch = engine.to_device(batch) if moves else batch
                if not alike and micro_step < last:
                    local.enter_context(strategy.no_sync(model))
                wrapped = calls.train_step
                output = wrapped(trainer, module, batch) if wrapped else forward(batch, progress.micro_step)
                loss, weight, chosen = output, None, None
                if type(output) is not torch.Tensor:
                    loss, weight, chosen = unpack(output)
                if not weighing:
                    check_loss(run, loss)
                if chosen is not None or name is None:
                    name = choose(run, name, chosen, micro_step)
                    known = known or weighing.get(name)
                if known == "rows" and weight is None and own_rows:
                    weight = labels = own_rows  # what `weigh` says, without the call
                else:
                    how, weight, labels = weigh(loss, weight, batch, own_rows, known)
                    known = known or how
                    if how != known:
                        raise other_weight(known, how, loss)
                # Backward averages over ranks, and `rows` counts the whole window. What weights other than rows
                # leave to normalise is done once, below.
                whole = (alone and known == "counted") or (type(weight) is int and weight * readers == rows)
                scaled = loss if whole else loss * (weight * (readers / rows))
                made_by = last_operation(loss) if name not in weighing else ""
                if keeps:  # else the number below is all that is wanted of it
                    loss = loss.detach()
                    losses.append(loss)
                weights.append(weight)
                if readers > 1 and micro_step == last and (known != "rows" or averaged) and name in weighing:
                    sums = _begin_sums(engine, weights, averaged)  # on their way while backward runs
                backward(scaled if scaler is None else scaler.scale(scaled))
                if not alike:
                    local.close()
                if moves:
                    metrics.pending.append(("loss", loss, weight, "mean"))
                else:  # as numbers, see Metrics.take
                    own = weight.item() if type(weight) is torch.Tensor else weight
                    # tolist reads memory where item goes through the dispatcher, for 2 us; a subclass may have no memory of its own.
                    value = loss.tolist() if type(loss) is torch.Tensor else loss.item()
                    metrics.pending.append(("loss", value, own, "mean"))
                if module._logged:
                    if not weighing:
                        check_logged(run)
                    metrics.take(module._logged, labels)
                if calls.on_accumulate is not None:
                    calls.on_accumulate(
                        trainer, module, batch, loss, weight, micro_step, num_micro_steps, micro_step == last
                    )
                progress.micro_step += 1
                asked = now()
            assert name is not None
            assert known is not None
            if name not in weighing:
                check_window(run, known, name, made_by)
                weighing[name] = known
            own_weights = known != "rows"
            optimizer, parameters = run.optimizers[name], run.parameters[name]
            if scaler is not None:
                scaler.unscale_(optimizer)
            total: Any = rows
            mean = losses[0] if alone and wants_loss else None
            if alone and known == "counted":
                total = weights[0]  # the loss is the mean over the whole window as it is
            elif own_weights or averaged:
                of_weights, of_losses = (sums or _begin_sums(engine, weights, averaged))()
                if own_weights:
                    total = of_weights
                    strategy.scale_gradients(parameters, torch.where(total > 0, rows / total, 0.0))
                if averaged:
                    mean = of_losses / total
            norm = engine.grad_norm(parameters) if wants_norm else None
            if run.max_grad_norm is not None:
                strategy.clip(parameters, run.max_grad_norm, norm)  # type: ignore[arg-type]
            elif settings.max_grad_value is not None:
                strategy.clip_by_value(parameters, settings.max_grad_value)
            if calls.on_before_step is not None:
                calls.on_before_step(trainer, module, optimizer, norm)
            # Under nonfinite="skip" this is the one wait per update; a loss scaler and some engines look themselves.
            why = "loss scale overflow" if scales_loss else "non-finite gradients"
            if look_at_norm and not math.isfinite(float(norm)):  # type: ignore[arg-type]
                applied = False
            else:
                wrapped = calls.optimizer_step
                applied = wrapped(trainer, module, optimizer) if wrapped else step(optimizer)
            if applied:
                if name in run.schedulers:
                    run.schedulers[name].updated()
                progress.step += 1
                skipped_in_a_row = 0
            else:
                progress.skipped += 1
                skipped_in_a_row += 1
                del metrics.pending[mark:]  # what was not applied does not count in any mean
            if activations is not None and applied:
                run.unreached = observe(run, activations, losses[-1], known)
                activations = None
            elif run.unreached:
                run.unreached = {n: p for n, p in run.unreached.items() if p.grad is None}
            route = strategy.route() if world_size > 1 else 0
            strategy.clear_gradients(everything)
            progress.position = window.end
            progress.samples += rows
            progress.tokens += _host(total, run) if own_weights else rows
            if not applied:
                run.event("skipped", reason=why)
                if skipped_in_a_row >= MOST_SKIPPED:
                    raise FabricateError(
                        f"{skipped_in_a_row} updates in a row were skipped ({why}) after step {progress.step}: training does not "
                        "go on by itself. Lower the learning rate, look at the data, or resume from an earlier checkpoint"
                    )
                if calls.on_step_skipped is not None:
                    calls.on_step_skipped(trainer, module, progress.step, why)
            elif calls.on_step is not None:
                calls.on_step(trainer, module, progress.step, mean, norm)
                if module._logged:
                    metrics.take(module._logged, total)

            # ---- the boundary: most of them have nothing to do -----------------------------------------------------
            if clocked:
                run.tick()
            if progress.step >= wake or window.last or requests.pending or (uncounted and _due(progress, uncounted)):
                if reason := _boundary(run, moments, window, norm, route):
                    return reason
                wake = _wake(run, moments)
            else:
                if len(metrics.pending) >= MOST_PENDING:
                    metrics.compact()
                run.at_boundary = True
                if run.background is not None:
                    settle(run, wait=False)
            asked = now()
        if progress.position == 0 and not progress.micro_step:
            raise ConfigurationError(
                "train gave no batch in this epoch; an iterator that is used up cannot be read again"
            )
    return reason


def _boundary(run: Run, moments: tuple[Due, ...], window: Window, norm: torch.Tensor | None, route: int) -> str:
    """Between two updates: what fell due and what was asked for, agreed by all ranks. Why the fit ends here, or nothing."""
    progress, calls, requests, epoch = run.progress, run.calls, run.requests, run.progress.epoch
    if window.last:
        progress.epoch, progress.position = epoch + 1, 0
        for schedule in run.schedulers.values():
            schedule.epoch_ended()
    requests.pending = False
    stop, logging, evaluating, saving = _agree(run, moments, route)
    finished = _finished(run)
    if logging:
        metrics = run.metrics.reduce()
        _log(run, metrics, norm, epoch)
        _stop_if_nonfinite(run, metrics)
    elif window.last or stop or finished:
        _stop_if_nonfinite(run, run.metrics.look())
    elif len(run.metrics.pending) >= MOST_PENDING:
        run.metrics.compact()
    if run.unreached and (logging or window.last or stop or finished):
        tell_unreached(run, run.unreached)
        run.unreached = {}
    if window.last:
        averages = {f"epoch_{n}": v for n, v in run.metrics.finish().items()}
        run.write_metrics("epoch", averages, epoch)
    if run.validation and evaluating:
        with run.stopwatch.apart():
            validate(run, epoch)
    if window.last and calls.on_epoch_end is not None:
        calls.on_epoch_end(run.trainer, run.module, epoch)
    # What was asked for meanwhile counts now, on all ranks, where all know that hooks ran: of what a signal or a thread of one
    # rank asked while they agreed the others know nothing.
    if (logging or evaluating or window.last) if run.engine.world_size > 1 else requests.pending:
        late_stop, _, _, late_save = _agree(run, ())
        stop, saving = stop or late_stop, saving or late_save
    if logging or saving or stop or finished:
        _check_frozen(run)
    if stop or finished:
        check_weights(run)
    run.at_boundary = True
    if run.background is not None:
        settle(run, wait=False)
    if saving:
        with run.stopwatch.apart():
            save_requested(run)
    return _stop_reason(run, finished) if stop else finished


def _wake(run: Run, moments: tuple[Due, ...]) -> float:
    """The number of updates at which something falls due by itself; 0, so after each of them, where ranks have to agree."""
    if run.engine.world_size > 1:
        return 0
    most = math.inf if run.settings.max_steps is None else run.settings.max_steps
    return min((most, *(due.next for due in moments if due.counter == "step")))


def _due(progress: Progress, moments: tuple[Due, ...]) -> bool:
    """Whether a moment has come that is not counted in updates."""
    return any(getattr(progress, due.counter) >= due.next for due in moments)


def _same_window(run: Run, window: Window) -> None:
    """Data without a length: every rank has to find the same windows, or their collectives would not match."""
    mine = [window.num_micro_steps, window.rows, int(window.last)]
    largest = run.engine.agree([*mine, *(-n for n in mine)])
    if any(most != -least for most, least in zip(largest[:3], largest[3:], strict=True)):
        everyone = run.engine.gather_json(mine)
        raise ConfigurationError(
            f"train differs between ranks at step {run.progress.step + 1} (micro-batches, rows, last window, by rank): {everyone}; every "
            "rank has to iterate over the same data, which fabricate splits"
        )


def _finished(run: Run) -> str:
    settings, progress = run.settings, run.progress
    if settings.max_steps is not None and progress.step >= settings.max_steps:
        return "max_steps"
    return "max_epochs" if settings.max_epochs is not None and progress.epoch >= settings.max_epochs else ""


def _wants_norm(run: Run) -> bool:
    wants = run.calls.manager.wants
    heard = wants("on_step", "grad_norm") or wants("on_before_step", "grad_norm")
    return heard or run.max_grad_norm is not None or run.settings.nonfinite == "skip"


def _begin_sums(engine: Engine, weights: Sequence[Any], losses: Sequence[Any]) -> Callable[[], torch.Tensor]:
    """Two sums over the window and all ranks, on the device: of the weights, and of the losses times these. No wait."""
    zero = torch.zeros((), device=engine.device)
    pairs = zip(losses, weights, strict=False)  # no losses where nobody wants their mean
    of_losses = (torch.where(torch.as_tensor(w, device=zero.device) == 0, zero, loss.float() * w) for loss, w in pairs)
    return engine.begin_sum(torch.stack([sum(weights, zero), sum(of_losses, zero)]))


def _host(total: Any, run: Run) -> float:
    """Weights as a number without a wait: device tensors are added up and read at the next log boundary."""
    if not isinstance(total, torch.Tensor):
        return float(total)
    if total.device.type == "cpu":
        return float(total)
    run.unread_tokens = run.unread_tokens + total
    return 0.0


def _agree(run: Run, dues: tuple[Due, ...], route: int = 0) -> tuple[bool, bool, bool, bool]:
    """Whether to stop, log, evaluate and save: moments that fell due and what any rank asked for, the same on every rank.
    Clocks are rank 0's."""
    requests, progress = run.requests, run.progress
    fell = [d.reached(progress) if not d.by_clock or run.engine.rank == 0 else False for d in dues] or [False] * 3
    save = requests.save or fell[2] or bool(requests.paths)
    asked = [fell[0], requests.evaluate or fell[1], save, bool(requests.stop), bool(requests.signal)]
    if dues:  # before the ranks wait for each other: an evaluation that a thread asks for meanwhile is another
        requests.evaluate = False
    if run.engine.world_size > 1:
        *flags, largest, least = run.engine.agree([*(int(flag) for flag in asked), route, -route])
        if largest != -least:
            raise RankError(
                f"ranks ran different layers in the update to step {run.progress.step}, which strategy={run.engine.strategy.name!r} turns "
                "into wrong weights; let every rank run every layer (add 0 * output of one that is not needed), or use strategy='ddp'"
            )
        asked = [bool(flag) for flag in flags]
    requests.save = requests.save or fell[2]  # kept until save_requested asks every rank what for
    logging, evaluating, saving, stop, interrupted = asked
    if interrupted:
        requests.signal = next(name for name in run.engine.gather_json(requests.signal) if name)
    return stop or interrupted, logging, evaluating, saving


def _stop_reason(run: Run, finished: str) -> str:
    """A fit that is over by its own measure is over, also when a signal came in the same update."""
    reasons = [*run.engine.gather_json(run.requests.stop), finished]
    return next(filter(None, reasons), "interrupted" if run.requests.signal == "SIGINT" else "preempted")


def _log(run: Run, metrics: dict[str, float], norm: torch.Tensor | None, epoch: int) -> None:
    if norm is not None:
        metrics["grad_norm"] = float(norm)
    for name, optimizer in run.optimizers.items():
        metrics["lr" if len(run.optimizers) == 1 else f"lr_{name}"] = float(optimizer.param_groups[0]["lr"])
    run.progress.tokens += float(run.unread_tokens)
    run.unread_tokens = 0
    run.write_metrics("train", metrics, epoch)
    if run.calls.on_log is not None:
        run.calls.on_log(run.trainer, run.module, metrics, run.progress.step)


def log_rest(run: Run) -> None:
    """What was not logged yet when the fit came to its end. After the last save: a fit that goes on from there logs as if it
    had never ended. All ranks."""
    if metrics := run.metrics.reduce():
        progress = run.progress
        _log(run, metrics, None, progress.epoch - (progress.position == 0 and progress.epoch > 0))


def _check_frozen(run: Run) -> None:
    """Optimizers and strategies took over what was trainable when the fit began."""
    for name, parameter in run.frozen.items():
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
