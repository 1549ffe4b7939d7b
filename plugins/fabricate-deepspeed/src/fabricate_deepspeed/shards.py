"""The place of this rank's part of each parameter in DeepSpeed's flat tensors, and the optimizer state for that part.

DeepSpeed joins the parameters of a group to flat tensors. On each rank, the optimizer has one slice of each flat tensor. Must not know:
strategies, how anything is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fabricate import CheckpointError
from fabricate_deepspeed.swapped import Files


@dataclass(frozen=True)
class Slice:
    """`count` elements of a parameter, from `start` on: they are in `flat` from `offset` on, where `room` elements are reserved. files: the
    files to which DeepSpeed swaps `flat`, if it does."""

    flat: torch.Tensor
    offset: int
    count: int
    start: int
    room: int = 0
    files: Files | None = None

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor that is laid out like `self.flat`."""
        return self.whole(flat).narrow(0, self.offset, self.count)

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """All of a tensor that is laid out like `self.flat`."""
        return flat.detach() if self.files is None else self.files.content(self.flat, flat)

    def zeros(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor for the optimizer's state that is laid out like `self.flat`."""
        if self.files is not None:
            return self.files.add_state(self.flat, key, dtype)
        return torch.zeros_like(self.flat, dtype=dtype, requires_grad=False)

    def is_like(self, value: object) -> bool:
        """Whether `value` is laid out like `self.flat`."""
        return isinstance(value, torch.Tensor) and value.shape == self.flat.shape


def slices(engine: Any) -> Iterator[tuple[torch.nn.Parameter, Slice]]:
    """Every parameter that `engine` trains, with its slice, which is empty if this rank holds nothing of the parameter."""
    zero = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            for parameter in group:
                mapping = parameter._hp_mapping
                if mapping is None:
                    yield parameter, Slice(flat, 0, 0, 0)
                else:
                    inside, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
                    yield parameter, Slice(flat, inside.start, inside.numel, whole.start)
        return
    files = Files(zero) if zero.swap_optimizer else None
    for group in zero.fp16_groups:
        for parameter in group:
            number, offset, room = zero.grad_position[zero.get_param_id(parameter)]
            start, count = own_range(parameter)
            flat = zero.fp32_partitioned_groups_flat[number]
            yield parameter, Slice(flat, offset, count, start, room, files if files and files.has(flat) else None)


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether stage 3 has partitioned this parameter."""
    return hasattr(tensor, "ds_id")


def own_range(parameter: Any) -> tuple[int, int]:
    """The start and the number of elements of this rank's part of a partitioned parameter, without the padding of the last part."""
    size = parameter.ds_tensor.ds_numel
    start = min(size * parameter.ds_zero_partition_rank, parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)


def restore_optimizer_state(
    optimizer: torch.optim.Optimizer, own: Slice, state: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Put `state` into `optimizer`: values, or dtypes for tensors laid out like the parameter. Returns the memory of these tensors."""
    kept = optimizer.state[own.flat]
    rooms = {}
    for key, value in state.items():
        if isinstance(value, torch.dtype):
            if key not in kept:
                kept[key] = own.zeros(key, value)
            rooms[key] = own.of(kept[key])
        elif key in kept and not _equal(kept[key], value):
            raise CheckpointError(
                f"the checkpoint's optimizer keeps {key}={value} for one parameter and {kept[key]} for another of the same group, "
                "but ZeRO keeps one value per group: put these parameters into separate groups, or use strategy='ddp' or 'fsdp'"
            )
        else:
            kept[key] = value
    return rooms


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
