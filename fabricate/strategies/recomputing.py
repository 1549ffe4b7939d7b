"""Activation checkpointing: backward computes again what a submodule computed, instead of keeping it. Must not know: shards, ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fabricate.errors import ConfigurationError
from fabricate.strategies.base import Strategy


def recompute_blocks(module: torch.nn.Module) -> Callable[[], None]:
    """`recompute` for what repeats in `module`: the blocks of transformers models, and the children of every ModuleList."""
    blocks = Strategy.blocks(module)
    outer = [(name, block) for name, block in blocks if not any(name.startswith(f"{other}.") for other, _ in blocks)]
    if not outer and not any(getattr(child, "supports_gradient_checkpointing", False) for child in module.modules()):
        raise ConfigurationError(
            f"activation_checkpointing=True: {type(module).__name__} has no transformers model and no ModuleList, whose blocks would be "
            "computed again; put what repeats into a ModuleList, or call torch.utils.checkpoint.checkpoint in training_step"
        )
    return recompute(module, outer)


def recompute(module: torch.nn.Module, units: Sequence[tuple[str, torch.nn.Module]]) -> Callable[[], None]:
    """Let backward recompute what `units` compute, with the dropout of the first time, instead of keeping it. Models of
    transformers do so themselves, block by block, because their caches have to be off then. Returns what undoes it."""
    own: list[Any] = []
    theirs: set[int] = set()
    for child in module.modules():
        if id(child) not in theirs and getattr(child, "supports_gradient_checkpointing", False):
            own.append(child)
            theirs.update(id(inner) for inner in child.modules())
    ours = [unit for _, unit in units if id(unit) not in theirs]
    for model in own:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for unit in ours:
        unit.forward = functools.partial(_again, unit.forward)

    def undo() -> None:
        for model in own:
            model.gradient_checkpointing_disable()
        for unit in ours:
            vars(unit).pop("forward", None)

    return undo


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
