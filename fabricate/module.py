"""TrainModule, the base class of users' modules. It holds layers and steps. The loop calls it; it never calls the loop.

Must not know: Accelerate, strategies, the format of checkpoints (except to read weights in `load_from_checkpoint`).
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
import os
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, Self, TypeVar, overload

import torch

from fabricate.data.identity import names_in
from fabricate.errors import CheckpointError, ConfigurationError, FabricateError
from fabricate.hooks import Listener
from fabricate.metrics.reduction import one_number
from fabricate.metrics.torchmetrics_objects import computes
from fabricate.optim.optimizers import parameter_groups
from fabricate.registry import foreign_names

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fabricate.metrics.counters import Progress
    from fabricate.precisions.base import Precision
    from fabricate.strategies.base import Strategy

STEPS = {"train": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
NOT_RUNNING = "no fit or evaluation is running, so the value would not be recorded; call log in a step or a hook"
_METHODS = (*STEPS.values(), "configure_optimizers", "configure_model", "init_weights", "export", "provide_data")


P = ParamSpec("P")
M = TypeVar("M")


class NotRunning(FabricateError, AttributeError):
    """No Trainer runs the module. It is also an AttributeError, so that tools which read all attributes skip this one."""


class RunningTrainer(Protocol):
    """The part of `Trainer` that a module may use; `Trainer` has the descriptions."""

    @property
    def accelerator(self) -> Accelerator: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_main(self) -> bool: ...
    @property
    def metrics(self) -> dict[str, float]: ...
    @property
    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def rates(self) -> dict[str, float]: ...
    @property
    def run_dir(self) -> Path | None: ...
    @property
    def running(self) -> bool: ...
    @property
    def step(self) -> int: ...
    @property
    def strategy(self) -> Strategy: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def validates(self) -> bool: ...
    @property
    def validation_metrics(self) -> frozenset[str]: ...
    def freeze(self, parameters: Iterable[torch.nn.Parameter]) -> None: ...
    def unfreeze(self, parameters: Iterable[torch.nn.Parameter]) -> None: ...
    def request_eval(self) -> None: ...
    def request_save(self) -> None: ...
    def save(self, path: str | os.PathLike[str]) -> Path: ...
    def stop(self, reason: str = ...) -> None: ...


class _OfTheClass(Generic[P]):
    """A class method that makes a new module. Calling it on a module is an error, because that module would not change."""

    def __init__(self, function: Callable[Concatenate[Any, P], Any]) -> None:
        self._function = function

    @overload
    def __get__(self, instance: None, owner: type[M]) -> Callable[P, M]: ...
    @overload
    def __get__(self, instance: M, owner: type[M]) -> Callable[P, NoReturn]: ...
    def __get__(self, instance: M | None, owner: type[M]) -> Callable[P, Any]:
        return types.MethodType(self._function if instance is None else _refused, owner)


def _refused(kind: type, *arguments: object, **overrides: object) -> NoReturn:
    raise ConfigurationError(
        "load_from_checkpoint returns a new module and does not change this one; call it on the class, module = "
        f"{kind.__name__}.load_from_checkpoint(path), or evaluate this one with the weights: trainer.validate(module, data, "
        "checkpoint=path)"
    )


def _once(configure_model: Callable[[Any], None]) -> Callable[[Any], None]:
    """`configure_model`, marked so that a Trainer does not run it again: a script may call it by hand and then load weights."""

    @functools.wraps(configure_model)
    def once(self: TrainModule) -> None:
        configure_model(self)
        object.__setattr__(self, "_built", True)

    once._runs_once = True  # type: ignore[attr-defined]
    return once


class TrainModule(torch.nn.Module, Listener):
    """A torch module with its training step and optimizer. Override the methods below, and hooks, as needed.

        class Regression(TrainModule):
            def __init__(self, width: int = 16):
                super().__init__()
                self.layers = torch.nn.Sequential(torch.nn.Linear(10, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

            def training_step(self, batch):
                x, y = batch
                return torch.nn.functional.mse_loss(self.layers(x), y)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.01)

    Constructor arguments that JSON can hold are recorded in checkpoints for `load_from_checkpoint`.
    """

    _trainer: RunningTrainer | None
    _outer: TrainModule | None
    """While a Trainer runs a module that contains this one, that module; it records what this one logs."""
    _logged: list[Any]
    _no_log: str
    """The reason why nothing can be logged now; empty if logging is possible."""
    _in_evaluation_step: bool
    """Whether a step of an evaluation runs, in which logged values are recognised by their memory, so they are not copied."""
    _turn: str | None
    """The name of the optimizer for which `training_step` is called, if it has the argument."""
    _uses_trainer: bool
    """Whether `trainer` was read since the fit began: if so, a step of this module may request a save, an evaluation or the end."""
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        # Not through Module.__setattr__, because torch's __init__ has not run yet.
        _record(self, args, kwargs)
        object.__setattr__(self, "_trainer", None)
        object.__setattr__(self, "_outer", None)
        object.__setattr__(self, "_logged", [])
        object.__setattr__(self, "_no_log", NOT_RUNNING)
        object.__setattr__(self, "_in_evaluation_step", False)
        object.__setattr__(self, "_turn", None)
        object.__setattr__(self, "_uses_trainer", False)
        return self

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if own := vars(cls).get("__new__"):  # it may pass no arguments on
            cls.__new__ = staticmethod(_recording(own.__func__))  # type: ignore[method-assign]
        if not hasattr(cls.configure_model, "_runs_once") and cls.configure_model is not TrainModule.configure_model:
            cls.configure_model = _once(cls.configure_model)  # type: ignore[assignment, method-assign]

    def provide_data(self, trainer: Any, stage: str, train: Any, val: Any) -> tuple[Any, Any]:
        """Return the data to use instead of `train` and `val`, for a module that brings its own data, or accepts a kind of data
        that `fit` does not. Optional. Called on every rank, before anything is built and before ranks are connected; `trainer` is
        not running yet.

        stage: "fit", "validate", "test" or "predict"; the data of an evaluation is passed as `val`. train, val: what the caller
        passed, or None. Returns the pair (train, val).

            def provide_data(self, trainer, stage, train, val):
                return self.rows("train"), self.rows("test" if stage == "test" else "val")
        """
        return train, val

    def configure_model(self) -> None:
        """Build large layers here instead of in `__init__`. It runs on the meta device; afterwards each layer is initialised
        from a seed derived from the run's seed and the layer's name, so that every strategy starts from the same weights. If it
        reads weights or gives them values (`load_state_dict`, `torch.nn.init`, `torch.zeros` in a layer without
        `reset_parameters`), or gives a layer the weight of a later one, it runs again with real tensors, whole on the CPU of every
        rank, and those values stay; put them into `init_weights` to build without that memory. If a script calls it by hand, a
        Trainer does not run it again. Optional."""

    def init_weights(self, submodule: torch.nn.Module) -> None:
        """Initialise in place the parameters of one submodule that `configure_model` built; they are on the CPU. Called for each
        submodule that has some of its own, outer ones first; a weight that several share keeps what the last call gives it, as
        with `Module.apply`. Optional: by default the submodule's own `reset_parameters` is called."""
        raise FabricateError("init_weights is called only where it is overridden")

    def configure_optimizers(self) -> Any:
        """Called once on every rank, after the model is built and prepared. Returns an optimizer, `(optimizer, scheduler)`, a list
        of those (they all step in each update), or a mapping of names to any of these, from which `training_step` may choose by
        name.

        A scheduler is a torch object or one of transformers' names ("linear", "cosine", "wsd", ...) with options:
        "cosine:warmup=0.1". A scheduler advances once per update; with `(optimizer, scheduler, "epoch")` once per epoch.
        `ReduceLROnPlateau` advances after each validation, by `val_loss`, or by the metric named third:
        `(optimizer, scheduler, "metric")`. The metrics line of that step is written before the validation, so it has the old rate.
        `self.trainer.total_steps` is the number of updates of the fit. An optimizer with `train()` and `eval()` (a schedule-free
        one) is put into eval mode for evaluations, saves, the export and after the fit; do not call these two methods yourself."""
        raise ConfigurationError(
            f"{type(self).__name__} has no configure_optimizers; return an optimizer from it, "
            "for instance torch.optim.AdamW(self.parameters(), lr=1e-3)"
        )

    def parameter_groups(self, options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: `options` maps a regular expression to the options of its group.

            torch.optim.AdamW(self.parameter_groups({r"bias|Norm": {"weight_decay": 0.0}}), lr=1e-3, weight_decay=0.1)

        A pattern is searched in the parameter's name, and in the type of its layer followed by the attribute ("LayerNorm.weight");
        the first pattern that matches is used. Parameters that match no pattern form the first group, with the optimizer's own
        options. Raises `ConfigurationError` for a pattern that matches nothing. The result is the same on every rank and under
        every strategy; no collectives."""
        return parameter_groups(self, options)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """`training_step(self, batch)` or `(self, batch, batch_idx)`: the forward of one micro-batch, inside the prepared
        model. Returns the mean loss (0-dim), or a mapping with "loss", "weight" (the number of items the mean was taken over;
        default: the counted labels of a plain cross-entropy, otherwise the rows of the batch) and, with several optimizers,
        "optimizer": the name of the optimizer that this update steps, or a list of names. Without "optimizer" all of them step,
        which requires that they share no parameter.

        A `training_step` with an argument `optimizer` is called once for each name of `configure_optimizers`, on every batch: each
        optimizer gets its own update, in which the parameters of the others are frozen. For instance a GAN:

            def training_step(self, batch, optimizer):
                fake = self.generator(noise(len(batch)))
                if optimizer == "discriminator":
                    return loss_of(self.discriminator(batch), real=True) + loss_of(self.discriminator(fake), real=False)
                return loss_of(self.discriminator(fake), real=True)
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no training_step; define training_step(self, batch) and return the loss"
        )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """`validation_step(self, batch)`: a mapping of metrics (with "weight", as above, and "outputs" for `compute_metrics`),
        one number, which is the metric "loss" if the step logs none, or None. It runs without grad, in eval mode."""
        raise ConfigurationError(f"{type(self).__name__} has no validation_step; define validation_step(self, batch)")

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`, for `Trainer.test`."""
        raise ConfigurationError(f"{type(self).__name__} has no test_step; define test_step(self, batch)")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """`predict_step(self, batch)`: returns predictions whose leading dimension is the rows: a tensor, an array, a list, or a
        mapping or tuple of these."""
        raise ConfigurationError(f"{type(self).__name__} has no predict_step; define predict_step(self, batch)")

    def compute_metrics(self, outputs: list[Any]) -> Mapping[str, float]:
        """Metrics of a whole validation or test set (R2, BLEU, F1), added to those of the steps. Optional; called on rank 0, once
        per data set, and every rank gets what it returns. `outputs` is a list with one item per sample, each exactly once, in the
        order of the data: the rows of what the steps returned under "outputs" (whose leading dimension has to be the rows). Tensors
        are on the CPU. Do not call collectives. An attribute that it sets has its new value on rank 0 only: return what other ranks
        need, such as a threshold, as a metric, and set it in `on_eval_end`.

            def validation_step(self, batch):
                x, y = batch
                return {"loss": ..., "outputs": (self(x), y)}

            def compute_metrics(self, outputs):
                predicted, y = map(torch.stack, zip(*outputs))
                return {"r2": 1 - (y - predicted).square().sum() / (y - y.mean()).square().sum()}
        """
        raise FabricateError("compute_metrics is called only where it is overridden")

    def export(self, path: Path) -> None:
        """Write the content of RUN_DIR/model/ into `path`; called on all ranks. Optional: by default, a transformers model is
        written in its own layout if the module contains exactly one (then without layers outside of it, which a note names), otherwise
        `model.safetensors` with the parameters and persistent buffers, named as in `state_dict()`. A tied weight is in it once:
        `safetensors.torch.load_model(module, path)` loads it under all of its names. What layers add to `state_dict()` themselves is
        not in it, and the plan has a note about it."""
        raise FabricateError("export is called only where it is overridden")

    @foreign_names.translated(foreign_names.LOG)
    def log(self, name: str, value: Any, *, weight: Any = None, reduce: str = "mean") -> None:
        """Record a metric, in a step or a hook, without waiting for the device. `value`: a number, a bool, a 0-dim tensor, or a
        torchmetrics object or `MetricCollection` (computed at the end of the epoch or evaluation; what training counts in an object
        that it does not log itself is part of the next result that validation logs, as in Lightning: use one object per stage). If a
        value is computed from sharded parameters (a `DTensor`), the parts of all ranks are combined, so all ranks have to log it.
        `reduce`: "mean" averages over micro-batches and ranks, weighted by `weight` (default: the weight of the micro-batch; in hooks
        of an update such as `on_step`, that of the update; in hooks outside of updates, 1 per rank); "sum" adds up. What the steps of a
        skipped update log is left out; `on_step_skipped` may log.

        Values logged in `on_eval_start` and `on_eval_end` are added to the metrics of that evaluation, those logged in
        `on_epoch_end` to the metrics of that epoch. In a training step, the name "loss" is taken: the loss that the step returns is
        recorded under it. A TrainModule inside the module that runs may log too. Raises `FabricateError` outside a fit or
        evaluation, and where it is too late: in `on_log`, in hooks of a save, at the end of a fit, in a prediction."""
        outer = self._outer or self
        if outer._no_log:
            raise FabricateError(f"log({name!r}): {outer._no_log}")
        if reduce not in ("mean", "sum"):
            raise ConfigurationError(f"log({name!r}): reduce={reduce!r}: give 'mean' or 'sum'")
        if type(value) is torch.Tensor and value.ndim == 0:
            value = value.detach()
            if not outer._in_evaluation_step:
                value = value.clone()  # the module may change it in place before it is reduced
        elif computes(value):
            reduce = "object"
        else:
            value = one_number(name, value)
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().clone()
        outer._logged.append((name, value, weight, reduce))

    @property
    def trainer(self) -> RunningTrainer:
        """The Trainer that is running this module. Outside of `fit`, `validate`, `test` and `predict` it raises a `FabricateError`
        that is also an AttributeError, so `hasattr(module, "trainer")` works."""
        if self._trainer is None:
            raise NotRunning(f"{type(self).__name__}.trainer exists only while a Trainer runs the module")
        object.__setattr__(self._outer or self, "_uses_trainer", True)
        return self._trainer

    @trainer.setter
    def trainer(self, value: object) -> None:
        raise self._taken("trainer")

    def __getattr__(self, name: str) -> Any:
        """Called for attributes that are not found. For names from other frameworks, the error says what to use."""
        child = self.__dict__.get("_modules", {}).get(name)
        if child is not None:  # nearly all calls, in every forward; torch's own lookup takes twice as long
            return child
        if name == "trainer":  # the property raised an AttributeError, so Python calls __getattr__
            raise NotRunning(f"{type(self).__name__}.trainer exists only while a Trainer runs the module")
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in foreign_names.MODULE:
                raise foreign_names.missing_attribute(self, name, foreign_names.MODULE) from None
            raise

    @property
    def device(self) -> torch.device:
        """The device that batches are moved to: the Trainer's device, or else that of the first parameter, or else the CPU."""
        if self._trainer is not None and self._trainer.running:
            device: torch.device = self._trainer.accelerator.device
            return device
        parameter = next(self.parameters(), None)
        return parameter.device if parameter is not None else torch.device("cpu")

    @device.setter
    def device(self, value: object) -> None:
        raise self._taken("device")

    def _taken(self, name: str) -> ConfigurationError:
        kind = type(self).__name__
        return ConfigurationError(
            f"{kind}.{name} is set by the Trainer that runs the module; give your attribute another name"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state for copying and pickling, without the Trainer that runs the module."""
        return {**self.__dict__, "_trainer": None, "_outer": None, "_logged": [], "_no_log": NOT_RUNNING}

    def print(self, *values: object) -> None:
        """Print on rank 0 only, also before and after a fit."""
        from fabricate.launch.ranks import detect

        if self._trainer.is_main if self._trainer is not None else detect(os.environ).rank == 0:
            print(*values, flush=True)

    @_OfTheClass
    def load_from_checkpoint(cls: Any, /, path: str | Path, **overrides: Any) -> Any:
        """A new module on the CPU, with the weights of the checkpoint at `path`. If `path` is a run directory, its newest checkpoint is
        used, which need not be the best.

        The module is built from the constructor arguments recorded in the checkpoint; `overrides` replace them. Raises
        `CheckpointError` when there is no checkpoint, when it is damaged, or when an argument was not recorded (JSON cannot hold
        it) and is not in `overrides`.
        """
        from fabricate.checkpoint.state.constants import about_constants, kept_constants
        from fabricate.checkpoint.state.logical import load_weights, recorded_arguments

        recorded, missing = recorded_arguments(Path(path))
        unknown = [name for name in missing if name not in overrides and _takes(cls, name)]
        if unknown:
            raise CheckpointError(
                f"load_from_checkpoint({str(path)!r}): the constructor arguments {', '.join(unknown)} of {cls.__name__} could not be "
                f"recorded; pass them as well: load_from_checkpoint(..., {', '.join(f'{name}=...' for name in unknown)})"
            )
        bound = _bind(cls, recorded, overrides)
        module = cls(*bound.args[1:], **bound.kwargs)
        module.configure_model()
        if overrides and (kept := kept_constants(Path(path), module)):
            module.print(f"note: {about_constants(kept)}")
        state, plugins = load_weights(Path(path), module)
        _take(module, state, Path(path))
        if plugins:
            module.print(
                f"note: {beside_weights(plugins, path)}; RUN_DIR/model/ of a complete run has the weights that the plugin chose"
            )
        return module


def attach(module: TrainModule, trainer: RunningTrainer | None) -> None:
    """Let `module`, and each TrainModule inside it, log and read `trainer` while it runs them. None: it has ended. Parts without a mode,
    as torch.jit.freeze leaves them, get eval mode."""
    for part in module.modules():
        if isinstance(part, TrainModule):
            object.__setattr__(part, "_trainer", trainer)
            object.__setattr__(part, "_outer", None if trainer is None or part is module else module)
        elif not hasattr(part, "training"):
            part.eval()


@contextlib.contextmanager
def refusing_logs(module: TrainModule, reason: str) -> Iterator[None]:
    """A context in which `module.log` raises an error with `reason`. With an empty `reason`, inside another such context, it records."""
    before = module._no_log
    object.__setattr__(module, "_no_log", reason)
    try:
        yield
    finally:
        object.__setattr__(module, "_no_log", before)


def _record(module: TrainModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = tuple(map(_as_given, args)), {name: _as_given(value) for name, value in kwargs.items()}
    object.__setattr__(module, "_arguments", given)


def _recording(new: Callable[..., Any]) -> Callable[..., Any]:
    """The method `__new__` of a subclass, and a record of its arguments."""

    @functools.wraps(new)
    def recording(cls: type[TrainModule], *args: Any, **kwargs: Any) -> Any:
        module = new(cls, *args, **kwargs)
        if isinstance(module, TrainModule):
            _record(module, args, kwargs)
        return module

    return recording


def recorded(module: TrainModule) -> tuple[dict[str, Any], list[str]]:
    """The constructor arguments of `module` by name (of `*args` as a list) that JSON can hold, or that are tuples of what it can hold, and
    the names of the others."""
    from fabricate.checkpoint.format.arguments import recordable

    args, kwargs = module._arguments
    try:
        bound = inspect.signature(type(module).__init__).bind(module, *args, **kwargs)
    except TypeError:
        return {}, []
    values: dict[str, Any] = {}
    twice: set[str] = set()
    for name, value in list(bound.arguments.items())[1:]:
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            twice = values.keys() & value.keys()  # a positional-only argument may have the name of a keyword argument
            values |= value
        else:
            values[name] = list(value) if kind is inspect.Parameter.VAR_POSITIONAL else value
    held, lost = recordable({name: value for name, value in values.items() if name not in twice})
    return held, lost + sorted(twice)


def _as_given(value: Any) -> Any:
    """A copy of a dict, list or tuple and of those inside of it, because a constructor may change them; other values themselves."""
    try:
        if isinstance(value, dict):
            copied = copy.copy(value)
            for key, each in value.items():
                copied[key] = _as_given(each)
            return copied
        return type(value)(map(_as_given, value)) if type(value) in (list, tuple) else value
    except Exception:  # it contains itself, or its class does not allow copies
        return value


def beside_weights(plugins: Collection[str], path: str | Path) -> str:
    """The note that a checkpoint also holds state of inactive plugins, which is not loaded."""
    return (
        f"{path} also holds the state of the plugin {', '.join(plugins)} (for example, an average of the weights). This state is "
        "not loaded, only the weights that were trained. To evaluate with it, use Trainer(plugins=[...]) and checkpoint="
    )


def not_taken(module: TrainModule, path: Path) -> str:
    """The note that values from the module's `on_save` are not loaded, because only the weights of the checkpoint are."""
    return (
        f"{type(module).__name__}.on_save put values into {path}, but only the weights are loaded. If some of these values belong "
        "to the weights, define on_load_weights(self, state) to restore them"
    )


def _take(module: TrainModule, state: dict[str, Any], path: Path) -> None:
    """Call `on_load_weights` of `module`, which no Trainer runs, with the `state` that its `on_save` put into the checkpoint at `path`."""
    if not state:
        return
    if not overrides(module, "on_load_weights"):
        module.print(f"note: {not_taken(module, path)}")
        return
    arguments = {"trainer": None, "module": module, "state": state}
    taken = inspect.signature(module.on_load_weights).parameters
    module.on_load_weights(**{name: value for name, value in arguments.items() if name in taken})


def _takes(kind: type[TrainModule], name: str) -> bool:
    """Whether `kind.__init__` has an argument `name`."""
    parameters = inspect.signature(kind.__init__).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _bind(kind: type[TrainModule], recorded: dict[str, Any], overrides: dict[str, Any]) -> inspect.BoundArguments:
    """The arguments for `kind.__init__` (self is None): `overrides`, and the recorded ones that it still has."""
    signature = inspect.signature(kind.__init__)
    any_keyword = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
    bound = signature.bind_partial(None)
    for name, value in (recorded | overrides).items():
        if name in signature.parameters:
            bound.arguments[name] = value
        elif any_keyword is not None:
            bound.arguments.setdefault(any_keyword, {})[name] = value
        elif name in overrides:
            hint = foreign_names.hint(name, foreign_names.LOAD, signature.parameters)
            raise ConfigurationError(
                f"load_from_checkpoint: {kind.__name__} has no constructor argument {name!r}{hint}"
            )
    return bound


def overrides(module: TrainModule, method: str) -> bool:
    """Whether the class of `module` overrides `method`."""
    return getattr(type(module), method) is not getattr(TrainModule, method)


def writes_itself(module: TrainModule) -> bool:
    """Whether the class of `module` has an `export(self, path)` that writes RUN_DIR/model/, and not a helper of this name."""
    if not overrides(module, "export"):
        return False
    try:
        inspect.signature(module.export).bind(Path())
    except TypeError:
        return False
    return True


def step_function(module: TrainModule, stage: str) -> Callable[[Any, int], Any]:
    """The module's step for `stage` ("train", "validate", ...) as a function of (batch, batch_idx). The signature is checked here, once."""
    method = STEPS[stage]
    step: Callable[..., Any] = getattr(module, method)
    if not overrides(module, method):
        step()  # raises the error that says what to define
    turns = stage == "train" and takes_turns(module)
    parameters = [p for p in inspect.signature(step).parameters.values() if not (turns and p.name == "optimizer")]
    _refuse_parts_of_a_batch(type(module).__name__, method, parameters)
    takes_batch_idx = _takes_batch_idx(type(module).__name__, method, parameters)
    if turns:
        if takes_batch_idx and list(inspect.signature(step).parameters)[1] == "optimizer":
            return lambda batch, batch_idx: step(batch, module._turn, batch_idx)
        if takes_batch_idx:
            return lambda batch, batch_idx: step(batch, batch_idx, optimizer=module._turn)
        return lambda batch, batch_idx: step(batch, optimizer=module._turn)
    if takes_batch_idx:
        return step
    return lambda batch, batch_idx: step(batch)


def takes_turns(module: TrainModule) -> bool:
    """Whether `training_step` has the argument `optimizer`. It is then called for each optimizer on every batch."""
    return "optimizer" in inspect.signature(module.training_step).parameters


_OF_ROWS = ("y", "label", "labels", "target", "targets")
"""Names of an argument that is part of a batch."""


def _refuse_parts_of_a_batch(kind: str, method: str, parameters: list[inspect.Parameter]) -> None:
    """Raise ConfigurationError for a step that takes (x, y)."""
    names = [p.name for p in parameters if p.default is p.empty]
    if len(names) == 2 and names[1] in _OF_ROWS:
        raise ConfigurationError(
            f"{kind}.{method}({', '.join(names)}): the loop passes (batch) or (batch, batch_idx), so {names[1]} would be the number of "
            f"the batch; unpack the batch: define {method}(self, batch), and begin with {', '.join(names)} = batch"
        )


def _takes_batch_idx(kind: str, method: str, parameters: list[inspect.Parameter]) -> bool:
    """Whether a step takes (batch, batch_idx), not only (batch). Raises ConfigurationError for arguments that the loop does not pass."""
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    names = [p.name for p in positional]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    where = f"{kind}.{method}({', '.join(names)})"
    if "optimizer_idx" in names:
        raise ConfigurationError(
            f"{where}: for updates of several optimizers in turn, let configure_optimizers return a mapping of them by name, and define "
            f"{method}(self, batch, optimizer), which is called with each name"
        )
    if len(required) > 2 or any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        raise ConfigurationError(f"{where}: the loop passes (batch) or (batch, batch_idx); remove the other arguments")
    if not names and not takes_any:
        raise ConfigurationError(f"{where} takes no batch; define {method}(self, batch)")
    return names[1:2] == ["batch_idx"] or len(required) == 2 or takes_any


def check_dataloader_idx(module: TrainModule, stage: str, sets: Collection[str]) -> None:
    """Raise `ConfigurationError` if there are several data sets and the step has the argument `dataloader_idx`, which is not passed."""
    step = STEPS[stage]
    if len(sets) > 1 and "dataloader_idx" in inspect.signature(getattr(module, step)).parameters:
        raise ConfigurationError(
            f"{type(module).__name__}.{step} has the argument dataloader_idx, which is not passed; remove it: each metric gets the "
            f"name of its data set ({', '.join(sets)})"
        )


def _no_module(given: object) -> ConfigurationError:
    """The error for an argument of `fit` that is not a module."""
    kind = given.__name__ + " (a class; pass an instance)" if inspect.isclass(given) else type(given).__name__
    of_lightning = any(base.__name__ == "LightningModule" for base in type(given).__mro__)
    as_it_is = ", or run it as it is: adapt(module) of the distribution fabricate-lightning" if of_lightning else ""
    return ConfigurationError(
        f"module={kind} is not a fabricate.TrainModule; subclass TrainModule and define training_step{as_it_is}"
    )


def _called(kind: type) -> set[str]:
    """The names in the code of the methods of a class, by which they may call its other methods."""
    functions = (value for base in kind.__mro__ for value in vars(base).values() if inspect.isfunction(value))
    return {name for function in functions for name in names_in(function.__code__) if name != function.__name__}


def check_methods(module: object) -> None:
    """Raise `ConfigurationError` for an object that is not a module, and for misspelt methods, which would silently never be called."""
    if isinstance(getattr(module, "_orig_mod", None), TrainModule):
        raise ConfigurationError(
            "module was compiled with torch.compile; pass the module as it was before, and set Trainer(compile=True)"
        )
    if not isinstance(module, TrainModule):
        raise _no_module(module)
    if "_modules" not in module.__dict__:
        raise ConfigurationError(f"{type(module).__name__}.__init__ does not call super().__init__(); call it first")
    for name, (value, remedy) in foreign_names.MODULE_SETTINGS.items():
        if getattr(module, name, None) is value:
            raise ConfigurationError(f"{type(module).__name__}.{name}={value} has no effect; {remedy}")
    for base in type(module).__mro__[: type(module).__mro__.index(TrainModule)]:
        for name, value in vars(base).items():
            if not inspect.isfunction(value) or name.startswith("_"):
                continue
            if (known := foreign_names.COMMON_NAMES.get(name)) and foreign_names.begins_with(value, known[0]):
                raise ConfigurationError(
                    f"{base.__name__}.{name} is a hook of another framework that fabricate does not call; use {known[1]}"
                )
            near = difflib.get_close_matches(name, _METHODS, n=1, cutoff=0.9)
            if (
                near
                and name not in _METHODS
                and not hasattr(torch.nn.Module, name)
                and name not in _called(type(module))
            ):
                raise ConfigurationError(f"{base.__name__}.{name} would never be called; did you mean {near[0]!r}?")
