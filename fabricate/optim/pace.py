"""Notes about schedules that advance once per update, but were probably meant to advance once per epoch, Lightning's default.

Must not know: which optimizers there are, the loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch.optim import lr_scheduler

from fabricate.optim.schedules import Schedule

LEAST = 1e-6
"""The share of the initial rate below which the rate half-way through a fit is taken for a mistake."""


def notes_of_pace(schedules: Mapping[str, Schedule], total_steps: int | None, per_epoch: int | None) -> list[str]:
    """Notes for the plan. `total_steps`: the updates of the fit; `per_epoch`: the updates of an epoch; None if not known."""
    notes = []
    for schedule in schedules.values():
        if schedule.advances == "step":
            for sign in dict.fromkeys(_signs(schedule.made, total_steps, per_epoch)):
                notes.append(
                    f"{type(schedule.made).__name__} advances once per update, and {sign}; if it is meant per epoch, return "
                    "(optimizer, scheduler, 'epoch')"
                )
    return notes


def _signs(made: Any, total_steps: int | None, per_epoch: int | None) -> Iterator[str]:
    """The signs that a schedule was written in epochs, as texts for a note."""
    half = total_steps // 2 if total_steps is not None else 0
    epoch = per_epoch if per_epoch is not None and total_steps is not None and total_steps > per_epoch else 0
    if isinstance(made, lr_scheduler.StepLR) and made.step_size < epoch:
        yield f"its step_size of {made.step_size} is less than the {epoch} updates of an epoch"
    elif isinstance(made, lr_scheduler.MultiStepLR) and made.milestones and max(made.milestones) < epoch:
        yield f"its last milestone, {max(made.milestones)}, is less than the {epoch} updates of an epoch"
    elif isinstance(made, lr_scheduler.CosineAnnealingWarmRestarts):
        yield from _signs_of_restarts(made.T_0, epoch, total_steps or 0)
    elif isinstance(made, lr_scheduler.StepLR | lr_scheduler.ExponentialLR):
        yield from _signs_of_decay(made.gamma ** (half // getattr(made, "step_size", 1)), half)
    elif isinstance(made, lr_scheduler.LambdaLR):
        yield from _signs_of_functions(made.lr_lambdas, half)
    elif isinstance(made, lr_scheduler.SequentialLR | lr_scheduler.ChainedScheduler):
        for part in made._schedulers:
            yield from _signs(part, total_steps, per_epoch)


def _signs_of_restarts(first: int, epoch: int, total_steps: int) -> Iterator[str]:
    if first < epoch and first * epoch <= total_steps:
        yield f"its T_0 of {first} is less than the {epoch} updates of an epoch, and no more than the epochs of this fit"


def _signs_of_decay(left: float, half: int) -> Iterator[str]:
    if left < LEAST:
        yield f"after {half} updates the rate is {left:.0e} of its start"


def _signs_of_functions(functions: Iterable[Any], half: int) -> Iterator[str]:
    for function in functions:
        if (name := _first_argument(function)).startswith("epoch"):
            yield f"its function takes {name!r}"
        elif half and (own := _with_own_variables(function)) is not None:
            yield from _signs_of_decay(own(half), half)


def _with_own_variables(function: Any) -> Callable[[int], float] | None:
    """A copy of a function with variables of its own, because calling it may change them; None for an object, which may count its calls."""
    if isinstance(function, partial):
        inner = _with_own_variables(function.func)
        return None if inner is None else partial(inner, *function.args, **function.keywords)
    if not isinstance(function, FunctionType):
        return None
    if any(cell == CellType() for cell in function.__closure__ or ()):
        return None  # a variable without a value: it may get one later
    cells = tuple(CellType(cell.cell_contents) for cell in function.__closure__ or ())
    own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _first_argument(function: Any) -> str:
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""
