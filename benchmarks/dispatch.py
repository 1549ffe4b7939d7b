"""The cost of a hook point: fabricate's hook calls and those of pluggy, in one process, with alternating rounds.

    python -m benchmarks.dispatch
    python -m benchmarks.dispatch --rounds 51 --json dispatch.json

A step has fifteen hook points: `on_accumulate` for each of twelve micro-batches, `on_before_step`, `on_step`, `on_log`. They are written as
in the loop, `if calls.on_step is not None: calls.on_step(...)`, and as `manager.hook.on_step(...=...)` for pluggy. Both call the same
listeners: the first takes no argument, the second one argument, the third two. The figures are CPU time of the thread, minus that of the
same loop without hook points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tables import table
from fabricate import Callback
from fabricate.registry.hook_calls import Calls, Manager

MICRO_BATCHES = 12
TARGETS = {0: 1.0, 3: 25.0}
"""Microseconds per step that fabricate's calls may take, by number of listeners."""
COUNTS = (0, 1, 3, 10)


class TakesNothing(Callback):
    def on_accumulate(self) -> None: ...
    def on_before_step(self) -> None: ...
    def on_step(self) -> None: ...
    def on_log(self) -> None: ...


class TakesOne(Callback):
    def on_accumulate(self, loss: Any) -> None: ...
    def on_before_step(self, optimizer: Any) -> None: ...
    def on_step(self, step: Any) -> None: ...
    def on_log(self, metrics: Any) -> None: ...


class TakesTwo(Callback):
    def on_accumulate(self, micro_step: Any, is_last: Any) -> None: ...
    def on_before_step(self, module: Any, optimizer: Any) -> None: ...
    def on_step(self, trainer: Any, loss: Any) -> None: ...
    def on_log(self, metrics: Any, step: Any) -> None: ...


LISTENERS = (TakesNothing, TakesOne, TakesTwo)
Step = Callable[[int], None]
"""A function that runs the given number of steps."""


def managed(count: int) -> Manager:
    """A manager with `count` listeners."""
    manager = Manager()
    for number in range(count):
        manager.add(LISTENERS[number % len(LISTENERS)](), f"listener{number}")
    return manager


def nothing(steps: int) -> None:
    """The loop without hook points."""
    for _ in range(steps):
        for _ in range(MICRO_BATCHES):
            pass


def prepared(calls: Calls) -> Step:
    """A function that runs the fifteen hook points as the loop does."""
    trainer = module = batch = loss = optimizer = norm = metrics = object()

    def run(steps: int) -> None:
        for step in range(steps):
            for micro_step in range(MICRO_BATCHES):
                if calls.on_accumulate is not None:
                    calls.on_accumulate(trainer, module, batch, loss, 1, micro_step, MICRO_BATCHES, False)
            if calls.on_before_step is not None:
                calls.on_before_step(trainer, module, optimizer, norm)
            if calls.on_step is not None:
                calls.on_step(trainer, module, step, loss, norm)
            if calls.on_log is not None:
                calls.on_log(trainer, module, metrics, step)

    return run


def stock(manager: Manager) -> Step:
    """A function that runs the fifteen hook points with pluggy's calls."""
    hook: Any = manager.hook
    trainer = module = batch = loss = optimizer = norm = metrics = object()

    def run(steps: int) -> None:
        for step in range(steps):
            for micro_step in range(MICRO_BATCHES):
                hook.on_accumulate(
                    trainer=trainer,
                    module=module,
                    batch=batch,
                    loss=loss,
                    weight=1,
                    micro_step=micro_step,
                    num_micro_steps=MICRO_BATCHES,
                    is_last=False,
                )
            hook.on_before_step(trainer=trainer, module=module, optimizer=optimizer, grad_norm=norm)
            hook.on_step(trainer=trainer, module=module, step=step, loss=loss, grad_norm=norm)
            hook.on_log(trainer=trainer, module=module, metrics=metrics, step=step)

    return run


def _microseconds(run: Step, steps: int) -> float:
    before = time.thread_time_ns()
    run(steps)
    return (time.thread_time_ns() - before) / steps / 1000


def measure(rounds: int, steps: int) -> list[dict[str, Any]]:
    """Microseconds per step by number of listeners: medians over the rounds, minus the empty loop of the same round."""
    managers = {count: managed(count) for count in COUNTS}
    ways: dict[tuple[int, str], Step] = {}
    for count, manager in managers.items():
        ways |= {(count, "fabricate"): prepared(Calls(manager)), (count, "pluggy"): stock(manager)}
    times: dict[tuple[int, str], list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        floor = _microseconds(nothing, steps)
        for way, run in ways.items():
            microseconds = _microseconds(run, steps) - floor
            if number:  # the first round warms up
                times[way].append(microseconds)
    medians = {way: statistics.median(microseconds) for way, microseconds in times.items()}
    return [
        {
            "listeners": count,
            "fabricate": round(medians[count, "fabricate"], 3),
            "pluggy": round(medians[count, "pluggy"], 3),
            "target": TARGETS.get(count),
        }
        for count in COUNTS
    ]


def main() -> None:
    """Measure, print the table, and write JSON with --json; the exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=2000, help="per round and way")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    figures = measure(options.rounds, options.steps)
    rows = [
        [
            str(row["listeners"]),
            f"{row['fabricate']:.2f}",
            f"{row['pluggy']:.2f}",
            f"{row['pluggy'] / max(row['fabricate'], 0.001):.0f}",
            "" if row["target"] is None else f"under {row['target']:g}",
        ]
        for row in figures
    ]
    print(table(["listeners per hook", "fabricate, us per step", "pluggy, us per step", "ratio", "target"], rows))
    print(f"15 hook points per step; medians of {options.rounds} interleaved rounds of {options.steps} steps.")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    missed = [row["listeners"] for row in figures if row["target"] is not None and row["fabricate"] >= row["target"]]
    if missed:
        raise SystemExit(f"missed with {' and '.join(map(str, missed))} listeners")


if __name__ == "__main__":
    main()
