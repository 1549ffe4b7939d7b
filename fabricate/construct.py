"""Building what `configure_model` describes: on the meta device first, then each layer from the seed and its name alone.

Must not know: strategies, ranks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from fabricate.errors import ConfigurationError
from fabricate.module import TrainModule, overrides
from fabricate.randomness import derive_seed, rng_state, seed_everything, set_rng_state


def pretrained_models(module: torch.nn.Module) -> list[Any]:
    """The outermost transformers models inside `module` (transformers is not imported for this)."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    found: list[tuple[str, Any]] = []
    for name, child in module.named_modules():
        if isinstance(child, transformers.PreTrainedModel) and not any(
            name.startswith(f"{outer}.") for outer, _ in found
        ):
            found.append((name, child))
    return [child for _, child in found]


def build_model(module: TrainModule, seed: int) -> str:
    """Run `configure_model` on the meta device and initialise what it built, submodule by submodule, on the CPU.

    The result depends on `seed` and names only. Returns a line for the plan, empty when there was nothing to build. All
    ranks, no collectives.
    """
    if not overrides(module, "configure_model") or getattr(module, "_built", False):
        return ""
    object.__setattr__(module, "_built", True)
    note = "built on the meta device, each layer initialised from seed and name"
    try:
        with torch.device("meta"):
            module.configure_model()
    except (RuntimeError, NotImplementedError) as exc:
        # from_pretrained, or code that reads values: it needs real tensors. Seeded, so the same on every rank.
        seed_everything(derive_seed(seed, "configure_model"))
        module.configure_model()
        note = f"built on the CPU, because it needs real tensors ({str(exc).splitlines()[0]})"
    materialise(module, seed)
    return note


def materialise(module: TrainModule, seed: int) -> None:
    """Give every parameter and buffer on the meta device memory on the CPU and values from `(seed, name)`."""
    memory: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memory:  # tied weights stay tied
            empty = torch.empty_like(tensor, device="cpu")
            if empty.is_floating_point():
                empty.fill_(float("nan"))  # so that a value nobody set is found below, not trained on
            memory[id(tensor)] = (
                torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
            )
        return memory[id(tensor)]

    models = pretrained_models(module)
    pending = []
    for name, child in module.named_modules():
        owned = [
            (table, key, t)
            for table in (child._parameters, child._buffers)
            for key, t in table.items()
            if t is not None and t.is_meta
        ]
        for table, key, tensor in owned:
            table[key] = real(tensor)
        if owned:
            pending.append((name, child))
    before = rng_state()
    for name, child in pending:
        torch.manual_seed(derive_seed(seed, "init", name))
        owner = next((m for m in models if any(child is c for c in m.modules())), None)
        with torch.no_grad():
            if overrides(module, "init_weights"):
                module.init_weights(child)
            elif owner is not None:
                owner._init_weights(child)  # the rule that transformers has for its own layers
            elif hasattr(child, "reset_parameters"):
                child.reset_parameters()
            else:
                raise ConfigurationError(
                    f"configure_model built {name or 'parameters'} ({type(child).__name__}), which has no reset_parameters; define "
                    f"init_weights(self, submodule) on {type(module).__name__} to initialise it"
                )
    set_rng_state(before)
    for name, child in pending:
        for key, tensor in [*child._parameters.items(), *child._buffers.items()]:
            if tensor is not None and tensor.is_floating_point() and tensor.isnan().any():
                raise ConfigurationError(
                    f"{name}.{key} was built by configure_model and has no initial value; set it in "
                    f"{type(module).__name__}.init_weights(submodule) for {type(child).__name__}"
                )
