"""Replicas: PyTorch's DistributedDataParallel. Must not know: other strategies."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast

from fabricate.errors import ConfigurationError
from fabricate.strategies.base import GROUPS, Strategy
from fabricate.strategies.quantised import EVERY_KIND
from fabricate.strategies.sharding import is_wrapper

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch.nn.parallel import DistributedDataParallel

_COMMUNICATION = {None: "as they are", "bf16": "rounded to bfloat16", "fp16": "rounded to float16"}
UNUSED = (
    "strategy='ddp' does not look for such parameters: use strategy='ddp:find_unused_parameters=true', use them in every "
    "training_step, or freeze them with requires_grad_(False)"
)
"""The end of the error about parameters that receive no gradient: why this is an error, and what to do."""


@dataclasses.dataclass(eq=False)
class DDP(Strategy):
    """A full replica on every rank; gradients are averaged while backward runs.

    find_unused_parameters: after each forward, look for parameters that receive no gradient, so that a module may leave parameters
    unused; costs a walk over the autograd graph per update. Without it, such a parameter is an error.
    static_graph: the same parameters are used in every micro-batch, in the same order; DDP learns it once.
    bucket_cap_mb: size of a gradient bucket in MiB. gradient_as_bucket_view: gradients live in the buckets, which takes less memory
    without accumulation; a gradient that a hook keeps then changes with the next backward.
    communication_hook: what is sent instead of float32 gradients: "bf16" or "fp16".
    sync_batchnorm: during the run, batch norm layers compute their statistics over the rows of all ranks, for each micro-batch
    (`torch.nn.SyncBatchNorm`, on GPUs only). No effect in a single process.
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: int = 25
    gradient_as_bucket_view: bool = False
    communication_hook: str | None = None
    sync_batchnorm: bool = False
    name: ClassVar[str] = "ddp"
    distributed_types: ClassVar[tuple[str, ...]] = GROUPS
    quantised: ClassVar[tuple[str, ...]] = EVERY_KIND

    def __post_init__(self) -> None:
        if self.find_unused_parameters and self.static_graph:
            raise ConfigurationError(
                "ddp: static_graph=true and find_unused_parameters=true: with static_graph DDP does not look for "
                "unused parameters in every update; choose one"
            )
        if self.bucket_cap_mb < 1:
            raise ConfigurationError(f"ddp: bucket_cap_mb={self.bucket_cap_mb!r}: give at least 1 (MiB)")
        if self.communication_hook not in _COMMUNICATION:
            raise ConfigurationError(
                f"ddp: communication_hook={self.communication_hook!r}: give bf16, fp16 or leave it out; PowerSGD is "
                "strategy='powersgd' of the package fabricate-powersgd"
            )

        self._accumulates = False
        self._undo: Callable[[], None] = lambda: None
        self._copies: list[Any] = []
        """Handles of the hooks that copy sparse gradients."""

    def settle(self, settled: Strategy.Settled) -> None:
        self._accumulates = settled.gradient_accumulation_steps > 1

    def check(self, world_size: int, device: torch.device) -> Iterable[str]:
        yield from super().check(world_size, device)
        if self.sync_batchnorm and world_size > 1 and device.type == "cpu":
            yield (
                f"strategy={self.name!r} with sync_batchnorm=true: torch.nn.SyncBatchNorm computes on a GPU only; leave it out on a CPU, "
                "or use layers that do not mix rows (GroupNorm, LayerNorm)"
            )

    def accelerator_arguments(self) -> dict[str, Any]:
        from accelerate.utils import DistributedDataParallelKwargs

        return {"kwargs_handlers": [DistributedDataParallelKwargs(**self._options())]}

    def _options(self) -> dict[str, Any]:
        """The arguments of `DistributedDataParallel`, which have the same names in torch and in Accelerate."""
        return {
            "bucket_cap_mb": self.bucket_cap_mb,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
        }

    def memory_per_rank(self, module: torch.nn.Module, whole: Mapping[str, int], world_size: int) -> dict[str, int]:
        gradients = whole.get("gradients", 0)
        # Until the last micro-batch of a window, gradients take memory in addition to the buckets in any case.
        within = self.gradient_as_bucket_view and not self._accumulates
        more = {} if within or not gradients else {"gradient buckets": gradients}
        return {**whole, **more}

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        self._undo = lambda: None
        if self.sync_batchnorm and accelerator.num_processes > 1:
            self._undo = synchronise_batch_norm(module)
        placed = super().prepare(accelerator, root, module)
        # After the move to the device, which may replace the objects.
        self._parameters = dict(module.named_parameters())
        wrappers = any(is_wrapper(parameter) for parameter in self._parameters.values())
        if wrappers:  # torch does not broadcast these; every rank has loaded the same values
            for tensor in (*self._parameters.values(), *module.buffers()):
                if not is_wrapper(tensor):
                    self.broadcast(tensor)
        return self._wrap(placed, init_sync=not wrappers)

    def trained_changed(self, model: torch.nn.Module) -> torch.nn.Module:
        # DDP handles only parameters that required a gradient when it was created.
        return self._wrap(model if self._model is None else self._model.module, init_sync=False)

    def _wrap(self, placed: torch.nn.Module, init_sync: bool) -> torch.nn.Module:
        """`placed` inside DDP, which averages the gradients of the parameters that are trained now; `placed` itself if there are none."""
        from torch.nn.parallel import DistributedDataParallel

        self._first_update, self._ran = True, False  # _ran: whether a forward has run
        self._trained = {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}
        self._model: DistributedDataParallel | None = None
        self._copy_sparse_gradients(placed)
        if not self._trained:
            return placed  # DDP refuses a module without trained parameters
        # Not Accelerate's wrapper, which does nothing in a single process and uses the local rank as the device index.
        model = self._model = DistributedDataParallel(placed, init_sync=init_sync, **self._options())
        if not self.find_unused_parameters and not self.static_graph:
            _arrange_buckets(model, self._trained.values())

        def runs(*_: object) -> None:
            self._ran = True
            first_forward.remove()

        first_forward = model.register_forward_pre_hook(runs)
        if self.communication_hook is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            rounded = getattr(default_hooks, f"{self.communication_hook}_compress_hook")
            # In our own function: without a GPU torch refuses its own hooks by name, but gloo can send bfloat16.
            model.register_comm_hook(None, lambda state, bucket: rounded(state, bucket))
        return model

    def _copy_sparse_gradients(self, module: torch.nn.Module | None) -> None:
        """Copy each sparse gradient in `module` before DDP divides it by the number of ranks in place: its values may be the memory of the
        gradient that another layer gets (the sum of two embeddings), which would be divided twice. None: stop doing so."""
        for handle in self._copies:
            handle.remove()
        weights = set(sparse_layers(module).values()) if module is not None else ()
        self._copies = [_copy_gradient(weight) for weight in weights if weight.requires_grad]

    def release(self, module: torch.nn.Module, clean: bool) -> bool:
        self._copy_sparse_gradients(None)
        self._model, self._trained, self._parameters = None, {}, {}
        self._undo()
        return super().release(module, clean)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        if self.static_graph and self._first_update:
            return contextlib.nullcontext()  # DDP learns the graph while it averages; averaging twice changes nothing
        return cast("Callable[[], AbstractContextManager[object]]", model.no_sync)()

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        # A plugin that takes the place of train_step may train without DDP's forward, and then averages gradients itself.
        if self._ran and self._model is not None and self._model.require_backward_grad_sync:
            self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Raise `ConfigurationError` for parameters without a gradient. DDP would notice only in the next forward, after an update with
        gradients that were not averaged; until then ranks may wait for each other at different places. Takes 40 us per update with 300
        parameters."""
        if self.find_unused_parameters or self.static_graph:
            return
        if missed := [name for name, parameter in self._trained.items() if parameter.grad is None]:
            named = ", ".join(missed[:4]) + (f" and {len(missed) - 4} more" if len(missed) > 4 else "")
            which = "the first" if self._first_update else "an"
            raise ConfigurationError(f"no gradient reached {named} in {which} update, and {UNUSED}")
        if self._accumulates:  # earlier micro-batches may have left gradients that the last one did not reach
            self._model._check_reducer_finalized()  # type: ignore[union-attr]

    def reduction_dtype(self, gradient: torch.dtype) -> torch.dtype:
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(self.communication_hook), gradient)

    def clear_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._first_update = False
        super().clear_gradients(parameters)

    def communication_seconds(self, model: torch.nn.Module) -> float | None:
        # DDP measures the first ten backwards and then every hundredth, in nanoseconds; it has no public method for that.
        measured = model._get_ddp_logging_data()  # type: ignore[operator]
        if "avg_backward_comm_time" not in measured:
            return None
        hidden = measured["avg_backward_compute_comm_overlap_time"]
        return float(max(measured["avg_backward_comm_time"] - hidden, 0)) / 1e9

    def describe(self) -> dict[str, str]:
        unused = "looked for after each forward" if self.find_unused_parameters else "an error"
        return {
            "unused parameters": "the same in every micro-batch (static graph)" if self.static_graph else unused,
            "gradients": f"averaged in buckets of {self.bucket_cap_mb} MiB, {_COMMUNICATION[self.communication_hook]}",
        }


def sparse_layers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the layers with sparse gradients, by the name of the layer."""
    import torch

    layers = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {name: child.weight for name, child in module.named_modules() if isinstance(child, layers) and child.sparse}


def _copy_gradient(weight: torch.Tensor) -> Any:
    """Let `weight` get a copy of each gradient. Returns the handle of the hook."""
    return weight.register_hook(lambda gradient: gradient.clone())  # type: ignore[no-untyped-call]


def _arrange_buckets(model: DistributedDataParallel, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Run one backward of zeros, so that DDP arranges its buckets before the first update.

    DDP arranges them after its first backward, in the order in which gradients arrived. The rounding of a sum over three or more ranks
    depends on the place of an element in its bucket, so the first update of a resumed run would differ bitwise from that of an
    uninterrupted run. Here gradients arrive in the reverse order of the parameters, as in most modules. All ranks."""
    import torch

    trained, sparse = list(parameters), set(sparse_layers(model).values())
    model.reducer.prepare_for_backward([])  # what DDP calls at the end of a forward
    with torch.enable_grad():  # a script may call predict under no_grad
        torch.stack([_sum(p, p in sparse).float() * 0 for p in trained]).sum().backward()  # type: ignore[no-untyped-call]
    for parameter in trained:
        parameter.grad = None


def _sum(parameter: torch.nn.Parameter, sparse: bool) -> torch.Tensor:
    """The sum of `parameter`, or of its first row if `sparse`, so that the gradient has the layout that the layer gives it."""
    import torch

    if not sparse:
        return (torch.view_as_real(parameter) if parameter.is_complex() else parameter).sum()
    first = torch.zeros(1, dtype=torch.long, device=parameter.device)
    return torch.nn.functional.embedding(first, parameter, sparse=True).sum()


def synchronise_batch_norm(module: torch.nn.Module) -> Callable[[], None]:
    """Replace each batch norm layer inside `module` by a `torch.nn.SyncBatchNorm` with the same parameters and buffers. Returns a function
    that restores the layers and gives them the current parameters and buffers. Raises `ConfigurationError` if there are no such layers."""
    import torch

    batch_norm = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
    before = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, batch_norm)
    ]
    if not before:
        raise ConfigurationError(
            f"ddp: sync_batchnorm=true: {type(module).__name__} has no BatchNorm1d, 2d or 3d; leave it out"
        )
    torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]

    def undo() -> None:
        for parent, name, layer in before:
            synchronised = parent.get_submodule(name)
            layer._parameters, layer._buffers = synchronised._parameters, synchronised._buffers
            parent.add_module(name, layer)

    return undo
