"""The view of a run in a terminal, for `fabricate watch`: progress, metrics with their curves, events.

Must not know: when it is shown. Imports no torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fabricate.cli.recorded.files import RunFiles
from fabricate.cli.recorded.page import duration, moment, state_of

__all__ = ["sparkline", "view"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
"""The width of a sparkline in characters."""
_BAR = 60
"""The width of the bar in characters."""
_MOST_EVENTS = 5
_COLOURS = {"good": "green", "bad": "red", "open": "yellow"}


def view(run: RunFiles) -> RenderableType:
    """The view of a run, for rich."""
    state, mood = state_of(run)
    parts: list[RenderableType] = [
        Text(_plain(str(run.run_dir)), style="bold"),
        Text(_plain(state), style=_COLOURS[mood]),
    ]
    total, step = run.plan.get("total_steps", {}).get("value"), run.last_step
    if isinstance(total, int) and total > 0:
        done = _BAR * min(step, total) // total
        parts.append(Text("█" * done + "░" * (_BAR - done), style="cyan"))
    parts.append(Text(", ".join(_progress(run, step, total))))
    metrics = _metrics(run)
    if metrics.row_count:
        parts.append(metrics)
    for event in run.events[-_MOST_EVENTS:]:
        reason = event.get("reason") or event.get("path") or event.get("text") or ""
        text = f"{moment(event['time'])}  step {event.get('step', '')}  {event['event']}  {reason}"
        parts.append(Text(_plain(text), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts, Text(""))


def _progress(run: RunFiles, step: int, total: Any) -> list[str]:
    """The progress and the speed of the run, as texts."""
    words = [f"step {step:,}" + (f" of {total:,}" if isinstance(total, int) else "")]
    clock: dict[str, Any] = next(
        (line["clock"] for line in reversed(run.train()) if "seconds_per_step" in line["clock"]), {}
    )
    if clock:
        words.append(f"{clock['steps_per_second']:.3g} steps/s")
        words.append(f"{clock['samples_per_second']:.4g} samples/s")
        words.append(f"{100 * clock['data_share']:.0f} % waiting for data")
        if isinstance(total, int) and total > step:
            words.append(f"{duration((total - step) * clock['seconds_per_step'])} to go")
    if run.lines:
        words.append(f"logged {duration(max(0.0, time.time() - run.lines[-1]['clock']['time']))} ago")
    return words


def _metrics(run: RunFiles) -> Table:
    """The table of metrics: last, lowest and highest value, and the curve."""
    values: dict[str, list[float]] = {}
    for line in run.lines:
        for name, value in line["metrics"].items():
            values.setdefault(name, []).append(float(value))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("metric", "last", "lowest", "highest", ""):
        table.add_column(column, no_wrap=True, justify="left" if column in ("metric", "") else "right")
    for name, of in values.items():
        finite = [value for value in of if math.isfinite(value)] or [math.nan]
        table.add_row(Text(_plain(name)), f"{of[-1]:.5g}", f"{min(finite):.5g}", f"{max(finite):.5g}", sparkline(of))
    return table


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """A curve as one line of text: the mean of each of `width` intervals; a blank for an interval without finite values."""
    intervals = min(width, len(values))
    means = []
    for number in range(intervals):
        part = values[number * len(values) // intervals : (number + 1) * len(values) // intervals]
        finite = [value for value in part if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    finite_means = [mean for mean in means if math.isfinite(mean)]
    if not finite_means:
        return " " * intervals
    low, span = min(finite_means), (max(finite_means) - min(finite_means)) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((mean - low) / span * top)] if math.isfinite(mean) else " " for mean in means)


def _plain(text: str) -> str:
    """`text` with control characters, which a terminal would execute, replaced by "?"."""
    return "".join(character if character.isprintable() else "?" for character in text)
