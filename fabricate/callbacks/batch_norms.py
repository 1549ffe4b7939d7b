"""New running statistics for batch norm layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from fabricate.trainer import Trainer


def batch_norms(module: torch.nn.Module) -> list[Any]:
    """The batch norm layers inside `module` that keep running statistics and are in train mode."""
    import torch

    kinds = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)
    return [m for m in module.modules() if isinstance(m, kinds) and m.training and m.running_mean is not None]


@contextlib.contextmanager
def recomputed(layers: Sequence[Any], trainer: Trainer) -> Iterator[None]:
    """A context in which forwards give `layers` new statistics: the mean over all micro-batches on all ranks. A layer that is not called
    keeps its statistics. All ranks."""
    import torch

    before = [(layer.momentum, layer.running_mean.clone(), layer.running_var.clone()) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # None: a cumulative mean
    try:
        yield
    finally:
        for layer, (momentum, _, _) in zip(layers, before, strict=True):
            layer.momentum = momentum
    for layer, (_, mean, variance) in zip(layers, before, strict=True):
        count = layer.num_batches_tracked
        sums = torch.cat([layer.running_mean * count, layer.running_var * count, count[None]])
        sums = sums.to(torch.promote_types(sums.dtype, torch.float32))
        *statistics, batches = trainer.accelerator.reduce(sums, "sum").split([len(mean), len(mean), 1])
        averages = [each / batches for each in statistics] if batches else [mean, variance]
        layer.running_mean.copy_(averages[0])
        layer.running_var.copy_(averages[1])
        layer.num_batches_tracked.copy_(batches[0])
