"""A small fit, and listeners with given arguments, to test hook calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fabricate import FitResult, Trainer, TrainModule, hookimpl
from fabricate.hooks import ACTIONS

ROWS = [(torch.full((3,), float(row)), torch.tensor([float(row)])) for row in range(8)]


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def fit(*plugins: object, module: TrainModule | None = None, val: Any = None, **arguments: Any) -> FitResult:
    arguments = {"max_steps": 1, "progress": False, "sanity_batches": 0, **arguments}
    return Trainer(plugins=plugins, **arguments).fit(module or Regression(), ROWS, val, batch_size=2)


def hearing(hook: str, arguments: list[str], hear: Callable[..., None]) -> Any:
    """A listener method with exactly `arguments` of `hook`, which passes them to `hear(self, hook, ...)`; a wrapper for actions."""
    named = ", ".join(f"{name}={name}" for name in arguments)
    call = f"hear(self, {hook!r}, {named})"
    body = f"    {call}\n    return (yield)" if hook in ACTIONS else f"    {call}"
    scope: dict[str, Any] = {"hear": hear}
    exec(f"def {hook}(self, {', '.join(arguments)}):\n{body}\n", scope)
    return hookimpl(wrapper=True)(scope[hook]) if hook in ACTIONS else scope[hook]
