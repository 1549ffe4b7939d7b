"""The constructor arguments of a module in a checkpoint: what JSON can hold, and tuples of it, which JSON has as lists. Must not know:
modules, files."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

__all__ = ["plain", "read", "recordable", "written"]


def recordable(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The `values` that a checkpoint can hold, with NumPy numbers as Python's, and the names of the others."""
    held: dict[str, Any] = {}
    lost: list[str] = []
    for name, value in values.items():
        try:
            copy = tuple(plain(value)) if type(value) is tuple else plain(value)
            same = not isinstance(value, enum.Enum) and bool(copy == value)
        except (TypeError, ValueError):
            same = False
        if same:
            held[name] = copy
        else:
            lost.append(name)
    return held, lost


def written(held: Mapping[str, Any], lost: Sequence[str]) -> dict[str, Any]:
    """The entries of the checkpoint for what `recordable` returned."""
    tuples = [name for name, value in held.items() if isinstance(value, tuple)]
    arguments = {name: list(value) if name in tuples else value for name, value in held.items()}
    return {"arguments": arguments, "tuples": tuples, "unrecorded": list(lost)}


def read(entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What `recordable` returned, of the entries of a checkpoint."""
    tuples = entries.get("tuples", ())
    given = {name: tuple(value) if name in tuples else value for name, value in entries["arguments"].items()}
    return given, list(entries["unrecorded"])


def plain(value: Any) -> Any:
    """`value` after a round trip through JSON, with NumPy numbers as Python's. Raises `TypeError` or `ValueError` if JSON cannot hold
    it."""
    return json.loads(json.dumps(value, allow_nan=False, default=_number))


def _number(value: Any) -> Any:
    if isinstance(value, numpy.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")
