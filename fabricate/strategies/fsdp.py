"""Shards: PyTorch's FSDP2, `fully_shard`. Must not know: other strategies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast

from fabricate.errors import ConfigurationError
from fabricate.strategies.base import CAST_COPIES, Strategy
from fabricate.strategies.quantised import FOUR_BIT, SCALES, quantised_weights
from fabricate.strategies.sharding import is_sharded

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from fabricate.strategies.tensor_parallel import Division


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_meshes: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""The meshes made so far, by torch's default process group. The groups that a mesh opens stay open as long as that group."""


@dataclasses.dataclass(eq=False)
class FSDP(Strategy):
    """Parameters, gradients and optimizer state sharded over the ranks (PyTorch's FSDP2, `fully_shard`).

    wrap: the units, whose parameters are gathered together. "auto": the transformer blocks that a transformers model names, else
    the children of every `ModuleList`; "none": the whole module at once; "size:100M": submodules with at least so many parameters;
    otherwise class names joined by "+".
    reshard_after_forward: free gathered units between forward and backward. offload: "cpu" keeps shards, gradients and
    optimizer state in host memory, where the update runs.
    shard: the number of ranks that share one copy of the model, a divisor of the number of ranks, or "node": the ranks of a node;
    gradients are averaged over the copies. Unset: all ranks share one copy.
    tp: the number of ranks that share the computation of each layer, according to the `tp_plan` of a transformers model, and read the
    same rows; each rank's part of a layer is sharded over the corresponding ranks of the other groups (1: layers are not divided).
    param_dtype: the dtype in which parameters are gathered; shards keep their dtype. Unset: "bf16" or "fp16" if `precision`
    computes in it, which halves the traffic and saves autocast's copies of weights; layers that need float32 parameters keep them.
    "fp32": gathered in float32. reduce_dtype: the dtype in which gradients are summed over the ranks, such as "bf16"; unset: float32,
    or bfloat16 if all parameters are bfloat16 ("bf16-true").
    activation_checkpointing: keep only the input of each unit, and compute the unit again in backward.
    accumulate: "shards" averages the gradients of every micro-batch over the ranks, so that a rank keeps only shards of them;
    "whole" averages once per update, and until then every rank keeps whole gradients.
    """

    wrap: str = "auto"
    reshard_after_forward: bool = True
    offload: str | None = None
    shard: int | str | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    activation_checkpointing: bool = False
    accumulate: str = "shards"
    tp: int = 1
    name: ClassVar[str] = "fsdp"
    lockstep: ClassVar[bool] = True
    shards_parameters: ClassVar[bool] = True
    distributed_types: ClassVar[tuple[str, ...]] = ("FSDP",)
    quantised: ClassVar[tuple[str, ...]] = (FOUR_BIT,)

    def __post_init__(self) -> None:
        if self.offload not in (None, "cpu"):
            raise ConfigurationError(f"fsdp: offload={self.offload!r}: give 'cpu' or leave it out")
        for option in ("param_dtype", "reduce_dtype"):
            value = getattr(self, option)
            if value is not None and value not in _DTYPES:
                raise ConfigurationError(f"fsdp: {option}={value!r}: give {', '.join(_DTYPES)} or leave it out")
        if self.accumulate not in ("shards", "whole"):
            raise ConfigurationError(f"fsdp: accumulate={self.accumulate!r}: give 'shards' or 'whole'")
        if isinstance(self.shard, str) and self.shard != "node":
            raise ConfigurationError(f"fsdp: shard={self.shard!r}: give a number of ranks, 'node', or leave it out")
        if isinstance(self.shard, int) and self.shard < 2:
            raise ConfigurationError(
                f"fsdp: shard={self.shard!r}: two ranks or more share a copy of the model; strategy='ddp' copies it whole"
            )
        if self.tp < 1:
            raise ConfigurationError(
                f"fsdp: tp={self.tp!r}: give the number of ranks that each layer is split over, 2 or more, or leave tp out"
            )
        if self.activation_checkpointing and self.wrap == "none":
            raise ConfigurationError(
                "fsdp: activation_checkpointing=true with wrap='none' would run the whole module twice; choose units with wrap="
            )
        self._gathered = self.param_dtype
        """The dtype in which parameters are gathered; None: their own."""
        self._summed = self.reduce_dtype
        """The dtype in which gradients are summed over the ranks; None: their own."""
        self._units: list[str] | None = None
        self._ran: list[int] = []
        self._watched: list[torch.nn.Parameter] = []
        self._world_size, self._local_world_size, self._accumulation = 0, 0, 1
        self._over: Any = None
        """The mesh of the ranks that share one copy; `_ways`: the mesh of the ranks that divide layers."""
        self._ways: Any = None
        self._division: Division | None = None
        self._undo: list[Callable[[], None]] = []
        self._scalars: list[torch.nn.Parameter] = []
        self._window_goes_on = self._in_window = False

    # -- before anything is built ---------------------------------------------------------------------------------------

    def check(self, world_size: int, device: torch.device) -> Iterable[str]:
        yield from super().check(world_size, device)
        shards, groups = self._shards(world_size), world_size // self.tp
        if not shards or groups % shards:
            yield (
                f"fsdp: shard={self.shard!r}: {shards} is not a divisor of {world_size} process{'es' * (world_size > 1)}"
                + (f" in {groups} groups of tp={self.tp}" if self.tp > 1 else "")
                + "; choose a divisor, or leave shard out"
            )
        elif shards < 2 and self.tp == 1 and world_size > 1:
            yield f"fsdp: shard={self.shard!r}: a node has one process, so nothing would be divided; use strategy='ddp'"

    def ranks_per_row(self, world_size: int) -> int:
        return self.tp

    def _shards(self, world_size: int) -> int:
        """The number of shards of a parameter in one copy of the model, after the division by `tp`."""
        if self.shard == "node":
            return (self._local_world_size or world_size) // self.tp
        return int(self.shard or world_size // self.tp)

    def settle(self, settled: Strategy.Settled) -> None:
        self._world_size, self._local_world_size = settled.world_size, settled.local_world_size
        self._accumulation = settled.gradient_accumulation_steps
        computes = settled.precision.mixed_precision.replace("no", "fp32")
        if self.tp > 1 and settled.scales_loss:  # torch's scaler would look only at this rank's columns
            raise ConfigurationError(
                f"fsdp: tp={self.tp} and precision={settled.precision.name!r}: the ranks that divide a layer do not "
                "exchange whether gradients overflowed, so only some of them might update; use precision='bf16' or "
                "'fp32', or leave tp out"
            )
        if self.param_dtype not in (None, "fp32", computes):
            raise ConfigurationError(
                f"fsdp: param_dtype={self.param_dtype!r} and precision={settled.precision.name!r}, which computes in "
                f"{settled.precision.compute_dtype}: use precision={self.param_dtype!r}, or leave param_dtype out"
            )
        self._gathered = self.param_dtype or (computes if computes != "fp32" else None)
        widened = self._gathered and settled.precision.name != "bf16-true"  # preliminary: `prepare` sees the parameters
        self._summed = self.reduce_dtype or ("fp32" if widened else None)

    def memory_per_rank(self, module: torch.nn.Module, whole: Mapping[str, int], world_size: int) -> dict[str, int]:
        """The bytes of the first rank's shards, which are the largest, and of the parameters that are gathered at once: the largest unit
        and the rest of the module, which stays gathered; all parameters without `reshard_after_forward`. With accumulate="whole", whole
        gradients too."""
        parameters = list(module.parameters())
        division = self._divide(module)
        cuts = division.cuts(module) if division is not None else {}
        every = sum(p.numel() * p.element_size() for p in parameters)
        part = self._shard_bytes(parameters, cuts, self._shards(world_size))
        place = "host " if self.offload else ""
        whole = dict(whole)
        copies, scales = whole.pop(CAST_COPIES, 0), whole.pop(SCALES, 0)
        sizes = {f"{place}{kind}": -(-count * part // (every or 1)) for kind, count in whole.items()}
        # Autocast keeps these copies for backward, and FSDP does not free them.
        if copies and self._gathered in (None, "fp32"):
            sizes[CAST_COPIES] = copies
        if scales:
            sizes[SCALES] = scales
        sizes["gathered"] = self._gathered_bytes(module, cuts)
        if self.accumulate == "whole" and self._accumulation > 1 and "gradients" in whole:
            here = sum(self._bytes(p, cuts, p.element_size()) for p in parameters)
            sizes["whole gradients"] = whole["gradients"] * here // (every or 1)
        return sizes

    def _bytes(self, parameter: torch.nn.Parameter, cuts: Mapping[int, int], width: int) -> int:
        """The bytes of `parameter` on one rank after tensor parallelism, with `width` bytes per element. `cuts`: cut dimensions by id."""
        return parameter.numel() // (self.tp if id(parameter) in cuts else 1) * width

    def _shard_bytes(self, parameters: Sequence[torch.nn.Parameter], cuts: Mapping[int, int], shards: int) -> int:
        """The bytes of one shard: dimension 0 is cut into equal parts, rounded up. Reads only shapes, because slicing a DTensor gathers it
        on all ranks."""
        count = 0
        for p in (p for p in parameters if p.numel()):
            rows = (len(p) if p.ndim else 1) // (self.tp if cuts.get(id(p)) == 0 else 1)
            count += -(-rows // shards) * self._bytes(p, cuts, p.element_size()) // rows
        return count

    def _gathered_bytes(self, module: torch.nn.Module, cuts: Mapping[int, int]) -> int:
        from fabricate.strategies.fsdp_units import select, sizes

        width = {"bf16": 2, "fp16": 2}.get(str(self._gathered))
        units = self._units if self._units is not None else [name for name, _ in select(module, self.wrap)]
        by_unit = sizes(module, units, lambda p: self._bytes(p, cuts, width or p.element_size()))
        rest = by_unit.pop("")
        return rest + (max(by_unit.values(), default=0) if self.reshard_after_forward else sum(by_unit.values()))

    def _divide(self, module: torch.nn.Module) -> Division | None:
        """The layers that `tp` divides, with their styles; None if it divides none."""
        if self.tp == 1:
            return None
        from fabricate.strategies.tensor_parallel import division

        return division(module, self.tp)

    # -- building -------------------------------------------------------------------------------------------------------

    def accelerator_arguments(self) -> dict[str, Any]:
        from accelerate.utils import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=self.reshard_after_forward,
            cpu_offload=self.offload is not None,
            activation_checkpointing=self.activation_checkpointing,
            cpu_ram_efficient_loading=False,
        )
        return {"fsdp_plugin": plugin}

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        import torch
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        from fabricate.strategies.fsdp_units import check_dtypes, kept_in_float32, marks, refuse_sparse, select

        _refuse_hooks(module)
        refuse_sparse(module)
        self._refuse_quantised(module)
        self._device, self._division = accelerator.device, self._divide(module)
        options = self._options(module, accelerator.num_processes)
        accelerator.state.fsdp_plugin.mixed_precision_policy = options["mp_policy"]
        self._broadcast_values(module)
        put_marks_back = marks(root)
        if self._division is not None:
            self._division.apply(module, self._ways)
        # FSDP cuts dimension 0, so 0-dim parameters are whole on every rank.
        scalars = {p for p in module.parameters() if not p.ndim}
        for scalar in scalars:
            if not scalar.is_meta:
                scalar.data = scalar.data.to(self._device)
        options["ignored_params"] = scalars
        units = select(module, self.wrap)
        if self.activation_checkpointing and not units:
            raise ConfigurationError(
                f"fsdp: activation_checkpointing=true: wrap={self.wrap!r} finds no units in {type(module).__name__}; name "
                "classes or a size"
            )
        kept = kept_in_float32(module, self._device) if self._gathered not in (None, "fp32") else []
        check_dtypes(module, [*kept, *(unit for _, unit in units), root])
        for layer in kept:
            fully_shard(layer, **options | {"mp_policy": self._dtypes(None)})
        for _, unit in units:
            fully_shard(unit, **options)
        # Parameters outside of units are not freed after forward, because backward begins with them.
        fully_shard(root, **options | {"reshard_after_forward": False})
        home = torch.device("cpu") if self.offload else self._device

        def memory(tensor: torch.Tensor) -> torch.Tensor:
            where = home if isinstance(tensor, DTensor) else self._device  # buffers are not sharded and not offloaded
            return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor

        root._apply(memory)  # type: ignore[no-untyped-call]
        put_marks_back()
        vars(root)["fsdp"] = (self._choices(), [name for name, _ in units])
        self._attach(root, module, units)
        # Only registers the model with Accelerate: it is placed already, and evaluation mode adds no wrapper.
        return cast("torch.nn.Module", accelerator.prepare_model(root, device_placement=False, evaluation_mode=True))

    def _refuse_quantised(self, module: torch.nn.Module) -> None:
        """Raise `ConfigurationError` for quantised weights whose codes would be cast or cut by columns."""
        weights = quantised_weights(module)
        if weights and self.tp > 1:
            raise ConfigurationError(
                f"fsdp: tp={self.tp}: {next(iter(weights))} is quantised, and its codes cannot be divided by columns; leave tp out"
            )
        gathered = _DTYPES[self._gathered] if self._gathered not in (None, "fp32") else None
        for name, each in weights.items():
            storage = str(each.weight.dtype).removeprefix("torch.")
            if each.weight.is_floating_point() and gathered not in (None, storage):
                raise ConfigurationError(
                    f"strategy='fsdp' gathers in {gathered}, but the codes of {name} are stored as {storage} and would be "
                    f"rounded: load with bnb_4bit_quant_storage=torch.uint8 (the default) or torch.{gathered}"
                )

    def _broadcast_values(self, module: torch.nn.Module) -> None:
        """Copy rank 0's values to every rank, because fully_shard keeps each rank's own values."""
        import torch

        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                values = tensor.detach().to(self._device)  # one at a time, because the device may not hold all of them
                torch.distributed.broadcast(values, src=0)
                tensor.detach().copy_(values)

    def _options(self, module: torch.nn.Module, world_size: int) -> dict[str, Any]:
        """The arguments of `fully_shard`."""
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy

        # Parameters in half precision have gradients in half precision, which are summed in that dtype.
        rounded = self._gathered and any(p.dtype == torch.float32 for p in module.parameters())
        self._summed = self.reduce_dtype or ("fp32" if rounded else None)
        shards = self._shards(world_size)
        copies = world_size // shards // self.tp
        sizes, names = (copies, shards), ("copies", "shards")
        if self.tp == 1:
            mesh = _mesh(self._device.type, sizes, names)
        else:
            every = _mesh(self._device.type, (*sizes, self.tp), (*names, "tp"))
            mesh, self._ways = every[names], every["tp"]
        self._over = mesh["shards"]
        options: dict[str, Any] = {
            "mesh": mesh["shards"] if copies == 1 else mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": self._dtypes(self._gathered),
        }
        if self.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self._device.type != "cpu")
        return options

    def _dtypes(self, gathered: str | None) -> Any:
        """FSDP's policy for parameters that are gathered in `gathered`."""
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        param_dtype, reduce_dtype = (
            getattr(torch, _DTYPES[name]) if name else None for name in (gathered, self._summed)
        )
        # Inputs are not cast: autocast casts where a layer needs it, and a target or a time step must not be rounded.
        return MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)

    def _choices(self) -> dict[str, Any]:
        """The options that cannot change after a module is sharded."""
        kept = {
            n: v for n, v in dataclasses.asdict(self).items() if n not in ("activation_checkpointing", "accumulate")
        }
        return {**kept, "param_dtype": self._gathered}

    def _attach(self, root: torch.nn.Module, module: torch.nn.Module, units: list[tuple[str, torch.nn.Module]]) -> None:
        """Register the hooks and the recomputation that the units have during a run."""
        from fabricate.strategies.fsdp_timing import Communication
        from fabricate.strategies.recomputing import recompute

        self._units = [name for name, _ in units]
        self._watched, self._ran = list(module.parameters()), []
        self._scalars = [p for p in self._watched if not p.ndim]
        hooks = [
            unit.register_forward_pre_hook(functools.partial(self._runs, number))
            for number, (_, unit) in enumerate(units)
            if self._world_size > 1
        ]
        hooks += [unit.register_forward_pre_hook(self._forgets) for unit in (root, *(unit for _, unit in units))]
        undo = [hook.remove for hook in hooks]
        if self.activation_checkpointing:
            undo.append(recompute(module, units))
        self._undo = undo
        self._communication = Communication(module)
        if self._device.type == "cpu":  # on other devices, a call returns before its work is done
            self._communication.watch(root)

    def prepare_optimizers(
        self, model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> torch.nn.Module:
        for name, optimizer in optimizers.items():
            classes = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(optimizer).__mro__]
            refused = [library for library, kind in classes if library == "bitsandbytes" or kind == "Adafactor"]
            if refused:
                kind = f"{refused[0]}{'' if refused[0] == 'transformers' else '.optim'}.{type(optimizer).__name__}"
                raise ConfigurationError(
                    f"strategy='fsdp' with {kind} (optimizer {name!r}): this optimizer does not support sharded "
                    "parameters; choose one that updates each element independently, AdamW for instance, or strategy='ddp'"
                )
        return model

    def trained_changed(self, model: torch.nn.Module) -> torch.nn.Module:
        from torch.distributed.fsdp import FSDPModule

        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()  # finds the dtypes of trained parameters again, which are unknown for a frozen unit
                unit.reshard()
        return model

    def reuse(self, accelerator: Accelerator, model: torch.nn.Module, root: torch.nn.Module) -> torch.nn.Module:
        module = cast("torch.nn.Module", root.module)
        before, names = vars(root)["fsdp"]
        changed = [(n, value) for n, value in self._choices().items() if before[n] != value]
        for name, value in changed:
            same = "the same precision" if name == "param_dtype" and self.param_dtype is None else "the same"
            raise ConfigurationError(
                f"fsdp: {name}={value!r}: an earlier fit sharded this {type(module).__name__} with {name}={before[name]!r}; use {same}, "
                "or build a new module"
            )
        self._device = accelerator.device
        options = self._options(module, accelerator.num_processes)
        accelerator.state.fsdp_plugin.mixed_precision_policy = options["mp_policy"]
        self._attach(root, module, [(name, module.get_submodule(name)) for name in names])
        return model

    def release(self, module: torch.nn.Module, clean: bool) -> bool:
        for undo in self._undo:
            undo()
        self._undo, self._watched = [], []
        return False

    def on_epoch_start(self, module: torch.nn.Module) -> None:
        """Raise `ConfigurationError` for hooks on gradients that were added after the module was sharded, for example in on_fit_start."""
        _refuse_hooks(module)

    def during_hook(self, hook: str) -> AbstractContextManager[object] | None:
        from fabricate.strategies.assigning import Assigning

        # The excluded hooks run a forward or a save inside.
        return None if hook in ("train_step", "eval_step", "write_checkpoint") else Assigning(self.local_part)

    def keeps_written(self, parameter: torch.nn.Parameter) -> bool:
        return not parameter.ndim  # the tensor that is gathered for a step is freed after the step

    # -- one update -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _unsynchronised(self, model: Any) -> Iterator[None]:
        self._window_goes_on = True
        model.set_requires_gradient_sync(self.accumulate == "shards")
        try:
            yield
        finally:
            self._window_goes_on = False
            model.set_requires_gradient_sync(True)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        whole = self.accumulate == "whole" or self._scalars
        return self._unsynchronised(model) if whole else contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self._in_window = True
        super().backward(loss)
        if self._scalars and not self._window_goes_on:
            self._average_scalars()

    def clear_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._in_window = False
        self._communication.updates += 1
        super().clear_gradients(parameters)

    def _average_scalars(self) -> None:
        """Average the gradients of 0-dim parameters once per window; FSDP averages only those of sharded parameters."""
        import torch

        # The ranks have gradients for the same parameters; see `route`.
        gradients = [p.grad for p in self._scalars if p.grad is not None]
        if gradients:
            together = torch.stack([_at_least_float32(gradient) for gradient in gradients])
            torch.distributed.all_reduce(together)
            for gradient, total in zip(gradients, together / self._world_size, strict=True):
                gradient.copy_(total)

    def _forgets(self, unit: torch.nn.Module, given: object) -> None:
        """Before the first backward of a window, clear gradients of gathered parameters. A backward in a validation leaves them, and FSDP
        does not know of it."""
        if not self._in_window:
            for parameter in unit.parameters():
                if not is_sharded(parameter) and parameter.ndim:
                    parameter.grad = None

    def _runs(self, number: int, unit: torch.nn.Module, given: object) -> None:
        self._ran.append(number)

    def route(self) -> int:
        # If ranks run different layers, FSDP mixes shards of different parameters, without an error.
        ran, self._ran = self._ran, []
        return hash((*ran, -1, *(p.grad is not None for p in self._watched))) & (2**62 - 1)

    def reduction_dtype(self, gradient: torch.dtype) -> torch.dtype:
        import torch

        return getattr(torch, _DTYPES[self._summed]) if self._summed else gradient

    def grad_norm(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        import torch

        from fabricate.strategies.sharding import is_sharded

        every = [cast("Any", p.grad) for p in parameters if p.grad is not None]
        gradients = [gradient for gradient in every if is_sharded(gradient)]
        square = self._square([g for g in gradients if self.tp == 1 or not self._is_divided(g)])
        if self.tp > 1:  # gradients that are the same on all `tp` ranks count once
            divided = self._square([g for g in gradients if self._is_divided(g)])
            torch.distributed.all_reduce(divided, group=self._ways.get_group())
            square = square + divided
        torch.distributed.all_reduce(square, group=self._over.get_group())
        for scalar in every if len(gradients) < len(every) else ():
            square = square + (0 if is_sharded(scalar) else _at_least_float32(scalar.detach()).square())
        return square.sqrt()

    def _square(self, gradients: Sequence[Any]) -> torch.Tensor:
        """The squared norm of this rank's shards."""
        import torch

        with torch.no_grad():
            local = [g.to_local() for g in gradients]
        return torch.nn.utils.get_total_norm(local).to(self._device).square()

    def _is_divided(self, tensor: Any) -> bool:
        """Whether `tensor` is divided by `tp`, and not only into shards."""
        names = tensor.device_mesh.mesh_dim_names
        return "tp" in names and tensor.placements[names.index("tp")].is_shard()

    def local_part(self, tensor: torch.Tensor) -> Strategy.Part:
        part = super().local_part(tensor)
        if self.tp > 1 and not part.replicated and "tp" not in cast("Any", tensor).device_mesh.mesh_dim_names:
            # All ranks that divide layers hold the same shard of a parameter that is not divided.
            part.copy, part.copies = part.copy * self.tp + self._ways.get_local_rank(), part.copies * self.tp
        return part

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        here: Any = tensor.to(self._device)
        if self.tp == 1 or not is_sharded(tensor) or not self._is_divided(tensor):  # buffers are not sharded
            return super().gather(here)
        # Undo one cut after the other, the last one first, because torch warns if both are undone at once.
        import torch
        from torch.distributed.tensor import DTensor, Shard

        cut, whole = here.placements[-1], here
        shape = [n // self.tp if dimension == cut.dim else n for dimension, n in enumerate(here.shape)]
        for mesh, placement, size in ((self._over, Shard(0), shape), (self._ways, cut, list(here.shape))):
            stride = [math.prod(size[n + 1 :]) for n in range(len(size))]
            local = whole.to_local() if whole is here else whole
            whole = DTensor.from_local(
                local, mesh, [placement], run_check=False, shape=torch.Size(size), stride=tuple(stride)
            ).full_tensor()
        return cast("torch.Tensor", whole.detach())

    def communication_seconds(self, model: torch.nn.Module) -> float | None:
        return self._communication.per_update() if self._device.type == "cpu" else None

    def after_evaluation(self, model: torch.nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for unit in model.modules():  # without a backward, units that are not freed after forward would stay gathered
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def describe(self) -> dict[str, str]:
        units = f"units by wrap={self.wrap!r}" if self._units is None else f"{len(self._units)} units"
        shards = self._shards(self._world_size)
        over, copies = (
            f"over {shards} ranks" if shards > 1 else "whole on each rank",
            self._world_size // shards // self.tp,
        )
        layers = str(self._division or f"divided over {self.tp} successive ranks, as the model's tp_plan says")
        return {
            **({"layers": layers} if self.tp > 1 else {}),
            "shards": f"{units} and the rest of the module, {over}" + (f", in {copies} copies" if copies > 1 else ""),
            "gathered as": _DTYPES[self._gathered] if self._gathered else "they are",
            "gradients": f"averaged {f'in {_DTYPES[self._summed]}' if self._summed else 'as they are'}, "
            + ("once per update" if self.accumulate == "whole" else "per micro-batch"),
            "after forward": "units are freed" if self.reshard_after_forward else "units stay gathered",
            "activations": "recomputed in backward, unit by unit"
            if self.activation_checkpointing
            else "kept for backward",
            "offload": "shards and the update in host memory" if self.offload else "none",
        }


def _mesh(device_type: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """The mesh of all ranks with these dimensions, created once per process group. All ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    meshes = _meshes.setdefault(torch.distributed.group.WORLD, {})
    if (device_type, sizes, names) not in meshes:
        meshes[device_type, sizes, names] = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    return meshes[device_type, sizes, names]


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as float32 if its dtype is smaller, so that sums over ranks are not rounded to 16 bits; float64 stays."""
    import torch

    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _refuse_hooks(module: torch.nn.Module) -> None:
    """Raise `ConfigurationError` for hooks on gradients, which FSDP would not call: it replaces parameters and sets gradients itself."""
    registers = {
        "register_hook": "_backward_hooks",
        "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
    }
    for register, hooks in registers.items():
        if hooked := [name for name, parameter in module.named_parameters() if getattr(parameter, hooks)]:
            raise ConfigurationError(
                f"strategy='fsdp' would not call the hooks on the gradients of {', '.join(hooked[:4])} ({register}): change gradients in "
                "on_before_step(self), or use strategy='ddp'"
            )
