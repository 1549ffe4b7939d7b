"""Support for running `configure_model` a second time, with real tensors, after it ran on the meta device: detects values that were lost
there, and restores the module.

Must not know: the sources of values.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_OF_TRANSFORMERS = frozenset({"__init__", "post_init", "init_weights", "_init_weights"})


class Before:
    """A copy of the attributes of a module and its submodules, to restore them later."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._of: list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]] = []
        for child in module.modules():
            held = [value for value in vars(child).values() if type(value) in (dict, list, set)]
            self._of.append((vars(child), dict(vars(child)), [(value, value.copy()) for value in held]))

    def restore(self) -> None:
        """Undo all changes to attributes since. Containers stay the same objects, because other objects may refer to them."""
        for attributes, were, held in self._of:
            attributes.clear()
            attributes.update(were)
            for value, copied in held:
                value.clear()
                value.extend(copied) if isinstance(value, list) else value.update(copied)


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records which tensors on the meta device are written to, because these values are lost. Writes of a layer's
    `reset_parameters` to its own tensors, and those of a transformers model, do not count, because these rules run again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By storage. The tensor is kept so that its storage's address is not reused.
        self._written: dict[int, tuple[torch.Tensor, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, torch.Tensor) and value.is_meta:
                    storage = value.untyped_storage()._cdata
                    if not _by_rule(storage, inspect.currentframe()):
                        self._written[storage] = (value, str(func))
        return func(*args, **(kwargs or {}))

    def lost(self, module: torch.nn.Module) -> str:
        """The first parameter or buffer of `module` whose values were lost, and the operation that wrote them; empty if there is none."""
        for name, child in module.named_modules():
            for key, tensor in _own(child).items():
                if tensor.is_meta and (write := self._written.get(tensor.untyped_storage()._cdata)) is not None:
                    return f"{name}.{key} is given values by {write[1]}".lstrip(".")
        return ""


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that collects the storages that are written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, torch.Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
                self.storages.add(value.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


def set_from_around(module: torch.nn.Module, owners: Mapping[int, Any]) -> str:
    """The first weight that transformers' rule for an enclosing layer sets (GPT-2's rule for a block sets projections inside the block);
    empty if there is none. Only weights that are on the meta device and in no file count. `owners`: for each layer (by id), its
    transformers model."""
    stored = getattr(module, "_stored", {})
    for block in module.modules():
        if id(block) not in owners or not any(True for _ in block.children()):
            continue
        # RuntimeError: the rule needs real values
        with _Written() as written, torch.no_grad(), contextlib.suppress(RuntimeError):
            owners[id(block)]._init_weights(block)
        for name, child in block.named_modules():
            for key, tensor in _own(child).items() if child is not block else ():
                if tensor.is_meta and id(tensor) not in stored and tensor.untyped_storage()._cdata in written.storages:
                    return f"{type(block).__name__} gives {name}.{key} its values"
    return ""


def _own(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    both = {**layer._parameters, **layer._buffers}
    return {key: tensor for key, tensor in both.items() if tensor is not None}


def _by_rule(storage: int, frame: FrameType | None) -> bool:
    """Whether a rule that runs again at initialisation is among the callers of `frame`, which writes to `storage`."""
    transformers = sys.modules.get("transformers")
    while frame is not None and frame.f_code.co_name != "configure_model":
        name = frame.f_code.co_name
        if name == "reset_parameters" or (transformers is not None and name in _OF_TRANSFORMERS):
            layer = frame.f_locals.get("self")
            if name == "reset_parameters" and isinstance(layer, torch.nn.Module):
                if any(tensor.untyped_storage()._cdata == storage for tensor in _own(layer).values()):
                    return True
            elif transformers is not None and isinstance(layer, transformers.PreTrainedModel):
                return True
        frame = frame.f_back
    return False
