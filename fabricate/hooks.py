"""The hook specifications: every point at which a module or a plugin can take part, and nothing else.

The loop, as the hooks see it:

    on_fit_start
    on_load                                        resuming only, per listener
    for each epoch:
        on_epoch_start
        for each update (a window of micro-batches):
            for each micro-batch:
                train_step                         wrappable: forward, inside it module.training_step
                on_accumulate                      after its backward
            on_before_step                         gradients complete, normalised, clipped
            optimizer_step                         wrappable: the update itself
            on_step | on_step_skipped
            on_log                                 when due
            on_eval_start, eval_step ..., on_eval_end      when due
            on_epoch_end                       after the last update of the epoch
            write_checkpoint (inside it on_save, per listener), on_saved      when due
    write_checkpoint, on_saved                     the last state, unless it is saved already
    on_preempt                                     when a signal ended the run; else
    on_log                                         what was not logged yet
    on_load_weights                                under load_best, per listener
    on_complete                                    an evaluation after it, if it is requested
    on_export
    on_fit_end
    on_exception                                   when something was raised
    on_teardown                                    always

Every hook runs on every rank, in the same order on each, unless its text says otherwise. Events return nothing (a returned
value is an error). A listener takes any subset of a hook's arguments by name. `trainer` is the `Trainer` that calls, `module`
the `TrainModule` that it runs. This module imports pluggy and nothing of fabricate, so that a specification can be read on its
own; hence `Any` for these two.

Where optimizers take turns, an update is one turn of each: what lies between `train_step` and `optimizer_step` runs for each of them,
and `on_step` after the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from pathlib import Path

    import torch

PROJECT = "fabricate"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function or method as a hook implementation; needed outside our base classes, for `wrapper=True` or ordering, and for the
four hooks that do work (`ACTIONS`): a method that merely has the name of one is refused."""


class Registrations:
    """What an installed distribution offers. Called without a process group or a device; must be quick and free of effects."""

    @hookspec
    def register_strategies(self, register: Callable[..., None]) -> None:
        """Offer strategies: `register("name", factory, summary="...")`. `factory` is a `Strategy` class or a callable
        that returns one from keyword options; a string "package.module:attribute" is imported only when chosen."""

    @hookspec
    def register_precisions(self, register: Callable[..., None]) -> None:
        """Offer precisions, as `register_strategies` does; `factory` gives a `Precision`."""

    @hookspec
    def register_trackers(self, register: Callable[..., None]) -> None:
        """Offer experiment trackers; `factory(run_name=..., logging_dir=...)` gives an Accelerate `GeneralTracker`."""

    @hookspec
    def register_commands(self, register: Callable[..., None]) -> None:
        """Offer command-line commands; `factory()` gives a `click.Command`, shown as `fabricate NAME`."""


class Events:
    """What happened. Collectives are allowed unless the text says otherwise; every rank calls every event."""

    @hookspec
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Once, when everything is built and prepared, before a checkpoint is loaded. Optimizers exist; parameters may be
        changed."""

    @hookspec
    def on_load(self, trainer: Any, module: Any, state: MutableMapping[str, Any]) -> None:
        """Called while a checkpoint is restored, once for each listener. `state`: what this listener stored in `on_save`; sharded
        tensors come back whole, on the CPU. Not wrappable. Not called for a listener whose state is not in the checkpoint."""

    @hookspec
    def on_load_weights(self, trainer: Any, module: Any, state: MutableMapping[str, Any]) -> None:
        """Called when only the weights of a checkpoint are loaded, once for each listener: for an evaluation with `checkpoint=`, at
        the end of a fit with `load_best`, and in `load_from_checkpoint` (for the module only; `trainer` is None there). `state` is
        the same as in `on_load`: restore what belongs to the weights (an average of them, statistics) and ignore what belongs to
        training. Not wrappable. Not called for a listener whose state is not in the checkpoint."""

    @hookspec
    def on_epoch_start(self, trainer: Any, module: Any, epoch: int) -> None:
        """A pass over the training data begins or is resumed. `epoch` counts from 0."""

    @hookspec(firstresult=True)
    def train_step(self, trainer: Any, module: Any, batch: Any) -> Any:
        """Wrappable: the forward of one micro-batch through the prepared model, which runs `module.training_step`.
        `batch` is on the device. Returns what `training_step` returned. Wrap it with `@hookimpl(wrapper=True)` to time,
        profile or change it. No collectives of your own inside (the model's own are running)."""

    @hookspec
    def on_accumulate(
        self,
        trainer: Any,
        module: Any,
        batch: Any,
        loss: torch.Tensor,
        weight: Any,
        micro_step: int,
        num_micro_steps: int,
        is_last: bool,
    ) -> None:
        """After the backward of each micro-batch: gradients were accumulated, weights have not changed. `loss`: this rank's
        detached mean, 0-dim, on the device; `weight`: the number of items that mean was taken over (int, float or 0-dim tensor; 0
        on a rank that had no rows); `micro_step` from 0 to `num_micro_steps - 1`; `is_last`: true in the last micro-batch of the
        window, after gradients were synchronised. Gradients may still be unnormalised or scaled: read them, but do not change them.
        No collectives when `is_last` is false."""

    @hookspec
    def on_before_step(
        self, trainer: Any, module: Any, optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor | None
    ) -> None:
        """Gradients complete, averaged over the global batch, unscaled and clipped: the place to edit `parameter.grad`.
        `optimizer`: the optimizer that this update steps; if there are several, one object with the parameter groups of all of
        them. `grad_norm`: global norm over its parameters before clipping, a 0-dim device tensor. Implementing this hook is an
        error under a strategy that hides gradients (ZeRO)."""

    @hookspec(firstresult=True)
    def optimizer_step(self, trainer: Any, module: Any, optimizer: torch.optim.Optimizer) -> bool | None:
        """Wrappable: the update itself. Returns True when weights changed, False when the update was skipped (fp16 overflow). A
        wrapper must return that value. An implementation that is not a wrapper replaces the update if it returns True or False; if
        it returns None, the next implementation runs."""

    @hookspec
    def on_step(self, trainer: Any, module: Any, step: int, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        """After an applied update: weights changed, scheduler advanced, gradients cleared. `step` counts from 1. `loss`: weighted
        mean over the whole window and all ranks, a 0-dim device tensor. `grad_norm`: the norm before clipping; None under a
        strategy that cannot compute it. If optimizers take turns, both are those of the last turn. With several ranks, a listener
        that takes `loss` causes one small all-reduce per update; one that takes `grad_norm` causes one norm per update. List only
        the arguments that you use. Weights may be changed (an EMA swap, a projection), on every rank alike; under "zero3" within
        `trainer.strategy.changing(parameters)`. A training_step must not change weights: under "fsdp" and
        ZeRO it computes with copies."""

    @hookspec
    def on_step_skipped(self, trainer: Any, module: Any, step: int, reason: str) -> None:
        """An update was not applied (fp16 overflow, non-finite gradients under `nonfinite="skip"`). `step`: the number of updates
        applied so far; a skipped update does not increase it."""

    @hookspec
    def on_log(self, trainer: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        """At a log boundary, and at the end of a fit for what came after the last one: floats, reduced over micro-batches and
        ranks, the same on every rank. No collectives needed. On a GPU the host waits for the device before this call, unless the
        progress bar is the only listener."""

    @hookspec
    def on_eval_start(self, trainer: Any, module: Any, stage: str) -> None:
        """Before an evaluation. `stage`: "validate", "test" or "predict". The module is in eval mode. What `module.log` gets here
        is a metric of this evaluation."""

    @hookspec(firstresult=True)
    def eval_step(self, trainer: Any, module: Any, batch: Any, stage: str) -> Any:
        """Wrappable: one evaluation batch, without grad, in eval mode; returns what the module's step returned.
        `trainer.batch_indices` holds the indices of its rows in the data set; it is empty if the batch is a stand-in. A listener
        that stores predictions somewhere else returns ()."""

    @hookspec
    def on_eval_end(self, trainer: Any, module: Any, stage: str, metrics: dict[str, float]) -> None:
        """After an evaluation. `metrics`: floats over exactly the data set, the same on every rank; empty for "predict". Values
        logged here with `module.log` are reduced over ranks and added to `metrics`: those that the module logs are there when
        plugins are called, those that a plugin logs only after all plugins ran. A value that is written into `metrics` directly has
        to be the same on every rank; otherwise it is an error. For metrics that need all rows at once use
        `TrainModule.compute_metrics`."""

    @hookspec
    def on_save(self, trainer: Any, module: Any, state: MutableMapping[str, Any]) -> None:
        """Called while a checkpoint is assembled, on all ranks, once for each listener. Put tensors, arrays and JSON values into
        `state`, a mapping for this listener alone. The values of rank 0 are stored; for sharded tensors (a DTensor, or the
        `Strategy.Part` that `trainer.strategy.local_part(parameter)` returns on each rank) the part of every rank is stored. Not
        wrappable. If it raises, nothing is committed and the previous checkpoint stays the newest."""

    @hookspec(firstresult=True)
    def write_checkpoint(self, trainer: Any, path: Path) -> bool | None:
        """Wrappable: writes and commits the checkpoint at `path` (which does not exist before). Returns True. The result is then
        verified: if there is no valid checkpoint at `path`, that is an error and `on_saved` is not called."""

    @hookspec
    def on_saved(self, trainer: Any, module: Any, path: Path, step: int) -> None:
        """The checkpoint at `path` is durable on all ranks: upload it, send a notification. Do not change it."""

    @hookspec
    def on_epoch_end(self, trainer: Any, module: Any, epoch: int) -> None:
        """A pass over the training data is complete (not called if the fit stopped in the middle of it). Values logged here with
        `module.log` are written with the metrics of this epoch, under their own names."""

    @hookspec
    def on_complete(self, trainer: Any, module: Any) -> None:
        """The fit is complete: training has ended, and its last state is saved. A listener may change the weights here, on every
        rank in the same way (under "zero3" within `trainer.strategy.changing(parameters)`); the changed weights are exported and
        stay in the module. With `trainer.request_eval()` they are validated first. `trainer.calibrate()` reads the training data
        once more. When a complete run is resumed, this hook is called again."""

    @hookspec
    def on_export(self, trainer: Any, module: Any, path: Path) -> None:
        """The final weights have been written to `path`; rank 0 may add files."""

    @hookspec
    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """The fit ended without an exception; the final checkpoint and export are done."""

    @hookspec
    def on_preempt(self, trainer: Any, module: Any, signal: str) -> None:
        """The run is ending early, to be resumed later; all ranks have agreed and the state is saved. `signal`: what requested it:
        "SIGTERM", "SIGUSR1", "SIGINT", "max_time" or "stop file". Time may be short: a scheduler kills the process some time later."""

    @hookspec
    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """An exception was raised; it is raised to the caller after this hook. It may have happened on this rank only: no
        collectives."""

    @hookspec
    def on_teardown(self, trainer: Any, module: Any) -> None:
        """Always called last, also after an exception. Release resources here. No collectives."""


REGISTRATIONS = tuple(name for name in vars(Registrations) if name.startswith("register_"))
EVENTS = tuple(name for name in vars(Events) if not name.startswith("__"))
ACTIONS = ("train_step", "optimizer_step", "eval_step", "write_checkpoint")
PER_LISTENER = ("on_save", "on_load", "on_load_weights")
HOOKS = REGISTRATIONS + EVENTS


class Listener:
    """Base of everything that implements hooks by overriding methods; any subset of the hook's arguments may be taken.

    The methods accept anything so that an override with fewer arguments type-checks; the real arguments are those of
    `Events` above.
    """

    if TYPE_CHECKING:
        # Declared for checkers and editors; at run time the loop below defines them, one from each specification.
        def on_fit_start(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_load(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_load_weights(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_epoch_start(self, *args: Any, **kwargs: Any) -> Any: ...
        def train_step(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_accumulate(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_before_step(self, *args: Any, **kwargs: Any) -> Any: ...
        def optimizer_step(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_step(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_step_skipped(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_log(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_eval_start(self, *args: Any, **kwargs: Any) -> Any: ...
        def eval_step(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_eval_end(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_save(self, *args: Any, **kwargs: Any) -> Any: ...
        def write_checkpoint(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_saved(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_epoch_end(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_complete(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_export(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_fit_end(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_preempt(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_exception(self, *args: Any, **kwargs: Any) -> Any: ...
        def on_teardown(self, *args: Any, **kwargs: Any) -> Any: ...


def _placeholder(name: str) -> Callable[..., Any]:
    def method(self: Listener, *args: Any, **kwargs: Any) -> Any:
        """Overridden to take part; see fabricate.hooks.Events for the arguments."""

    method.__name__ = name
    method.__qualname__ = f"Listener.{name}"
    return method


for _name in EVENTS:
    setattr(Listener, _name, _placeholder(_name))


class Callback(Listener):
    """A plugin without a strategy or a precision: override the hooks of `fabricate.hooks.Events` that you want to hear.

    class Beep(Callback):
        def on_step(self, step): print("step", step)

    Trainer(plugins=[Beep()], ...)
    """
