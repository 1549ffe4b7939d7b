"""Memory for parameters that were built on the meta device, where their values come later."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def give_memory(root: torch.nn.Module, device: torch.device) -> Iterator[list[torch.nn.Parameter]]:
    """Replace the parameters on the meta device, submodule by submodule, tied ones by one; yields each submodule's new ones
    before the next get theirs, so that they can be cut into parts meanwhile."""
    placed: dict[int, torch.nn.Parameter] = {}
    for child in root.modules():
        made = []
        for key, parameter in child._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in placed:
                    whole = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
                    placed[id(parameter)] = torch.nn.Parameter(whole, parameter.requires_grad)
                    made.append(placed[id(parameter)])
                child._parameters[key] = placed[id(parameter)]
        if made:
            yield made
