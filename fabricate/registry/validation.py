"""Checks of strategies and precisions that users write, made before the run starts.

The loop calls their methods by name: a misspelt method would never be called, and one with other arguments would fail in the first step or
later. Must not know: any particular strategy or precision, hooks.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from fabricate.errors import ConfigurationError, PluginError


def check_part(kind: str, part: Any, base: type) -> None:
    """Raise `PluginError` if the class of `part`, a `base`, has no name, a misspelt method or one with the wrong arguments. `kind`: for
    messages."""
    own = type(part)
    if not isinstance(part.name, str) or not part.name:
        raise PluginError(f'{kind}: {own.__name__} has no name; write name: ClassVar[str] = "..." in the class')
    attributes = {name: value for name, value in vars(base).items() if not name.startswith("_")}
    options = {field.name for field in dataclasses.fields(part)} if dataclasses.is_dataclass(part) else set()
    for cls in own.__mro__[: own.__mro__.index(base)]:
        for name, value in vars(cls).items():
            if name in attributes and inspect.isfunction(attributes[name]) and inspect.isfunction(value):
                _check_signature(cls, name, value, attributes[name])
            near = difflib.get_close_matches(name, attributes, n=1, cutoff=0.85)
            if near and not name.startswith("_") and name not in options and not hasattr(base, name):
                raise PluginError(f"{kind}: {cls.__name__}.{name} is never read; did you mean {near[0]!r}?")


def _check_signature(cls: type, name: str, own: Any, wanted: Any) -> None:
    arguments = list(inspect.signature(wanted).parameters)
    try:
        inspect.signature(own).bind(*arguments)
    except TypeError:
        raise PluginError(
            f"{cls.__name__}.{name}{inspect.signature(own)}: fabricate calls it as {name}({', '.join(arguments[1:])}); change its "
            "arguments"
        ) from None


def ranks_per_row(strategy: Any, world_size: int) -> int:
    """The checked result of `strategy.ranks_per_row(world_size)`. Raises `PluginError` unless it is a positive int, `ConfigurationError` if
    it does not divide the number of ranks."""
    answered = strategy.ranks_per_row(world_size)
    if type(answered) is not int or answered < 1:
        raise PluginError(
            f"{type(strategy).__name__}.ranks_per_row returned {answered!r}; return how many successive ranks read the same rows, 1 or more"
        )
    if world_size % answered:
        raise ConfigurationError(
            f"strategy={strategy.name!r}: {answered} ranks form a group that reads the same rows, so the number of "
            f"ranks has to be a multiple of {answered}, but it is {world_size}; start the script with `fabricate "
            f"run script.py --nproc {answered}`"
        )
    return answered


def reasons(part: Any, answered: Any) -> Iterable[str]:
    """`answered`, the result of `part.check(...)` or `part.check_optimizer(...)`. Raises `PluginError` unless it is an iterable of
    reasons."""
    if isinstance(answered, str) or not isinstance(answered, Iterable):
        raise PluginError(
            f"{type(part).__name__}: a check returned {type(answered).__name__}; it has to yield or to list the reasons against the run"
        )
    return answered


def lines(part: Any) -> Mapping[str, str]:
    """The result of `part.describe()`. Raises `PluginError` unless it is a mapping."""
    answered = part.describe()
    if not isinstance(answered, Mapping):
        raise PluginError(
            f"{type(part).__name__}.describe returned {type(answered).__name__}; return a mapping of topics to text"
        )
    return answered
