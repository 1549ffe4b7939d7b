"""Offloaded weights: they stay in host memory or in files until their layers run, and hooks of Accelerate load and free them.

Owns: moving weights there, and reading and writing them there, so that checkpoints and exports find their values. Must not know: how the
place of a weight is chosen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricate.errors import ConfigurationError
from fabricate.strategies.sharding import Part

if TYPE_CHECKING:
    import torch

    from fabricate.strategies.base import Strategy


def refuse_offloaded(module: torch.nn.Module, strategy: Strategy) -> None:
    """Raise `ConfigurationError` for weights that Accelerate loads when their layers run, if `strategy` needs all weights on a device."""
    if strategy.takes_offloaded or not any(hasattr(child, "_hf_hook") for child in module.modules()):
        return
    names = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if names:
        raise ConfigurationError(
            f"strategy={strategy.name!r} needs all weights on a device, but a device_map placed {few_of(names)} in host memory or "
            "on disk, from where they are loaded when their layer runs. Use strategy='device_map', or load the model without a "
            "device_map"
        )


def few_of(names: Sequence[str]) -> str:
    """The first two of `names` and the number of the others, as text."""
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def size_of(count: float) -> str:
    """A number of bytes as text, in the units of `max_memory`: "1.5 GB"."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def is_outside(place: int | str, main: int | str) -> bool:
    """Whether weights at `place` have to be loaded before their layer can run on `main`."""
    return place == "disk" or (place == "cpu" and main not in ("cpu", "mps"))


def where(placed: Mapping[str, int | str], name: str) -> int | str:
    """The place of the tensor `name`: the value in `placed` of the longest key that is a prefix of `name`."""
    while name not in placed:
        name = name.rpartition(".")[0]
    return placed[name]


class Outside(Part):
    """The whole of an offloaded weight, as a part. If the weight is in a file, each access to `memory` reads a new copy."""

    def __init__(self, tensor: torch.Tensor, weights: Any, name: str) -> None:
        """`tensor`: the placeholder on the meta device. `weights`: the mapping of Accelerate's hook, which holds the weight under
        `name`."""
        from accelerate.utils import PrefixedDataset

        while isinstance(weights, PrefixedDataset):
            weights, name = weights.dataset, weights.prefix + name
        self.tensor, self._weights, self.name = tensor, weights, name
        self.start, self.shape, self.replicated, self.copy, self.copies = 0, tuple(tensor.shape), True, 0, 1

    @property
    def memory(self) -> torch.Tensor:  # type: ignore[override]
        """The values, in host memory."""
        value: torch.Tensor = self._weights[self.name]
        return value.detach().to(self.tensor.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def count(self) -> int:
        return self.tensor.numel()

    @property
    def in_place(self) -> bool:
        return self.place == "cpu"

    @property
    def values(self) -> torch.Tensor:
        return self.memory

    @property
    def nbytes(self) -> int:
        """The bytes of the values."""
        return self.tensor.nbytes

    @property
    def place(self) -> str:
        """ "cpu" or "disk"."""
        return "cpu" if self.name in getattr(self._weights, "state_dict", self._weights) else "disk"

    def write(self, values: torch.Tensor) -> None:
        import torch

        if self.place == "cpu":
            memory = self._weights[self.name]
        elif (source := self._weights.index[self.name].get("safetensors_file")) is not None:
            raise ConfigurationError(
                f"{self.name} was placed by from_pretrained(device_map=...) and is read from {source} whenever its layer runs, so "
                "no other values can be loaded into it. Leave device_map out of from_pretrained, so that strategy='device_map' "
                "places the model"
            )
        else:
            memory = _mapped(Path(self._weights.save_folder) / f"{self.name}.dat", self.tensor)
        with torch.no_grad():
            memory.copy_(values.reshape(memory.shape))

    def over(self, memory: torch.Tensor) -> Part:
        return Part(memory, 0, self.shape, replicated=True)


def _mapped(path: Path, like: torch.Tensor) -> torch.Tensor:
    """The file as a tensor of the shape and dtype of `like`; writing to the tensor writes to the file."""
    import torch

    flat = torch.from_file(str(path), shared=True, size=like.numel(), dtype=like.dtype)
    return flat.reshape(like.shape)


def put_outside(
    module: torch.nn.Module, main: int | str, placed: Mapping[str, int | str], folder: Path | None
) -> dict[str, torch.Tensor]:
    """Move each tensor of `module` to its place in `placed`, with its values if it has any. An offloaded parameter is replaced by a
    placeholder on the meta device; its values are written to `folder`, or are among the returned tensors in host memory, by name. Only one
    tensor at a time exists twice."""
    import torch

    hosted: dict[str, torch.Tensor] = {}
    index: dict[str, dict[str, Any]] = {}
    done: dict[int, tuple[str, torch.Tensor]] = {}
    """The first name and the new tensor, by the id of the old tensor, which a tied tensor has a second time."""
    for name, table, key, tensor in list(_tensors(module)):
        place = where(placed, name)
        outside = isinstance(tensor, torch.nn.Parameter) and is_outside(place, main)
        tied = done.get(id(tensor))
        if outside and place == "disk":
            assert folder is not None
            index[name] = _write(folder, name, tensor, None if tied is None else tied[0])
        elif outside:
            hosted[name] = hosted[tied[0]] if tied is not None else _on(tensor, torch.device("cpu"))
        if tied is None:
            device = torch.device("meta" if outside else main if is_outside(place, main) else place)
            tied = done[id(tensor)] = (name, moved_to(tensor, device))
        table[key] = tied[1]
    if folder is not None:
        (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    return hosted


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Each parameter and buffer under each of its names, with the table and the key under which its layer holds it."""
    for path, layer in module.named_modules(remove_duplicate=False):
        tables: tuple[dict[str, Any], ...] = (layer._parameters, layer._buffers)
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None:
                    yield (f"{path}.{key}" if path else key), table, key, tensor


def _write(folder: Path, name: str, tensor: torch.Tensor, tied: str | None) -> dict[str, Any]:
    """Write a file for `tensor` in Accelerate's format, with its values if it has any; for a tied tensor, a link to the file of the other
    name. Returns its entry for the index."""
    path = folder / f"{name}.dat"
    if tied is not None:
        path.symlink_to(f"{tied}.dat")
    else:
        try:
            # Reserve the whole size now, because later writes through memory could not report a full disk.
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, tensor.nbytes))
        except OSError as exc:
            raise ConfigurationError(
                f"device_map: offload_folder={str(folder.parent)!r}: no room for {name}, {size_of(tensor.nbytes)} ({exc.strerror}); "
                "name a folder on a larger disk, or give more max_memory"
            ) from exc
        if not tensor.is_meta:
            _mapped(path, tensor).copy_(tensor.detach())
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like `tensor` on `device`, with its values if it has any."""
    import torch

    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)


def moved_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`; the same object if it is there already."""
    import torch

    if tensor.device == device:
        return tensor
    moved = _on(tensor, device)
    return torch.nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else moved


def found_outside(module: torch.nn.Module) -> dict[int, Outside]:
    """The weights that hooks of Accelerate on `module` load, by the ids of their placeholders."""
    from accelerate.hooks import SequentialHook

    outside: dict[int, Outside] = {}
    for layer in module.modules():
        hook: Any = getattr(layer, "_hf_hook", None)
        hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
        loading = [each for each in hooks if getattr(each, "offload", False)]
        if not loading:
            continue
        if not isinstance(hooks[-1], _StandIns):
            hooks = (*hooks, _StandIns(layer, loading))
            setattr(layer, "_hf_hook", SequentialHook(*hooks))  # noqa: B010 - not a field of torch's
        for name, weights, tensor in hooks[-1].loaded:
            outside.setdefault(id(tensor), Outside(tensor, weights, name))
    return outside


class _StandIns:
    """A hook for Accelerate that is called after the hooks that load: when the layer has run, it restores the placeholders. Accelerate
    would create new parameters each time, which code that remembers a parameter would not recognise."""

    no_grad = False

    def __init__(self, layer: torch.nn.Module, loading: list[Any]) -> None:
        from accelerate.utils import named_module_tensors

        self.loaded: list[tuple[str, Any, torch.Tensor]] = []
        """The name of each weight, the mapping of the hook that holds it under this name, and its placeholder."""
        self._places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for hook in loading:
            options = {"include_buffers": hook.offload_buffers, "recurse": hook.place_submodules}
            for name, tensor in named_module_tensors(layer, remove_non_persistent=True, **options):
                self.loaded.append((name, hook.weights_map, tensor))
                path, _, key = name.rpartition(".")
                owner = layer.get_submodule(path)
                self._places.append((owner._parameters if key in owner._parameters else owner._buffers, key, tensor))

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    detach_hook = init_hook

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        for table, key, tensor in self._places:
            table[key] = tensor
        return output
