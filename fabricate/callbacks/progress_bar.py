"""The progress display on rank 0: a live bar in a terminal or a notebook, plain lines elsewhere.

A refresh thread of the bar reads the trainer's counters, so that steps cost nothing.
"""

from __future__ import annotations

import html
import math
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from fabricate.hooks import Callback

if TYPE_CHECKING:
    from fabricate.trainer import Trainer

_CELL_WIDTH = 110
LINE_SECONDS = 5.0
"""The minimum number of seconds between two plain lines (the first and the last are always printed)."""


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def debugging() -> bool:
    """Whether the main thread is in pdb or a debugger built on it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") in ("bdb", "pdb"):
            return True
        frame = frame.f_back
    return False


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook (and not a process that the kernel started)."""
    if "IPython" not in sys.modules or multiprocessing.parent_process() is not None:
        return False
    from rich.console import Console

    return Console().is_jupyter


class _Cell:
    """The bar as the output of a notebook cell. Each refresh replaces the previous output."""

    def __init__(self, bar: ProgressBar) -> None:
        from IPython.display import display

        self._bar = bar
        self._shown = display(self._content(), raw=True, display_id=True)

    def _content(self) -> dict[str, str]:
        line, (done, total) = self._bar.line(room=_CELL_WIDTH), self._bar.position()
        bar = f'<progress value="{done}" max="{total}"></progress> ' if total else ""
        return {"text/plain": line, "text/html": f"{bar}<code>{html.escape(line)}</code>"}

    def refresh(self) -> None:
        self._shown.update(self._content(), raw=True)

    def stop(self) -> None:
        self.refresh()


class ProgressBar(Callback):
    """Shows step, loss, time left, steps per second, the share of time spent waiting for data, and other metrics if there is room; prints
    validation results as lines. `shown`: the metrics to show instead."""

    def __init__(self, shown: Collection[str] = ()) -> None:
        self._chosen = tuple(shown)
        self._live: Any = None
        self._console: Any = None
        self._hidden = False
        self._done = threading.Event()
        self._shown, self._last = 0.0, -1
        self._metrics: dict[str, float] = {}
        self._main = False
        self._looked = False
        """Whether the chosen metrics were compared with those that were recorded."""
        self._tokens = 0.0

    def on_fit_start(self, trainer: Trainer) -> None:
        self._trainer, self._looked = trainer, False
        self._main = trainer.is_main
        self._begin: tuple[float, int, int] | None = None
        try:
            self._total: int | None = trainer.total_steps
        except Exception:
            self._total = None
        drawn = random.getstate()  # rich draws from this generator when it is imported
        is_live = self._main and (sys.stdout.isatty() or in_notebook())
        if is_live:
            self._live = self._in_terminal() if sys.stdout.isatty() else _Cell(self)
        random.setstate(drawn)
        if is_live:
            self._done.clear()
            self._drawing = threading.Thread(target=self._refresh, name="fabricate progress bar", daemon=True)
            self._drawing.start()

    def _in_terminal(self) -> Any:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        live = Live(console=self._console, get_renderable=self._text, auto_refresh=False, transient=False)
        live.start()
        return live

    def _refresh(self) -> None:
        """Redraw a few times per second. While a debugger waits for input, the bar is hidden, because the user types there."""
        live = self._live
        while not self._done.wait(0.25):
            before, self._hidden = self._hidden, debugging()
            if not self._hidden or not before:
                live.refresh()

    def _text(self) -> Any:
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table

        if self._hidden:
            return ""

        width = self._console.width
        epoch, bar = f"epoch {self._trainer.epoch}", 30 if width > 100 else 10
        row = Table.grid(padding=(0, 1))
        for _ in range(3):
            row.add_column(no_wrap=True)
        line = self.line(room=width - len(epoch) - bar - 3)
        row.add_row(epoch, Bar(total=self._total, completed=self._trainer.step, width=bar), line)
        return row

    def position(self) -> tuple[int, int | None]:
        """The number of updates so far, and the total number (None if it is not known)."""
        return self._trainer.step, self._total

    def line(self, *, at: int | None = None, room: int | None = None) -> str:
        """The line with the current values, the most useful first. `at`: the update of the metrics, if it is not the last. `room`: the
        maximum number of characters; None: no limit, but only the loss or the chosen metrics."""
        progress = self._trainer.progress
        # Chosen metrics may be those of a validation.
        metrics = self._trainer.metrics if self._chosen else self._metrics
        first = [name for name in self._chosen or ("loss",) if name in metrics] or list(self._metrics)[:2]
        parts = [f"step {progress.step if at is None else at}" + (f"/{self._total}" if self._total else "")]
        parts += [f"{name} {metrics.get(name, math.nan):.4g}" for name in first]
        parts += self._rates()
        if room is not None and not self._chosen:
            parts += [f"{name} {value:.4g}" for name, value in self._metrics.items() if name not in first]
        text = parts[0]
        for part in parts[1:]:
            if room is None or len(text) + 2 + len(part) <= room:
                text += f"  {part}"
        return text

    def _rates(self) -> list[str]:
        progress, now = self._trainer.progress, time.monotonic()
        if self._begin is None:
            self._begin, self._tokens = (now, progress.step, progress.samples), progress.tokens
        began, step, samples = self._begin
        seconds = max(now - began, 1e-9)
        rate = (progress.step - step) / seconds
        if not rate:
            return []
        parts = [f"{_duration((self._total - progress.step) / rate)} left"] if self._total else []
        parts.append(f"{rate:.3g} steps/s")
        waiting = self._trainer.rates.get("data_share")
        if waiting is not None:
            parts.append(f"{waiting:.0%} waiting for data")
        parts.append(f"{(progress.samples - samples) / seconds:.4g} samples/s")
        if progress.tokens and progress.tokens != progress.samples:
            parts.append(f"{(progress.tokens - self._tokens) / seconds:.4g} tokens/s")
        return parts

    def _print(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False)
        elif self._main:
            print(text, flush=True)

    def on_log(self, metrics: dict[str, float], step: int) -> None:
        self._metrics = metrics
        now = time.monotonic()
        if self._live is None and (not self._shown or now - self._shown >= LINE_SECONDS):
            self._shown, self._last = now, step
            self._print(self.line(at=step))

    def on_eval_end(self, trainer: Trainer, stage: str, metrics: dict[str, float]) -> None:
        if stage == "validate" and metrics:
            self._print(f"step {trainer.step}  " + "  ".join(f"{n} {v:.5g}" for n, v in metrics.items()))

    def on_epoch_end(self, trainer: Trainer) -> None:
        self._note_missing(trainer)

    def _note_missing(self, trainer: Trainer) -> None:
        """Print once which chosen metrics were not recorded, at the end of the first epoch or of a shorter fit."""
        recorded = {name.removeprefix("epoch_") for name in trainer.metrics} | trainer.validation_metrics
        missing = [name for name in self._chosen if name not in recorded] if not self._looked else []
        self._looked = True
        if missing and self._main:
            there = ", ".join(sorted(recorded)) or "none"
            print(
                f"note: progress={missing}: no such metrics were recorded so far. Recorded metrics: {there}",
                file=sys.stderr,
                flush=True,
            )

    def on_fit_end(self, trainer: Trainer) -> None:
        self._note_missing(trainer)
        if self._live is None and self._last != self._trainer.step:
            self._print(self.line())

    def on_teardown(self) -> None:
        self._done.set()
        if self._live is not None:
            self._drawing.join()  # otherwise the thread may draw again
            self._live.stop()
            self._live = self._console = None
