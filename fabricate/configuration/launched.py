"""Arguments of a Trainer that its launcher gives: `fabricate run --set NAME=VALUE`, and a YAML file of them.

Owns how they are written, how they travel to the ranks (one variable), and that a script which gives another value is an error.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from fabricate.configuration.arguments import CHECKS
from fabricate.errors import ConfigurationError
from fabricate.registry import foreign_names

P = ParamSpec("P")
S = TypeVar("S")

VARIABLE = "FABRICATE_SETTINGS"
"""A JSON object: the name of an argument, and a list of its value and its source."""


class Launched(NamedTuple):
    """An argument that a launcher gives."""

    value: Any
    source: str


def read_setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value written as in YAML: a number, true, null, {last: 2, best: 1}, or text as it is.

    read_setting("save_every=1 epoch") == ("save_every", "1 epoch")"""
    import yaml  # type: ignore[import-untyped]

    name, equals, written = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--set {text!r}: give NAME=VALUE, for instance --set max_steps=100")
    try:
        value = yaml.safe_load(written)
    except yaml.YAMLError as exc:
        raise ConfigurationError(
            f"--set {text!r}: the value is not valid YAML ({exc}). Quote it as YAML requires"
        ) from None
    name = name.strip().replace("-", "_")
    return name, written if name in NAMES and isinstance(value, bool) else _number(value, written.strip())


NAMES = {"strategy": "FABRICATE_STRATEGY", "precision": "FABRICATE_PRECISION"}
"""Arguments whose values are names (YAML reads precision=no as false), and the environment variables that carry them to the ranks."""
_FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
"""Numbers that YAML reads as text."""
_DIGITS = re.compile(r"[-+]?[0-9][0-9_]*")


def _number(value: Any, written: str) -> Any:
    """YAML takes 1e-3 for text, 010 for 8 and 1:30 for 90."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if type(value) is int and not written.startswith("0x"):
        return int(written) if _DIGITS.fullmatch(written) else written
    return value


def check_launched(name: str, value: Any, source: str) -> Launched:
    """The argument `name` of a Trainer as a launcher gives it. Raises ConfigurationError, before a rank is started."""
    if name not in CHECKS:
        hint = foreign_names.hint(name, foreign_names.ARGUMENTS, list(CHECKS))
        raise ConfigurationError(f"{source}: Trainer has no argument {name!r}{hint}")
    if name == "plugins":
        raise ConfigurationError(
            f"{source}: the argument plugins cannot be set in this way. Use --plugin NAME, which may be repeated"
        )
    if name in NAMES and value is False:
        value = "no"
    elif isinstance(value, str) and _FLOAT.fullmatch(value):
        value = float(value)
    try:
        CHECKS[name](name, value)
    except ConfigurationError as exc:
        raise ConfigurationError(f"{source}: {exc}") from None
    return Launched(value, source)


def merged(*groups: Mapping[str, Launched]) -> dict[str, Launched]:
    """The arguments of all `groups`. Raises ConfigurationError where two set another value."""
    result: dict[str, Launched] = {}
    for group in groups:
        for name, given in group.items():
            other = result.setdefault(name, given)
            if other.value != given.value:
                raise ConfigurationError(
                    f"{name}: {other.source} sets {other.value!r}, but {given.source} sets {given.value!r}. Set it in only one place"
                )
    return result


def variables(arguments: Mapping[str, Launched]) -> dict[str, str]:
    """What carries `arguments` to the ranks."""
    return {VARIABLE: json.dumps(arguments)} if arguments else {}


def launched(environ: Mapping[str, str]) -> dict[str, Launched]:
    """The arguments that the launcher of this process gives."""
    text = environ.get(VARIABLE, "")
    if not text:
        return {}
    try:
        arguments = json.loads(text)
        return {name: check_launched(name, value, source) for name, (value, source) in arguments.items()}
    except (ValueError, TypeError, AttributeError):
        raise ConfigurationError(
            f"{VARIABLE}={text!r} cannot be read. Only `fabricate run --set NAME=VALUE` should set this environment variable. Unset it"
        ) from None


def with_launched(function: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Makes a constructor take the arguments of the launcher, as if the script had given them. One that it gives as well is an error
    unless the two are equal."""

    @functools.wraps(function)
    def constructor(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        for name, given in launched(os.environ).items():
            if name in NAMES and os.environ.get(NAMES[name]) == str(given.value):
                continue  # --strategy or --precision set the same value
            if name in kwargs and CHECKS[name](name, kwargs[name]) != CHECKS[name](name, given.value):
                raise ConfigurationError(
                    f"{name}={kwargs[name]!r} is set in the Trainer and {given.value!r} by {given.source}; remove one, or make them equal"
                )
            kwargs[name] = given.value
        function(self, *args, **kwargs)

    return constructor
