"""The structure of the JSON files of a checkpoint, and the check of a file before anything in it is used.

Owns the structure of state.json and rank-00000.json, listed in `docs/checkpoint-format.md`. Digests prove that a file is unchanged, but not
that fabricate wrote it. After this check, other code need not expect missing keys or wrong types, except outside `module` in a checkpoint
of weights alone. Must not know torch, or what the values mean.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fabricate.checkpoint.format.directory import Reader
from fabricate.errors import CheckpointError
from fabricate.metrics.counters import Progress

__all__ = ["own_state", "saved_world_size", "shared_state"]


@dataclass(frozen=True)
class _Each:
    """An object with any keys, whose values all have one shape."""

    shape: Any


@dataclass(frozen=True)
class _Maybe:
    """The value of a key that checkpoints of earlier versions may lack."""

    shape: Any


_NUMBER: Final = (int, float)
_MODULE: Final = {
    "class": str,
    "arguments": dict,
    "order": _Maybe([str]),
    "tuples": _Maybe([str]),  # only of earlier versions
    "unrecorded": [str],
    "transient": [str],
}
_OPTIMIZER: Final = {
    "kind": str,
    "groups": [{"names": [str], "options": dict}],
    "values": _Each(dict),
    "memory_order": _Maybe(_Each([int])),
}
_SHARED: Final = {
    "module": _MODULE,
    "optimizers": _Each(_OPTIMIZER),
    "schedulers": _Each({"kind": str}),
    "scaler": (dict, type(None)),
    "weight_per_row": _Maybe(_Each(float)),
    "weighed_by": _Maybe(_Each(str)),
    "seed": int,
    "data": {
        "num_samples": (int, type(None)),
        "global_batch_size": (int, type(None)),
        "shuffle": (bool, type(None)),
    },
    "progress": dict.fromkeys(Progress.__dataclass_fields__, _NUMBER),
    "surplus_updates": _Maybe(int),
    "owed": _Maybe([str]),
    "paused": _Maybe([str]),
    "latest": dict,
    "last_norm": _Maybe(dict),
    "plugins": _Each(dict),
    "beside_weights": _Maybe([str]),
    "metrics_bytes": int,
}
_WEIGHTS_ONLY: Final = {"module": _MODULE, "beside_weights": _Maybe([str])}
_OWN: Final = {"rng": dict, "metrics": dict, "buffers": [str], "torchmetrics": dict, "stop": _Maybe(str)}


def shared_state(reader: Reader) -> Any:
    """The content of state.json; in a checkpoint of weights alone, only `module` is required. Raises CheckpointError for any other
    structure."""
    tree: Any = reader.json("state.json")
    weights_only = isinstance(tree, dict) and ("imported" in tree or tree.get("weights_only") is True)
    _check(tree, _WEIGHTS_ONLY if weights_only else _SHARED, f"checkpoint {reader.path}: state.json")
    return tree


def saved_world_size(reader: Reader) -> int:
    """The number of ranks that wrote the checkpoint. Each rank wrote one file like rank-00000.json."""
    size: Any = reader.manifest.topology.get("world_size")
    _kind(size, int, f"checkpoint {reader.path}: world_size in its manifest")
    return int(size)


def own_state(reader: Reader, rank: int) -> Any:
    """The content of the file of one rank, such as rank-00000.json. Raises CheckpointError for any other structure."""
    name = f"rank-{rank:05d}.json"
    tree: Any = reader.json(name)
    _check(tree, _OWN, f"checkpoint {reader.path}: {name}")
    return tree


def _check(tree: Any, shape: Any, where: str) -> None:
    """Raise CheckpointError unless a JSON tree has a given shape: one of some types, a list whose items have one shape, or an object with
    at least these keys."""
    if isinstance(shape, Mapping):
        _kind(tree, dict, where)
        for key, below in shape.items():
            if key in tree:
                _check(tree[key], below.shape if isinstance(below, _Maybe) else below, f"{where}: {key}")
            elif not isinstance(below, _Maybe):
                raise CheckpointError(f"{where} lacks {key!r}: the file is damaged or was not written by fabricate")
    elif isinstance(shape, _Each):
        _kind(tree, dict, where)
        for key, value in tree.items():
            _check(value, shape.shape, f"{where}: {key}")
    elif isinstance(shape, list):
        _kind(tree, list, where)
        for number, item in enumerate(tree):
            _check(item, shape[0], f"{where}: item {number}")
    else:
        _kind(tree, shape, where)


def _kind(value: Any, kinds: Any, where: str) -> None:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if type(value) not in kinds:
        named = " or ".join(kind.__name__ for kind in kinds)
        raise CheckpointError(
            f"{where} is {reprlib.repr(value)}, not {named}: the file is damaged or was not written by fabricate"
        )
