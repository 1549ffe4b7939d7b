"""The time that a rank waits for FSDP's collectives. Measured on a CPU only, where each call returns when it is done.

Must not know: units, options, what is trained.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


class Communication:
    """The seconds that gathering parameters and averaging gradients took on this rank while `module` trained. Evaluations, which gather
    too, are left out, and so is the averaging between copies of a sharded model (`shard=`)."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.seconds = 0.0
        self.updates = 0

    def watch(self, root: torch.nn.Module) -> None:
        """Time the collectives of every unit inside `root`."""
        for unit in root.modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_all_gather(_AllGather(self))  # type: ignore[arg-type]
                unit.set_custom_reduce_scatter(_ReduceScatter(self))  # type: ignore[arg-type]

    def since(self, began: float) -> None:
        """Add the time of a collective that began at `began` (performance counter) and has just ended."""
        if self._module.training:
            self.seconds += time.perf_counter() - began

    def per_update(self) -> float | None:
        """The seconds per update since the last call; None if there was no update."""
        seconds, updates = self.seconds, self.updates
        self.seconds, self.updates = 0.0, 0
        return seconds / updates if updates else None


class _Timed:
    """A collective for FSDP that works and allocates memory like torch's own."""

    def __init__(self, communication: Communication) -> None:
        self._communication = communication

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Timed):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        began = time.perf_counter()
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        self._communication.since(began)
        return work


class _ReduceScatter(_Timed):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        began = time.perf_counter()
        work = dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._communication.since(began)
        return work
