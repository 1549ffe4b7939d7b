"""Fingerprints of values that differ once a value, or something inside it, has changed. No code of the user is called.

Must not know: runs, checkpoints, which values are compared.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, GeneratorType, MappingProxyType, MethodType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fabricate.training.saves.attributes import variables

_PLAIN = bool | int | float | complex | str | bytes | bytearray | None | np.generic
_COLLECTIONS = (list, tuple, dict, set, frozenset, deque)
_MOST_ITEMS, _DEEPEST = 20_000, 6
"""The limits of a fingerprint: of a collection with which it would have more items, or that is deeper inside, only the length is
compared."""
_MOST_BYTES, _SMALL = 2**24, 2**10
"""Of arrays and texts that are larger together, only the shape or length is compared, but of small ones all. Arrays in files are not
read."""


class Made(list[Any]):
    """The fingerprint of an object that a run may make on the way, such as a network or an iterator: it counts once it changes after it was
    first seen."""


class Kind(str):
    """The fingerprint of a function or a class: what its code is. It counts as `Made` does."""


class Position(Made):
    """The fingerprint of an iterator: what can be seen of its position."""


def has_iterator(mark: Any) -> bool:
    return isinstance(mark, Position) or (isinstance(mark, list) and any(map(has_iterator, mark)))


def mark_of(value: Any, saved: set[int]) -> Any:
    """A fingerprint of `value`; None for an object that is not looked into."""
    try:
        return Fingerprint(saved).of(value)
    except Exception:  # an object that cannot be looked at, such as a proxy of one that is gone
        return None


def is_iterator(value: Any) -> bool:
    """Whether an object is a generator or an iterator of Python, or one over a loader; an open file is another one."""
    return isinstance(value, Iterator) and type(value).__module__.startswith(
        ("builtins", "itertools", "torch.utils.data")
    )


class Fingerprint:
    """Makes a fingerprint of a value that differs after the value, or something inside it, has changed."""

    def __init__(self, saved: set[int]) -> None:
        """`saved`: the ids of what checkpoints hold, whose content does not count, because a plugin may keep a list of the parameters."""
        self._saved = saved
        self._left, self._bytes = _MOST_ITEMS, _MOST_BYTES
        self._open: set[int] = set()
        """The ids of the values around the current one, to which it may refer."""

    def of(self, value: Any) -> Any:
        """The fingerprint of `value`; None for an object that is not looked into."""
        if isinstance(value, torch.Tensor | np.ndarray | array | _PLAIN):
            return self._of_plain(value)
        if isinstance(value, FunctionType | BuiltinFunctionType | MethodType | type):
            return Kind(f"{value.__module__}.{value.__qualname__} {id(getattr(value, '__code__', None))}")
        if isinstance(value, partial):
            return Made(map(self.of, (value.func, value.args, value.keywords)))
        if is_iterator(value):
            return Position(self._of_iterator(value))
        if isinstance(
            value, torch.nn.Module
        ):  # such as a copy of the network that follows it, or a torchmetrics object
            return Made(map(self.of, (*value.parameters(), *value.buffers(), vars(value).get("_update_count"))))
        known = id(value) in self._saved or id(value) in self._open
        items = None if known else _items(value)
        if items is None:
            return type(value).__name__ if known or self._open else None
        if len(items) > self._left or len(self._open) == _DEEPEST:
            return len(items)
        self._left -= len(items)
        self._open.add(id(value))
        marks = list(map(self.of, items))
        self._open.remove(id(value))
        return sorted(map(repr, marks)) if isinstance(value, set | frozenset) else marks

    def _of_iterator(self, value: Any) -> Iterator[Any]:
        """What can be seen of the position of an iterator. Of one that shows nothing, an object that is equal to no other."""
        yield type(value).__name__
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            yield None if frame is None else frame.f_lasti
            yield [] if frame is None else self.of(list(frame.f_locals.values()))
            yield self.of(value.gi_yieldfrom)
        elif isinstance(value, itertools.count | itertools.repeat):
            yield repr(value)
        elif isinstance(value, zip | map | filter | enumerate):
            yield from (self.of(each) for each in value.__reduce__()[1])
        elif type(value).__module__ == "builtins":
            yield operator.length_hint(value)
        else:
            yield getattr(value, "_num_yielded", object())

    def _of_plain(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            changes = not value.is_inference() and id(value) not in self._saved
            return id(value), value._version if changes else None
        if isinstance(value, np.ndarray):
            read = value.dtype != object and not isinstance(value, np.memmap) and self._has_room(value.nbytes)
            return value.shape, hash(value.tobytes()) if read else None
        if isinstance(value, str | bytes | bytearray | array) and not self._has_room(len(value)):
            return len(value)
        return repr(value)

    def _has_room(self, size: int) -> bool:
        if size > max(self._bytes, _SMALL):
            return False
        self._bytes -= size
        return True


def _items(value: Any) -> list[Any] | None:
    """What of an object can change: the items of a collection, the state of an optimizer, the attributes of a scheduler, of an estimator of
    scikit-learn, of a collection of Python's that holds others, and of an object of the user's class, and the shape of a table of pandas.
    None for other objects."""
    if isinstance(value, Optimizer):
        value = dict(value.state)
    elif isinstance(value, LRScheduler | ChainMap | UserDict | UserList):
        value = vars(value)
    elif isinstance(value, MappingProxyType):
        value = dict(value)
    elif (library := type(value).__module__.partition(".")[0]) == "pandas":
        value = [getattr(value, "shape", None)]  # reading the values of a large table would take long
    elif library == "sklearn":
        value = vars(value)
    elif not isinstance(value, _COLLECTIONS):
        value = variables(value)
    return [*value, *value.values()] if isinstance(value, dict) else None if value is None else list(value)
