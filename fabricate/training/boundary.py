"""The boundary between two updates: what falls due or was requested is agreed by all ranks and done.

Most boundaries have nothing to do. Must not know: how gradients come about (`fabricate.training.loop`).
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

from fabricate.data.batches import Window
from fabricate.errors import ConfigurationError, FabricateError, RankError
from fabricate.metrics.counters import Due
from fabricate.training.evaluation import validate
from fabricate.training.first_update import FirstUpdate
from fabricate.training.run_state import Run
from fabricate.training.saving import check_weights, save_requested, settle

LONGEST_WAIT_SECONDS, MOST_UPDATES = 0.1, 16
"""How long, and for how many updates, several ranks stay silent where only a signal, a clock or a thread could request something."""

_IN_AN_UPDATE = ("train_step", "on_accumulate", "on_before_step", "optimizer_step", "on_step", "on_step_skipped")


def finished(run: Run) -> str:
    """The limit that the fit has reached, or nothing."""
    settings, progress = run.settings, run.progress
    if settings.max_steps is not None and progress.step >= settings.max_steps:
        return "max_steps"
    return "max_epochs" if settings.max_epochs is not None and progress.epoch >= settings.max_epochs else ""


def boundary(
    run: Run, agenda: Agenda, window: Window, first: FirstUpdate, norm: torch.Tensor | None, route: int
) -> str:
    """Do what is due or requested after an update. Why the fit ends here, or nothing. All ranks."""
    if not agenda.due(window, route):
        run.metrics.limit()
        run.now.at_boundary = True
        return ""
    epoch = run.progress.epoch
    if window.last:
        _end_epoch(run)
    wanted = agenda.decide()
    reason = finished(run)
    ends = wanted.end or bool(reason)
    _report(run, first, wanted.log, epoch, norm, ends or window.last)
    if window.last:
        _log_epoch(run, epoch)
    if wanted.evaluate and run.validation:
        with run.journal.stopwatch.apart():
            validate(run, epoch)
    if window.last and run.calls.on_epoch_end is not None:
        run.calls.on_epoch_end(run.trainer, run.module, epoch)
    wanted = agenda.decide_again(wanted, hooks_ran=wanted.log or wanted.evaluate or window.last)
    _check(run, wanted, wanted.end or bool(reason))
    run.now.at_boundary = True
    if not wanted.writing:
        settle(run)
    if wanted.save:
        with run.journal.stopwatch.apart():
            save_requested(run)
    return _stop_reason(run, reason) if wanted.end else reason


# -- what to do --------------------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """What a boundary has to do."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: bool = False
    interrupted: bool = False
    writing: bool = False
    """Whether a save in the background is still under way on some rank."""

    @property
    def end(self) -> bool:
        """Whether to end the fit."""
        return self.stop or self.interrupted


class Agenda:
    """What falls due by a count or a clock, and what was requested."""

    def __init__(self, run: Run) -> None:
        settings, progress = run.settings, run.progress
        self._run = run
        self._moments = tuple(
            Due(every, progress) for every in (settings.log_every, settings.validate_every, settings.save_every)
        )
        self._by_step = [due for due in self._moments if due.counter == "step"]
        self._by_amount = [due for due in self._moments if due.counter == "tokens"]
        # The clock of rank 0 counts; there a fit may also have a budget of time, or a stop file to look for.
        self._by_clock = [due for due in self._moments if due.by_clock and run.engine.rank == 0]
        self._reads_clock = run.watch is not None or bool(self._by_clock)
        self._most_steps = math.inf if settings.max_steps is None else settings.max_steps
        self._ranks = OneRank(run) if run.engine.world_size == 1 else ManyRanks(run)
        self._find_next_step()

    def _find_next_step(self) -> None:
        self._next_step = min((self._most_steps, *(due.next for due in self._by_step)))

    def due(self, window: Window, route: int) -> bool:
        """Whether the boundary after `window` may have something to do; the same on every rank."""
        if self._reads_clock:
            self._look_at_clock()
        progress = self._run.progress
        due = progress.step >= self._next_step or window.last
        due = due or any([progress.tokens >= moment.next for moment in self._by_amount])
        return self._ranks.speak(route) or due

    def _look_at_clock(self) -> None:
        """Request what falls due by the clock, as other code of this rank requests it."""
        run = self._run
        now = run.journal.clock.tick()
        if run.watch is not None and now >= run.watch.look_at:
            run.watch.look(now)
        if any([run.progress.seconds >= moment.next for moment in self._by_clock]):
            run.requests.pending = True

    def decide(self) -> Wanted:
        """What falls due or was requested, on any rank. All ranks."""
        run, requests = self._run, self._run.requests
        requests.pending = False  # first: what is requested from here on is seen now or the next time
        log, evaluate, save = (
            due.reached(run.progress) if not due.by_clock or due in self._by_clock else False for due in self._moments
        )
        self._find_next_step()
        requests.save = requests.save or save  # kept until `save_requested` asks every rank what for
        own = self._requested()._replace(log=log, evaluate=evaluate or requests.evaluate)
        # Before ranks wait for each other: what a thread requests meanwhile is another evaluation.
        requests.evaluate = False
        return self._ranks.agree(own)

    def decide_again(self, wanted: Wanted, hooks_ran: bool) -> Wanted:
        """`wanted`, and what hooks of this boundary requested. All ranks."""
        if not self._ranks.speak_again(hooks_ran):
            return wanted
        late = self._ranks.agree(self._requested())
        return wanted._replace(stop=wanted.end or late.end, save=wanted.save or late.save)

    def _requested(self) -> Wanted:
        """What was requested on this rank, but for an evaluation."""
        requests, background = self._run.requests, self._run.checkpoints.background
        return Wanted(
            save=requests.save or bool(requests.paths),
            stop=bool(requests.stop),
            interrupted=bool(requests.signal),
            writing=background is not None and background.running,
        )


class OneRank:
    """A single process decides for itself, at the very next boundary."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def speak(self, route: int) -> bool:
        """Whether something was requested since the last boundary, or a save in the background has ended."""
        background = self._run.checkpoints.background
        return self._run.requests.pending or (background is not None and background.busy and not background.running)

    def speak_again(self, hooks_ran: bool) -> bool:
        """Whether something was requested during the boundary."""
        return self._run.requests.pending

    def agree(self, own: Wanted) -> Wanted:
        """What to do."""
        return own


class ManyRanks:
    """Several ranks tell each other what was requested.

    After each update, where a listener ran in it that could have requested something. Otherwise only signals, clocks and threads
    can: then ranks speak so often that these wait a tenth of a second at most, because a message costs more than a small update.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._silent = 0
        """Updates since the ranks last spoke."""
        self._most_silent = 1
        self._routes = 0
        self._spoke_at = time.monotonic()
        object.__setattr__(run.module, "_uses_trainer", False)  # only uses from here on are in an update

    def speak(self, route: int) -> bool:
        """Whether the ranks speak after this update; the same on every rank."""
        self._silent += 1
        self._routes = hash((self._routes, route)) if route else self._routes
        calls = self._run.calls
        if self._silent >= self._most_silent:
            return True
        return any([getattr(calls, hook) is not None for hook in _IN_AN_UPDATE])

    def speak_again(self, hooks_ran: bool) -> bool:
        """Whether hooks ran in this boundary, which all ranks know. Of what a thread or a signal of one rank requested meanwhile
        the others know nothing."""
        return hooks_ran

    def agree(self, own: Wanted) -> Wanted:
        """What any rank wants. All ranks; one message."""
        run, engine, requests = self._run, self._run.engine, self._run.requests
        route, seconds = self._routes % 2**62, time.monotonic() - self._spoke_at
        microseconds = int(1e6 * seconds / self._silent) if self._silent else 0
        used = int(run.module._uses_trainer)
        *flags, largest, least, slowest, uses = engine.agree([*map(int, own), route, -route, microseconds, used])
        if largest != -least:
            before = f" or the {self._silent - 1} before it" if self._silent > 1 else ""
            raise RankError(
                f"ranks ran different layers in the update to step {run.progress.step}{before}, which strategy={engine.strategy.name!r} "
                "turns into wrong weights; let every rank run every layer (add 0 * output of one that is not needed), or use strategy='ddp'"
            )
        self._plan_next(slowest, bool(uses))
        wanted = Wanted(*map(bool, flags))
        if wanted.interrupted:
            requests.signal = next(name for name in engine.gather_json(requests.signal) if name)
        return wanted

    def _plan_next(self, microseconds: int, steps_use_trainer: bool) -> None:
        """After how many updates the ranks speak next, given how long one took. `steps_use_trainer`: a step of the module, as a
        listener, may have requested something."""
        if self._silent:
            most = int(1e6 * LONGEST_WAIT_SECONDS / max(microseconds, 1))
            self._most_silent = 1 if steps_use_trainer else max(1, min(most, 2 * self._most_silent, MOST_UPDATES))
        self._silent, self._spoke_at = 0, time.monotonic()


def _stop_reason(run: Run, limit: str) -> str:
    """A fit that has reached a limit is complete, also when a signal came in the same update."""
    reasons = [*run.engine.gather_json(run.requests.stop), limit]
    return next(filter(None, reasons), "interrupted" if run.requests.signal == "SIGINT" else "preempted")


# -- doing it ----------------------------------------------------------------------------------------------------------


def _end_epoch(run: Run) -> None:
    run.progress.epoch += 1
    run.progress.position = 0
    for schedule in run.optim.schedules.values():
        schedule.epoch_ended()


def _log_epoch(run: Run, epoch: int) -> None:
    averages = {f"epoch_{name}": value for name, value in run.metrics.finish().items()}
    run.journal.write_metrics("epoch", averages, epoch)


def _report(run: Run, first: FirstUpdate, log: bool, epoch: int, norm: torch.Tensor | None, ends: bool) -> None:
    """Log if that is due; where an epoch or the fit ends, look at the loss in any case."""
    if log:
        metrics = run.metrics.reduce()
        _log(run, metrics, norm, epoch)
        _stop_if_nonfinite(run, metrics)
    elif ends:
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


def _check(run: Run, wanted: Wanted, ends: bool) -> None:
    """Refuse to log, save or end with parameters that are not what they seem."""
    if wanted.log or wanted.save or ends:
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
