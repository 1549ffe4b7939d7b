"""One live run: everything the loop, saving and evaluation share while a Trainer is at work. Data, and writing its logs.

Must not know: in which order things happen (fabricate.training.loop) or how a checkpoint is made (fabricate.training.saving).
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fabricate.metrics.timing import Stopwatch

if TYPE_CHECKING:
    import torch

    from fabricate.checkpoint.state.commit import Background
    from fabricate.configuration.arguments import Settings
    from fabricate.data.source import Source
    from fabricate.distributed.engine import Engine
    from fabricate.metrics.counters import Progress
    from fabricate.metrics.reduction import Metrics
    from fabricate.module import TrainModule
    from fabricate.optim.schedules import Schedule
    from fabricate.registry.hook_calls import Calls
    from fabricate.trainer import Trainer
    from fabricate.training.first_update import Activations
    from fabricate.training.preemption import Watch


@dataclass(slots=True)
class Requests:
    """What hooks, signals and clocks asked for since the last update boundary, on this rank."""

    pending: bool = False
    """Whether anything was asked for since a boundary last looked."""
    stop: str = ""
    save: bool = False
    paths: list[str] = field(default_factory=list)
    evaluate: bool = False
    signal: str = ""
    """What asked for a save and the end: a signal's name, "max_time" or "stop file"."""

    def ask(
        self, *, stop: str = "", save: bool = False, path: str = "", evaluate: bool = False, signal: str = ""
    ) -> None:
        """Ask for something at the next update boundary. Of several signals the first counts."""
        # Only what is asked for is written: a signal's handler or a thread may be asking for something else at this moment.
        if stop:
            self.stop = stop
        if save:
            self.save = True
        if path:
            self.paths.append(path)
        if evaluate:
            self.evaluate = True
        if signal and not self.signal:
            self.signal = signal
        self.pending = True  # last: a boundary that looks meanwhile finds all of it or looks again


@dataclass(kw_only=True)
class Run:
    """A running fit or evaluation."""

    trainer: Trainer
    module: TrainModule
    engine: Engine
    calls: Calls
    progress: Progress
    metrics: Metrics
    settings: Settings
    seed: int
    max_grad_norm: float | None = None
    source: Source | None = None
    validation: dict[str, Source] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: dict[str, Schedule] = field(default_factory=dict)
    parameters: dict[str, list[torch.nn.Parameter]] = field(default_factory=dict)
    """The trainable parameters of each optimizer, listed once: nothing walks the module per step."""
    frozen: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    """Parameters that were not trainable when the fit began."""
    frozen_digests: dict[str, str] = field(default_factory=dict)
    """Of those that checkpoints leave out."""
    unreached: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    """Trainable parameters that no gradient has reached in this fit, as long as nothing was said about them."""
    total_steps: int | None = None
    run_dir: Path | None = None
    run_id: str = ""
    requests: Requests = field(default_factory=Requests)
    watch: Watch | None = None
    latest: dict[str, float] = field(default_factory=dict)
    """The last known value of every metric."""
    checkpoint: Path | None = None
    """The newest that is durable."""
    saved_step: int = -1
    """The step that was saved last, or is being saved."""
    background: Background | None = None
    """What writes beside the training, with save="async"."""
    last_save: bool = False
    """Whether the save under way is the fit's last, which is never left to the background."""
    failed_saves: int = 0
    """How many the file system refused since the last that worked."""
    trackers: bool = False
    metrics_file: TextIO | None = None
    """metrics.jsonl, open from its first line on (rank 0): opening it costs more than writing."""
    clock: float = field(default_factory=time.monotonic)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    rates: dict[str, float] = field(default_factory=dict)
    """Of the last log boundary; see `Stopwatch.lap`."""
    at_boundary: bool = True
    """Between updates: a checkpoint taken now resumes exactly. False while an update and what follows it are under way."""
    batch_idx: int = 0
    batch: Any = None
    """The micro-batch at work, to describe it when a step fails."""
    unread_tokens: Any = 0
    """Weights that are still device tensors, added up until the next log boundary."""
    notes: list[str] = field(default_factory=list)
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What ends with the run, however it ends."""
    restored: bool = False
    activations: Activations | None = None
    """What watches the layers in the first update."""
    _noted: set[str] = field(default_factory=set)

    def event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl (rank 0, with a run directory): docs/run-directory.md lists them."""
        if self.run_dir is not None and self.engine.rank == 0:
            line = {"event": kind, "step": self.progress.step, **fields, "time": time.time()}
            with (self.run_dir / "events.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")

    def note(self, text: str) -> None:
        """Say something that only running shows: on stderr and in events.jsonl, once, by rank 0."""
        if text not in self._noted and self.engine.rank == 0:
            self._noted.add(text)
            print(f"note: {text}", file=sys.stderr, flush=True)
            self.event("note", text=text)

    def write_metrics(self, stage: str, metrics: dict[str, float], epoch: int) -> None:
        """Append to metrics.jsonl and tell the trackers (rank 0). What depends on time goes under "clock", apart, because a
        resumed run cannot repeat it."""
        self.latest |= metrics
        self.tick()
        if stage == "train":
            communicated = self.engine.strategy.communication_seconds(self.engine.model)
            self.rates = self.stopwatch.lap(self.progress.step, self.progress.samples, communicated)
        if self.engine.rank:
            return
        rates = self.rates if stage == "train" else {}
        if self.run_dir is not None:
            clock = {"time": time.time(), "seconds": self.progress.seconds, **rates}
            finite = {n: v if math.isfinite(v) else str(v) for n, v in metrics.items()}
            line = {"step": self.progress.step, "epoch": epoch, "stage": stage, "metrics": finite, "clock": clock}
            if self.metrics_file is None:
                self.metrics_file = (self.run_dir / "metrics.jsonl").open(
                    "a", buffering=1
                )  # each line is there at once
            self.metrics_file.write(json.dumps(line) + "\n")
        if self.trackers:
            self.engine.accelerator.log(
                {**metrics, **{f"clock/{n}": v for n, v in rates.items()}}, step=self.progress.step
            )

    def close(self) -> None:
        """Let go of files and layers; the run is over."""
        if self.activations is not None:
            self.activations.close()
        if self.metrics_file is not None:
            self.metrics_file.close()
            self.metrics_file = None

    def tick(self) -> None:
        """Bring `progress.seconds` up to now, and look whether the time is up."""
        now = time.monotonic()
        if self.watch is not None and now >= self.watch.look_at:
            self.watch.look(now)
        self.progress.seconds += now - self.clock
        self.clock = now

    def start_clock(self) -> None:
        """The fit begins or goes on: time from here counts."""
        self.clock = time.monotonic()
        self.stopwatch.start(self.progress.step, self.progress.samples)
