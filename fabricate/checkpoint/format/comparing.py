"""Compare two checkpoints: the differences by component, down to the first element or value that differs.

Tensors are compared bitwise: -0.0 and 0.0 differ, and a NaN equals the same NaN. They are read in slices, so that no whole tensor is in
memory. Must not know torch, ranks, or its callers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fabricate.checkpoint.format.canonical_json import JsonValue
from fabricate.checkpoint.format.directory import ITEM_SIZES, Reader

__all__ = ["COMPONENTS", "Difference", "compare", "component_of", "numbers", "rank_files"]

_SLICE: Final = 2**18  # elements: a few MiB as float64
COMPONENTS: Final = (
    "weights",
    "optimizer",
    "scheduler",
    "scaler",
    "data position",
    "rng",
    "metrics",
    "plugin",
    "module",
)
# A clock differs in every run, and so does the size of the log, which contains its digits.
_CLOCKS: Final = ("progress.seconds", "metrics_bytes")
_STATE: Final = {
    "scaler": "scaler",
    "weight_per_row": "scaler",
    "weighed_by": "scaler",
    "data": "data position",
    "progress": "data position",
    "owed": "data position",
    "paused": "module",
    "seed": "rng",
    "latest": "metrics",
    "beside_weights": "plugin",
    "torchmetrics": "metrics",
}
_NUMPY: Final = {
    "BOOL": "<u1", "U8": "<u1", "I8": "<i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
}  # fmt: skip
_FLOAT8: Final = {"F8_E4M3": (3, 7), "F8_E5M2": (2, 15)}
"""The number of mantissa bits and the bias of the exponent."""


@dataclass(frozen=True)
class Difference:
    """One tensor or value that differs between two checkpoints.

    component: "weights", "optimizer main", "scheduler main", "scaler", "data position", "rng", "metrics", "plugin NAME", "module". name:
    the tensor's logical name, or the path of the value in its file. text: a description of the difference. The other fields are None,
    except for two tensors of one shape and dtype: `count` of their `elements` differ, `first` is the index of the first one that differs,
    `largest` is the largest absolute difference, and `relative` is `largest` divided by the largest magnitude in the second tensor.
    """

    component: str
    name: str
    text: str
    elements: int | None = None
    count: int | None = None
    first: tuple[int, ...] | None = None
    largest: float | None = None
    relative: float | None = None

    def to_json(self) -> dict[str, JsonValue]:
        """All fields as JSON; numbers that JSON does not have are text."""
        fields: dict[str, Any] = {**vars(self), "first": None if self.first is None else list(self.first)}
        for name in ("largest", "relative"):
            if fields[name] is not None and not np.isfinite(fields[name]):
                fields[name] = str(fields[name])
        return fields


def compare(a: Reader, b: Reader) -> list[Difference]:
    """All differences, in the order of `COMPONENTS`; clocks are left out.

    Raises CheckpointError if a block of either checkpoint is damaged.
    """
    plugins = [name for reader in (a, b) for name in _plugins(reader)]
    differences = [*_tensors(a, b, plugins), *_values(a, b)]
    return sorted(differences, key=lambda difference: (_place(difference.component), difference.component))


def _place(component: str) -> int:
    return next((n for n, start in enumerate(COMPONENTS) if component.startswith(start)), len(COMPONENTS))


def _plugins(reader: Reader) -> list[str]:
    tree: Any = reader.json("state.json") if _has(reader, "state.json") else {}
    return list(tree.get("plugins", {}))


def _has(reader: Reader, file: str) -> bool:
    return any(record.name == file for record in reader.manifest.files)


def rank_files(reader: Reader) -> list[str]:
    """The names of the files with the state of single ranks, in rank order."""
    names = (record.name for record in reader.manifest.files)
    return sorted(name for name in names if name.startswith("rank-") and name.endswith(".json"))


def component_of(tensor: str, plugins: list[str]) -> str:
    """The component that a logical tensor name belongs to. `plugins`: the names of the plugins that have state."""
    kind, _, rest = tensor.partition("/")
    if kind == "model":
        return "weights"
    if kind == "plugin":  # a plugin's name may contain the characters that separate it from the path
        owners = [
            name for name in plugins if rest.startswith(name) and rest[len(name) : len(name) + 1] in (".", "[", "")
        ]
        return f"plugin {max(owners, key=len, default=rest)}"
    if kind == "rank":
        what = rest.partition("/")[2]
        return "rng" if what.startswith("rng") else "weights" if what.startswith("buffers") else "metrics"
    if kind in ("optimizer", "scheduler"):
        return f"{kind} {rest.partition('/')[0].partition('.')[0]}"
    return "metrics" if kind.startswith("latest") else kind


def _tensors(a: Reader, b: Reader, plugins: list[str]) -> Iterator[Difference]:
    ours, theirs = a.manifest, b.manifest
    for name in sorted(ours.tensors.keys() | theirs.tensors.keys()):
        component = component_of(name, plugins)
        one, other = ours.tensors.get(name), theirs.tensors.get(name)
        if one is None or other is None:
            yield Difference(component, name, "only in the second" if one is None else "only in the first")
        elif one != other:
            text = f"{one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}"
            yield Difference(component, name, text)
        elif difference := _elements(a, b, component, name):
            yield difference
    for alias in sorted(ours.aliases.keys() | theirs.aliases.keys()):
        left, right = ours.aliases.get(alias), theirs.aliases.get(alias)
        if left != right:
            yield Difference(component_of(alias, plugins), alias, f"shared with {left} against {right}")


def _elements(a: Reader, b: Reader, component: str, name: str) -> Difference | None:
    record = a.manifest.tensors[name]
    total, item = record.num_elements, ITEM_SIZES[record.dtype]
    slices = [(start, min(_SLICE, total - start)) for start in range(0, total, _SLICE)]
    count, first, pair, largest = 0, -1, "", 0.0
    for start, size in slices:
        left, right = a.read(name, start, size), b.read(name, start, size)
        if left == right:
            continue
        places = np.flatnonzero(np.frombuffer(left, f"V{item}") != np.frombuffer(right, f"V{item}"))
        x, y = _native(left, record.dtype)[places], _native(right, record.dtype)[places]
        if first < 0:
            first, pair = start + int(places[0]), f"{x[0].item()!r} against {y[0].item()!r}"
        x, y = _wide(x), _wide(y)
        count += len(places)
        with np.errstate(invalid="ignore"):
            apart = np.abs(x - y)
        apart[np.isnan(apart)] = np.inf  # a NaN or an infinity on one side only
        largest = max(largest, float(apart.max()))
    if not count:
        return None
    scale = max(_magnitude(numbers(b.read(name, *each), record.dtype)) for each in slices)
    index = tuple(int(i) for i in np.unravel_index(first, record.shape))
    text = f"{count} of {total} elements; first at {list(index)}: {pair}; largest difference {largest:.3g}"
    relative = largest / scale if scale else np.inf if largest else 0.0
    return Difference(component, name, text, total, count, index, largest, float(relative))


def _magnitude(values: npt.NDArray[Any]) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def numbers(data: bytes | bytearray, dtype: str) -> npt.NDArray[Any]:
    """The elements of a tensor as a 1-D array of float64 (complex128 for C64). `data`: its bytes; `dtype`: a safetensors code."""
    return _wide(_native(data, dtype))


def _wide(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    with np.errstate(invalid="ignore"):  # a signalling NaN would warn
        return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _native(data: bytes | bytearray, dtype: str) -> npt.NDArray[Any]:
    """The elements in the same NumPy dtype, or in a wider one if NumPy does not have this dtype."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    if dtype in _FLOAT8:
        return _float8_values(dtype)[np.frombuffer(data, np.uint8)]
    return np.frombuffer(data, _NUMPY[dtype])


def _float8_values(dtype: str) -> npt.NDArray[np.float64]:
    """The value of each of the 256 bytes. E4M3 (the "fn" variant) has no infinities; E5M2 follows IEEE 754."""
    bits, bias = _FLOAT8[dtype]
    codes = np.arange(256)
    exponent, mantissa = (codes & 127) >> bits, (codes & (1 << bits) - 1) / (1 << bits)
    values = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    if dtype == "F8_E4M3":
        values[codes & 127 == 127] = np.nan
    else:
        values[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    return np.where(codes > 127, -values, values)


def _values(a: Reader, b: Reader) -> Iterator[Difference]:
    for file in ("state.json", *sorted({*rank_files(a), *rank_files(b)})):
        where = "" if file == "state.json" else f"{file.removesuffix('.json').replace('-', ' ')}: "
        ours, theirs = _sections(a, file), _sections(b, file)
        for section in dict.fromkeys([*ours, *theirs]):
            component, path = section
            if section not in ours or section not in theirs:
                yield Difference(component, where + path, f"only in the {'first' if section in ours else 'second'}")
                continue
            for leaf, text in _paths(ours[section], theirs[section], path):
                if leaf not in _CLOCKS:
                    yield Difference(component, where + leaf, text)


def _sections(reader: Reader, file: str) -> dict[tuple[str, str], Any]:
    """The values of one JSON file by (component, path); empty if the checkpoint has no such file."""
    tree: Any = _plain(reader.json(file)) if _has(reader, file) else {}
    sections: dict[tuple[str, str], Any] = {}
    for top, value in tree.items():
        if top in ("imported", "configuration"):  # the origin and the settings, which are no state
            continue
        if top in ("optimizers", "schedulers", "plugins"):
            sections |= {(f"{top[:-1]} {name}", f"{top}.{name}"): below for name, below in value.items()}
        else:
            sections[_STATE.get(top, top), top] = value
    return sections


def _plain(tree: Any) -> Any:
    """Simplify tagged JSON for reading: pairs whose keys are text become objects. Kinds are kept, so that different values stay
    different."""
    if isinstance(tree, list):
        return [_plain(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    items = tree.get("items")
    if "$" in tree and isinstance(items, list):
        pairs = all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in items)
        if tree["$"] in ("dict", "OrderedDict", "Counter") and pairs:
            kind = {} if tree["$"] == "dict" else {"$": tree["$"]}
            return {**{key: _plain(value) for key, value in items}, **kind}
        if tree["$"] == "tuple":
            return tuple(_plain(item) for item in items)
    return {key: _plain(value) for key, value in tree.items()}


def _paths(a: Any, b: Any, path: str) -> Iterator[tuple[str, str]]:
    """The differences between two JSON trees, as (path, text)."""
    if isinstance(a, dict) and isinstance(b, dict):
        yield from _paths_of_objects(a, b, path)
    elif type(a) is type(b) and isinstance(a, list | tuple) and len(a) == len(b):
        yield from _paths_of_sequences(a, b, path)
    elif a != b or type(a) is not type(b):
        yield path, _against(a, b)


def _paths_of_objects(a: dict[str, Any], b: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for key in dict.fromkeys([*a, *b]):
        below = f"{path}.{key}" if path else key
        if key not in a or key not in b:
            yield below, f"only in the {'first' if key in a else 'second'}"
        else:
            yield from _paths(a[key], b[key], below)
    if list(a) != list(b) and a.keys() == b.keys():
        yield path, "another order of keys"


def _paths_of_sequences(a: Sequence[Any], b: Sequence[Any], path: str) -> Iterator[tuple[str, str]]:
    """One line for several plain values that differ; for containers, a line for every difference inside them."""
    pairs = [(number, one, other) for number, (one, other) in enumerate(zip(a, b, strict=True)) if one != other]
    if len(pairs) > 1 and not any(isinstance(one, dict | list | tuple) for _, one, _ in pairs):
        number, one, other = pairs[0]
        yield path, f"{len(pairs)} of {len(a)} values; first at [{number}]: {_against(one, other)}"
    else:
        for number, one, other in pairs:
            yield from _paths(one, other, f"{path}[{number}]")


def _against(a: object, b: object) -> str:
    return f"{reprlib.repr(a)} against {reprlib.repr(b)}"
