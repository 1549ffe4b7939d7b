"""Recording and restoring the attributes of the user's objects. Must not know: when, and why."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

_DEEPSPEEDS = {
    *("ds_id", "ds_external_parameters", "ds_recompute_parameters", "ds_grads_remaining"),
    "applied_pre_backward_ref_cnt",
}
OURS = frozenset(
    {*vars(torch.nn.Module()), "_trainer", "_logged", "_no_log", "_turn", "_uses_trainer", "_arguments", "_built"}
    | _DEEPSPEEDS
)
"""The attributes that torch, fabricate and DeepSpeed set on a module."""
_MOST_BYTES, _MOST_ITEMS = 2**26, 1000
"""Limits: the bytes of tensors and arrays that are recorded in all, and the items of a collection that are followed."""


def remembered(module: torch.nn.Module, others: Iterable[object] = ()) -> Callable[[], None]:
    """Record the attributes of `module`, its submodules and `others`, including the contents of collections, tensors, arrays and objects of
    the user's classes. The returned function restores all of them."""
    memory = _Memory()
    memory.take_attributes(module)
    for value in (*module.modules(), *others):
        memory.take(value)
    return memory.put_back


class _Memory:
    def __init__(self) -> None:
        self._seen: dict[int, object] = {}
        self._undo: list[Callable[[], object]] = []
        self._bytes = 0

    def put_back(self) -> None:
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def take(self, value: object) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value  # holds a reference, so that the id is not used again
        if isinstance(value, torch.Tensor):
            if self._has_room(value.nbytes) and not value.is_inference() and type(value) is torch.Tensor:
                self._undo.append(partial(_copy_back, value, value.detach().clone()))
        elif isinstance(value, np.ndarray):
            if self._has_room(value.nbytes):
                self._undo.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, list | dict | set | deque):
            self._undo.append(partial(_refill, value, value.copy()))
            if len(value) <= _MOST_ITEMS:
                for item in value.values() if isinstance(value, dict) else value:
                    self.take(item)
        elif is_users(value):
            self.take_attributes(value)

    def take_attributes(self, value: object) -> None:
        self._seen[id(value)] = value
        own = {name: held for name, held in vars(value).items() if name not in OURS}
        self._undo.append(partial(_reset, value, own))
        for held in own.values():
            self.take(held)

    def _has_room(self, size: int) -> bool:
        fits = self._bytes + size <= _MOST_BYTES
        self._bytes += size if fits else 0
        return fits


def _copy_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    # An unchanged tensor is not written, so that its version counter stays the same.
    if not torch.equal(tensor, before):
        tensor.copy_(before)


def _refill(collection: Any, before: Any) -> None:
    collection.clear()
    collection.extend(before) if isinstance(collection, list | deque) else collection.update(before)


def _reset(value: object, before: dict[str, Any]) -> None:
    for name in [name for name in vars(value) if name not in OURS and name not in before]:
        del vars(value)[name]
    vars(value).update(before)


def is_users(value: object) -> bool:
    """Whether the class of `value` is the user's, not one of an installed package."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    package = type(value).__module__.partition(".")[0]
    return package not in ("builtins", "fabricate") and not (file is not None and file.startswith(_installed()))


@functools.cache
def _installed() -> tuple[str, ...]:
    """The directories of installed packages."""
    return tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
