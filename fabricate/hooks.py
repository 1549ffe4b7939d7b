"""The hook specifications: every point of the loop at which methods of a module or a plugin are called.

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
    if a signal, a time limit or a stop file ended the fit:
        on_preempt
    else:
        on_log                                     what was not logged yet
        on_load_weights                            under load_best, per listener
        on_complete                                then an evaluation, if one is requested
        on_export                                  with a run_dir
    on_fit_end
    on_exception                                   when an exception was raised
    on_teardown                                    always

Every hook runs on every rank, in the same order on each, unless its text says otherwise. Events return nothing (a returned value is an
error). A listener takes any subset of a hook's arguments by name. `trainer` is the `Trainer` that calls, `module` the `TrainModule` that it
runs. This module imports pluggy and nothing of fabricate, so that a specification can be read separately; this is why these two have the
type `Any`.

If optimizers take turns, an update is one turn of each: the hooks from `train_step` to `optimizer_step` run in every turn, and `on_step`
after the last turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from pathlib import Path

    import torch

PROJECT = "fabricate"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""A decorator for hook implementations. It is needed outside of fabricate's base classes, for `wrapper=True` or an order, and for the four
hooks that do work (`ACTIONS`): an unmarked method with the name of an action is refused."""


class Registrations:
    """The hooks with which an installed distribution offers names. They are called without a process group or a device, and must be quick
    and without side effects."""

    @hookspec
    def register_strategies(self, register: Callable[..., None]) -> None:
        """Offer strategies: `register("name", factory, summary="...")`. `factory` is a `Strategy` class or a callable that returns a
        strategy from keyword options. If `factory` is a string "package.module:attribute", it is imported only when the strategy is
        chosen."""

    @hookspec
    def register_precisions(self, register: Callable[..., None]) -> None:
        """Offer precisions, with the same arguments as in `register_strategies`; `factory` returns a `Precision`."""

    @hookspec
    def register_trackers(self, register: Callable[..., None]) -> None:
        """Offer experiment trackers; `factory(run_name=..., logging_dir=...)` returns a `GeneralTracker` of Accelerate."""

    @hookspec
    def register_commands(self, register: Callable[..., None]) -> None:
        """Offer command-line commands; `factory()` returns a `click.Command`, which is called as `fabricate NAME`."""


class Events:
    """The hooks of the loop. Collectives are allowed unless the text of a hook says otherwise; every rank calls every hook."""

    @hookspec
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Called once per fit, when everything is built and prepared, before a checkpoint is loaded. The optimizers exist. The values
        of parameters can be changed here."""

    @hookspec
    def on_load(self, trainer: Any, module: Any, state: MutableMapping[str, Any]) -> None:
        """Called while a checkpoint is restored, once for each listener. `state`: what this listener stored in `on_save`; sharded
        tensors come back whole, on the CPU. Not wrappable. Not called for a listener that stored nothing in the checkpoint."""

    @hookspec
    def on_load_weights(self, trainer: Any, module: Any, state: MutableMapping[str, Any]) -> None:
        """Called when only the weights of a checkpoint are loaded, once for each listener: for an evaluation with `checkpoint=`, at the
        end of a fit with `load_best`, and in `load_from_checkpoint` (for the module only; `trainer` is None there). `state`: the same
        mapping as in `on_load`. Restore what belongs to the weights (an average of the weights, statistics) and ignore what belongs to
        training. Not wrappable. Not called for a listener that stored nothing in the checkpoint."""

    @hookspec
    def on_epoch_start(self, trainer: Any, module: Any, epoch: int) -> None:
        """Called when a pass over the training data begins, and after `on_load` where a run resumes within a pass: what must happen only at
        its beginning (a reset of what `on_load` restored) belongs into `if trainer.progress.position == 0`. `epoch` counts from 0."""

    @hookspec(firstresult=True)
    def train_step(self, trainer: Any, module: Any, batch: Any) -> Any:
        """Wrappable: the forward of one micro-batch through the prepared model, which runs `module.training_step`. `batch` is on the
        device. Returns what `training_step` returned. Wrap this hook to time, profile or change the forward. Do not call collectives
        here, because those of the model are running."""

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
        """Called after the backward of each micro-batch: its gradients were accumulated, and the weights have not changed. `loss`: the
        detached mean loss of this rank, a 0-dim device tensor. `weight`: the number of items over which this mean was taken (int, float
        or 0-dim tensor; 0 on a rank that had no rows). `micro_step` counts from 0 to `num_micro_steps - 1`. `is_last`: True in the last
        micro-batch of the window, after gradients were synchronised. The gradients can still be unnormalised or scaled: read them, but
        do not change them. Do not call collectives when `is_last` is False."""

    @hookspec
    def on_before_step(
        self, trainer: Any, module: Any, optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor | None
    ) -> None:
        """Called when the gradients are complete, averaged over the global batch, unscaled and clipped. This is the place to edit
        `parameter.grad`. `optimizer`: the optimizer that runs in this update; if several run, one object with the parameter
        groups of all of them. `grad_norm`: the global norm of the gradients of these parameter groups before clipping, a
        0-dim device tensor. Implementing this hook is an error under a strategy that hides gradients (ZeRO)."""

    @hookspec(firstresult=True)
    def optimizer_step(self, trainer: Any, module: Any, optimizer: torch.optim.Optimizer) -> bool | None:
        """Wrappable: the call of the optimizer. Returns True when weights changed, False when the update was skipped (fp16 overflow). A
        wrapper must return that value. An implementation that is not a wrapper replaces the call of the optimizer if it returns True or
        False. If it returns None, the next implementation runs."""

    @hookspec
    def on_step(self, trainer: Any, module: Any, step: int, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        """Called after an applied update: weights changed, scheduler advanced, gradients cleared. `step` counts from 1. `loss`: the
        weighted mean over the whole window and all ranks, a 0-dim device tensor. `grad_norm`: the norm before clipping; None under a
        strategy that cannot compute it. If optimizers take turns, `loss` and `grad_norm` are those of the last turn. With several
        ranks, a listener that takes `loss` causes one small all-reduce per update. A listener that takes `grad_norm` causes one
        computation of the norm per update. So list only the arguments that you use. The values of weights can be changed here (an EMA
        swap, a projection), in the same way on every rank; under "zero3", change them inside `with
        trainer.strategy.changing(parameters):`. Do not change weights in `training_step`, because under "fsdp" and ZeRO it computes
        with copies of the weights."""

    @hookspec
    def on_step_skipped(self, trainer: Any, module: Any, step: int, reason: str) -> None:
        """Called when an update was not applied (fp16 overflow, non-finite gradients under `nonfinite="skip"`). `step`: the number of
        updates applied so far; a skipped update does not increase it. What its steps logged is left out of the log; this hook may log."""

    @hookspec
    def on_log(self, trainer: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        """Called at each log boundary, and at the end of a fit for values that were logged after the last log boundary. `metrics`:
        floats, reduced over micro-batches and ranks, the same on every rank, so no collectives are needed. `step`: the last update that
        `metrics` includes. On a GPU the host waits for the device before this call, unless the progress bar is the only listener."""

    @hookspec
    def on_eval_start(self, trainer: Any, module: Any, stage: str) -> None:
        """Called before an evaluation. `stage`: "validate", "test" or "predict". The module is in eval mode. A value logged here with
        `module.log` is a metric of this evaluation. A hook that exchanges weights calls `module.train()` before that and `module.eval()`
        after it, because a layer that merges its weights in eval mode has merged the others already; and it puts them back in
        `on_eval_end` in the same way, and in `on_exception`. Such a hook is marked with `@hookimpl(tryfirst=True)`, and its `on_eval_end`
        with `@hookimpl(trylast=True)`: other plugins then find the weights that are evaluated, and two that exchange weights nest."""

    @hookspec(firstresult=True)
    def eval_step(self, trainer: Any, module: Any, batch: Any, stage: str) -> Any:
        """Wrappable: one evaluation batch, without grad, in eval mode; returns what the `..._step` method of the module returned.
        `trainer.batch_indices` holds, for each row of `batch`, its index in the data set; it is empty if the batch is a stand-in. By
        default, `trainer.predict` collects the returned values. A wrapper that stores predictions itself returns (), so that nothing is
        collected."""

    @hookspec
    def on_eval_end(self, trainer: Any, module: Any, stage: str, metrics: dict[str, float]) -> None:
        """Called after an evaluation. `metrics`: floats, computed over exactly the rows of the data set, the same on every rank; empty
        for "predict". Values logged here with `module.log` are reduced over ranks and added to `metrics`. The module's `on_eval_end` is
        called first, so that the values it logs are in `metrics` when the plugins are called. Values that a plugin logs are added after
        all plugins ran. A value that is written into `metrics` directly must be the same on every rank; otherwise it is an error. For
        metrics that need all rows at once, use `TrainModule.compute_metrics`. The torchmetrics objects that steps logged can be
        computed here; they are reset afterwards. One that several data sets use has the rows of the last of them."""

    @hookspec
    def on_save(self, trainer: Any, module: Any, state: MutableMapping[str, Any]) -> None:
        """Called while a checkpoint is assembled, on all ranks, once for each listener. Put tensors, arrays and JSON values into
        `state`, a mapping for this listener alone. The checkpoint stores the values of rank 0. Of a sharded tensor, it stores the part
        of every rank; a sharded tensor is a DTensor, or the `Strategy.Part` that `trainer.strategy.local_part(parameter)` returns on
        each rank. Not wrappable. If this hook raises an error, nothing is committed and the previous checkpoint stays the newest."""

    @hookspec(firstresult=True)
    def write_checkpoint(self, trainer: Any, path: Path) -> bool | None:
        """Wrappable: writes and commits the checkpoint at `path`, which does not exist before. Returns True. The result is then
        verified: if there is no valid checkpoint at `path`, that is an error and `on_saved` is not called."""

    @hookspec
    def on_saved(self, trainer: Any, module: Any, path: Path, step: int) -> None:
        """Called when the checkpoint at `path` is durable on all ranks: upload it, send a notification. Do not change the checkpoint.
        `step`: the update after which it was saved."""

    @hookspec
    def on_epoch_end(self, trainer: Any, module: Any, epoch: int) -> None:
        """Called when a pass over the training data is complete, but not if the fit stopped in the middle of the pass. Values logged
        here with `module.log` are written with the metrics of this epoch, under the names given, without the prefix `epoch_` that the
        averages over an epoch have. The torchmetrics objects that steps logged can be computed here; they are reset afterwards."""

    @hookspec
    def on_complete(self, trainer: Any, module: Any) -> None:
        """Called when the fit is complete: training has ended, and its last state is saved. A listener can change the weights here, on
        every rank in the same way (under "zero3" within `trainer.strategy.changing(parameters)`). The changed weights and buffers are
        exported and stay in the module, but no checkpoint holds them: `load_from_checkpoint` and `checkpoint="last"` load the state of
        training. If this hook calls `trainer.request_eval()`, the changed weights are validated before they are exported. If
        this hook calls `trainer.calibrate()`, the training data is read once more to update layers that collect statistics of their
        inputs, such as batch norm. When a complete run is resumed, this hook is called again.
        A plugin that ends a fit with an average sets `averages_weights = True`, so that two of them are refused."""

    @hookspec
    def on_export(self, trainer: Any, module: Any, path: Path) -> None:
        """Called when the final weights have been written to the directory `path`. Add files to it on rank 0 only."""

    @hookspec
    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """Called when the fit ended without an exception, after the final checkpoint and, if the fit is complete, the export."""

    @hookspec
    def on_preempt(self, trainer: Any, module: Any, signal: str) -> None:
        """Called when the fit ends early, to be resumed later. All ranks have agreed, and the state is saved. `signal`: what requested
        the end: "SIGTERM", "SIGUSR1", "SIGINT", "max_time" or "stop file". The time for this hook is limited: a scheduler kills the
        process some time after the request."""

    @hookspec
    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Called when an exception was raised; after this hook, the exception is raised to the caller of `fit`. It was possibly raised
        on this rank only, so do not call collectives."""

    @hookspec
    def on_teardown(self, trainer: Any, module: Any) -> None:
        """Always called last, also after an exception. Release resources here. Do not call collectives."""


REGISTRATIONS = tuple(name for name in vars(Registrations) if name.startswith("register_"))
EVENTS = tuple(name for name in vars(Events) if not name.startswith("__"))
ACTIONS = ("train_step", "optimizer_step", "eval_step", "write_checkpoint")
PER_LISTENER = ("on_save", "on_load", "on_load_weights")
HOOKS = REGISTRATIONS + EVENTS


class Listener:
    """Base class of objects that implement hooks by overriding methods. An override takes any subset of the hook's arguments.

    The methods here accept any arguments, so that an override with fewer arguments type-checks. `Events` has the actual arguments.
    """

    if TYPE_CHECKING:
        # For type checkers and editors. At run time, the loop below defines these methods from the specifications.
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
        """Override this method to implement the hook; see fabricate.hooks.Events for the arguments."""

    method.__name__ = name
    method.__qualname__ = f"Listener.{name}"
    return method


for _name in EVENTS:
    setattr(Listener, _name, _placeholder(_name))


class Callback(Listener):
    """Base class of a plugin: override the hooks of `fabricate.hooks.Events` that you need.

    class Beep(Callback):
        def on_step(self, step): print("step", step)

    Trainer(plugins=[Beep()], ...)
    """

    averages_weights: ClassVar[bool] = False
    """Whether a fit ends with weights that this plugin averages. Two such plugins are an error before the first step, as is one under a
    strategy whose replicas differ between updates."""
