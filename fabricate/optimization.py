"""What `configure_optimizers` may return, read into named optimizers and schedulers.

Must not know: strategies, the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from fabricate.errors import ConfigurationError


class Scheduler(Protocol):
    """What the loop asks of a scheduler: advanced once per applied update of its optimizer."""

    def step(self) -> None:
        """Advance."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""


class PlateauScheduler:
    """`ReduceLROnPlateau` in the loop: not advanced per update, but with the validation loss after each validation."""

    def __init__(self, scheduler: torch.optim.lr_scheduler.ReduceLROnPlateau) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        """Nothing per update."""

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Advance by "val_loss"; `ConfigurationError` when validation gives none."""
        if "val_loss" not in metrics:
            raise ConfigurationError(
                f"ReduceLROnPlateau needs val_loss and validation gave {', '.join(metrics) or 'nothing'}; return "
                "{'loss': ...} from validation_step"
            )
        self.scheduler.step(metrics["val_loss"])

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scheduler's own."""
        self.scheduler.load_state_dict(state)


def configured_optimizers(where: str, module: Any) -> Any:
    """What `module.configure_optimizers()` returns; torch's word for "no parameters" is explained."""
    try:
        return module.configure_optimizers()
    except ValueError as exc:
        if "empty parameter list" not in str(exc):
            raise
        count = sum(p.requires_grad for p in module.parameters())
        raise ConfigurationError(
            f"{where} makes an optimizer over no parameters ({exc}), and the module has {count} trainable ones; pass self.parameters() "
            "or a list of them: an iterator that was read once is empty"
        ) from exc


def read_optimizers(where: str, configured: Any) -> tuple[dict[str, torch.optim.Optimizer], dict[str, Scheduler]]:
    """Optimizers and schedulers by name ("main" when there is one without a name). `where` names the method in errors."""
    optimizers: dict[str, torch.optim.Optimizer] = {}
    schedulers: dict[str, Scheduler] = {}
    for name, value in (configured if isinstance(configured, Mapping) else {"main": configured}).items():
        pair = value if isinstance(value, tuple | list) else (value,)
        if not 1 <= len(pair) <= 2 or not isinstance(pair[0], torch.optim.Optimizer):
            raise ConfigurationError(
                f"{where} returned {type(value).__name__}{f' for {name!r}' if name != 'main' else ''}; return an optimizer, "
                "(optimizer, scheduler), or a mapping of names to those"
            )
        optimizer = pair[0]
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError(
                f"{where}: LBFGS evaluates the loss several times per update, which the loop does not; choose another"
            )
        if not any(p.requires_grad for g in optimizer.param_groups for p in g["params"]):
            raise ConfigurationError(
                f"{where}: optimizer {name!r} holds no trainable parameter; give it parameters that require grad"
            )
        if any(optimizer is other for other in optimizers.values()):
            raise ConfigurationError(f"{where}: optimizer {name!r} is listed twice; give each name its own")
        optimizers[str(name)] = optimizer
        if len(pair) == 2 and pair[1] is not None:
            schedulers[str(name)] = _scheduler(f"{where}: the scheduler of {name!r}", pair[1])
    if not optimizers:
        raise ConfigurationError(f"{where} returned no optimizer")
    return optimizers, schedulers


def _scheduler(where: str, scheduler: Any) -> Scheduler:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return PlateauScheduler(scheduler)
    if not all(callable(getattr(scheduler, n, None)) for n in ("step", "state_dict", "load_state_dict")):
        raise ConfigurationError(
            f"{where} is {type(scheduler).__name__}; it needs step(), state_dict(), load_state_dict()"
        )
    checked: Scheduler = scheduler
    return checked
