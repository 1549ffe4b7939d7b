"""The Transformer Engine backend. Imported only where the package is installed and chosen."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling


def convert(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Replace the linear layers `names`; the parameters stay the same objects under the same names."""
    for name in names:
        old = module.get_submodule(name)
        assert isinstance(old, torch.nn.Linear)
        with torch.random.fork_rng():  # its initial weights are discarded and must not advance the generators
            bias, dtype, device = old.bias is not None, old.weight.dtype, old.weight.device
            new = te.Linear(old.in_features, old.out_features, bias=bias, params_dtype=dtype, device=device)
        new.weight = old.weight
        if bias:
            new.bias = old.bias
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, new)


class Context(AbstractContextManager[None]):
    """bfloat16 autocast with float8 inside; re-enterable. Scales are computed from the present tensor, so checkpoints need no history of
    them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(torch.autocast(self._device.type, torch.bfloat16))
        stack.enter_context(te.fp8_autocast(enabled=True, fp8_recipe=Float8CurrentScaling()))
        self._open.append(stack)

    def __exit__(self, *exc: object) -> None:
        self._open.pop().close()
