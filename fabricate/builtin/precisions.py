"""The built-in precisions: fp32, fp16 with loss scaling, bf16; both half precisions by autocast over fp32 parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

from fabricate import ConfigurationError, Precision, hookimpl

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(eq=False)
class FP32(Precision):
    """Parameters, gradients and compute in the dtype they have, float32 by default."""

    name: ClassVar[str] = "fp32"


@dataclasses.dataclass(eq=False)
class BF16(Precision):
    """bfloat16 autocast: matrix products in bf16; parameters, gradients and optimizer state stay float32."""

    name: ClassVar[str] = "bf16"
    mixed_precision: ClassVar[str] = "bf16"
    compute_dtype: ClassVar[str] = "bfloat16"

    def forward_context(self, device: torch.device) -> AbstractContextManager[object]:
        import torch

        return torch.autocast(device.type, torch.bfloat16)


@dataclasses.dataclass(eq=False)
class FP16(Precision):
    """float16 autocast with dynamic loss scaling, on CPU as on GPU.

    init_scale: first loss scale; it halves on overflow (the update is skipped) and doubles after `growth_interval`
    updates without one (torch.amp.GradScaler's rule). The scaler waits once per update for the device.
    """

    init_scale: float = 65536.0
    growth_interval: int = 2000
    name: ClassVar[str] = "fp16"
    mixed_precision: ClassVar[str] = "fp16"
    compute_dtype: ClassVar[str] = "float16"

    def __post_init__(self) -> None:
        if not self.init_scale >= 1 or self.growth_interval < 1:
            raise ConfigurationError(
                f"fp16: init_scale={self.init_scale!r}, growth_interval={self.growth_interval!r}: both have to be at least 1"
            )

    def forward_context(self, device: torch.device) -> AbstractContextManager[object]:
        import torch

        return torch.autocast(device.type, torch.float16)

    def loss_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        import torch

        return torch.amp.GradScaler(device.type, init_scale=self.init_scale, growth_interval=self.growth_interval)

    def describe(self) -> dict[str, str]:
        return {"loss scaling": f"dynamic from {self.init_scale:g}; one wait for the device per update"}


@hookimpl
def register_precisions(register: Callable[..., None]) -> None:
    register("fp32", FP32, summary="float32 throughout")
    register("no", FP32, summary="the same as fp32")
    register("fp16", FP16, summary="float16 autocast with loss scaling")
    register("bf16", BF16, summary="bfloat16 autocast")
