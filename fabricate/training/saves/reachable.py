"""What the user's code reaches outside of the attributes of its objects: global variables, variables of enclosing functions and class
attributes that methods name, and random generators, however deep inside other objects.

A method counts if a library calls it, because it has a name of the library's, or if a function that counts names it; one that only the
script calls does not. Nothing is called: only attributes, items and the names in the code of functions are read.

Must not know: runs, what is done about it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fabricate.data.identity import is_hugging_face, names_in
from fabricate.hooks import HOOKS, PROJECT
from fabricate.optim.schedules import captured
from fabricate.seeding import is_generator, is_global
from fabricate.training.saves.attributes import OURS, is_users, is_users_module

_ONCE = frozenset({"__init__", "configure_model", "configure_optimizers", "init_weights", "on_fit_start", "export"})
"""Methods that a resumed run calls again, so that what they use is as before."""
_CALLED = frozenset({*HOOKS, "set_epoch", "state_dict", "load_state_dict"})
"""Methods that are called where a class of the user need not inherit them from a library."""
_CLOSED = frozenset({"torch", "torchmetrics", "accelerate", "fabricate", "pandas", "logging", "sklearn", "optuna"})
"""Packages whose objects are not looked into, except torch's data sets and loaders."""
_LOADING = "torch.utils.data."
_MOST_ITEMS, _MOST_VALUES = 200, 5000
"""Limits: the items of a collection that are followed, because longer ones hold rows, and the values in all."""


class Reachable:
    """What some objects and functions reach. `variables`: global variables, variables of enclosing functions and class attributes, by a
    name for messages. `generators`: random generators inside objects and variables, by a name for messages; of a collator of transformers
    that makes one at the first batch, the collator. `in_libraries`: the names of those inside objects of installed packages."""

    def __init__(self, roots: Iterable[tuple[str, Any]], functions: Iterable[tuple[str, Any]] = ()) -> None:
        """`roots`: the objects with their names. Generators that are attributes of a root are left out. `functions`: further functions or
        callable objects."""
        self.variables: dict[str, Any] = {}
        self.generators: dict[str, Any] = {}
        self.in_libraries: set[str] = set()
        self._libraries: list[str] = []
        self._names: set[str] = set()
        self._waiting: dict[str, list[FunctionType]] = {}
        """The names in the functions that were read, and the methods that none of them names so far."""
        self._seen: dict[int, object] = {}
        roots = list(roots)
        self._roots = {id(root) for _, root in roots}
        self._pending = deque([*roots, *functions])
        while self._pending and len(self._seen) < _MOST_VALUES:
            path, value = self._pending.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value  # holds a reference, so that the id is not used again
                # An object may not let itself be looked at, such as a proxy of one that is gone.
                with contextlib.suppress(Exception):
                    self._pending.extend(self._inside(path, value))

    def _inside(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Record one value; yields what it holds, with names."""
        if is_generator(value):
            if is_global(value):  # of which random.randint is a method
                return
            self.generators[path] = value
            self.in_libraries.update([path] if any(map(path.startswith, self._libraries)) else [])
        elif isinstance(value, FunctionType):
            yield from self._named(value)
        elif isinstance(value, MethodType):
            yield from ((path, value.__self__), (path, value.__func__))
        elif isinstance(value, partial):
            yield from ((path, each) for each in (value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, list | tuple | set | deque | dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{path}[{key!r}]", item) for key, item in items if len(value) <= _MOST_ITEMS)
        elif not isinstance(value, type | ModuleType | torch.Tensor | np.ndarray):
            yield from self._of_object(path, value)

    def _of_object(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        where, held = type(value).__module__, getattr(value, "__dict__", {})
        if is_hugging_face(value, "Dataset") or is_hugging_face(value, "IterableDataset"):
            yield path, (held.get("_format_kwargs") or {}).get("transform")
        elif is_users(value):
            yield from self._attributes(path, value)
            for kind in type(value).__mro__:
                if is_users_module(kind.__module__):
                    yield from self._of_class(kind, type(value), set(held))
        elif where.startswith(_LOADING):
            yield from self._attributes(path, value)
        elif where.partition(".")[0] not in _CLOSED:
            self._libraries.append(f"{path}.")
            if "generator" in held and held["generator"] is None and held.get("seed") is not None:
                self.generators[path] = value
            yield from self._attributes(path, value)

    def _attributes(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """The attributes of an object, without generators of roots, and without those of torch's loaders and samplers, which are seeded."""
        without_generators = id(value) in self._roots or type(value).__module__.startswith(_LOADING)
        for name, attribute in getattr(value, "__dict__", {}).items():
            if name not in OURS and not (without_generators and is_generator(attribute)):
                yield f"{path}.{name}", attribute

    def _of_class(self, kind: type, of: type, hidden: set[str]) -> Iterator[tuple[str, Any]]:
        """The methods of `kind`, a base class of `of` or itself, that are called, and its attributes, except those `hidden` by others."""
        for name, attribute in vars(kind).items():
            if isinstance(attribute, classmethod):  # probably makes an object
                continue
            function = getattr(attribute, "fget", None) or getattr(attribute, "__func__", attribute)
            if not isinstance(function, FunctionType):
                if not name.startswith("__") and name not in hidden and not hasattr(attribute, "__get__"):
                    yield from self._variable(f"{kind.__name__}.{name}", attribute)
            elif name in _ONCE:
                continue
            elif self._names.intersection((name, "getattr")) or _is_called(name, function, of):
                yield name, function
            else:
                self._waiting.setdefault(name, []).append(function)

    def _named(self, function: FunctionType) -> Iterator[tuple[str, Any]]:
        """The variables that a function of the user names."""
        variables, names = function.__globals__, set(names_in(function.__code__))
        where = variables.get("__name__", "")
        if not is_users_module(where):
            return
        self._names |= names
        # After a getattr, any name may follow.
        for name in list(self._waiting) if "getattr" in names else names & self._waiting.keys():
            yield from ((name, method) for method in self._waiting.pop(name))
        for name, value in captured(function).items():
            yield from self._variable(f"variable {name} of {function.__name__}", value)
        for name in sorted(_globals_in(function.__code__) & variables.keys()):
            value = variables[name]
            if isinstance(value, ModuleType) and is_users_module(value.__name__):
                for inner in sorted(names & vars(value).keys()):
                    yield from self._variable(f"global variable {value.__name__}.{inner}", vars(value)[inner])
            elif isinstance(value, type) and is_users_module(value.__module__):
                yield from self._of_named_class(value, names)
            else:
                yield from self._variable(f"global variable {name}", value)

    def _of_named_class(self, kind: type, names: set[str]) -> Iterator[tuple[str, Any]]:
        """The attributes of a class that a function names, or a method of the class that the function names too."""
        held = {name: getattr(each, "__func__", each) for name, each in vars(kind).items() if not name.startswith("__")}
        methods = [held[name] for name in sorted(names & held.keys()) if isinstance(held[name], FunctionType)]
        named = names.union(*(names_in(method.__code__) for method in methods))
        for name in sorted(named & held.keys()):
            if not callable(held[name]) and not hasattr(held[name], "__get__"):
                yield from self._variable(f"{kind.__name__}.{name}", held[name])

    def _variable(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Record a variable, and yield it. Without data sets, which a hook may evaluate or count, and roots."""
        if id(value) in self._roots or isinstance(value, Dataset | DataLoader):
            return
        if not isinstance(value, FunctionType | MethodType | partial | type | ModuleType):
            self.variables.setdefault(name, value)
        yield name, value


@functools.cache
def _globals_in(code: CodeType) -> frozenset[str]:
    """The names of the global variables that `code`, or a function inside it, reads, without attributes of the same names."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own.union(*(_globals_in(inner) for inner in code.co_consts if isinstance(inner, CodeType))))


def _is_called(name: str, function: FunctionType, kind: type) -> bool:
    """Whether a library calls the method `name` of the class `kind`: a hook, or one that a class of the library has."""
    is_theirs = (
        name in _CALLED or (name.startswith("__") and name.endswith("__")) or hasattr(function, f"{PROJECT}_impl")
    )
    return is_theirs or any(name in vars(base) for base in kind.__mro__ if not is_users_module(base.__module__))
