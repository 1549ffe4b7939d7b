"""A few updates under `torch.profiler`: a Chrome trace, and a table of the operators that take the most time."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricate.errors import ConfigurationError
from fabricate.hooks import Callback, hookimpl

if TYPE_CHECKING:
    import os

    import torch

    from fabricate.trainer import Trainer

OPERATORS = 10
"""The number of rows of the table."""


class Profiler(Callback):
    """Profiles `active` updates with `torch.profiler`, after `wait` updates without it and `warmup` updates whose measurements are
    discarded.

    folder: the directory for `trace-rank0.json` (open it in chrome://tracing or ui.perfetto.dev) and `operators-rank0.txt`; default:
    `RUN_DIR/profile`. all_ranks: profile every rank, not only rank 0. memory, shapes, stacks: record allocations, the shapes of inputs, the
    lines of Python code; each slows the profiled updates down.

    The table shows the operators with the most self time on the device (without one: CPU time), and the shares of `training_step`, the
    optimizer and everything outside of operators (the loop, hooks, Python code of the module) in the time of the profiled updates. If the
    fit ends before `wait + warmup + active` updates, nothing is written, and a line says so.

        Trainer(plugins=[Profiler(wait=10, active=3)], run_dir="runs/one", ...)
    """

    def __init__(
        self,
        *,
        wait: int = 5,
        warmup: int = 2,
        active: int = 3,
        folder: str | os.PathLike[str] | None = None,
        all_ranks: bool = False,
        memory: bool = False,
        shapes: bool = False,
        stacks: bool = False,
    ) -> None:
        for name, value, least in (("wait", wait, 0), ("warmup", warmup, 0), ("active", active, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"Profiler({name}={value!r}): give a number of updates, {least} or more")
        self.wait, self.warmup, self.active = wait, warmup, active
        self.folder = None if folder is None else Path(folder)
        self.all_ranks = all_ranks
        self.memory, self.shapes, self.stacks = memory, shapes, stacks
        self._profile: torch.profiler.profile | None = None
        self._running = ExitStack()

    def on_fit_start(self, trainer: Trainer) -> None:
        import torch.profiler

        folder = self.folder or (trainer.run_dir and trainer.run_dir / "profile")
        if folder is None:
            raise ConfigurationError(
                "Profiler(folder=None) writes to RUN_DIR/profile, and no run_dir is set. Give a folder, or set Trainer(run_dir=...)"
            )
        if not (self.all_ranks or trainer.is_main):
            return
        rank = trainer.accelerator.process_index
        self._profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=lambda profile: _write(profile, folder, rank),
            profile_memory=self.memory,
            record_shapes=self.shapes,
            with_stack=self.stacks,
        )
        self._running.enter_context(self._profile)

    @hookimpl(wrapper=True)
    def train_step(self) -> Generator[None, Any, Any]:
        return (yield from self._timed("training_step"))

    @hookimpl(wrapper=True)
    def optimizer_step(self) -> Generator[None, Any, Any]:
        return (yield from self._timed("optimizer_step"))

    def _timed(self, name: str) -> Generator[None, Any, Any]:
        from torch.profiler import record_function

        if self._profile is None:
            return (yield)
        with record_function(name):
            return (yield)

    def on_step(self) -> None:
        self._advance()

    def on_step_skipped(self) -> None:
        self._advance()

    def _advance(self) -> None:
        if self._profile is not None:
            self._profile.step()
            if self._profile.step_num >= self.wait + self.warmup + self.active:
                self._stop()

    def on_fit_end(self, trainer: Trainer) -> None:
        if self._profile is not None:
            updates = self.wait + self.warmup + self.active
            print(
                f"Profiler: nothing was written. The fit ended after {trainer.step} updates, and wait + warmup + active is {updates}"
            )

    def on_teardown(self) -> None:
        self._stop()

    def _stop(self) -> None:
        self._running.close()
        self._profile = None


def _write(profile: torch.profiler.profile, folder: Path, rank: int) -> None:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(folder / f"trace-rank{rank}.json"))
    averages = profile.key_averages()
    order = "self_device_time_total" if torch.accelerator.is_available() else "self_cpu_time_total"
    operators = averages.table(sort_by=order, row_limit=OPERATORS)
    text = f"{_shares(averages)}\n\n{operators}"
    (folder / f"operators-rank{rank}.txt").write_text(text + "\n")
    if rank == 0:
        print(f"Profiler: {folder}\n{text}")


def _shares(averages: Any) -> str:
    """One line with the shares of the host's time in the profiled updates."""
    events = {event.key: event for event in averages}
    updates = events["ProfilerStep*"]
    parts = {name: events[name].cpu_time_total for name in ("training_step", "optimizer_step") if name in events} | {
        "waiting for data": sum(
            e.cpu_time_total for key, e in events.items() if key.startswith("enumerate(DataLoader)")
        ),
        "loop and hooks": updates.self_cpu_time_total,
    }
    parts["backward and other operators"] = max(0.0, updates.cpu_time_total - sum(parts.values()))
    shares = ", ".join(f"{name} {value / updates.cpu_time_total:.1%}" for name, value in parts.items())
    return f"{updates.count} updates of {updates.cpu_time_total / updates.count / 1000:.3f} ms on the host: {shares}"
