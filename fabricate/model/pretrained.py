"""transformers' `from_pretrained` inside `configure_model`: the model is built on the meta device, its weights are read later.

While `configure_model` runs, `PreTrainedModel.from_pretrained` returns a model without weights and records where each tensor is in the
safetensors files; `fabricate.model.building` then reads this rank's part of each. If transformers would load other values (another format,
converted or changed weights), `NotDeferred` is raised, and the caller builds with real tensors. Must not know: strategies, ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
# With these arguments, the files do not hold the model's values, or transformers or Accelerate places the model.
_OTHERS = (
    "state_dict",
    "device_map",
    "quantization_config",
    "load_in_8bit",
    "load_in_4bit",
    "variant",
    "gguf_file",
    "key_mapping",
    "distributed_config",
    "device_mesh",
    "tp_plan",
    "tp_size",
    "ignore_mismatched_sizes",
    "use_kernels",
    "kernel_config",
)


class NotDeferred(RuntimeError):
    """Each rank's part of the weights cannot be read later; the model has to be loaded whole."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    path: str
    name: str
    shape: tuple[int, ...]

    def read(self, start: int, count: int) -> torch.Tensor:
        """`count` elements of the flattened tensor, from element `start` on: 1-D, on the CPU, in the dtype of the file."""
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            row = math.prod(self.shape[1:])
            first, last = start // row, -(-(start + count) // row)
            rows: torch.Tensor = file.get_slice(self.name)[first:last] if self.shape else file.get_tensor(self.name)
            return rows.reshape(-1)[start - first * row :][:count]


@dataclass
class Loads:
    """The models that `from_pretrained` returned while it was deferred."""

    models: list[Any] = field(default_factory=list)
    tensors: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """By id: each of their parameters and buffers, with its storage. The tensors are kept so that no id is reused."""
    stored: dict[int, Stored] = field(default_factory=dict)
    """By id: the place in a file of each tensor that a file holds."""

    def check(self, module: torch.nn.Module) -> None:
        """Raise `NotDeferred` if layers were added to a loaded model or used outside of it, or a weight was replaced: their values are then
        not those of the files and rules."""
        inside = {id(child) for model in self.models for child in model.modules()}
        kept = [model for model in module.modules() if any(model is loaded for loaded in self.models)]
        ruled = {id(child) for model in kept for child in model.modules()}
        for name, child in module.named_modules():
            for tensor in _on_meta(child):
                if id(tensor) in self.tensors and _storage(tensor) != self.tensors[id(tensor)][1]:
                    raise NotDeferred(f"a weight of {name} was given new data after from_pretrained")
                if id(tensor) in self.stored:
                    continue
                home = ruled if id(tensor) in self.tensors else inside
                if (id(child) in home) != (home is ruled):
                    raise NotDeferred(f"{name or 'the module'} holds a part of a loaded model, or it was put into one")


def _on_meta(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of `layer` itself that are on the meta device."""
    for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
        if tensor.is_meta:
            yield tensor


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


class _Untouched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that raises `NotDeferred` if an operation writes to a loaded tensor: on the meta device, the values would be lost."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.storages and func._schema.is_mutable:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, torch.Tensor) and _storage(value) in self.storages:
                    raise NotDeferred(f"weights were changed after from_pretrained, by {func}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def deferred() -> Iterator[Loads]:
    """A context in which `from_pretrained` returns models on the meta device. It has no effect if transformers is not imported."""
    loads = Loads()
    transformers = sys.modules.get("transformers")
    if transformers is None:
        yield loads
        return
    kind: Any = transformers.PreTrainedModel
    original = vars(kind)["from_pretrained"]
    mode = _Untouched()

    def from_pretrained(cls: Any, name: Any, *args: Any, **options: Any) -> Any:
        wants_info = options.pop("output_loading_info", False)
        if other := [option for option in _OTHERS if options.get(option)]:
            raise NotDeferred(f"from_pretrained({', '.join(other)}=...)")
        with torch.device("cpu"):  # the model is built on meta nevertheless, because of device_map
            load = original.__get__(None, cls)
            model, info = load(name, *args, device_map="meta", output_loading_info=True, **options)
        _remember(loads, model, set(info["missing_keys"]), _files(str(name), options))
        mode.storages |= {storage for _, storage in loads.tensors.values()}
        return (model, info) if wants_info else model

    kind.from_pretrained = classmethod(from_pretrained)
    try:
        with mode:
            yield loads
    finally:
        kind.from_pretrained = original


def _files(name: str, options: dict[str, Any]) -> dict[str, Stored]:
    """The tensors in the safetensors files of a local folder or a model of the hub, by name."""
    from safetensors import safe_open
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file

    hub = {key: options[key] for key in _HUB if key in options} | {"_raise_exceptions_for_missing_entries": False}
    paths = [cached_file(name, SAFE_WEIGHTS_NAME, **hub)]
    if paths == [None]:
        index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **hub)
        if index is None:
            raise NotDeferred(f"{name} has no safetensors")
        parts = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [cached_file(name, part, **hub) for part in parts]
    files = {}
    for path in paths:
        with safe_open(str(path), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                files[key] = Stored(str(path), key, tuple(file.get_slice(key).get_shape()))
    return files


def _remember(loads: Loads, model: Any, missing: set[str], files: dict[str, Stored]) -> None:
    """Record where in `files` each tensor of `model` is. Raises `NotDeferred` if one is neither there nor among those that transformers
    reports as `missing`."""
    if _conversions(model):
        raise NotDeferred(f"transformers converts the weights of {type(model).__name__}")
    prefix = f"{model.base_model_prefix}."
    persistent = set(model.state_dict())
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    stored: dict[int, Stored] = {}
    for name, tensor in named:
        in_file = files.get(name) or files.get(prefix + name) or files.get(name.removeprefix(prefix))
        if in_file is not None and in_file.shape == tuple(tensor.shape):
            stored.setdefault(id(tensor), in_file)
    for name, tensor in named:
        if name in persistent and id(tensor) not in stored and name not in missing:
            raise NotDeferred(f"{name} is not in the files under this name and shape")
    loads.models.append(model)
    loads.tensors |= {id(tensor): (tensor, _storage(tensor)) for _, tensor in named}
    loads.stored |= stored


def _conversions(model: Any) -> bool:
    """Whether transformers converts or renames the weights of this architecture when it loads them."""
    from transformers import conversion_mapping

    find: Any = conversion_mapping.get_model_conversion_mapping
    return bool(find(model, add_legacy=False))
