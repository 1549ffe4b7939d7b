"""ZeRO-3: parameters too are in shards, gathered layer by layer while they are used."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fabricate import ConfigurationError, Strategy
from fabricate_deepspeed import library, shards, swapped
from fabricate_deepspeed.strategy import ZeRO

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclasses.dataclass(eq=False)
class ZeRO3(ZeRO):
    """DeepSpeed ZeRO stage 3: optimizer state, gradients and parameters in shards over the ranks.

    offload_param: "cpu" keeps the shards of parameters in host memory. offload_optimizer: also "nvme", which keeps optimizer
    state and master weights in files below `nvme_path`, a folder on a local disk.
    """

    offload_param: str | None = None
    nvme_path: str | None = None
    name: ClassVar[str] = "zero3"
    compiles: ClassVar[bool] = False
    stage: ClassVar[int] = 3
    lockstep: ClassVar[bool] = True
    _to_disk: ClassVar[tuple[tuple[str, str], ...]] = (("offload_optimizer", "nvme"),)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.offload_optimizer == "nvme") is (self.nvme_path is None):
            raise ConfigurationError(
                f"zero3: offload_optimizer={self.offload_optimizer!r} with nvme_path={self.nvme_path!r}: offload to files needs "
                "both, offload_optimizer=nvme and nvme_path=FOLDER"
            )
        self._files: swapped.Files | None = None
        self._folder = ""
        self._converted: set[torch.nn.Parameter] = set()
        self._generating: list[torch.nn.Module] = []
        """The models of transformers whose `generate` was replaced."""

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        prepared = super().prepare(accelerator, root, module)
        if accelerator.num_processes > 1:
            self._generate_in_lockstep(module)
        return prepared

    def _generate_in_lockstep(self, module: torch.nn.Module) -> None:
        """Let `generate` of transformers' models compute until all ranks are done: parameters are gathered by all ranks together.
        transformers does this by itself only where it has made the DeepSpeed configuration."""
        for layer in module.modules():
            if hasattr(layer, "generation_config") and hasattr(layer, "generate") and "generate" not in vars(layer):
                vars(layer)["generate"] = functools.partial(layer.generate, synced_gpus=True)
                self._generating.append(layer)

    def _offloads_gradients(self) -> bool:
        return bool(self._engine.optimizer.offload_optimizer)

    def _offload(self) -> dict[str, str | None]:
        return {**super()._offload(), "offload_param": self.offload_param}

    def settle(self, settled: Strategy.Settled) -> None:
        super().settle(settled)
        if self.nvme_path is not None:
            self._configuration.ask_to_swap(self.nvme_path)

    def prepare_optimizers(
        self, model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> torch.nn.Module:
        path = self._configuration.swaps_to()
        if path is not None:
            self._folder = swapped.make_folder("zero3: offload_optimizer=nvme", path)
            swapped.check_machine("zero3: offload_optimizer=nvme")
            self._configuration.swap_to(self._folder)
        engine = super().prepare_optimizers(model, optimizers)
        if path is not None:
            self._files = swapped.Files(engine.optimizer)
            self._files.keep_gradients()
        return engine

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._files is not None:
            for number, own in enumerate(self._slices.values()):
                if own.files is not None and number not in self._ran:
                    self._files.clear_gradient(own.flat, own.offset, own.room)
        return super().step(optimizer)

    def release(self, module: torch.nn.Module, clean: bool) -> bool:
        whole = super().release(module, clean)
        for layer in self._generating:
            del vars(layer)["generate"]
        self._generating = []
        self._files = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""
        return whole

    def _describe_shards(self) -> dict[str, str]:
        return {"parameters, gradients and optimizer state": "in shards"}

    @functools.cached_property
    def _cut(self) -> Callable[[list[torch.nn.Parameter]], None]:
        """DeepSpeed's function that leaves each rank its part of rank 0's values. All ranks."""
        zero = self._configuration.content["zero_optimization"]
        content = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        with library.environment(), library.refusals(self._configuration.where):
            zero_init = self._deepspeed.zero.Init(module=torch.nn.Module(), config_dict_or_path=content)
        cut: Callable[[list[torch.nn.Parameter]], None] = zero_init._convert_to_zero_parameters
        return cut

    def _place(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            self._cut([parameter])
            # Shows the shape, by which `configure_optimizers` may group, and takes no memory.
            parameter.data = parameter.data.new_zeros(()).expand(parameter.ds_shape)

    def _for_evaluation(self) -> torch.nn.Module:
        self._convert(None)
        content = {**self._configuration.content, "fp16": {}, "bf16": {}}
        content.pop("optimizer", None)
        content.pop("scheduler", None)
        content["zero_optimization"] = {**content["zero_optimization"], "offload_optimizer": None}
        self._engine = self._initialize(content)
        evaluated: torch.nn.Module = self._engine
        return evaluated

    def reuse(self, accelerator: Accelerator, model: torch.nn.Module, root: torch.nn.Module) -> torch.nn.Module:
        return self.prepare(accelerator, root, root.module)

    def _convert(self, dtype: torch.dtype | None) -> None:
        self._converted = {p for p in self._root.parameters() if dtype is not None and p.dtype == torch.float32}
        for parameter in self._converted:
            parameter.ds_tensor.data = parameter.ds_tensor.data.to(dtype)
        for parameter in self._root.parameters():  # empty, as DeepSpeed keeps them between uses
            parameter.data = parameter.data.new_empty(0, dtype=parameter.ds_tensor.dtype)

    def _give_back(self, clean: bool) -> bool:
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        for parameter in filter(shards.is_partitioned, self._root.parameters()):
            own = self._slices.get(id(parameter))
            if own is not None:
                parameter.ds_tensor.data = own.whole(own.flat).narrow(0, own.offset, parameter.ds_tensor.ds_numel)
                if own.files is not None:
                    parameter.ds_tensor.data = parameter.ds_tensor.data.clone()  # the file will be deleted
            if parameter in self._converted:
                parameter.ds_tensor.data = parameter.ds_tensor.data.float()
            parameter.data = parameter.data.new_empty(0, dtype=parameter.ds_tensor.dtype)
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE  # after a failure some may still be gathered
            parameter.ds_active_sub_modules.clear()
        for submodule in self._root.modules():
            # DeepSpeed's kind of dict gathers a parameter that is read. After a failure in a forward, other ranks are gone.
            parameters = submodule._parameters
            submodule._parameters = {name: dict.__getitem__(parameters, name) for name in parameters}
            if not getattr(submodule, "_external_params", True):
                # DeepSpeed adds them again. Its next start takes the repr of the module, and that of an EmbeddingBag has all attributes.
                for name in ("_external_params", "ds_external_parameters", "all_parameters"):
                    delattr(submodule, name)
        self.__dict__.pop("_cut", None)
        parameter_offload.FWD_MODULE_STACK.clear()  # it would keep the module alive
        return False

    @contextlib.contextmanager
    def changing(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        used = [p for p in parameters if shards.is_partitioned(p)]
        empty = [p for p in used if p.ds_status.name == "NOT_AVAILABLE"]
        with self._uses.paused():
            if empty:
                empty[0].all_gather(param_list=empty)
        try:
            with super().changing(used):
                yield
        finally:
            with self._uses.paused():
                if empty:
                    empty[0].partition(param_list=empty)

    def _current(self, parameter: Any) -> torch.Tensor:
        start, count = shards.own_range(parameter)
        part: torch.Tensor = parameter.ds_tensor.detach().flatten().narrow(0, 0, count)
        if parameter.ds_status.name == "AVAILABLE":
            part.copy_(parameter.detach().flatten().narrow(0, start, count))
        return part

    def local_part(self, tensor: torch.Tensor) -> Strategy.Part:
        self._uses.settle()
        if not shards.is_partitioned(tensor):
            return super().local_part(tensor)
        own, shape = self._slices.get(id(tensor)), tuple(tensor.ds_shape)
        if own is not None:
            return self.Part(own.of(own.flat), own.start, shape, False)
        start, count = shards.own_range(tensor)
        return self.Part(tensor.ds_tensor.detach().flatten().narrow(0, 0, count), start, shape, False)

    @property
    def _offloaded(self) -> Any:
        """DeepSpeed's object that gathers and partitions parameters."""
        return getattr(self._engine.optimizer, "parameter_offload", self._engine.optimizer)

    def _gather_persistent(self) -> None:
        """Gather the small parameters that DeepSpeed keeps whole between updates."""
        if persistent := self._offloaded.persistent_parameters:
            persistent[0].all_gather(persistent)

    def after_evaluation(self, model: torch.nn.Module) -> None:
        self._route = 0  # if ranks run different layers in an evaluation, DeepSpeed itself fails
        # DeepSpeed has begun to gather the first layers for the next forward, and hooks could not change them.
        if self._engine is not None:
            with self._uses.paused():
                for parameter in self._uses.used:  # small ones, which are whole: on_eval_start may have changed them
                    self._current(parameter)
            self._offloaded.partition_all_parameters()
            self._gather_persistent()

    def after_load(self) -> None:
        if self._engine is None:
            return
        zero = self._engine.optimizer
        # Parameters that are whole now, such as those that DeepSpeed keeps for a later layer of its trace, would keep their old values.
        self._offloaded.partition_all_parameters()
        for number in range(len(zero.fp16_groups) if self._slices else 0):
            if self._files is not None:
                self._files.renew(number)
            else:
                zero._reassign_or_swap_out_partitioned_parameters(number)
        self._gather_persistent()

    def _scaled_norm(self) -> torch.Tensor:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        norm: torch.Tensor = combine_grad_norm_groups(self._engine.optimizer._get_norm_groups())
        return norm

    def _discard(self) -> None:
        zero = self._engine.optimizer
        zero._pre_step()
        zero.zero_grad()
        zero.averaged_gradients = {}
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()

    def _forget_unused(self) -> None:
        zero = self._engine.optimizer
        zero.grad_partitions_flat_buffer.zero_()
        if zero.offload_optimizer:
            for flat in zero.fp32_partitioned_groups_flat:
                if flat.grad is not None:  # None if the group is in a file
                    flat.grad.zero_()
