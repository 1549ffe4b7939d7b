"""The units of FSDP: submodules whose parameters are gathered together. Must not know: shards, ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.distributed.fsdp import FSDPModule

from fabricate.errors import ConfigurationError
from fabricate.strategies.base import Strategy
from fabricate.strategies.ddp import sparse_layers

Units = list[tuple[str, torch.nn.Module]]
_SIZE = re.compile(r"size:(\d+(?:\.\d+)?)([KMB]?)")
_FACTORS = {"": 1, "K": 1_000, "M": 1_000_000, "B": 1_000_000_000}


def read_size(wrap: str) -> int | None:
    """The number of parameters in "size:100M"; None if `wrap` does not begin with "size:"."""
    if not wrap.startswith("size:"):
        return None
    match = _SIZE.fullmatch(wrap)
    if match is None or not float(match[1]):
        raise ConfigurationError(f"fsdp: wrap={wrap!r}: give a number of parameters, for instance size:100M")
    return int(float(match[1]) * _FACTORS[match[2]])


def select(module: torch.nn.Module, wrap: str) -> Units:
    """The units of `module` by `wrap`, inner ones first. Raises `ConfigurationError` if a class name has none, or if two units would hold
    the same parameter."""
    if wrap == "none":
        return []
    size = read_size(wrap)
    units = _of_size(module, size) if size is not None else _blocks(module) if wrap == "auto" else _named(module, wrap)
    _check_shared(module, wrap, [name for name, _ in units])
    return units


def sizes(module: torch.nn.Module, units: list[str], size: Callable[[torch.nn.Parameter], int]) -> dict[str, int]:
    """The sum of `size` over the parameters of each unit, without those of units inside it; "" is the rest."""
    bytes_of = dict.fromkeys(["", *units], 0)
    for name, parameter in module.named_parameters():
        bytes_of[_home(name, units)] += size(parameter)
    return bytes_of


def _home(parameter: str, units: list[str]) -> str:
    return max((unit for unit in units if parameter.startswith(f"{unit}.")), key=len, default="")


def _kind(module: torch.nn.Module) -> str:
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name  # sharding renames the class


def _below(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The submodules of `module` that have parameters and a forward. `module` itself is left out: its steps run instead of its forward."""
    for name, child in module.named_modules():
        runs = type(child).forward is not torch.nn.Module.forward  # otherwise a container, such as a ModuleList
        if name and runs and next(child.parameters(), None) is not None:
            yield name, child


def _blocks(module: torch.nn.Module) -> Units:
    below = {id(child) for _, child in _below(module)}
    chosen = [pair for pair in Strategy.blocks(module) if id(pair[1]) in below and not _shares(pair[0], module)]
    outer = [n for n, _ in chosen]
    return [pair for pair in chosen if not any(pair[0].startswith(f"{n}.") for n in outer)]


def _named(module: torch.nn.Module, wrap: str) -> Units:
    wanted = set(wrap.split("+"))
    matching = [(n, m) for n, m in _below(module) if _kind(m) in wanted]
    missing = wanted - {_kind(m) for _, m in matching}
    if missing:
        present = sorted({_kind(m) for _, m in _below(module)})
        raise ConfigurationError(
            f"fsdp: wrap={wrap!r}: the module has no {', '.join(sorted(missing))}; it has {', '.join(present)}"
        )
    return matching[::-1]


def _of_size(module: torch.nn.Module, size: int) -> Units:
    """The submodules with at least `size` parameters, from the inside out, where the parameters of units inside them do not count."""
    units: Units = []
    taken: set[int] = set()
    inside_out = sorted(_below(module), key=lambda pair: -pair[0].count("."))
    for name, child in inside_out:
        own = [p for p in child.parameters() if id(p) not in taken]
        if sum(p.numel() for p in own) >= size and not _shares(name, module):
            taken.update(id(p) for p in own)
            units.append((name, child))
    return units


def kept_in_float32(module: torch.nn.Module, device: torch.device) -> list[torch.nn.Module]:
    """The layers whose kernels take no parameters in half precision. Layers with running statistics need parameters in the dtype of the
    statistics. On a CPU, where autocast does not cast their input, other normalisations need float32 parameters too."""
    normalisations = (torch.nn.LayerNorm, torch.nn.GroupNorm) if device.type == "cpu" else ()
    return [
        child
        for child in module.modules()
        if (isinstance(child, normalisations) or any(b.is_floating_point() for b in child.buffers(recurse=False)))
        and next(child.parameters(recurse=False), None) is not None
    ]


def _shares(name: str, module: torch.nn.Module) -> bool:
    """Whether the submodule `name` shares a parameter with another one (tied weights), so that it cannot be a unit."""
    every = list(module.named_parameters(remove_duplicate=False))
    inside = {id(p) for n, p in every if n.startswith(f"{name}.")}
    return any(id(p) in inside for n, p in every if not n.startswith(f"{name}."))


def _check_shared(module: torch.nn.Module, wrap: str, units: list[str]) -> None:
    """Raise `ConfigurationError` if two units hold the same parameter, which would become two parameters with separate updates."""
    homes: dict[int, tuple[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = _home(name, units)
        other, theirs = homes.setdefault(id(parameter), (name, unit))
        if theirs != unit:
            raise ConfigurationError(
                f"fsdp: {other} and {name} are the same parameter, but wrap={wrap!r} puts them into two units; choose wrap= so "
                "that one unit holds both names, or use wrap='none'"
            )


def check_dtypes(module: torch.nn.Module, groups: Iterable[torch.nn.Module]) -> None:
    """Raise `ConfigurationError` if FSDP would gather trained parameters of several dtypes together. Each of `groups` is gathered together,
    without the parameters of groups before it."""
    left = {parameter: name for name, parameter in module.named_parameters()}
    for group in groups:
        own = [(p, left.pop(p)) for p in group.parameters() if p in left]
        by_dtype = {
            p.dtype: f"{name} ({str(p.dtype).removeprefix('torch.')})" for p, name in own if p.requires_grad and p.ndim
        }
        if len(by_dtype) > 1:
            raise ConfigurationError(
                f"strategy='fsdp' gathers {' and '.join(by_dtype.values())} together, but parameters of one unit need the same "
                "dtype. Build them in one dtype, put layers of another dtype into their own units (wrap=), or use strategy='ddp'"
            )


def refuse_sparse(module: torch.nn.Module) -> None:
    """Raise `ConfigurationError` for layers with sparse gradients, because FSDP sums only dense ones."""
    if sparse := sparse_layers(module):
        raise ConfigurationError(
            f"strategy='fsdp' cannot add up sparse gradients, those of {', '.join(sparse)}: set sparse=False in these layers, or "
            "use strategy='ddp'"
        )


def marks(root: torch.nn.Module) -> Callable[[], None]:
    """The attributes that a script has set on parameters, such as `_no_weight_decay`, by which it builds groups. The returned function sets
    them on the parameters that took their place."""
    before = {name: dict(vars(parameter)) for name, parameter in root.named_parameters()}

    def put_back() -> None:
        for name, parameter in root.named_parameters():
            vars(parameter).update(before.get(name, {}) | vars(parameter))

    return put_back
