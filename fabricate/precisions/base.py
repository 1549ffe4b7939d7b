"""What a precision is: the dtypes in which a module computes, and what that needs around the step. Abstract.

A precision is a plugin object: it may hear hooks and keep state. It must not know which strategy runs beside it, except to
refuse one in `check`. Strategies import precisions, not the other way round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from fabricate.hooks import Listener

if TYPE_CHECKING:
    import torch


class Precision(Listener):
    """Base of every precision. Override what differs; the defaults compute in the parameters' own dtype (fp32)."""

    name: ClassVar[str] = ""
    """What users call it, in settings, the plan and messages. It has to be given."""
    mixed_precision: ClassVar[str] = "no"
    """What Accelerate is told ("no", "fp16", "bf16", "fp8"), so that `trainer.accelerator` agrees with what runs."""
    compute_dtype: ClassVar[str] = "float32"
    """torch's name of the dtype in which matrix products run; the plan shows it and it is verified before the first step."""

    def check(self, device: torch.device, strategy: Any) -> Iterable[str]:
        """Reasons why this precision cannot run here, each with its remedy; empty when it can. Pure, all ranks. `strategy` is
        the `Strategy` beside it."""
        return ()

    def settle(self, settled: Any) -> None:
        """Called once before anything is built, with what came out of all settings, a `Strategy.Settled`. Raises
        `ConfigurationError`. Pure."""

    def convert(self, module: torch.nn.Module) -> None:
        """Change `module` in place (dtypes, layers) before it is sharded. Names in `state_dict()` must stay."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterable[str]:
        """Reasons why `optimizer` cannot train such parameters, each with its remedy; empty when it can. Pure, all ranks."""
        return ()

    def process_context(self, device: torch.device) -> AbstractContextManager[object]:
        """Entered for as long as the run lasts: settings of the whole process, as they were before afterwards."""
        return contextlib.nullcontext()

    def forward_context(self, device: torch.device) -> AbstractContextManager[object] | None:
        """A re-enterable context around forward and loss, or None when none is needed."""
        return None

    def loss_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """A dynamic loss scaler, or None. With one, every update waits once for the device."""
        return None

    def describe(self) -> dict[str, str]:
        """Lines for the plan, by topic."""
        return {}
