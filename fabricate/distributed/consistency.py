"""All ranks run the same thing, or every rank says what differs and on which. Must not know: how anything is trained."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch

from fabricate.distributed.group import Group
from fabricate.errors import RankError


def check_alike(group: Group, hooks: list[list[Any]], module: torch.nn.Module, settings: Mapping[str, Any]) -> None:
    """Compare what ranks hear, train and run with. Raises `RankError`, the same on every rank. All ranks."""
    if group.world_size == 1:
        return
    parameters = {n: [list(p.shape), p.requires_grad] for n, p in module.named_parameters()}
    mine: dict[str, Any] = {
        "listeners of hooks": dict(hooks),
        "parameters (shape, whether trained)": parameters,
        "order of parameters": {"order": list(parameters)},
        "packages": {name: importlib.metadata.version(name) for name in ("torch", "accelerate")},
        "settings": dict(settings),
    }
    everyone = group.gather_json(mine)
    for topic in mine:
        different = [rank for rank, theirs in enumerate(everyone) if theirs[topic] != everyone[0][topic]]
        if different:
            told = _first_difference(everyone[0][topic], everyone[different[0]][topic], different[0])
            raise RankError(
                f"ranks {different} have other {topic} than rank 0: {told}; start every rank with the same script, plugins and packages"
            )


def _first_difference(zero: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    name = next(n for n in (*zero, *other) if zero.get(n) != other.get(n))
    return f"{name} is {str(zero.get(name))[:200]} on rank 0 and {str(other.get(name))[:200]} on rank {rank}"
