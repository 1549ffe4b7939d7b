"""Support for running `configure_model` a second time, with real tensors, after it ran on the meta device: detects values that were lost
there, and restores the module.

Must not know: the sources of values.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_OF_TRANSFORMERS = frozenset({"__init__", "post_init", "init_weights", "_init_weights"})


class Before:
    """A copy of the attributes of a module and its submodules, to restore them later."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._of: list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]] = []
        for child in module.modules():
            held = [value for value in vars(child).values() if type(value) in (dict, list, set)]
            self._of.append((vars(child), dict(vars(child)), [(value, value.copy()) for value in held]))

    def restore(self) -> None:
        """Undo all changes to attributes since. Containers stay the same objects, because other objects may refer to them."""
        for attributes, were, held in self._of:
            attributes.clear()
            attributes.update(were)
            for value, copied in held:
                value.clear()
                value.extend(copied) if isinstance(value, list) else value.update(copied)


class Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records which tensors on the meta device are given values, because these values are lost. Values do not count if a
    rule that runs again gives them: those of a layer's `reset_parameters` for its own tensors, and those of a transformers model."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written: dict[int, str] = {}
        """By storage, the operation that wrote to it."""
        self._made: dict[int, tuple[str, list[_Maker]]] = {}
        """By storage, the operation that made it with values, and the layers in whose `__init__` or `reset_parameters` that was."""
        self._kept: list[torch.Tensor] = []
        """All tensors, so that no address of a storage is used again."""
        self._init_functions = _InitFunctions(self)

    def __enter__(self) -> Origins:
        self._init_functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._init_functions.__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema, kwargs = func._schema, kwargs or {}
        if schema.is_mutable:
            names = [argument.name for argument in schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in _meta_tensors(given.get(argument.name)):
                        self.write(tensor, str(func), inspect.currentframe())
        results = func(*args, **kwargs)
        before = {_storage(tensor) for tensor in _meta_tensors((args, kwargs))}
        for tensor in _meta_tensors(results):
            if _storage(tensor) not in before:
                self._make(tensor, func, args)
        return results

    def write(self, tensor: torch.Tensor, operation: str, frame: FrameType | None) -> None:
        """Record that `operation`, called by `frame`, writes to `tensor`."""
        if not _by_rule(_storage(tensor), frame):
            self._kept.append(tensor)
            self._written[_storage(tensor)] = operation

    def give(self, tensor: torch.Tensor, operation: str) -> None:
        """Record that `operation` made `tensor` with values."""
        self._kept.append(tensor)
        if not _by_transformers(frame := inspect.currentframe()):
            self._made[_storage(tensor)] = operation, _makers(frame)

    def _make(self, tensor: torch.Tensor, func: Any, args: Any) -> None:
        self._kept.append(tensor)
        operation, source = str(func), next(_meta_tensors(args), None)
        if operation.startswith("aten._to_copy") and source is not None:  # a conversion to another dtype
            if _storage(source) in self._written:
                self._written[_storage(tensor)] = self._written[_storage(source)]
            if _storage(source) in self._made:
                self._made[_storage(tensor)] = self._made[_storage(source)]
        elif "empty" not in operation:
            self.give(tensor, operation)

    def lost(self, module: torch.nn.Module, owners: Mapping[int, Any]) -> str:
        """The first parameter or buffer of `module` whose values were lost, and the operation that gave them; empty if there is none.
        `owners`: for each layer (by id), its transformers model."""
        stored = getattr(module, "_stored", {})
        for name, child in module.named_modules():
            for key, tensor in _own(child).items():
                operation = (
                    self._lost(child, tensor, id(child) in owners, id(tensor) in stored) if tensor.is_meta else ""
                )
                if operation:
                    return f"{name}.{key} is given values by {operation}".lstrip(".")
        return ""

    def _lost(self, layer: torch.nn.Module, tensor: torch.Tensor, owned: bool, stored: bool) -> str:
        """The operation whose values for a tensor of `layer` are lost."""
        if operation := self._written.get(_storage(tensor), ""):
            return operation
        operation, makers = self._made.get(_storage(tensor), ("", []))
        return "" if stored or any(maker.runs_again(layer, owned) for maker in makers) else operation


class _Maker(NamedTuple):
    """A layer in whose method `code` a tensor was made."""

    layer: torch.nn.Module
    code: CodeType

    def runs_again(self, layer: torch.nn.Module, owned: bool) -> bool:
        """Whether `reset_parameters` of `layer` sets what the method sets: it is that method, or of the same class, or of a subclass.
        `owned`: whether the layer belongs to a transformers model, which then has the rule."""
        if layer is not self.layer:
            return False
        classes = list(type(layer).__mro__)
        while classes and "reset_parameters" not in vars(classes[0]):
            classes.pop(0)
        methods = [vars(kind).get(self.code.co_name) for kind in classes]
        return (owned and not classes) or any(getattr(method, "__code__", None) is self.code for method in methods)


class _InitFunctions(TorchFunctionMode):
    """A context that sees what gives values to a tensor on the meta device without an operation: the functions of `torch.nn.init` that
    return at once, and `torch.tensor`."""

    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self._origins = origins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.is_meta:
            frame = inspect.currentframe()
            while frame is not None and frame.f_code.co_name == "__torch_function__":
                frame = frame.f_back
            if frame is not None and frame.f_globals.get("__name__") == "torch.nn.init" and func(*args):
                self._origins.write(args[0], frame.f_code.co_name, frame)
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and result.is_meta:
            self._origins.give(result, f"torch.{func.__name__}")
        return result


class Makers:
    """A context that records the layer with which each parameter was registered first, which is the layer that made it."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[torch.nn.Parameter, torch.nn.Module]] = {}
        """By the id of the parameter, which is held so that the id is not used again."""

    def __enter__(self) -> Makers:
        self._hook = register_module_parameter_registration_hook(self._record)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hook.remove()

    def _record(self, layer: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            self._of.setdefault(id(parameter), (parameter, layer))

    def unlike(self, module: torch.nn.Module, owners: Mapping[int, Any]) -> str:
        """The first parameter that the layer which made it would not initialise, because another layer that holds it comes first, or which
        has the memory of another parameter; empty if there is none. `owners`: as in `Origins.lost`."""
        found: dict[int, str] = {}
        memory: dict[tuple[int, int], str] = {}
        stored = getattr(module, "_stored", {})
        names = {id(layer): name for name, layer in module.named_modules()}
        for name, layer in module.named_modules():
            for key, parameter in layer._parameters.items():
                if parameter is None or not parameter.is_meta or id(parameter) in found:
                    continue
                path = found[id(parameter)] = f"{name}.{key}".lstrip(".")
                if id(layer) in owners or id(parameter) in stored:
                    continue
                maker = self._of.get(id(parameter), (parameter, layer))[1]
                if maker is not layer and (id(maker) in names or type(maker) is not type(layer)):
                    its_maker = names.get(id(maker), f"a {type(maker).__name__} that is not in the module")
                    return f"{path} is the parameter of {its_maker}"
                place = (_storage(parameter), parameter.storage_offset())
                if (other := memory.setdefault(place, path)) != path:
                    return f"{path} has the memory of {other}"
        return ""


class _Written(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that collects the storages of tensors on the meta device that are written to. Other tensors are not changed in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, torch.Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
                if not value.is_meta:
                    return value
                self.storages.add(_storage(value))
        return func(*args, **(kwargs or {}))


def set_from_around(module: torch.nn.Module, owners: Mapping[int, Any]) -> str:
    """The first weight that transformers' rule for an enclosing layer sets (GPT-2's rule for a block sets projections inside the block);
    empty if there is none. Only weights that are on the meta device and in no file count. `owners`: for each layer (by id), its
    transformers model."""
    stored = getattr(module, "_stored", {})
    for block in module.modules():
        if id(block) not in owners or not any(
            tensor.is_meta for child in block.children() for tensor in _tensors(child)
        ):
            continue
        # RuntimeError: the rule needs real values
        with _Written() as written, torch.no_grad(), contextlib.suppress(RuntimeError):
            owners[id(block)]._init_weights(block)
        for name, child in block.named_modules():
            for key, tensor in _own(child).items() if child is not block else ():
                if tensor.is_meta and id(tensor) not in stored and tensor.untyped_storage()._cdata in written.storages:
                    return f"{type(block).__name__} gives {name}.{key} its values"
    return ""


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _meta_tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_meta)


def _own(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    both = {**layer._parameters, **layer._buffers}
    return {key: tensor for key, tensor in both.items() if tensor is not None}


def _tensors(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    return itertools.chain(layer.parameters(), layer.buffers())


def _by_rule(storage: int, frame: FrameType | None) -> bool:
    """Whether a rule that runs again at initialisation is among the callers of `frame`, which writes to `storage`."""
    if _by_transformers(frame):
        return True
    rules = (maker.layer for maker in _makers(frame) if maker.code.co_name == "reset_parameters")
    return any(_storage(tensor) == storage for layer in rules for tensor in _own(layer).values())


def _by_transformers(frame: FrameType | None) -> bool:
    """Whether a transformers model that builds or initialises itself is among the callers of `frame`."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and any(
        code.co_name in _OF_TRANSFORMERS and isinstance(layer, transformers.PreTrainedModel)
        for layer, code in _callers(frame)
    )


def _makers(frame: FrameType | None) -> list[_Maker]:
    """The layers whose `__init__` or `reset_parameters` is among the callers of `frame`."""
    return [
        _Maker(layer, code)
        for layer, code in _callers(frame)
        if code.co_name in ("__init__", "reset_parameters") and isinstance(layer, torch.nn.Module)
    ]


def _callers(frame: FrameType | None) -> Iterator[tuple[Any, CodeType]]:
    """The object and the code of each method among the callers of `frame`, inside `configure_model`."""
    while frame is not None and frame.f_code.co_name != "configure_model":
        yield frame.f_locals.get("self"), frame.f_code
        frame = frame.f_back
