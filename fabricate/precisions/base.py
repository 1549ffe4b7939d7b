"""The interface of precisions: the dtypes in which a module computes, and the contexts that it needs for that. Abstract.

A precision is a plugin object: it may implement hooks and keep state. It must not depend on the strategy of the fit, except to
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
    """Base class of all precisions. Override the methods that differ; the defaults compute in the parameters' own dtype (fp32)."""

    name: ClassVar[str] = ""
    """The name in settings, the plan and messages. Required."""
    mixed_precision: ClassVar[str] = "no"
    """The `mixed_precision` of the Accelerator ("no", "fp16", "bf16", "fp8"), so that `trainer.accelerator` reports what runs."""
    compute_dtype: ClassVar[str] = "float32"
    """torch's name of the dtype in which matrix products run. The plan shows it, and it is verified before the first step."""

    def check(self, device: torch.device, strategy: Any) -> Iterable[str]:
        """Reasons why this precision cannot run here, each with its remedy; empty when it can. `strategy`: the `Strategy` of the
        fit. Pure, all ranks."""
        return ()

    def settle(self, settled: Any) -> None:
        """Called once before the model is built, with the resolved settings (a `Strategy.Settled`). Raises `ConfigurationError` if
        they cannot work. Pure."""

    def convert(self, module: torch.nn.Module) -> None:
        """Change `module` in place (dtypes, layers) before it is sharded. Names in `state_dict()` must stay."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterable[str]:
        """Reasons why `optimizer` cannot train parameters in this precision, each with its remedy; empty when it can. Pure, all
        ranks."""
        return ()

    def process_context(self, device: torch.device) -> AbstractContextManager[object]:
        """A context that is entered for the whole run and changes settings of the process. It restores them on exit."""
        return contextlib.nullcontext()

    def forward_context(self, device: torch.device) -> AbstractContextManager[object] | None:
        """A re-enterable context around forward and loss, or None when none is needed."""
        return None

    def loss_scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """A dynamic loss scaler, or None if none is needed. With a scaler, every update waits once for the device."""
        return None

    def describe(self) -> dict[str, str]:
        """Lines for the plan, by topic."""
        return {}


def compensates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` makes up for the rounding of bfloat16 weights."""
    stochastic = getattr(optimizer, "bf16_stochastic_round", False) is True  # torchao's name for it
    # `kahan_sum` is an option of optimi.
    return stochastic or all(group.get("kahan_sum", False) in (True, None) for group in optimizer.param_groups)
