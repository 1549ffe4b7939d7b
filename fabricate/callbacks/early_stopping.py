"""Stop a fit whose validation metric no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fabricate.errors import CheckpointError, ConfigurationError
from fabricate.hooks import Callback, hookimpl
from fabricate.values import metric_mode

if TYPE_CHECKING:
    from collections.abc import Collection, MutableMapping

    from fabricate.trainer import Trainer


class EarlyStopping(Callback):
    """Stops the fit after `patience` validations in a row without an improvement of more than `min_delta`. With `min_delta=0`, a
    relative difference of 1e-6 is not an improvement, because rounding causes such differences.

    metric: a name as logged ("val_loss"); mode: "min" or "max"; unset: "min", and an error for a metric whose name suggests "max". A value
    that is not finite counts as no improvement. If a run that was stopped is resumed, it stops again at once.
    monitor: Lightning's name for `metric`.

        Trainer(plugins=[EarlyStopping("val_loss", patience=3)], ...)
    """

    def __init__(
        self,
        metric: str = "val_loss",
        *,
        patience: int = 3,
        mode: str | None = None,
        min_delta: float = 0.0,
        monitor: str | None = None,
    ) -> None:
        metric = metric if monitor is None else monitor
        mode = metric_mode(f"EarlyStopping({metric!r})", metric, mode)
        if not isinstance(patience, int) or patience < 1 or min_delta < 0:
            raise ConfigurationError(
                f"EarlyStopping(patience={patience!r}, min_delta={min_delta!r}): give a whole number of at least 1 "
                "for patience and a number of at least 0 for min_delta"
            )
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self._worst = math.inf if mode == "min" else -math.inf
        self.best = self._worst
        self.waited = 0
        self._fitting = False
        """Whether a fit runs: other validations do not count."""

    def on_fit_start(self, trainer: Trainer) -> None:
        if not trainer.validates:
            raise ConfigurationError(
                f"EarlyStopping(metric={self.metric!r}): this fit runs no validation. Pass val= to fit, "
                "and set validate_every to an interval that is shorter than the fit"
            )
        # Each fit starts without state. If it resumes, on_load sets the state afterwards.
        self.best, self.waited, self._fitting = self._worst, 0, True

    def on_fit_end(self) -> None:
        self._fitting = False

    def on_epoch_start(self, trainer: Trainer) -> None:
        if recorded := trainer.validation_metrics:
            self._check(recorded)

    def _check(self, recorded: Collection[str]) -> None:
        if self.metric not in recorded:
            raise ConfigurationError(
                f"EarlyStopping(metric={self.metric!r}): validation recorded "
                f"{', '.join(sorted(recorded)) or 'no metrics'}, and not this one. Give the name of a recorded metric"
            )

    @hookimpl(trylast=True)  # after plugins that add metrics
    def on_eval_end(self, trainer: Trainer, stage: str, metrics: dict[str, float]) -> None:
        if stage != "validate" or not self._fitting:
            return
        self._check(metrics)
        value = metrics[self.metric]
        gain = self.best - value if self.mode == "min" else value - self.best
        # A mean of float32 numbers differs by rounding between batches; such a difference is no improvement.
        if gain > self.min_delta and (self.min_delta or not math.isclose(value, self.best, rel_tol=1e-6)):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        if self.waited >= self.patience:
            trainer.stop(
                f"early stopping: {self.metric} has not improved on {self.best:g} in {self.waited} validations"
            )

    def on_save(self, state: MutableMapping[str, Any]) -> None:
        state.update(best=self.best, waited=self.waited, metric=self.metric, mode=self.mode)

    def on_load(self, trainer: Trainer, state: MutableMapping[str, Any]) -> None:
        then = state.get("metric", self.metric), state.get("mode", self.mode)
        if then != (self.metric, self.mode):  # states of several EarlyStopping plugins are assigned by order
            raise CheckpointError(
                f"EarlyStopping(metric={self.metric!r}, mode={self.mode!r}): the state in the checkpoint is that of EarlyStopping("
                f"metric={then[0]!r}, mode={then[1]!r}). List the plugins in the same order, with the same metrics, or start over with "
                "resume='never'"
            )
        self.best, self.waited = state["best"], state["waited"]
        self._stop(trainer)  # if the run was stopped before, a resume must not continue it
