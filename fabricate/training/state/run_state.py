"""A run: everything that was built for a fit or an evaluation, and the objects that own its changing state.

The fields of `Run` do not change. Each kind of changing state has one owner: `Progress` (counters), `Metrics` (values not yet reduced),
`Journal` (files, the latest values, clocks), `Requests` (what was requested), `Checkpoints` (what is saved), `Optimization` (filled before
the first update), `Now` (the current batch).
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
    """The optimizers of a fit, and what they train. Filled during preparation; empty in an evaluation."""

    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedules: dict[str, Schedule] = field(default_factory=dict)
    named: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of the optimizers that step, by the name that `training_step` may return."""
    turns: tuple[str, ...] = ()
    """The names of the optimizers that take turns on each window, in this order; empty if `training_step` has no argument `optimizer`."""
    default: str | None = None
    """The name for an update if `training_step` returns none; None if it has to return one."""
    updates: dict[str, Stepping] = field(default_factory=dict)
    """The optimizers and schedules of an update, by the names that `training_step` returns, joined by commas."""
    weight_per_row: dict[str, float] = field(default_factory=dict)
    """By the same names, the power of two near the weight of one row, known from the first window on; see `updates.losses`."""
    weighed_by: dict[str, str] = field(default_factory=dict)
    """By the same names, what gives a loss its weight: "rows", "given" or "counted"."""
    total_steps: int | None = None
    """The updates of the whole fit; None if not known."""
    surplus_updates: int = 0
    """See `Data.surplus_updates`."""
    plugin_options: dict[str, str] = field(default_factory=dict)
    """The options of the plugins when the fit began."""
    gives_weights: bool = False
    """Whether training_step returned a weight with its loss."""
    configured: list[Configured] = field(default_factory=list)
    """The options that `configure_optimizers` set."""
    changing: dict[torch.nn.Parameter, bool] = field(default_factory=dict)
    """Parameters to unfreeze (True) or freeze (False) from the next update on."""
    frozen: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    """Parameters that were not trainable when the fit began."""
    trained: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    """Parameters that were trainable when the fit began."""
    paused: set[torch.nn.Parameter] = field(default_factory=set)
    """Parameters in `trained` that `trainer.freeze` has frozen."""
    modes: list[str] = field(default_factory=list)
    """The submodules that were in eval mode when the fit began."""
    mode: str = ""
    """For optimizers with `train()` and `eval()`: the one of the two that was called last."""
    held: dict[str, Any] = field(default_factory=dict)
    """Values that the module and the data hold outside their state, kept to notice at the first save whether they change."""
    built: set[str] = field(default_factory=set)
    """The names of the parameters, buffers and parameter groups when the fit began, and of those made later that a note has named."""
    equal_at: int = -1
    """The last step at which ranks with copies of the same weights were found to hold equal values."""
    logs: int = 0
    """The number of log boundaries so far; at some of them the ranks compare their weights."""

    def number_of_groups(self) -> int:
        """The number of parameter groups in all optimizers."""
        number = 0
        for optimizer in self.optimizers.values():
            number += len(optimizer.param_groups)
        return number


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of this run: those saved, the one in progress, and the one it resumed from."""

    newest: Path | None = None
    """The newest checkpoint that is durable."""
    saved_step: int = -1
    """The step of the last save, or of the save in progress."""
    written: Path | None = None
    """The last checkpoint that the loop itself wrote or began to write, and no listener of write_checkpoint."""
    background: Background | None = None
    """Writes checkpoints in the background, with save="async"."""
    last_save: bool = False
    """Whether the save in progress is the last of the fit, which is never done in the background."""
    failed_saves: int = 0
    """The number of saves that the file system has refused since the last successful one."""
    frozen_digests: dict[str, str] = field(default_factory=dict)
    """The digests of the parameters that checkpoints leave out, by name."""
    frozen_sums: dict[str, list[int]] = field(default_factory=dict)
    """For each of these parameters, the sum of the bits of this rank's part when the fit began."""
    listener_states: dict[str, dict[str, str]] = field(default_factory=dict)
    """On several ranks: the digests of the values that each listener of `on_save` stored last, by listener and name."""
    constants: dict[str, str] = field(default_factory=dict)
    """Digests of the buffers and frozen weights as the script set them; see `checkpoint.state.constants`."""
    restored: bool = False
    """Whether the run continues from a checkpoint."""
    trained: list[int] | None = None
    """For each weight and buffer, the sum of the bits of this rank's part after the last update, recorded before `load_best` or a listener
    of `on_complete` may put others into the module."""


@dataclass(slots=True)
class Now:
    """What this rank is doing now, for error messages and checks."""

    stage: str = "train"
    """The running stage: "train", "validate", "test" or "predict"."""
    epoch: int | None = None
    """The epoch in progress, also at its end, when `Progress.epoch` has already advanced; None before the first."""
    batch: Any = None
    """The current batch, to describe it when a step fails."""
    batch_idx: int = 0
    """The index of the current batch in the evaluation."""
    data_set: str = ""
    """The name of the data set of that batch."""
    batch_indices: Sequence[int] = ()
    """The indices, in the data set, of the rows of that batch."""
    evaluated: Evaluated | None = None
    """The metrics of the evaluation in progress."""
    complete: bool = False
    """Whether `on_complete` is running, in which listeners may change the final weights."""
    at_boundary: bool = True
    """Whether the run is between updates, so that a checkpoint saved now can be resumed exactly. False during an update and the boundary
    after it."""
    in_update: bool = False
    """True from the first micro-batch of an update until the update is counted."""
    whole: tuple[int, Any] = (0, None)
    """`Progress.micro_step` and the state of the data after the last complete update, because a failed update changes both."""
    owed: list[str] = field(default_factory=list)
    """The parts of the current boundary that are not done yet. If the run fails there and saves, they are done on resume."""
    failure: BaseException | None = None
    """The exception that ended the run, while `on_exception` is called."""


class Evaluated(Protocol):
    """The metrics of an evaluation that hooks may still add to."""

    def join(self) -> None:
        """Add the values that hooks logged. All ranks."""


class Update(NamedTuple):
    """The result of an update."""

    applied: bool
    norm: torch.Tensor | None
    """The global norm of the gradients before clipping, a scalar tensor; None if nothing uses it."""


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
    validates: bool
    """Whether the settings lead to a validation; a hook may request one in any case."""
    run_dir: Path | None
    run_id: str
    closing: contextlib.ExitStack
    """Callbacks that run when the run ends, also after an error."""
    progress: Progress
    metrics: Metrics
    journal: Journal
    reached: Callable[[int, int, int], None]
    """Publishes the position of this rank for other processes: update, micro-batch, and batch of an evaluation (-1 outside one)."""
    optim: Optimization = field(default_factory=Optimization)
    requests: Requests
    watch: Watch | None
    """Looks at the time limit and for the stop file, on rank 0; None on other ranks."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    now: Now = field(default_factory=Now)
    notes: list[str] = field(default_factory=list)
    """Lines for the plan."""
    halved: set[str] = field(default_factory=set)
    """The metrics that the check before training has shown to be means over rows, by two halves of a batch with different values."""

    def data_epoch(self) -> int:
        """The epoch whose batches are read: always the first one under `overfit_batches`."""
        return self.progress.epoch if self.settings.overfit_batches is None else 0

    def is_long_enough(self) -> bool:
        """Whether `min_steps` and `min_epochs` are over, so that a requested stop ends the fit."""
        least_steps, least_epochs = self.settings.min_steps or 0, self.settings.min_epochs or 0
        return self.progress.step >= least_steps and self.progress.epoch >= least_epochs
