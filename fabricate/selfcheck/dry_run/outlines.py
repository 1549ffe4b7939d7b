"""A script's models without values: their parameters are on the meta device while the script builds them, and fake afterwards.

Must not know: fits, ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fabricate.selfcheck.dry_run.fakes import Fakes, is_fake


@contextmanager
def without_values() -> Iterator[None]:
    """A context in which a parameter is moved to the meta device when a module registers it. So at most one parameter is in memory, and
    initialisation does nothing. Buffers keep their values."""
    register = torch.nn.Module.register_parameter
    outlines: Any = WeakIdKeyDictionary()

    def register_outline(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.is_meta or isinstance(param, torch.nn.parameter.UninitializedParameter):
            return
        if param not in outlines:
            outlines[param] = torch.nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            outlines[param].__dict__.update(param.__dict__)
        module._parameters[name] = outlines[param]

    torch.nn.Module.register_parameter = register_outline  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def make_fake(module: torch.nn.Module, fakes: Fakes) -> None:
    """Replace the parameters of `module` by fake ones of the same shapes; shared parameters stay shared. The module has no values
    afterwards."""
    parameters: dict[int, torch.nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None or is_fake(parameter):
                continue
            if id(parameter) not in parameters:
                empty = fakes.empty(parameter.shape, parameter.dtype)
                parameters[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
            child._parameters[name] = parameters[id(parameter)]
