"""The value of one environment variable: its text, or whether it is true.

Must not know which variables there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fabricate.errors import ConfigurationError

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Request:
    """A setting that a launcher passes on: its value as text, and the variable that holds it."""

    value: str
    source: str


def text(environ: Mapping[str, str], name: str) -> Request | None:
    """The value of a variable; None if it is unset or empty."""
    value = environ.get(name, "").strip()
    return Request(value, name) if value else None


def flag(environ: Mapping[str, str], name: str) -> Request | None:
    """ "true" if the variable is true; None if it is false or unset. Raises ConfigurationError for anything else."""
    value = environ.get(name, "").strip().lower()
    if value not in _TRUE + _FALSE:
        raise ConfigurationError(f"{name}={environ[name]!r} is neither true nor false; set it to true or unset it")
    return Request("true", name) if value in _TRUE else None
