"""The replicas of a model, one per rank, and their mean. Must not know: when they are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fabricate import CheckpointError

if TYPE_CHECKING:
    from fabricate import Trainer, TrainModule


class Replicas:
    """This rank's replica of what training changes: weights, buffers and the optimizers' state."""

    def __init__(self, trainer: Trainer, module: TrainModule) -> None:
        self._trainer = trainer
        self._module = module
        self._own: dict[str, torch.Tensor] = {}
        """The replica, while the module holds the mean; empty otherwise."""

    def meet(self) -> None:
        """Put the mean of the replicas into the module and this rank's replica aside, unless that was done already. All ranks."""
        if not self._own:
            for name, tensor in self._tensors():
                self._own[name] = tensor.clone()
                mean(tensor)

    def part(self) -> None:
        """Put the replica back into the module, if it was put aside. No collectives."""
        if self._own:
            for name, tensor in self._tensors():
                tensor.copy_(self._own[name])
            self._own = {}

    def state(self) -> dict[str, torch.Tensor]:
        """All replicas for a checkpoint: sharded tensors with one row per rank. Only while the module holds the mean."""
        if not self._own:
            raise CheckpointError(
                "diloco: the replicas are not synchronised, so no checkpoint can be written now; ask for one with "
                "trainer.request_save()"
            )
        mesh = init_device_mesh(self._trainer.accelerator.device.type, (dist.get_world_size(),))
        return {name: DTensor.from_local(own[None], mesh, [Shard(0)]) for name, own in self._own.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's row of `state` as the replica. On another number of ranks all continue from the mean, which the module holds
        then."""
        self._own = {n: rows[dist.get_rank()] for n, rows in state.items() if len(rows) == dist.get_world_size()}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self._module.named_parameters()}
        tensors: list[tuple[str, object]] = [*self._module.named_parameters(), *self._module.named_buffers()]
        for label, optimizer in self._trainer.optimizers.items():
            for parameter, state in optimizer.state.items():
                tensors += [(f"{label}/{names[parameter]}/{key}", value) for key, value in state.items()]
        device = self._trainer.accelerator.device
        # Sorted by name, so that all ranks average in the same order. Step counters on the CPU are left out: they are
        # equal.
        for name, value in sorted(tensors, key=lambda pair: pair[0]):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == device.type:
                yield name, value.detach()


def mean(tensor: torch.Tensor) -> torch.Tensor:
    """The mean over the ranks, in place. All ranks."""
    dist.all_reduce(tensor)
    return tensor.div_(dist.get_world_size())


def memory(whole: Mapping[str, int]) -> dict[str, int]:
    """Bytes per rank if one process needs `whole`: a replica; in training also the outer optimizer's weights and momentum, and the replica
    that is put aside while the module holds the mean."""
    if "gradients" not in whole:
        return dict(whole)
    aside = whole["parameters"] + whole["optimizer state"]
    return {**whole, "outer weights and momentum": 2 * whole["gradients"], "replica put aside": aside}
