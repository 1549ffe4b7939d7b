"""Stochastic weight averaging: a fit ends with the mean of the weights at the ends of its last epochs."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from fabricate.callbacks.batch_norms import batch_norms, recomputed
from fabricate.errors import CheckpointError, ConfigurationError
from fabricate.hooks import Callback, hookimpl
from fabricate.values import Every

if TYPE_CHECKING:
    import torch

    from fabricate.module import TrainModule
    from fabricate.strategies.base import Strategy
    from fabricate.trainer import Trainer

_NAME = "StochasticWeightAveraging"


class StochasticWeightAveraging(Callback):
    """Averages the weights over the last part of a fit, in which the learning rate is `swa_lrs` (https://arxiv.org/abs/1803.05407). At the
    end, the average replaces the weights of the module; it is validated and exported to RUN_DIR/model/.

    swa_lrs: one rate for all parameter groups, or a list with one for each; in that part they override schedules.
    swa_epoch_start: the beginning of the part: an epoch, counted from 1, a share of the fit (0.8), or a number of updates ("2000 steps").
    annealing_epochs: the number of epochs, or of updates ("500 steps"), in which the rates change from their last values to `swa_lrs`; 0:
    at once.
    annealing_strategy: the form of this change, a cosine ("cos") or a line ("linear").
    average_every: how often the weights are added to the average: at the end of each epoch, or every so many updates ("100 steps").
    batch_norm_batches: when the fit is complete, the statistics of batch norm layers in train mode are computed again with the averaged
    weights: over one pass of the training data, or over this number of micro-batches per rank. Data without a length needs the number.

    The average is an additional copy of the trained weights, at least in float32; each rank averages the part that it holds. Checkpoints
    contain the average, so that a run resumes exactly. It needs exactly one optimizer. A strategy under which ranks hold different weights,
    and `load_best`, are errors.

        Trainer(max_epochs=10, plugins=[StochasticWeightAveraging(swa_lrs=1e-2)], ...)
    """

    averages_weights = True

    def __init__(
        self,
        swa_lrs: float | Sequence[float],
        swa_epoch_start: int | float | str | Every = 0.8,
        annealing_epochs: int | str | Every = 10,
        annealing_strategy: str = "cos",
        *,
        average_every: str | int | Every = "1 epoch",
        batch_norm_batches: int | None = None,
    ) -> None:
        self.swa_lrs = list(swa_lrs) if isinstance(swa_lrs, Sequence) else [swa_lrs]
        if not self.swa_lrs or not all(_is_number(rate) and rate > 0 for rate in self.swa_lrs):
            raise ConfigurationError(
                f"{_NAME}(swa_lrs={swa_lrs!r}): give a positive learning rate, or a list with one for each "
                "parameter group of the optimizer"
            )
        if annealing_strategy not in ("cos", "linear"):
            raise ConfigurationError(f"{_NAME}(annealing_strategy={annealing_strategy!r}): give 'cos' or 'linear'")
        self.swa_epoch_start = _start(swa_epoch_start)
        self.annealing_epochs = (
            None if annealing_epochs == 0 else _length("annealing_epochs", annealing_epochs, "epochs")
        )
        self.annealing_strategy = annealing_strategy
        self.average_every = _length("average_every", average_every, "steps")
        self.batch_norm_batches = batch_norm_batches
        self.averages = 0
        """The number of states of the weights in the average."""
        self._parts: dict[str, tuple[Strategy.Part, torch.Tensor]] = {}
        """By the name of each trained parameter: the part of it that this rank holds, and the average of this part."""
        self._began: dict[str, Any] | None = None
        """The step and the epoch at which the phase with `swa_lrs` began, and the learning rates before it."""

    @hookimpl(tryfirst=True)  # a plugin may save in this hook
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.averages, self._parts, self._began = 0, {}, None
        self._check(trainer, module)
        self._first = self._resolved(trainer)
        (optimizer,) = trainer.optimizers.values()
        if len(self.swa_lrs) not in (1, len(optimizer.param_groups)):
            raise ConfigurationError(
                f"{_NAME}(swa_lrs={self.swa_lrs}): the optimizer has {len(optimizer.param_groups)} parameter groups. Give one "
                "learning rate, or a list with one for each group"
            )
        trained = {id(parameter) for group in trainer.strategy.optimizer_groups(optimizer) for parameter in group}
        self._trained = [name for name, parameter in module.named_parameters() if id(parameter) in trained]

    def _check(self, trainer: Trainer, module: TrainModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigurationError(
                f"{_NAME}: the module has several optimizers ({', '.join(trainer.optimizers)}), and averaging needs exactly one. Remove "
                f"{_NAME}, or return one optimizer from configure_optimizers"
            )
        if trainer.settings.load_best:
            raise ConfigurationError(
                f"{_NAME} with load_best=True: a fit can end with the averaged weights or with those of its best checkpoint, not both. "
                "Remove one of the two"
            )
        if batch_norms(module):
            trainer.calibrate(self.batch_norm_batches)  # here it only checks that calibration will be possible

    def _resolved(self, trainer: Trainer) -> Every | None:
        """The number of complete epochs or updates after which the phase begins; None: at the start of the fit. Raises `ConfigurationError`
        if that is never reached."""
        start, settings = self.swa_epoch_start, trainer.settings
        if isinstance(start, float):
            if settings.max_epochs is None or settings.max_steps is not None:
                return _every("steps", int(start * trainer.total_steps))
            start = max(1, int(start * settings.max_epochs))
        moment = _every("epochs", start - 1) if isinstance(start, int) else start
        if moment is not None and not settings.fast_dev_run:
            limit = settings.max_steps if moment.unit == "steps" else settings.max_epochs
            if limit is not None and moment.amount >= limit:
                raise ConfigurationError(
                    f"{_NAME}(swa_epoch_start={start!r}) is never reached: the fit ends after {limit} "
                    f"{moment.unit}. Choose an earlier moment"
                )
        return moment

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._follow(trainer)

    @hookimpl
    def optimizer_step(self, trainer: Trainer) -> None:
        """Set the rates, after schedules that advance with a validation. Returns None, so that the next implementation runs the update."""
        self._set_rates(trainer)

    def on_step(self, trainer: Trainer, module: TrainModule, step: int) -> None:
        began, every = self._began, self.average_every
        if began is not None and every.unit == "steps" and (step - began["step"]) % every.amount == 0:
            self._average(trainer, module)
        self._follow(trainer)

    def on_epoch_end(self, trainer: Trainer, module: TrainModule, epoch: int) -> None:
        began, every = self._began, self.average_every
        if began is not None and every.unit == "epochs" and (epoch + 1 - began["epoch"]) % every.amount == 0:
            self._average(trainer, module)

    def _follow(self, trainer: Trainer) -> None:
        """Begin the phase with `swa_lrs` when it is due, and set the learning rates of the next update."""
        first = self._first
        if self._began is None and (first is None or _reached(trainer, first.unit) >= first.amount):
            (optimizer,) = trainer.optimizers.values()
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            self._began = {"step": trainer.step, "epoch": trainer.epoch, "rates": rates}
        self._set_rates(trainer)

    def _set_rates(self, trainer: Trainer) -> None:
        if self._began is None:
            return
        length, share = self.annealing_epochs, 1.0
        if length is not None:
            unit = "step" if length.unit == "steps" else "epoch"
            share = min(1.0, (_reached(trainer, length.unit) - self._began[unit]) / length.amount)
        if self.annealing_strategy == "cos":
            share = (1 - math.cos(math.pi * share)) / 2
        (optimizer,) = trainer.optimizers.values()
        wanted = self.swa_lrs * (len(optimizer.param_groups) if len(self.swa_lrs) == 1 else 1)
        for group, before, rate in zip(optimizer.param_groups, self._began["rates"], wanted, strict=True):
            group["lr"] = rate * share + before * (1 - share)

    def _average(self, trainer: Trainer, module: TrainModule) -> None:
        """Add the current weights to the average."""
        import torch

        self._allocate(trainer, module)
        averages = [average for _, average in self._parts.values()]
        weights = [part.memory.to(average.dtype) for part, average in self._parts.values()]
        self.averages += 1
        torch._foreach_lerp_(averages, weights, 1 / self.averages)

    def _allocate(self, trainer: Trainer, module: TrainModule) -> None:
        import torch

        for name in self._trained if not self._parts else ():
            part = trainer.strategy.local_part(module.get_parameter(name))
            self._parts[name] = (
                part,
                torch.zeros_like(part.memory, dtype=torch.promote_types(part.dtype, torch.float32)),
            )

    def on_complete(self, trainer: Trainer, module: TrainModule) -> None:
        if not self.averages:
            module.print(
                f"{_NAME}: the fit ended before averaging began, so the module keeps the weights of the last update"
            )
            return
        for part, average in self._parts.values():
            part.memory.copy_(average)
        trainer.strategy.after_load()
        if layers := batch_norms(module):
            with recomputed(layers, trainer):
                trainer.calibrate(self.batch_norm_batches)
        trainer.request_eval()

    def on_save(self, state: MutableMapping[str, Any]) -> None:
        state["settings"] = self._settings()
        state["began"], state["averages"] = self._began, self.averages
        state["average"] = {name: part.over(average) for name, (part, average) in self._parts.items()}

    def on_load(self, trainer: Trainer, module: TrainModule, state: MutableMapping[str, Any]) -> None:
        if state["settings"] != self._settings() and "plugins" not in trainer.settings.accept_changes:
            raise CheckpointError(
                f"{_NAME}: the checkpoint was saved with {state['settings']}, but this run has {self._settings()}. Give the same, or "
                "Trainer(accept_changes=('plugins',)) to continue with the new ones"
            )
        self._began, self.averages = state["began"], state["averages"]
        if self.averages:
            self._allocate(trainer, module)
        for name, (part, average) in self._parts.items():
            own = part.over(average)
            own.write(state["average"][name].flatten()[own.start : own.start + own.count])

    def _settings(self) -> dict[str, Any]:
        """The settings that a resumed run must not change."""
        return {
            "begins": str(self._first),
            "swa_lrs": self.swa_lrs,
            "annealing": [str(self.annealing_epochs), self.annealing_strategy],
            "average_every": str(self.average_every),
        }

    def on_teardown(self) -> None:
        self._parts = {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _start(value: Any) -> int | float | Every:
    """`swa_epoch_start`: the number of an epoch, a share of the fit below 1, or a number of updates."""
    if isinstance(value, str | Every):
        moment = Every.parse(f"{_NAME}(swa_epoch_start)", value)
        if moment.unit == "steps":
            return moment
    elif _is_number(value) and (0 <= value < 1 if isinstance(value, float) else value >= 1):
        return float(value) if isinstance(value, float) else int(value)
    raise ConfigurationError(
        f"{_NAME}(swa_epoch_start={value!r}): give the number of an epoch (1 or more), a share of the fit (0.8, for "
        "example), or a number of updates ('2000 steps')"
    )


def _length(name: str, value: Any, unit: str) -> Every:
    """A number of steps or whole epochs; an int counts `unit`."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return Every(**{unit: value})
    length = Every.parse(f"{_NAME}({name})", value)
    if length.unit not in ("steps", "epochs") or length.amount < 1:
        raise ConfigurationError(
            f"{_NAME}({name}={value!r}): give steps or whole epochs, such as '100 steps' or '1 epoch'"
        )
    return length


def _every(unit: str, amount: int) -> Every | None:
    return Every(**{unit: amount}) if amount else None


def _reached(trainer: Trainer, unit: str) -> int:
    """The number of updates applied so far, or the index of the current epoch, from 0."""
    return trainer.step if unit == "steps" else trainer.epoch
