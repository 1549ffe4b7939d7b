"""Recording and restoring the attributes of the user's objects, and the global variables of their methods. Must not know: when, and why."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim.lr_scheduler import LRScheduler

from fabricate.data.identity import names_in
from fabricate.optim.schedules import captured
from fabricate.seeding import is_generator, set_state_of, state_of

LIBRARIES = frozenset(
    {
        *("torch", "transformers", "torchmetrics", "peft", "datasets", "fabricate", "builtins", "accelerate"),
        *("fabricate_deepspeed", "fabricate_diloco", "fabricate_ema", "fabricate_fp8", "fabricate_lightning"),
        *("fabricate_powersgd", "fabricate_ray", "fabricate_text"),
    }
)
"""Packages whose classes are not the user's, wherever they are installed. The first-party plugins save what a resume needs."""
_DEEPSPEEDS = {
    *("ds_id", "ds_external_parameters", "ds_recompute_parameters", "ds_grads_remaining"),
    "applied_pre_backward_ref_cnt",
}
OURS = frozenset(
    {
        *vars(torch.nn.Module()),
        "_trainer",
        "_outer",
        "_logged",
        "_no_log",
        "_turn",
        "_in_evaluation_step",
        "_fabricate_fits",
        "_uses_trainer",
        "_arguments",
        "_built",
        "_sharded",
    }
    | _DEEPSPEEDS
)
"""The attributes that torch, fabricate and DeepSpeed set on a module."""
_HOLD_VALUES = ("torchmetrics", "pandas", "sklearn")
"""Packages whose objects hold values, no files and no connections: their attributes can be recorded like those of the user's."""
_MOST_BYTES, _MOST_ITEMS, _MOST_VALUES = 2**26, 1000, 100_000
"""Limits: the bytes of tensors and arrays that are recorded in all, the items of a collection that are followed, and the values in all."""


def remembered(module: torch.nn.Module, others: Iterable[object] = ()) -> Callable[[], None]:
    """Record the attributes of `module`, its submodules and `others`, and the contents of the global variables that their methods name:
    collections, tensors, arrays and objects of the user's classes. The returned function restores all of them."""
    memory = _Memory(module)
    memory.take([*memory.attributes(module), *module.modules(), type(module), *others])
    return memory.put_back


class _Memory:
    def __init__(self, module: torch.nn.Module) -> None:
        self._submodules = set(map(id, module.modules()))
        self._seen: dict[int, object] = {}
        self._undo: list[Callable[[], object]] = []
        self._bytes = 0

    def put_back(self) -> None:
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def take(self, values: Iterable[object]) -> None:
        """Record `values`, then what they hold, and so on."""
        pending = deque(values)
        while pending and len(self._seen) < _MOST_VALUES:
            value = pending.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value  # holds a reference, so that the id is not used again
                pending.extend(self._record(value))

    def _record(self, value: object) -> Iterable[object]:
        """Record one value; returns what it holds."""
        if isinstance(value, torch.Tensor | np.ndarray):
            self._record_numbers(value)
        elif is_generator(value):
            self._undo.append(partial(set_state_of, value, state_of(value)))
        elif isinstance(value, array | bytearray):
            if self._has_room(len(value) * getattr(value, "itemsize", 1)):
                self._undo.append(partial(_write_back, value, value[:]))
        elif isinstance(value, list | dict | set | deque):
            self._undo.append(partial(_refill, value, value.copy()))
            return [*_contents(value), *self._of_subclass(value)]
        elif isinstance(value, tuple | frozenset | MappingProxyType | ChainMap):  # fixed, but what it holds may change
            return [*_contents(value), *self._of_subclass(value)]
        elif isinstance(value, FunctionType | MethodType | partial):
            return _named(value)
        elif isinstance(value, LRScheduler):  # one that the module keeps and steps itself
            return self.attributes(value)
        elif isinstance(value, type):
            return self._of_class(value) if is_users_module(value.__module__) else ()
        elif isinstance(value, torch.nn.Module):
            return self._of_layer(value)
        elif variables(value) is not None or _holds_values(value):
            return [*self.attributes(value), type(value)]
        return ()

    def _of_layer(self, layer: torch.nn.Module) -> list[object]:
        # A network in a list, for example, is no submodule; its buffers are recorded here.
        held: list[object] = (
            [] if id(layer) in self._submodules else [*layer._buffers.values(), *layer._modules.values()]
        )
        if variables(layer) is not None or _holds_values(layer):
            return [*self.attributes(layer), type(layer), *held]
        if is_torchs(layer):
            self._undo.append(partial(_reset_settings, layer, settings(layer)))
        return held

    def _of_subclass(self, collection: Any) -> Iterable[object]:
        """The attributes of a collection of the user's class."""
        return () if variables(collection) is None else self.attributes(collection)

    def _of_class(self, kind: type) -> list[object]:
        self._undo.append(partial(_reset_class, kind, _plain_attributes(kind)))
        held = (getattr(each, "__func__", each) for each in vars(kind).values())  # of static and class methods
        return [*held, *kind.__bases__]

    def _record_numbers(self, value: torch.Tensor | np.ndarray) -> None:
        if isinstance(value, np.ndarray):
            if value.flags.writeable and self._has_room(value.nbytes):
                self._undo.append(partial(np.copyto, value, value.copy()))
        elif type(value) is torch.Tensor and _is_plain(value) and self._has_room(value.nbytes):
            self._undo.append(partial(_copy_back, value, value.detach().clone()))

    def attributes(self, value: object) -> Iterable[object]:
        """Record which attributes `value` has; returns them."""
        self._seen[id(value)] = value
        own = {name: held for name, held in _attributes(value).items() if name not in OURS}
        self._undo.append(partial(_reset, value, own))
        return own.values()

    def _has_room(self, size: int) -> bool:
        fits = self._bytes + size <= _MOST_BYTES
        self._bytes += size if fits else 0
        return fits


def _contents(collection: Any) -> Iterable[object]:
    if isinstance(collection, ChainMap):
        return collection.maps
    if len(collection) > _MOST_ITEMS:
        return ()
    return collection.values() if isinstance(collection, dict | MappingProxyType) else collection


def _named(function: FunctionType | MethodType | partial[Any]) -> list[object]:
    """The values that a function was created with, and the global variables that it names if it is the user's."""
    if isinstance(function, MethodType):
        return [function.__self__, function.__func__]
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    held = [*captured(function).values(), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if is_users_module(function.__globals__.get("__name__", "")):
        variables = function.__globals__
        held += [variables[name] for name in names_in(function.__code__) if name in variables]
    return held


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be compared and written: it is no sparse one, for example."""
    unusual = tensor.is_meta or tensor.is_nested or tensor.is_inference()
    return tensor.layout is torch.strided and not unusual


def _copy_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    # An unchanged tensor is not written, so that its version counter stays the same.
    if tensor.shape != before.shape:  # it was resized
        tensor.data = before
    elif not torch.equal(tensor, before):
        tensor.copy_(before)


def _refill(collection: Any, before: Any) -> None:
    # An unchanged collection is not written, because other threads may read it.
    if len(collection) == len(before) and _items(collection) == _items(before):
        return
    collection.clear()
    collection.extend(before) if isinstance(collection, list | deque) else collection.update(before)


def _write_back(numbers: Any, before: Any) -> None:
    if numbers != before:
        numbers[:] = before


def _items(collection: Any) -> Any:
    """What makes two collections equal: the items themselves, whatever they say about being equal."""
    if isinstance(collection, dict):
        return list(collection), list(map(id, collection.values()))
    return collection if isinstance(collection, set) else list(map(id, collection))


def _reset(value: object, before: dict[str, Any]) -> None:
    now = _attributes(value)
    for name in [name for name in now if name not in OURS and name not in before]:
        object.__delattr__(value, name)
    for name in [name for name, held in before.items() if name not in now or now[name] is not held]:
        _write(value, name, before[name])


def is_torchs(layer: torch.nn.Module) -> bool:
    return type(layer).__module__.startswith("torch.nn.")


def settings(layer: torch.nn.Module) -> dict[str, Any]:
    """The attributes of a layer of torch that a script may set, such as the rate of a dropout or the momentum of a batch norm."""
    if isinstance(layer, LazyModuleMixin):  # its first forward sets them
        return {}
    own = {name: value for name, value in vars(layer).items() if not name.startswith("_") and name not in OURS}
    return {name: value for name, value in own.items() if isinstance(value, int | float | str | tuple | None)}


def _reset_settings(layer: torch.nn.Module, before: dict[str, Any]) -> None:
    now = settings(layer)
    for name in [name for name, value in before.items() if name in now and now[name] is not value]:
        vars(layer)[name] = before[name]


def _plain_attributes(kind: type) -> dict[str, Any]:
    """The attributes of a class that are values, without methods and properties."""
    values = {name: held for name, held in vars(kind).items() if not name.startswith("__")}
    return {name: held for name, held in values.items() if not callable(held) and not hasattr(held, "__get__")}


def _reset_class(kind: type, before: dict[str, Any]) -> None:
    now = _plain_attributes(kind)
    for name in now.keys() - before.keys():
        delattr(kind, name)
    for name in [name for name, held in before.items() if now.get(name) is not held]:
        setattr(kind, name, before[name])


def _write(value: object, name: str, held: object) -> None:
    if name in _slots(value):
        object.__setattr__(value, name, held)
    else:
        vars(value)[name] = held


def is_users(value: object) -> bool:
    """Whether the class of `value` is the user's, not one of an installed package."""
    if isinstance(value, type | ModuleType) or not hasattr(value, "__dict__"):
        return False
    return is_users_module(type(value).__module__)


def variables(value: object) -> dict[str, Any] | None:
    """The attributes of an object of the user's class, or of a SimpleNamespace, those in `__slots__` included; None for other objects."""
    with_slots = _slots(value) and is_users_module(type(value).__module__)
    return _attributes(value) if with_slots or is_users(value) or isinstance(value, SimpleNamespace) else None


def _attributes(value: object) -> dict[str, Any]:
    """The attributes of any object, those in `__slots__` included. Does not call `__getattr__`, which may make a value on first use."""
    held = dict(getattr(value, "__dict__", {}))
    for slot in _slots(value):
        with contextlib.suppress(AttributeError):  # not set yet
            held[slot] = object.__getattribute__(value, slot)
    return held


def _slots(value: object) -> list[str]:
    declared = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [slot for each in declared for slot in ([each] if isinstance(each, str) else each)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _holds_values(value: object) -> bool:
    """Whether an object of a library only holds values, such as a metric in a list or a table."""
    if isinstance(value, type | ModuleType) or not hasattr(value, "__dict__"):
        return False
    return isinstance(value, UserDict | UserList) or type(value).__module__.partition(".")[0] in _HOLD_VALUES


def is_users_module(name: str) -> bool:
    """Whether the module called `name` is the user's, not one of an installed package."""
    package, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None)
    if package in LIBRARIES:  # they may be installed from a folder of their sources
        return False
    return file is None or not (file.startswith(_installed()) or "-packages" + os.sep in file)


@functools.cache
def _installed() -> tuple[str, ...]:
    """The directories of installed packages; those of other environments on the path are called site-packages or dist-packages."""
    return tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
