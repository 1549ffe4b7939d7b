"""The trainer of adapted modules (`self.trainer`) and callbacks: the commonly used attributes of Lightning's Trainer, with values from
fabricate's. All others raise an AttributeError that names them.

Must not know: when hooks are called (`adapter`).
"""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from fabricate import ConfigurationError, FabricateError, Trainer
from fabricate_lightning.data import num_batches, processes
from fabricate_lightning.kinds import is_a
from fabricate_lightning.logs import Logs
from fabricate_lightning.predictions import Predictions

if TYPE_CHECKING:
    from fabricate_lightning.adapter import Adapted

STAGES = {"fit": "train", "validate": "validate", "test": "test", "predict": "predict"}


class TrainerView:
    """The part of Lightning's Trainer that modules, data modules and callbacks use."""

    barebones = False
    num_nodes = 1
    received_sigterm = False
    profiler = None
    accumulation_scheduler = None
    autolog_hparams = True
    """Whether loggers get the hyper-parameters when a fit begins."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []
        """All callbacks that were given."""
        self.called: list[Any] = []
        """The callbacks whose hooks are called; fabricate replaces the others."""
        self.loggers: list[Any] = []
        self.notes: list[str] = []
        """Differences from Lightning that the callbacks and arguments cause."""
        self.datamodule: Any = None
        self.logs = Logs()
        self.function = "fit"
        """The method that was called: "fit", "validate", "test" or "predict"."""
        self.evaluation = ""
        """The stage of the evaluation in progress; empty in training."""
        self.sanity_checking = False
        self.predict_loop = Predictions()
        """The outputs of the prediction in progress, or of the last one."""
        self.loaders: dict[str, Any] = {}
        """The data of the fit or evaluation, as the user gave it, by stage ("train", "validate", ...)."""
        self.clipping: tuple[float | None, str] = None, "norm"
        """The value and the algorithm with which the module, not fabricate, clips gradients."""
        self.core: Trainer | None = None
        """fabricate's Trainer."""
        self.passes: int | None = None
        """After a fit, the epochs that Lightning counts: also one that was cut short."""
        self._at: dict[str, int] = {}
        """From the start of an evaluation after the fit on, what the fit had counted."""
        self.adapted: Adapted | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"trainer.{name} is not available under fabricate, which runs this module; available are {', '.join(_public())}"
        )

    # -- the run ----------------------------------------------------------------------------------------------------------------

    def begin(self, trainer: Trainer, function: str) -> None:
        """`trainer` begins `function`. In an evaluation, step and epoch stay those of the fit before it, as in Lightning."""
        if function == "fit" or self.core is not trainer:
            self.passes = None
        self.core, self.function, self._at = trainer, function, {}
        self.evaluation = "" if function == "fit" else function
        if function != "fit":
            self._at = {"step": self.global_step, "epoch": self.current_epoch}

    @property
    def _fabricates(self) -> Trainer:
        if self.core is None:
            raise RuntimeError("this attribute is available only after fit, validate, test or predict was called")
        return self.core

    @property
    def _is_running(self) -> bool:
        return self.core is not None and self.core.running

    def device_of(self, default: torch.device) -> torch.device:
        """The device of the run in progress, `default` where there is none."""
        return self._fabricates.accelerator.device if self._is_running else default

    @property
    def lightning_module(self) -> Any:
        """The user's module."""
        return self.adapted.lightning if self.adapted is not None else None

    model = lightning_module

    @property
    def global_step(self) -> int:
        """Updates so far."""
        return self._counted("step")

    @property
    def current_epoch(self) -> int:
        """The pass in progress, from 0; after a fit, the number of those that began."""
        return self._counted("epoch") if self.passes is None else self.passes

    def _counted(self, name: str) -> int:
        if name in self._at:
            return self._at[name]
        try:
            return int(getattr(self.core, name)) if self.core is not None else 0
        except FabricateError:  # before the first fit
            return 0

    @property
    def world_size(self) -> int:
        """The number of processes."""
        if self._is_running:
            return int(self._fabricates.accelerator.num_processes)
        return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)

    num_devices = world_size

    @property
    def global_rank(self) -> int:
        """The number of this process."""
        if self._is_running:
            return int(self._fabricates.accelerator.process_index)
        return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)

    @property
    def local_rank(self) -> int:
        """The number of this process on this host."""
        return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)

    @property
    def node_rank(self) -> int:
        """The number of this host."""
        return int(os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK") or os.environ.get("SLURM_NODEID") or 0)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def should_stop(self) -> bool:
        """Whether a callback requested the end of the fit."""
        return self.adapted is not None and self.adapted.stopping

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and self.adapted is not None and not self.adapted.stopping:
            self.adapted.stopping = True
            if (
                self._fabricates.validates and self.logs.in_training_batch
            ):  # Lightning validates before it ends an epoch early
                self._fabricates.request_eval()
            self._fabricates.stop("trainer.should_stop")

    @property
    def strategy(self) -> StrategyView:
        """The part of Lightning's strategy that communicates with other ranks."""
        return StrategyView(self)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers."""
        return list(self.adapted.optimizers) if self.adapted is not None else []

    @property
    def stepping_optimizers(self) -> list[Any]:
        """The optimizers that `self.optimizers()` returns."""
        return self.adapted.stepping_optimizers() if self.adapted is not None else []

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedulers with Lightning's options."""
        return list(self.adapted.schedulers) if self.adapted is not None else []

    # -- where it is ------------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> SimpleNamespace:
        """`fn`: the method that was called; `stage`: the stage that runs."""
        stage = "sanity_check" if self.sanity_checking else self.evaluation or STAGES[self.function]
        return SimpleNamespace(fn=self.function, stage=stage, status="running" if self._is_running else "finished")

    @property
    def training(self) -> bool:
        """Whether the training of a fit is in progress."""
        return self.function == "fit" and not self.evaluation

    @property
    def validating(self) -> bool:
        """Whether a validation is in progress."""
        return self.evaluation == "validate" and not self.sanity_checking

    @property
    def testing(self) -> bool:
        """Whether a test is in progress."""
        return self.evaluation == "test"

    @property
    def predicting(self) -> bool:
        """Whether a prediction is in progress."""
        return self.evaluation == "predict"

    @property
    def evaluating(self) -> bool:
        """Whether a validation or a test is in progress."""
        return self.validating or self.testing

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is the last of the epoch."""
        return self.adapted is not None and self.adapted.batch_idx + 1 >= self.num_training_batches

    # -- metrics and loggers ----------------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """The last value of everything that was logged."""
        return self.logs.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """The last value of everything that is passed to loggers."""
        return self.logs.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The last value of everything with prog_bar=True."""
        return {name: float(value) for name, value in self.logs.progress_bar_metrics.items()}

    @property
    def logger(self) -> Any:
        """The first logger, None without one."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """The directory of the first logger, else the run directory."""
        folder = (
            getattr(self.logger, "log_dir", None) or getattr(self.logger, "save_dir", None) or self.default_root_dir
        )
        return str(folder)

    def take_logged(self, name: str, value: Any, **given: Any) -> None:
        """Record a value that was passed to `self.log`."""
        if self.adapted is None:
            raise ConfigurationError(f"self.log({name!r}): no fit or evaluation is in progress")
        self.logs.log(self.adapted.record, name, value, **given)

    # -- arguments --------------------------------------------------------------------------------------------------------------

    def _setting(self, name: str) -> Any:
        return getattr(self._fabricates.settings, name)

    @property
    def max_epochs(self) -> int:
        """The argument; -1 for no limit, 1 with `fast_dev_run`."""
        value = 1 if self.fast_dev_run else self._setting("max_epochs")
        return -1 if value is None else int(value)

    @property
    def max_steps(self) -> int:
        """The argument; -1 for no limit."""
        value = self._setting("max_steps")
        return -1 if value is None else int(value)

    @property
    def min_epochs(self) -> int:
        """The argument."""
        return int(self._setting("min_epochs") or 0)

    @property
    def min_steps(self) -> int | None:
        """The argument."""
        value: int | None = self._setting("min_steps")
        return value

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches per update."""
        if self._is_running:
            return int(self._fabricates.accelerator.gradient_accumulation_steps)
        return int(self._setting("gradient_accumulation_steps") or 1)

    @property
    def gradient_clip_val(self) -> float | None:
        """The norm or the value at which gradients are clipped."""
        value: float | None = self.clipping[0] or self._setting("max_grad_norm") or self._setting("max_grad_value")
        return value

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """The kind of `gradient_clip_val`: "norm" or "value"."""
        if self.clipping[0] is not None:
            return self.clipping[1]
        return "value" if self._setting("max_grad_value") is not None else "norm"

    @property
    def fast_dev_run(self) -> int:
        """The argument."""
        return int(self._setting("fast_dev_run"))

    @property
    def limit_train_batches(self) -> float:
        """The limit in force; 1.0 for none."""
        return self._limit("train")

    @property
    def limit_val_batches(self) -> float:
        """The limit in force; 1.0 for none."""
        return self._limit("val")

    @property
    def limit_test_batches(self) -> float:
        """The limit in force; 1.0 for none."""
        return self._limit("test")

    @property
    def limit_predict_batches(self) -> float:
        """The limit in force; 1.0 for none."""
        return self._limit("predict")

    def _limit(self, stage: str) -> float:
        """The limit in force: `fast_dev_run` and `overfit_batches` set it too."""
        if self.fast_dev_run and stage == "train":
            return self.fast_dev_run * self.accumulate_grad_batches
        value: float | None = self._setting("overfit_batches") if stage in ("train", "val") else None
        value = value or self._setting(f"limit_{stage}_batches")
        return 1.0 if value is None else value

    @property
    def overfit_batches(self) -> float:
        """The argument; 0 if not given."""
        return float(self._setting("overfit_batches") or 0)

    @property
    def enable_validation(self) -> bool:
        """Whether the fit validates."""
        return self.loaders.get("validate") is not None and self.limit_val_batches > 0

    @property
    def log_every_n_steps(self) -> int:
        """Updates between log boundaries."""
        every = self._setting("log_every")
        return int(every.amount) if every.unit == "steps" else 1

    @property
    def val_check_interval(self) -> float:
        """1.0 where every epoch, or every few, ends with a validation."""
        every = self._validated_every
        whole = every is None or (every.unit == "epochs" and every.amount >= 1)
        return 1.0 if whole else every.amount

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Epochs between validations; None where updates are counted."""
        every = self._validated_every
        if every is None or (every.unit == "epochs" and every.amount < 1):
            return 1
        return int(every.amount) if every.unit == "epochs" else None

    @property
    def _validated_every(self) -> Any:
        """The interval of fabricate's setting; None, which means each epoch, with `fast_dev_run`, whose updates are Lightning's epoch."""
        return None if self.fast_dev_run else self._setting("validate_every")

    @property
    def precision(self) -> str:
        """The precision, by fabricate's name."""
        return self._fabricates.precision.name if self._is_running else str(self._setting("precision"))

    @property
    def default_root_dir(self) -> str:
        """The run directory, else the working directory."""
        return str(self.core.run_dir if self.core is not None and self.core.run_dir is not None else os.getcwd())

    # -- data -------------------------------------------------------------------------------------------------------------------

    @property
    def estimated_stepping_batches(self) -> float:
        """The updates of the whole fit."""
        assert self.adapted is not None
        return self.adapted.total_steps()

    @property
    def num_training_batches(self) -> float:
        """Batches that this rank reads in an epoch; infinite where that is not known."""
        loader = self.loaders.get("train")
        if loader is None:
            return math.inf
        return num_batches(loader, self.world_size, self.limit_train_batches, training=True)

    @property
    def num_val_batches(self) -> list[float]:
        """Batches that this rank reads of each validation set."""
        return self._several("validate", self.limit_val_batches)

    @property
    def num_test_batches(self) -> list[float]:
        """Batches that this rank reads of each test set."""
        return self._several("test", self.limit_test_batches)

    @property
    def num_predict_batches(self) -> list[float]:
        """Batches that this rank reads of each prediction set."""
        return self._several("predict", self.limit_predict_batches)

    def _several(self, stage: str, limit: float) -> list[float]:
        loaders = self.loaders.get(stage)
        several = list(loaders.values()) if isinstance(loaders, dict) else [] if loaders is None else [loaders]
        return [num_batches(loader, self.world_size, limit) for loader in several]

    @property
    def train_dataloader(self) -> Any:
        """The loader that was given."""
        return self.loaders.get("train")

    @property
    def val_dataloaders(self) -> Any:
        """The loader that was given, or a list of several."""
        return self._listed("validate")

    @property
    def test_dataloaders(self) -> Any:
        """The loader that was given, or a list of several."""
        return self._listed("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The loader that was given, or a list of several."""
        return self._listed("predict")

    def _listed(self, stage: str) -> Any:
        loaders = self.loaders.get(stage)
        return list(loaders.values()) if isinstance(loaders, dict) else loaders

    # -- callbacks --------------------------------------------------------------------------------------------------------------

    def _callbacks(self, kind: str) -> list[Any]:
        return [callback for callback in self.callbacks if is_a(callback, kind)]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The ModelCheckpoint objects."""
        return self._callbacks("ModelCheckpoint")

    @property
    def checkpoint_callback(self) -> Any:
        """The first of `checkpoint_callbacks`, else None."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The EarlyStopping objects."""
        return self._callbacks("EarlyStopping")

    @property
    def early_stopping_callback(self) -> Any:
        """The first of `early_stopping_callbacks`, else None."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def progress_bar_callback(self) -> None:
        """None, because fabricate shows its own bar."""

    # -- what can be called -----------------------------------------------------------------------------------------------------

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0."""
        if self.is_global_zero:
            print(*values, **options)

    def save_checkpoint(self, filepath: Any, weights_only: bool = False, storage_options: Any = None) -> None:
        """Write a checkpoint of fabricate, a directory, to `filepath` at the next update boundary. All ranks."""
        if weights_only or storage_options is not None:
            raise ConfigurationError(
                "trainer.save_checkpoint: weights_only and storage_options have no counterpart here: the checkpoint holds everything that "
                "a resume needs. For the weights alone, use RUN_DIR/model/, or Trainer(save_weights_only=True) of fabricate"
            )
        self._fabricates.save(filepath)

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward of a loss, with manual optimization."""
        assert self.adapted is not None
        self.adapted.run_backward(loss, *args, **kwargs)

    def clip_gradients(self, optimizer: Any, value: float | None, algorithm: str | None) -> None:
        """Clip the gradients of `optimizer`; values that are None are those of the Trainer's arguments. All ranks."""
        value = self.gradient_clip_val if value is None else value
        algorithm = str(getattr(algorithm, "value", algorithm) or self.gradient_clip_algorithm or "norm").lower()
        if not value:
            return
        if algorithm not in ("norm", "value"):
            raise ConfigurationError(f"gradient_clip_algorithm={algorithm!r}: give 'norm' or 'value'")
        strategy = self._fabricates.strategy
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if algorithm == "value":
            strategy.clip_by_value(parameters, value)
        else:
            strategy.clip(parameters, value, strategy.grad_norm(parameters))


class StrategyView:
    """The part of `trainer.strategy` that modules and callbacks use."""

    def __init__(self, view: TrainerView) -> None:
        self._view = view
        self.global_rank, self.world_size, self.local_rank = view.global_rank, view.world_size, view.local_rank

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer.strategy.{name} is not available under fabricate, which runs this module")

    @property
    def _accelerator(self) -> Any:
        """The Accelerator of the run in progress; before the run a `PartialState`, which can wait and broadcast."""
        return self._view._fabricates.accelerator if self._view._is_running else processes()

    @property
    def root_device(self) -> torch.device:
        """The device of the batches."""
        device: torch.device = self._accelerator.device
        return device

    @property
    def model(self) -> Any:
        """The user's module."""
        return self._view.lightning_module

    lightning_module = model

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            self._accelerator.wait_for_everyone()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank `src`. All ranks."""
        if self.world_size == 1:
            return obj
        assert self._accelerator.num_processes == self.world_size  # connects the ranks
        return broadcast_object_list([obj], src)[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean or the sum of a tensor over the ranks. All ranks."""
        if self.world_size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        return self._accelerator.reduce(tensor, "mean" if str(reduce_op).lower() in ("mean", "avg") else "sum")

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any of them, decided so. All ranks."""
        if self.world_size == 1:
            return bool(decision)
        decisions = gather_object([bool(decision)])
        return bool(min(decisions) if all else max(decisions))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """The tensors of all ranks in a new first dimension; without it in one process. All ranks."""
        if self.world_size == 1:
            return tensor
        if sync_grads:
            raise ConfigurationError(
                "all_gather(sync_grads=True): gradients through gather are not supported here; leave sync_grads out"
            )
        gathered: torch.Tensor = self._accelerator.gather(tensor.detach()[None])
        return gathered


def _public() -> list[str]:
    return sorted(name for name in vars(TrainerView) if not name.startswith("_"))
