"""Quantised weights: frozen parameters of few bits with scales, as bitsandbytes (4-bit, 8-bit) and torchao create them.

Owns: which parameters of a module are quantised, the tensors of each, and the error of strategies that do not support them. Neither library
is imported for this. Must not know: checkpoints, adapters, who trains what.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabricate.errors import ConfigurationError
from fabricate.strategies.sharding import inner_tensors, is_sharded, is_wrapper

if TYPE_CHECKING:
    import torch

SCALES = "scales of quantised weights"
"""The kind of memory that is whole on every rank, even if the weights themselves are sharded."""
FOUR_BIT, EIGHT_BIT, TORCHAO = "bitsandbytes 4-bit", "bitsandbytes 8-bit", "torchao"
EVERY_KIND = (FOUR_BIT, EIGHT_BIT, TORCHAO)


@dataclass(frozen=True)
class Quantised:
    """One quantised weight."""

    kind: str
    weight: torch.nn.Parameter
    """The codes; with torchao, they contain the scales."""
    scales: tuple[torch.Tensor, ...]
    """The tensors outside of the codes, whole on every rank."""
    form: str
    """The settings that determine the meaning of the codes, as text."""
    shape: tuple[int, ...]
    """The shape of the weight that the codes stand for."""

    def tensors(self) -> list[torch.Tensor]:
        """The plain tensors that hold the values on this rank; for sharded codes, this rank's part of them."""
        weight: Any = self.weight
        local = weight.to_local() if is_sharded(weight) else weight
        return [*inner_tensors(local.detach()), *self.scales]


def quantised_weights(module: torch.nn.Module) -> dict[str, Quantised]:
    """The quantised weights of `module`, by the names of its parameters."""
    homes = {id(p): layer for layer in module.modules() for p in layer._parameters.values() if p is not None}
    weights = ((name, _quantised(homes[id(p)], p)) for name, p in module.named_parameters() if not p.requires_grad)
    return {name: each for name, each in weights if each is not None}


def _quantised(layer: Any, weight: torch.nn.Parameter) -> Quantised | None:
    library: Any = sys.modules.get("bitsandbytes.nn")
    own = library is not None and weight is dict(layer._parameters.items()).get("weight")
    if own and isinstance(layer, library.Linear4bit | library.Embedding4bit):
        state = getattr(weight, "quant_state", None) or layer.quant_state
        if state is None:  # not quantised yet
            return None
        form = f"{state.quant_type} {state.blocksize} {state.dtype} {tuple(state.shape)}"
        return Quantised(FOUR_BIT, weight, tuple(_of_state(state)), form, tuple(state.shape))
    if own and isinstance(layer, library.Linear8bitLt | library.Embedding8bit):
        # The first forward of a linear layer moves the scales from the weight to the layer.
        scales = getattr(weight, "SCB", None)
        scales = layer.state.SCB if scales is None and hasattr(layer, "state") else scales
        return None if scales is None else Quantised(EIGHT_BIT, weight, (scales,), "", tuple(weight.shape))
    if is_wrapper(weight):
        data: Any = weight.data
        return Quantised(
            TORCHAO, weight, (), f"{type(data).__name__} {data.__tensor_flatten__()[1]}", tuple(data.shape)
        )
    return None


def dequantised(weight: Quantised) -> torch.Tensor:
    """The whole weight that the codes stand for, on their device, in the dtype of the library."""
    codes: Any = weight.weight.data
    if weight.kind == TORCHAO:
        return codes.dequantize()  # type: ignore[no-any-return]
    if weight.kind == EIGHT_BIT:
        return codes.float() * (weight.scales[0].float() / 127).reshape(-1, 1)  # type: ignore[no-any-return]
    library: Any = sys.modules["bitsandbytes.functional"]
    return library.dequantize_4bit(codes, weight.weight.quant_state)  # type: ignore[attr-defined,no-any-return]


def _of_state(state: Any) -> Iterator[torch.Tensor]:
    """The tensors of a `QuantState` of bitsandbytes; its scales may be quantised themselves."""
    yield from (state.absmax, state.code)
    if state.nested:
        yield from (state.offset, state.state2.absmax, state.state2.code)


def refuse_quantised(module: torch.nn.Module, strategy: str, taken: tuple[str, ...]) -> None:
    """Raise `ConfigurationError` for quantised weights of kinds that are not in `taken`, and for packed weights, which give no gradient."""
    weights = quantised_weights(module)
    for kind in dict.fromkeys(each.kind for each in weights.values()):
        if kind not in taken:
            names = [name for name, each in weights.items() if each.kind == kind]
            more = f" and {len(names) - 1} more" if names[1:] else ""
            takes = (
                f"supports only the quantised weights of {' and '.join(taken)}"
                if taken
                else "supports no quantised weights"
            )
            other = "use one of these kinds, or strategy='ddp'" if taken else "use strategy='ddp'"
            raise ConfigurationError(
                f"strategy={strategy!r} {takes}, but {names[0]}{more} are quantised by {kind}; {other}, under which every rank has a copy"
            )
    packed = [name for name, each in weights.items() if _is_packed(each)]
    if packed:
        raise ConfigurationError(
            f"bitsandbytes packed {packed[0]} and {len(packed) - 1} others for inference, because the model ran in eval mode on "
            "this CPU before the fit. Packed weights have rounded scales and give no gradient. Load the model again, and do not "
            "run it before the fit"
        )


def _is_packed(weight: Quantised) -> bool:
    state = getattr(weight.weight, "quant_state", None)
    return bool(getattr(state, "packing_format_for_cpu", False))


def kept_unpacked(module: torch.nn.Module) -> Callable[[], None]:
    """Prevent bitsandbytes from packing 4-bit weights for inference on a CPU. A validation would start this, and packed weights give no
    gradient. Returns a function that allows it again."""
    name = "support_avx512bf16_for_cpu"
    layers: list[Any] = [layer for layer in module.modules() if getattr(layer, name, False)]
    for layer in layers:
        setattr(layer, name, False)

    def undo() -> None:
        for layer in layers:
            setattr(layer, name, True)

    return undo
