"""Tensor parallelism: the `tp_plan` of a transformers model, applied with torch's `parallelize_module`.

Owns: which layers a plan cuts and how, the errors for plans that cannot be followed, and the cut itself. Accelerate's function is not used,
because its installed version imports a name that transformers no longer has. Must not know: how parts of a layer are sharded, strategies,
ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from fabricate.errors import ConfigurationError


@dataclass(frozen=True)
class Style:
    """How a layer is cut: its weight in `dimension`. `whole_input`, `whole_output`: whether each rank has the whole input or output, or a
    part."""

    kind: type[torch.nn.Module]
    dimension: int
    whole_input: bool
    whole_output: bool

    def made(self) -> ParallelStyle:
        """The style as an object of torch."""
        columns = (self.dimension == 0) == (self.kind is torch.nn.Linear)  # the weight of a Linear is transposed
        if columns:
            return ColwiseParallel(output_layouts=Replicate() if self.whole_output else None)
        return RowwiseParallel(input_layouts=Replicate() if self.whole_input else None)


_GATHERED = Style(torch.nn.Linear, 0, whole_input=True, whole_output=True)
_SPLIT = Style(torch.nn.Linear, 1, whole_input=True, whole_output=True)
STYLES = {
    "colwise": Style(torch.nn.Linear, 0, whole_input=True, whole_output=False),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": Style(torch.nn.Linear, 1, whole_input=False, whole_output=True),
    "rowwise_split_input": _SPLIT,
    "rowwise_rep": _SPLIT,
    "embedding_rowwise": Style(torch.nn.Embedding, 0, whole_input=True, whole_output=True),
    "embedding_colwise": Style(torch.nn.Embedding, 1, whole_input=True, whole_output=True),
}
"""The supported styles, by their names in transformers."""
_LEFT_ALONE = "replicate"


@dataclass(frozen=True)
class Division:
    """A division of layers over `ways` ranks: the style of each layer that is cut, and why other layers of the plan stay whole, by name."""

    ways: int
    layers: Mapping[str, Style]
    whole: Mapping[str, str]

    def cuts(self, module: torch.nn.Module) -> dict[int, int]:
        """The cut dimension of each parameter of `module` that is cut, by id. `module` may be cut already."""
        by_parameter = {}
        for name, style in self.layers.items():
            layer: Any = module.get_submodule(name)
            by_parameter[id(layer.weight)] = style.dimension
            if style.dimension == 0 and getattr(layer, "bias", None) is not None:
                by_parameter[id(layer.bias)] = 0
        return by_parameter

    def apply(self, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        """Cut the layers of `module` over the ranks of `mesh`. Values, if there are any, must be the same on all of them. Parameters are
        replaced; tied parameters stay tied. No communication."""
        tied = [names for names in _tied(module).values() if self.layers.keys() & {n.rpartition(".")[0] for n in names}]
        for name, style in self.layers.items():
            parallelize_module(module.get_submodule(name), mesh, style.made(), src_data_rank=None)
        for first, *others in tied:
            parameter = module.get_parameter(first)
            for name in others:
                owner, _, key = name.rpartition(".")
                module.get_submodule(owner).register_parameter(key, parameter)

    def __str__(self) -> str:
        kinds = {
            text: dict.fromkeys(
                n.rpartition(".")[2] for n, style in self.layers.items() if style.dimension == dimension
            )
            for dimension, text in ((0, "by rows"), (1, "by columns"))
        }
        cut = "; ".join(f"{', '.join(names)} {text} of the weight" for text, names in kinds.items() if names)
        whole = "".join(f"; {name} whole, {why}" for name, why in self.whole.items())
        return f"{self.ways} successive ranks read the same rows and divide {cut}{whole}"


def division(module: torch.nn.Module, ways: int) -> Division:
    """The division over `ways` ranks by the plans of the transformers models inside `module`. Raises `ConfigurationError` if a plan cannot
    be followed. Reads only shapes: `module` may be on the meta device, or cut already."""
    layers: dict[str, Style] = {}
    whole: dict[str, str] = {}
    models = list(_planned(module))
    if not models:
        raise ConfigurationError(
            f"fsdp: tp={ways}: {type(module).__name__} holds no model with a tp_plan, which says how layers are split; use a "
            "model of transformers that has one, or strategy='fsdp' without tp"
        )
    for prefix, model in models:
        _check_heads(prefix, model, ways)
        for name, layer in model.named_modules():
            rule = _rule(model.tp_plan, name)
            for key, parameter in layer.named_parameters(recurse=False):
                own = _rule(model.tp_plan, f"{name}.{key}")
                if own not in (None, _LEFT_ALONE):
                    raise _other(ways, f"{prefix}{name}.{key}", f"the parameter's style is {own!r}")
                if rule == "replicated_with_grad_allreduce" and parameter.requires_grad:
                    raise _other(
                        ways,
                        f"{prefix}{name}",
                        f"its style is {rule!r}, which works only for frozen parameters: freeze it",
                    )
            if rule in (None, _LEFT_ALONE, "replicated_with_grad_allreduce"):
                continue
            layers[f"{prefix}{name}"] = style = _checked(f"{prefix}{name}", layer, str(rule), ways)
            # DTensor would apply a padding_idx to every rank's part.
            if getattr(layer, "padding_idx", None) is not None:
                whole[f"{prefix}{name}"] = "because it has a padding_idx"
            elif reason := _uneven(layer, style, ways):
                if not (style.whole_input and style.whole_output):
                    raise ConfigurationError(
                        f"fsdp: tp={ways}: {prefix}{name} (style {rule!r}) cannot be divided {reason}; set tp to a divisor, or choose "
                        "another size in the model's configuration"
                    )
                whole[f"{prefix}{name}"] = reason
    _leave_tied(module, layers, whole, ways)
    return Division(ways, {name: style for name, style in layers.items() if name not in whole}, whole)


def _planned(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost models inside `module` that have a plan, each with the prefix of its names. The plan of a model includes the plans of
    its parts."""
    planned: list[str] = []
    for name, child in module.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(plan := getattr(child, "tp_plan", None), dict) and plan and not prefix.startswith(tuple(planned)):
            planned.append(prefix)
            yield prefix, child


def _rule(plan: Mapping[str, str], name: str) -> str | None:
    """The style in `plan` of the layer or parameter `name`, or of the pattern with * for the numbers in `name`; None if there is none."""
    return plan.get(name, plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)))


def _check_heads(prefix: str, model: Any, ways: int) -> None:
    configuration = getattr(model, "config", None)
    settings = getattr(configuration, "text_config", configuration)
    for name in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(settings, name, None)
        if isinstance(number, int) and number % ways:
            raise ConfigurationError(
                f"fsdp: tp={ways}: {prefix}config.{name} is {number}, which cannot be divided into the same number of heads per "
                f"rank; choose a divisor of {number} as tp"
            )


def _checked(name: str, layer: torch.nn.Module, rule: str, ways: int) -> Style:
    style = STYLES.get(rule)
    if style is None:
        raise _other(ways, name, f"its style is {rule!r}")
    # Sharding renames the class of a layer that is a unit: FSDPLinear.
    kinds = [kind for kind in type(layer).__mro__ if not kind.__name__.startswith("FSDP")]
    if kinds[0] is not style.kind:
        raise _other(
            ways, name, f"it is a {type(layer).__name__} of {type(layer).__module__}, not torch's {style.kind.__name__}"
        )
    if isinstance(layer, torch.nn.Embedding) and (
        layer.max_norm is not None or layer.sparse or layer.scale_grad_by_freq
    ):
        raise _other(ways, name, "an Embedding with max_norm, sparse or scale_grad_by_freq needs all of its rows")
    return style


def _uneven(layer: Any, style: Style, ways: int) -> str:
    number = layer.weight.shape[style.dimension]
    return (
        f"because {ways} does not divide the {number} {'columns' if style.dimension else 'rows'} of its weight"
        if number % ways
        else ""
    )


def _other(ways: int, name: str, why: str) -> ConfigurationError:
    styles = ", ".join(STYLES)
    return ConfigurationError(
        f"fsdp: tp={ways}: {name} cannot be divided: {why}; only torch's Linear and Embedding in the styles {styles} can be "
        "divided. Use strategy='fsdp' without tp, or give the model another tp_plan"
    )


def _tied(module: torch.nn.Module) -> dict[int, list[str]]:
    """The names of each parameter that has several names, by its id."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {address: sharing for address, sharing in names.items() if len(sharing) > 1}


def _shared(owner: str, owners: Sequence[str], between: str) -> str:
    return f"its weight is that of {between.join(other for other in owners if other != owner)} too"


def _leave_tied(module: torch.nn.Module, layers: Mapping[str, Style], whole: dict[str, str], ways: int) -> None:
    """Add to `whole` the layers that share a weight, unless all of them are cut in the same dimension. Raises `ConfigurationError` if one
    cannot stay whole."""
    for names in _tied(module).values():
        owners = [name.rpartition(".")[0] for name in names]
        styles = {owner: layers[owner] for owner in owners if owner in layers}
        alike = len(styles) == len(set(owners)) and len({style.dimension for style in styles.values()}) == 1
        if not styles or (alike and not whole.keys() & styles.keys()):
            continue
        for owner, style in styles.items():
            if not (style.whole_input and style.whole_output):
                raise _other(ways, owner, _shared(owner, owners, ", "))
            whole.setdefault(owner, f"because {_shared(owner, owners, ' and ')}")
