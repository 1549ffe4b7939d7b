"""What a strategy is: how parameters, gradients and optimizer state lie on the ranks. Abstract.

The loop knows the methods below and nothing else of a strategy. A strategy is a plugin object: it may hear hooks and keep
state. Options are the fields of a `@dataclass(eq=False)`, so that "name:option=value" and the constructor are one thing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from fabricate.hooks import Listener

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


class Strategy(Listener):
    """Base of every strategy. Override what differs; the defaults are those of one process."""

    name: ClassVar[str] = ""
    min_world_size: ClassVar[int] = 1
    max_world_size: ClassVar[int | None] = None
    exposes_gradients: ClassVar[bool] = True
    """Whether `parameter.grad` holds this rank's part of the global gradient before the update (`on_before_step` needs it)."""
    lockstep: ClassVar[bool] = False
    """Whether a forward runs collectives, so that every rank must run each one, in evaluation too."""
    shards_parameters: ClassVar[bool] = False
    several_optimizers: ClassVar[bool] = True
    distributed_types: ClassVar[tuple[str, ...]] = ("NO", "MULTI_CPU", "MULTI_GPU")
    """What `accelerator.distributed_type` may be once the Accelerator exists; anything else is an error before step 1."""

    def check(self, world_size: int, device: torch.device) -> Iterable[str]:
        """Reasons why this strategy cannot run here, each with its remedy; empty when it can. Pure, all ranks."""
        if world_size < self.min_world_size:
            yield (
                f"strategy={self.name!r} needs {self.min_world_size} or more processes and {world_size} was started; start them "
                f"with `fabricate run script.py --nproc {self.min_world_size}`, or use strategy='single'"
            )
        if self.max_world_size is not None and world_size > self.max_world_size:
            yield (
                f"strategy={self.name!r} is for {self.max_world_size} process and {world_size} were started; "
                "use strategy='ddp' or 'fsdp', or start one process"
            )

    def accelerator_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `accelerate.Accelerator(...)`, `kwargs_handlers` among them."""
        return {}

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        """Place and wrap `root`, whose forward runs the steps of `module` (its child). All ranks, collectives allowed.

        Returns the callable that the loop runs. Parameters may be replaced in place; names in `module` must stay.
        """
        prepared: torch.nn.Module = accelerator.prepare_model(root, evaluation_mode=True)
        return prepared

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """A context for a micro-batch whose gradients stay local (every one of a window but the last)."""
        return contextlib.nullcontext()

    def after_evaluation(self, model: torch.nn.Module) -> None:
        """Called when an evaluation's forwards are done, before anything reads parameters. All ranks."""

    def route(self) -> int:
        """Under `lockstep`: a number below 2**62 for the layers and gradients of the window just run, the same on every rank
        unless they went different ways; compared at each update boundary. Called before gradients are cleared; no wait."""
        return 0

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of one micro-batch. `loss`: 0-dim, weighted and scaled; gradients are averaged over ranks on the last one."""
        loss.backward()  # type: ignore[no-untyped-call]

    def scale_gradients(self, parameters: Sequence[torch.nn.Parameter], factor: torch.Tensor) -> None:
        """Multiply every gradient by `factor` (0-dim, on the device, the same on every rank), in place; no wait."""
        import torch
        import torch.distributed.tensor as dt

        grads = [
            p.grad.to_local() if isinstance(p.grad, dt.DTensor) else p.grad for p in parameters if p.grad is not None
        ]
        if grads:
            torch._foreach_mul_(grads, factor)

    def grad_norm(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """2-norm of the global gradient over `parameters`: 0-dim device tensor, the same on every rank. All ranks."""
        import torch
        import torch.distributed.tensor as dt

        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, dt.DTensor) else norm

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
        """Scale gradients in place so that their global norm is at most `max_norm`; `norm` comes from `grad_norm`."""
        import torch

        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    def local_part(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What this rank holds of a parameter, or of an optimizer state shaped like one, for checkpoints.

        Returns local memory, and where it starts in the row-major flattened logical tensor. Default: a DTensor sharded in
        dimension 0 gives its shard, anything else is held whole by every rank.
        """
        import torch.distributed.tensor as dt

        if not isinstance(tensor, dt.DTensor):
            return tensor.detach(), 0
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(isinstance(p, dt.Shard) and p.dim != 0 for p in tensor.placements):
            raise ValueError(f"placements {tensor.placements} are no flat range; only dimension 0 may be sharded")
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local: torch.Tensor = tensor.to_local().detach()
        return local, offset[0] * (tensor.numel() // tensor.shape[0]) if local.numel() else 0

    def describe(self) -> dict[str, str]:
        """Lines for the plan, by topic ("unused parameters": "looked for")."""
        return {}
