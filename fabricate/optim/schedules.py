"""Learning-rate schedules: when they advance, and the number of advances for which they were made.

Must not know: which optimizers there are, the loop.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

from torch.optim import lr_scheduler

from fabricate.errors import ConfigurationError
from fabricate.values import suggests_max


class Schedule:
    """A scheduler of `configure_optimizers`, and when it advances: "step" (each applied update), "epoch", or
    the name of a metric (after each validation). `text` describes it in the plan."""

    def __init__(self, made: Any, advances: str, text: str) -> None:
        self.made = made
        self.advances = advances
        self.text = text
        self.advanced_elsewhere = False
        """Whether code other than this class has advanced the scheduler."""
        self._position = self._present()
        self.begun: Any = None
        """A copy of the scheduler as it was before training, if it was made; see `fabricate.optim.configured`."""

    @property
    def kind(self) -> str:
        """The class of the scheduler and, unless it advances per update, when it advances. It must be the same when a run is resumed."""
        return type(self.made).__name__ + ("" if self.advances == "step" else f" by {self.advances}")

    @property
    def metric(self) -> str | None:
        """The name of the metric by which it advances, or None."""
        return None if self.advances in ("step", "epoch") else self.advances

    def updated(self) -> None:
        """Called when an update of its optimizer was applied."""
        if self.advances == "step":
            self._advance()

    def epoch_ended(self) -> None:
        """Called when a pass over the training data is complete."""
        if self.advances == "epoch":
            self._advance()

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Called when a validation is complete. Raises `ConfigurationError` if it did not return the metric."""
        self.check(metrics)
        if self.metric is not None:
            self._advance(metrics[self.metric])

    def _advance(self, *metric: float) -> None:
        self.advanced_elsewhere = self.advanced_elsewhere or self._present() != self._position
        self.made.step(*metric)
        self._position = self._present()

    def _present(self) -> int | None:
        """The scheduler's own count of its advances; None if it keeps none."""
        count = getattr(self.made, "last_epoch", None)
        return count if isinstance(count, int) else None

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise `ConfigurationError` unless `metrics`, which a validation returned, contain the metric of the schedule."""
        if self.metric is not None and self.metric not in metrics:
            raise ConfigurationError(
                f"{type(self.made).__name__} needs {self.metric} and validation gave {', '.join(metrics) or 'nothing'}; return it from "
                "validation_step, or name another as the third: (optimizer, scheduler, name)"
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of the scheduler, for a checkpoint."""
        return state_of(self.made)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the scheduler from a checkpoint."""
        load_state(self.made, state)
        self._position = self._present()


def held_by(scheduler: Any) -> dict[str, lr_scheduler.LRScheduler]:
    """The schedulers in the state of `scheduler`, by name, such as the one after a warm-up. torch's own keep their states instead."""
    return {name: each for name, each in scheduler.state_dict().items() if isinstance(each, lr_scheduler.LRScheduler)}


def state_of(scheduler: Any) -> dict[str, Any]:
    """The state of `scheduler`; in place of a scheduler in it, the state of that one."""
    state: dict[str, Any] = scheduler.state_dict()
    return state | {name: state_of(each) for name, each in held_by(scheduler).items()}


def load_state(scheduler: Any, state: dict[str, Any]) -> None:
    """Restore what `state_of` returned."""
    held = {name: each for name, each in held_by(scheduler).items() if name in state}
    for name, each in held.items():
        load_state(each, state[name])
    scheduler.load_state_dict(state | held)


def takes_metric(scheduler: Any) -> bool:
    """Whether a scheduler advances by a metric, like ReduceLROnPlateau and transformers' GreedyLR."""
    # GradualWarmupScheduler has it as a second parameter, and advances by epochs or steps
    return next(iter(inspect.signature(scheduler.step).parameters), "") == "metrics"


def notes_of_mode(schedules: Iterable[Schedule]) -> list[str]:
    """Notes for the plan about schedulers with torch's default mode "min" whose metric is probably better when it is higher."""
    return [
        f"{type(schedule.made).__name__} has mode='min', which takes a rise of {schedule.metric} for no improvement, but the name "
        "suggests that higher is better; give it mode='max'"
        for schedule in schedules
        if schedule.metric
        and "mode=" not in schedule.text
        and getattr(schedule.made, "mode", None) == "min"
        and suggests_max(schedule.metric)
    ]


def own_lengths(made: Any, before: int = 0) -> Iterator[tuple[str, int]]:
    """The number of advances for which a scheduler was made, if the object has it: pairs of the attribute's name and the number. `before`:
    the advances of the schedulers before it in a sequence."""
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
            for name, value in captured(function).items():
                if type(value) is int and any(word in name for word in ("total", "training_steps", "max_steps")):
                    yield name, before + value


def warmup_lengths(made: Any) -> Iterator[tuple[str, int]]:
    """The number of advances in which a scheduler raises the rate to its full value, if the object has it: pairs of the attribute's name
    and the number."""
    if isinstance(made, lr_scheduler.LinearLR) and made.start_factor < made.end_factor:
        yield "total_iters", made.total_iters
    elif isinstance(made, lr_scheduler.SequentialLR | lr_scheduler.ChainedScheduler):
        yield from warmup_lengths(made._schedulers[0])
    elif isinstance(made, lr_scheduler.LambdaLR):
        for function in made.lr_lambdas:
            for name, value in captured(function).items():
                if type(value) is int and "warm" in name:
                    yield name, value


def captured(function: Any) -> dict[str, Any]:
    """The values that a function was created with: keywords of a `functools.partial`, variables of an enclosing function, the attributes
    of its object that a method names."""
    if isinstance(function, MethodType):
        held = getattr(function.__self__, "__dict__", {})
        named = getattr(getattr(function.__func__, "__code__", None), "co_names", ())
        return captured(function.__func__) | {name: held[name] for name in named if name in held}
    if isinstance(function, functools.partial):
        return dict(function.keywords)
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    arguments = {}
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # a variable that was never assigned
            arguments[name] = cell.cell_contents
    return arguments
