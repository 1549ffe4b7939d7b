"""Optimizers inside other optimizers, as wrappers such as Lookahead hold them.

Must not know: strategies, checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def inner_optimizers(outer: torch.optim.Optimizer, name: str) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The optimizers that `outer`, called `name`, holds as attributes, or in lists, tuples and dicts there: each with its place, and those
    inside it."""
    yield from _inside(outer, name, {id(outer)})


def _inside(outer: torch.optim.Optimizer, name: str, seen: set[int]) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    for attribute, value in vars(outer).items():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for each in several:
            if isinstance(each, torch.optim.Optimizer) and id(each) not in seen:
                seen.add(id(each))
                place = f"{name}.{attribute}"
                yield place, each
                yield from _inside(each, place, seen)
