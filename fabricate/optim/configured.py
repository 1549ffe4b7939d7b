"""The values that `configure_optimizers` set: options of optimizers and settings of schedules, to be compared with those of a checkpoint.

They are recorded before training, which changes some of them (a schedule changes learning rates). Must not know: checkpoints, the loop.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import lr_scheduler

from fabricate.optim.schedules import Schedule, captured, held_by, load_state, state_of

_COUNTERS = ("last_epoch", "base_lrs", "last_lr", "lr_lambdas")
_DURATIONS = (
    *("T_max", "T_0", "total_iters", "total_steps", "total_size", "step_size", "anneal_epochs", "milestones", "phases"),
)
"""The beginnings of the names of settings that determine the length of a scheduler of torch."""
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
        schedule.begun = _copy(schedule.made)
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
    plain = {
        name: value
        for name, value in group.items()
        if name not in ("params", "param_names", "initial_lr") and _is_plain(value)
    }
    return plain | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})


def renew_rates(optimizer: torch.optim.Optimizer, schedule: Schedule, changed: Collection[str]) -> None:
    """Make the initial rates of the groups of `optimizer` those of `schedule`. If `schedule` is a function of the update, the present rates
    are computed anew. If a length is among the `changed` settings, or an integer of a scheduler of the user's class, scheduler and rates
    become those of a run that had the new settings from its beginning: a cosine that was at its end would otherwise stay at zero. Other
    schedules continue from their present rates."""
    for made in _parts(schedule.made):
        if "base_lrs" in vars(made):
            made.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    if isinstance(schedule.made, lr_scheduler.LambdaLR):
        rates = zip(optimizer.param_groups, schedule.made.lr_lambdas, schedule.made.base_lrs, strict=True)
        for group, factor, rate in rates:
            _put(group, "lr", rate * factor(schedule.made.last_epoch))
    own = [part for part in _parts(schedule.made) if not type(part).__module__.startswith("torch.")]
    lengths = {name for part in own for name, value in vars(part).items() if type(value) is int}
    if schedule.begun is not None and any(name.startswith((*_DURATIONS, *lengths)) for name in changed):
        _repeat(optimizer, schedule.made, schedule.begun)


def _repeat(optimizer: torch.optim.Optimizer, made: Any, begun: Any) -> None:
    """Advance `begun`, a copy of the scheduler `made` from before training, as often as `made` was, and take over the result."""
    with warnings.catch_warnings(action="ignore"):  # that no update came before
        for _ in range(_advances(made) - _advances(begun)):
            begun.step()
    load_state(made, state_of(begun))
    cycles = any(getattr(part, "cycle_momentum", False) for part in _parts(made))
    for group, present in zip(optimizer.param_groups, begun.optimizer.param_groups, strict=False):
        for option in ("lr", "momentum", "betas") if cycles else ("lr",):
            if option in group and option in present:
                _put(group, option, present[option])


def _advances(made: Any) -> int:
    return int(made.last_epoch if hasattr(made, "last_epoch") else _advances(made._schedulers[0]))


def _copy(made: Any) -> Any:
    """A copy of a scheduler, with an optimizer of its own without the parameters, and with the same functions. None if it cannot be copied,
    or follows a metric."""
    parts = list(_parts(made))
    if not all(isinstance(part, lr_scheduler.LRScheduler) for part in parts):
        return None
    if any(isinstance(part, lr_scheduler.ReduceLROnPlateau) for part in parts):
        return None
    shared = [
        each
        for part in parts
        for value in vars(part).values()
        for each in (value if isinstance(value, list) else [value])
    ]
    kept = {id(each): each for each in shared if callable(each) and not isinstance(each, lr_scheduler.LRScheduler)}
    groups = [
        {**copy.deepcopy({name: value for name, value in group.items() if name != "params"}), "params": []}
        for group in made.optimizer.param_groups
    ]
    alone = torch.optim.SGD([torch.zeros(1)])
    alone.param_groups = groups
    with contextlib.suppress(Exception):  # a class of the script may hold anything
        return copy.deepcopy(made, {**kept, id(made.optimizer): alone})
    return None


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
            for name, value in (captured(function) | getattr(function, "__dict__", {})).items():
                if isinstance(value, int | float):
                    yield function, name, name + of_part, value


def _parts(made: Any) -> Iterator[Any]:
    yield made
    for part in (*getattr(made, "_schedulers", ()), *held_by(made).values()):
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
