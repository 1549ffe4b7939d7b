"""What a strategy is: how parameters, gradients and optimizer state lie on the ranks. Abstract.

The loop knows the methods below and nothing else of a strategy. A strategy is a plugin object: it may hear hooks and keep
state. Options are the fields of a `@dataclass(eq=False)`, so that "name:option=value" and the constructor are one thing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from fabricate.hooks import Listener
from fabricate.strategies import sharding as parts
from fabricate.strategies.sharding import is_sharded, is_wrapper

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from fabricate.precisions.base import Precision


GROUPS = ("MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU")
"""What Accelerate calls the ranks of a process group, by the kind of their devices."""
CAST_COPIES = "half-precision copies"
"""The kind of memory that autocast takes: copies of weights in the dtype in which they are multiplied, kept for backward."""


class Strategy(Listener):
    """Base of every strategy. Override what differs; the defaults are those of one process."""

    @dataclass(frozen=True)
    class Settled:
        """What is settled before anything is built. None: not set, or not known."""

        world_size: int
        local_world_size: int
        """The ranks on the host of this one."""
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
    """What users call it, in settings, the plan and messages. It has to be given."""
    min_world_size: ClassVar[int] = 1
    """The fewest processes that it runs on."""
    max_world_size: ClassVar[int | None] = None
    """The most processes that it runs on; None: any number."""
    exposes_gradients: ClassVar[bool] = True
    """Whether `parameter.grad` holds this rank's part of the global gradient before the update (`on_before_step` needs it)."""
    lockstep: ClassVar[bool] = False
    """Whether a forward runs collectives, so that every rank must run each one, in evaluation too."""
    compiles: ClassVar[bool] = True
    """Whether `Trainer(compile=...)` works: nothing of the strategy runs inside the forward of a block."""
    shards_parameters: ClassVar[bool] = False
    """Whether `local_part` of a parameter is a part of it, so that the whole has to be gathered for an export. `prepare` then
    gets what `configure_model` built still on the meta device, so that no rank ever holds all of it."""
    replicas_drift: ClassVar[bool] = False
    """Whether ranks that hold the same weights may hold other values of them between updates, and meet now and then."""
    divides: ClassVar[tuple[str, ...]] = ()
    """The kinds of memory of which a rank holds a part: "parameters", "gradients", "optimizer state", "master weights"."""
    quantised: ClassVar[tuple[str, ...]] = ()
    """The kinds of quantised weights (`fabricate.strategies.quantised`) that a module may have beside what is trained; every rank has
    loaded them itself, with their scales."""
    several_optimizers: ClassVar[bool] = True
    """Whether a module may train with more than one optimizer."""
    scales_loss: ClassVar[bool] = False
    """Whether the strategy's engine scales the loss itself where the precision needs it, and skips updates on overflow."""
    skips_nonfinite: ClassVar[bool] = False
    """Whether `step` itself leaves out an update whose gradient is not finite."""
    clips: ClassVar[str] = "fabricate"
    """Who clips, for the plan."""
    distributed_types: ClassVar[tuple[str, ...]] = ("NO", *GROUPS)
    """What `accelerator.distributed_type` may be once the Accelerator exists; anything else is an error before step 1. Without "NO" one
    process has a process group too. "FSDP" and "DEEPSPEED": the plugin that `accelerator_arguments` gives is set."""

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

    def in_group(self, world_size: int) -> bool:
        """Whether these ranks have a process group. One rank has one where `distributed_types` leaves out "NO". Pure."""
        return world_size > 1 or "NO" not in self.distributed_types

    def ranks_per_row(self, world_size: int) -> int:
        """How many successive ranks read the same rows, because together they compute what elsewhere one rank does: a divisor of
        `world_size`. What they count is counted once, and their dropout is the same. Pure, the same on every rank."""
        return 1

    def asks(self) -> Mapping[str, tuple[Any, str]]:
        """What a configuration file of the strategy sets of what belongs to the Trainer: by name the value and where it
        stands. Names: precision, gradient_accumulation_steps, max_grad_norm, global_batch_size, batch_size (per rank).
        What the Trainer leaves unset is adopted, two values that differ are an error. Pure."""
        return {}

    def settle(self, settled: Strategy.Settled) -> None:
        """Called once before anything is built, with what came out of all settings. Raises `ConfigurationError`. Pure."""

    def accelerator_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `accelerate.Accelerator(...)`: `kwargs_handlers`, and the `fsdp_plugin` or `deepspeed_plugin` that says
        what the strategy does itself (`accelerator.state` then says FSDP or DEEPSPEED, on a CPU as well)."""
        return {}

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        """Place and wrap `root`, whose forward runs the steps of `module` (its child). All ranks, collectives allowed.

        Returns the callable that the loop runs. Parameters may be replaced in place; names in `module` must stay.
        Under `shards_parameters`, parameters and buffers of `module` may be on the meta device (some or all; the others hold
        this rank's values, of which rank 0's count): give those memory, of a parameter only for this rank's part; their
        values do not matter. Initial values are written afterwards through `local_part`, then `after_load` is called.
        """
        prepared: torch.nn.Module = accelerator.prepare_model(root, evaluation_mode=True)
        return prepared

    def prepare_optimizers(
        self, model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> torch.nn.Module:
        """Take over the optimizers of a fit. Called once, after `prepare`. Returns what the loop runs. All ranks.

        The objects stay the user's: their groups' options are what schedulers change and what the plan shows.
        """
        return model

    def trained_changed(self, model: torch.nn.Module) -> torch.nn.Module:
        """Called where parameters that were trainable when the fit began require no gradient from now on, or one again: between two
        updates, gradients cleared. `model` is what the loop runs; returns what it runs from now on. All ranks, collectives allowed. Not
        called unless `exposes_gradients`."""
        return model

    def reuse(self, accelerator: Accelerator, model: torch.nn.Module, root: torch.nn.Module) -> torch.nn.Module:
        """`prepare` for a `root` that an earlier run sharded and `release` left so; `model` is what was run then."""
        return model

    def release(self, module: torch.nn.Module, clean: bool) -> bool:
        """The run is over: give back what `prepare` took. Returns whether every rank holds whole parameters again.
        All ranks; collectives only if `clean`, because after a failure some rank may not come here."""
        return not self.shards_parameters

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """A context for a micro-batch whose gradients stay local (every one of a window but the last)."""
        return contextlib.nullcontext()

    def after_evaluation(self, model: torch.nn.Module) -> None:
        """Called when an evaluation's forwards are done, before anything reads parameters. All ranks."""

    def route(self) -> int:
        """A number below 2**62 for the layers and gradients of the window just run, the same on every rank
        unless they went different ways; compared at each update boundary. Called before gradients are cleared; no wait."""
        return 0

    def backward(self, loss: torch.Tensor) -> None:
        """Backward of one micro-batch. `loss`: 0-dim, weighted and scaled; gradients are averaged over ranks on the last one."""
        loss.backward()  # type: ignore[no-untyped-call]

    def reduction_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """In which dtype gradients of dtype `gradient` are averaged over ranks; shown after the first update."""
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
            # What torch's function computes, without sorting by device and type: a third of the time of a small model's.
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0)))
            return total
        norm = torch.nn.utils.get_total_norm(grads)
        return norm.full_tensor() if is_sharded(norm) else norm

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
        """Scale gradients in place so that their global norm is at most `max_norm`; `norm` comes from `grad_norm`."""
        import torch

        _multiply(_local_gradients(parameters), torch.clamp(max_norm / (norm + 1e-6), max=1.0))

    def clip_by_value(self, parameters: Sequence[torch.nn.Parameter], max_value: float) -> None:
        """Clamp every element of the gradients to -max_value ... max_value, in place. Not called unless `exposes_gradients`."""
        import torch

        if grads := _local_gradients(parameters):
            torch._foreach_clamp_min_(grads, -max_value)
            torch._foreach_clamp_max_(grads, max_value)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Apply the update; False if it was left out (`scales_loss`, `skips_nonfinite`). All ranks."""
        optimizer.step()
        return True

    def clear_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Forget the gradients of all `parameters` of the module, after the update or instead of it."""
        for parameter in parameters:
            parameter.grad = None

    def loss_scale_state(self) -> dict[str, Any] | None:
        """Under `scales_loss`: the state of the loss scale, JSON, with the keys of `torch.amp.GradScaler.state_dict`."""
        return None

    def load_loss_scale_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `loss_scale_state` or a `torch.amp.GradScaler` gave."""

    def local_part(self, tensor: torch.Tensor) -> Part:
        """What this rank holds of a parameter or buffer, or of something shaped like one, for initial values and checkpoints.
        Default: a DTensor cut in dimension 0 gives its shard, one cut in dimension 1 too a share of its rows, which ranks exchange;
        anything else is held whole by every rank. This rank alone; what is done with the part may be for all ranks."""
        return parts.part_of(tensor)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter or buffer, in the dtype in which it is trained. All ranks."""
        whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
        return whole.detach()

    def optimizer_groups(self, optimizer: torch.optim.Optimizer) -> list[list[torch.nn.Parameter]]:
        """The parameters of the module in each group of `optimizer`, as the user grouped them."""
        return [list(group["params"]) for group in optimizer.param_groups]

    def optimizer_state(self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """What `optimizer` keeps for `parameter`, by key: a `Part` of what is shaped like the parameter, else the value; so is a tensor
        that is made of others, whatever its shape."""
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
        """Put into `optimizer` what a checkpoint holds for `parameter`. `state`: by key a value, or the dtype of what is shaped
        like the parameter; the parts of these, uninitialised, are returned for the caller to fill."""
        import torch

        own = {
            key: torch.empty_like(parameter, dtype=value, requires_grad=False) if type(value) is torch.dtype else value
            for key, value in state.items()
        }
        if own:
            optimizer.state[parameter] = own
        return {key: self.local_part(own[key]) for key, value in state.items() if type(value) is torch.dtype}

    @staticmethod
    def broadcast(tensor: torch.Tensor) -> None:
        """Give every rank rank 0's values of `tensor`, in place, whatever its dtype and layout. All ranks."""
        parts.broadcast(tensor)

    def after_load(self) -> None:
        """Called when parts of parameters or of optimizer state were filled: initial values, a checkpoint, a plugin that changed
        weights. All ranks."""

    def during_hook(self, hook: str) -> AbstractContextManager[object] | None:
        """A context for each listener of the event `hook` while it runs, for a strategy that has to know which parameters a
        listener uses, so that what it changes counts; None where the module's parameters are what is trained."""
        return None

    def keeps_written(self, parameter: torch.nn.Parameter) -> bool:
        """Whether what a step, as opposed to a hook, writes into `parameter` stays. It does not where steps compute with a copy: a fit
        refuses it then, as far as its first update shows it."""
        return True

    def changing(self, parameters: Iterable[torch.nn.Parameter]) -> AbstractContextManager[object]:
        """A context in which code outside of a step may read and change `parameters`, element by element and on every rank alike;
        what it changes counts. Under a strategy that keeps them empty between steps they are whole inside. All ranks."""
        return contextlib.nullcontext()

    def communication_seconds(self, model: torch.nn.Module) -> float | None:
        """Seconds per update in which this rank did nothing but communicate, as last measured; None where it is not known.
        `model` comes from `prepare`. Called at log boundaries; must not wait for the device."""
        return None

    @staticmethod
    def blocks(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        """What repeats in `module`, with names: the blocks that transformers models inside name, else the children of every
        `ModuleList` that hold parameters. Some may lie inside others."""
        import torch

        named = {n for m in module.modules() for n in getattr(m, "_no_split_modules", None) or ()}
        if named:
            return [(n, m) for n, m in module.named_modules() if type(m).__name__ in named]
        listed = {
            id(child)
            for m in module.modules()
            if isinstance(m, torch.nn.ModuleList)
            for child in m
            if next(child.parameters(), None) is not None and not isinstance(child, torch.nn.ModuleList)
        }
        return [(n, m) for n, m in module.named_modules() if id(m) in listed]

    def memory_per_rank(self, module: torch.nn.Module, whole: Mapping[str, int], world_size: int) -> dict[str, int]:
        """Bytes that one rank holds of each kind of `whole`, for the plan; what the strategy needs in addition, under names of its
        own. What lies in host memory although there is a device has a name that begins with "host ". `module` may be on the
        meta device or sharded already. Pure. Default: the kinds in `divides` are divided, the others replicated."""
        return {kind: -(-count // world_size) if kind in self.divides else count for kind, count in whole.items()}

    def describe(self) -> dict[str, str]:
        """Lines for the plan, by topic ("unused parameters": "looked for")."""
        return {}


def _multiply(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    """In place. `factor` is on the device, and gradients that are offloaded are not: they cannot be multiplied by it there."""
    import torch

    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def _local_gradients(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The memory of this rank's gradients: of a shard, the shard."""
    import torch

    tensor = sys.modules.get("torch.distributed.tensor")  # as in `is_sharded`, without a call for each
    sharded = () if tensor is None else tensor.DTensor
    with torch.no_grad():  # else to_local is an operation of its own
        return [p.grad.to_local() if isinstance(p.grad, sharded) else p.grad for p in parameters if p.grad is not None]
