"""A LightningModule as a `TrainModule`: fabricate's hooks call Lightning's, in the order in which Lightning calls them.

`Adapted` has the hooks that every module needs; `parts` and `manual` have those that only some need. Must not know: Lightning's Trainer
arguments (`trainer`), which parts a module gets (`adapting`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.functional import cross_entropy

from fabricate import ConfigurationError, Trainer, TrainModule, hookimpl
from fabricate_lightning import data, differences, optimizers
from fabricate_lightning.callbacks import saved
from fabricate_lightning.checkpoints import share
from fabricate_lightning.hooks import Hooks
from fabricate_lightning.kinds import overrides
from fabricate_lightning.saved import Saved, detached, give_added
from fabricate_lightning.view import TrainerView

WORDS = {"validate": "validation", "test": "test", "predict": "predict"}
"""The names of the stages of an evaluation in Lightning's hooks."""


class Adapted(TrainModule):
    """The `TrainModule` that `adapt` returns."""

    # Attributes of the class, which `adapt` makes for one module. As an attribute of the object, the user's module
    # would be a child, and its parameters would exist twice.
    lightning: ClassVar[Any]
    """The user's module."""
    view: ClassVar[TrainerView]
    hooks: ClassVar[Hooks]
    moves_batches: ClassVar[bool] = False
    """Whether the hooks for the transfer of a batch to the device are called."""
    clips: ClassVar[bool] = False
    """Whether the module's hooks read the gradients before clipping, and clip them."""

    def __init__(self, **hparams: Any) -> None:
        """hparams: the module's hyper-parameters, which checkpoints record."""
        mode = self.training
        super().__init__()
        self.training = mode
        share(self, self.lightning)
        self.view.adapted = self
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[optimizers.SchedulerConfig] = []
        self._at_epoch_end: list[optimizers.SchedulerConfig] = []
        """The schedulers that fabricate does not advance."""
        self.stopping = False
        self.batch_idx = 0
        self.output: Any = None
        """The output of the last step, if a hook needs it."""
        self.keeps_output = False
        self.returns_predictions: bool | None = None
        """Whether `fabricate_lightning.Trainer.predict` returns them; None where fabricate's own Trainer does."""
        self._saved = Saved(self.lightning, self.view)
        self._trained_before = False
        self._epoch_began = self._in_epoch = False
        self.modes: dict[str, bool] = {}
        """Whether each part of the module was in train mode before the fit, by name."""
        self._data_set: str | None = None
        self._found: dict[str, float] = {}
        """The values of the finished data sets of the evaluation in progress."""
        self._number = 0
        self._batch: Any = None

    @property
    def training(self) -> bool:
        """The mode of the user's module."""
        return bool(self.lightning.training)

    @training.setter
    def training(self, mode: bool) -> None:
        self.lightning.training = mode

    def train(self, mode: bool = True) -> Adapted:
        """Set the mode of the user's module with its method `train`."""
        self.lightning.train(mode)
        return self

    def record(self, name: str, value: Any, *, weight: Any = None, reduce: str = "mean") -> None:
        """Record a value with fabricate's metrics."""
        super().log(name, value, weight=weight, reduce=reduce)

    # -- data ---------------------------------------------------------------------------------------------------------------------

    def provide_data(self, trainer: Trainer, stage: str, train: Any, val: Any) -> tuple[Any, Any]:
        """The loaders of the data module or the module, after a call of `setup`."""
        view, module = self.view, self.lightning
        view.begin(trainer, stage)
        view.logs.forget()
        if data.is_datamodule(train):
            view.datamodule, train = train, None
        elif data.is_datamodule(val):
            view.datamodule, val = val, None
        owner = view.datamodule if view.datamodule is not None else module
        view.loaders["train"] = train
        self._set_up(owner, stage)
        if stage != "fit":
            view.loaders[stage] = data.evaluation(owner, stage, val)
            return None, view.loaders[stage]
        view.loaders["train"] = data.training(owner, train)
        view.loaders["validate"] = data.evaluation(owner, "validate", val)
        if view.loaders["validate"] is not None and not overrides(module, "validation_step"):
            view.print(f"{type(module).__name__} has no validation_step, so its validation data is not read")
            view.loaders["validate"] = None
        self._trained_before, self._epoch_began, self.stopping = False, False, False
        self.remember_modes()
        return view.loaders["train"], view.loaders["validate"]

    def remember_modes(self) -> None:
        """Store the present modes of the module's parts, in which Lightning would train."""
        self.modes = {name: part.training for name, part in self.lightning.named_modules()}

    def _set_up(self, owner: Any, stage: str) -> None:
        """Call `prepare_data` and `setup` for `stage`: of `owner`, which has the data, of the module, and of the callbacks."""
        if data.transfers(owner) and not self.moves_batches:
            raise ConfigurationError(
                f"{type(owner).__name__} has hooks for the transfer of batches; pass it as adapt(module, datamodule=...)"
            )
        if owner is self.lightning:
            data.prepare([owner])
        else:
            owner.trainer = self.view
            data.prepare([owner, self.lightning])
            owner.setup(stage)
        self.hooks("setup", stage)

    def _moved(self, batch: Any, number: int = 0) -> Any:
        """`batch` after the transfer hooks: of each the data module's, else the module's."""
        owners = [owner for owner in (self.view.datamodule, self.lightning) if data.transfers(owner)]
        return data.transferred(owners, batch, self.device, number) if owners else batch

    # -- optimizers -----------------------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        """The result of the module's `configure_optimizers`, in the form that fabricate takes."""
        where = f"{type(self.lightning).__name__}.configure_optimizers"
        configured = optimizers.read(where, self._original().configure_optimizers())
        self.optimizers, self.schedulers = configured.optimizers, configured.schedulers
        self._at_epoch_end = configured.at_epoch_end()
        answer = optimizers.for_fabricate(
            configured, self._due, self._advance if overrides(self.lightning, "lr_scheduler_step") else None
        )
        return answer[0] if len(answer) == 1 else answer

    def _original(self) -> Any:
        """The user's module; for a copy on the meta device, which the plan makes, a module with the copy's parameters."""
        if self._parameters is self.lightning._parameters:
            return self.lightning
        shadow = object.__new__(type(self.lightning))
        shadow.__dict__.update(self.lightning.__dict__)
        for table in ("_parameters", "_buffers", "_modules"):
            shadow.__dict__[table] = self.__dict__[table]
        return shadow

    def _due(self, config: optimizers.SchedulerConfig) -> bool:
        progress = self.trainer.progress
        return (progress.micro_step if config.interval == "step" else progress.epoch) % config.frequency == 0

    def _advance(self, scheduler: Any, metric: Any) -> None:
        if overrides(self.lightning, "lr_scheduler_step"):
            self.hooks.of_module("lr_scheduler_step", scheduler, metric)
        else:
            optimizers.advance_by(scheduler, metric)

    def _advance_others(self, epoch: int) -> None:
        """Advance the schedulers that fabricate does not advance. At the end of an epoch, after its hooks."""
        metrics = self.view.callback_metrics
        for config in self._at_epoch_end:
            if (epoch + 1) % config.frequency:
                continue
            if not config.reduce_on_plateau:
                self._advance(config.scheduler, None)
            elif config.monitor not in metrics:
                text = (
                    f"{type(config.scheduler).__name__} needs the metric {config.monitor!r}, but the logged metrics are "
                    f"{', '.join(metrics) or 'none'}"
                )
                if config.strict:
                    raise ConfigurationError(f"{text}; name one of these as 'monitor'")
                self.print(f"{text}; the learning rate is not changed")
            else:
                self._advance(config.scheduler, metrics[config.monitor])

    def total_steps(self) -> float:
        """Updates of the whole fit; infinite where that is not known."""
        if not hasattr(self, "trainer"):  # in `setup`, before the fit has opened its data
            return self._total_steps_ahead()
        try:
            return self.trainer.total_steps
        except ConfigurationError:
            return math.inf

    def _total_steps_ahead(self) -> float:
        view = self.view
        if view.loaders.get("train") is None:
            owner = self.lightning if view.datamodule is None else view.datamodule
            view.loaders["train"] = data.training(owner, None)
        batches = view.num_training_batches
        per_epoch = batches if batches == math.inf else -(-batches // view.accumulate_grad_batches)
        by_epochs = math.inf if view.max_epochs == -1 else per_epoch * view.max_epochs
        return min(by_epochs, math.inf if view.max_steps == -1 else view.max_steps)

    def stepping_optimizers(self) -> list[Any]:
        """The optimizers that `self.optimizers()` returns."""
        return list(self.optimizers)

    def run_backward(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """Raise `ConfigurationError`; `Manual` runs backward, with manual optimization."""
        raise ConfigurationError("manual_backward: set self.automatic_optimization = False in __init__")

    # -- steps ----------------------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Call the module's `training_step`, and return the loss in its output."""
        self.batch_idx = batch_idx
        logs = self.view.logs
        logs.hook = "training_step"
        output = self._train(batch, batch_idx)
        logs.hook = ""
        if self.keeps_output:
            self.output = self._outputs(output)
        return self._loss_in(output, batch)

    def _outputs(self, output: Any) -> Any:
        """What on_train_batch_end gets for what a training step returned, without the graph: always a mapping. As Lightning documents, the
        loss is divided by accumulate_grad_batches, and stays as it is with manual optimization."""
        if output is None:
            return {}
        outputs = detached({"loss": output} if isinstance(output, torch.Tensor) else output)
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if isinstance(loss, torch.Tensor) and self.lightning.automatic_optimization:
            outputs["loss"] = loss / self.view.accumulate_grad_batches
        return outputs

    def _loss_in(self, output: Any, batch: Any) -> Any:
        """The loss in what the module's step returned for `batch`."""
        if isinstance(output, Mapping) and "loss" not in output:
            raise ConfigurationError(
                f"{type(self.lightning).__name__}.training_step returned a mapping without 'loss' ({', '.join(map(str, output))}); add it, "
                "or set self.automatic_optimization = False"
            )
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            return self._skipped(data.rows_or_one(batch))
        return loss.reshape(()) if isinstance(loss, torch.Tensor) and loss.ndim and loss.numel() == 1 else loss

    def _skipped(self, rows: int) -> torch.Tensor:
        """A loss that depends on no parameter, for a step that returned None: the batch counts in the mean of the update, as in Lightning.
        It is a cross-entropy of a label for each row, so that it can be averaged with losses that are weighted by labels."""
        if self.view.world_size > 1 or self.trainer.progress.micro_step == self.trainer.progress.step == 0:
            why = "on several ranks" if self.view.world_size > 1 else "for the first batch of a fit"
            raise ConfigurationError(
                f"{type(self.lightning).__name__}.training_step returned None {why}; return the loss"
            )
        return cross_entropy(
            torch.zeros(rows, 1, device=self.device, requires_grad=True),
            torch.zeros(rows, dtype=torch.long, device=self.device),
        )

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Call the module's `validation_step`."""
        return self._evaluated("validate", batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Call the module's `test_step`."""
        return self._evaluated("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Call the module's `predict_step`, or its forward without one."""
        return self._evaluated("predict", batch)

    def _evaluated(self, stage: str, batch: Any) -> Any:
        logs = self.view.logs
        logs.hook = f"{WORDS[stage]}_step"
        self.output = self._steps[stage](self._batch, self.batch_idx, self._number)
        logs.hook = ""
        return self.output if stage == "predict" else {"weight": 1}

    # -- hooks of a fit -----------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer) -> None:
        self._train = _with_arguments(self.lightning, "training_step", 2)
        self._begin_run("fit")
        differences.report(self, trainer)
        self.hooks("on_fit_start")
        self._saved.remember()

    def _begin_run(self, function: str) -> None:
        stages = [
            stage for stage in WORDS if function in ("fit", stage) and overrides(self.lightning, f"{WORDS[stage]}_step")
        ]
        if function == "predict":
            stages = ["predict"]
        self._steps: dict[str, Callable[..., Any]] = {
            stage: _with_arguments(self.lightning, f"{WORDS[stage]}_step", 3) for stage in stages
        }

    def on_epoch_start(self, trainer: Trainer) -> None:
        if not self._trained_before:
            self._trained_before = True
            self.hooks("on_train_start")
        self._epoch_began = self._in_epoch = True
        if not trainer.progress.position:  # otherwise a resumed run continues within the epoch
            self.hooks("on_train_epoch_start")

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        logs, world_size = self.view.logs, self.view.world_size
        settled = logs.settle(trainer.metrics, self.lightning, world_size)
        self.hooks.of_callbacks("on_train_epoch_end", monitoring=False)
        self.hooks.of_module("on_train_epoch_end")
        settled |= logs.settle({}, self.lightning, world_size)
        logs.reset()
        self.hooks.of_callbacks("on_train_epoch_end", monitoring=True)
        self._advance_others(epoch)
        for name, value in settled.items():
            self.record(name, value)
        self._to_loggers(settled, trainer.step, epoch)
        self._in_epoch = False

    def on_preempt(self) -> None:
        self._in_epoch = False  # the epoch continues in a later fit

    def on_fit_end(self, trainer: Trainer) -> None:
        cut_short, self._in_epoch = self._in_epoch, False
        if cut_short:  # Lightning ends an epoch that max_steps or a callback cuts short
            self.hooks("on_train_epoch_end")
        self.view.passes = trainer.progress.epoch + cut_short
        self.hooks("on_train_end")
        self.hooks("on_fit_end")

    def on_exception(self, exception: BaseException) -> None:
        self.hooks.of_callbacks("on_exception", exception)
        if self.view.datamodule is not None and overrides(self.view.datamodule, "on_exception"):
            self.view.datamodule.on_exception(exception)

    def on_teardown(self) -> None:
        if self.view.datamodule is not None and hasattr(self.view.datamodule, "teardown"):
            self.view.datamodule.teardown(self.view.function)
        self.hooks("teardown", self.view.function)
        self.view.evaluation = ""

    # -- hooks of an evaluation -----------------------------------------------------------------------------------------------------

    def on_eval_start(self, trainer: Trainer, stage: str) -> None:
        view, word = self.view, WORDS[stage]
        if view.function != "fit":
            self._begin_run(view.function)
        view.evaluation = stage
        view.logs.begin_evaluation()
        view.sanity_checking = view.function == "fit" and not self._epoch_began and not trainer.settings.validate_first
        self._before = self.batch_idx, dict(view.logs.callback_metrics), dict(view.logs.logged_metrics)
        self._data_set, self._found = None, {}
        if stage == "predict":
            loaders = view.loaders[stage]
            number = len(loaders) if isinstance(loaders, Mapping) else 1
            view.predict_loop.begin(number, view.called, bool(self.returns_predictions))
        if view.sanity_checking:
            self.hooks.of_callbacks("on_sanity_check_start")
        self.hooks(f"on_{word}_start")
        self.hooks(f"on_{word}_epoch_start")

    @hookimpl(wrapper=True)
    def eval_step(self, trainer: Trainer, batch: Any, stage: str) -> Generator[None, Any, Any]:
        if trainer.data_set != self._data_set:
            if self._data_set is not None and self.view.world_size == 1:  # several ranks would not do this together
                self._found |= self.view.logs.settle({}, self.lightning, 1)
            self._data_set, self.batch_idx = trainer.data_set, -1
        self.batch_idx += 1
        loaders, logs = self.view.loaders.get(stage), self.view.logs
        several = isinstance(loaders, Mapping) and len(loaders) > 1
        self._number = list(loaders).index(trainer.data_set) if several else 0  # type: ignore[arg-type]
        logs.suffix = f"/dataloader_idx_{self._number}" if several else ""
        self._batch = batch = self._moved(batch, self._number)
        logs.rows = lambda: data.rows_of(batch)
        logs.muted = not len(trainer.batch_indices)
        where = (batch, self.batch_idx, *([self._number] if several else []))
        if not logs.muted:
            if stage == "predict":
                self.view.predict_loop.batch(self._number, trainer.batch_indices)
            self.hooks(f"on_{WORDS[stage]}_batch_start", *where)
        answer = yield
        if not logs.muted:
            self.hooks(f"on_{WORDS[stage]}_batch_end", self.output, *where)
            if stage == "predict":
                self.view.predict_loop.keep(self._number, self.output)
        if stage == "predict" and self.returns_predictions is not None:
            answer = ()  # so that fabricate keeps nothing
        self.output, self._batch, logs.muted, logs.suffix = None, None, False, ""
        return answer

    def on_eval_end(self, trainer: Trainer, stage: str, metrics: dict[str, float]) -> None:
        view, word, logs = self.view, WORDS[stage], self.view.logs
        settled = self._found | logs.settle({}, self.lightning, view.world_size)
        self.hooks(f"on_{word}_epoch_end")
        settled |= logs.settle({}, self.lightning, view.world_size)
        logs.reset()
        metrics |= settled
        if not view.sanity_checking:
            self._to_loggers(settled, view.global_step, view.current_epoch)
        self.hooks(f"on_{word}_end")
        if view.sanity_checking:
            self.hooks.of_callbacks("on_sanity_check_end")
            _, logs.callback_metrics, logs.logged_metrics = self._before
        self.batch_idx, view.sanity_checking, view.evaluation = self._before[0], False, ""
        logs.end_evaluation()

    def _to_loggers(self, metrics: dict[str, float], step: int, epoch: int) -> None:
        """Give `metrics` to the user's loggers, which write on rank 0."""
        for logger in self.view.loggers if metrics else ():
            logger.log_metrics({**metrics, "epoch": epoch}, step)
            logger.save()

    def on_saved(self, path: Path) -> None:
        saved(self.view.checkpoint_callbacks, path)

    # -- checkpoints --------------------------------------------------------------------------------------------------------------

    def on_save(self, trainer: Trainer, state: MutableMapping[str, Any]) -> None:
        self._saved.fill(state, trainer)

    def on_load(self, trainer: Trainer, state: MutableMapping[str, Any]) -> None:
        self._saved.take(state, trainer)

    def on_load_weights(self, state: MutableMapping[str, Any]) -> None:
        give_added(self.lightning, state)


def _with_arguments(module: Any, step: str, most: int) -> Callable[..., Any]:
    """A step of the module as a function of the batch, its number and the number of the data set, of which it uses as many as it takes."""
    function = getattr(module, step)
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.name == "dataloader_iter" for p in parameters):
        raise ConfigurationError(
            f"{type(module).__name__}.{step}(dataloader_iter): the loop reads the data; take (batch, batch_idx)"
        )
    if any(p.name == "optimizer_idx" for p in parameters):
        raise ConfigurationError(
            f"{type(module).__name__}.{step} takes optimizer_idx, which Lightning 2 does not pass either; use manual optimization"
        )
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = most if any(p.kind is p.VAR_POSITIONAL for p in parameters) else min(most, len(positional))
    return lambda *arguments: function(*arguments[:taken])
