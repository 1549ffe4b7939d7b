"""The values that `configure_optimizers` set: options of optimizers and settings of schedules, to be compared with those of a checkpoint.

They are recorded before training, which changes some of them (a schedule changes learning rates). Must not know: checkpoints, the loop.
"""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import lr_scheduler

from fabricate.optim.schedules import Schedule, captured

_COUNTERS = ("last_epoch", "base_lrs", "last_lr")
_DURATIONS = ("T_max", "total_iters", "milestones", "total_steps", "phases")
"""The beginnings of the names of settings that determine the length of a schedule."""
_UNDERSCORED = {"_schedule_phases": "phases", "_milestones": "milestones"}
"""Settings of OneCycleLR and SequentialLR that begin with an underscore, with their names in messages."""
_LENGTHS = ("total", "training_steps", "max_steps")
"""Words in the names of values that follow from the number of updates. A longer run has other values, which are in effect in any case."""


class Configured(NamedTuple):
    """One value that `configure_optimizers` set."""

    topic: str
    """ "optimizer" or "scheduler"; "" for a value that may change without `accept_changes`."""
    name: str
    text: str
    put: Callable[[str], None]
    """Puts this value into effect after the value of a checkpoint was restored. Its argument is the text of the checkpoint's value."""


def configured(optimizers: Mapping[str, torch.optim.Optimizer], schedules: Mapping[str, Schedule]) -> list[Configured]:
    """Every value that was set, with its present text. Call it before the first update and before a checkpoint is restored."""
    settings = []
    for label, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            where = f"of group {number} of optimizer {label!r}"
            for option, value in options(group).items():
                put = partial(_put_option, group, option, value)
                settings.append(Configured("optimizer", f"{option} {where}", _text(value), put))
    for label, schedule in schedules.items():
        where = f"of scheduler {label!r}"
        # The text of a schedule with a name ends with its length.
        settings.append(Configured("scheduler", f"kind {where}", schedule.text.partition(" over ")[0], _in_effect))
        for made, name, shown, value in _settings(schedule.made):
            restored = hasattr(made, name)  # otherwise it belongs to a function, which no checkpoint holds
            topic = "scheduler" if restored or not any(word in name for word in _LENGTHS) else ""
            renewed = partial(_put_setting, made, name, value) if restored else _in_effect
            settings.append(Configured(topic, f"{shown} {where}", _text(value), renewed))
    return settings


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one group that are plain values; "lr" is the initial rate of a schedule."""
    plain = {name: value for name, value in group.items() if name not in ("params", "initial_lr") and _is_plain(value)}
    return plain | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})


def renew_rates(optimizer: torch.optim.Optimizer, schedule: Schedule, changed: Collection[str]) -> None:
    """Make the initial rates of the groups of `optimizer` those of `schedule`. If `schedule` is a function of the update, or if its length
    is among the `changed` settings, the rate of the next update is computed anew: a cosine that was at its end would otherwise stay at
    zero. Other schedules continue from their present rates."""
    for made in _parts(schedule.made):
        if "base_lrs" in vars(made):
            made.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    if isinstance(schedule.made, lr_scheduler.LambdaLR):
        rates = zip(optimizer.param_groups, schedule.made.lr_lambdas, schedule.made.base_lrs, strict=True)
        for group, factor, rate in rates:
            _put(group, "lr", rate * factor(schedule.made.last_epoch))
    made = _at_work(schedule.made)
    if any(name.startswith(_DURATIONS) for name in changed):
        for group, rate in zip(optimizer.param_groups, _rates_now(made), strict=False):
            _put(group, "lr", rate)


def _rates_now(made: Any) -> list[Any]:
    """The rates of the groups by the settings of the scheduler alone; empty if they depend on the present rates too."""
    if isinstance(made, lr_scheduler.OneCycleLR):
        with warnings.catch_warnings(action="ignore"):  # advice to read the last rates, which are not those
            return list(made.get_lr())
    return list(made._get_closed_form_lr()) if hasattr(made, "_get_closed_form_lr") else []


def _at_work(made: Any) -> Any:
    """The scheduler that is active now, if `made` is a sequence of schedulers; else `made`."""
    if isinstance(made, lr_scheduler.SequentialLR):
        return _at_work(made._schedulers[bisect.bisect_right(made._milestones, made.last_epoch)])
    return made


def _put_option(group: dict[str, Any], option: str, value: Any, then: str) -> None:
    if option == "lr" and "initial_lr" in group:
        # The schedule continues: the present rate keeps its ratio to the initial rate.
        before = float(then) or 1.0  # if the initial rate was zero, the present rate is zero too
        group["initial_lr"], value = value, float(group["lr"]) / before * float(value)
    _put(group, option, value)


def _put(group: dict[str, Any], option: str, value: Any) -> None:
    if isinstance(group.get(option), torch.Tensor):
        group[option].fill_(value)
    else:
        group[option] = value


def _put_setting(made: Any, name: str, value: Any, then: str) -> None:
    setattr(made, name, value)


def _in_effect(then: str) -> None:
    """Do nothing: no checkpoint holds the value, so it is in effect already."""


def _settings(made: Any) -> Iterator[tuple[Any, str, str, Any]]:
    """(object, name, name in messages, value) for each setting that determines how a scheduler, or one inside it, continues."""
    for number, part in enumerate(_parts(made)):
        of_part = f" of part {number}" if number else ""
        for name, value in part.state_dict().items():
            if (not name.startswith("_") or name in _UNDERSCORED) and name not in _COUNTERS and _is_plain(value):
                yield part, name, _UNDERSCORED.get(name, name) + of_part, value
        for function in getattr(part, "lr_lambdas", ()):
            for name, value in captured(function).items():
                if isinstance(value, int | float):
                    yield function, name, name + of_part, value


def _parts(made: Any) -> Iterator[Any]:
    yield made
    for part in getattr(made, "_schedulers", ()):
        yield from _parts(part)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def _text(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict) and "end_step" in value[0]:
        return repr([phase["end_step"] for phase in value])
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)
