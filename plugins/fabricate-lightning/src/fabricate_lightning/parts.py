"""The classes that only some adapted modules need: hooks around batches, their own gradient clipping and their own updates. The loop calls
these hooks only for modules that have them.

Must not know: which module has which part (`adapting`).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from fabricate import ConfigurationError, Trainer, hookimpl
from fabricate_lightning import data
from fabricate_lightning.adapter import Adapted
from fabricate_lightning.callbacks import monitored, named_groups
from fabricate_lightning.kinds import is_a, overrides


class WithModel(Adapted):
    """For a module that builds layers in `configure_model`."""

    def configure_model(self) -> None:
        self._original().configure_model()
        self.remember_modes()


class WithLoggers(Adapted):
    """For a module whose values are also written to Lightning's loggers."""

    _status = "success"

    def on_fit_start(self, trainer: Trainer) -> None:
        owners = (self.view.datamodule, self.lightning) if self.view.autolog_hparams else ()
        hparams = {name: value for owner in owners for name, value in dict(getattr(owner, "hparams", {})).items()}
        written = {
            name: value
            for name, value in hparams.items()
            if isinstance(value, str | int | float | list | tuple | dict | None)
        }
        for logger in self.view.loggers:
            logger.log_hyperparams(written)
            logger.save()
        super().on_fit_start(trainer)

    def on_log(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        rates: dict[str, float] = {}
        for callback in self.view.callbacks:
            if is_a(callback, "LearningRateMonitor"):
                rates |= monitored(callback, named_groups(self.optimizers, self.schedulers))
        of_steps = {name: value for name, value in metrics.items() if name not in self.view.logs.not_of_steps}
        self._to_loggers({**of_steps, **rates}, step, trainer.epoch)

    def on_exception(self, exception: BaseException) -> None:
        self._status = "failed"
        super().on_exception(exception)

    def on_teardown(self) -> None:
        super().on_teardown()
        for logger in self.view.loggers:
            logger.finalize(self._status)


class WithBatchHooks(Adapted):
    """For a module, or callbacks, with hooks around each training batch or its transfer."""

    moves_batches = True

    _in_window = False

    def __init__(self, **hparams: Any) -> None:
        super().__init__(**hparams)
        self.keeps_output = self.hooks.listened(("on_train_batch_end",))

    @hookimpl(wrapper=True)
    def train_step(self, trainer: Trainer, batch: Any) -> Generator[None, Any, Any]:
        self.batch_idx, self._batch = trainer.progress.micro_step, self._moved(batch)
        where = self._batch, self.batch_idx
        self.hooks.of_callbacks("on_train_batch_start", *where)
        if self.hooks.of_module("on_train_batch_start", *where) == -1:
            raise ConfigurationError(
                f"{type(self.lightning).__name__}.on_train_batch_start returned -1, which skips the rest of an epoch and is not "
                "supported. End the data there instead (limit_train_batches, or a sampler), so that every rank does the same"
            )
        answer = yield
        if self.lightning.automatic_optimization:  # otherwise the module calls backward itself
            for optimizer in () if self._in_window else self.optimizers:
                self.hooks("on_before_zero_grad", optimizer)
            self._in_window = True
            self.hooks("on_before_backward", answer)
        return answer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self._batch, batch_idx)

    def on_accumulate(self, batch: Any, weight: Any, is_last: bool) -> None:
        stand_in = isinstance(weight, int) and weight == 0
        self.view.logs.rows = lambda: 0 if stand_in else data.rows_of(batch)
        if self.lightning.automatic_optimization:
            self.hooks("on_after_backward")
        if not is_last:
            self._end_batch()

    def on_step(self) -> None:
        self._in_window = False
        self._end_batch()

    def on_step_skipped(self) -> None:
        self.on_step()

    def _end_batch(self) -> None:
        output, batch, self.output, self._batch = self.output, self._batch, None, None
        self.hooks("on_train_batch_end", output, batch, self.batch_idx)


class WithStepHook(Adapted):
    """For a module, or callbacks, that read gradients before the update, or clip them."""

    clips = True

    def on_before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.hooks("on_before_optimizer_step", optimizer)
        value, algorithm = self.view.clipping
        if overrides(self.lightning, "configure_gradient_clipping"):
            self.hooks.of_module("configure_gradient_clipping", optimizer, value, algorithm)
        else:
            self.view.clip_gradients(optimizer, value or 0, algorithm)


class WithOptimizerStep(Adapted):
    """For a module that makes the update itself."""

    def on_fit_start(self, trainer: Trainer) -> None:
        if trainer.precision.name == "fp16" or not trainer.strategy.exposes_gradients:
            raise ConfigurationError(
                f"{type(self.lightning).__name__}.optimizer_step steps the optimizer itself, but with "
                f"precision={trainer.precision.name!r} and strategy={trainer.strategy.name!r} only fabricate can do that; leave "
                "the method out, or use precision='bf16' and strategy='ddp'"
            )
        super().on_fit_start(trainer)

    @hookimpl
    def optimizer_step(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> bool:
        called = []
        handle = optimizer.register_step_post_hook(lambda *_: called.append(True))
        try:
            self.hooks.of_module("optimizer_step", trainer.epoch, self.batch_idx, optimizer, lambda: None)
        finally:
            handle.remove()
        if not called:
            raise ConfigurationError(
                f"{type(self.lightning).__name__}.optimizer_step did not call optimizer.step(closure=optimizer_closure); to skip "
                "updates, set accumulate_grad_batches or use manual optimization"
            )
        return True
