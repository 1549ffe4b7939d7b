"""Learning-rate schedules by name: all those of transformers, with lengths in updates or as shares of all updates.

Must not know: which optimizers there are, the loop. transformers is imported when a schedule is named.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from fabricate.errors import ConfigurationError, did_you_mean, first_line
from fabricate.registry.names import build, parse_name

_OPTIONS = {
    "num_training_steps": "total",
    "num_warmup_steps": "warmup",
    "num_decay_steps": "decay",
    "min_lr_rate": "minimum",
    "min_lr_ratio": "minimum",
}
"""The parameters of transformers' functions that have another name as options. All other parameters keep their names."""
_SHORT = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr", "wsd": "warmup_stable_decay"}
ENDS_IN_WARMUP = ", which end within the warm-up"
"""The end of the plan's line for a schedule with a longer warm-up than the fit."""
_DEFAULTS = {"warmup": 0.0, "decay": 0.2, "minimum": 0.0}


def schedule_names() -> list[str]:
    """All names of schedules, the usual ones first."""
    from transformers import SchedulerType

    return list(dict.fromkeys(["constant", "linear", "cosine", "wsd", *(kind.value for kind in SchedulerType)]))


def named_schedule(
    where: str, optimizer: torch.optim.Optimizer, text: str, updates: int | None, why_unknown: str
) -> tuple[Any, str]:
    """The scheduler for `text`, such as "cosine:warmup=0.1", and its line in the plan. `updates`: the number of updates to come, or None if
    it is not known, for the reason `why_unknown`. `where`: the name of the scheduler in errors."""
    name, options = parse_name("scheduler", text)
    function = _function(where, text, name)
    parameters = inspect.signature(function).parameters.keys() - {"optimizer", "last_epoch"}
    own = {_OPTIONS[parameter]: parameter for parameter in parameters & _OPTIONS.keys()}
    if "warmup" in own:
        own.setdefault("total", "")  # not an argument of the function, but `warmup` may be a share of it
    _refuse_unknown(where, name, options, own.keys() | parameters - _OPTIONS.keys())
    numbers = _DEFAULTS | {option: _number(name, option, options.pop(option)) for option in own.keys() & options.keys()}
    total = int(numbers["total"]) if "total" in numbers else updates
    if total is None and (own.get("total") or 0 < numbers["warmup"] < 1):
        raise ConfigurationError(
            f"{where} is {text!r}, but the number of updates of this fit is not known ({why_unknown}); give it: "
            f"'{name}:total=1000'"
        )
    arguments = {own[option]: value for option, value in _checked(name, numbers, total).items() if own.get(option)}
    if name == "wsd":
        options.setdefault("decay_type", "linear")
    if "min_lr" in options:
        arguments.pop("min_lr_rate", None)  # transformers accepts only one of the two
    try:
        scheduler = build(function, "scheduler", name, options, optimizer=optimizer, **arguments)
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(f"{where} is {text!r}: {first_line(exc)}") from exc
    if total is None or not own.get("total"):
        return scheduler, text
    ends = ENDS_IN_WARMUP if numbers["warmup"] > total else ""
    return _ending(scheduler, total), f"{text} over {total} updates{ends}"


def _function(where: str, text: str, name: str) -> Any:
    """The function or class that makes the schedule `name`."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR

    if name not in (names := schedule_names()):
        raise ConfigurationError(
            f"{where} is {text!r}{did_you_mean(name, names)}; give {', '.join(names)}, or an object"
        )
    functions: dict[str, Any] = {kind.value: function for kind, function in TYPE_TO_SCHEDULER_FUNCTION.items()}
    # Classes instead of transformers' functions, which accept any option without a type.
    functions |= {"reduce_lr_on_plateau": lr_scheduler.ReduceLROnPlateau, "greedy": GreedyLR}
    return functions[_SHORT.get(name, name)]


def _refuse_unknown(where: str, name: str, options: Mapping[str, str], known: set[str]) -> None:
    for option in options.keys() - known:
        raise ConfigurationError(
            f"{where}: {name!r} has no option {option!r}{did_you_mean(option, known)}; options: {', '.join(sorted(known))}"
        )


def _number(schedule: str, option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError as exc:
        raise ConfigurationError(f"schedule {schedule!r}: {option}={text!r} is not a number") from exc
    if option in ("warmup", "decay") and number >= 1 and number.is_integer() and "." in text:
        raise ConfigurationError(
            f"schedule {schedule!r}: {option}={text}: give a share below 1, or a whole number of updates without a decimal point"
        )
    return number


def _checked(schedule: str, given: dict[str, float], total: int | None) -> dict[str, Any]:
    """`given` with `warmup` and `decay` as numbers of updates."""
    whole: dict[str, int] = {}
    for option in ("warmup", "decay"):
        value = given[option]
        if not 0 <= value < math.inf or (value >= 1 and value != int(value)):
            raise ConfigurationError(
                f"schedule {schedule!r}: {option}={value:g}: give a share below 1, or a whole number of updates"
            )
        whole[option] = int(value) if value >= 1 else math.ceil(value * (total or 0))
    # No error if only the warm-up is too long: a fit that is cut short to try a script may end within it.
    if (
        total is not None
        and sum(whole.values()) > total > whole["warmup"]
        and _SHORT.get(schedule, schedule) == "warmup_stable_decay"
    ):
        raise ConfigurationError(
            f"schedule {schedule!r}: warmup={given['warmup']:g} and decay={given['decay']:g} are more than all {total} updates"
        )
    if not 0 <= given["minimum"] <= 1:
        raise ConfigurationError(
            f"schedule {schedule!r}: minimum={given['minimum']:g}: give a share of the learning rate, 0 to 1"
        )
    return {**whole, "minimum": given["minimum"], "total": total}


def _ending(scheduler: lr_scheduler.LambdaLR, total: int) -> lr_scheduler.LambdaLR:
    """`scheduler`, changed so that its rate is constant after `total` updates, where transformers' cosines would rise again."""

    def until(total: int, factor: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: factor(min(step, total))

    scheduler.lr_lambdas = [until(total, factor) for factor in scheduler.lr_lambdas]
    return scheduler
