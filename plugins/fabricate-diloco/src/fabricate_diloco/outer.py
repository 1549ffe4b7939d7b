"""The outer optimizer: SGD with Nesterov momentum on the mean movement of the replicas. Must not know: when it steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fabricate_diloco.replicas import mean


class Outer:
    """The weights at the last synchronisation, and their momentum; the same on every rank."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._parts = [(w.detach(), w.detach().clone(), torch.zeros_like(w)) for w in weights]

    def step(self, learning_rate: float, momentum: float) -> None:
        """Move by the mean of the ranks' movements since the last step, and put the result into every replica. All ranks."""
        for weight, outer, velocity in self._parts:
            moved = mean(outer - weight)
            velocity.mul_(momentum).add_(moved)
            outer.sub_(moved.add_(velocity, alpha=momentum), alpha=learning_rate)
            weight.copy_(outer)

    def state(self) -> list[list[torch.Tensor]]:
        """The weights and momentum of each parameter, for a checkpoint."""
        return [[outer, velocity] for _, outer, velocity in self._parts]

    def load(self, state: Sequence[Sequence[torch.Tensor]]) -> None:
        """Restore what `state` returned."""
        for (_, *own), saved in zip(self._parts, state, strict=True):
            for tensor, value in zip(own, saved, strict=True):
                tensor.copy_(value)
