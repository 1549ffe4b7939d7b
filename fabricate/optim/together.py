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
    """Several `optimizers` that step in one update, as one optimizer for hooks and the loss scale: `param_groups` and `state` are those of
    all of them, and `step` makes one step of each. Checkpoints, schedules and `trainer.optimizers` use the separate optimizers."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        super().__init__([p for o in optimizers for group in o.param_groups for p in group["params"]], {})
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state = ChainMap(*(optimizer.state for optimizer in optimizers))  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step of each optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ConfigurationError, because it is not known which optimizer should train the group."""
        if self.param_groups:
            raise ConfigurationError(
                "add_param_group: several optimizers step in this update; add the group to one of trainer.optimizers"
            )
        super().add_param_group(param_group)


class Stepping(NamedTuple):
    """The optimizer, the parameters and the schedules of one update."""

    optimizer: torch.optim.Optimizer
    """One optimizer, or several as `Together`."""
    parameters: list[torch.nn.Parameter]
    """The parameters that it trains, collected once instead of in each step. They are in the order of the module, whatever the order in the
    groups, which may be that of a set: a norm over them is then the same on all ranks and after each start."""
    schedules: list[Schedule]


def stepping(
    module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], schedules: Sequence[Schedule]
) -> Stepping:
    """The `Stepping` of an update of `module` in which each of `optimizers` steps. Their parameters must be disjoint."""
    together = optimizers[0] if len(optimizers) == 1 else Together(optimizers)
    trained = {p for group in together.param_groups for p in group["params"]}
    return Stepping(together, [p for p in module.parameters() if p in trained], list(schedules))
