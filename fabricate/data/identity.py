"""Fingerprints that distinguish training sets of the same length, computed without running user code. Must not know: sources, ranks."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from fabricate.data.digests import digest
from fabricate.seeding import is_generator, state_of

_SAMPLED = 8
"""About how many rows of data in memory a digest covers."""


def is_hugging_face(data: Any, name: str) -> bool:
    """Whether `data` is an object of the class `name` of `datasets`."""
    datasets = sys.modules.get("datasets")  # before this import, its objects cannot exist
    return datasets is not None and isinstance(data, getattr(datasets, name))


def fingerprint(data: Any) -> str | None:
    """A fingerprint of the rows of `data`: the fingerprint that a `datasets.Dataset` has, or a digest of some rows of a tensor, an array or
    a list, or of the tensors and arrays that are attributes of a data set. None if `data` has none of these."""
    if is_hugging_face(data, "Dataset"):
        return str(data._fingerprint)
    if isinstance(data, Subset):
        return fingerprint(data.dataset)  # `indices` covers the choice of rows
    if isinstance(data, ConcatDataset | StackDataset):
        parts = data.datasets
        prints = [fingerprint(part) for part in (parts.values() if isinstance(parts, dict) else parts)]
        return None if None in prints else digest(prints)
    held = data.tensors if isinstance(data, TensorDataset) else [data] if _is_table(data) else _attributes(data)
    return digest([_sample(each) for each in held]) if held else None


def attributes(data: Any) -> dict[str, str]:
    """By name, a digest of some entries of each list, tuple, mapping and table that is an attribute of a data set, and of the data sets
    inside it. Call it before rows are read: while they are, data may open files and fill caches, which are no rows."""
    found: dict[str, Any] = {}
    for path, each in _with_inner(data).items():
        found |= {f"{path}{name}": _entries(value) for name, value in _held(each) if _is_collection(value)}
        found |= {path.rstrip("."): inside} if each is not data and (inside := fingerprint(each)) else {}
    return {name: digest(entries) for name, entries in found.items()}


def _with_inner(data: Any) -> dict[str, Any]:
    """A data set and those that are its attributes, as in one that transforms the rows of another, or takes some or joins several. By the
    name of the attribute with a dot; "" for `data` itself."""
    found: dict[str, Any] = {}
    following = [("", data)]
    while following:
        path, each = following.pop()
        if all(each is not known for known in found.values()):
            found[path] = each
            inner = _held(each)
            if isinstance(each, ConcatDataset | StackDataset):
                parts = each.datasets.items() if isinstance(each.datasets, dict) else enumerate(each.datasets)
                inner = [*inner, *((f"datasets[{key!r}]", part) for key, part in parts)]
            following += [(f"{path}{name}.", value) for name, value in inner if _is_data_set(value)]
    return found


def _is_data_set(value: Any) -> bool:
    return isinstance(value, Dataset) or is_hugging_face(value, "Dataset")


def _held(data: Any) -> list[tuple[str, Any]]:
    """The attributes of a data set by name; none for `datasets`, which has a fingerprint of its own."""
    of_library = is_hugging_face(data, "Dataset") or is_hugging_face(data, "IterableDataset")
    return [] if of_library else sorted(getattr(data, "__dict__", {}).items())


def _is_collection(value: Any) -> bool:
    """Whether an attribute of a data set may hold rows, names of files or numbers of labels. One without entries may be a cache. Other
    mappings than dictionaries may be open files."""
    return (isinstance(value, list | tuple | dict | UserDict) and len(value) > 0) or _is_table_of_pandas(value)


def _is_table_of_pandas(value: Any) -> bool:
    return hasattr(type(value), "iloc")


def _entries(value: Any, depth: int = 5) -> Any:
    """A value, or some of what it holds, down to `depth` collections."""
    if _is_table_of_pandas(value):
        some = value.iloc[:: max(1, len(value) // _SAMPLED)].to_numpy()
        return [len(value), _entries(some.tolist(), depth=2)]
    if isinstance(value, np.ndarray | torch.Tensor):
        return _sample(value) if value.ndim and _is_readable(value) else None
    if isinstance(value, dict | UserDict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        count, some = _sample(value)
        return [count, [_entries(each, depth - 1) for each in some] if depth else None]
    if isinstance(value, os.PathLike) or (isinstance(value, str) and os.sep in value):
        return os.path.basename(value)  # the folder may have moved
    if dataclasses.is_dataclass(value) and depth:
        return [_entries(getattr(value, field.name, None), depth - 1) for field in dataclasses.fields(value)]
    plain = isinstance(value, str | bytes | int | float | complex | np.generic | None)
    return value if plain else type(value).__name__  # an open file, for instance, would be read


def indices(data: Any, samplers: Iterable[Any]) -> str | None:
    """A digest of the indices of the rows that `Subset`s and samplers choose, if they have a list of them (`random_split`, a fold); else
    None. A `Subset` may be inside a data set that transforms its rows."""
    listed: list[Any] = []
    while isinstance(data, Subset):
        listed.append(data.indices)
        data = data.dataset
    listed = listed or [each.indices for each in _with_inner(data).values() if isinstance(each, Subset)]
    own = [getattr(sampler, "indices", None) for sampler in samplers]
    listed += [each for each in own if isinstance(each, Sequence | np.ndarray | torch.Tensor)]
    return digest([np.asarray(each) for each in listed]) if listed else None


class Changed(NamedTuple):
    """Two fingerprints that differ: of the attributes `names` of a data set, or, without names, of all of it."""

    then: str
    now: str
    names: list[str]


def changed_rows(then: Mapping[str, Any], now: Mapping[str, Any]) -> Changed | None:
    """How the recorded identity of some data differs from that of data now; None if nothing that both know differs."""
    if differ("fingerprint", then, now):
        return Changed(then["fingerprint"], now["fingerprint"], [])
    before, after = then.get("attributes"), now["attributes"]
    if not isinstance(before, dict):  # recorded by an earlier version
        return None
    names = [name for name in after if name in before and before[name] != after[name]]
    return Changed(before[names[0]], after[names[0]], names) if names else None


def differ(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a value that identifies data is known on both sides and differs."""
    return None not in (then.get(name), now[name]) and then[name] != now[name]


def held(data: Any) -> list[Any]:
    """What determines the rows of `data` and can be compared without reading one: the indices of `Subset`s, and samples of what a data set
    holds: lists of names or numbers, and tensors and arrays with one item per row."""
    if isinstance(data, Subset):
        return [np.asarray(data.indices), *held(data.dataset)]
    if isinstance(data, ConcatDataset | StackDataset):
        parts = data.datasets.values() if isinstance(data.datasets, dict) else data.datasets
        return [each for part in parts for each in held(part)]
    length = len(data) if hasattr(data, "__len__") else None
    rows = [each for each in _attributes(data) if len(each) == length]
    lists = [value for _, value in sorted(getattr(data, "__dict__", {}).items()) if type(value) in (list, tuple)]
    return [*map(_sample, rows), *([_name(entry) for entry in _sample(each)[1]] for each in lists)]


def generators(data: Any) -> dict[str, str]:
    """The random generators that a data set holds as attributes and names outside of its constructor: a digest of the state of each, by
    name."""
    while isinstance(data, Subset):
        data = data.dataset
    named = {name for method in dir(type(data)) if method != "__init__" for name in _names_of(type(data), method)}
    attributes = getattr(data, "__dict__", {}).items()
    held = {name: value for name, value in attributes if name in named and is_generator(value)}
    return {f"{type(data).__name__}.{name}": digest(state_of(value)) for name, value in held.items()}


def _names_of(kind: type, method: str) -> set[str]:
    """The names in the code of a method of a class, and of the method that it overrides if it names `super`."""
    names: set[str] = set()
    for base in kind.__mro__:
        if isinstance(function := vars(base).get(method), FunctionType):
            names |= set(names_in(function.__code__))
            if "super" not in names:
                break
    return names


def names_in(code: CodeType) -> Iterator[str]:
    """The names of globals, attributes and enclosing variables in `code`, and in the functions and comprehensions inside it."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def _name(entry: Any) -> Any:
    """A number, a text, or the last part of a path, because folders may differ between nodes; of a tuple its first item. Else None."""
    first = entry[0] if isinstance(entry, tuple) and entry else entry
    if isinstance(first, str | os.PathLike):
        return os.path.basename(first)
    return first if isinstance(first, int) else None


def _is_table(data: Any) -> bool:
    return isinstance(data, list | tuple | torch.Tensor | np.ndarray)


def _attributes(data: Any) -> list[Any]:
    """The tensors and arrays that a data set holds."""
    held = (value for _, value in sorted(getattr(data, "__dict__", {}).items()))
    return [
        value for value in held if isinstance(value, np.ndarray | torch.Tensor) and value.ndim and _is_readable(value)
    ]


def _is_readable(held: np.ndarray[Any, Any] | torch.Tensor) -> bool:
    return isinstance(held, np.ndarray) or (held.layout is torch.strided and not held.is_meta)


def _sample(rows: Any) -> list[Any]:
    """The number of rows, and some of the rows; of paths only the last part."""
    some = list(rows[:: max(1, len(rows) // _SAMPLED)])
    return [len(rows), [os.path.basename(each) if isinstance(each, str) and os.sep in each else each for each in some]]
