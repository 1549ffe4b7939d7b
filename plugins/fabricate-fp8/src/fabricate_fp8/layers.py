"""The layers of a module that compute in float8: the choice of these layers, and their replacement by plain ones. Must not know: the
backend."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch


def choose(module: torch.nn.Module, skip: str) -> tuple[dict[str, torch.nn.Module], int]:
    """The linear layers, by name, whose two sizes are multiples of 16 and in whose names the expression `skip` is not found; and the number
    of layers of subclasses of Linear, which are left alone."""
    every = {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
    # A subclass may compute something else, or nothing: attention reads the weight of its output layer without calling it.
    linear = {name: layer for name, layer in every.items() if type(layer) is torch.nn.Linear}
    fitting = [name for name, layer in linear.items() if not (layer.in_features % 16 or layer.out_features % 16)]
    chosen: dict[str, torch.nn.Module] = {
        name: linear[name] for name in fitting if not (skip and re.search(skip, name))
    }
    return chosen, len(every) - len(linear)


def put_back(module: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> None:
    """Replace the float8 layers by the plain `layers`, with the trained weights and biases."""
    for name, plain in layers.items():
        trained = module.get_submodule(name)
        plain.weight, plain.bias = trained.weight, trained.bias
        module.set_submodule(name, plain)
