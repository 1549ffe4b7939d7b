"""The Accelerator of a run: a subclass of Accelerate's class whose methods return what is true for this run.

Owns: the state that an Accelerate user expects under a strategy (`distributed_type`, plugins, `sync_gradients`), the methods whose results
depend on the strategy or on what the rank is doing, and the errors of methods that the loop replaces. docs/accelerator.md, written by
`python -m campaigns.accelerator`, lists every public name. Must not know: hooks, the loop, checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import xxhash
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, gather_object, recursively_apply, release_memory

from fabricate.distributed.group import Group
from fabricate.errors import FabricateError
from fabricate.module import TrainModule
from fabricate.precisions.base import Precision
from fabricate.strategies.base import Strategy
from fabricate.strategies.sharding import is_sharded

_LAUNCHED = ("ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_CLIPPING", "FSDP_")
"""Variables of `accelerate launch` that Accelerate's plugins would read; fabricate has read them already."""
_REDUCTIONS = ("sum", "mean", "max", "none")
_PREPARED = (
    "the fit prepares the module, its optimizers and its schedules. Make a further model an attribute of the TrainModule; of "
    "your own objects, only a DataLoader can be prepared"
)
_SAVES = "trainer.save(path) and Trainer(run_dir=, save_every=) save everything, and fit(resume=) restores it"
_RANKS = (
    "fabricate sets no parallelism_config; use process_index and num_processes for the rank and the number of ranks"
)


@dataclass(slots=True)
class Moment:
    """What this rank is doing, as far as methods of the Accelerator depend on it. The engine, the loop and evaluations set the fields."""

    building: bool = False
    """Whether the strategy is preparing the model or the optimizers, or trackers are being started."""
    forward: bool = False
    """Whether a step of the module is running."""
    rows: int | None = None
    """The rows of the current micro-batch: 0 for a stand-in, None if there is no micro-batch or its rows cannot be counted."""
    uneven: bool = False
    """Whether an evaluation is running its batches; ranks have unequal numbers of batches."""
    gradients_final: bool = False
    """Whether the gradients are complete and the optimizer has not applied them yet."""
    skipped: bool = False
    """Whether the last update was skipped."""
    trial: bool = False
    """Whether validation is tried before training; its results do not count."""
    detached: bool = False
    """Whether a step passed a tensor that requires a gradient to `gather` or `reduce`; the tensors that these return have none."""


class _Replaced:
    """A method of Accelerator that the loop replaces: the call raises an error with what to use instead. While a strategy prepares, it is
    Accelerate's method."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, accelerator: Any, owner: type) -> Callable[..., Any]:
        if accelerator is not None and accelerator._moment.building:
            method: Callable[..., Any] = getattr(super(owner, accelerator), self._name)
            return method

        def refuse(*args: object, **kwargs: object) -> NoReturn:
            raise FabricateError(f"trainer.accelerator.{self._name}: {self._instead}")

        return refuse


class _NotHere(FabricateError, AttributeError):
    """An error that makes `hasattr` return False and `getattr` return its default."""


class _ReplacedValue:
    """A property whose value would not describe the run: reading it raises an error with what to use instead."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, accelerator: Any, owner: type) -> Any:
        if accelerator is None:
            return self
        raise _NotHere(f"trainer.accelerator.{self._name}: {self._instead}")

    def __set__(self, accelerator: Any, value: object) -> None:
        if "_accumulation" in vars(accelerator):  # otherwise Accelerate's constructor is setting it
            raise _NotHere(f"trainer.accelerator.{self._name}: {self._instead}")


class Silent:
    """A substitute for a tracking library's object where nothing is tracked: every attribute and every call returns this object."""

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Silent:
        return self

    def __getitem__(self, key: Any) -> Silent:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class RunAccelerator(Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """`trainer.accelerator`. All ranks call the methods that communicate; if their calls differ, these raise `FabricateError`. Methods
    whose result would be wrong or partial raise it too, with what to use instead."""

    def __init__(
        self, group: Group, strategy: Strategy, precision: Precision, *, tracked: bool, **arguments: Any
    ) -> None:
        """tracked: whether the run has trackers. arguments: arguments for `accelerate.Accelerator`, to which those of the strategy are
        added. Removes environment variables, which the caller restores."""
        self._group, self._strategy, self._precision, self._tracked = group, strategy, precision, tracked
        self._moment = Moment()
        self._model: torch.nn.Module | None = None
        self._root: Any = None
        for name in [name for name in os.environ if name.startswith(_LAUNCHED)]:
            del os.environ[name]
        of_strategy = strategy.accelerator_arguments()
        handlers = [*of_strategy.pop("kwargs_handlers", ()), *arguments.pop("kwargs_handlers", ())]
        # Set after the constructor: on a CPU, it would ignore the FSDP plugin; and it would pass the DeepSpeed plugin
        # to transformers, which would then load weights differently.
        fsdp, deepspeed = of_strategy.pop("fsdp_plugin", None), of_strategy.pop("deepspeed_plugin", None)
        super().__init__(**arguments, **of_strategy, kwargs_handlers=handlers)
        self._accumulation = super().gradient_accumulation_steps
        if dist.is_initialized() and (fsdp or deepspeed) is not None:
            kind = DistributedType.FSDP if fsdp is not None else DistributedType.DEEPSPEED
            self.state.distributed_type = PartialState().distributed_type = kind
        if fsdp is not None:
            self.state.fsdp_plugin = fsdp
        if deepspeed is not None:
            self.state.deepspeed_plugins = deepspeed
            self.deepspeed_config = deepspeed.deepspeed_config
            deepspeed.set_mixed_precision(precision.mixed_precision)

    # -- for the engine -----------------------------------------------------------------------------------------------------

    @property
    def moment(self) -> Moment:
        """What this rank is doing; callers set the fields."""
        return self._moment

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """A context in which a strategy prepares: the methods that the loop replaces are Accelerate's own inside."""
        self._moment.building = True
        try:
            yield
        finally:
            self._moment.building = False

    def knows(self, model: torch.nn.Module, root: torch.nn.Module) -> None:
        """Store `model`, which the loop runs, and `root`, which is inside `model` and holds the user's module."""
        self._model, self._root = model, root

    # -- meeting the other ranks ------------------------------------------------------------------------------------------

    def _meet(self, method: str, *given: Any) -> None:
        """Wait until every rank has called `method` with the same `given` (JSON); raise `FabricateError` if the calls differ. All ranks."""
        if self._group.world_size == 1:
            return
        if self._moment.uneven:
            raise FabricateError(
                f"trainer.accelerator.{method} in a step of an evaluation: ranks have unequal numbers of batches and would wait "
                "for each other. Return the values from the step or pass them to self.log: fabricate reduces them over the "
                f"ranks. If you need the tensors of all ranks, keep them in the step and call {method} in on_eval_end"
            )
        mine = [method, *given]
        digest = xxhash.xxh3_64_intdigest(json.dumps(mine).encode()) >> 1
        most, least = self._group.agree([digest, -digest])
        if most != -least:
            everyone = self._group.gather_json(mine)
            other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
            raise FabricateError(
                f"trainer.accelerator: rank 0 calls {_call(everyone[0])} and rank {other} {_call(everyone[other])}; every rank has to "
                "call the same method with tensors of one shape and dtype (pad_across_processes makes shapes equal)"
            )

    def _check_whole(self, method: str, data: Any) -> list[str]:
        """Raise `FabricateError` for a tensor that is only a part, or that is on another kind of device. Returns the shapes and dtypes."""
        shapes: list[str] = []
        several = self._group.world_size > 1

        def check(tensor: torch.Tensor) -> torch.Tensor:
            if is_sharded(tensor) or not self._strategy.local_part(tensor).replicated:
                raise FabricateError(
                    f"trainer.accelerator.{method}: under strategy={self._strategy.name!r}, each rank holds only a part of this "
                    "tensor; get_state_dict(module) returns whole weights"
                )
            if several and tensor.device.type != self.device.type:
                raise FabricateError(
                    f"trainer.accelerator.{method}: the tensor is on {tensor.device}, but ranks exchange tensors on "
                    f"{self.device}; call tensor.to(trainer.accelerator.device) first"
                )
            shapes.append(f"{tuple(tensor.shape)} {tensor.dtype}")
            if tensor.requires_grad and torch.is_grad_enabled() and method in ("gather", "reduce"):
                self._moment.detached |= self._moment.forward
            return tensor

        recursively_apply(check, data, error_on_other_type=True)
        return shapes

    def gather(self, tensor: Any) -> Any:
        """The tensors of all ranks, joined in dimension 0 in the order of the ranks, without gradient. All ranks, with the same shape."""
        self._meet("gather", *self._check_whole("gather", tensor))
        return super().gather(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or maximum of each element over the ranks. All ranks, with the same shape."""
        if reduction not in _REDUCTIONS:
            raise FabricateError(f"trainer.accelerator.reduce: reduction={reduction!r}: give {', '.join(_REDUCTIONS)}")
        self._meet("reduce", reduction, *self._check_whole("reduce", tensor))
        return tensor if reduction == "none" else super().reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """`tensor`, padded in `dim` to the greatest length on any rank. All ranks."""
        dims = [text.count(",") for text in self._check_whole("pad_across_processes", tensor)]
        self._meet("pad_across_processes", dim, *dims)
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The rows of all ranks, each row once and without the results of stand-ins. Ranks may have unequal numbers of rows. Objects that
        are not tensors are given as a list with one object per row. All ranks."""
        if self.num_processes == 1 or self.gradient_state.in_dataloader:  # inside a DataLoader that the user prepared
            return super().gather_for_metrics(input_data, use_gather_object)
        self._meet("gather_for_metrics")
        first = self._group.rank % self._strategy.ranks_per_row(self._group.world_size) == 0
        counts = first and self._moment.rows != 0
        with contextlib.suppress(TypeError):
            if not use_gather_object:
                return recursively_apply(
                    lambda tensor: self._gather_rows(tensor, counts), input_data, error_on_other_type=True
                )
        if not isinstance(input_data, list | tuple):
            raise FabricateError(
                f"trainer.accelerator.gather_for_metrics: {type(input_data).__name__} holds objects that are not tensors; give "
                "tensors, or a list with one object for each row"
            )
        return gather_object(list(input_data) if counts else [])

    def _gather_rows(self, tensor: torch.Tensor, counts: bool) -> torch.Tensor:
        self._check_whole("gather_for_metrics", tensor)
        mine = tensor.detach() if tensor.ndim else tensor.detach()[None]
        mine = mine if counts else mine[:0]
        shapes = self._group.gather_json([*mine.shape, str(mine.dtype)])
        if any(shape[1:] != shapes[0][1:] for shape in shapes):
            raise FabricateError(
                f"trainer.accelerator.gather_for_metrics: shapes differ between ranks in more than the number of rows: {shapes}; "
                "pad_across_processes(tensor, dim=1) makes them equal"
            )
        longest = max(shape[0] for shape in shapes)
        padded = mine.new_zeros((longest, *mine.shape[1:]))
        padded[: len(mine)] = mine
        pieces = super().gather(padded).split(longest) if longest else [mine] * len(shapes)
        return torch.cat([piece[: shape[0]] for piece, shape in zip(pieces, shapes, strict=True)])

    def wait_for_everyone(self) -> None:
        """Wait until every rank has called this. All ranks."""
        self._meet("wait_for_everyone")

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs the block, then the others. All ranks."""
        yield from self._first("main_process_first", self.is_main_process)

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first rank of each node runs the block, then the others. All ranks."""
        yield from self._first("local_main_process_first", self.is_local_main_process)

    def _first(self, method: str, first: bool) -> Iterator[None]:
        if not first:
            self._meet(method)
        yield
        if first:
            self._meet(method)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's share of `inputs`, which are not changed."""
        with super().split_between_processes(_copied(inputs), apply_padding) as share:
            yield share

    # -- weights ----------------------------------------------------------------------------------------------------------

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The module that the user wrote."""
        if isinstance(model, TrainModule):
            return model
        if self._root is not None and (model is self._model or model is self._root):
            return self._root.module
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """`state_dict()` of a module of the fit, with whole weights in the dtype in which they are trained. If the strategy shards
        parameters, all ranks call this outside the forward, and it returns copies in host memory; "fsdp" and "zero3" return them on rank 0
        only, and an empty mapping on the other ranks, as Accelerate does."""
        model = self.unwrap_model(model) if unwrap else model
        if not self._strategy.shards_parameters:
            whole: dict[str, Any] = model.state_dict()
            return whole
        if self._moment.forward:
            raise FabricateError(
                "trainer.accelerator.get_state_dict: it cannot run within a step, in which the strategy gathers layers; call it "
                "in a hook, for instance on_step"
            )
        state = model.state_dict(keep_vars=True)
        self._meet("get_state_dict", *state)
        keep = self.is_main_process or not self._strategy.lockstep
        copies: dict[int, torch.Tensor] = {}
        for tensor in (value for value in state.values() if isinstance(value, torch.Tensor)):
            if id(tensor) not in copies:
                gathered = self._strategy.gather(tensor)
                copies[id(tensor)] = gathered.to("cpu", copy=True) if keep else gathered.new_empty(0)
        return {name: copies.get(id(value), value) for name, value in state.items()} if keep else {}

    def save_model(self, model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write the result of `get_state_dict` as safetensors. When this returns on any rank, the files are complete. All ranks."""
        if os.path.isfile(save_directory):
            raise FabricateError(f"trainer.accelerator.save_model: {save_directory} is a file; give a folder")
        super().save_model(model, save_directory, *args, **kwargs)
        self._meet("save_model", str(save_directory))

    # -- gradients and the update -----------------------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """The planned number of micro-batches of one update; the last window of an epoch may have fewer."""
        steps: int = self._accumulation
        return steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        raise FabricateError(
            "trainer.accelerator.gradient_accumulation_steps cannot be set; use Trainer(gradient_accumulation_steps=)"
        )

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch (or the previous one, between two micro-batches) is the last of its update."""
        synchronises: bool = self.gradient_state.sync_gradients
        return synchronises

    @sync_gradients.setter
    def sync_gradients(self, synchronises: bool) -> None:
        raise FabricateError("trainer.accelerator.sync_gradients cannot be set; the loop sets it")

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update was skipped (fp16 overflow, nonfinite="skip")."""
        return self._moment.skipped

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the gradients of `parameters` in on_before_step. Returns their norm before clipping. All ranks."""
        parameters = self._editable("clip_grad_norm_", "Trainer(max_grad_norm=)", parameters)
        if norm_type != 2:
            raise FabricateError(
                f"trainer.accelerator.clip_grad_norm_: norm_type={norm_type!r}: strategies compute only the 2-norm over all "
                "ranks; leave norm_type out"
            )
        norm = self._strategy.grad_norm(parameters)
        self._strategy.clip(parameters, float(max_norm), norm)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp the gradients of `parameters` in on_before_step. All ranks."""
        parameters = self._editable("clip_grad_value_", "Trainer(max_grad_value=)", parameters)
        self._strategy.clip_by_value(parameters, float(clip_value))

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing in on_before_step, where gradients are unscaled already; raise `FabricateError` elsewhere."""
        self._editable("unscale_gradients", "on_before_step", ())

    def _editable(self, method: str, instead: str, parameters: Any) -> list[Any]:
        if not self._strategy.exposes_gradients:
            raise FabricateError(
                f"trainer.accelerator.{method}: strategy={self._strategy.name!r} does not expose gradients and does its own "
                "clipping; use Trainer(max_grad_norm=)"
            )
        if not self._moment.gradients_final:
            raise FabricateError(
                f"trainer.accelerator.{method}: gradients are complete in on_before_step only; call it there, or use {instead}"
            )
        return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """A context with the precision of the steps; with `AutocastKwargs(enabled=False)`, one without autocast."""
        context = self._precision.forward_context(self.device)
        if autocast_handler is not None and not autocast_handler.enabled:
            context = torch.autocast(self.device.type, enabled=False)
        with context or contextlib.nullcontext():
            yield

    # -- objects and trackers -----------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """The user's own DataLoaders, divided over the ranks by Accelerate. (The strategy prepares the model.)"""
        if self._moment.building:
            return super().prepare(*args, device_placement=device_placement)
        if not args or not all(isinstance(each, torch.utils.data.DataLoader) for each in args):
            raise FabricateError(f"trainer.accelerator.prepare: {_PREPARED}")
        places = device_placement or [None] * len(args)
        prepared = tuple(self.prepare_data_loader(each, place) for each, place in zip(args, places, strict=True))
        for loader in prepared:
            loader._is_accelerate_prepared = True
        return prepared if len(prepared) > 1 else prepared[0]

    def free_memory(self, *objects: Any) -> list[Any]:
        """Release `objects` and unused memory; objects that the fit uses stay."""
        released: list[Any] = release_memory(*objects)
        return released

    def clear(self, *objects: Any) -> list[Any]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Send `values` to the trackers of this fit, from rank 0; not while validation is tried before training."""
        self._check_trackers("log", "; self.log(name, value) goes to metrics.jsonl too")
        if not self._moment.trial:
            super().log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker `name` on rank 0. On other ranks, and while validation is tried before training, an object that does nothing."""
        self._check_trackers("get_tracker", "")
        tracker = super().get_tracker(name, unwrap)
        return Silent() if self._moment.trial else tracker

    def _check_trackers(self, method: str, also: str) -> None:
        if not self._tracked:
            raise FabricateError(
                f"trainer.accelerator.{method}: this run has no trackers; name them in Trainer(trackers=[...]), and fit starts "
                f"them{also}"
            )

    init_trackers = _Replaced(
        "name the trackers in Trainer(trackers=[...]); the fit starts them, with the plan as their configuration"
    )
    end_training = _Replaced("the fit ends its trackers; trainer.stop(reason) ends the fit at the next update")

    # -- what the loop replaces -----------------------------------------------------------------------------------------------

    prepare_model = _Replaced(_PREPARED)
    prepare_optimizer = _Replaced(_PREPARED)
    prepare_scheduler = _Replaced(_PREPARED)
    backward = _Replaced(
        "return the loss from training_step; the loop runs backward, weighted for the whole global batch"
    )
    lomo_backward = _Replaced(
        "return the loss from training_step; optimizers that update inside backward are not supported"
    )
    accumulate = _Replaced("use Trainer(gradient_accumulation_steps=) or global_batch_size=; the loop runs the window")
    no_sync = _Replaced("the loop averages gradients over the ranks once per update, in the last micro-batch")
    trigger_sync_in_backward = _Replaced(
        "the loop averages gradients over the ranks once per update, in the last micro-batch"
    )
    join_uneven_inputs = _Replaced(
        "not needed: every rank runs the same number of micro-batches, with stand-ins that weigh nothing"
    )
    save_state = _Replaced(_SAVES)
    load_state = _Replaced(_SAVES)
    register_for_checkpointing = _Replaced(
        f"{_SAVES}; state of your own goes through on_save(state) and on_load(state)"
    )
    register_save_state_pre_hook = _Replaced("implement on_save(state), which runs in every save")
    register_load_state_pre_hook = _Replaced("implement on_load(state), which runs when a checkpoint is restored")
    deepspeed_ulysses_dl_adapter = _Replaced(
        "sequence parallelism is not supported; strategy='fsdp:tp=N' splits layers over N ranks"
    )
    tensor_parallel_rank = _ReplacedValue(f"{_RANKS}; under 'fsdp:tp=N' it is process_index % N")
    pipeline_parallel_rank = _ReplacedValue(
        "pipeline parallelism is not supported; strategy='fsdp:tp=N' splits layers over N ranks"
    )
    context_parallel_rank = _ReplacedValue(
        "context parallelism is not supported; strategy='fsdp:tp=N' splits layers over N ranks"
    )
    data_parallel_rank = _ReplacedValue(f"{_RANKS}; parameter.device_mesh of a sharded parameter has the rest")
    data_parallel_shard_rank = _ReplacedValue(f"{_RANKS}; parameter.device_mesh of a sharded parameter has the rest")
    deepspeed_engine_wrapped = _ReplacedValue("the strategy drives DeepSpeed's engine; hooks see every update")
    step = _ReplacedValue("trainer.step counts updates, trainer.progress.micro_step micro-batches")


def _call(call: list[Any]) -> str:
    return f"{call[0]}({', '.join(str(given) for given in call[1:4])}{', ...' if len(call) > 4 else ''})"


def _copied(inputs: Any) -> Any:
    """`inputs` with copies of its mappings, because Accelerate writes the shares into the mapping that it is given."""
    return {key: _copied(value) for key, value in inputs.items()} if isinstance(inputs, dict) else inputs
