"""The learning rate range test: find the rates at which the loss falls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fabricate.callbacks.kept_state import kept_buffers
from fabricate.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from fabricate.errors import ConfigurationError
from fabricate.hooks import Callback, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from fabricate.module import TrainModule
    from fabricate.strategies.base import Strategy
    from fabricate.trainer import Trainer

SMOOTHING = 0.98
"""The decay of the moving average of the loss. The average starts at 0, which is corrected."""


class LearningRateFinder(Callback):
    """Turns a fit into a learning rate range test: `num_training_steps` updates with a rate that grows from `min_lr` to `max_lr`.

    mode: "exponential" or "linear" growth. early_stop_threshold: the fit ends when the smoothed loss exceeds this multiple of its lowest
    value; None: never. The rate is set in every parameter group and overrides schedules. Give the Trainer no `run_dir`, and at least
    `num_training_steps` updates.

    After the fit, `results` has the rates and the smoothed losses ("lr" and "loss", the mean over all ranks), `suggestion()` returns the
    rate at which the loss fell fastest, and the module has its previous weights and buffers: set the rate and fit it. On a GPU, each update
    waits for the loss.

        finder = LearningRateFinder(max_lr=1.0)
        Trainer(max_steps=100, plugins=[finder]).fit(module, train, batch_size=32)
        module.lr = finder.suggestion()
    """

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
    ) -> None:
        if not 0 < min_lr < max_lr:
            raise ConfigurationError(
                f"LearningRateFinder(min_lr={min_lr!r}, max_lr={max_lr!r}): give 0 < min_lr < max_lr"
            )
        if not isinstance(num_training_steps, int) or num_training_steps < 2:
            raise ConfigurationError(f"LearningRateFinder(num_training_steps={num_training_steps!r}): give 2 or more")
        if mode not in ("exponential", "linear"):
            raise ConfigurationError(f"LearningRateFinder(mode={mode!r}): give 'exponential' or 'linear'")
        if early_stop_threshold is not None and not early_stop_threshold > 1:
            raise ConfigurationError(
                f"LearningRateFinder(early_stop_threshold={early_stop_threshold!r}): give a number above 1, or None"
            )
        self.min_lr, self.max_lr, self.num_training_steps = min_lr, max_lr, num_training_steps
        self.mode, self.early_stop_threshold = mode, early_stop_threshold
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        self._mean = 0.0
        self._complete = False
        """Whether the test is done: all rates were tried, or the loss diverged at one of them."""
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        """This rank's memory of each weight, with a copy of its values before the test."""
        self._restore_buffers: Callable[[], None] | None = None

    def rate(self, update: int) -> float:
        """The learning rate of the update number `update`, from 0."""
        share = update / (self.num_training_steps - 1)
        if self.mode == "linear":
            return self.min_lr + (self.max_lr - self.min_lr) * share
        return float(self.min_lr * (self.max_lr / self.min_lr) ** share)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.run_dir is not None and not trainer.settings.fast_dev_run:
            raise ConfigurationError(
                f"LearningRateFinder: run_dir={str(trainer.run_dir)!r} is set, but a run must not resume from the weights of a range test. "
                "Use a Trainer without run_dir"
            )
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"LearningRateFinder: the module has several optimizers ({', '.join(trainer.optimizers)}), and a range test "
                "needs exactly one. Return one optimizer from configure_optimizers for the range test"
            )
        if any(isinstance(plugin, StochasticWeightAveraging) for plugin in trainer.settings.plugins):
            raise ConfigurationError(
                "LearningRateFinder: StochasticWeightAveraging sets learning rates of its own. Leave it out for the range test"
            )
        updates = _updates(trainer)
        if updates is not None and updates < self.num_training_steps and not trainer.settings.fast_dev_run:
            raise ConfigurationError(
                f"LearningRateFinder(num_training_steps={self.num_training_steps!r}): the fit has only {updates} updates, so it "
                f"would end before max_lr is tried. Set max_steps={self.num_training_steps}, or a smaller num_training_steps"
            )
        self.results, self._mean, self._complete = {"lr": [], "loss": []}, 0.0, False
        memories = [trainer.strategy.local_part(parameter).memory for parameter in module.parameters()]
        self._before = [(tensor, tensor.clone()) for tensor in memories]
        self._restore_buffers = kept_buffers(module)

    def on_epoch_start(self, trainer: Trainer) -> None:
        if trainer.step and not self.results["lr"]:
            raise ConfigurationError(
                f"LearningRateFinder: the fit resumes from a checkpoint at step {trainer.step}, but a range test has "
                "to begin at step 0. To start from the weights of the checkpoint, leave resume= out and fit "
                "module = Net.load_from_checkpoint(path)"
            )

    @hookimpl
    def optimizer_step(self, trainer: Trainer) -> None:
        """Set the rate after all schedules, also those that advance per epoch or validation. Returns None, so that the next implementation
        runs the update."""
        if not self._complete:
            self._set(trainer, trainer.step)

    def _set(self, trainer: Trainer, update: int) -> None:
        for optimizer in trainer.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = self.rate(update)

    def on_step(self, trainer: Trainer, step: int, loss: torch.Tensor) -> None:
        value = float(loss)
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * value
        smoothed = self._mean / (1 - SMOOTHING**step)
        lowest = min([*self.results["loss"], smoothed])
        grown = self.early_stop_threshold is not None and step > 1 and smoothed > self.early_stop_threshold * lowest
        if grown or not math.isfinite(smoothed):
            self._complete = True
            trainer.stop("learning rate finder: the loss diverged")
            return
        self.results["lr"].append(self.rate(step - 1))
        self.results["loss"].append(smoothed)
        if step >= self.num_training_steps:
            self._complete = True
            trainer.stop("learning rate finder: all rates were tried")
        else:
            self._set(trainer, step)

    @hookimpl(trylast=True)  # so that no other plugin puts weights of the test into the module afterwards
    def on_fit_end(self, trainer: Trainer) -> None:
        self._restore(trainer.strategy)

    @hookimpl(trylast=True)
    def on_teardown(self) -> None:
        self._restore(None)

    def _restore(self, strategy: Strategy | None) -> None:
        """Restore weights and buffers. `strategy`: its `after_load()` is called; None if other ranks may have ended."""
        import torch

        before, self._before = self._before, []
        restore_buffers, self._restore_buffers = self._restore_buffers, None
        if restore_buffers is not None:
            restore_buffers()
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        if before and strategy is not None:
            strategy.after_load()

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """The rate at which the smoothed loss fell fastest per logarithm of the rate, without the first and last updates. None if the test
        did not finish, or if fewer than two rates remain."""
        import numpy

        end = len(self.results["lr"]) - skip_end
        rates, losses = (self.results[name][skip_begin:end] for name in ("lr", "loss"))
        if not self._complete or len(rates) < 2:
            return None
        return rates[int(numpy.gradient(losses, numpy.log10(rates)).argmin())]


def _updates(trainer: Trainer) -> int | None:
    """The number of updates of the fit; None for data without a length."""
    try:
        return trainer.total_steps
    except ConfigurationError:
        return None
