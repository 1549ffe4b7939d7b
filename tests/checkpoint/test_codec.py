"""The codec restores the values that it encoded, names values that it cannot encode, and checks everything that it reads."""

from __future__ import annotations

import enum
import json
import math
import random
import re
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from fabricate.checkpoint.format.canonical_json import MAXIMUM_DEPTH, dumps, loads
from fabricate.checkpoint.format.codec import decode, encode
from fabricate.errors import CheckpointError


def none(path: str, value: object) -> None:
    return None


def nothing(reference: str) -> object:
    raise AssertionError(f"{reference} was never handed out")


def back(value: object) -> Any:
    return decode(loads(dumps(encode(value, none))), nothing)


def same(left: Any, right: Any) -> bool:
    """Equal in value, in every type inside, in key order, in the bits of floats and arrays."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (np.ndarray, np.generic)):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True) if len(left) == len(right) else [((0, 0), (1, 1))]
        return all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(left, (list, tuple, deque)):
        equal = len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
        return equal and getattr(left, "maxlen", None) == getattr(right, "maxlen", None)
    return bool(left == right)


VALUES: list[object] = [
    None,
    True,
    0,
    -(2**53),
    2**53 - 1,
    2**128 - 3,
    -(10**30),
    0.1,
    -0.0,
    1e308,
    5e-324,
    1.0,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "snow \u2603, \U0001f600, tab\t, NUL \0",
    "lone \udc80",
    "\ud83d\ude00",
    [],
    [1, [2, [3]]],
    (),
    (1, (2, "x")),
    {},
    {"b": 1, "a": 2},
    {"a": 1, "b": {"c": ()}},
    {"$": "tuple", "items": [1]},
    {"x": {"$": None}},
    {"\ud83d\ude00": 1},
    {1: "a", True + 1: "b", "1": "c", None: "d", (1, 2): "e", 2.5: "f"},
    {True: "yes"},
    OrderedDict([("z", 1), ("a", 2)]),
    Counter({30: 1, 80: 2}),
    deque([1, 2, 3], maxlen=5),
    deque(),
    {3, 1, 2},
    frozenset({"a", ("b", 1)}),
    set(),
    b"",
    b"\x00\xff",
    Path("relative/file"),
    Path("/absolute"),
    timedelta(days=-3, seconds=5, microseconds=7),
    complex(1.5, -0.0),
    complex(math.inf, math.nan),
    np.float32(0.1),
    np.float64(0.1),
    np.int64(-5),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.datetime64("2031-05-01T12:00", "s"),
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.zeros((0, 4), dtype=np.float32),
    np.array(3.5),
    np.array(["a", "bcd"]),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    torch.bfloat16,
    torch.Size([2, 3]),
    torch.Size([]),
]


def _name(value: object) -> str:
    return repr(value) if not isinstance(value, frozenset) else "frozenset"  # whose order is another in every process


@pytest.mark.parametrize("value", VALUES, ids=_name)
def test_a_value_comes_back_exactly(value: object) -> None:
    assert same(back(value), value)


def test_random_nested_values_come_back_exactly_and_with_the_same_bytes() -> None:
    rng = random.Random(7)
    leaves = [value for value in VALUES if not isinstance(value, (list, tuple, dict, set, frozenset, deque))]
    keys = ["a", "b", "$", "ref", 1, None, (1, "x"), 2.5, "z y", "\udc80"]

    def grow(depth: int) -> object:
        kind = rng.randrange(7) if depth else 6
        if kind in (0, 1):
            return [grow(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 2:
            return tuple(grow(depth - 1) for _ in range(rng.randrange(4)))
        if kind in (3, 4):
            return {key: grow(depth - 1) for key in rng.sample(keys, rng.randrange(5))}
        if kind == 5:
            return deque([grow(depth - 1)], maxlen=rng.choice([None, 3]))
        return rng.choice(leaves)

    for _ in range(400):
        value = grow(4)
        again = back(value)
        assert same(again, value)
        assert dumps(encode(again, none)) == dumps(encode(value, none))


def test_the_states_of_random_generators_survive() -> None:
    generator = np.random.default_rng(3)
    other = np.random.default_rng()
    other.bit_generator.state = back(generator.bit_generator.state)
    assert other.random() == generator.random()
    rng = random.Random(5)
    expected = random.Random(5).random()
    rng.random()
    rng.setstate(back(random.Random(5).getstate()))
    assert rng.random() == expected


def test_decoded_arrays_can_be_written_to() -> None:
    array = back(np.zeros(3))
    array[0] = 1
    assert array.tolist() == [1, 0, 0]


def test_tensors_go_through_the_callback_with_their_path() -> None:
    tensors: dict[str, object] = {}

    def put(path: str, value: object) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        tensors[path] = value
        return path

    state = {"history": [1, torch.ones(2)], "a key": {3: torch.zeros(1)}, "small": np.ones(2)}
    tree = encode(state, put, path="plugin/ema")
    assert list(tensors) == ["plugin/ema.history[1]", "plugin/ema['a key'][3]"]
    again = decode(loads(dumps(tree)), tensors.__getitem__)
    assert isinstance(again, dict)
    assert again["history"][1] is tensors["plugin/ema.history[1]"]


def test_an_array_goes_through_the_callback_first() -> None:
    array = np.ones(2)
    assert encode([array], lambda path, value: "there" if value is array else None) == [{"$": "tensor", "ref": "there"}]


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "kind", "remedy"),
    [
        (Custom(), "test_codec.Custom", "state_dict()"),
        (Colour.RED, "enum member", ".value"),
        (defaultdict(int), "defaultdict", "dict(value)"),
        (Point(1), "Point", "tensors"),
        (np.array([None]), "numpy.ndarray", "containers"),
        (np.ma.masked_array([1]), "MaskedArray", "containers"),
        (bytearray(b"x"), "bytearray", "strings"),
        (len, "builtin_function_or_method", "strings"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_object_that_cannot_be_saved_is_named_with_its_path(value: object, kind: str, remedy: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        encode({"history": [0, 1, 2, {"model": value}]}, none)
    assert "state.history[3].model" in str(raised.value)
    assert kind in str(raised.value)
    assert remedy in str(raised.value)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(loop, none)


def test_the_deepest_value_that_is_encoded_can_be_read_back() -> None:
    value: object = {2: 1}
    for _ in range(MAXIMUM_DEPTH // 4 - 1):
        value = {1: value}
    assert back(value) == value
    with pytest.raises(CheckpointError, match="nested deeper"):
        encode({1: {1: value}}, none)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b'{"a":1,"a":2}', "'a' occurs twice"),
        (b"NaN", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"1e999", "does not fit"),
        (b"1" * 30, "64 bits"),
        (b"1" * 5000, "not valid JSON"),
        (b"[" * 300 + b"]" * 300, "nested deeper"),
        (b"[" * 100_000 + b"]" * 100_000, "nested deeper"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b'"\xff"', "not valid JSON"),
        (b"\xef\xbb\xbf1", "not valid JSON"),
        (b"[1] x", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"{'a':1}", "not valid JSON"),
    ],
    ids=lambda value: repr(value)[:25],
)
def test_text_that_is_not_strict_json_is_refused(text: bytes, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        loads(text)


@pytest.mark.parametrize("tree", [{1: 2}, (1,), math.nan, 2**70, np.float64(1.0), {"a": {"b": {1}}}], ids=repr)
def test_what_json_would_silently_change_is_refused(tree: object) -> None:
    with pytest.raises(CheckpointError, match=r"codec\.encode"):
        dumps(tree)


def test_equal_trees_have_equal_bytes() -> None:
    assert (
        dumps({"b": [1.5, None], "a": "\u00e9"})
        == dumps({"a": "\u00e9", "b": [1.5, None]})
        == (b'{"a":"\\u00e9","b":[1.5,null]}')
    )


def test_the_bytes_of_a_set_do_not_depend_on_its_history() -> None:
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)
    assert dumps(encode(one, none)) == dumps(encode(other, none))


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "lambda", "value": "1"},
        {"$": None},
        {"$": ["tuple"]},
        {"$": "tuple"},
        {"$": "tuple", "items": 3},
        {"$": "tuple", "items": [], "more": 1},
        {"$": "int", "value": "0x_1"},
        {"$": "int", "value": "12"},
        {"$": "float", "value": "1.5"},
        {"$": "bytes", "base64": "a"},
        {"$": "bytes", "base64": "\u00e9"},
        {"$": "bytes", "base64": "YQ==!"},
        {"$": "str", "base64": "/w=="},
        {"$": "complex", "value": [1, "x"]},
        {"$": "path", "value": 3},
        {"$": "path", "value": []},
        {"$": "timedelta", "value": [10**12, 0, 0]},
        {"$": "deque", "items": [], "maxlen": -1},
        {"$": "set", "items": [[]]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "dict", "items": [[1, 1], [1, 2]]},
        {"$": "dict", "items": [[1]]},
        {"$": "Counter", "items": [1]},
        {"$": "numpy.array", "dtype": "|O", "shape": [1], "base64": "AAAAAAAAAAA="},
        {"$": "numpy.array", "dtype": "<f8", "shape": [2**50], "base64": "AAAAAAAAAAA="},
        {"$": "numpy.array", "dtype": "<f8", "shape": [-1, -1], "base64": "AAAAAAAAAAA="},
        {"$": "numpy.array", "dtype": "<f3", "shape": [0], "base64": ""},
        {"$": "numpy.array", "dtype": "<f8", "shape": "ab", "base64": ""},
        {"$": "numpy.array", "dtype": "<f8", "shape": [0], "base64": "AAAAAAAAAAA="},
        {"$": "numpy.scalar", "dtype": "<f8", "base64": ""},
        {"$": "torch.dtype", "value": "load"},
        {"$": "torch.dtype", "value": "float99"},
        {"$": "torch.dtype", "value": "../x"},
        {"$": "torch.Size", "items": ["a"]},
    ],
    ids=str,
)
def test_a_malformed_tag_is_an_error_that_names_the_place(tree: object) -> None:
    with pytest.raises(CheckpointError, match=re.escape("state.outer[1]")):
        decode({"outer": [0, tree]}, nothing)


def test_random_trees_decode_or_are_refused_and_nothing_else() -> None:
    rng = random.Random(11)
    trees = [json.loads(dumps(encode(value, none))) for value in VALUES]

    def mutate(tree: Any) -> Any:
        if rng.random() < 0.2:
            return rng.choice([None, 3, -1, 2**60, "x", "", [], {}, 1.5, {"$": "int"}, rng.choice(trees)])
        if isinstance(tree, dict):
            return {rng.choice([key, "$"]) if rng.random() < 0.1 else key: mutate(item) for key, item in tree.items()}
        return [mutate(item) for item in tree] if isinstance(tree, list) else tree

    refused = 0
    for _ in range(5000):
        try:
            decode(mutate(rng.choice(trees)), nothing)
        except CheckpointError:
            refused += 1
    assert 1000 < refused < 5000


def test_neither_torch_nor_numpy_nor_pickle_is_imported() -> None:
    code = (
        "import sys, fabricate.checkpoint.format.files, fabricate.checkpoint.format.directory;"
        "from fabricate.checkpoint.format import canonical_json, codec;"
        "canonical_json.dumps(codec.encode({1: (2.0, b'x')}, lambda path, value: None));"
        "print([name for name in ('torch', 'numpy', 'pickle', 'shelve') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("room", ["checkpoint/format", "checkpoint/state"])
def test_no_source_line_can_load_code(room: str) -> None:
    folder = Path(sys.modules["fabricate.errors"].__file__ or "").parent.joinpath(room)
    text = "".join(file.read_text() for file in sorted(folder.glob("*.py")))
    assert len(text) > 10_000
    assert not re.search(r"pickle|marshal|shelve|\beval\(|\bexec\(|torch\.load|allow_pickle", text)
