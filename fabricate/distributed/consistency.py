"""The check that all ranks run the same hooks, parameters, packages and settings. Must not know: how anything is trained."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import xxhash

from fabricate.distributed.group import Group
from fabricate.errors import RankError


def check_alike(
    group: Group, listeners: Mapping[str, Any], module: torch.nn.Module, settings: Mapping[str, Any]
) -> None:
    """Raise `RankError`, the same on every rank, if hooks, parameters, packages or settings differ between ranks. All ranks.

    listeners: the plugins that each hook calls. settings: other values that have to be the same, by name. Both are JSON. Ranks compare
    digests, and send values only if their digests differ.
    """
    if group.world_size == 1:
        return
    parameters = {n: [list(p.shape), p.requires_grad] for n, p in module.named_parameters()}
    mine: dict[str, Mapping[str, Any]] = {
        "listeners of hooks": listeners,
        "parameters (shape, whether trained)": parameters,
        "order of parameters": {"order": list(parameters)},
        "packages": {name: importlib.metadata.version(name) for name in ("torch", "accelerate")},
        "settings": settings,
    }
    digests = [_digest(values) for values in mine.values()]
    largest = group.agree([*digests, *(-digest for digest in digests)])
    for topic, most, least in zip(mine, largest[: len(mine)], largest[len(mine) :], strict=True):
        if most != -least:
            _raise_difference(topic, group.gather_json(mine[topic]))


def _digest(values: Mapping[str, Any]) -> int:
    """A digest of 63 bits, so that its negative fits into 64 bits."""
    return xxhash.xxh3_64_intdigest(json.dumps(values, sort_keys=True).encode()) >> 1


def _raise_difference(topic: str, everyone: list[Mapping[str, Any]]) -> NoReturn:
    zero = everyone[0]
    different = [rank for rank, values in enumerate(everyone) if values != zero]
    rank, other = different[0], everyone[different[0]]
    name = next(n for n in (*zero, *other) if zero.get(n) != other.get(n))
    raise RankError(
        f"ranks {different} differ from rank 0 in {topic}: {name} is {str(zero.get(name))[:200]} on rank 0 and "
        f"{str(other.get(name))[:200]} on rank {rank}; start every rank with the same script, plugins and packages"
    )
