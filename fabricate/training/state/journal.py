"""The output of a running run: metrics.jsonl, events.jsonl, trackers, notes. docs/run-directory.md describes the files.

Owns these files, the last known value of every metric, and the rates of the last log boundary. Must not know: when something is due.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from fabricate.distributed.engine import Engine
from fabricate.errors import FabricateError
from fabricate.metrics.counters import Progress, Tokens
from fabricate.metrics.device import peak_memory, stopwatch
from fabricate.metrics.reading import exact
from fabricate.metrics.timing import Clock


class Begun(NamedTuple):
    """A line of metrics whose values are still being copied from the device."""

    step: int
    samples: int
    epoch: int
    names: tuple[str, ...]
    """The names of further values of the line, which are copied together with the metrics."""
    rest: bool
    """Whether the line is omitted if it has no metrics."""


class Journal:
    """Writes on rank 0, into the run directory if there is one. Every rank makes the same calls."""

    def __init__(self, engine: Engine, progress: Progress, run_dir: Path | None, *, trackers: bool) -> None:
        self._engine = engine
        self._progress = progress
        self._run_dir = run_dir if engine.rank == 0 else None
        self._trackers = trackers and engine.rank == 0
        # opened for the first line and kept open: opening costs more than writing
        self._metrics_file: TextIO | None = None
        self._noted: set[str] = set()
        self.clock = Clock(progress)
        self.tokens = Tokens(progress, exact(engine.device))
        self.stopwatch = stopwatch(engine.device)
        self._peak: Callable[[], int] | None = None
        self.planned_bytes: int | None = None
        """The bytes that a rank holds on its device according to the plan, without activations."""
        self.begun: Begun | None = None
        """A line that is not written yet."""
        self.last_norm: torch.Tensor | float | None = None
        """The norm of the gradients of the last update, if it had no line; for the line at the end of the fit."""
        self.latest: dict[str, float] = {}
        """The last known value of every metric."""
        self.validated: frozenset[str] = frozenset()
        """The names of the metrics that validation gives; empty until they are known."""
        self.validated_at = -1
        """The step of the last validation."""
        self.rates: dict[str, float] = {}
        """The rates of the last log boundary; see `Stopwatch.lap` and `_memory`."""
        self.meters: list[Callable[[dict[str, float]], Mapping[str, float]]] = []
        """Functions that compute further rates from those that are known."""

    def current(self) -> dict[str, float]:
        """The last known values, without those of a validation that ran with older weights."""
        if self.validated_at == self._progress.step:
            return self.latest
        measured = {name for name in self.latest if name in self.validated or name.startswith(("val_", "val/"))}
        return {name: value for name, value in self.latest.items() if name not in measured}

    def event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl."""
        if self._run_dir is not None:
            line = {"event": kind, "step": self._progress.step, **fields, "time": time.time()}
            with (self._run_dir / "events.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def note(self, text: str, topic: str = "") -> None:
        """Report, once, something that only a running fit can show: on stderr and in events.jsonl. Of notes with the same `topic`, only the
        first is reported."""
        if (topic or text) not in self._noted and self._engine.rank == 0:
            self._noted.add(topic or text)
            print(f"note: {text}", file=sys.stderr, flush=True)
            self.event("note", text=text)

    def start(self) -> None:
        """Start the clocks, and the measurement of the device's peak memory, when a fit begins or continues."""
        self._peak = peak_memory(self._engine.device)
        self.clock.start()
        self.stopwatch.start(self._progress.step, self._progress.samples)

    def write_metrics(self, stage: str, metrics: dict[str, float], epoch: int, at: Begun | None = None) -> None:
        """Append a line to metrics.jsonl, and log the same values to the trackers. Values that depend on time are under "clock", because a
        resumed run cannot reproduce them. `at`: the update that the line describes, if it is not the last one."""
        self.latest |= metrics
        self.clock.tick()
        step, samples = (self._progress.step, self._progress.samples) if at is None else (at.step, at.samples)
        rates: dict[str, float] = {}
        if stage == "train":
            communicated = self._engine.strategy.communication_seconds(self._engine.model)
            rates = {**self.stopwatch.lap(step, samples, communicated), **self._memory()}
            for meter in self.meters:
                rates |= meter(dict(rates))
            self.rates = rates
        if self._run_dir is not None:
            clock = {"time": time.time(), "seconds": self._progress.seconds, **rates}
            if stage == "validate":
                clock["evaluation_seconds"] = self.stopwatch.apart_so_far()
            finite = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
            self._append({"step": step, "epoch": epoch, "stage": stage, "metrics": finite, "clock": clock})
        if self._trackers:
            clock = {f"clock/{name}": value for name, value in rates.items()}
            self._engine.accelerator.log({**metrics, **clock}, step=step)

    def _memory(self) -> dict[str, float]:
        """The peak memory of the device and the plan's estimate; empty if the device does not count its memory."""
        if self._peak is None:
            return {}
        planned = {} if self.planned_bytes is None else {"planned_memory_bytes": self.planned_bytes}
        return {"peak_memory_bytes": self._peak(), **planned}

    def _append(self, line: dict[str, Any]) -> None:
        assert self._run_dir is not None
        path = self._run_dir / "metrics.jsonl"
        try:
            if self._metrics_file is None:
                self._metrics_file = path.open("a", buffering=1)  # line-buffered, so that readers see each line at once
            self._metrics_file.write(json.dumps(line) + "\n")
        except OSError as exc:  # closed, because further lines after a partial one could not be read
            self.close()
            raise FabricateError(
                f"cannot write {path}: {exc.strerror}. Make room or let this user write there, and start the same command again: it "
                "resumes from the newest checkpoint"
            ) from exc

    def close(self) -> None:
        """Close the files at the end of the run."""
        if self._metrics_file is not None:
            with contextlib.suppress(OSError):  # an error in writing a line was raised when the line was written
                self._metrics_file.close()
            self._metrics_file = None
