"""What a user sees on rank 0 while a fit runs: a live bar in a terminal, plain lines elsewhere.

The bar reads the trainer's counters from its own refresh thread: nothing happens per step.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from fabricate.hooks import Callback

if TYPE_CHECKING:
    from fabricate.trainer import Trainer

LINE_SECONDS = 5.0
"""Plain lines come no faster than this (the first and the last always do)."""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ProgressBar(Callback):
    """Step, loss, steps and samples per second, share of time spent waiting for data, time left; validation results as lines."""

    def __init__(self) -> None:
        self._live: Any = None
        self._shown, self._last = 0.0, -1
        self._metrics: dict[str, float] = {}
        self._main = False
        self._tokens = 0.0

    def on_fit_start(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._main = trainer.is_main
        self._begin: tuple[float, int, int] | None = None
        try:
            self._total: int | None = trainer.total_steps
        except Exception:
            self._total = None
        if self._main and sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(get_renderable=self._text, refresh_per_second=4, transient=False)
            self._live.start()

    def _text(self) -> Any:
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table

        row = Table.grid(padding=(0, 1))
        row.add_row(
            f"epoch {self._trainer.epoch}", Bar(total=self._total, completed=self._trainer.step, width=30), self._line()
        )
        return row

    def _line(self, at: int | None = None) -> str:
        """`at`: the update that the metrics are from, if that is not the last one."""
        progress = self._trainer.progress
        now = time.monotonic()
        if self._begin is None:
            self._begin, self._tokens = (now, progress.step, progress.samples), progress.tokens
        began, step, samples = self._begin
        rate = (progress.step - step) / max(now - began, 1e-9)
        parts = [f"step {progress.step if at is None else at}" + (f"/{self._total}" if self._total else "")]
        parts += [f"{name} {value:.4g}" for name, value in self._metrics.items()]
        if rate:
            parts += [f"{rate:.3g} steps/s", f"{(progress.samples - samples) / max(now - began, 1e-9):.4g} samples/s"]
            if progress.tokens and progress.tokens != progress.samples:
                parts.append(f"{(progress.tokens - self._tokens) / max(now - began, 1e-9):.4g} tokens/s")
            waiting = self._trainer.rates.get("data_share")
            if waiting is not None:
                parts.append(f"{waiting:.0%} waiting for data")
            if self._total:
                parts.append(f"{_duration((self._total - progress.step) / rate)} left")
        return "  ".join(parts)

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        elif self._main:
            print(text, flush=True)

    def on_log(self, metrics: dict[str, float], step: int) -> None:
        self._metrics = {n: v for n, v in metrics.items() if n == "loss"} or dict(list(metrics.items())[:2])
        now = time.monotonic()
        if self._live is None and (not self._shown or now - self._shown >= LINE_SECONDS):
            self._shown, self._last = now, step
            self._print(self._line(step))

    def on_eval_end(self, trainer: Trainer, stage: str, metrics: dict[str, float]) -> None:
        if stage == "validate" and metrics:
            self._print(f"step {trainer.step}  " + "  ".join(f"{n} {v:.5g}" for n, v in metrics.items()))

    def on_fit_end(self) -> None:
        if self._live is None and self._last != self._trainer.step:
            self._print(self._line())

    def on_teardown(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
