"""float8 training of linear layers, by torchao or by Transformer Engine.

Parameters, gradients and optimizer state stay as they are; the matrix products of converted layers run in float8,
everything else under bfloat16 autocast.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from fabricate import ConfigurationError, Precision, Strategy
from fabricate_fp8.layers import choose, put_back

if TYPE_CHECKING:
    from fabricate import Trainer, TrainModule

_PACKAGES = {"torchao": "torchao", "te": "transformer_engine"}


@dataclasses.dataclass(eq=False)
class FP8(Precision):
    """float8 matrix products in every linear layer whose two sizes are multiples of 16.

    recipe: the scaling of torchao. skip: a regular expression; layers in whose names it is found are left alone. emulate: only round to
    float8, on a device without it (slow; for experiments). backend: "te" is Transformer Engine.
    """

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    skip: str = "lm_head"
    emulate: bool = False
    backend: Literal["torchao", "te"] = "torchao"
    name: ClassVar[str] = "fp8"
    mixed_precision: ClassVar[str] = "bf16"  # of everything else; "fp8" would make Accelerate convert layers
    compute_dtype: ClassVar[str] = "bfloat16"

    def __post_init__(self) -> None:
        if self.backend not in _PACKAGES:
            raise ConfigurationError(f"fp8: backend={self.backend!r}: give 'torchao' or 'te'")
        self._layers: dict[str, torch.nn.Module] = {}
        self._subclasses = 0
        self._slow = False

    def check(self, device: torch.device, strategy: Strategy) -> Iterable[str]:
        package = _PACKAGES[self.backend]
        if importlib.util.find_spec(package) is None:
            yield f"precision='fp8' needs the package {package}, which is not installed: install it, or use precision='bf16'"
        if "DEEPSPEED" in strategy.distributed_types:
            yield f"precision='fp8' does not work with strategy={strategy.name!r}, which flattens parameters: use strategy='fsdp'"
        if self.emulate and self.backend == "te":
            yield "precision='fp8:backend=te' cannot emulate: remove emulate, or use backend=torchao"
        elif not self.emulate and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
            yield (
                f"precision='fp8': {device} does not compute in float8, which needs an NVIDIA GPU of compute capability 8.9 or "
                "more: use precision='bf16', or 'fp8:emulate=true' to try the rounding without the speed"
            )

    def settle(self, settled: Strategy.Settled) -> None:
        self._slow = self.backend == "torchao" and not (self.emulate or settled.compiles)

    def convert(self, module: torch.nn.Module) -> None:
        self._layers, self._subclasses = choose(module, self.skip)
        if not self._layers:
            raise ConfigurationError(
                f"precision='fp8': {type(module).__name__} has no linear layer to convert: both sizes have to be multiples of 16, "
                f"and the name must not contain skip={self.skip!r}; use precision='bf16'"
            )
        if self.backend == "te":
            from fabricate_fp8.transformer_engine import convert

            convert(module, self._layers)
            return
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(self.recipe)
        # Pads a batch with zeros to a multiple of 16 rows, which the products of backward need.
        config = dataclasses.replace(recipe, emulate=self.emulate, pad_inner_dim=True)
        convert_to_float8_training(module, config=config, module_filter_fn=lambda layer, name: name in self._layers)

    def on_teardown(self, trainer: Trainer, module: TrainModule) -> None:
        """Put the plain layers back, with the trained weights; a sharded module stays prepared for the next fit."""
        if trainer.strategy.shards_parameters:
            return
        put_back(module, self._layers)
        self._layers = {}

    def forward_context(self, device: torch.device) -> AbstractContextManager[object]:
        if self.backend == "te":
            from fabricate_fp8.transformer_engine import Context

            return Context(device)
        return torch.autocast(device.type, torch.bfloat16)

    def describe(self) -> dict[str, str]:
        recipe = f", {self.recipe}" if self.backend == "torchao" else ""
        how = "emulated: float8's rounding without its speed" if self.emulate else "native"
        left = f"; {self._subclasses} of subclasses of Linear left alone" if self._subclasses else ""
        slow = "; without compile=True its scaling takes longer than it saves, and bf16 is faster" if self._slow else ""
        return {"float8": f"{len(self._layers)} linear layers by {self.backend}{recipe}; {how}{left}{slow}"}
