"""Activation checkpointing: backward computes a submodule's activations again instead of keeping them. Must not know: shards, ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fabricate.errors import ConfigurationError
from fabricate.strategies.base import Strategy

_SMALL = 2**16
"""Up to this number of elements, a copy of a buffer costs less than to find out whether it changes."""


def recompute_blocks(module: torch.nn.Module) -> Callable[[], None]:
    """Call `recompute` for the outermost repeated blocks of `module`; see `Strategy.blocks`."""
    blocks = Strategy.blocks(module)
    outer = [(name, block) for name, block in blocks if not any(name.startswith(f"{other}.") for other, _ in blocks)]
    if not outer and not any(getattr(child, "supports_gradient_checkpointing", False) for child in module.modules()):
        raise ConfigurationError(
            f"activation_checkpointing=True: {type(module).__name__} has no transformers model and no ModuleList, "
            "so there are no blocks to recompute; put repeated layers into a ModuleList, or call "
            "torch.utils.checkpoint.checkpoint in training_step"
        )
    return recompute(module, outer)


def recompute(module: torch.nn.Module, units: Sequence[tuple[str, torch.nn.Module]]) -> Callable[[], None]:
    """Let backward compute the activations of `units` again, with the same dropout, instead of keeping them. Models of transformers do this
    themselves, block by block, because their caches have to be off. Returns a function that undoes it."""
    own: list[Any] = []
    theirs: set[int] = set()
    for child in module.modules():
        if id(child) not in theirs and getattr(child, "supports_gradient_checkpointing", False):
            own.append(child)
            theirs.update(id(inner) for inner in child.modules())
    ours = [unit for _, unit in units if id(unit) not in theirs]
    for model in own:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = [(unit, vars(unit).get("forward")) for unit in ours]
    for unit in ours:
        unit.forward = _Again(unit, getattr(module, "_logged", []))

    def undo() -> None:
        for model in own:
            model.gradient_checkpointing_disable()
        for unit, forward in before:
            if forward is None:
                vars(unit).pop("forward", None)
            else:  # a forward of the user, which replaced that of the class
                unit.forward = forward

    return undo


class _Again:
    """A replacement of a unit's `forward` that runs it again in backward. Buffers that the forward changes (running statistics of a batch
    norm, for example) are changed only once: the second run uses copies of their earlier values. Values that it logs are logged only
    once."""

    def __init__(self, unit: torch.nn.Module, logged: list[Any]) -> None:
        """`logged`: the list to which `TrainModule.log` adds."""
        self._unit, self._forward, self._logged = unit, unit.forward, logged
        self._changing: list[str] | None = None
        """The names of the buffers that the forward may change: small ones, and those that the first call changed. None before it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        held = dict(self._unit.named_buffers()) if self._changing is None else self._held(self._changing)
        before = {name: buffer.clone() for name, buffer in held.items()}
        ran = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran
            with self._as_before(before) if ran else contextlib.nullcontext():
                ran = True
                return self._forward(*args, **kwargs)

        output = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
        if self._changing is None:
            self._changing = [name for name, buffer in held.items() if self._may_change(name, buffer, before[name])]
            for name in held.keys() - set(self._changing):
                del before[name]
        return output

    @contextlib.contextmanager
    def _as_before(self, buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """A context in which the unit uses copies of `buffers`; values that are logged inside are removed afterwards."""
        count = len(self._logged)
        try:
            with _in_the_place_of_buffers(self._unit, buffers):
                yield
        finally:
            del self._logged[count:]

    def _held(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: self._unit.get_buffer(name) for name in names}

    def _may_change(self, name: str, buffer: torch.Tensor, before: torch.Tensor) -> bool:
        """Whether a call may change a buffer: also later than in the first call, and through `.data`, which no version counter shows. Of a
        large one, such as a mask, the values are compared once, which waits for the device."""
        small = buffer.numel() <= _SMALL or buffer.layout is not torch.strided
        return small or self._unit.get_buffer(name) is not buffer or not torch.equal(buffer, before)


@contextlib.contextmanager
def _in_the_place_of_buffers(unit: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A context in which copies of `values` replace the buffers of `unit` with these names."""
    own = []
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        buffers = unit.get_submodule(owner)._buffers
        own.append((buffers, name, buffers[name]))
        buffers[name] = value.clone()
    try:
        yield
    finally:
        for buffers, name, buffer in own:
            buffers[name] = buffer
