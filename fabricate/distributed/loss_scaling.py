"""Backward and the update, with a loss scale or without. The engine chooses one of the two when it opens.

Must not know: Accelerate, the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fabricate.strategies.base import Strategy


class Unscaled:
    """Backward and the update without a loss scale, or with a loss scale of the strategy's own engine."""

    def __init__(self, strategy: Strategy) -> None:
        self.backward: Callable[[torch.Tensor], None] = strategy.backward
        """Backward of one micro-batch."""
        self.step: Callable[[torch.optim.Optimizer], bool] = strategy.step
        """Apply the update. Returns False if the strategy skipped it."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: there is no scale by which gradients have to be divided."""


class Scaled:
    """Backward of the scaled loss (fp16), and an update whose gradients are divided by the scale before anything reads them."""

    def __init__(self, strategy: Strategy, scaler: torch.amp.GradScaler) -> None:
        self._backward = strategy.backward
        self._scaler = scaler

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of one micro-batch, with the scaled loss."""
        self._backward(self._scaler.scale(loss))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer` by the scale."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Apply the update. Returns False if a gradient overflowed. Waits for the device once."""
        if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            optimizer.step()  # all its parameters are frozen, which the scaler does not expect
            return True
        overflow = _Overflow()
        hook = optimizer.register_step_post_hook(overflow)
        self._scaler.step(optimizer)
        hook.remove()
        self._scaler.update()
        return not float(overflow.found)


class _Overflow:
    """A hook after an optimizer's step that finds whether the update was applied."""

    found: Any = 1.0  # the value if the optimizer is not called

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # A fused optimizer is always called, and skips the update itself.
        self.found = getattr(optimizer, "found_inf", 0.0)
