"""Learning-rate schedules: those that have a name, when one advances, and what one says of its own length.

Must not know: which optimizers there are, the loop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from fabricate.errors import ConfigurationError


class Schedule:
    """A scheduler as `configure_optimizers` returned it, and when it advances: "step" (each applied update), "epoch", or
    the name of a metric (`ReduceLROnPlateau`, after each validation). `text` describes it in the plan."""

    def __init__(self, made: Any, advances: str, text: str) -> None:
        self.made = made
        self.advances = advances
        self.text = text

    @property
    def kind(self) -> str:
        """What has to be the same when a run is resumed."""
        return type(self.made).__name__ + ("" if self.advances == "step" else f" by {self.advances}")

    @property
    def metric(self) -> str | None:
        """The metric that it waits for."""
        return None if self.advances in ("step", "epoch") else self.advances

    def updated(self) -> None:
        """An update of its optimizer was applied."""
        if self.advances == "step":
            self.made.step()

    def epoch_ended(self) -> None:
        """A pass over the training data is complete."""
        if self.advances == "epoch":
            self.made.step()

    def measured(self, metrics: Mapping[str, float]) -> None:
        """A validation is complete; `ConfigurationError` when it gave no such metric as is waited for."""
        if self.metric is None:
            return
        if self.metric not in metrics:
            raise ConfigurationError(
                f"ReduceLROnPlateau needs {self.metric} and validation gave {', '.join(metrics) or 'nothing'}; return it from "
                "validation_step, or name another: (optimizer, scheduler, 'val_accuracy')"
            )
        self.made.step(metrics[self.metric])

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own, for a checkpoint."""
        state: dict[str, Any] = self.made.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.made.load_state_dict(state)


# -- by name: as transformers' schedules of these names, so that curves are comparable -----------------------------------


def constant(optimizer: torch.optim.Optimizer, total: int, warmup: float = 0) -> lr_scheduler.LambdaLR:
    """Up to the optimizer's learning rate over the first `warmup` updates (below 1: a share of `total`), and stays there."""
    rise = _updates("constant", "warmup", warmup, total)
    return lr_scheduler.LambdaLR(optimizer, lambda step: _rising(step, rise))


def linear(optimizer: torch.optim.Optimizer, total: int, warmup: float = 0) -> lr_scheduler.LambdaLR:
    """As `constant`, then down to nothing in a straight line."""
    rise = _updates("linear", "warmup", warmup, total)
    return lr_scheduler.LambdaLR(optimizer, lambda step: _rising(step, rise) * (1 - _progress(step, rise, total)))


def cosine(
    optimizer: torch.optim.Optimizer, total: int, warmup: float = 0, minimum: float = 0.0
) -> lr_scheduler.LambdaLR:
    """As `constant`, then down to the share `minimum` of the learning rate along half a cosine."""
    rise, floor = _updates("cosine", "warmup", warmup, total), _share("cosine", minimum)

    def factor(step: int) -> float:
        fallen = 0.5 * (1 + math.cos(math.pi * _progress(step, rise, total)))
        return _rising(step, rise) * (floor + (1 - floor) * fallen)

    return lr_scheduler.LambdaLR(optimizer, factor)


def wsd(
    optimizer: torch.optim.Optimizer, total: int, warmup: float = 0, decay: float = 0.2, minimum: float = 0.0
) -> lr_scheduler.LambdaLR:
    """Warm-up, stable, decay: as `constant`, then over the last `decay` updates (below 1: a share) in a straight line down to
    the share `minimum`."""
    rise, floor = _updates("wsd", "warmup", warmup, total), _share("wsd", minimum)
    start = total - _updates("wsd", "decay", decay, total)
    if start < rise:
        raise ConfigurationError(
            f"schedule 'wsd': warmup={warmup:g} and decay={decay:g} are more than all {total} updates"
        )

    def factor(step: int) -> float:
        return _rising(step, rise) * (1 - (1 - floor) * _progress(step, start, total))

    return lr_scheduler.LambdaLR(optimizer, factor)


NAMED: dict[str, Callable[..., lr_scheduler.LambdaLR]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "wsd": wsd,
}


def _rising(step: int, warmup: int) -> float:
    return step / warmup if step < warmup else 1.0


def _progress(step: int, start: int, end: int) -> float:
    """0 until `start`, 1 from `end` on."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))


def _updates(schedule: str, option: str, given: float, total: int) -> int:
    if not 0 <= given <= total or (given >= 1 and given != int(given)):
        raise ConfigurationError(
            f"schedule {schedule!r}: {option}={given:g}: give a share below 1, or a whole number of updates up to all {total}"
        )
    return int(given) if given >= 1 else math.ceil(given * total)


def _share(schedule: str, minimum: float) -> float:
    if not 0 <= minimum <= 1:
        raise ConfigurationError(
            f"schedule {schedule!r}: minimum={minimum:g}: give a share of the learning rate, 0 to 1"
        )
    return minimum


# -- the length that somebody worked out himself -------------------------------------------------------------------------


def own_lengths(made: Any, before: int = 0) -> Iterator[tuple[str, int]]:
    """How many times a scheduler says that it is advanced, as far as it shows: pairs of a name and a number. `before`: the
    advances until it takes over."""
    if isinstance(made, lr_scheduler.OneCycleLR):
        yield "total_steps", before + int(made.total_steps)
    elif isinstance(made, lr_scheduler.CosineAnnealingLR):
        yield "T_max", before + int(made.T_max)
    elif isinstance(made, lr_scheduler.PolynomialLR):
        yield "total_iters", before + int(made.total_iters)
    elif isinstance(made, lr_scheduler.SequentialLR):
        yield from own_lengths(made._schedulers[-1], before + made._milestones[-1])
    elif isinstance(made, lr_scheduler.ChainedScheduler):
        for part in made._schedulers:
            yield from own_lengths(part, before)
    elif isinstance(made, lr_scheduler.LambdaLR):
        for function in made.lr_lambdas:
            for name, value in _captured(function).items():
                if type(value) is int and any(word in name for word in ("total", "training_steps", "max_steps")):
                    yield name, before + value


def _captured(function: Any) -> dict[str, Any]:
    """The values that a function was made with: keywords of a `functools.partial`, variables of an enclosing function."""
    if isinstance(function, functools.partial):
        return dict(function.keywords)
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
