"""PowerSGD (arXiv 1905.13727) for fabricate: replicas that exchange thin matrices instead of whole gradients.

torch's own `powerSGD_hook` waits inside callbacks, which hangs on gloo where there are several buckets, and stores its state by bucket,
which does not fit the buckets of the first update after a resume. This strategy stores it by parameter. (No `from __future__ import
annotations` here: DistributedDataParallel checks the annotations of a hook.)
"""

import dataclasses
import zlib
from collections.abc import MutableMapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fabricate import DDP, ConfigurationError, Strategy

Future = torch.futures.Future[torch.Tensor]


@dataclasses.dataclass(eq=False)
class PowerSGD(DDP):
    """Replicas as under `ddp`. A gradient of n rows and m columns is sent as `rank` x (n + m) numbers; the approximation error is added to
    the gradient of the next update.

    rank: of the approximation. start: the first updates, which exchange whole gradients. The other options are those of `ddp`.
    """

    rank: int = 1
    start: int = 1000
    name: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1 or self.start < 0:
            raise ConfigurationError(
                f"powersgd: rank={self.rank!r}, start={self.start!r}: give rank of at least 1 and start of at least 0"
            )
        if self.communication_hook is not None:
            raise ConfigurationError(
                f"powersgd: communication_hook={self.communication_hook!r} cannot be combined with PowerSGD, which is a "
                "communication hook itself; leave communication_hook out, or use strategy='ddp'"
            )

    def settle(self, settled: Strategy.Settled) -> None:
        super().settle(settled)
        if settled.precision.mixed_precision == "fp16" or settled.nonfinite == "skip":
            raise ConfigurationError(
                "powersgd: with precision='fp16' or nonfinite='skip' a gradient that is not finite would stay in the error "
                "feedback and be added to the next gradient; use precision='bf16' and nonfinite='stop', or "
                "strategy='ddp:communication_hook=bf16'"
            )

    def memory_per_rank(self, module: torch.nn.Module, whole: Any, world_size: int) -> dict[str, int]:
        return {**super().memory_per_rank(module, whole, world_size), "powersgd errors": whole.get("gradients", 0)}

    def describe(self) -> dict[str, str]:
        sent = f"sent as products of two thin matrices of rank {self.rank}, after {self.start} updates"
        return {**super().describe(), "gradients": f"averaged in buckets of {self.bucket_cap_mb} MiB, {sent}"}

    def prepare(self, accelerator: Any, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        if sparse := [name for name, child in module.named_modules() if isinstance(child, kinds) and child.sparse]:
            raise ConfigurationError(
                f"powersgd: it cannot exchange sparse gradients, those of {', '.join(sparse)}; set sparse=False in these layers, or use "
                "strategy='ddp'"
            )
        self._updates = 0
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._columns: dict[str, torch.Tensor] = {}
        self._left_out: dict[str, torch.Tensor] = {}
        """The errors, in the unit of the gradients of the optimizer's update."""
        self._scaled: set[str] = set()
        """The parameters whose gradients are scaled after backward, because the weight of an update (its number of labels, for example) is
        known only then. They are approximated after that, so that the error of the update before has the same unit."""
        self._waiting: list[torch.Tensor] = []
        """The parameters whose gradients still have to be approximated in this update."""
        return self._averaging(super().prepare(accelerator, root, module))

    def trained_changed(self, model: torch.nn.Module) -> torch.nn.Module:
        return self._averaging(super().trained_changed(model))

    def _averaging(self, model: Any) -> torch.nn.Module:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):  # not wrapped if nothing is trained
            model.register_comm_hook(self, PowerSGD.average)
        return model  # type: ignore[no-any-return]

    def average(self, bucket: GradBucket) -> Future:
        """The bucket with its gradients averaged over ranks. DDP calls it once per bucket when an accumulation window ends."""
        world_size = dist.get_world_size()
        matrices: dict[str, torch.Tensor] = {}
        rest: list[torch.Tensor] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            matrix = gradient.view(len(gradient), -1) if gradient.ndim > 1 else None
            if matrix is not None and self._updates >= self.start and self._pays(matrix):
                if (name := self._names[id(parameter)]) in self._scaled:
                    self._waiting.append(parameter)
                else:
                    matrices[name] = matrix
            else:
                rest.append(gradient)
        _sum(rest)
        for gradient in rest:
            gradient.div_(world_size)
        self._approximate(matrices, world_size)
        self._updates += bucket.is_last()
        done = Future()
        done.set_result(bucket.buffer())
        return done

    def scale_gradients(self, parameters: Sequence[torch.nn.Parameter], factor: torch.Tensor) -> None:
        super().scale_gradients(parameters, factor)
        for name in (self._names[id(parameter)] for parameter in parameters):
            if name in self._left_out and name not in self._scaled:
                self._left_out[name].mul_(factor)
            self._scaled.add(name)
        self._approximate_waiting()

    def grad_norm(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        self._approximate_waiting()
        return super().grad_norm(parameters)

    def clip_by_value(self, parameters: Sequence[torch.nn.Parameter], max_value: float) -> None:
        self._approximate_waiting()
        super().clip_by_value(parameters, max_value)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        self._approximate_waiting()
        return super().step(optimizer)

    def _approximate_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            gradients = {self._names[id(parameter)]: parameter.grad for parameter in waiting}
            matrices = {name: each.view(len(each), -1) for name, each in gradients.items() if each is not None}
            self._approximate(matrices, dist.get_world_size())

    def _pays(self, matrix: torch.Tensor) -> bool:
        """Whether the two thin matrices have less than half as many elements as the whole."""
        rows, columns = matrix.shape
        return 2 * self.rank * (rows + columns) < rows * columns

    def _approximate(self, matrices: dict[str, torch.Tensor], world_size: int) -> None:
        """Replace each matrix by its approximation: one step of power iteration from the columns of the previous update. Two sums over
        ranks in all."""
        # The sums are in separate memory: the rounding of a product depends on where in its bucket a matrix begins,
        # and DDP rebuilds the buckets after its first update.
        wholes, bases = {}, {}
        for name, matrix in matrices.items():
            if name not in self._left_out:
                self._left_out[name] = torch.zeros_like(matrix)
                self._columns.setdefault(name, self._first_columns(name, matrix))
            wholes[name] = matrix + self._left_out[name]
            bases[name] = wholes[name] @ self._columns[name]
        _sum(list(bases.values()))
        for name, whole in wholes.items():
            bases[name] = torch.linalg.qr(bases[name]).Q
            self._columns[name] = whole.T @ bases[name]
        _sum([self._columns[name] for name in wholes])
        for name, whole in wholes.items():
            columns = self._columns[name].div_(world_size)
            approximate = bases[name] @ columns.T
            self._left_out[name] = whole - approximate
            matrices[name].copy_(approximate)

    def _first_columns(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Random columns, the same on every rank."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix)

    def on_save(self, state: MutableMapping[str, Any]) -> None:
        """Store the columns, which are the same on every rank, and the errors, one row per rank."""
        state["updates"], state["columns"] = self._updates, dict(self._columns)
        state["left_out"], state["scaled"] = {}, sorted(self._scaled)
        for name, own in self._left_out.items():
            mesh = init_device_mesh(own.device.type, (dist.get_world_size(),))
            state["left_out"][name] = DTensor.from_local(own[None], mesh, [Shard(0)])

    def on_load(self, module: torch.nn.Module, state: MutableMapping[str, Any]) -> None:
        """Restore the columns and the errors, on any number of ranks."""
        self._updates, self._scaled = state["updates"], set(state.get("scaled", ()))
        devices = {name: parameter.device for name, parameter in module.named_parameters()}
        self._columns = {name: columns.to(devices[name], copy=True) for name, columns in state["columns"].items()}
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._left_out = {
            name: share(rows, rank, world_size).to(devices[name]) for name, rows in state["left_out"].items()
        }


def share(rows: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The error with which `rank` continues. `rows` has one error per rank of the previous fit; on another number of ranks each takes the
    mean, so that the average over ranks, and so the gradient, stays the same."""
    return rows[rank] if len(rows) == world_size else rows.mean(0)


def _sum(tensors: Sequence[torch.Tensor]) -> None:
    """Sum each tensor over all ranks, in place, in one message."""
    if tensors:
        together = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(together)
        for tensor, summed in zip(tensors, torch.split(together, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))
