"""torch.compile, unit by unit and in place: what is compiled, one graph for batches of every size, undone afterwards.

A unit's `forward` is compiled, not the unit: names in `state_dict()` stay, and hooks (those of FSDP too) stay outside.
Must not know: strategies, the loop.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fabricate.errors import ConfigurationError, first_line
from fabricate.strategies.base import Strategy


@contextlib.contextmanager
def compiled(module: torch.nn.Module, asked: str | Mapping[str, Any]) -> Iterator[str]:
    """While entered, the units of `module` run compiled; gives a line for the plan. `asked`: "blocks", or options of
    torch.compile. All ranks, no collectives; the first step on each does the work.

    Raises `ConfigurationError` when there is nothing to compile, or torch knows no such backend.
    """
    options = dict(asked) if isinstance(asked, Mapping) else {}
    units = _blocks(module)
    if not units and asked == "blocks":
        raise ConfigurationError(
            f"compile='blocks': {type(module).__name__} has no transformers model that names its blocks and no ModuleList; use "
            "compile=True, which takes its layers"
        )
    units = units or _layers(module)
    if not units:
        raise ConfigurationError(f"compile={asked!r}: {type(module).__name__} holds no layer with a forward of its own")
    import torch._dynamo  # ours to ask: an optimizer imports it too

    # Units that differ each get a graph, in training and in evaluation; more than that would run uncompiled, silently.
    limit = max(torch._dynamo.config.recompile_limit, 4 * len(units))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True))
        for unit in units:
            stack.callback(_restore, unit, unit.__dict__.get("forward"))
            try:
                unit.forward = Forward(unit, options)
            except RuntimeError as exc:  # an unknown backend, or options that contradict each other
                raise ConfigurationError(f"compile={asked!r}: {first_line(exc)}") from exc
        kinds = dict.fromkeys(type(unit).__name__ for unit in units)
        yield f"compiled by unit: {len(units)} ({', '.join(kinds)}), {options.get('backend', 'inductor')}"


def _restore(unit: torch.nn.Module, before: Any) -> None:
    if before is None:
        unit.__dict__.pop("forward", None)
    else:
        unit.forward = before


def _blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost blocks."""
    found = Strategy.blocks(module)
    names = [name for name, _ in found]
    return [block for name, block in found if not any(name.startswith(f"{other}.") for other in names)]


def _layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost children with parameters that can be called."""
    found: list[torch.nn.Module] = []
    for child in module.children():
        if next(child.parameters(), None) is None:
            continue
        callable_ = getattr(type(child), "forward", None) is not torch.nn.Module.forward
        found += [child] if callable_ and not isinstance(child, torch.nn.ModuleDict) else _layers(child)
    return found


class Forward:
    """Stands in for a unit's `forward`. A copy of the unit gets the plain one, for its own parameters."""

    def __init__(self, unit: torch.nn.Module, options: dict[str, Any]) -> None:
        self._unit = unit
        self._compiled = torch.compile(unit.forward, **options)
        functools.update_wrapper(self, unit.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors((args, kwargs)))
        rows = next((tensor.shape[0] for tensor in tensors if tensor.ndim), 0)
        for tensor in tensors:
            if tensor.ndim and tensor.shape[0] == rows:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # else the last, shorter batch would be compiled anew
        return self._compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._unit), self._unit)
        return type(copied).forward.__get__(copied)

    def __reduce__(self) -> Any:
        return _plain, (self._unit,)


def _plain(unit: torch.nn.Module) -> Any:
    return type(unit).forward.__get__(unit)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
