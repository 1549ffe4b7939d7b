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
        """Once, everything built and prepared, before a checkpoint is loaded. Optimizers exist; parameters may be changed."""

    @hookspec
    def on_load(self, trainer: Any, module: Any, state: MutableMapping[str, Any]) -> None:
        """While a checkpoint is restored, per listener. `state`: what this listener put there in `on_save`; tensors come
        back whole, on the CPU. Not wrappable. Not called for a listener that the checkpoint has nothing for."""

    @hookspec
    def on_load_weights(self, trainer: Any, module: Any, state: MutableMapping[str, Any]) -> None:
        """While only the weights of a checkpoint are loaded, per listener: for an evaluation with `checkpoint=`, at the end of a fit under
        `load_best`, and in `load_from_checkpoint`, which has no plugins and no trainer (None). `state` as for `on_load`: take what belongs
        to the weights (an average of them, statistics), and leave what is about training. Not wrappable. Not called for a listener that
        the checkpoint has nothing for."""

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
        """After each micro-batch's backward: gradients grew, weights did not. `loss`: this rank's detached mean, 0-dim, on
        the device; `weight`: what it was taken over (int, float or 0-dim tensor; 0 on a rank that had no rows);
        `micro_step` from 0 to `num_micro_steps - 1`; `is_last`: gradients were synchronised. Gradients may still be
        unnormalised or scaled: look, don't touch. No collectives when `is_last` is false."""

    @hookspec
    def on_before_step(
        self, trainer: Any, module: Any, optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor | None
    ) -> None:
        """Gradients complete, averaged over the global batch, unscaled and clipped: the place to edit `parameter.grad`. `optimizer`:
        what this update steps; of several, one object with the groups of all. `grad_norm`: global norm over its parameters before
        clipping, 0-dim device tensor. Refused under a strategy whose engine hides gradients."""

    @hookspec(firstresult=True)
    def optimizer_step(self, trainer: Any, module: Any, optimizer: torch.optim.Optimizer) -> bool | None:
        """Wrappable: the update itself. Returns True when weights changed, False when the update was skipped (fp16
        overflow). A wrapper must pass the answer on; an implementation that is no wrapper replaces the update when it
        returns True or False, and leaves it to the next one when it returns None."""

    @hookspec
    def on_step(self, trainer: Any, module: Any, step: int, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        """After an applied update: weights changed, scheduler advanced, gradients cleared. `step` counts from 1. `loss`:
        weighted mean over the whole window and all ranks, 0-dim device tensor. `grad_norm`: before clipping, None only under
        a strategy that cannot tell. Where optimizers take turns, both are of the last turn. Asking for `loss` costs one small
        all-reduce per update on several ranks, asking for `grad_norm` one norm per update; take only what you use. Weights may
        be changed (an EMA swap, a projection), on every rank alike; under "zero3" within
        `trainer.strategy.changing(parameters)`. Steps must not: under "fsdp" and ZeRO they compute with copies."""

    @hookspec
    def on_step_skipped(self, trainer: Any, module: Any, step: int, reason: str) -> None:
        """An update was not applied (fp16 overflow, non-finite gradients under `nonfinite="skip"`). `step`: updates applied
        so far; it does not grow."""

    @hookspec
    def on_log(self, trainer: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        """At a log boundary, and at the end of a fit for what came after the last one: floats, reduced over micro-batches and
        ranks, the same on every rank. No collectives needed. On a GPU the host waits for the device before this call; without
        a listener but the progress bar it does not."""

    @hookspec
    def on_eval_start(self, trainer: Any, module: Any, stage: str) -> None:
        """Before an evaluation. `stage`: "validate", "test" or "predict". The module is in eval mode. What `module.log` gets here
        is a metric of this evaluation."""

    @hookspec(firstresult=True)
    def eval_step(self, trainer: Any, module: Any, batch: Any, stage: str) -> Any:
        """Wrappable: one evaluation batch, no grad, eval mode; returns what the module's step returned. `trainer.batch_indices`: the
        places of its rows in the data set, empty where the batch counts for nothing. A listener that keeps predictions itself returns
        ()."""

    @hookspec
    def on_eval_end(self, trainer: Any, module: Any, stage: str, metrics: dict[str, float]) -> None:
        """After an evaluation. `metrics`: floats over exactly the data set, the same on every rank; empty for "predict". What
        `module.log` gets here joins them, reduced over ranks: what the module logs before plugins are called, what a plugin logs
        after all of them. A value that is written into `metrics` has to be the same on every rank, or it is an error. Metrics of
        all rows at once: `TrainModule.compute_metrics`."""

    @hookspec
    def on_save(self, trainer: Any, module: Any, state: MutableMapping[str, Any]) -> None:
        """While a checkpoint is assembled, on all ranks, per listener. Put tensors, arrays and JSON values into `state`,
        this listener's own mapping; rank 0's values are stored, and of sharded tensors (a DTensor, or the `Strategy.Part`
        that each rank holds, as `trainer.strategy.local_part(parameter)` gives) every rank's part. Not wrappable. A failure
        aborts the commit: the previous checkpoint stays the newest."""

    @hookspec(firstresult=True)
    def write_checkpoint(self, trainer: Any, path: Path) -> bool | None:
        """Wrappable: writes and commits the checkpoint at `path` (which exists only afterwards). Returns True. What lies at
        `path` afterwards is verified: anything but a good checkpoint is an error, and `on_saved` is not called."""

    @hookspec
    def on_saved(self, trainer: Any, module: Any, path: Path, step: int) -> None:
        """The checkpoint at `path` is durable on all ranks: upload it, tell somebody. Do not change it."""

    @hookspec
    def on_epoch_end(self, trainer: Any, module: Any, epoch: int) -> None:
        """A pass over the training data is complete (not called for one that was stopped half way). What `module.log` gets here is
        written with this epoch, under its own name."""

    @hookspec
    def on_complete(self, trainer: Any, module: Any) -> None:
        """The fit is complete: nothing is trained any more, and its last state is saved. What a listener makes of the weights here, on
        every rank alike (under "zero3" within `trainer.strategy.changing(parameters)`), is what is exported and what the module
        keeps; after `trainer.request_eval()` it is validated first. `trainer.calibrate()` reads the training data once more. A run that
        is resumed when it is complete comes here again."""

    @hookspec
    def on_export(self, trainer: Any, module: Any, path: Path) -> None:
        """The final weights lie in `path`; rank 0 may add files."""

    @hookspec
    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """The fit ended without an exception; the final checkpoint and export are done."""

    @hookspec
    def on_preempt(self, trainer: Any, module: Any, signal: str) -> None:
        """The run was asked to end and will go on another time; all ranks agreed, the state is saved. `signal`: what asked:
        "SIGTERM", "SIGUSR1", "SIGINT", "max_time" or "stop file". Time may be short: schedulers kill a while later."""

    @hookspec
    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Something was raised; it goes on to the caller afterwards. Maybe this rank only: no collectives."""

    @hookspec
    def on_teardown(self, trainer: Any, module: Any) -> None:
        """Last of all, always, also after an exception. Release what was taken. No collectives."""


REGISTRATIONS = tuple(name for name in vars(Registrations) if name.startswith("register_"))
EVENTS = tuple(name for name in vars(Events) if not name.startswith("__"))
ACTIONS = ("train_step", "optimizer_step", "eval_step", "write_checkpoint")
PER_LISTENER = ("on_save", "on_load", "on_load_weights")
HOOKS = REGISTRATIONS + EVENTS


class Listener:
    """Base of everything that hears hooks by overriding a method; any subset of the hook's arguments may be taken.

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
