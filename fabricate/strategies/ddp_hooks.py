"""What travels between replicas instead of float32 gradients: halves, or thin matrices (PowerSGD, arXiv 1905.13727).

Must not know: which option chose it, the loop. (Annotations stay objects here, because DDP checks those of a hook.)
"""

import zlib
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fabricate.errors import ConfigurationError
from fabricate.strategies.ddp import DDP

Future = torch.futures.Future[torch.Tensor]


def rounded(dtype: torch.dtype) -> Callable[..., Any]:
    """A hook that averages gradients in `dtype`. torch has the same for GPUs only."""

    def hook(state: object, bucket: GradBucket) -> Future:
        whole = bucket.buffer()
        half = whole.to(dtype).div_(dist.get_world_size())
        sent: Any = dist.all_reduce(half, async_op=True)
        return sent.get_future().then(lambda arrived: whole.copy_(arrived.value()[0]))  # type: ignore[no-any-return]

    return hook


class PowerSGD(DDP):
    """DDP with communication_hook="powersgd". A gradient of n rows and m columns travels as n + m numbers per rank of the
    approximation; what it leaves out is added to the next one. torch's own hook waits inside callbacks, which hangs on gloo,
    and remembers by bucket; this one remembers by parameter, so that a checkpoint fits any arrangement of buckets."""

    def settle(self, settled: Any) -> None:
        if settled.precision.mixed_precision == "fp16" or settled.nonfinite == "skip":
            raise ConfigurationError(
                "ddp: communication_hook='powersgd' with precision='fp16' or nonfinite='skip': a gradient that is not finite "
                "would stay in what it remembers; use precision='bf16' and nonfinite='stop', or communication_hook='bf16'"
            )

    def communicate(self, model: Any, module: torch.nn.Module) -> None:
        """Begin anew on `model`, a DistributedDataParallel. All ranks."""
        self._updates = 0
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._columns: dict[str, torch.Tensor] = {}
        self._left_out: dict[str, torch.Tensor] = {}
        model.register_comm_hook(self, PowerSGD.average)

    def average(self, bucket: GradBucket) -> Future:
        """DDP's hook, once per bucket when a window ends: gives the bucket back with its gradients averaged."""
        world_size = dist.get_world_size()
        matrices: dict[str, torch.Tensor] = {}
        rest: list[torch.Tensor] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            matrix = gradient.view(len(gradient), -1) if gradient.ndim > 1 else None
            if matrix is not None and self._updates >= self.powersgd_start and self._pays(matrix):
                matrices[self._names[id(parameter)]] = matrix
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

    def _pays(self, matrix: torch.Tensor) -> bool:
        """Whether thin matrices are less than half of the whole."""
        rows, columns = matrix.shape
        return 2 * self.powersgd_rank * (rows + columns) < rows * columns

    def _approximate(self, matrices: dict[str, torch.Tensor], world_size: int) -> None:
        """One step of power iteration per matrix, from the columns of the last one: two sums over ranks in all."""
        bases = {}
        for name, matrix in matrices.items():
            if name not in self._left_out:
                self._left_out[name] = torch.zeros_like(matrix)
                self._columns.setdefault(name, self._first_columns(name, matrix))
            matrix += self._left_out[name]
            bases[name] = matrix @ self._columns[name]
        _sum(list(bases.values()))
        for name, matrix in matrices.items():
            bases[name] = torch.linalg.qr(bases[name]).Q
            self._columns[name] = matrix.T @ bases[name]
        _sum([self._columns[name] for name in matrices])
        for name, matrix in matrices.items():
            columns = self._columns[name].div_(world_size)
            approximate = bases[name] @ columns.T
            self._left_out[name] = matrix - approximate
            matrix.copy_(approximate)

    def _first_columns(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Random, the same on every rank."""
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(matrix.shape[1], self.powersgd_rank, generator=generator).to(matrix)

    def on_save(self, state: MutableMapping[str, Any]) -> None:
        """The columns, the same on every rank, and what each rank left out, a row of its own."""
        state["updates"], state["columns"] = self._updates, dict(self._columns)
        state["left_out"] = {}
        for name, own in self._left_out.items():
            mesh = init_device_mesh(own.device.type, (dist.get_world_size(),))
            state["left_out"][name] = DTensor.from_local(own[None], mesh, [Shard(0)])

    def on_load(self, module: torch.nn.Module, state: MutableMapping[str, Any]) -> None:
        """Go on from there, on any number of ranks."""
        self._updates = state["updates"]
        devices = {name: parameter.device for name, parameter in module.named_parameters()}
        self._columns = {name: columns.to(devices[name]) for name, columns in state["columns"].items()}
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._left_out = {
            name: share(rows, rank, world_size).to(devices[name]) for name, rows in state["left_out"].items()
        }


def share(rows: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """What `rank` goes on with of what ranks left out, one row each: its own; on another number of ranks the mean, which
    leaves the average over ranks, and so the gradient, what it was."""
    return rows[rank] if len(rows) == world_size else rows.mean(0)


def _sum(tensors: Sequence[torch.Tensor]) -> None:
    """Sum each tensor over all ranks, in place, in one message."""
    if tensors:
        together = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(together)
        for tensor, summed in zip(tensors, torch.split(together, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))
