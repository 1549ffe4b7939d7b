"""The engine of a fit: opens its Accelerator and its process group, prepares the model, and runs its forward.

Owns: the environment while the Accelerator is built, process groups, device, loss scaling, collectives on control data, and restoring
everything afterwards. Must not know: hooks, data, checkpoints, the loop.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs, send_to_device

from fabricate.data.transfer import Transfer
from fabricate.distributed.accelerator import Moment, RunAccelerator
from fabricate.distributed.devices import KINDS, distributed_type, make_current
from fabricate.distributed.fork import settle_fork
from fabricate.distributed.group import Group, leave_at_exit
from fabricate.distributed.loss_scaling import Scaled, Unscaled
from fabricate.distributed.meeting import interface_towards, open_process_group
from fabricate.distributed.shared_state import SharedState
from fabricate.distributed.trackers import Trackers
from fabricate.errors import ConfigurationError, FabricateError, PluginError, RankError
from fabricate.launch.ranks import Launch
from fabricate.metrics.torchmetrics_objects import move_torchmetrics
from fabricate.model.building import blanks, fill, materialise, pretrained_models, set_modes
from fabricate.model.compiling import Compilation, compiled
from fabricate.module import STEPS, TrainModule, step_function
from fabricate.precisions.base import Precision
from fabricate.registry.validation import ranks_per_row, reasons
from fabricate.strategies.assigning import lay_out
from fabricate.strategies.base import Strategy
from fabricate.strategies.offloaded import refuse_offloaded
from fabricate.strategies.quantised import kept_unpacked, refuse_quantised
from fabricate.strategies.recomputing import recompute_blocks
from fabricate.strategies.sharding import is_sharded, refuse_scripted

T = TypeVar("T")

# Accelerate reads these while it builds an Accelerator, and would act on them without the strategy.
_HIDDEN = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG",
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_DYNAMO_BACKEND",
)
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Hidden as well if the run has no process group, because Accelerate would open one."""
_SYNCHRONISED = contextlib.nullcontext()
_CALL = "call"
"""The name of the step that runs a function; see `Engine.in_forward`."""
_UNUSABLE: tuple[str, int, str, Any, Any] = ("", 0, "", None, None)
"""The mark on a sharded module: strategy, world size, precision, root, prepared model. With this value the module cannot be used again."""


def _own_steps(module: TrainModule) -> dict[str, Any]:
    return {name: vars(module).get(name) for name in STEPS.values()}


class Root(torch.nn.Module):
    """The module that the strategy prepares. Its forward runs the steps of the user's module, so that DDP and FSDP see every use of a
    parameter.

    `config`, `_no_split_modules` and `_tp_plan` are those of the transformers model inside, if there is exactly one: Accelerate and
    transformers look for them on the prepared model.
    """

    def __init__(
        self,
        module: TrainModule,
        context: contextlib.AbstractContextManager[object] | None,
        moment: Moment,
        keeps_casts: bool,
    ) -> None:
        """`keeps_casts`: whether autocast may keep the cast copy of a weight until the forward ends. If parameters are gathered and freed
        one after the other, these copies would add up to the whole model."""
        super().__init__()
        self._keeps_casts = keeps_casts
        self.module = module
        self._context = context
        self._moment = moment
        self.steps: dict[str, Callable[[Any, int], Any]] = {}
        inner = pretrained_models(module)
        if len(inner) == 1:
            self.config = inner[0].config
            self._no_split_modules = getattr(inner[0], "_no_split_modules", None)
            self._tp_plan = getattr(inner[0], "_tp_plan", None)

    def forward(self, stage: str, batch: Any, batch_idx: int) -> Any:
        self._moment.forward = True
        try:
            if self._context is None:
                return self.steps[stage](batch, batch_idx)
            with self._context:
                if not self._keeps_casts:
                    torch.set_autocast_cache_enabled(False)  # the context restores it
                return self.steps[stage](batch, batch_idx)
        finally:
            self._moment.forward = False


class Engine(Group):
    """A context manager that opens the Accelerator with one strategy and one precision. Every rank opens its own."""

    def __init__(
        self,
        launch: Launch,
        strategy: Strategy,
        precision: Precision,
        device: torch.device,
        *,
        log_with: Sequence[Any] = (),
        logging_dir: str | None = None,
        timeout: datetime.timedelta = datetime.timedelta(minutes=30),
        compile: Compilation | None = None,
        accumulation: int = 1,
        recompute: bool = False,
    ) -> None:
        super().__init__(launch.rank, launch.world_size)
        self.launch = launch
        self._timeout = timeout
        self.strategy = strategy
        self.precision = precision
        self._cpu = device.type == "cpu"
        self.in_group = strategy.in_group(launch.world_size)
        self.trackers = Trackers(log_with, logging_dir)
        self.ranks_per_row = ranks_per_row(strategy, launch.world_size)
        """The number of successive ranks that read the same rows: 1 unless ranks share the computation of a layer."""
        self.data_rank = self.rank // self.ranks_per_row
        self.data_world_size = self.world_size // self.ranks_per_row
        self.device = device
        self.scaler: torch.amp.GradScaler | None = None
        self.context: contextlib.AbstractContextManager[object] | None = None
        self._settings = contextlib.ExitStack()
        """Restores the settings of the process that the precision changes."""
        self._module: TrainModule | None = None
        self._own_steps: dict[str, Any] = {}
        """The steps that were assigned to the module before `prepare`; None for methods of its class."""
        """The module that the strategy has prepared; None before `prepare`."""
        self._accumulation = accumulation
        self._compile = compile
        self._recompute = recompute
        self._compiled = contextlib.ExitStack()
        self.notes: list[str] = []
        """Lines for the plan about how the module was prepared."""

    def check(self) -> None:
        """Raise `ConfigurationError` if the strategy, the precision or `compile` cannot run here, before anything is built."""
        problems = [
            *reasons(self.strategy, self.strategy.check(self.world_size, self.device)),
            *reasons(self.precision, self.precision.check(self.device, self.strategy)),
        ]
        if self._compile is not None and not self.strategy.compiles:
            problems.append(
                f"compile= is set, but strategy={self.strategy.name!r} acts inside the forward that would be compiled; leave "
                "compile out, or use strategy='ddp' or 'fsdp'"
            )
        if self.in_group and not KINDS.get(self.device.type, "unknown"):
            problems.append(
                f"strategy={self.strategy.name!r} with {self.launch.world_size} ranks on {self.device.type}: torch has no process "
                "group for this type of device; start one process with strategy='single', or compute on the CPU with "
                "ACCELERATE_TORCH_DEVICE=cpu"
            )
        if problems:
            raise ConfigurationError("; ".join(problems))

    def __enter__(self) -> Engine:
        self.check()
        self._shared_state = SharedState()
        self._shared_state.check(self.launch, self.device, self.precision.mixed_precision, self._accumulation)
        if note := settle_fork(self.device):
            self.notes.append(note)
        make_current(self.device)
        with self._environment():
            if self.in_group:
                self._open_group()
            with self._left_on_failure():
                self._build_accelerator()
                self.join(self._timeout)  # the others notice when this rank fails from here on
                self._verify()
        with self._left_on_failure():
            self.device = self.accelerator.device
            self._settings.enter_context(self.precision.process_context(self.device))
            self._transfer = Transfer(self.device, lambda batch: send_to_device(batch, self.device, non_blocking=True))
            self.context = self.precision.forward_context(self.device)
            self.scaler = None if self.strategy.scales_loss else self.precision.loss_scaler(self.device)
            self.accelerator.scaler = self.scaler
            self.accelerator.native_amp = self.context is not None
            self.scaling: Scaled | Unscaled = (
                Unscaled(self.strategy) if self.scaler is None else Scaled(self.strategy, self.scaler)
            )
            self._verify_precision()
        return self

    def _build_accelerator(self) -> None:
        """Set aside the state that Accelerate shares with code outside the run, and build the `RunAccelerator`."""
        self._shared_state.set_aside(distributed_type(self.device, self.in_group))
        try:
            self.accelerator = RunAccelerator(
                self,
                self.strategy,
                self.precision,
                tracked=bool(self.trackers),
                cpu=self._cpu,
                mixed_precision=self.precision.mixed_precision,
                gradient_accumulation_steps=self._accumulation,
                log_with=self.trackers.named or None,
                project_dir=self.trackers.directory,
                kwargs_handlers=[InitProcessGroupKwargs(timeout=self._timeout)],
            )
        except (ValueError, ImportError, RuntimeError) as exc:
            raise FabricateError(f"Accelerate could not be set up for strategy {self.strategy.name!r}: {exc}") from exc
        self.moment = self.accelerator.moment
        self._gradient_state = self.accelerator.gradient_state

    def __exit__(self, *exc: object) -> None:
        """Release the module from the strategy and restore Accelerate's shared state. The process group stays open for the next fit of this
        process."""
        failure = exc[1] if any(exc) else None
        self.leave(failure if isinstance(failure, BaseException) else None)
        self._compiled.close()
        try:
            if self._module is not None and self.strategy.release(self._module, clean=not any(exc)):
                self._module.__dict__.pop("_sharded", None)
        finally:
            self._settings.close()
            self._shared_state.restore()

    def _open_group(self) -> None:
        """Open torch's default process group, or keep the one that an earlier fit or the user's code opened. All ranks."""
        if not dist.is_initialized():
            open_process_group(self.rank, self.world_size, self.device, self._timeout)
            leave_at_exit()
        elif dist.get_world_size() != self.world_size:
            raise RankError(
                f"rank {self.rank} of {self.world_size} was launched, but this process already has a process group of size "
                f"{dist.get_world_size()}, from an earlier fit or opened by the script; start new processes, or a new "
                "notebook kernel"
            )

    @contextlib.contextmanager
    def _left_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as exc:
            self.__exit__(type(exc), exc, exc.__traceback__)
            raise

    def topology(self) -> dict[str, Any]:
        """The world size, strategy, precision and device, as a checkpoint records them."""
        shared = {"ranks_per_row": self.ranks_per_row} if self.ranks_per_row > 1 else {}
        return {
            "world_size": self.world_size,
            **shared,
            "strategy": self.strategy.name,
            "precision": self.precision.name,
            "device": self.device.type,
        }

    def begin_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to sum `tensor` over the ranks, in place, so that each row counts once. Does not wait; the returned function waits and
        returns the sum. `tensor` is on the device. All ranks."""
        sent: Any = dist.all_reduce(tensor, async_op=True) if self.world_size > 1 else None

        def finish() -> torch.Tensor:
            if sent is not None:
                sent.wait()  # on a GPU the stream waits, not this thread
            return tensor if self.ranks_per_row == 1 else tensor.div_(self.ranks_per_row)

        return finish

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        """A context with the environment variables for building the Accelerator. Afterwards os.environ is exactly as before."""
        before = dict(os.environ)
        for name in (*_HIDDEN, *_RANK):
            os.environ.pop(name, None)
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(self.device)  # otherwise Accelerate chooses a device
        if self.in_group:
            launch = self.launch
            places = (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size)
            os.environ.update(launch.environment | {n: str(place) for n, place in zip(_RANK, places, strict=True)})
            # Otherwise Accelerate changes torch's number of threads.
            os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
            master = os.environ.get("MASTER_ADDR")
            if master and self.world_size > launch.local_world_size and "GLOO_SOCKET_IFNAME" not in os.environ:
                interface = interface_towards(master)
                os.environ.update({"GLOO_SOCKET_IFNAME": interface} if interface else {})
        try:
            yield
        finally:
            for name in set(os.environ) - set(before):
                del os.environ[name]
            os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})

    def _verify(self) -> None:
        """Raise an error unless Accelerate built the rank of this launch and the distributed type that the strategy needs."""
        built = self.accelerator
        kind = str(getattr(built.distributed_type, "value", built.distributed_type))
        if built.num_processes != self.world_size or built.process_index != self.rank:
            raise RankError(
                f"rank {self.rank} of {self.world_size} was launched, but Accelerate sees rank {built.process_index} of "
                f"{built.num_processes}: these processes do not know of each other. Start them with torchrun or `fabricate run --nproc`"
            )
        if kind not in self.strategy.distributed_types:
            raise ConfigurationError(
                f"strategy={self.strategy.name!r} needs Accelerate's distributed type {' or '.join(self.strategy.distributed_types)}, but "
                f"Accelerate has set up {kind}. Start as many ranks as this strategy needs, for instance with `fabricate run --nproc`"
            )

    def _verify_precision(self) -> None:
        """Raise `ConfigurationError` unless autocast inside the forward context computes in the dtype of the precision. A precision
        without autocast may declare float64, to which it converts the parameters."""
        with self.context or contextlib.nullcontext():
            on = torch.is_autocast_enabled(self.device.type)
            autocast = str(torch.get_autocast_dtype(self.device.type)).removeprefix("torch.") if on else "float32"
        declared = self.precision.compute_dtype
        if autocast != declared and (on or declared != "float64"):
            raise ConfigurationError(
                f"precision={self.precision.name!r} computes in {declared}, but autocast computes in "
                f"{autocast} on {self.device}; choose another precision, or correct forward_context() of this one"
            )

    # -- building ------------------------------------------------------------------------------------------------------

    def replaced_steps(self) -> list[str]:
        """The steps that were assigned to the module after `prepare`, which runs those from before."""
        now = {} if self._module is None else _own_steps(self._module)
        return [name for name, step in self._own_steps.items() if now[name] is not step]

    def prepare(self, module: TrainModule, stages: Iterable[str], seed: int) -> torch.nn.Module:
        """Place, convert and wrap `module`; returns the callable that runs `(stage, batch, batch_idx)`. All ranks.

        Tensors on the meta device get initial values from `seed`: before the strategy prepares the model if each rank holds all of it, and
        after the strategy has cut it if ranks hold parts."""
        steps = {stage: step_function(module, stage) for stage in stages}
        self.notes.extend(set_modes(module) if "train" in steps else [])
        refuse_quantised(module, self.strategy.name, self.strategy.quantised)
        refuse_offloaded(module, self.strategy)
        if self.strategy.shards_parameters:
            refuse_scripted(module, self.strategy.name)
        self._module, self._own_steps = module, _own_steps(module)
        self._compiled.callback(kept_unpacked(module))
        move_torchmetrics(module, self.device)
        if "_sharded" in module.__dict__ or any(is_sharded(p) for p in module.parameters()):
            return self._reuse(module, steps)
        if not self.strategy.shards_parameters:
            materialise(module, seed)
        self.precision.convert(module)
        self._compile_units(module)
        self.notes.extend(lay_out(module, self.strategy))
        waiting = blanks(module)
        self.root = Root(module, self.context, self.moment, keeps_casts=not self.strategy.shards_parameters)
        self.root.steps = steps
        if self.strategy.shards_parameters:
            object.__setattr__(module, "_sharded", _UNUSABLE)
        with self.opening_groups(), self.accelerator.building():
            model = self.strategy.prepare(self.accelerator, self.root, module)
        if not isinstance(model, torch.nn.Module):
            raise PluginError(
                f"{type(self.strategy).__name__}.prepare returned {type(model).__name__}; return the module that the loop runs"
            )
        self._recompute_blocks(module)
        if waiting:
            fill(module, waiting, seed, self.strategy)
            self.strategy.after_load()
        if self.strategy.shards_parameters:
            mark = (self.strategy.name, self.world_size, self._converts(), self.root, model)
            object.__setattr__(module, "_sharded", mark)
        return self._ready(model)

    def _converts(self) -> str:
        """The name of the precision if it changes layers, else an empty string."""
        return self.precision.name if type(self.precision).convert is not Precision.convert else ""

    def _compile_units(self, module: TrainModule) -> None:
        if self._compile is not None:
            self.notes.append(self._compiled.enter_context(compiled(module, self._compile)))

    def _recompute_blocks(self, module: TrainModule) -> None:
        # A strategy with activation checkpointing recomputes the blocks already.
        if self._recompute and not getattr(self.strategy, "activation_checkpointing", False):
            self._compiled.callback(recompute_blocks(module))

    def _reuse(self, module: TrainModule, steps: dict[str, Callable[[Any, int], Any]]) -> torch.nn.Module:
        """Prepare a module that an earlier fit of this process sharded. Raises `ConfigurationError` unless the strategy, the world size and
        the layers are the same."""
        earlier: tuple[str, int, str, Any, Any] = getattr(module, "_sharded", _UNUSABLE)
        name, world_size, converted, root, model = earlier
        if (name, world_size) != (self.strategy.name, self.world_size):
            raise ConfigurationError(
                f"{type(module).__name__} is sharded already ({f'an earlier fit under {name!r}' if name else 'a tp_plan?'}), but "
                f"strategy={self.strategy.name!r} needs a module with whole parameters: build a new module, or "
                f"{type(module).__name__}.load_from_checkpoint(...)"
            )
        if converted != self._converts():
            raise ConfigurationError(
                f"{type(module).__name__} was prepared for {f'precision={converted!r}' if converted else 'plain layers'} when an "
                f"earlier fit sharded it, and precision={self.precision.name!r} needs other layers: build a new module"
            )
        self._compile_units(module)
        self.root = root
        self.root.steps = steps
        self.root._context, self.root._moment = self.context, self.moment
        with self.opening_groups(), self.accelerator.building():
            model = self.strategy.reuse(self.accelerator, model, root)
        self._recompute_blocks(module)
        return self._ready(model)

    def prepare_optimizers(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Let the strategy prepare the optimizers of a fit. All ranks."""
        if len(optimizers) > 1 and not self.strategy.several_optimizers:
            raise ConfigurationError(
                f"strategy={self.strategy.name!r} trains with one optimizer, but there are {len(optimizers)} "
                f"({', '.join(optimizers)}); put all parameters into the groups of one optimizer, or use strategy='ddp' or 'fsdp'"
            )
        with self.opening_groups(), self.accelerator.building():
            model = self.strategy.prepare_optimizers(self.model, optimizers)
        self._ready(model)

    def trained_changed(self) -> None:
        """Let the strategy adapt to parameters that were frozen or unfrozen. Between updates, all ranks."""
        self._ready(self.strategy.trained_changed(self.model))

    def _ready(self, model: torch.nn.Module) -> torch.nn.Module:
        """Set what the loop runs, and return `model`. If the root is neither wrapped nor hooked, the loop calls the training step
        directly."""
        # Remove Accelerate's own autocast and its cast of every output to fp32: the precision has its own context.
        self.root.__dict__.pop("forward", None)
        self.root.__dict__.pop("_original_forward", None)
        self.model = model
        self.accelerator.knows(model, self.root)
        bare = model is self.root and self.context is None and "train" in self.root.steps
        self.forward: Callable[[Any, int], Any] = functools.partial(model, "train")
        if bare and not (
            model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or model._backward_pre_hooks
        ):
            self.forward = self.root.steps["train"]
        return model

    def evaluate(self, stage: str, batch: Any, batch_idx: int) -> Any:
        """Run one step of an evaluation. The strategy's wrapper is left out, unless its forward has collectives that all ranks run."""
        return (self.model if self.strategy.lockstep else self.root)(stage, batch, batch_idx)

    def in_forward(self, function: Callable[[], T]) -> T:
        """The result of `function()`, called in a forward like that of a step: in the precision, with gathered weights. If the strategy's
        forward has collectives, all ranks call this, and `function` has to run the same layers on each."""
        self.root.steps[_CALL] = lambda batch, batch_idx: function()
        inside = self.moment.forward
        try:
            result: T = self.evaluate(_CALL, None, 0)
            return result
        finally:
            del self.root.steps[_CALL]
            # Otherwise gathered weights may stay in place of the shards, and no save or hook would find the
            # parameters.
            if not inside:
                self.strategy.after_evaluation(self.model)

    # -- one update ----------------------------------------------------------------------------------------------------

    def to_device(self, batch: Any) -> Any:
        """`batch` with its tensors on the device; does not wait for the copies."""
        return batch if self._cpu else self._transfer(batch)

    def gradient_sync(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """The context of one micro-batch. Gradients are averaged over ranks only in the last micro-batch of a window (`is_last`)."""
        self._gradient_state.sync_gradients = is_last
        return _SYNCHRONISED if is_last else self.strategy.no_sync(self.model)

    @property
    def scales_loss(self) -> bool:
        """Whether a loss scale is in use, so that an update may be skipped on overflow."""
        return self.scaler is not None or (
            self.strategy.scales_loss and self.precision.loss_scaler(self.device) is not None
        )

    def scaler_state(self) -> dict[str, Any] | None:
        """The state of the loss scale as JSON values; None without a loss scale."""
        return self.scaler.state_dict() if self.scaler is not None else self.strategy.loss_scale_state()

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that `scaler_state` returned, under this strategy or another."""
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(state))
        else:
            self.strategy.load_loss_scale_state(state)
