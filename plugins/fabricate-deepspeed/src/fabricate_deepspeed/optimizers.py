"""The check of optimizers for ZeRO's flat slices: only those that update each element independently compute the same there."""

from __future__ import annotations

import torch

from fabricate import ConfigurationError

_ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdam",
    "FusedLion",
)


def check_elementwise(strategy: str, optimizer: torch.optim.Optimizer, allow_untested: bool) -> None:
    """Raise `ConfigurationError` for an optimizer whose result would differ on flat slices of the parameters."""
    kind = type(optimizer)
    is_elementwise = kind.__name__ in _ELEMENTWISE and kind.__module__.partition(".")[0] in ("torch", "deepspeed")
    if getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8:  # of bitsandbytes
        raise ConfigurationError(
            f"strategy={strategy!r} trains flat slices of the parameters, which would cut the blocks (with one scale each) in "
            f"which {kind.__name__} keeps its state; use one of torch's optimizers, or strategy='ddp'"
        )
    if optimizer.state:
        raise ConfigurationError(
            f"strategy={strategy!r}: {kind.__name__} has state before its first step, which cannot be divided into slices; use "
            "another optimizer, or strategy='fsdp'"
        )
    if not is_elementwise and not allow_untested:
        raise ConfigurationError(
            f"strategy={strategy!r} trains flat slices of the parameters, but {kind.__name__} is not known to update each element "
            f"independently. Use one of torch's optimizers, or strategy='fsdp'. If {kind.__name__} does update each element "
            f"independently, use '{strategy}:allow_untested_optimizer=true'"
        )
