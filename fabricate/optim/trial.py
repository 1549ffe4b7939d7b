"""The state that an optimizer will keep for its parameters, found before its first step: a copy of it makes a step on the meta device.

Must not know: strategies, checkpoints.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

State = dict[torch.Tensor, dict[str, Any]]


def tried_state(optimizer: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, torch.Tensor]) -> State:
    """The state of each parameter after a first step, with tensors on the meta device. `parameters`: for each parameter of the optimizer, a
    tensor with the shape and the dtype to try. The optimizer is not changed, and its hooks do not run. Raises the errors of its step."""
    tried = copy.copy(optimizer)
    # Attributes of the optimizer, which `copy` leaves out. Containers are copied, as a step may put meta tensors there.
    own = {n: copy.copy(v) if isinstance(v, dict | list | set) else v for n, v in optimizer.__dict__.items()}
    tried.__dict__ = {**own, **tried.__dict__}
    tried.state = defaultdict(dict)
    tried.param_groups = []
    empty = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            empty[parameter] = _like(parameters[parameter])
        fast = {key: False for key in ("fused", "foreach", "capturable") if group.get(key) is not None}
        tried.param_groups.append({**group, **fast, "params": [empty[parameter] for parameter in group["params"]]})
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        type(optimizer).step(tried)
    return {parameter: tried.state.get(stand_in, {}) for parameter, stand_in in empty.items()}


def _like(tensor: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
    parameter.grad = torch.empty_like(parameter) if tensor.requires_grad else None
    return parameter


def rebuilt(like: torch.Tensor, inner: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """A tensor of the subclass of `like`, made of the plain tensors `inner`. Raises `ValueError` if their shapes or dtypes differ from
    those of `like`."""
    names, context = like.__tensor_flatten__()  # type: ignore[attr-defined]
    expected = {name: (tuple(getattr(like, name).shape), getattr(like, name).dtype) for name in names}
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in inner.items()}
    if expected != shapes:
        raise ValueError(
            f"{type(like).__name__} has the inner tensors {expected} in this run, but {shapes} in the checkpoint"
        )
    moved = {name: tensor.to(device) for name, tensor in inner.items()}
    unflattened: torch.Tensor = type(like).__tensor_unflatten__(moved, context, like.size(), like.stride())  # type: ignore[attr-defined]
    return unflattened
