"""JSON as bytes: strict and canonical, so that equal trees give equal bytes and digests.

Owns which JSON a checkpoint may use, and how deep and long it may be. Must not know what a tree means
(`fabricate.checkpoint.format.codec`), nor files.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import NoReturn, TypeAlias

from fabricate.errors import CheckpointError

__all__ = ["MAXIMUM_BYTES", "MAXIMUM_DEPTH", "JsonValue", "dumps", "loads"]

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

MAXIMUM_BYTES = 512 * 2**20
"""The largest JSON text that is written or read: enough for the manifest of about ten TiB of tensors."""

MAXIMUM_DEPTH = 256
"""The greatest nesting depth of JSON."""


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
    """Parse JSON that `dumps` could have written; the whitespace may differ.

    Raises:
        CheckpointError: malformed text, duplicate keys, NaN or infinite numbers, too deep or too long.
    """
    if len(data) > MAXIMUM_BYTES:
        raise CheckpointError(
            f"this file has {len(data)} bytes of JSON, but a checkpoint's has at most {MAXIMUM_BYTES}: damaged, or not of a checkpoint"
        )
    try:
        tree = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except RecursionError as exc:
        raise CheckpointError(f"JSON nested deeper than {MAXIMUM_DEPTH}") from exc
    except ValueError as exc:  # malformed JSON or UTF-8, or an integer with more digits than Python converts
        raise CheckpointError(f"not valid JSON: {exc}") from exc
    _check_tree(tree)
    return tree  # type: ignore[no-any-return]


def _object_without_duplicates(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise CheckpointError(f"the JSON key {twice!r} occurs twice in one object")
    return tree


def _refuse_constant(token: str) -> NoReturn:
    raise CheckpointError(f"{token} is not JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise CheckpointError(f"the number {text[:40]} does not fit a float64")
    return number


def _check_tree(tree: object) -> None:
    """Raise CheckpointError for what `json` would silently change (int keys, tuples, subclasses) and for a tree too deep to read back."""
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
