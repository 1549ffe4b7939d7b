"""Backward and the update, with a loss scale or without. The engine chooses one of the two when it opens.

Must not know: Accelerate, the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fabricate.strategies.base import Strategy


class Unscaled:
    """No loss scale, or one that the strategy's own engine keeps."""

    def __init__(self, strategy: Strategy) -> None:
        self.backward: Callable[[torch.Tensor], None] = strategy.backward
        """Backward of one micro-batch."""
        self.step: Callable[[torch.optim.Optimizer], bool] = strategy.step
        """Apply the update; False if the strategy left it out."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale; here there is none."""


class Scaled:
    """The loss is scaled up before backward, and the gradients down before anything reads them (fp16)."""

    def __init__(self, strategy: Strategy, scaler: torch.amp.GradScaler) -> None:
        self._backward = strategy.backward
        self._scaler = scaler

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of one micro-batch, of the scaled loss."""
        self._backward(self._scaler.scale(loss))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Apply the update; False if a gradient overflowed. Waits for the device once."""
        overflow = _Overflow()
        hook = optimizer.register_step_post_hook(overflow)
        self._scaler.step(optimizer)
        hook.remove()
        self._scaler.update()
        return not float(overflow.found)


class _Overflow:
    """A hook of an optimizer's step, from which it is known whether the update was applied."""

    found: Any = 1.0  # unless the optimizer is called

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.found = getattr(
            optimizer, "found_inf", 0.0
        )  # a fused one is called always, and leaves the update out itself
