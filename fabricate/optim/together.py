"""Several optimizers that step in one update, as one optimizer.

Must not know: strategies, the loop.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fabricate.errors import ConfigurationError
from fabricate.optim.schedules import Schedule


class Together(torch.optim.Optimizer):
    """What hooks and the loss scale get of `optimizers` that step in one update: `param_groups` and `state` are theirs, `step` is a
    step of each. Checkpoints, schedules and `trainer.optimizers` have each of them on its own."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        super().__init__([p for o in optimizers for group in o.param_groups for p in group["params"]], {})
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state = ChainMap(*(optimizer.state for optimizer in optimizers))  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each."""
        for optimizer in self.optimizers:
            optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Which of them is to train it is not known."""
        if self.param_groups:
            raise ConfigurationError(
                "add_param_group: several optimizers step in this update; add the group to one of trainer.optimizers"
            )
        super().add_param_group(param_group)


class Stepping(NamedTuple):
    """What one update applies."""

    optimizer: torch.optim.Optimizer
    """One, or several as `Together`."""
    parameters: list[torch.nn.Parameter]
    """Listed once: nothing walks the module per step."""
    schedules: list[Schedule]


def stepping(optimizers: Sequence[torch.optim.Optimizer], schedules: Sequence[Schedule]) -> Stepping:
    """What an update applies that steps each of `optimizers`. Their parameters are disjoint."""
    together = optimizers[0] if len(optimizers) == 1 else Together(optimizers)
    parameters = [p for group in together.param_groups for p in group["params"]]
    return Stepping(together, parameters, list(schedules))
