"""A model larger than the device: its layers are on devices, in host memory and on disk, and are loaded one after the other (Accelerate's
big-model inference). Must not know: other strategies, ranks, checkpoints."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fabricate.errors import ConfigurationError
from fabricate.strategies.base import Strategy
from fabricate.strategies.offloaded import (
    Outside,
    few_of,
    found_outside,
    is_outside,
    moved_to,
    put_outside,
    size_of,
    where,
)
from fabricate.strategies.quantised import EVERY_KIND, quantised_weights

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


@dataclasses.dataclass(eq=False)
class DeviceMap(Strategy):
    """One process, and a model that need not fit on its device. A layer in host memory or on disk is loaded when it runs and freed
    afterwards. A model that transformers loaded with a `device_map` keeps its placement.

    max_memory: the most memory that weights may take on each device: "0:20GB+1:20GB+cpu:60GB", where a number is a GPU. Weights that fit
    nowhere are written to disk. Unset: the free memory of each device.
    offload_folder: the folder for weights on disk, in a subfolder that is removed with the module. Required if weights are written to disk.

    Trained parameters stay on the device if they fit there together with the largest layer; a fit raises an error if some do not.
    """

    max_memory: str | None = None
    offload_folder: str | None = None
    name: ClassVar[str] = "device_map"
    shards_parameters: ClassVar[bool] = True
    compiles: ClassVar[bool] = False
    takes_offloaded: ClassVar[bool] = True
    distributed_types: ClassVar[tuple[str, ...]] = ("NO",)
    quantised: ClassVar[tuple[str, ...]] = EVERY_KIND

    def __post_init__(self) -> None:
        self._limits = _limits(self.max_memory)
        self._outside: dict[int, Outside] = {}
        """The weights outside of the module's own memory, by the id of their parameter or buffer."""
        self._placed = ""

    def check(self, world_size: int, device: torch.device) -> Iterable[str]:
        if world_size > 1:
            yield (
                f"strategy={self.name!r} spreads a model over the devices of one process, but {world_size} processes were "
                "started; start one process, or use strategy='fsdp:offload=cpu', which shards the model over the ranks"
            )
        main = _key(device)
        if self._limits and main not in self._limits:
            yield (
                f"{self.name}: max_memory={self.max_memory!r} does not name {main}, on which this process computes ({device}); add "
                f"{main}:SIZE" + ("" if main == "cpu" else ", or compute on the CPU with ACCELERATE_TORCH_DEVICE=cpu")
            )

    def prepare(self, accelerator: Accelerator, root: torch.nn.Module, module: torch.nn.Module) -> torch.nn.Module:
        main = _key(accelerator.device)
        if any(hasattr(child, "_hf_hook") for child in module.modules()):
            _place_rest(module, accelerator.device)
            how = "as transformers placed it"
        else:
            how = f"max_memory={self.max_memory}" if self.max_memory else "by the memory that is free"
            placed = _device_map(module, main, self._budget(main))
            self._dispatch(module, main, placed)
        self._adopt(module, how)
        if self._outside:
            print(f"device map: {self._placed}", flush=True)
        return root

    def reuse(self, accelerator: Accelerator, model: torch.nn.Module, root: torch.nn.Module) -> torch.nn.Module:
        module: Any = root.module
        self._adopt(module, "as an earlier run placed it")
        return model

    def prepare_optimizers(
        self, model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> torch.nn.Module:
        return self.trained_changed(model)

    def trained_changed(self, model: torch.nn.Module) -> torch.nn.Module:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) in self._outside]
        if trained:
            names = [name.removeprefix("module.") for name, _ in trained]
            size = size_of(sum(p.nbytes for _, p in trained))
            raise ConfigurationError(
                f"strategy={self.name!r}: the trainable parameters {few_of(names)} ({size}) are not on the device that computes, "
                "so no update would reach them. Freeze them and train adapters, give more max_memory to the device that "
                "computes, or use strategy='fsdp:offload=cpu'"
            )
        return model

    def release(self, module: torch.nn.Module, clean: bool) -> bool:
        return not self._outside

    def local_part(self, tensor: torch.Tensor) -> Strategy.Part:
        return self._outside.get(id(tensor)) or super().local_part(tensor)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        outside = self._outside.get(id(tensor))
        return super().gather(tensor) if outside is None else outside.memory

    def keeps_written(self, parameter: torch.nn.Parameter) -> bool:
        return id(parameter) not in self._outside

    def memory_per_rank(self, module: torch.nn.Module, whole: Mapping[str, int], world_size: int) -> dict[str, int]:
        held = dict(whole)
        held["parameters"] = whole.get("parameters", 0) - sum(each.nbytes for each in self._outside.values())
        if hosted := sum(each.nbytes for each in self._outside.values() if each.place == "cpu"):
            held["host parameters"] = hosted
        return held

    def describe(self) -> dict[str, str]:
        return {"device map": self._placed or "made when the module is built"}

    # -- placing ----------------------------------------------------------------------------------------------------------

    def _budget(self, main: int | str) -> dict[int | str, int]:
        """The bytes for weights on each device: `max_memory`, or the free memory if that is unset."""
        from accelerate.utils import get_max_memory

        if self._limits:
            return dict(self._limits)
        free = get_max_memory()
        return {"cpu": free["cpu"]} if main == "cpu" else free

    def _dispatch(self, module: torch.nn.Module, main: int | str, placed: dict[str, int | str]) -> None:
        """Move every tensor of `module` to its place in `placed`, and let Accelerate load layers when they run."""
        from accelerate import dispatch_model

        folder = self._folder(module, placed)
        hosted = put_outside(module, main, placed, folder)
        skipped = {key for child in module.modules() for key in _listed(child, "_skip_keys_device_placement")}
        with warnings.catch_warnings():
            # The keys of single parameters match no submodule.
            warnings.filterwarnings("ignore", "The following device_map keys do not match")
            dispatch_model(
                module,
                device_map=placed,
                main_device=main,
                state_dict=hosted or None,
                offload_dir=folder,
                skip_keys=sorted(skipped),
                preload_module_classes=_loaded_whole(module),
            )

    def _folder(self, module: torch.nn.Module, placed: Mapping[str, int | str]) -> Path | None:
        """A new folder with room for the weights on disk, which is removed with `module`; None if no weights are written to disk."""
        count = sum(p.nbytes for name, p in module.named_parameters() if where(placed, name) == "disk")
        if not count:
            return None
        if self.offload_folder is None:
            raise ConfigurationError(
                f"strategy={self.name!r}: {size_of(count)} of the weights go to the disk; name a folder, "
                f"'{self.name}:offload_folder=DIR', or give more max_memory"
            )
        try:
            Path(self.offload_folder).mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="device_map-", dir=self.offload_folder))
        except OSError as exc:
            raise ConfigurationError(
                f"{self.name}: offload_folder={self.offload_folder!r}: {exc.strerror}; name a folder that this process can write to"
            ) from exc
        weakref.finalize(module, shutil.rmtree, folder, ignore_errors=True)
        if (free := shutil.disk_usage(folder).free) < count:
            raise ConfigurationError(
                f"{self.name}: offload_folder={self.offload_folder!r} has {size_of(free)} free, but {size_of(count)} of weights "
                "would be written there; name a folder on a larger disk, or give more max_memory"
            )
        return folder

    def _adopt(self, module: torch.nn.Module, how: str) -> None:
        """Find the weights that Accelerate's hooks on `module` load, and describe the placement."""
        self._outside = found_outside(module)
        missing = [name for name, p in module.named_parameters() if p.is_meta and id(p) not in self._outside]
        if missing:
            raise ConfigurationError(
                f"strategy={self.name!r}: {few_of(missing)} are on the meta device, and no file is known to load them from; load "
                "the whole model with from_pretrained(device_map=...), or build all of it without one"
            )
        sizes: dict[str, int] = {}
        for parameter in module.parameters():
            outside = self._outside.get(id(parameter))
            place = str(parameter.device) if outside is None else outside.place
            sizes[place] = sizes.get(place, 0) + parameter.nbytes
        self._placed = ", ".join(f"{place} {size_of(size)}" for place, size in sizes.items()) + f" ({how})"


def _limits(text: str | None) -> dict[int | str, int]:
    """The limits in `max_memory`, in bytes, by device."""
    from accelerate.utils import convert_file_size_to_int

    limits: dict[int | str, int] = {}
    for item in filter(None, (text or "").split("+")):
        device, _, size = item.strip().partition(":")
        try:
            limits[int(device) if device.isdigit() else device] = convert_file_size_to_int(size)
        except ValueError:
            size = ""
        if not size or not (device.isdigit() or device in ("cpu", "mps", "disk")):
            raise ConfigurationError(
                f"device_map: max_memory={text!r}: {item!r} is not a device and a size; write 0:20GB+cpu:60GB, where a number is a GPU"
            )
    return limits


def _key(device: torch.device) -> int | str:
    """Accelerate's name for `device` in a device map."""
    return device.type if device.type in ("cpu", "mps") else device.index or 0


def _listed(module: torch.nn.Module, name: str) -> Iterable[str]:
    value = getattr(module, name, None) or ()
    return (value,) if isinstance(value, str) else value


def _device_map(module: torch.nn.Module, main: int | str, budget: dict[int | str, int]) -> dict[str, int | str]:
    """The place of each part of `module`, by name. Trained parameters are on `main` if they fit there together with the largest layer."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes, get_balanced_memory, get_max_layer_size

    blocks = sorted({type(unit).__name__ for unit in _units(module)})
    largest, names = get_max_layer_size(list(module.named_children()), compute_module_sizes(module), blocks)
    if budget[main] < largest:
        raise ConfigurationError(
            f"device_map: max_memory gives {size_of(budget[main])} to {main}, but {names[0]} alone takes {size_of(largest)} while "
            f"it runs; give {main} more than {size_of(largest)}"
        )
    trained = [p for p in module.parameters() if p.requires_grad]
    needed = sum(p.nbytes for p in trained)
    stays = len(trained) < len(list(module.parameters())) and needed + largest <= budget[main]
    if stays:
        budget = budget | {main: budget[main] - needed}
    balanced = get_balanced_memory(module, max_memory=dict(budget), no_split_module_classes=blocks)
    placed = infer_auto_device_map(module, max_memory=balanced, no_split_module_classes=blocks)
    _refuse_quantised(module, placed, main)
    return dict(_settled(module, placed, main, {id(p) for p in trained} if stays else set()))


def _settled(
    module: torch.nn.Module, placed: Mapping[str, int | str], main: int | str, stay: set[int]
) -> Iterator[tuple[str, int | str]]:
    """`placed`, with all parameters on `main` that have to be there: trained parameters (`stay`, by id), and parameters that are placed
    without a layer, because only layers are loaded when they run."""
    parts = dict(module.named_modules())
    for name, place in placed.items():
        if name and name not in parts:
            yield name, main
        elif not is_outside(place, main) or not any(id(p) in stay for p in parts[name].parameters()):
            yield name, place
        else:
            for inner, layer in parts[name].named_modules(prefix=name):
                own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
                if own:
                    yield inner, main if any(id(tensor) in stay for tensor in own) else place


def _refuse_quantised(module: torch.nn.Module, placed: Mapping[str, int | str], main: int | str) -> None:
    names = [name for name in quantised_weights(module) if is_outside(where(placed, name), main)]
    if names:
        raise ConfigurationError(
            f"strategy='device_map': {few_of(names)} are quantised and do not fit on the device that computes; let transformers "
            "place them, with from_pretrained(device_map=...), or give more max_memory to the device that computes"
        )


def _loaded_whole(module: torch.nn.Module) -> list[str]:
    """The classes whose submodules are loaded all at once, because some compute with the weights of their submodules without running these.
    Classes with trained weights, which stay on the device, are left out."""

    units = _units(module)
    mixed = {type(unit).__name__ for unit in units if len({p.is_meta for p in unit.parameters()}) > 1}
    return sorted({type(unit).__name__ for unit in units} - mixed)


def _units(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The submodules that are not divided: the repeated blocks of `module`, and torch's attention, which computes with the weights of its
    submodules without running these."""
    import torch

    attention = [child for child in module.modules() if isinstance(child, torch.nn.MultiheadAttention)]
    return [block for _, block in Strategy.blocks(module)] + attention


def _place_rest(module: torch.nn.Module, device: torch.device) -> None:
    """Move to `device` the tensors that no hook of Accelerate loads or moves: layers outside of a model that transformers placed, and
    adapters inside it."""
    layers: Iterable[Any] = module.modules()
    for layer in layers:
        for name in getattr(layer, "lora_A", ()):
            if layer.lora_A[name].weight.is_meta:
                _give_values(module, layer, name, device)
        if hasattr(layer, "_hf_hook"):
            continue
        tables: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None and tensor.device.type == "cpu" and device.type != "cpu":
                    table[key] = moved_to(tensor, device)


def _give_values(module: torch.nn.Module, layer: Any, name: str, device: torch.device) -> None:
    """Initialise the adapter `name` of a peft LoRA layer again, on `device`. peft has moved it to the meta device, where the base layer
    seems to be."""
    configurations = (getattr(child, "peft_config", None) for child in module.modules())
    how = next(found[name].init_lora_weights for found in configurations if isinstance(found, dict) and name in found)
    if how not in (True, "gaussian"):
        raise ConfigurationError(
            f"strategy='device_map': init_lora_weights={how!r} needs the weights of the base layers, and some of these layers are "
            "not on the device that computes. Use init_lora_weights=True or 'gaussian', or give more max_memory to the device, "
            "so that these layers fit on it"
        )
    for part in (layer.lora_A, layer.lora_B):
        part[name].to_empty(device=device)
    layer.reset_lora_parameters(name, how)
