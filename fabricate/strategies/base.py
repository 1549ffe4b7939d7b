"""The interface of strategies: how parameters, gradients and optimizer state are placed on the ranks. Abstract.

The loop calls the methods below and uses nothing else of a strategy. A strategy is a plugin object: it may implement hooks and keep
state. Options are the fields of a `@dataclass(eq=False)`, so that "name:option=value" and the constructor take the same options.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from fabricate.hooks import Listener
from fabricate.strategies import sharding as parts
from fabricate.strategies.quantised import quantised_weights
from fabricate.strategies.sharding import is_sharded, is_wrapper

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from fabricate.precisions.base import Precision


GROUPS = ("MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU")
"""Accelerate's names for the ranks of a process group, one for each type of device."""
CAST_COPIES = "half-precision copies"
"""The kind of memory that autocast takes: copies of weights in the dtype in which they are multiplied, kept for backward."""


class Strategy(Listener):
    """Base class of all strategies. Override the methods that differ; the defaults implement training in one process."""

    @dataclass(frozen=True)
    class Settled:
        """The settings that are resolved before the model is built. None: not set, or not known."""

        world_size: int
        local_world_size: int
        """The number of ranks on the host of this rank."""
        device: torch.device
        precision: Precision
        micro_batch_size: int | None
        gradient_accumulation_steps: int
        max_grad_norm: float | None
        nonfinite: str
        compiles: bool = False
        """Whether `Trainer(compile=...)` is set."""

        @property
        def scales_loss(self) -> bool:
            """Whether the precision needs a loss scale."""
            return self.precision.loss_scaler(self.device) is not None

    Part: TypeAlias = parts.Part

    name: ClassVar[str] = ""
    """The name in settings, the plan and messages. Required."""
    min_world_size: ClassVar[int] = 1
    """The smallest number of processes that it supports."""
    max_world_size: ClassVar[int | None] = None
    """The largest number of processes that it supports; None: no limit."""
    exposes_gradients: ClassVar[bool] = True
    """Whether `parameter.grad` holds this rank's part of the global gradient before the update (`on_before_step` needs it)."""
    lockstep: ClassVar[bool] = False
    """Whether a forward runs collectives. If so, every rank must run every forward, also in evaluation."""
    compiles: ClassVar[bool] = True
    """Whether `Trainer(compile=...)` is supported. That requires that no code of the strategy runs inside the forward of a block."""
    shards_parameters: ClassVar[bool] = False
    """Whether a rank holds only a part of each parameter, so that an export has to gather the whole. `prepare` then gets the
    module while it is still on the meta device, so that no rank ever holds all of it."""
    replicas_drift: ClassVar[bool] = False
    """Whether replicas of the same weights may have different values between updates, and are synchronised only now and then."""
    divides: ClassVar[tuple[str, ...]] = ()
    """The kinds of memory that are divided over the ranks: "parameters", "gradients", "optimizer state", "master weights"."""
    quantised: ClassVar[tuple[str, ...]] = ()
    """The kinds of quantised weights (`fabricate.strategies.quantised`) that a module may have in addition to the trained parameters.
    Every rank has loaded these weights itself, with their scales."""
    takes_offloaded: ClassVar[bool] = False
    """Whether a module may have weights that lie in host memory or on disk until their layer runs, as a `device_map` places them."""
    several_optimizers: ClassVar[bool] = True
    """Whether a module may train with more than one optimizer."""
    scales_loss: ClassVar[bool] = False
    """Whether the strategy's engine scales the loss if the precision needs it, and skips updates on overflow."""
    skips_nonfinite: ClassVar[bool] = False
    """Whether `step` skips an update whose gradient is not finite."""
    clips: ClassVar[str] = "fabricate"
    """The library that clips gradients, as shown in the plan."""
    distributed_types: ClassVar[tuple[str, ...]] = ("NO", *GROUPS)
    """The allowed values of `accelerator.distributed_type`, which is checked when the Accelerator exists; another value is an error
    before step 1. If "NO" is missing, a single process opens a process group too. For "FSDP" and "DEEPSPEED",
    `accelerator_arguments` has to return the plugin."""

    def check(self, world_size: int, device: torch.device) -> Iterable[str]:
        """Reasons why this strategy cannot run here, each with its remedy; empty when it can. Pure, all ranks."""
        if world_size < self.min_world_size:
            yield (
                f"strategy={self.name!r} needs {self.min_world_size} or more processes, but {world_size} was started; start them "
                f"with `fabricate run script.py --nproc {self.min_world_size}`, or use strategy='single'"
            )
        if self.max_world_size is not None and world_size > self.max_world_size:
            yield (
                f"strategy={self.name!r} is for {self.max_world_size} process, but {world_size} were started; use strategy='ddp' "
                "or 'fsdp', or start one process"
            )

    def in_group(self, world_size: int) -> bool:
        """Whether these ranks have a process group. A single rank has one only if "NO" is not in `distributed_types`. Pure."""
        return world_size > 1 or "NO" not in self.distributed_types

    def ranks_per_row(self, world_size: int) -> int:
        """How many successive ranks read the same rows because they share the computation of one rank, as in tensor parallelism.
        A divisor of `world_size`. Rows and metrics of these ranks count once, and they use the same random numbers for dropout.
        Pure, the same on every rank."""
        return 1

    def asks(self) -> Mapping[str, tuple[Any, str]]:
        """The settings of the Trainer that the strategy's own configuration file contains: by name, the value and its place in the
        file. Names: precision, gradient_accumulation_steps, max_grad_norm, global_batch_size, batch_size (per rank).
        A setting that the Trainer leaves unset is adopted; if both set it to different values, that is an error. Pure."""
        return {}

    def settle(self, settled: Strategy.Settled) -> None:
        """Called once before the model is built, with the resolved settings. Raises `ConfigurationError` if they cannot work. Pure."""

    def accelerator_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `accelerate.Accelerator(...)`: `kwargs_handlers`, and the `fsdp_plugin` or `deepspeed_plugin` that
        describes the strategy. `accelerator.state` then reports FSDP or DEEPSPEED, on a CPU as well."""
        return {}

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        """Move `root` to the device and wrap it. The forward of `root` runs the steps of `module`, its child. All ranks,
        collectives allowed.

        Returns the callable that the loop runs. Parameters may be replaced in place; names in `module` must stay.
        Under `shards_parameters`, some or all parameters and buffers of `module` may be on the meta device. Allocate memory for
        these; for parameters only this rank's part. Their contents are overwritten afterwards through `local_part`, then
        `after_load` is called. The other tensors hold each rank's own values; broadcast those of rank 0.
        """
        prepared: torch.nn.Module = accelerator.prepare_model(root, evaluation_mode=True)
        return prepared

    def prepare_optimizers(
        self, model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> torch.nn.Module:
        """Prepare the optimizers of a fit. Called once, after `prepare`. Returns the callable that the loop runs. All ranks.

        The user's optimizer objects stay in use: schedulers change the options of their groups, and the plan shows these options.
        """
        return model

    def trained_changed(self, model: torch.nn.Module) -> torch.nn.Module:
        """Called when parameters are frozen or unfrozen during a fit, between two updates, when gradients are cleared. Only
        parameters that were trainable when the fit began can change. `model` is the callable that the loop runs; returns the one
        that it runs from now on. Called only if `exposes_gradients`. All ranks, collectives allowed."""
        return model

    def reuse(self, accelerator: Accelerator, model: torch.nn.Module, root: torch.nn.Module) -> torch.nn.Module:
        """Called instead of `prepare` if an earlier run sharded `root` and `release` left it sharded. `model` is the callable that
        the earlier run used."""
        return model

    def release(self, module: torch.nn.Module, clean: bool) -> bool:
        """Undo what `prepare` did, at the end of a run. Returns whether every rank holds whole parameters again.
        All ranks; collectives only if `clean`, because after a failure some ranks may not call this method."""
        return not self.shards_parameters

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """A context around every micro-batch of a window except the last; gradients are not averaged over ranks inside it."""
        return contextlib.nullcontext()

    def after_evaluation(self, model: torch.nn.Module) -> None:
        """Called when an evaluation's forwards are done, before anything reads parameters. All ranks."""

    def route(self) -> int:
        """A number below 2**62 that identifies which layers ran in the last window and which have gradients; after an evaluation under
        `lockstep`, which layers ran in it. Ranks compare it at each boundary and after each evaluation; different numbers are an
        error. Called before gradients are cleared; no wait."""
        return 0

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward for one micro-batch. `loss`: 0-dim, weighted and scaled. Gradients are averaged over ranks in the last
        micro-batch of a window."""
        loss.backward()  # type: ignore[no-untyped-call]

    def reduction_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of dtype `gradient` are averaged over ranks; shown after the first update."""
        return gradient

    def scale_gradients(self, parameters: Sequence[torch.nn.Parameter], factor: torch.Tensor) -> None:
        """Multiply every gradient by `factor` (0-dim, on the device, the same on every rank), in place; no wait, unless gradients
        are in host memory."""
        _multiply(_local_gradients(parameters), factor)

    def grad_norm(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """2-norm of the global gradient over `parameters`: 0-dim device tensor, the same on every rank. All ranks."""
        import torch

        grads = [p.grad for p in parameters if p.grad is not None]
        kinds = {(type(g), g.layout, g.dtype) for g in grads}
        if len(kinds) == 1 and next(iter(kinds))[:2] == (torch.Tensor, torch.strided):
            # The result of torch's function without its sorting, which takes two thirds of the time for a small model.
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0)))
            return total
        norm = torch.nn.utils.get_total_norm(grads)
        return norm.full_tensor() if is_sharded(norm) else norm

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
        """Scale gradients in place so that their global norm is at most `max_norm`; `norm` comes from `grad_norm`."""
        import torch

        _multiply(_local_gradients(parameters), torch.clamp(max_norm / (norm + 1e-6), max=1.0))

    def clip_by_value(self, parameters: Sequence[torch.nn.Parameter], max_value: float) -> None:
        """Clamp every element of the gradients to -max_value ... max_value, in place. Called only if `exposes_gradients`."""
        import torch

        if grads := _local_gradients(parameters):
            torch._foreach_clamp_min_(grads, -max_value)
            torch._foreach_clamp_max_(grads, max_value)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Apply the update. Returns False if the update was skipped (under `scales_loss` or `skips_nonfinite`). All ranks."""
        optimizer.step()
        return True

    def clear_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Clear the gradients of all `parameters` of the module, after an update or when it is skipped."""
        for parameter in parameters:
            parameter.grad = None

    def loss_scale_state(self) -> dict[str, Any] | None:
        """Under `scales_loss`: the state of the loss scale, as JSON values with the keys of `torch.amp.GradScaler.state_dict`."""
        return None

    def load_loss_scale_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that `loss_scale_state` or the `state_dict` of a `torch.amp.GradScaler` returned."""

    def local_part(self, tensor: torch.Tensor) -> Part:
        """The part that this rank holds of a parameter, a buffer or a tensor of the same shape, for initial values and checkpoints.
        Default: for a DTensor sharded in dimension 0, this rank's shard. For one that is sharded in dimension 1 too, a share of its
        rows, for which ranks exchange values. For any other tensor, the whole. May be called by one rank alone; `values` and
        `write` of the returned part may need all ranks."""
        return parts.part_of(tensor)

    def numbers_of_weights(self, module: torch.nn.Module) -> dict[torch.nn.Parameter, int]:
        """The number of weights that each parameter stands for. For a sharded parameter, these are the weights of the whole. For a
        quantised weight, these are the weights of the layer, not its codes, because a byte may hold two codes. This rank alone."""
        shapes = {each.weight: each.shape for each in quantised_weights(module).values()}
        return {p: math.prod(shapes.get(p) or self.local_part(p).shape) for p in module.parameters()}

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor of a parameter or buffer, in the dtype in which it is trained. All ranks."""
        whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
        return whole.detach()

    def optimizer_groups(self, optimizer: torch.optim.Optimizer) -> list[list[torch.nn.Parameter]]:
        """The parameters of the module in each group of `optimizer`, as the user grouped them."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def optimizer_state(self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """The state of `optimizer` for `parameter`, by key: a `Part` if it is a tensor of the parameter's shape, else the value. A
        tensor subclass that consists of several tensors is always returned as a value."""
        import torch

        return {
            key: self.local_part(value)
            if is_sharded(value)
            or (isinstance(value, torch.Tensor) and value.shape == parameter.shape and not is_wrapper(value))
            else value
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def restore_optimizer_state(
        self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> dict[str, Part]:
        """Load the state of `parameter` from a checkpoint into `optimizer`. `state` has, by key, a value, or a dtype if the state is a
        tensor of the parameter's shape. For each dtype, allocate the tensor and return its part; the caller fills it."""
        import torch

        own = {
            key: _uninitialised(optimizer, parameter, value) if type(value) is torch.dtype else value
            for key, value in state.items()
        }
        if own:
            optimizer.state[parameter] = own
        return {key: self.local_part(own[key]) for key, value in state.items() if type(value) is torch.dtype}

    @staticmethod
    def broadcast(tensor: torch.Tensor) -> None:
        """Copy rank 0's values of `tensor` to every rank, in place, for any dtype and layout. All ranks."""
        parts.broadcast(tensor)

    def after_load(self) -> None:
        """Called after parts of parameters or of optimizer state were written: initial values, a checkpoint, or weights that a
        plugin changed. All ranks."""

    def during_hook(self, hook: str) -> AbstractContextManager[object] | None:
        """A context around each listener of the event `hook`, for a strategy that keeps the trained values outside of the module's
        parameters: it has to find out which parameters a listener uses, so that changes to them are kept. None if the module's
        parameters are the trained ones."""
        return None

    def keeps_written(self, parameter: torch.nn.Parameter) -> bool:
        """Whether a value that `training_step` writes into `parameter` is kept. It is lost if steps compute with a copy of the
        parameter; a fit that writes in its first update is then an error. (For writes in hooks see `during_hook`.)"""
        return True

    def changing(self, parameters: Iterable[torch.nn.Parameter]) -> AbstractContextManager[object]:
        """A context in which code outside of a step may read and change `parameters`. Changes have to be element by element and the
        same on every rank; they are kept. If the strategy keeps parameters empty between steps, they are whole inside. Under "fsdp", change
        whole parameters (`weight.mul_(mask)`): a row or slice of a sharded one, such as `weight[1]`, is a copy. All ranks."""
        return contextlib.nullcontext()

    def communication_seconds(self, model: torch.nn.Module) -> float | None:
        """Seconds per update in which this rank only communicated, as last measured; None if unknown. `model` is the return value of
        `prepare`. Called at log boundaries; no wait."""
        return None

    @staticmethod
    def blocks(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        """The repeated blocks of `module`, with their names. If it contains transformers models, the blocks that these declare; else
        the children of every `ModuleList` that have parameters, except modules of torch.jit. A block may contain other blocks."""
        import torch

        named = {n for m in module.modules() for n in getattr(m, "_no_split_modules", None) or ()}
        if named:
            return [(n, m) for n, m in module.named_modules() if type(m).__name__ in named]
        listed = {
            id(child)
            for m in module.modules()
            if isinstance(m, torch.nn.ModuleList)
            for child in m
            if next(child.parameters(), None) is not None
            and not isinstance(child, torch.nn.ModuleList | torch.jit.ScriptModule)
        }
        return [(n, m) for n, m in module.named_modules() if id(m) in listed]

    def memory_per_rank(self, module: torch.nn.Module, whole: Mapping[str, int], world_size: int) -> dict[str, int]:
        """Bytes on one rank, by kind of memory, for the plan. `whole`: the bytes of each kind without sharding. A strategy may add
        kinds for the memory that it needs itself. If there is a device, the name of a kind in host memory begins with "host ".
        `module` may be on the meta device or already sharded. Pure. Default: the kinds in `divides` are divided by
        `world_size`, the others are replicated."""
        return {kind: -(-count // world_size) if kind in self.divides else count for kind, count in whole.items()}

    def describe(self) -> dict[str, str]:
        """Lines for the plan, by topic, such as {"unused parameters": "looked for"}."""
        return {}


def _uninitialised(optimizer: Any, parameter: torch.nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised state tensor shaped like `parameter`. A paged optimizer of bitsandbytes allocates it itself, on a GPU in paged
    memory."""
    import torch

    if getattr(optimizer, "is_paged", False):
        buffer: torch.Tensor = optimizer.get_state_buffer(parameter, dtype=dtype)
        return buffer
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def _multiply(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply `gradients` by `factor` in place. `factor` is on the device, and has to be copied to the host for offloaded gradients."""
    import torch

    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def _local_gradients(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This rank's memory of the gradients; for a DTensor, its local shard."""
    import torch

    tensor = sys.modules.get("torch.distributed.tensor")  # like `is_sharded`, without a call per gradient
    sharded = () if tensor is None else tensor.DTensor
    with torch.no_grad():  # otherwise to_local runs as an autograd function
        return [p.grad.to_local() if isinstance(p.grad, sharded) else p.grad for p in parameters if p.grad is not None]
