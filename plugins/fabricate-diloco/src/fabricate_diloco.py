"""DiLoCo: every rank trains a replica of its own, and all of them meet once in many updates (arXiv 2311.08105).

Inner updates are local. Every so often the mean of what the ranks moved by is an outer gradient for Nesterov momentum.
Outside training (evaluation, checkpoint, export) the module holds one model, the mean of the replicas; each rank's own
replica is put back when training goes on, so that looking at the model does not change the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fabricate import CheckpointError, ConfigurationError, Strategy, hookimpl

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fabricate import Trainer, TrainModule


@dataclasses.dataclass(eq=False)
class DiLoCo(Strategy):
    """Replicas that synchronise each `every` updates, by an outer step of SGD with Nesterov momentum.

    every: updates between two meetings. outer_lr, outer_momentum: of the outer step; 1.0 and 0.0 average the replicas.
    """

    every: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    name: ClassVar[str] = "diloco"
    min_world_size: ClassVar[int] = 2
    exposes_gradients: ClassVar[bool] = False  # those of a rank are its own
    distributed_types: ClassVar[tuple[str, ...]] = ("MULTI_CPU", "MULTI_GPU")

    def __post_init__(self) -> None:
        if self.every < 1 or self.outer_lr <= 0 or not 0 <= self.outer_momentum < 1:
            raise ConfigurationError(
                f"diloco: every={self.every!r}, outer_lr={self.outer_lr!r}, outer_momentum={self.outer_momentum!r}: every is at "
                "least 1, outer_lr above 0, outer_momentum at least 0 and below 1"
            )

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        self._outer: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._own: dict[str, torch.Tensor] = {}
        model = super().prepare(accelerator, root, module)  # placed, and nothing around it that would synchronise
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        return model

    def grad_norm(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """Root mean square of the replicas' gradient norms: the same everywhere, so that all skip an update or none does."""
        return _mean(super().grad_norm(parameters).square()).sqrt()

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._module = module
        if trainer.accelerator.scaler is not None:
            raise ConfigurationError(
                "strategy='diloco' with precision='fp16': each rank would skip updates of its own; use precision='bf16' or 'fp32'"
            )

    def on_epoch_start(self) -> None:
        if not self._outer:  # not before: a checkpoint of another strategy may have changed the weights
            self._begin()

    def _begin(self) -> None:
        weights = [p.detach() for p in self._module.parameters() if p.requires_grad]
        self._outer = [(w, w.clone(), torch.zeros_like(w)) for w in weights]

    def train_step(self, trainer: Trainer, module: TrainModule) -> None:
        """Training goes on. Returns nothing, so that the forward is left to the next one."""
        self._part(trainer, module)

    def on_step(self, step: int) -> None:
        if step % self.every == 0:
            for weight, outer, momentum in self._outer:
                moved = _mean(outer - weight)
                momentum.mul_(self.outer_momentum).add_(moved)
                outer.sub_(moved.add_(momentum, alpha=self.outer_momentum), alpha=self.outer_lr)
                weight.copy_(outer)

    def _meet(self, trainer: Trainer, module: TrainModule) -> None:
        """Put the mean of the replicas into the module and this rank's aside. All ranks."""
        if not self._own:
            for name, tensor in _replica(trainer, module):
                self._own[name] = tensor.clone()
                tensor.copy_(_mean(tensor.clone()))

    def _part(self, trainer: Trainer, module: TrainModule) -> None:
        if self._own:
            for name, tensor in _replica(trainer, module):
                tensor.copy_(self._own.pop(name))

    def on_eval_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._meet(trainer, module)

    def on_eval_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._part(trainer, module)

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._meet(trainer, module)

    @hookimpl(wrapper=True)
    def write_checkpoint(self, trainer: Trainer) -> Generator[None, bool, bool]:
        """One model in every checkpoint, and in the export that follows the last one."""
        self._meet(trainer, self._module)
        return (yield)

    def on_save(self, trainer: Trainer, state: MutableMapping[str, Any]) -> None:
        if not self._own:
            raise CheckpointError("diloco: the replicas have not met; ask for a checkpoint with trainer.request_save()")
        mesh = init_device_mesh(trainer.accelerator.device.type, (dist.get_world_size(),))
        state["outer"] = [outer for _, outer, _ in self._outer]
        state["momentum"] = [momentum for _, _, momentum in self._outer]
        state["own"] = {name: DTensor.from_local(own[None], mesh, [Shard(0)]) for name, own in self._own.items()}

    def on_load(self, state: MutableMapping[str, Any]) -> None:
        self._begin()
        for (_, outer, momentum), saved, moving in zip(self._outer, state["outer"], state["momentum"], strict=True):
            outer.copy_(saved)
            momentum.copy_(moving)
        # On another number of ranks all go on from the mean, which is what the module holds.
        self._own = {n: own[dist.get_rank()] for n, own in state["own"].items() if len(own) == dist.get_world_size()}

    def describe(self) -> dict[str, str]:
        outer = f"learning rate {self.outer_lr:g}, Nesterov momentum {self.outer_momentum:g}"
        return {"weights meet": f"every {self.every} updates, {outer}", "gradients": "each rank's own, not averaged"}


def _replica(trainer: Trainer, module: TrainModule) -> Iterator[tuple[str, torch.Tensor]]:
    """What differs between the ranks, by name: weights, buffers and the optimizers' state."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = [*module.named_parameters(), *module.named_buffers()]
    for label, optimizer in trainer.optimizers.items():
        for parameter, state in optimizer.state.items():
            found += [
                (f"{label}/{names[parameter]}/{key}", value)
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and value.device == parameter.device
            ]
    yield from ((name, tensor.detach()) for name, tensor in found if tensor.is_floating_point())


def _mean(tensor: torch.Tensor) -> torch.Tensor:
    """The mean over the ranks, in place. All ranks."""
    dist.all_reduce(tensor)
    return tensor.div_(dist.get_world_size())


@hookimpl
def register_strategies(register: Callable[..., None]) -> None:
    register("diloco", DiLoCo, summary="replicas that synchronise once in many updates")
