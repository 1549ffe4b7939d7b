"""DiLoCo: every rank trains its own replica, and the replicas synchronise once in many updates (arXiv 2311.08105).

Updates are local. At a synchronisation, the mean movement of the replicas is the gradient of an outer step with Nesterov momentum. Outside
training (evaluation, checkpoint, export) the module holds one model, the mean of the replicas. Each rank's replica is put back when
training continues, so that an evaluation does not change the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fabricate import DDP, ConfigurationError, Strategy, hookimpl
from fabricate_diloco.outer import Outer
from fabricate_diloco.replicas import Replicas, mean, memory

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fabricate import Trainer, TrainModule


@dataclasses.dataclass(eq=False)
class DiLoCo(Strategy):
    """Replicas that synchronise each `every` updates, by an outer step of SGD with Nesterov momentum.

    every: updates between two synchronisations. outer_lr, outer_momentum: of the outer step; with 1 and 0 it averages the replicas.
    """

    every: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    name: ClassVar[str] = "diloco"
    exposes_gradients: ClassVar[bool] = False  # they differ between ranks
    replicas_drift: ClassVar[bool] = True
    distributed_types: ClassVar[tuple[str, ...]] = DDP.distributed_types  # a process group also on a single rank

    def __post_init__(self) -> None:
        if self.every < 1 or self.outer_lr <= 0 or not 0 <= self.outer_momentum < 1:
            raise ConfigurationError(
                f"diloco: every={self.every!r}, outer_lr={self.outer_lr!r}, outer_momentum={self.outer_momentum!r}: give every of "
                "at least 1, outer_lr above 0, and outer_momentum of at least 0 and below 1"
            )

    def memory_per_rank(self, module: torch.nn.Module, whole: Mapping[str, int], world_size: int) -> dict[str, int]:
        return memory(whole)

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        model = super().prepare(accelerator, root, module)  # placed, without a wrapper that would synchronise
        for tensor in (*module.parameters(), *module.buffers()):
            self.broadcast(tensor)
        self._outer: Outer | None = None
        return model

    def grad_norm(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """Root mean square of the replicas' gradient norms: equal on all ranks, so that all skip an update or none does."""
        return mean(super().grad_norm(parameters).square()).sqrt()

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._replicas = Replicas(trainer, module)
        if trainer.accelerator.scaler is not None:
            raise ConfigurationError("diloco: under fp16, ranks skip different updates; use precision='bf16' or 'fp32'")

    def on_epoch_start(self, module: TrainModule) -> None:
        # Not in on_fit_start: a checkpoint of another strategy may still change the weights.
        self._outer = self._outer or Outer(p for p in module.parameters() if p.requires_grad)

    @hookimpl
    def train_step(self) -> None:
        """Put the replica back, because training continues. Returns None, so that the next listener runs the forward."""
        self._replicas.part()

    def on_step(self, step: int) -> None:
        if step % self.every == 0 and self._outer:
            self._outer.step(self.outer_lr, self.outer_momentum)

    def on_eval_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.optimizers:  # an evaluation without a fit: on_fit_start was not called
            self._replicas = Replicas(trainer, module)
        self._replicas.meet()

    def on_eval_end(self) -> None:
        self._replicas.part()

    @hookimpl(wrapper=True)
    def write_checkpoint(self) -> Generator[None, bool, bool]:
        """Put the mean into the module: every checkpoint, and the export after the last one, holds one model."""
        self._replicas.meet()
        return (yield)

    def on_fit_end(self) -> None:
        self._replicas.meet()

    def on_save(self, state: MutableMapping[str, Any]) -> None:
        state["outer"] = self._outer.state() if self._outer else []
        state["own"] = self._replicas.state()

    def on_load(self, module: TrainModule, state: MutableMapping[str, Any]) -> None:
        self.on_epoch_start(module)
        assert self._outer
        self._outer.load(state["outer"])
        self._replicas.load(state["own"])

    def describe(self) -> dict[str, str]:
        outer = f"outer learning rate {self.outer_lr:g}, Nesterov momentum {self.outer_momentum:g}"
        return {"synchronises": f"every {self.every} updates, {outer}", "gradients": "each rank's own"}
