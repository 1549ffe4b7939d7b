"""The state that an optimizer will keep for its parameters, found before its first step: a copy of it makes a step on the meta device.

Must not know: strategies, checkpoints.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from fabricate.optim.optimizers import inner_optimizers
from fabricate.seeding import rng_state, set_rng_state

State = dict[torch.Tensor, dict[str, Any]]


def tried_state(optimizer: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, torch.Tensor]) -> State:
    """The state of each parameter after a first step, with tensors on the meta device. `parameters`: for each parameter of the module, a
    tensor with the shape and the dtype to try. Nothing that the optimizer holds is changed, no random number is drawn, and its hooks do not
    run. Raises the errors of its step, and of copying it."""
    empty = {parameter: _like(tensor) for parameter, tensor in parameters.items()}
    tried = _copied(optimizer, empty)
    before = rng_state()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            type(optimizer).step(tried)
    finally:
        set_rng_state(before)
    return {parameter: tried.state.get(stand_in, {}) for parameter, stand_in in empty.items()}


def _copied(optimizer: torch.optim.Optimizer, empty: Mapping[torch.Tensor, torch.Tensor]) -> torch.optim.Optimizer:
    """A copy of `optimizer` and all that it holds, without state and hooks, with the tensors `empty` in place of the parameters."""
    originals = [optimizer, *(each for _, each in inner_optimizers(optimizer, ""))]
    states = [each.state for each in originals]
    memo: dict[int, Any] = {id(parameter): stand_in for parameter, stand_in in empty.items()}
    memo |= {id(state): defaultdict(dict) for state in states}
    memo |= {id(each): object.__new__(type(each)) for each in originals}
    for each in originals:
        copied: torch.optim.Optimizer = memo[id(each)]
        torch.optim.Optimizer.__setstate__(copied, {"defaults": {}})  # without hooks
        # A scheduler sets `step` on the object, where it refers to the original.
        own = {n: v for n, v in vars(each).items() if n != "step" and (n not in vars(copied) or n == "defaults")}
        vars(copied).update(copy.deepcopy(own, memo))
        for group in copied.param_groups:
            group.update({key: False for key in ("fused", "foreach", "capturable") if group.get(key) is not None})
    return memo[id(optimizer)]  # type: ignore[no-any-return]


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
