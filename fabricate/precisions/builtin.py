"""The built-in precisions: fp32 (TF32 on request), fp16 with loss scaling and bf16 by autocast over fp32 parameters, and pure bf16 for
optimizers that compensate for its rounding."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from fabricate.errors import ConfigurationError
from fabricate.hooks import hookimpl
from fabricate.precisions.base import Precision, compensates

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(eq=False)
class FP32(Precision):
    """Parameters, gradients and computation in the parameters' own dtype, float32 by default.

    tf32: true lets NVIDIA GPUs round the inputs of float32 matrix products and convolutions to TF32 (10 bits of mantissa, several
    times faster), false forbids it; unset leaves torch's own settings, which allow it in convolutions.
    """

    tf32: bool | None = None
    name: ClassVar[str] = "fp32"

    def check(self, device: torch.device, strategy: Any) -> Iterable[str]:
        import torch

        if self.tf32 and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
            yield (
                f"precision='fp32:tf32=true': {device} has no TF32; only NVIDIA GPUs of compute capability 8.0 or more have it. "
                "Use precision='fp32'"
            )

    def process_context(self, device: torch.device) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self.tf32 is None else _allow_tf32(self.tf32)

    def describe(self) -> dict[str, str]:
        import torch

        if not torch.cuda.is_available():
            return {}
        if self.tf32 is not None:
            return {"float32 products": "TF32" if self.tf32 else "float32, no TF32"}
        said = [f"{kind} {'TF32' if _allows_tf32(part) else 'float32'}" for kind, part in _tf32_parts().items()]
        return {"float32 products": f"torch's settings: {', '.join(said)}"}


def _tf32_parts() -> dict[str, Any]:
    """The modules of torch with a switch for TF32, by the operations that it affects."""
    import torch

    return {"matrix products": torch.backends.cuda.matmul, "convolutions": torch.backends.cudnn}


def _new_switches(part: Any) -> list[Any]:
    """The objects with torch's newer switch, `fp32_precision`, for `part`; none in versions that have only `allow_tf32`. Once a script has
    set the newer switch, reading the older one is an error."""
    owners = [part.conv, part.rnn] if hasattr(part, "conv") else [part]
    return [owner for owner in owners if hasattr(owner, "fp32_precision")]


def _allows_tf32(part: Any) -> bool:
    switches = _new_switches(part)
    return bool(switches[0].fp32_precision == "tf32" if switches else part.allow_tf32)


@contextlib.contextmanager
def _allow_tf32(allowed: bool) -> Iterator[None]:
    parts = list(_tf32_parts().values())
    before = [_allows_tf32(part) for part in parts]
    switches = [(switch, switch.fp32_precision) for part in parts for switch in _new_switches(part)]
    for part in parts:
        part.allow_tf32 = allowed  # sets the newer switches as well
    try:
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            part.allow_tf32 = value
        for switch, precision in switches:
            switch.fp32_precision = precision


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
                f"fp16: init_scale={self.init_scale!r}, growth_interval={self.growth_interval!r}: give at least 1 for both"
            )

    def forward_context(self, device: torch.device) -> AbstractContextManager[object]:
        import torch

        return torch.autocast(device.type, torch.float16)

    def loss_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        import torch

        return torch.amp.GradScaler(device.type, init_scale=self.init_scale, growth_interval=self.growth_interval)

    def describe(self) -> dict[str, str]:
        return {"loss scaling": f"dynamic from {self.init_scale:g}; one wait for the device per update"}


@dataclasses.dataclass(eq=False)
class BF16True(Precision):
    """Parameters, gradients and optimizer state in bfloat16, in half the memory. Computes like "bf16".

    An update smaller than 1/256 of a weight is lost when it is rounded to bfloat16, so the optimizer has to compensate for that, by Kahan
    summation (package torch-optimi) or stochastic rounding (torchao.optim); other optimizers are refused. Gradients are accumulated and
    averaged in bfloat16. Layers with running statistics keep their dtype.
    """

    name: ClassVar[str] = "bf16-true"
    mixed_precision: ClassVar[str] = "bf16"
    compute_dtype: ClassVar[str] = "bfloat16"

    def __post_init__(self) -> None:
        self._before: dict[torch.nn.Parameter, torch.Tensor | None] = {}

    def convert(self, module: torch.nn.Module) -> None:
        import torch

        for child in module.modules():
            if any(b.is_floating_point() for b in child.buffers(recurse=False)):
                continue  # its kernels need parameters and statistics in the same dtype
            for parameter in child.parameters(recurse=False):
                if parameter.dtype == torch.float32:
                    self._before[parameter] = parameter.data
                    parameter.data = parameter.data.to(torch.bfloat16)

    def on_fit_start(self) -> None:
        """Drop the weights from before the fit, which are not needed once training begins."""
        self._before = dict.fromkeys(self._before)

    def on_teardown(self, trainer: Any) -> None:
        """Convert the parameters back to float32; after an evaluation, they are bitwise as before. A sharded module stays prepared for the
        next fit."""
        if not trainer.strategy.shards_parameters:
            for parameter, data in self._before.items():
                parameter.data = parameter.data.float() if data is None else data.to(parameter.device)
        self._before = {}

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterable[str]:
        if not compensates(optimizer):
            yield (
                f"precision='bf16-true': {type(optimizer).__name__} loses updates that are small compared with their weights. "
                "Use an optimizer that compensates "
                "for the rounding, such as optimi.AdamW(parameters, lr, weight_decay) of the package torch-optimi, or precision='bf16'"
            )

    def forward_context(self, device: torch.device) -> AbstractContextManager[object]:
        import torch

        return torch.autocast(device.type, torch.bfloat16)

    def describe(self) -> dict[str, str]:
        return {
            "parameters": "bfloat16, with their gradients and optimizer state; the optimizer makes up for the rounding"
        }


@hookimpl
def register_precisions(register: Callable[..., None]) -> None:
    register("fp32", FP32, summary="float32 throughout")
    register("no", FP32, summary="the same as fp32")
    register("tf32", functools.partial(FP32, tf32=True), summary="float32, its products in TF32 on NVIDIA GPUs")
    register("fp16", FP16, summary="float16 autocast with loss scaling")
    register("bf16", BF16, summary="bfloat16 autocast")
    register("bf16-true", BF16True, summary="bfloat16 parameters, gradients and optimizer state")
