"""What the JSON files of a checkpoint look like, and the proof that one looks so before anything in it is used.

Owns the shape of state.json and rank-00000.json, as `docs/checkpoint-format.md` lists them. Digests say that nothing changed
since it was written, not that fabricate wrote it; past this door nothing stumbles over a missing key or another type. Must
not know torch, or what the values mean.
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


_NUMBER: Final = (int, float)
_MODULE: Final = {"class": str, "arguments": dict, "unrecorded": [str], "transient": [str]}
_SHARED: Final = {
    "module": _MODULE,
    "optimizers": _Each({"kind": str, "groups": [{"names": [str], "options": dict}], "values": _Each(dict)}),
    "schedulers": _Each({"kind": str}),
    "scaler": (dict, type(None)),
    "seed": int,
    "data": {
        "num_samples": (int, type(None)),
        "global_batch_size": (int, type(None)),
        "shuffle": (bool, type(None)),
    },
    "progress": dict.fromkeys(Progress.__dataclass_fields__, _NUMBER),
    "latest": dict,
    "plugins": _Each(dict),
    "metrics_bytes": int,
}
_OWN: Final = {"rng": dict, "metrics": dict, "buffers": [str], "torchmetrics": dict}
_LATER: Final = {"weight_per_row": _Each(float), "stop": str, "owed": [str], "paused": [str], "beside_weights": [str]}
"""What checkpoints of earlier versions lack, in either file."""


def shared_state(reader: Reader) -> Any:
    """The content of state.json; of a checkpoint of weights alone it has `module` only. CheckpointError for any other shape."""
    tree: Any = reader.json("state.json")
    weights_only = isinstance(tree, dict) and ("imported" in tree or tree.get("weights_only") is True)
    shape = {"module": _MODULE} if weights_only else _with_later(_SHARED, tree)
    _check(tree, shape, f"checkpoint {reader.path}: state.json")
    return tree


def _with_later(shape: Mapping[str, Any], tree: Any) -> dict[str, Any]:
    return {**shape, **{key: below for key, below in _LATER.items() if isinstance(tree, dict) and key in tree}}


def saved_world_size(reader: Reader) -> int:
    """How many ranks wrote the checkpoint, each of which left a file of its own."""
    size: Any = reader.manifest.topology.get("world_size")
    _kind(size, int, f"checkpoint {reader.path}: world_size in its manifest")
    return int(size)


def own_state(reader: Reader, rank: int) -> Any:
    """The content of a rank's own file, rank-00000.json. CheckpointError for any other shape."""
    name = f"rank-{rank:05d}.json"
    tree: Any = reader.json(name)
    _check(tree, _with_later(_OWN, tree), f"checkpoint {reader.path}: {name}")
    return tree


def _check(tree: Any, shape: Any, where: str) -> None:
    """Compare a JSON tree with a shape: a type or several, a list of one shape, an object with these keys and maybe more."""
    if isinstance(shape, Mapping):
        _kind(tree, dict, where)
        for key, below in shape.items():
            if key not in tree:
                raise CheckpointError(f"{where} lacks {key!r}: the file is damaged or was not written by fabricate")
            _check(tree[key], below, f"{where}: {key}")
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
