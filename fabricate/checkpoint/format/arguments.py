"""The constructor arguments of a module in a checkpoint: what JSON can hold, and tuples of it. Must not know: modules, files."""

from __future__ import annotations

import enum
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from fabricate.checkpoint.format.codec import decode, encode
from fabricate.errors import CheckpointError

__all__ = ["plain", "read", "recordable", "written"]


def recordable(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The `values` that a checkpoint can hold, with NumPy numbers as Python's, and the names of the others."""
    held: dict[str, Any] = {}
    lost: list[str] = []
    for name, value in values.items():
        try:
            copy = tuple(plain(value)) if type(value) is tuple else plain(value)
            encode(copy, _no_name)
            same = not _behaves_otherwise(value) and bool(copy == value)
        except (TypeError, ValueError, CheckpointError):
            same = False
        if same:
            held[name] = copy
        else:
            lost.append(name)
    return held, lost


def written(held: Mapping[str, Any], lost: Sequence[str]) -> dict[str, Any]:
    """The entries of the checkpoint for what `recordable` returned. They keep the order of the arguments and of the keys of a dict, which
    JSON files of a checkpoint sort: a constructor may build its layers in this order."""
    arguments = {name: encode(value, _no_name) for name, value in held.items()}
    return {"arguments": arguments, "order": list(held), "unrecorded": list(lost)}


def read(entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What `recordable` returned, of the entries of a checkpoint."""
    given = entries["arguments"]
    order = entries.get("order", given)
    tuples = entries.get("tuples", ())  # of checkpoints of earlier versions, which have a tuple as a list
    values: dict[str, Any] = {name: decode(given[name], _unexpected) for name in order}
    values |= {name: tuple(values[name]) for name in tuples}
    return values, list(entries["unrecorded"])


def plain(value: Any) -> Any:
    """`value` after a round trip through JSON, with NumPy numbers as Python's. Raises `TypeError` or `ValueError` if JSON cannot hold
    it."""
    return json.loads(json.dumps(value, allow_nan=False, default=_number))


def _behaves_otherwise(value: Any) -> bool:
    """Whether `value` is or holds a member of an enumeration, a Counter or a defaultdict: what JSON gives back is equal to it, but behaves
    otherwise."""
    if isinstance(value, enum.Enum | Counter | defaultdict):
        return True
    if isinstance(value, dict):
        return any(map(_behaves_otherwise, (*value, *value.values())))
    return isinstance(value, list | tuple) and any(map(_behaves_otherwise, value))


def _number(value: Any) -> Any:
    if isinstance(value, numpy.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _no_name(path: str, value: object) -> None:
    """No argument is stored as a tensor of the checkpoint."""


def _unexpected(name: str) -> object:
    raise CheckpointError(f"a constructor argument in the checkpoint refers to the tensor {name!r}")
