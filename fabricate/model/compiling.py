"""torch.compile, unit by unit and in place, undone afterwards: which units are compiled, and when the number of rows is a dynamic size.

The `forward` of a unit is compiled, not the unit: names in `state_dict()` do not change, and hooks (FSDP's too) are not compiled. Must not
know: strategies, the loop.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fabricate.errors import ConfigurationError, first_line
from fabricate.strategies.base import Strategy


@dataclass(frozen=True)
class Compilation:
    """The units to compile, or options of torch.compile, and the batches that the code must handle."""

    asked: str | Mapping[str, Any]
    """"blocks", or options of torch.compile."""
    rows_differ: bool = False
    """Whether training batches are known to differ in their number of rows: the last one of an epoch can be shorter. If so, this number is
    a dynamic size from the first batch on: then the code that runs for a batch does not depend on the batches before it, also after a
    resume. Code for a fixed size is faster."""
    rows_differ_in_evaluation: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of torch.compile; empty for "blocks"."""
        return dict(self.asked) if isinstance(self.asked, Mapping) else {}


@contextlib.contextmanager
def compiled(module: torch.nn.Module, compilation: Compilation) -> Iterator[str]:
    """A context in which the units of `module` run compiled; its value is a line for the plan. All ranks, no collectives. Each rank
    compiles in its first step.

    Raises `ConfigurationError` if there is nothing to compile, or torch does not accept the backend or the options.
    """
    asked, options = compilation.asked, compilation.options
    units = _blocks(module)
    if not units and asked == "blocks":
        raise ConfigurationError(
            f"compile='blocks': {type(module).__name__} has no transformers model that names its blocks and no "
            "ModuleList; use compile=True, which compiles layer by layer"
        )
    units = units or _layers(module)
    if not units:
        raise ConfigurationError(
            f"compile={asked!r}: {type(module).__name__} holds no layer with a forward of its own, so there is nothing to compile; "
            "leave compile out"
        )
    import torch._dynamo  # no cost: torch's optimizers import it too

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(**_limits(len(units))))
        for unit in units:
            stack.callback(_restore, unit, unit.__dict__.get("forward"))
            try:
                unit.forward = Forward(unit, compilation)
            except RuntimeError as exc:  # an unknown backend, or options that contradict each other
                raise ConfigurationError(f"compile={asked!r}: {first_line(exc)}") from exc
        kinds = dict.fromkeys(type(unit).__name__ for unit in units)
        sizes = "; rows are a dynamic size, because the last batch is shorter" if compilation.rows_differ else ""
        yield f"compiled by unit: {len(units)} ({', '.join(kinds)}), {options.get('backend', 'inductor')}{sizes}"


_graphs_before = 0
"""The largest number of graphs of one `forward` that the fits and evaluations of this process were allowed so far."""


def _limits(units: int) -> dict[str, Any]:
    """The settings of torch for a module of so many units. Each unit needs several graphs: for training and evaluation, with and without a
    mask, for one row and for more. Beyond the limit, torch would silently run the unit uncompiled. Torch counts graphs of earlier fits
    too, so the limits add up."""
    import torch._dynamo

    global _graphs_before
    before, _graphs_before = _graphs_before, _graphs_before + 8 * max(2, units)
    return {
        "recompile_limit": _graphs_before,
        "accumulated_recompile_limit": torch._dynamo.config.accumulated_recompile_limit + before,
        "fail_on_recompile_limit_hit": True,
    }


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module` was compiled, by `Trainer(compile=)`, which sets a `forward` on the object, or by the user."""
    by_torch = getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
    # Accelerate's hook sets a forward too.
    return by_torch or ("forward" in vars(module) and not hasattr(module, "_hf_hook"))


def _restore(unit: torch.nn.Module, before: Any) -> None:
    if before is None:
        unit.__dict__.pop("forward", None)
    else:
        unit.forward = before


def _blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost repeated blocks of the model."""
    blocks = Strategy.blocks(module)
    names = [name for name, _ in blocks]
    return [block for name, block in blocks if not any(name.startswith(f"{other}.") for other in names)]


def _layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost children with parameters that can be called, without modules of torch.jit."""
    layers: list[torch.nn.Module] = []
    for child in module.children():
        if next(child.parameters(), None) is None or isinstance(child, torch.jit.ScriptModule):
            continue
        callable_ = getattr(type(child), "forward", None) is not torch.nn.Module.forward
        layers += [child] if callable_ and not isinstance(child, torch.nn.ModuleDict) else _layers(child)
    return layers


class Forward:
    """A replacement for a unit's `forward`. A copied or pickled unit gets its plain `forward` back."""

    def __init__(self, unit: torch.nn.Module, compilation: Compilation) -> None:
        self._unit = unit
        self._compiled = torch.compile(unit.forward, **compilation.options)
        decided = "dynamic" in compilation.options  # the user's setting, for every size
        self._dynamic_rows = {
            True: compilation.rows_differ and not decided,
            False: compilation.rows_differ_in_evaluation and not decided,
        }
        functools.update_wrapper(self, unit.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._dynamic_rows[self._unit.training]:
            tensors = list(_tensors((args, kwargs)))
            rows = next((tensor.shape[0] for tensor in tensors if tensor.ndim), 0)
            for tensor in tensors:
                if tensor.ndim and tensor.shape[0] == rows:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
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
