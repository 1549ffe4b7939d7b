"""What `configure_optimizers` set: the options of optimizers and the settings of schedules, to be compared with those of a checkpoint.

Training changes some of them (a schedule changes learning rates), so they are taken down before. Must not know: checkpoints, the loop.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import lr_scheduler

from fabricate.optim.schedules import Schedule, captured

_COUNTERS = ("last_epoch", "base_lrs", "last_lr")
_DURATIONS = ("T_max", "total_iters", "milestones")
"""What says how long a schedule takes."""
_UNDERSCORED = {"_schedule_phases": "phases", "_milestones": "milestones"}
"""Settings of torch's schedules that begin with an underscore: of OneCycleLR and SequentialLR."""
_LENGTHS = ("total", "training_steps", "max_steps")
"""In names of values that follow from how many updates there are: a longer run has other ones, and the new ones are in effect anyway."""


class Configured(NamedTuple):
    """One value that `configure_optimizers` set."""

    topic: str
    """ "optimizer" or "scheduler"; "" for what may change without a word of the user."""
    name: str
    text: str
    put: Callable[[str], None]
    """Makes it the one in effect, after a checkpoint's was restored; gets the text of that one."""


def configured(optimizers: Mapping[str, torch.optim.Optimizer], schedules: Mapping[str, Schedule]) -> list[Configured]:
    """Everything that was set, as it is now: before the first update, and before a checkpoint is restored."""
    settings = []
    for label, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            where = f"of group {number} of optimizer {label!r}"
            for option, value in options(group).items():
                put = partial(_put_option, group, option, value)
                settings.append(Configured("optimizer", f"{option} {where}", _text(value), put))
    for label, schedule in schedules.items():
        where = f"of scheduler {label!r}"
        # The text of a named one has its length at the end.
        settings.append(Configured("scheduler", f"kind {where}", schedule.text.partition(" over ")[0], _in_effect))
        for made, name, shown, value in _settings(schedule.made):
            restored = hasattr(made, name)  # else of a function, which no checkpoint holds
            topic = "scheduler" if restored or not any(word in name for word in _LENGTHS) else ""
            renewed = partial(_put_setting, made, name, value) if restored else _in_effect
            settings.append(Configured(topic, f"{shown} {where}", _text(value), renewed))
    return settings


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one group that are plain values; "lr" is the rate from which a schedule starts."""
    plain = {name: value for name, value in group.items() if name not in ("params", "initial_lr") and _is_plain(value)}
    return plain | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})


def renew_rates(optimizer: torch.optim.Optimizer, schedule: Schedule, changed: Collection[str]) -> None:
    """Let `schedule` start from the rates that the groups of `optimizer` have now. One that is a function of the update gives the
    next update its rate, and so does one whose length is among the `changed` settings: a cosine that was at its end would go on at zero.
    Others continue from where they are."""
    for made in _parts(schedule.made):
        if "base_lrs" in vars(made):
            made.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
    if isinstance(schedule.made, lr_scheduler.LambdaLR):
        rates = zip(optimizer.param_groups, schedule.made.lr_lambdas, schedule.made.base_lrs, strict=True)
        for group, factor, rate in rates:
            _put(group, "lr", rate * factor(schedule.made.last_epoch))
    made = _at_work(schedule.made)
    if any(name.startswith(_DURATIONS) for name in changed) and hasattr(made, "_get_closed_form_lr"):
        for group, rate in zip(optimizer.param_groups, made._get_closed_form_lr(), strict=True):
            _put(group, "lr", rate)


def _at_work(made: Any) -> Any:
    """Of a sequence of schedulers the one whose turn it is."""
    if isinstance(made, lr_scheduler.SequentialLR):
        return _at_work(made._schedulers[bisect.bisect_right(made._milestones, made.last_epoch)])
    return made


def _put_option(group: dict[str, Any], option: str, value: Any, then: str) -> None:
    if option == "lr" and "initial_lr" in group:
        # A schedule continues from where it was: what it made of the old rate, it makes of the new one.
        before = float(then) or 1.0  # a rate of zero was zero all along
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
    """No checkpoint holds it."""


def _settings(made: Any) -> Iterator[tuple[Any, str, str, Any]]:
    """(object, name, name in messages, value) of what decides how a scheduler goes on, of those inside it too."""
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
