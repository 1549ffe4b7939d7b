"""The common part of the three stages of ZeRO: DeepSpeed's engine, controlled by the loop.

The loop decides what an update is: it sets before each micro-batch whether the window ends with it, passes weighted losses to DeepSpeed,
and calls `step` for the update. DeepSpeed clips gradients and scales losses, once per update.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import functools
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from fabricate import ConfigurationError, FabricateError, Strategy
from fabricate_deepspeed import library, shards
from fabricate_deepspeed.configuration import NO_NVME, Configuration
from fabricate_deepspeed.loss_scale import LossScale
from fabricate_deepspeed.optimizers import check_elementwise
from fabricate_deepspeed.uses import Uses

if TYPE_CHECKING:
    from accelerate import Accelerator


_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(eq=False)
class ZeRO(Strategy, abc.ABC):
    """Base of the three stages.

    config: a DeepSpeed JSON file (or its content): its values are used, and every "auto" is filled. offload_optimizer: "cpu" keeps
    optimizer state and master weights in host memory. allow_untested_optimizer: accept an optimizer that is not known to update each
    element independently.
    """

    config: str | Mapping[str, Any] | None = None
    offload_optimizer: str | None = None
    allow_untested_optimizer: bool = False
    stage: ClassVar[int]
    exposes_gradients: ClassVar[bool] = False
    shards_parameters: ClassVar[bool] = True
    several_optimizers: ClassVar[bool] = False
    scales_loss: ClassVar[bool] = True
    skips_nonfinite: ClassVar[bool] = True
    clips: ClassVar[str] = "DeepSpeed"
    distributed_types: ClassVar[tuple[str, ...]] = ("DEEPSPEED",)
    _to_disk: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Options and devices that offload to files."""

    def __post_init__(self) -> None:
        for option, device in self._offload().items():
            if device not in (None, "cpu") and (option, device) not in self._to_disk:
                raise ConfigurationError(
                    f"{self.name}: {option}={device!r}: give 'cpu' or leave it out"
                    + (f"; {NO_NVME}" if device == "nvme" else "")
                )
        self._settled: Strategy.Settled | None = None
        self._engine: Any = None
        self._slices: dict[int, shards.Slice] = {}
        self._groups: list[list[torch.nn.Parameter]] = []
        self._setup = library.Setup()
        self._hooks: list[Any] = []
        self._ran: list[int] = []
        """The numbers of the parameters that had a gradient in this window, in this order."""
        self._route = 0
        self._noted_unused = False
        self._left_over = False
        self._in_backward = False
        self._uses = Uses(self.name, self._take_over)

    def _offload(self) -> dict[str, str | None]:
        return {"offload_optimizer": self.offload_optimizer}

    # -- before anything is built ---------------------------------------------------------------------------------------

    @functools.cached_property
    def _configuration(self) -> Configuration:
        return Configuration(self.stage, self.config)

    def check(self, world_size: int, device: torch.device) -> Iterable[str]:
        yield from super().check(world_size, device)
        if library.missing():
            yield f"strategy={self.name!r} needs DeepSpeed, which is not installed: pip install 'deepspeed>=0.19.8,<0.20'"

    def asks(self) -> Mapping[str, tuple[Any, str]]:
        return dict(self._configuration.asks())

    def settle(self, settled: Strategy.Settled) -> None:
        if settled.precision.name not in ("fp32", "fp16", "bf16"):  # others change layers, which DeepSpeed flattens
            raise ConfigurationError(
                f"strategy={self.name!r} does not compute in precision={settled.precision.name!r}; use 'fp32', 'fp16' or 'bf16'"
            )
        self._settled = settled
        self._configuration.fill(settled, self._offload())

    def memory_per_rank(self, module: torch.nn.Module, whole: Mapping[str, int], world_size: int) -> dict[str, int]:
        """Parameters and gradients in the dtype of the precision, float32 master weights and optimizer state in shards, and one bucket."""
        precision = self._settled.precision.mixed_precision if self._settled is not None else "no"
        width, parameters = (2 if precision in _HALF else 4), list(module.parameters())
        every = sum(math.prod(self.local_part(p).shape) for p in parameters)
        trained = sum(math.prod(self.local_part(p).shape) for p in parameters if p.requires_grad)
        part = 1 / world_size
        held = {"parameters": every * width * (part if self.stage == 3 else 1)}
        if "gradients" in whole:
            held["gradients"] = trained * width * (part if self.stage >= 2 else 1)
            host = "host " if self.offload_optimizer else ""
            # Under stage 3 in float32 the shard of a parameter is its own master.
            masters = self.stage < 3 or width == 2 or bool(host)
            held[f"{host}master weights"] = trained * 4 * part if masters else 0
            held[f"{host}optimizer state"] = whole["optimizer state"] * part
            if self.offload_optimizer == "nvme":
                held |= {"host master weights": 0, "host optimizer state": 0, "host gradients": trained * 4 * part}
                held["host swap buffers"] = self._configuration.swap_buffers(trained * part)
            held["bucket"] = self._configuration.bucket(trained) * width
        return {kind: math.ceil(count) for kind, count in held.items()}

    def describe(self) -> dict[str, str]:
        return self._describe_shards() | self._configuration.describe(self._settled)

    # -- building -------------------------------------------------------------------------------------------------------

    def accelerator_arguments(self) -> dict[str, Any]:
        from accelerate.utils import DeepSpeedPlugin

        # No zero.Init, with which transformers would load weights differently.
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=self._configuration.content, zero3_init_flag=False)}

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        self._device = accelerator.device
        self._deepspeed, self._root = library.load(self._device), root
        if scalars := [name for name, parameter in module.named_parameters() if not parameter.ndim]:
            raise ConfigurationError(
                f"strategy={self.name!r}: DeepSpeed does not support parameters with zero dimensions: {', '.join(scalars)}; give "
                "each the shape (1,), as torch.nn.Parameter(torch.ones(1)), or use strategy='ddp' or 'fsdp'"
            )
        layers = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        if sparse := [name for name, child in module.named_modules() if isinstance(child, layers) and child.sparse]:
            raise ConfigurationError(
                f"strategy={self.name!r}: DeepSpeed cannot add up sparse gradients, those of {', '.join(sparse)}: set "
                "sparse=False in these layers, or use strategy='ddp'"
            )
        self._setup.start(self._device)
        with library.environment():
            self._deepspeed.init_distributed(dist.get_backend())
        trained = sum(math.prod(self.local_part(p).shape) for p in root.parameters() if p.requires_grad)
        self._configuration.fill_sizes(trained, getattr(getattr(root, "config", None), "hidden_size", None))
        accelerator.state.deepspeed_plugin.deepspeed_config.update(copy.deepcopy(self._configuration.content))
        # DeepSpeed wraps the model. Accelerate only registers it, in evaluation mode, so without a second wrapper.
        accelerator.prepare_model(root, device_placement=False, evaluation_mode=True)
        self._give_memory()
        for buffer in root.buffers():
            buffer.data = buffer.data.to(self._device)
            self.broadcast(buffer)
        self._place(root.parameters())
        self._uses.watch(module)
        return root if "train" in root.steps else self._for_evaluation()

    def _give_memory(self) -> None:
        """Replace the tensors on the meta device by real ones, one after another; the values are set later. All ranks."""
        memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the old tensor, so that its id is not reused
        for submodule in self._root.modules():
            for table in (submodule._parameters, submodule._buffers):
                for key, tensor in table.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in memory:
                        fresh = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
                        if isinstance(tensor, torch.nn.Parameter):
                            fresh = torch.nn.Parameter(fresh, tensor.requires_grad)
                            self._place([fresh])
                        memory[id(tensor)] = (tensor, fresh)
                    table[key] = memory[id(tensor)][1]

    def prepare_optimizers(
        self, model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> torch.nn.Module:
        (optimizer,) = optimizers.values()
        check_elementwise(self.name, optimizer, self.allow_untested_optimizer)
        self._configuration.check_optimizer(optimizer)
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._before = {p: (p.dtype, set(vars(p))) for p in self._root.parameters()}
        half = _HALF.get(self._settled.precision.mixed_precision)
        if half is None and self.stage == 3:
            self._check_dtypes()
        masters = {parameter: self.local_part(parameter) for parameter in self._before if half is not None}
        self._convert(half)
        engine = self._initialize(self._configuration.content, optimizer=optimizer)
        self._engine = engine
        if engine.optimizer.optimizer is not optimizer:
            raise ConfigurationError(
                f"strategy={self.name!r}: DeepSpeed replaced {type(optimizer).__name__}; choose another optimizer"
            )
        for number, (parameter, own) in enumerate(shards.slices(engine)):
            self._slices[id(parameter)] = own
            noted = functools.partial(self._ran_backward, number)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(noted))
            if half is not None:  # DeepSpeed made its master weights from rounded weights: replace them
                whole = masters[parameter]
                own.of(own.flat).copy_(whole.values.flatten().narrow(0, own.start - whole.start, own.count))
        self._verify(half or torch.float32)
        self._loss_scale = LossScale(engine.optimizer)
        engine.set_gradient_accumulation_boundary(True)
        return engine  # type: ignore[no-any-return]

    def _check_dtypes(self) -> None:
        """Raise `ConfigurationError` unless the trained parameters have one dtype, which stage 3 needs; DeepSpeed's assertion has no
        message."""
        trained = {
            p.dtype: f"{name} ({str(p.dtype).removeprefix('torch.')})"
            for name, p in self._root.named_parameters()
            if p.requires_grad
        }
        if len(trained) > 1:
            raise ConfigurationError(
                f"strategy={self.name!r}: DeepSpeed trains parameters of one dtype, but {', '.join(trained.values())} differ: "
                "build them in float32, or use strategy='ddp'"
            )

    def _initialize(self, content: Mapping[str, Any], **arguments: Any) -> Any:
        with library.environment(), library.refusals(self._configuration.where):
            engine, *_ = self._deepspeed.initialize(model=self._root, config=dict(content), **arguments)
        return engine

    def _verify(self, dtype: torch.dtype) -> None:
        dtypes = {p.dtype for p in self._root.parameters() if p.requires_grad}
        if dtypes != {dtype}:
            complex_ones = any(each.is_complex for each in dtypes)
            remedy = "use strategy='ddp'" if complex_ones else "build the module's parameters in float32"
            raise FabricateError(
                f"strategy={self.name!r} should train parameters in {dtype} (precision={self._settled.precision.name!r}), but "
                f"DeepSpeed trains {', '.join(map(str, sorted(dtypes, key=str)))}; {remedy}"
            )

    def release(self, module: torch.nn.Module, clean: bool) -> bool:
        whole = self._give_back(clean)
        if self._engine is not None:
            self._engine.destroy()
            self._hooks += [self._engine.module_forward_pre_hook, self._engine.module_forward_post_hook]
        for hook in self._hooks:
            hook.remove()
        self._setup.stop()
        self._engine, self._slices, self._groups, self._hooks = None, {}, [], []
        self._noted_unused = False
        self._uses.forget()
        return whole

    @abc.abstractmethod
    def _place(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give whole parameters rank 0's values, and their place until `prepare_optimizers`. All ranks."""

    @abc.abstractmethod
    def _for_evaluation(self) -> torch.nn.Module:
        """The model to run if nothing is trained."""

    @abc.abstractmethod
    def _convert(self, dtype: torch.dtype | None) -> None:
        """Convert parameters in float32 to `dtype`, in which they are multiplied; None: no conversion."""

    @abc.abstractmethod
    def _give_back(self, clean: bool) -> bool:
        """Restore the parameters' dtypes and remove DeepSpeed's attributes; return whether they are whole on every rank."""

    @abc.abstractmethod
    def _describe_shards(self) -> dict[str, str]:
        """Lines for the plan: what is whole and what is in shards."""

    # -- one update -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _window_goes_on(self) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        return self._window_goes_on()

    def backward(self, loss: torch.Tensor) -> None:
        self._left_over = True
        before = len(self._ran)
        self._in_backward = True
        try:
            self._engine.backward(loss, scale_wrt_gas=False)
        finally:
            self._in_backward = False
        if before and self._offloads_gradients() and self._engine.is_gradient_accumulation_boundary():
            self._refuse_lost(set(self._ran[:before]) - set(self._ran[before:]))

    def _offloads_gradients(self) -> bool:
        """Whether DeepSpeed sums the gradients of a window in host memory and takes from there only those of its last micro-batch."""
        return False

    def _refuse_lost(self, numbers: set[int]) -> None:
        """Refuse parameters whose gradients DeepSpeed would lose: they have one in an earlier micro-batch of the window, but not in the
        last."""
        if numbers:
            raise ConfigurationError(
                f"strategy={self.name!r} with offload_optimizer: {self._names(numbers)} had a gradient in an earlier micro-batch "
                "of this update but none in the last one, so DeepSpeed would lose it. Use every parameter in each micro-batch "
                "(add 0 * its sum), leave out offload_optimizer, or use gradient_accumulation_steps=1"
            )

    def _note_unused(self) -> None:
        """Print a note, once, if trained parameters have no gradient in this update."""
        if not self._noted_unused and (unused := set(range(len(self._slices))).difference(self._ran)):
            self._noted_unused = True
            if dist.get_rank() == 0:
                print(
                    f"note: {self._names(unused)} had no gradient in this update. DeepSpeed takes it as zero, so momentum, Adam's averages "
                    "and weight decay still change these weights, which they do not under 'ddp' or 'fsdp'. If they never have one, freeze "
                    "them with requires_grad_(False) before the fit",
                    file=sys.stderr,
                    flush=True,
                )

    def _names(self, numbers: Collection[int]) -> str:
        """The names of the trained parameters with these numbers, a few of them."""
        ran = [parameter for number, (parameter, _) in enumerate(shards.slices(self._engine)) if number in numbers]
        names = [name for name, own in self._root.module.named_parameters() if any(own is each for each in ran)]
        return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")

    def scale_gradients(self, parameters: Sequence[torch.nn.Parameter], factor: torch.Tensor) -> None:
        self._loss_scale.scale_gradients(factor)

    def grad_norm(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        norm = self._scaled_norm().to(self._device) / self._loss_scale.in_force
        return norm.float()

    def clip(self, parameters: Sequence[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
        """Nothing to do: DeepSpeed clips in its update, to the norm that `settle` configured."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        self._uses.settle()
        self._note_unused()
        with self._uses.paused():
            self._engine.step()
        self._loss_scale.renew()
        self._left_over = False
        applied: bool = self._engine.was_step_applied()
        if not applied and self._settled.nonfinite == "stop" and not self._settled.scales_loss:
            raise FabricateError(
                "the gradient of this update is not finite, so DeepSpeed did not apply it; the last checkpoint was saved before "
                "this update. Lower the learning rate, clip with max_grad_norm=, or skip such updates with nonfinite='skip'"
            )
        return applied

    def clear_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if self._left_over:  # `step` was not called: DeepSpeed would add the next window to this one
            self._discard()
            self._loss_scale.renew()
            self._left_over = False
        self._forget_unused()
        self._route = hash(tuple(self._ran)) & (2**62 - 1)
        self._ran = []

    @abc.abstractmethod
    def _scaled_norm(self) -> torch.Tensor:
        """Norm of the global gradient, still multiplied by the loss scale; not finite if a gradient is not."""

    @abc.abstractmethod
    def _discard(self) -> None:
        """Discard the gradients of a window that is not applied."""

    @abc.abstractmethod
    def _forget_unused(self) -> None:
        """After an update, clear the gradients that would count again for parameters that the next window does not use."""

    def _ran_backward(self, number: int, parameter: torch.nn.Parameter) -> None:
        if not self._in_backward:
            raise ConfigurationError(
                f"strategy={self.name!r}: a step or a hook calls backward() itself, and DeepSpeed would add these gradients to "
                "those of the next update. Use torch.autograd.grad(loss, inputs), which does not write parameter.grad, or "
                "strategy='ddp'"
            )
        self._ran.append(number)

    def route(self) -> int:
        # With unequal routes, gradients of different parameters would be added, without an error.
        return self._route

    # -- weights that hooks change --------------------------------------------------------------------------------------

    def during_hook(self, hook: str) -> AbstractContextManager[object] | None:
        # These hooks have a forward or a save inside, or may run on one rank only.
        left_out = ("train_step", "eval_step", "write_checkpoint", "on_exception", "on_teardown")
        return None if hook in left_out else self._uses.during(hook)

    def keeps_written(self, parameter: torch.nn.Parameter) -> bool:
        # Master weights overwrite trained parameters; stage 3 frees gathered ones.
        return self.stage < 3 and not parameter.requires_grad

    @contextlib.contextmanager
    def changing(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        used = list(parameters)
        try:
            yield
        finally:
            with self._uses.paused():
                for parameter in used:
                    self._current(parameter)
            self._uses.add(used)

    def _take_over(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Copy values that were changed in `parameters`, equally on every rank, to the master weights of this rank's parts."""
        for parameter in parameters:
            current, own = self._current(parameter), self._slices.get(id(parameter))
            if own is None or not own.count:  # frozen, or entirely on other ranks
                continue
            master = own.of(own.flat)
            current = current.narrow(0, own.start if self.stage < 3 else 0, own.count).to(master.device)
            if current.dtype != master.dtype:  # keep masters that round to the same value
                current = torch.where(current == master.to(current.dtype), master, current.to(master.dtype))
            master.copy_(current)

    @abc.abstractmethod
    def _current(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The value that a hook left in `parameter`, flat, in the memory that the next forward reads: the whole, or this rank's range of a
        partitioned parameter."""

    # -- checkpoints ----------------------------------------------------------------------------------------------------

    def loss_scale_state(self) -> dict[str, Any] | None:
        return self._loss_scale.state() if self._engine is not None else None

    def load_loss_scale_state(self, state: Mapping[str, Any]) -> None:
        self._loss_scale.load(state)

    def local_part(self, tensor: torch.Tensor) -> Strategy.Part:
        self._uses.settle()
        own = self._slices.get(id(tensor))
        if own is None:
            return super().local_part(tensor)
        return self.Part(own.of(own.flat), own.start, tuple(tensor.shape), False)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        part = self.local_part(tensor)
        if part.replicated:
            return part.values
        whole = torch.zeros(math.prod(part.shape), dtype=part.values.dtype, device=self._device)
        whole.narrow(0, part.start, part.values.numel()).copy_(part.values)
        dist.all_reduce(whole)  # every element is on one rank, and zero on the others
        return whole.reshape(part.shape)

    def optimizer_groups(self, optimizer: torch.optim.Optimizer) -> list[list[torch.nn.Parameter]]:
        return self._groups or super().optimizer_groups(optimizer)

    def optimizer_state(self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> dict[str, Any]:
        own = self._slices.get(id(parameter))
        if own is None:  # frozen
            return {}
        shape = self.local_part(parameter).shape
        return {
            key: self.Part(own.of(value), own.start, shape, False) if own.is_like(value) else value
            for key, value in optimizer.state.get(own.flat, {}).items()
        }

    def restore_optimizer_state(
        self, optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> dict[str, Strategy.Part]:
        own = self._slices.get(id(parameter))
        if own is None:
            return {}
        shape = self.local_part(parameter).shape
        rooms = shards.restore_optimizer_state(optimizer, own, state)
        return {key: self.Part(values, own.start, shape, False) for key, values in rooms.items()}
