"""float8 training of linear layers, by torchao or by Transformer Engine.

Parameters, gradients and optimizer state stay as they are; the matrix products of converted layers run in float8,
everything else under bfloat16 autocast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, Literal

import torch

from fabricate import ConfigurationError, Precision, Strategy


@dataclasses.dataclass(eq=False)
class FP8(Precision):
    """float8 matrix products in every linear layer whose two sizes are multiples of 16.

    recipe: how torchao scales. skip: layers to leave alone, a regular expression looked for in their names. emulate:
    compute float8's rounding in higher precision where the device has no float8 (slow; to try things out). backend: "te" is Transformer Engine.
    """

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    skip: str = "lm_head"
    emulate: bool = False
    backend: Literal["torchao", "te"] = "torchao"
    name: ClassVar[str] = "fp8"
    mixed_precision: ClassVar[str] = "bf16"  # what runs around the float8 layers; "fp8" would make Accelerate convert too
    compute_dtype: ClassVar[str] = "bfloat16"

    def __post_init__(self) -> None:
        self._converted: list[str] = []

    def check(self, device: torch.device, strategy: Strategy) -> Iterable[str]:
        package, backend = {"torchao": ("torchao", "torchao"), "te": ("transformer_engine", "Transformer Engine")}[self.backend]
        if importlib.util.find_spec(package) is None:
            yield f"precision='fp8' needs {backend}, which is not installed: run pip install {package}, or use precision='bf16'"
        if "DEEPSPEED" in strategy.distributed_types:
            yield f"precision='fp8' with strategy={strategy.name!r}, which flattens parameters: use strategy='fsdp' or 'ddp'"
        if self.emulate and self.backend == "te":
            yield "precision='fp8:backend=te' cannot emulate: remove emulate, or use backend=torchao"
        elif not self.emulate and not _native(device):
            yield (
                f"precision='fp8': {device} does not compute in float8 (it takes an NVIDIA GPU of compute capability 8.9 or more): "
                "use precision='bf16', or 'fp8:emulate=true' to try the rounding at no speed"
            )

    def convert(self, module: torch.nn.Module) -> None:
        wanted = [
            name
            for name, layer in module.named_modules()
            if isinstance(layer, torch.nn.Linear) and not re.search(self.skip or "$^", name)
            if layer.in_features % 16 == 0 and layer.out_features % 16 == 0
        ]
        if not wanted:
            raise ConfigurationError(
                f"precision='fp8': {type(module).__name__} has no linear layer with sizes in multiples of 16 outside "
                f"skip={self.skip!r}; use precision='bf16'"
            )
        self._converted = wanted
        if self.backend == "te":
            _to_transformer_engine(module, wanted)
            return
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(self.recipe), emulate=self.emulate)
        convert_to_float8_training(module, config=config, module_filter_fn=lambda layer, name: name in set(wanted))

    def forward_context(self, device: torch.device) -> AbstractContextManager[object]:
        autocast = torch.autocast(device.type, torch.bfloat16)
        return _Both(autocast) if self.backend == "te" else autocast

    def describe(self) -> dict[str, str]:
        how = "emulated: the rounding of float8 at no speed" if self.emulate else "native"
        recipe = f", {self.recipe}" if self.backend == "torchao" else ""
        return {"float8": f"{len(self._converted)} linear layers by {self.backend}{recipe}; {how}"}
