"""Arguments of a Trainer that its launcher sets: `fabricate run --set NAME=VALUE`, or a YAML file.

Owns how they are written, the environment variable that passes them to the ranks, and the error if the script sets another value.
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
"""An environment variable with a JSON object: name of an argument to [value, source]."""


class Launched(NamedTuple):
    """An argument that a launcher sets."""

    value: Any
    source: str


def read_setting(text: str) -> tuple[str, Any]:
    """Split NAME=VALUE into the name and the value. The value is written as in YAML: a number, true, null, {last: 2, best: 1}, or text; or
    None, for null.

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
    if written.strip() in ("None", "none") and name not in _NONE_IS_TEXT:
        return name, None
    return name, written if name in NAMES and isinstance(value, bool) else _number(value, written.strip())


NAMES = {"strategy": "FABRICATE_STRATEGY", "precision": "FABRICATE_PRECISION"}
"""Arguments whose values are names (YAML reads precision=no as false), and the environment variables that pass them to the ranks."""
_NONE_IS_TEXT = (*NAMES, "print_plan")
_FLOAT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
"""Numbers that YAML reads as text."""
_DIGITS = re.compile(r"[-+]?[0-9][0-9_]*")


def _number(value: Any, written: str) -> Any:
    """`value` with YAML's surprises corrected: it reads 1e-3 as text, 010 as 8 and 1:30 as 90."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if type(value) is int and not written.startswith("0x"):
        return int(written) if _DIGITS.fullmatch(written) else written
    return value


def check_launched(name: str, value: Any, source: str) -> Launched:
    """The checked argument `name` from a launcher. Raises ConfigurationError, before a rank is started."""
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
    """The arguments of all `groups`. Raises ConfigurationError if two groups set different values."""
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
    """The environment variables that pass `arguments` to the ranks."""
    return {VARIABLE: json.dumps(arguments)} if arguments else {}


def launched(environ: Mapping[str, str]) -> dict[str, Launched]:
    """The arguments that the launcher of this process set."""
    text = environ.get(VARIABLE, "")
    if not text:
        return {}
    try:
        arguments = json.loads(text)
        return {name: check_launched(name, value, source) for name, (value, source) in arguments.items()}
    except (ValueError, TypeError, AttributeError):
        raise ConfigurationError(
            f"{VARIABLE}={text!r} cannot be read. It has to be a JSON object that gives each argument a value and its source: "
            f'{VARIABLE}=\'{{"max_steps": [100, "the job script"]}}\'. `fabricate run --set max_steps=100` sets it for you'
        ) from None


def with_launched(function: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """A decorator that passes the launcher's arguments to a constructor, as if the script had given them. If the script gives a different
    value for one of them, that is an error."""

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
