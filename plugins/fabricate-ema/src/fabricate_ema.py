"""An exponential moving average of the weights, evaluated and exported in their place.

The average lies as the parameters lie (a shard of each under FSDP) and costs no communication. It is swapped into the
module for every evaluation, and from each save until training goes on, because the export follows the last save.
"""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from fabricate import Callback, ConfigurationError

if TYPE_CHECKING:
    import torch

    from fabricate import TrainModule


@dataclasses.dataclass(eq=False)
class EMA(Callback):
    """Average of the trainable parameters: `average = decay * average + (1 - decay) * weights` after each update.

    decay: between 0 and 1. start: updates before the average begins; until then it is the weights themselves.
    """

    decay: float = 0.999
    start: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1 or self.start < 0:
            raise ConfigurationError(
                f"ema: decay={self.decay!r}, start={self.start!r}: decay is at least 0 and below 1, start at least 0"
            )
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._swapped = False

    def on_fit_start(self, module: TrainModule) -> None:
        self._pairs, self._swapped = {}, False
        empty = [name for name, p in module.named_parameters() if p.requires_grad and not p.numel()]
        if empty:
            raise ConfigurationError(
                f"ema: this strategy keeps no weights in {empty[0]} between steps; use strategy='ddp' or 'fsdp', or remove ema"
            )

    def on_epoch_start(self, module: TrainModule) -> None:
        if not self._pairs:  # not before: a checkpoint without an average may have changed the weights
            self._begin(module)

    def _begin(self, module: TrainModule) -> None:
        named = [(name, p.detach()) for name, p in module.named_parameters() if p.requires_grad]
        self._pairs = {name: (weight, weight.clone()) for name, weight in named}

    def on_step(self, step: int) -> None:
        import torch  # here, because looking for plugins imports this file and has to stay quick

        weights, averages = zip(*((_local(w), _local(a)) for w, a in self._pairs.values()), strict=True)
        torch._foreach_lerp_(averages, weights, 1 - self.decay if step > self.start else 1.0)

    def on_eval_start(self) -> None:
        self._swap(True)

    def on_eval_end(self) -> None:
        self._swap(False)

    def on_saved(self) -> None:
        self._swap(True)

    def train_step(self) -> None:
        """Training goes on, with the weights. Returns nothing, so that the forward is left to the next one."""
        self._swap(False)

    def on_save(self, state: MutableMapping[str, Any]) -> None:
        self._swap(False)
        state["average"] = {name: average for name, (_, average) in self._pairs.items()}

    def on_load(self, module: TrainModule, state: MutableMapping[str, Any]) -> None:
        from torch.distributed.tensor import DTensor, distribute_tensor

        self._begin(module)
        for name, (_, average) in self._pairs.items():
            saved = state["average"][name].to(average.device)
            sharded = isinstance(average, DTensor)
            average.copy_(distribute_tensor(saved, average.device_mesh, average.placements) if sharded else saved)
        self._swap(True)

    def on_teardown(self) -> None:
        self._swap(False)

    def _swap(self, wanted: bool) -> None:
        """Exchange weights and average in place, unless they lie as `wanted` already."""
        if self._swapped == wanted or not self._pairs:
            return
        self._swapped = wanted
        for weight, average in self._pairs.values():
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
