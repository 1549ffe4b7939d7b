"""One live run: what was built for a fit or an evaluation, and the objects that hold what changes while it is running.

`Run` itself does not change. What changes has an owner each: `Progress` (counters), `Metrics` (values not yet reduced), `Journal`
(files, the latest values, clocks), `Requests` (what was requested), `Checkpoints` (what is saved), `Optimization` (filled before the
first update), `Now` (the current batch).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from fabricate.checkpoint.state.commit import Background
from fabricate.configuration.arguments import Settings
from fabricate.data.source import Source
from fabricate.distributed.engine import Engine
from fabricate.metrics.counters import Progress
from fabricate.metrics.reduction import Metrics
from fabricate.module import RunningTrainer, TrainModule
from fabricate.optim.configured import Configured
from fabricate.optim.schedules import Schedule
from fabricate.optim.together import Stepping
from fabricate.registry.hook_calls import Calls
from fabricate.training.interruptions.preemption import Watch
from fabricate.training.interruptions.requests import Requests
from fabricate.training.state.journal import Journal


class Owner(RunningTrainer, Protocol):
    """The `Trainer` to which a run belongs."""

    settings: Settings
    _run: Run | None


@dataclass(slots=True)
class Optimization:
    """What a fit trains, and with what. Filled while the fit is prepared; empty in an evaluation."""

    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedules: dict[str, Schedule] = field(default_factory=dict)
    named: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By what `training_step` may name, the optimizers that step then."""
    turns: tuple[str, ...] = ()
    """The names that take turns on each window, in this order; empty where `training_step` takes no `optimizer`."""
    default: str | None = None
    """What an update steps where `training_step` names nothing; None where it has to."""
    updates: dict[str, Stepping] = field(default_factory=dict)
    """What an update applies, by what `training_step` names; several names are joined by commas."""
    weight_per_row: dict[str, float] = field(default_factory=dict)
    """By the same names, the power of two near what losses weigh per row, from the first window on; see `updates.losses`."""
    configured: list[Configured] = field(default_factory=list)
    """What `configure_optimizers` set, option by option."""
    changing: dict[torch.nn.Parameter, bool] = field(default_factory=dict)
    """Parameters that are to be trained, or no longer, from the next update on."""
    frozen: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    """Parameters that were not trainable when the fit began."""
    trained: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    """Those that were."""
    paused: set[torch.nn.Parameter] = field(default_factory=set)
    """Of the latter, those that `trainer.freeze` froze."""
    modes: list[str] = field(default_factory=list)
    """The submodules that were in eval mode when the fit began."""
    mode: str = ""
    """Of optimizers with `train()` and `eval()`: which of the two was called last."""
    held: dict[str, Any] = field(default_factory=dict)
    """What the module and the data hold outside of their state, to see at the first save whether it changes."""
    equal_at: int = -1
    """The step at which ranks that train the same weights were last seen to hold the same."""
    logs: int = 0
    """Log boundaries so far, at some of which that is looked at."""

    def number_of_groups(self) -> int:
        """Of parameters, in all optimizers."""
        number = 0
        for optimizer in self.optimizers.values():
            number += len(optimizer.param_groups)
        return number


@dataclass(slots=True)
class Checkpoints:
    """What this run has saved, is saving, and began with."""

    newest: Path | None = None
    """The newest that is durable."""
    saved_step: int = -1
    """The step that was saved last, or is being saved."""
    written: Path | None = None
    """The checkpoint that the loop itself wrote last, or began to write: not a listener of write_checkpoint."""
    background: Background | None = None
    """What writes beside the training, with save="async"."""
    last_save: bool = False
    """Whether the save in progress is the fit's last, which is never left to the background."""
    failed_saves: int = 0
    """How many the file system refused since the last that worked."""
    frozen_digests: dict[str, str] = field(default_factory=dict)
    """The digests of the parameters that checkpoints leave out, by name."""
    frozen_sums: dict[str, list[int]] = field(default_factory=dict)
    """Of this rank's part of each of them, the sum of its bits when the fit began."""
    listener_states: dict[str, dict[str, str]] = field(default_factory=dict)
    """Among several ranks: the digests of what each listener of `on_save` stored last, by its names."""
    restored: bool = False
    """Whether the run continues from a checkpoint."""


@dataclass(slots=True)
class Now:
    """What this rank is doing at the moment."""

    stage: str = "train"
    """What runs: "train", "validate", "test" or "predict"."""
    epoch: int | None = None
    """The pass in progress, also at its end, when `Progress.epoch` counts it already; None before the first."""
    batch: Any = None
    """The current batch, to describe it when a step fails."""
    batch_idx: int = 0
    """The number of the batch of the evaluation in progress."""
    data_set: str = ""
    """The name of the data set that it is of."""
    batch_indices: Sequence[int] = ()
    """The places in the data set of the rows of that batch."""
    evaluated: Evaluated | None = None
    """The metrics of the evaluation in progress."""
    complete: bool = False
    """While listeners change the weights that the fit ends with."""
    at_boundary: bool = True
    """Between updates: a checkpoint taken now resumes exactly. False while an update and what follows it are in progress."""
    in_update: bool = False
    """From the first micro-batch of an update until it is counted."""
    whole: tuple[int, Any] = (0, None)
    """`Progress.micro_step` and the state of the data after the last whole update; an update that fails leaves others behind."""
    owed: list[str] = field(default_factory=list)
    """What is left to be done of the boundary in progress; a run that fails in it and saves does it when it is resumed."""
    failure: BaseException | None = None
    """Why the run ends, while listeners are informed of it."""


class Evaluated(Protocol):
    """The metrics of an evaluation that hooks may still add to."""

    def join(self) -> None:
        """Add what hooks logged. All ranks."""


class Update(NamedTuple):
    """The result of an update."""

    applied: bool
    norm: torch.Tensor | None
    """The global norm of the gradients before clipping; None where nothing uses it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A running fit or evaluation."""

    trainer: Owner
    module: TrainModule
    engine: Engine
    calls: Calls
    settings: Settings
    source: Source | None
    validation: dict[str, Source]
    max_grad_norm: float | None
    total_steps: int | None
    validates: bool
    """Whether the fit may come to a validation, other than one that a hook requests."""
    run_dir: Path | None
    run_id: str
    closing: contextlib.ExitStack
    """What ends with the run, however it ends."""
    progress: Progress
    metrics: Metrics
    journal: Journal
    reached: Callable[[int, int, int], None]
    """Shows other processes the update, the micro-batch and the batch of an evaluation (else -1) at which this rank is."""
    optim: Optimization = field(default_factory=Optimization)
    requests: Requests
    watch: Watch | None
    """What looks at the time budget and the stop file, on the rank that does it for all."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    now: Now = field(default_factory=Now)
    notes: list[str] = field(default_factory=list)
    """Lines for the plan."""

    def is_long_enough(self) -> bool:
        """Whether `min_steps` and `min_epochs` are over, so that a requested stop ends the fit."""
        least_steps, least_epochs = self.settings.min_steps or 0, self.settings.min_epochs or 0
        return self.progress.step >= least_steps and self.progress.epoch >= least_epochs
