"""State as tagged JSON: the exact, closed set of values that a checkpoint can hold, and nothing that can run code.

Owns the mapping between Python values and JSON trees and the strict, canonical JSON bytes. It knows no file, no
checkpoint directory and no tensor library: whoever calls it says, through one callback, which objects live elsewhere as
tensors, and torch and numpy are looked at only when a value or a tag names them.

A value that JSON holds exactly is written as itself. Everything else is an object whose ``"$"`` key names its kind, as
``{"$": "tuple", "items": [1, 2]}``; `docs/checkpoint-format.md` lists the kinds.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from fabricate.errors import CheckpointError

__all__ = ["MAXIMUM_BYTES", "MAXIMUM_DEPTH", "JsonValue", "decode", "dumps", "encode", "loads"]

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

MAXIMUM_BYTES = 512 * 2**20
"""The longest JSON text that is written or read: a manifest of some ten TiB of tensors."""

MAXIMUM_DEPTH = 256
"""How deep JSON may nest. A value may nest `MAXIMUM_DEPTH // 4` deep: a tagged one takes up to three JSON levels."""

_TAG = "$"
_EXACT_INTEGER = 2**53  # from here on a reader that keeps numbers as doubles would round
_NUMERIC_KINDS = "biufcmM"
_ARRAY_KINDS = _NUMERIC_KINDS + "SU"
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSU]\d{1,9}|[<>][mM]8(\[\d{0,9}[A-Za-z]{1,2}\])?")
_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]+")
_TORCH_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,31}")


def encode(value: object, tensor: Callable[[str, object], str | None], path: str = "state") -> JsonValue:
    """Return `value` as a JSON tree from which `decode` rebuilds it exactly: types, key order, nan and -0.0 included.

    Known: None, bool, int, str, float, complex, list, tuple, dict (any encodable keys), OrderedDict, Counter, deque,
    set, frozenset, bytes, Path, timedelta, numpy scalars and arrays, `torch.dtype` and `torch.Size`. Types are
    matched exactly: a subclass would come back as its base. Identity is not kept: an object that occurs twice comes
    back as two equal ones.

    Args:
        value: what to save.
        tensor: called as ``tensor(path, object)`` for every numpy array and every object of another type; returns the
            name under which the caller stores the object, or None if it does not take it (an array then travels inside
            the JSON).
        path: what to call `value` in messages and in the paths that `tensor` sees.

    Raises:
        CheckpointError: an object that neither this module nor `tensor` takes; names its path, as
            ``state.history[3].model``.

    >>> encode({"lr": (0.1, float("inf"))}, lambda path, value: None)
    {'lr': {'$': 'tuple', 'items': [0.1, {'$': 'float', 'value': 'inf'}]}}
    """
    return _Encoder(tensor).encode(value, path, 0)


def decode(tree: object, tensor: Callable[[str], object]) -> object:
    """Return the value that `encode` made `tree` from.

    Args:
        tree: the output of `encode`, or of `loads` on its bytes.
        tensor: called with every reference name that `encode`'s callback returned; gives back the object.

    Raises:
        CheckpointError: a tree that `encode` does not write; names the place.

    >>> decode({"$": "tuple", "items": [1, 2]}, tensor={}.__getitem__)
    (1, 2)
    """
    return _Decoder(tensor).decode(tree, "state")


def dumps(tree: object) -> bytes:
    """Return the canonical bytes of a JSON tree: ASCII, sorted keys, no spaces, no NaN. Equal trees give equal bytes.

    Raises:
        CheckpointError: something that is not JSON (a tuple, a non-str key, nan), too deep or too long.

    >>> dumps({"b": 1, "a": [None]})
    b'{"a":[null],"b":1}'
    """
    _check_tree(tree)
    data = json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(data) > MAXIMUM_BYTES:
        raise CheckpointError(
            f"the state takes {len(data)} bytes of JSON, over {MAXIMUM_BYTES}: save large data as tensors"
        )
    return data


def loads(data: bytes) -> JsonValue:
    """Parse JSON that `dumps` could have written, whitespace aside.

    Raises:
        CheckpointError: malformed text, duplicate keys, NaN or infinite numbers, too deep or too long.
    """
    if len(data) > MAXIMUM_BYTES:
        raise CheckpointError(f"{len(data)} bytes of JSON, over the limit of {MAXIMUM_BYTES}")
    try:
        tree = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except RecursionError as exc:
        raise CheckpointError(f"JSON nested deeper than {MAXIMUM_DEPTH}") from exc
    except ValueError as exc:  # malformed JSON or UTF-8, and integers of more digits than Python converts
        raise CheckpointError(f"not valid JSON: {exc}") from exc
    _check_tree(tree)
    return tree  # type: ignore[no-any-return]


def _object_without_duplicates(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise CheckpointError(f"the JSON key {twice!r} occurs twice in one object")
    return made


def _refuse_constant(token: str) -> NoReturn:
    raise CheckpointError(f"{token} is not JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise CheckpointError(f"the number {text[:40]} does not fit a float64")
    return number


def _check_tree(tree: object) -> None:
    """Refuse what `json` would silently change (int keys, tuples, subclasses) and what is too deep to read back."""
    level, depth = [tree], 0
    while level:
        if depth > MAXIMUM_DEPTH:
            raise CheckpointError(f"JSON nested deeper than {MAXIMUM_DEPTH}")
        below: list[object] = []
        for node in level:
            kind = type(node)
            if kind is dict:
                for key, value in node.items():  # type: ignore[attr-defined]
                    if type(key) is not str:
                        raise CheckpointError(
                            f"the JSON key {key!r} is {type(key).__name__}, not str: use codec.encode"
                        )
                    below.append(value)
            elif kind is list:
                below.extend(node)  # type: ignore[arg-type]
            elif kind is float:
                if not math.isfinite(node):  # type: ignore[arg-type]
                    raise CheckpointError(f"{node} is not JSON: use codec.encode")
            elif kind is int:
                if not -(2**64) < node < 2**64:  # type: ignore[operator]
                    raise CheckpointError("an integer beyond 64 bits is not portable JSON: use codec.encode")
            elif node is not None and kind is not bool and kind is not str:
                raise CheckpointError(f"a value of type {kind.__qualname__} is not JSON: use codec.encode")
        level, depth = below, depth + 1


class _Encoder:
    def __init__(self, tensor: Callable[[str, object], str | None]) -> None:
        self._tensor = tensor

    def encode(self, value: Any, path: str, depth: int) -> JsonValue:
        if depth > MAXIMUM_DEPTH // 4:
            raise CheckpointError(
                f"{path} is nested deeper than {MAXIMUM_DEPTH // 4}, or contains itself: save a flat value"
            )
        kind = type(value)
        below = depth + 1
        if value is None or kind is bool:
            return value  # type: ignore[no-any-return]
        if kind is int:
            return value if abs(value) < _EXACT_INTEGER else {_TAG: "int", "value": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
        if kind is str:
            return (
                value if _is_plain(value) else {_TAG: "str", "base64": _base64(value.encode("utf-8", "surrogatepass"))}
            )
        if kind is list:
            return [self.encode(item, f"{path}[{index}]", below) for index, item in enumerate(value)]
        if kind is dict:
            return self._dict(value, path, below)
        if kind is OrderedDict or kind is Counter:
            return {_TAG: kind.__name__, "items": self._pairs(value, path, below)}
        if kind is tuple or _is_torch(kind, "Size"):
            items = [self.encode(item, f"{path}[{index}]", below) for index, item in enumerate(value)]
            return {_TAG: "tuple" if kind is tuple else "torch.Size", "items": items}
        if kind is deque:
            items = [self.encode(item, f"{path}[{index}]", below) for index, item in enumerate(value)]
            return {_TAG: "deque", "items": items, "maxlen": value.maxlen}
        if kind is set or kind is frozenset:
            items = [self.encode(item, f"{path}{{{index}}}", below) for index, item in enumerate(value)]
            return {_TAG: kind.__name__, "items": sorted(items, key=dumps)}
        if kind is complex:
            parts = [self.encode(part, path, below) for part in (value.real, value.imag)]
            return {_TAG: "complex", "value": parts}
        if kind is bytes:
            return {_TAG: "bytes", "base64": _base64(value)}
        if isinstance(value, Path):
            return {_TAG: "path", "value": self.encode(str(value), path, below)}
        if kind is timedelta:
            return {_TAG: "timedelta", "value": [value.days, value.seconds, value.microseconds]}
        if _is_torch(kind, "dtype"):
            return {_TAG: "torch.dtype", "value": str(value).removeprefix("torch.")}
        return self._other(value, path)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> JsonValue:
        keys = list(value)
        # The canonical bytes sort keys, so only a dict that is sorted already comes back in its own order.
        if all(type(key) is str and _is_plain(key) for key in keys) and _TAG not in value and keys == sorted(keys):
            return {key: self.encode(item, path + _step(key), depth) for key, item in value.items()}
        return {_TAG: "dict", "items": self._pairs(value, path, depth)}

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[JsonValue]:
        pairs: list[JsonValue] = []
        for key, item in value.items():
            inside = path + _step(key)
            pairs.append([self.encode(key, f"the key {inside}", depth), self.encode(item, inside, depth)])
        return pairs

    def _other(self, value: Any, path: str) -> JsonValue:
        numpy = sys.modules.get("numpy")  # a numpy value exists only if numpy is imported
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in _NUMERIC_KINDS:
            return {_TAG: "numpy.scalar", "dtype": value.dtype.str, "base64": _base64(value.tobytes())}
        if isinstance(value, enum.Enum):
            raise CheckpointError(
                f"{path} is the enum member {value}, which JSON cannot name: save its .name or .value"
            )
        if isinstance(value, defaultdict):
            raise CheckpointError(f"{path} is a defaultdict, whose factory is code: save dict(value)")
        reference = self._tensor(path, value)
        if reference is not None:
            return {_TAG: "tensor", "ref": reference}
        if numpy is not None and type(value) is numpy.ndarray and value.dtype.kind in _ARRAY_KINDS:
            data = _base64(value.tobytes())
            return {_TAG: "numpy.array", "dtype": value.dtype.str, "shape": list(value.shape), "base64": data}
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise CheckpointError(
            f"{path} is a {name}, which a checkpoint cannot hold: save its state_dict(), or tensors, arrays, numbers, "
            "strings and containers of them"
        )


class _Decoder:
    def __init__(self, tensor: Callable[[str], object]) -> None:
        self._tensor = tensor

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
        keys = tree.keys() - {_TAG}
        match tree:
            case {"$": "tensor", "ref": str(reference)} if keys == {"ref"}:
                return self._tensor(reference)
            case {"$": "int", "value": str(text)} if keys == {"value"} and _HEXADECIMAL.fullmatch(text):
                return int(text, 16)
            case {"$": "float", "value": "nan" | "inf" | "-inf" as text} if keys == {"value"}:
                return float(text)
            case {"$": "str", "base64": str(text)} if keys == {"base64"}:
                return _bytes(text).decode("utf-8", "surrogatepass")
            case {"$": "bytes", "base64": str(text)} if keys == {"base64"}:
                return _bytes(text)
            case {"$": "complex", "value": [real, imaginary]} if keys == {"value"}:
                return complex(self._float(real, path), self._float(imaginary, path))
            case {"$": "path", "value": value} if keys == {"value"}:
                return Path(self.decode(value, path))
            case {"$": "timedelta", "value": [int(days), int(seconds), int(microseconds)]} if keys == {"value"}:
                return timedelta(days, seconds, microseconds)
            case {"$": "tuple", "items": list(items)} if keys == {"items"}:
                return tuple(self.decode(items, path))
            case {"$": "set", "items": list(items)} if keys == {"items"}:
                return set(self.decode(items, path))
            case {"$": "frozenset", "items": list(items)} if keys == {"items"}:
                return frozenset(self.decode(items, path))
            case {"$": "deque", "items": list(items), "maxlen": None | int() as maxlen} if keys == {"items", "maxlen"}:
                return deque(self.decode(items, path), maxlen)
            case {"$": "dict", "items": list(items)} if keys == {"items"}:
                return dict(self._pairs(items, path))
            case {"$": "OrderedDict", "items": list(items)} if keys == {"items"}:
                return OrderedDict(self._pairs(items, path))
            case {"$": "Counter", "items": list(items)} if keys == {"items"}:
                return Counter(dict(self._pairs(items, path)))
            case {"$": "numpy.scalar", "dtype": str(dtype), "base64": str(text)} if keys == {"dtype", "base64"}:
                return _numpy_array(dtype, [], text)[()]
            case {"$": "numpy.array", "dtype": str(dtype), "shape": list(shape), "base64": str(text)} if keys == {
                "dtype",
                "shape",
                "base64",
            }:
                return _numpy_array(dtype, shape, text)
            case {"$": "torch.dtype", "value": str(name)} if keys == {"value"} and _TORCH_DTYPE.fullmatch(name):
                return _torch_dtype(name, path)
            case {"$": "torch.Size", "items": list(items)} if keys == {"items"}:
                import torch

                return torch.Size(items)
        raise CheckpointError(
            f"{path} has the unknown or malformed kind {tree[_TAG]!r}: was it written by a newer fabricate?"
        )

    def _float(self, tree: object, path: str) -> float:
        number = self.decode(tree, path)
        if type(number) is not float:
            raise ValueError(f"{number!r} is not a float")
        return number

    def _pairs(self, items: Iterable[object], path: str) -> list[tuple[Any, Any]]:
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
    """Return how a path goes on at `key`: ``.momentum``, ``['a b']`` or ``[3]``."""
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    return f"[{key!r}]"


def _is_plain(text: str) -> bool:
    """Tell whether JSON keeps `text`: two surrogate halves in a row would come back as one character."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _is_torch(kind: type, name: str) -> bool:
    return kind.__module__ == "torch" and kind.__qualname__ == name


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
    if math.prod(shape) * kind.itemsize != len(data):  # before numpy allocates what the shape claims
        raise ValueError(f"{len(data)} bytes do not fill shape {shape} of {dtype}")
    return numpy.ndarray(tuple(shape), kind, buffer=data).copy()


def _torch_dtype(name: str, path: str) -> object:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{path} is torch.{name}, which this torch does not have: upgrade torch")
    return found
