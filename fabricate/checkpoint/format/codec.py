"""Values as tagged JSON: the exact, closed set of values that a checkpoint can hold, and nothing that can run code.

Owns the mapping between Python values and JSON trees; `canonical_json` makes bytes of a tree. Must not know files, checkpoint directories
or tensor libraries: a callback of the caller decides which objects are stored elsewhere as tensors, and torch and numpy are used only for a
value or a tag that belongs to them.

A value that JSON holds exactly is written unchanged. Any other value becomes an object whose key ``"$"`` names its kind: ``{"$": "tuple",
"items": [1, 2]}``. `_KINDS` is the table of kinds; `docs/checkpoint-format.md` lists them.
"""

from __future__ import annotations

import base64
import binascii
import enum
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Any, Final, NamedTuple

from fabricate.checkpoint.format.canonical_json import MAXIMUM_DEPTH, JsonValue, dumps
from fabricate.errors import CheckpointError

__all__ = ["decode", "encode"]

_TAG = "$"
_MAXIMUM_NESTING = MAXIMUM_DEPTH // 4  # the limit for values, since a tagged value takes up to three JSON levels
_EXACT_INTEGER = 2**53  # a reader that keeps numbers as doubles rounds larger integers
_NUMERIC_KINDS = "biufcmM"
_ARRAY_KINDS = _NUMERIC_KINDS + "SU"
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSU]\d{1,9}|[<>][mM]8(\[\d{0,9}[A-Za-z]{1,2}\])?")
_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+")
_TORCH_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,31}")


def encode(value: object, tensor: Callable[[str, object], str | None], path: str = "state") -> JsonValue:
    """Return `value` as a JSON tree from which `decode` rebuilds it exactly: types, key order, nan and -0.0 included.

    Supported: None, bool, int, str, float, complex, list, tuple, dict (any encodable keys), OrderedDict, Counter, deque, set, frozenset,
    bytes, Path, timedelta, numpy scalars and arrays, `torch.dtype` and `torch.Size`. Types are matched exactly: a subclass would come back
    as its base. Identity is not kept: an object that occurs twice comes back as two equal objects.

    Args:
        value: what to save.
        tensor: called as ``tensor(path, object)`` for every numpy array and every object of another type; returns the
            name under which the caller stores the object, or None if it does not store it (an array is then written
            into the JSON).
        path: the name of `value` in messages, and the beginning of the paths given to `tensor`.

    Raises:
        CheckpointError: neither this module nor `tensor` can store an object; names its path, such as
            ``state.history[3].model``.

    >>> encode({"lr": (0.1, float("inf"))}, lambda path, value: None)
    {'lr': {'$': 'tuple', 'items': [0.1, {'$': 'float', 'value': 'inf'}]}}
    """
    return _Encoder(tensor).encode(value, path, 0)


def decode(tree: object, tensor: Callable[[str], object]) -> object:
    """Return the value that `encode` turned into `tree`.

    Args:
        tree: the output of `encode`, or of `loads` on its bytes.
        tensor: called with every name that `encode`'s callback returned; returns the object.

    Raises:
        CheckpointError: `encode` does not write such a tree; names the place.

    >>> decode({"$": "tuple", "items": [1, 2]}, tensor={}.__getitem__)
    (1, 2)
    """
    return _Decoder(tensor).decode(tree, "state")


class _Encoder:
    def __init__(self, tensor: Callable[[str, object], str | None]) -> None:
        self._tensor = tensor

    def encode(self, value: Any, path: str, depth: int) -> JsonValue:
        if depth > _MAXIMUM_NESTING:
            raise CheckpointError(
                f"{path} is nested deeper than {_MAXIMUM_NESTING}, or contains itself: save a flat value"
            )
        kind = type(value)
        if kind in _EXACT_IN_JSON and _EXACT_IN_JSON[kind](value):
            return value  # type: ignore[no-any-return]
        if kind is list:
            return self.items(value, path, depth)
        if kind is dict and _is_plain_object(value):
            return {key: self.encode(item, path + _step(key), depth + 1) for key, item in value.items()}
        tag = _TAGS.get(kind) or _tag_by_name(value)
        return self._foreign(value, path, depth) if tag is None else self._tagged(tag, value, path, depth)

    def _tagged(self, tag: str, value: object, path: str, depth: int) -> JsonValue:
        return {_TAG: tag, **_KINDS[tag].encode(self, value, path, depth)}

    def items(self, values: Iterable[object], path: str, depth: int) -> list[JsonValue]:
        return [self.encode(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(values)]

    def sorted_items(self, values: Iterable[object], path: str, depth: int) -> list[JsonValue]:
        """The encoded members of a set, in an order that does not depend on hashes."""
        items = [self.encode(item, f"{path}{{{index}}}", depth + 1) for index, item in enumerate(values)]
        return sorted(items, key=dumps)

    def pairs(self, values: dict[Any, Any], path: str, depth: int) -> list[JsonValue]:
        pairs: list[JsonValue] = []
        for key, item in values.items():
            inside = path + _step(key)
            pairs.append([self.encode(key, f"the key {inside}", depth + 1), self.encode(item, inside, depth + 1)])
        return pairs

    def _foreign(self, value: object, path: str, depth: int) -> JsonValue:
        """Encode an object that the caller stores elsewhere, or an array. Raises CheckpointError for any other object."""
        if isinstance(value, enum.Enum):
            raise CheckpointError(
                f"{path} is the enum member {value}, which JSON cannot name: save its .name or .value"
            )
        if isinstance(value, defaultdict):
            raise CheckpointError(f"{path} is a defaultdict, whose factory is code: save dict(value)")
        reference = self._tensor(path, value)
        if reference is not None:
            return self._tagged("tensor", reference, path, depth)
        if _is_array(value):
            return self._tagged("numpy.array", value, path, depth)
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(
            f"{path} is a {name}, which a checkpoint cannot hold: save its state_dict(), or tensors, arrays, numbers, "
            "strings and containers of them"
        )


class _Decoder:
    def __init__(self, tensor: Callable[[str], object]) -> None:
        self.tensor = tensor

    def decode(self, tree: object, path: str) -> Any:
        if isinstance(tree, list):
            return [self.decode(item, f"{path}[{index}]") for index, item in enumerate(tree)]
        if not isinstance(tree, dict):
            return tree
        if _TAG not in tree:
            return {key: self.decode(item, path + _step(key)) for key, item in tree.items()}
        try:
            return self._tagged(tree, path)
        except (ValueError, TypeError, OverflowError, binascii.Error) as exc:
            raise CheckpointError(f"{path} is a malformed {tree[_TAG]!r} value: {exc}") from exc

    def _tagged(self, tree: dict[str, Any], path: str) -> Any:
        tag = tree[_TAG]
        kind = _KINDS.get(tag) if isinstance(tag, str) else None
        fields = {name: value for name, value in tree.items() if name != _TAG}
        if kind is None or not kind.has(fields):
            raise CheckpointError(
                f"{path} has the unknown or malformed kind {tag!r}: was it written by a newer fabricate?"
            )
        return kind.decode(self, path, **fields)

    def float(self, tree: object, path: str) -> float:
        number = self.decode(tree, path)
        if type(number) is not float:
            raise ValueError(f"{number!r} is not a float")
        return number

    def pairs(self, items: Iterable[object], path: str) -> list[tuple[Any, Any]]:
        pairs = []
        for item in items:
            if not isinstance(item, list) or len(item) != 2:
                raise ValueError("its items must be [key, value] pairs")
            key = self.decode(item[0], f"a key of {path}")
            pairs.append((key, self.decode(item[1], path + _step(key))))
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a key occurs twice")
        return pairs


def _step(key: object) -> str:
    """Return the step that `key` adds to a path: ``.momentum``, ``['a b']`` or ``[3]``."""
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    return f"[{key!r}]"


def _is_plain(text: str) -> bool:
    """Whether JSON keeps `text` exactly: two surrogate halves in a row would come back as one character."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _is_plain_object(value: dict[Any, Any]) -> bool:
    """Whether JSON keeps `value` exactly: canonical JSON sorts keys, so only a dict with sorted keys keeps its order."""
    keys = list(value)
    return all(type(key) is str and _is_plain(key) for key in keys) and _TAG not in value and keys == sorted(keys)


def _tag_by_name(value: Any) -> str | None:
    """The kind of a value that cannot be looked up by its class: a Path has a class per platform, and numpy and torch may not be
    imported."""
    if isinstance(value, Path):
        return "path"
    kind, numpy = type(value), sys.modules.get("numpy")  # a numpy value exists only if numpy is imported
    if kind.__module__ == "torch" and kind.__qualname__ in ("Size", "dtype"):
        return f"torch.{kind.__qualname__}"
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMERIC_KINDS:
        return "numpy.scalar"
    return None


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in _ARRAY_KINDS


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _numpy_array(dtype: str, shape: list[Any], text: str) -> Any:
    import numpy

    if not _ARRAY_DTYPE.fullmatch(dtype):
        raise ValueError(f"dtype {dtype!r} is not a plain array type")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape} is not a list of sizes")
    kind, data = numpy.dtype(dtype), _bytes(text)
    if math.prod(shape) * kind.itemsize != len(data):  # checked before numpy allocates memory for the shape
        raise ValueError(f"{len(data)} bytes do not fill shape {shape} of {dtype}")
    return numpy.ndarray(tuple(shape), kind, buffer=data).copy()


def _torch_dtype(name: str, path: str) -> object:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{path} is torch.{name}, which this torch does not have: upgrade torch")
    return dtype


def _torch_size(items: list[Any]) -> object:
    import torch

    return torch.Size(items)


# The table of kinds


class _Kind(NamedTuple):
    """One kind of tagged object. The fields of an object are its keys other than ``"$"``.

    type: the exact class of the values of this kind; None if `_tag_by_name` or `_Encoder` recognises them.
    encode: returns the fields of a value, called as ``encode(encoder, value, path, depth)``.
    fields: a test for the JSON of each field; an object with other fields is an error.
    decode: returns the value of such fields, called as ``decode(decoder, path, **fields)``; raises ValueError for malformed fields.
    """

    type: type | None
    encode: Callable[..., dict[str, JsonValue]]
    fields: dict[str, Callable[[Any], bool]]
    decode: Callable[..., Any]

    def has(self, fields: dict[str, Any]) -> bool:
        return fields.keys() == self.fields.keys() and all(self.fields[name](value) for name, value in fields.items())


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_integers(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) for item in value)


def _anything(value: object) -> bool:
    return True


def _sequence(kind: type) -> _Kind:
    """The kind of a container that is rebuilt from the list of its items."""
    return _Kind(
        kind,
        lambda encoder, value, path, depth: {"items": encoder.items(value, path, depth)},
        {"items": _is_list},
        lambda decoder, path, items: kind(decoder.decode(items, path)),
    )


def _set(kind: type) -> _Kind:
    return _sequence(kind)._replace(
        encode=lambda encoder, value, path, depth: {"items": encoder.sorted_items(value, path, depth)}
    )


def _mapping(kind: type) -> _Kind:
    """The kind of a mapping, stored as [key, value] pairs in its own order."""
    return _Kind(
        kind,
        lambda encoder, value, path, depth: {"items": encoder.pairs(value, path, depth)},
        {"items": _is_list},
        lambda decoder, path, items: kind(dict(decoder.pairs(items, path))),
    )


_EXACT_IN_JSON: Final[dict[type, Callable[[Any], bool]]] = {
    NoneType: _anything,
    bool: _anything,
    int: lambda value: abs(value) < _EXACT_INTEGER,
    float: math.isfinite,
    str: _is_plain,
}
"""For each scalar type, a test whether JSON holds a value exactly."""

_KINDS: Final[dict[str, _Kind]] = {
    "tensor": _Kind(
        None,
        lambda encoder, reference, path, depth: {"ref": reference},
        {"ref": _is_text},
        lambda decoder, path, ref: decoder.tensor(ref),
    ),
    "int": _Kind(
        int,
        lambda encoder, value, path, depth: {"value": hex(value)},
        {"value": lambda value: isinstance(value, str) and _HEXADECIMAL.fullmatch(value) is not None},
        lambda decoder, path, value: int(value, 16),
    ),
    "float": _Kind(
        float,
        lambda encoder, value, path, depth: {"value": repr(value)},
        {"value": lambda value: value in ("nan", "inf", "-inf")},
        lambda decoder, path, value: float(value),
    ),
    "str": _Kind(
        str,
        lambda encoder, value, path, depth: {"base64": _base64(value.encode("utf-8", "surrogatepass"))},
        {"base64": _is_text},
        lambda decoder, path, base64: _bytes(base64).decode("utf-8", "surrogatepass"),
    ),
    "bytes": _Kind(
        bytes,
        lambda encoder, value, path, depth: {"base64": _base64(value)},
        {"base64": _is_text},
        lambda decoder, path, base64: _bytes(base64),
    ),
    "complex": _Kind(
        complex,
        lambda encoder, value, path, depth: {
            "value": [encoder.encode(part, path, depth + 1) for part in (value.real, value.imag)]
        },
        {"value": lambda value: isinstance(value, list) and len(value) == 2},
        lambda decoder, path, value: complex(*(decoder.float(part, path) for part in value)),
    ),
    "path": _Kind(
        None,
        lambda encoder, value, path, depth: {"value": encoder.encode(str(value), path, depth + 1)},
        {"value": _anything},
        lambda decoder, path, value: Path(decoder.decode(value, path)),
    ),
    "timedelta": _Kind(
        timedelta,
        lambda encoder, value, path, depth: {"value": [value.days, value.seconds, value.microseconds]},
        {"value": lambda value: _is_integers(value) and len(value) == 3},
        lambda decoder, path, value: timedelta(*value),
    ),
    "tuple": _sequence(tuple),
    "set": _set(set),
    "frozenset": _set(frozenset),
    "deque": _Kind(
        deque,
        lambda encoder, value, path, depth: {"items": encoder.items(value, path, depth), "maxlen": value.maxlen},
        {"items": _is_list, "maxlen": lambda value: isinstance(value, int | None)},
        lambda decoder, path, items, maxlen: deque(decoder.decode(items, path), maxlen),
    ),
    "dict": _mapping(dict),
    "OrderedDict": _mapping(OrderedDict),
    "Counter": _mapping(Counter),
    "numpy.scalar": _Kind(
        None,
        lambda encoder, value, path, depth: {"dtype": value.dtype.str, "base64": _base64(value.tobytes())},
        {"dtype": _is_text, "base64": _is_text},
        lambda decoder, path, dtype, base64: _numpy_array(dtype, [], base64)[()],
    ),
    "numpy.array": _Kind(
        None,
        lambda encoder, value, path, depth: {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "base64": _base64(value.tobytes()),
        },
        {"dtype": _is_text, "shape": _is_list, "base64": _is_text},
        lambda decoder, path, dtype, shape, base64: _numpy_array(dtype, shape, base64),
    ),
    "torch.dtype": _Kind(
        None,
        lambda encoder, value, path, depth: {"value": str(value).removeprefix("torch.")},
        {"value": lambda value: isinstance(value, str) and _TORCH_DTYPE.fullmatch(value) is not None},
        lambda decoder, path, value: _torch_dtype(value, path),
    ),
    "torch.Size": _Kind(
        None,
        lambda encoder, value, path, depth: {"items": encoder.items(value, path, depth)},
        {"items": _is_list},
        lambda decoder, path, items: _torch_size(items),
    ),
}

_TAGS: Final = {kind.type: tag for tag, kind in _KINDS.items() if kind.type is not None}
