"""What a boundary has to do: what is due by a count or a clock, and what was requested. All ranks agree on it.

Must not know: how it is done (`fabricate.training.boundary`).
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from fabricate.data.batches import Window
from fabricate.errors import RankError
from fabricate.hooks import EVENTS
from fabricate.metrics.counters import Due, Progress
from fabricate.training.state.run_state import Run
from fabricate.training.updates import freezing

LONGEST_WAIT_SECONDS, MOST_UPDATES = 0.1, 16
"""The longest time and the largest number of updates between two agreements of several ranks, while only a signal, a clock or a thread can
request something."""
OUTSIDE_UPDATES = {
    *("on_fit_start", "on_load", "on_epoch_start", "on_log", "on_eval_start", "eval_step", "on_eval_end", "on_save"),
    *(
        "on_load_weights",
        "write_checkpoint",
        "on_saved",
        "on_epoch_end",
        "on_complete",
        "on_export",
        "on_fit_end",
        "on_preempt",
        "on_exception",
        "on_teardown",
    ),
}
"""Hooks that run at a boundary or outside the loop. A listener of any other hook may request something in every update."""


class Wanted(NamedTuple):
    """What a boundary has to do."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: bool = False
    interrupted: bool = False
    writing: bool = False
    """Whether a save in the background is still in progress on some rank."""

    @property
    def end(self) -> bool:
        """Whether to end the fit."""
        return self.stop or self.interrupted


class Agenda:
    """Finds out what is due by a count or a clock, and what was requested."""

    def __init__(self, run: Run) -> None:
        settings, progress = run.settings, run.progress
        per_epoch = run.source.updates_per_epoch if run.source is not None else None
        self._run = run
        self._moments = tuple(
            Due(every, progress, per_epoch, self._windows)
            for every in (settings.log_every, settings.validate_every, settings.save_every)
        )
        self._by_step = [due for due in self._moments if due.counter == "step"]
        self._by_amount = [due for due in self._moments if due.counter in ("tokens", "windows")]
        # Only rank 0 reads the clock, and looks at the time limit and for the stop file.
        self._by_clock = [due for due in self._moments if due.by_clock and run.engine.rank == 0]
        self._reads_clock = run.watch is not None or bool(self._by_clock)
        self._most_steps = math.inf if settings.max_steps is None else settings.max_steps
        self._least_steps = settings.min_steps or 0
        self._ranks = OneRank(run) if run.engine.world_size == 1 else ManyRanks(run)
        self._find_next_step()

    def _windows(self, progress: Progress) -> int:
        assert self._run.source is not None
        return self._run.source.windows_until(progress.epoch, progress.position, progress.micro_step)

    def _find_next_step(self) -> None:
        least = self._least_steps if self._run.progress.step < self._least_steps else math.inf
        self._next_step = min((self._most_steps, least, *(due.next for due in self._by_step)))

    def due(self, window: Window) -> bool:
        """Whether the boundary after `window` may have something to do; the same on every rank."""
        if self._reads_clock:
            self._look_at_clock()
        progress = self._run.progress
        due = progress.step >= self._next_step or window.last
        if self._by_amount:
            due = due or any([each.value(progress) >= each.next for each in self._by_amount])
        return self._ranks.due() or due  # in this order, because `_ranks.due` also counts the updates

    def _look_at_clock(self) -> None:
        """Set the flags of what is due by the clock, as other code of this rank sets them."""
        run = self._run
        now = run.journal.clock.tick()
        if run.watch is not None and now >= run.watch.look_at:
            run.watch.look(now)
        if any([run.progress.seconds >= moment.next for moment in self._by_clock]):
            run.requests.pending = True

    def decide(self) -> Wanted:
        """What is due or was requested on any rank. All ranks."""
        requests = self._run.requests
        # Cleared first, so that a request made from here on is seen now or at the next boundary.
        requests.pending = False
        log, evaluate, save = map(self._reached, self._moments)
        self._find_next_step()
        requests.save = requests.save or save  # kept until `save_requested` collects what every rank wants to save
        own = self._requested()._replace(log=log, evaluate=evaluate or requests.evaluate)
        # Cleared before the ranks wait for each other, so that a request that a thread makes meanwhile is not lost.
        requests.evaluate = False
        return self._ranks.agree(own)

    def _reached(self, moment: Due) -> bool:
        """Whether `moment` is due on this rank; a moment by the clock is due on rank 0 only."""
        return (not moment.by_clock or moment in self._by_clock) and moment.reached(self._run.progress)

    def decide_again(self, wanted: Wanted, hooks_ran: bool) -> Wanted:
        """`wanted` plus what the hooks of this boundary requested. All ranks."""
        if not self._ranks.due_again(hooks_ran):
            return wanted
        late = self._ranks.agree(self._requested())
        stop, interrupted = wanted.stop or late.stop, wanted.interrupted or late.interrupted
        return wanted._replace(stop=stop, interrupted=interrupted, save=wanted.save or late.save)

    def _requested(self) -> Wanted:
        """What was requested on this rank, apart from an evaluation."""
        run = self._run
        requests, background = run.requests, run.checkpoints.background
        return Wanted(
            save=requests.save or bool(requests.paths),
            stop=bool(requests.stop) and run.is_long_enough(),
            interrupted=bool(requests.signal),
            writing=background is not None and background.running,
        )


class OneRank:
    """A single process: requests take effect at the next boundary."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def due(self) -> bool:
        """Whether something was requested since the last boundary, or a save in the background has ended."""
        background = self._run.checkpoints.background
        return self._run.requests.pending or (background is not None and background.busy and not background.running)

    def due_again(self, hooks_ran: bool) -> bool:
        """Whether something was requested during the boundary."""
        return self._run.requests.pending

    def agree(self, own: Wanted) -> Wanted:
        """What to do."""
        return own


class ManyRanks:
    """Several ranks: a request of any rank takes effect on all.

    The ranks agree after each update in which a listener ran that could have requested something. Otherwise only signals, clocks and
    threads can request something, and the ranks agree about every tenth of a second, because a message costs more than a small update.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._updates = 0
        """Updates since the ranks last agreed."""
        self._most_updates = 1
        """The number of updates after which the ranks agree in any case."""
        self._routes = 0
        """A hash over the routes of the updates since the ranks last agreed; see `Strategy.route`."""
        self._agreed_at = time.monotonic()
        object.__setattr__(run.module, "_uses_trainer", False)  # uses before the first update do not count

    def due(self) -> bool:
        """Whether the ranks agree after this update; the same on every rank."""
        self._updates += 1
        route = self._run.engine.strategy.route()
        self._routes = hash((self._routes, route)) if route else self._routes
        return self._updates >= self._most_updates or self._listeners_ran()

    def _listeners_ran(self) -> bool:
        calls = self._run.calls
        return any([getattr(calls, hook, None) is not None for hook in EVENTS if hook not in OUTSIDE_UPDATES])

    def due_again(self, hooks_ran: bool) -> bool:
        """Whether hooks ran in this boundary, which is the same on all ranks. What a thread or a signal of one rank requested meanwhile has
        to wait: the other ranks do not know of it."""
        return hooks_ran

    def agree(self, own: Wanted) -> Wanted:
        """What any rank wants to do. All ranks; one message."""
        run, engine, requests = self._run, self._run.engine, self._run.requests
        route, seconds = self._routes % 2**62, time.monotonic() - self._agreed_at
        microseconds = int(1e6 * seconds / self._updates) if self._updates else 0
        uses_trainer = int(run.module._uses_trainer)
        changes = freezing.digest(run)
        mine = [*map(int, own), route, -route, changes, -changes, microseconds, uses_trainer]
        *flags, most, minus_least, changes, minus_changes, slowest, uses_trainer = engine.agree(mine)
        freezing.check_alike(run, changes, -minus_changes)
        if most != -minus_least:
            before = f" or the {self._updates - 1} before it" if self._updates > 1 else ""
            raise RankError(
                f"ranks ran different layers in the update to step {run.progress.step}{before}, which gives wrong weights under "
                f"strategy={engine.strategy.name!r}; run every layer on every rank (add 0 * output of a layer that is not needed), "
                "in the same order, or use strategy='ddp'"
            )
        self._plan_next(slowest, bool(uses_trainer))
        wanted = Wanted(*map(bool, flags))
        if wanted.interrupted:
            requests.signal = next(name for name in engine.gather_json(requests.signal) if name)
        return wanted

    def _plan_next(self, microseconds: int, uses_trainer: bool) -> None:
        """Decide after how many updates the ranks agree next. `microseconds`: the duration of one update on the slowest rank;
        `uses_trainer`: whether a step of the module used the trainer, and so may have requested something."""
        if self._updates:
            most = min(int(1e6 * LONGEST_WAIT_SECONDS / max(microseconds, 1)), 2 * self._most_updates, MOST_UPDATES)
            self._most_updates = 1 if uses_trainer else max(1, most)
        self._updates, self._agreed_at = 0, time.monotonic()
