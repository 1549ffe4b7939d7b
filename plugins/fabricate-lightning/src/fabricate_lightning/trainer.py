"""A Trainer with Lightning's arguments and methods, which runs modules under fabricate: a script changes the import of its Trainer.

Must not know: how a module is adapted (`adapter`), what its arguments become (`arguments`, `callbacks`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from torch.distributed.tensor import DTensor

import fabricate
from fabricate import ConfigurationError, FitResult
from fabricate_lightning import arguments, checkpoints
from fabricate_lightning.adapter import Adapted
from fabricate_lightning.adapting import adapt, with_own
from fabricate_lightning.callbacks import Translated, translated
from fabricate_lightning.data import is_datamodule, processes
from fabricate_lightning.kinds import overrides, package
from fabricate_lightning.view import TrainerView


class Trainer(TrainerView):
    """Lightning's Trainer, as far as it has a counterpart in fabricate. All arguments are keyword-only and mean the same as in Lightning; a
    value that has no counterpart is a `ConfigurationError` that names it. The differences of a fit from Lightning are printed before its
    first step.

    A launcher starts the processes (`fabricate run script.py --nproc N`). A run writes where Lightning's loggers do
    (`lightning_logs/version_0`), or into the `dirpath` of a ModelCheckpoint or `default_root_dir`; `fit(ckpt_path="last")` continues from
    there.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        logger: Any = None,
        callbacks: Any = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: Any = None,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        limit_test_batches: float | None = None,
        limit_predict_batches: float | None = None,
        overfit_batches: float = 0.0,
        val_check_interval: Any = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Any = None,
        deterministic: Any = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Any = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: Any = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: Any = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self._given = given
        self.autolog_hparams = enable_autolog_hparams
        self.callbacks = (
            list(callbacks) if isinstance(callbacks, Iterable) else [callbacks] if callbacks is not None else []
        )
        self._loggers: list[Any] | None = None
        self._result: FitResult | None = None
        self._settings = arguments.translated(given, self.world_size)
        self.core = self._make(translated(self.callbacks), None)

    @property
    def loggers(self) -> list[Any]:
        """The loggers that were given; by default a TensorBoardLogger, or a CSVLogger if TensorBoard is not installed."""
        if self._loggers is None:
            self._loggers = self._make_loggers()
        return self._loggers

    @loggers.setter
    def loggers(self, loggers: Iterable[Any]) -> None:
        self._loggers = list(loggers) or None if not hasattr(self, "_given") else list(loggers)

    def _make_loggers(self) -> list[Any]:
        logger = self._given["logger"]
        if self._given["fast_dev_run"] or logger is False:
            return []
        if logger in (None, True):
            name = "lightning.pytorch" if "lightning" in sys.modules else "pytorch_lightning"
            kinds = importlib.import_module(f"{name}.loggers")
            kind = kinds.TensorBoardLogger if importlib.util.find_spec("tensorboard") else kinds.CSVLogger
            return [kind(save_dir=os.fspath(self._given["default_root_dir"] or os.getcwd()))]
        return list(logger) if isinstance(logger, Iterable) else [logger]

    # -- running ------------------------------------------------------------------------------------------------------------------

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> FitResult:
        """Train `model`, a LightningModule, as it is. All ranks.

        ckpt_path: None starts over (an earlier run is moved aside); "last" continues from the newest checkpoint of the run, or begins; the
        path of a checkpoint continues from there. Of a `.ckpt` file of Lightning's the weights are taken, and nothing else.
        """
        if is_datamodule(train_dataloaders):
            train_dataloaders, datamodule = None, train_dataloaders
        translation = self._take(model, datamodule)
        run_dir = self._run_dir(translation)
        if run_dir is None and ckpt_path == "last":
            raise ConfigurationError(
                "fit(ckpt_path='last'): this run has no directory to write to; give default_root_dir, or a ModelCheckpoint with "
                "dirpath"
            )
        self.core = self._make(translation, run_dir)
        assert self.adapted is not None
        if ckpt_path is None and self._result is not None:
            self.notes.append(
                "this Trainer has run a fit before: this one begins at step 0, with new optimizers; Lightning goes on counting from "
                "there, and trains nothing if max_epochs is reached"
            )
        if ckpt_path == "last" and run_dir is not None and not any((run_dir / "checkpoints").glob("*")):
            self.notes.append(f"fit(ckpt_path='last'): {run_dir} has no checkpoint, so the fit begins at step 0")
        resume = {None: "never", "last": "auto"}.get(ckpt_path, ckpt_path)
        if resume == "best":
            raise ConfigurationError(
                "fit(ckpt_path='best'): fit cannot look up the best checkpoint; give its path, "
                "trainer.checkpoint_callback.best_model_path"
            )
        if Path(resume).is_file():
            checkpoints.load_weights(self.adapted.lightning, resume)
            self.notes.append(f"only the weights of {resume} are loaded: the fit begins at step 0, with new optimizers")
            resume = "never"
        self._result = self.core.fit(self.adapted, train_dataloaders, val_dataloaders, resume=resume)
        for checkpoint in self.checkpoint_callbacks if self._result.best_checkpoint is not None else ():
            if checkpoint.monitor is not None:
                checkpoint.best_model_path = str(self._result.best_checkpoint)
        return self._result

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """The metrics of each validation set. All ranks. ckpt_path: weights to load first: "best", "last", a path, or a `.ckpt` file of
        Lightning's."""
        return self._evaluate("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: Any = None,
        verbose: bool = True,
        datamodule: Any = None,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """The metrics of each test set, computed by `test_step`; arguments as for `validate`. All ranks."""
        return self._evaluate("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        return_predictions: bool | None = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> list[Any] | None:
        """The outputs of `predict_step` for each batch of this rank, on the CPU; for several data sets, a list for each. All ranks."""
        adapted, data = self._prepare(model, dataloaders, datamodule)
        adapted.returns_predictions = return_predictions is not False
        with checkpoints.imported(self._checkpoint(ckpt_path)) as checkpoint:
            self._core.predict(adapted, data, checkpoint)
        return self.predict_loop.predictions if adapted.returns_predictions else None

    def _evaluate(
        self, stage: str, model: Any, dataloaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        adapted, data = self._prepare(model, dataloaders, datamodule)
        if ckpt_path is None and model is None and self._result is not None and self._result.best_checkpoint:
            ckpt_path = "best"
        with checkpoints.imported(self._checkpoint(ckpt_path)) as checkpoint:
            metrics = getattr(self._core, stage)(adapted, data, checkpoint)
        for name, value in metrics.items() if verbose and self.is_global_zero else ():
            print(f"{name}: {value:g}")
        loaders = self.loaders.get(stage)
        if not isinstance(loaders, Mapping):
            return [dict(metrics)]
        suffixes = tuple(f"/{name}" for name in loaders)
        others = {name: value for name, value in metrics.items() if not name.endswith(suffixes)}
        return [{n: v for n, v in metrics.items() if n.endswith(suffix)} | others for suffix in suffixes]

    def _checkpoint(self, ckpt_path: Any) -> Any:
        """`ckpt_path`, with "last" in place of "best" if no ModelCheckpoint has a monitor: for Lightning, the last one is then the best."""
        kept = self.checkpoint_callbacks
        return "last" if ckpt_path == "best" and kept and all(each.monitor is None for each in kept) else ckpt_path

    @property
    def _core(self) -> fabricate.Trainer:
        assert self.core is not None
        return self.core

    def _prepare(self, model: Any, dataloaders: Any, datamodule: Any) -> tuple[Adapted, Any]:
        """The adapted module and the data of an evaluation."""
        if is_datamodule(dataloaders):
            dataloaders, datamodule = None, dataloaders
        if model is None and self.adapted is None:
            raise ConfigurationError("model=None: there was no fit or evaluation before; give a LightningModule")
        self._take(model if model is not None else self.lightning_module, datamodule or self.datamodule)
        assert self.adapted is not None
        return self.adapted, dataloaders

    def _take(self, model: Any, datamodule: Any) -> Translated:
        """Adapt `model`, and add its callbacks to those of this Trainer."""
        model = getattr(model, "lightning", model)
        own = model.configure_callbacks() if overrides(model, "configure_callbacks") else []
        self.callbacks = with_own(self.callbacks, own)
        translation = translated(self.callbacks)
        self.called, self.notes = translation.called, list(translation.notes)
        if self._has_sharded(model):
            self.datamodule = datamodule
        else:
            adapt(model, datamodule=datamodule, view=self)
        return translation

    def _has_sharded(self, model: Any) -> bool:
        """Whether an earlier fit or evaluation left the parameters of `model` sharded, so that its adapted module is needed again."""
        earlier = self.adapted is not None and self.adapted.lightning is model
        return earlier and any(isinstance(parameter, DTensor) for parameter in model.parameters())

    def _make(self, translation: Translated, run_dir: Path | None) -> fabricate.Trainer:
        """fabricate's Trainer for the arguments and callbacks."""
        settings = {**self._settings, "keep": 1, **translation.settings, "run_dir": run_dir}
        settings["plugins"] = [*self._settings["plugins"], *translation.plugins]
        clips = next((name for name in ("max_grad_norm", "max_grad_value") if settings.get(name)), None)
        if clips is not None and self.adapted is not None and self.adapted.clips:
            self.clipping = settings.pop(clips), clips.rpartition("_")[2]
        return fabricate.Trainer(**settings)

    def _run_dir(self, translation: Translated) -> Path | None:
        """The run directory, the same on every rank; None if nothing is written."""
        if self._given["enable_checkpointing"] is False or self._given["fast_dev_run"]:
            if translation.checkpoints and self._given["enable_checkpointing"] is False:
                raise ConfigurationError(
                    "Trainer(enable_checkpointing=False) and a ModelCheckpoint in callbacks; remove one"
                )
            return None
        directory = next((_directory_to(c) for c in translation.checkpoints if c.dirpath is not None), None)
        if directory is None and self.loggers:
            directory = _directory_of(self.loggers[0])
        directory = directory or self._given["default_root_dir"]
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            processes()
            directory = broadcast_object_list([directory])[0]
        if directory is None:
            self.notes.append(
                "nothing is saved: there is no logger, no default_root_dir and no ModelCheckpoint with dirpath"
            )
            return None
        if not translation.checkpoints and not self.checkpoint_callbacks:
            self.callbacks.append(
                importlib.import_module(f"{package(self.lightning_module)}.callbacks").ModelCheckpoint()
            )
        return Path(directory)

    def save_checkpoint(self, filepath: Any, weights_only: bool = False, storage_options: Any = None) -> None:
        """During a fit, write a checkpoint of fabricate to `filepath` at the next update boundary; after it, copy its last one there."""
        if self._is_running or weights_only or storage_options is not None:
            super().save_checkpoint(filepath, weights_only, storage_options)
        elif self._result is None or self._result.checkpoint is None:
            raise ConfigurationError(
                f"save_checkpoint({str(filepath)!r}): no fit has saved; give default_root_dir, or a logger, to save"
            )
        elif self.is_global_zero:
            shutil.copytree(self._result.checkpoint, filepath)


def _directory_of(logger: Any) -> str | None:
    """The directory to which Lightning writes with `logger`."""
    if logger.save_dir is None:
        return None
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(logger.save_dir, str(logger.name), version)


def _directory_to(checkpoint: Any) -> str:
    """The directory to which a ModelCheckpoint writes. After a fit, its `dirpath` is the folder of the checkpoints of that run."""
    folder = Path(checkpoint.dirpath)
    of_a_run = checkpoint.last_model_path and Path(checkpoint.last_model_path).parent == folder
    return str(folder.parent if of_a_run else folder)
