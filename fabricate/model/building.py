"""Building the model that `configure_model` describes: on the meta device first; then each layer is initialised from the seed and its name.

Submodules are initialised one at a time. Meanwhile their parameters exist whole on the CPU; afterwards, only the part that the strategy
keeps on this rank remains. Must not know: which strategy runs, ranks.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from fabricate.errors import ConfigurationError, few, first_line
from fabricate.model.building_twice import Before, Makers, Origins, set_from_around
from fabricate.model.pretrained import Stored, deferred
from fabricate.module import TrainModule, overrides
from fabricate.seeding import derive_seed, rng_state, seed_everything, set_rng_state
from fabricate.strategies.base import Strategy
from fabricate.strategies.single import Single


@dataclass(frozen=True)
class Blank:
    """A submodule with parameters or buffers of its own (`keys`) that are on the meta device and have no values yet."""

    name: str
    submodule: torch.nn.Module
    keys: tuple[str, ...]
    stored: dict[str, Stored]
    """Those of the keys whose tensors are read from a file, and where they are."""


def pretrained_models(module: torch.nn.Module) -> list[Any]:
    """The outermost transformers models inside `module` (transformers is not imported for this)."""
    return list(_pretrained(module).values())


def set_modes(module: torch.nn.Module) -> list[str]:
    """Set the train or eval modes for training; return notes for the plan. Submodules keep the mode that the user set, with two exceptions.
    If `module` itself is in eval mode, from an earlier use, it is put into train mode, except for its frozen parts. A transformers model in
    eval mode, as loading leaves it, is put into train mode whole, unless it is all frozen."""
    notes = []
    for name, model in {"": module, **_pretrained(module)}.items():
        trained = any(p.requires_grad for p in model.parameters())
        if not model.training and trained:
            _train(model, whole=bool(name))
            text = f"the transformers model {name!r}" if name else type(module).__name__
            notes.append(
                f"{text} was in eval mode and is put into train mode; to leave parts of it in eval mode, call their eval() in "
                "on_fit_start"
            )
    _call_own_train(module)
    kept: list[str] = []
    for name, child in module.named_modules():
        if not child.training and not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    notes.extend([f"in eval mode, as set: {few(kept)}"] if kept else [])
    if changing := [name for name, child in module.named_modules() if child.training and _frozen_statistics(child)]:
        notes.append(
            f"frozen, but in train mode, so that their running statistics change with every batch: {few(changing)}; to keep the "
            "statistics, put that part into eval mode in __init__: self.PART.eval()"
        )
    return notes


def _call_own_train(module: torch.nn.Module) -> None:
    """Call `train` of submodules whose class overrides it, because it may put parts into eval mode. A hand-written loop calls it too."""
    for child in module.modules():
        if child.training and type(child).train is not torch.nn.Module.train:
            in_eval_mode = [part for part in child.modules() if not part.training]
            child.train()
            for part in in_eval_mode:
                part.training = False


def _frozen_statistics(layer: torch.nn.Module) -> bool:
    """Whether `layer` is a normalisation with running statistics whose parameters are all frozen."""
    parameters = list(layer.parameters(recurse=False))
    keeps = isinstance(getattr(layer, "running_mean", None), torch.Tensor)
    return keeps and bool(parameters) and not any(p.requires_grad for p in parameters)


def eval_modes(module: torch.nn.Module) -> list[str]:
    """The names of the submodules in eval mode, "" for the module."""
    return sorted(name for name, child in module.named_modules() if not child.training)


def _train(module: torch.nn.Module, *, whole: bool) -> None:
    """Put `module` and its submodules into train mode. Unless `whole`, submodules whose parameters are all frozen keep their mode."""
    parameters = list(module.parameters())
    if parameters and not whole and not any(p.requires_grad for p in parameters):
        return
    module.training = True
    for child in module.children():
        _train(child, whole=whole)


def _pretrained(module: torch.nn.Module) -> dict[str, Any]:
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return {}
    models: dict[str, Any] = {}
    for name, child in module.named_modules():
        if isinstance(child, transformers.PreTrainedModel) and not any(
            name.startswith(f"{outer}.") for outer in models
        ):
            models[name] = child
    return models


def adapted_models(module: torch.nn.Module) -> list[Any]:
    """The peft models inside `module`, with the adapters around a model's layers (peft is not imported for this)."""
    peft = sys.modules.get("peft")
    return [] if peft is None else [child for child in module.modules() if isinstance(child, peft.PeftModel)]


def pretrained_record(module: torch.nn.Module) -> dict[str, Any] | None:
    """The prefix of names, the configuration and the generation configuration of the only transformers model inside `module`, as
    `save_pretrained` writes them. None if there is no such model, if there are several, or if it has adapters."""
    models = _pretrained(module)
    if len(models) != 1 or adapted_models(module):
        return None
    ((name, model),) = models.items()
    config = json.loads(model.config.to_json_string(use_diff=True))
    config["architectures"] = [type(model).__name__.removeprefix("FSDP")]  # sharding renames the class
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    generation = getattr(model, "generation_config", None)
    return {
        "prefix": f"{name}." if name else "",
        "config": config,
        "generation_config": json.loads(generation.to_json_string(use_diff=True)) if generation is not None else None,
    }


def adapter_record(module: torch.nn.Module) -> dict[str, Any] | None:
    """The prefix of names of the only peft model inside `module`, the adapters' configurations as peft writes them, and how its base, a
    transformers model, was loaded. None if there is no such model, or several."""
    adapted_by_name = {name: child for name, child in module.named_modules() if child in adapted_models(module)}
    models = _pretrained(module)
    if len(adapted_by_name) != 1 or len(models) != 1:
        return None
    ((name, adapted),), (base,) = adapted_by_name.items(), models.values()
    quantization = getattr(base.config, "quantization_config", None)
    # Here the keys are sorted, so that a checkpoint has a plain object; those of an adapter keep their order: of patterns the first counts
    record = {
        "adapters": {label: config.to_dict() for label, config in adapted.peft_config.items()},
        "base": str(base.name_or_path),
        "class": type(base).__name__.removeprefix("FSDP"),  # sharding renames the class
        "dtype": str(base.config.dtype or torch.float32).removeprefix("torch."),
        "prefix": f"{name}." if name else "",
        "quantization": None if quantization is None else quantization.to_dict(),
    }
    text = json.dumps(record, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    plain: dict[str, Any] = json.loads(text)
    return plain


def build_model(module: TrainModule, seed: int) -> str:
    """Run `configure_model` on the meta device, and a second time with real tensors if it needs them. `materialise` or `fill` sets the
    values later.

    Returns a line for the plan, empty if there was nothing to build. All ranks, no collectives.
    """
    if not overrides(module, "configure_model") or getattr(module, "_built", False):
        return ""
    before = Before(module)
    try:
        with Origins() as origins, Makers() as makers:
            note = build_on_meta(module)
        needs = "peft initialises its layers itself" if adapted_models(module) else ""
        if not overrides(module, "init_weights"):  # which would overwrite lost values anyway
            owners = _owners(module)
            needs = needs or origins.lost(module, owners) or makers.unlike(module, owners)
            needs = needs or set_from_around(module, owners)
    except RuntimeError as exc:  # code that reads or sets values
        note, needs = "", first_line(exc)
    if not needs:
        return note
    before.restore()  # `configure_model` may test whether it ran before
    object.__setattr__(module, "_built", True)
    seed_everything(derive_seed(seed, "configure_model"))  # the same values on every rank
    module.configure_model()
    if any(hasattr(child, "_hf_hook") for child in module.modules()):
        return f"built and placed by configure_model ({needs})"
    return f"built whole on the CPU of every rank, because it needs real tensors ({needs})"


def check_parameters(module: torch.nn.Module) -> None:
    """Raise `ConfigurationError` if a layer overrides `parameters` so that it gives others than those the layer has."""
    own = torch.nn.Module.parameters
    for layer in (each for each in module.modules() if type(each).parameters is not own):
        try:
            same = all(
                [*map(id, layer.parameters(recurse=recurse))] == [*map(id, own(layer, recurse))]
                for recurse in (True, False)
            )
        except TypeError:  # it takes no `recurse`
            same = False
        if not same:
            name = type(layer).__name__
            raise ConfigurationError(
                f"{name} overrides parameters(): torch, Accelerate and fabricate expect all parameters of {name} from it. Rename "
                "your method (trained_parameters, for example), and call that in configure_optimizers"
            )


def check_sparse_buffers(module: torch.nn.Module, where: str) -> None:
    """Raise `ConfigurationError` if there are sparse buffers. where: what cannot take them."""
    sparse = [name for name, buffer in module.named_buffers() if buffer.layout != torch.strided]
    if sparse:
        raise ConfigurationError(
            f"{where} cannot take sparse buffers: {few(sparse)}. Register the indices and the values as two buffers, and build the sparse "
            "tensor from them in forward"
        )


def check_dtypes(module: torch.nn.Module, saved: Collection[torch.dtype]) -> None:
    """Raise `ConfigurationError` if a parameter or a buffer has a dtype that is not in `saved`, those that a checkpoint can hold."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.dtype not in saved:
            raise ConfigurationError(
                f"{name} has the dtype {tensor.dtype}, which a checkpoint cannot hold; use one of {', '.join(map(str, saved))}"
            )


def check_clipped(module: torch.nn.Module, clipping: str) -> None:
    """Raise `ConfigurationError` if `clipping`, the argument that clips gradients, would get sparse ones."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    for name, layer in module.named_modules():
        if isinstance(layer, kinds) and layer.sparse and layer.weight.requires_grad:
            raise ConfigurationError(
                f"{clipping}: {name} has sparse=True, and torch cannot clip sparse gradients. Remove {clipping}, or use sparse=False"
            )


def expand_buffers(module: torch.nn.Module) -> None:
    """Give the buffers that `expand` made, whose elements share memory, memory for each element: they could not be loaded or sent. Not
    those that share it with another buffer or parameter and change with that."""
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = [
        t for t in chain(module.parameters(), module.buffers()) if type(t) in plain and t.layout is torch.strided
    ]
    uses = Counter(t.untyped_storage().data_ptr() for t in tensors)
    for layer in module.modules():
        for name, buffer in layer.named_buffers(recurse=False):
            if type(buffer) is not torch.Tensor or buffer.layout is not torch.strided:
                continue
            expanded = any(not stride and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
            if expanded and uses[buffer.untyped_storage().data_ptr()] == 1:
                layer._buffers[name] = buffer.contiguous()


def check_has_values(module: torch.nn.Module) -> None:
    """Raise `ConfigurationError` if a lazy layer has not seen a batch: the shapes of its parameters are not known."""
    lazy = [n for n, p in module.named_parameters() if isinstance(p, torch.nn.parameter.UninitializedParameter)]
    if lazy:
        raise ConfigurationError(
            f"{', '.join(lazy[:5])}: a lazy layer whose shape is not known yet; run one batch through it before fit, or give its "
            "sizes"
        )


def build_on_meta(module: TrainModule) -> str:
    """Run `configure_model` on the meta device; return a line for the plan. Raises RuntimeError if it needs real tensors."""
    object.__setattr__(module, "_built", True)
    before = Before(module)
    while True:
        was_imported = "transformers" in sys.modules
        try:
            with warnings.catch_warnings(), torch.device("meta"), deferred() as loads:
                warnings.filterwarnings(
                    "ignore", ".*copying from a non-meta parameter"
                )  # it runs again with real tensors
                module.configure_model()
            break
        except RuntimeError:
            if was_imported or "transformers" not in sys.modules:
                raise
            before.restore()  # transformers was imported just now, so its from_pretrained was not deferred: try again
    loads.check(module)
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ConfigurationError(
                    f"{f'{name}.{key}'.lstrip('.')} is a tensor that configure_model made and did not register, so it would never get "
                    "a value or move to the device: use self.register_buffer(...), or make it in __init__"
                )
    object.__setattr__(module, "_stored", loads.stored)
    tensors = [*module.parameters(), *module.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return ""  # it built nothing
    read = sum(id(tensor) in loads.stored for tensor in tensors)
    from_files = f"{read} tensors read from files, each rank its part; other layers" if read else "each layer"
    return f"built on the meta device, {from_files} initialised from seed and name"


def blanks(module: torch.nn.Module) -> list[Blank]:
    """The submodules with tensors that are still on the meta device, in the order of `named_modules`. Empty if Accelerate loads the
    model."""
    if any(hasattr(child, "_hf_hook") for child in module.modules()):
        return []  # Accelerate loads each layer when it runs
    waiting = []
    stored: dict[int, Stored] = getattr(module, "_stored", {})
    for name, child in module.named_modules():
        empty = {key: id(tensor) for _, key, tensor in _own_tensors(child) if tensor.is_meta}
        if empty:
            in_files = {key: stored[address] for key, address in empty.items() if address in stored}
            waiting.append(Blank(name, child, tuple(empty), in_files))
    return waiting


def materialise(module: TrainModule, seed: int) -> None:
    """Move every parameter and buffer from the meta device to the CPU, with its initial value. All ranks."""
    waiting = blanks(module)
    memory: dict[int, torch.Tensor] = {}
    for blank in waiting:
        for table, key, tensor in _own_tensors(blank.submodule):
            if key in blank.keys:  # tied weights stay tied
                table[key] = memory.setdefault(id(tensor), _like(tensor, tensor.shape))
    fill(module, waiting, seed, Single())


def fill(module: TrainModule, waiting: Sequence[Blank], seed: int, strategy: Strategy) -> None:
    """Write the initial values of the tensors of `waiting`, which have memory by now; of each, only this rank's part.

    The values depend on files, `seed` and names only. A tensor that several submodules share is set with the first of them; but
    `init_weights` of the module may change it with each of them, as with `Module.apply`. All ranks, in the same order. Raises
    `ConfigurationError` for a tensor without an initial value.
    """
    owners = _owners(module)
    kept = _shared(waiting) if overrides(module, "init_weights") else set()
    known: dict[int, torch.Tensor] = {}  # the whole values of the tensors `kept`, which a later turn may change
    done: set[int] = set()
    before = rng_state()
    for blank in waiting:
        own = {key: t for key, t in _waiting_tensors(blank).items() if id(t) not in done or id(t) in kept}
        if not own:
            continue
        torch.manual_seed(derive_seed(seed, "init", blank.name))
        values: dict[str, torch.Tensor] = {}
        if any(key not in blank.stored for key in own):
            so_far = {key: known[id(tensor)] for key, tensor in own.items() if id(tensor) in known}
            values = _initialised(module, blank, owners.get(id(blank.submodule)), strategy, so_far)
        done.update(map(id, own.values()))
        known |= {id(tensor): values[key] for key, tensor in own.items() if id(tensor) in kept}
        _write(blank, own, values, strategy)
    set_rng_state(before)


def _waiting_tensors(blank: Blank) -> dict[str, torch.Tensor]:
    return {key: tensor for _, key, tensor in _own_tensors(blank.submodule) if key in blank.keys}


def _shared(waiting: Sequence[Blank]) -> set[int]:
    """The ids of tensors that several submodules hold and that are in no file."""
    tensors = [(key, tensor, blank) for blank in waiting for key, tensor in _waiting_tensors(blank).items()]
    uses = Counter(id(tensor) for key, tensor, blank in tensors if key not in blank.stored)
    return {each for each, count in uses.items() if count > 1}


def _write(
    blank: Blank, own: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], strategy: Strategy
) -> None:
    """Write the part of this rank of the initial values of the tensors `own` of a submodule."""
    with torch.no_grad():
        for key, tensor in own.items():
            part = strategy.local_part(tensor)
            part.write(
                blank.stored[key].read(part.start, part.count)
                if key in blank.stored
                else values[key].reshape(-1)[part.start : part.start + part.count]
            )


def _owners(module: torch.nn.Module) -> dict[int, Any]:
    """For each layer (by id) of a transformers model: the model, whose rules initialise the layer."""
    return {id(child): model for model in pretrained_models(module) for child in model.modules()}


def _own_tensors(child: torch.nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """The tensors of `child` itself, not those of its children: (table, key, tensor)."""
    tables: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
    return [(table, key, tensor) for table in tables for key, tensor in table.items() if tensor is not None]


def _initialised(
    module: TrainModule, blank: Blank, owner: Any, strategy: Strategy, known: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The initial values of a submodule's own tensors, whole and on the CPU. The submodule itself is not changed. `known`: the values, by
    key, that tensors have from an earlier turn."""
    child = blank.submodule
    held = _own_tensors(child)
    fresh = {key: _like(tensor, strategy.local_part(tensor).shape) for _, key, tensor in held} | dict(known)
    untouched = {key: tensor._version for key, tensor in fresh.items()}
    for table, key, _ in held:
        table[key] = fresh[key]
    try:
        with torch.no_grad():
            if overrides(module, "init_weights"):
                module.init_weights(child)
            elif owner is not None:
                owner._init_weights(child)  # the rule of transformers for its own layers
            elif callable(rule := getattr(child, "reset_parameters", None)):
                rule()
            else:
                raise ConfigurationError(
                    f"configure_model built {blank.name or few(list(blank.keys))} ({type(child).__name__}), which has no reset_parameters "
                    f"to initialise it; define init_weights(self, submodule) on {type(module).__name__} to initialise it"
                )
        values = {key: table[key] for table, key, _ in held}
    finally:
        for table, key, tensor in held:
            table[key] = tensor
    have_values = {*blank.stored, *known}
    for key in (key for key in blank.keys if key not in have_values):
        value = values[key]
        # Integers have no NaN. They were set if the tensor was written to or replaced.
        same = value is fresh[key] and value._version == untouched[key]
        if value.isnan().any() if value.is_floating_point() else same:
            raise ConfigurationError(
                f"{f'{blank.name}.{key}'.lstrip('.')} was built by configure_model and has no initial value; set it in "
                f"{type(module).__name__}.init_weights(submodule) for {type(child).__name__}"
            )
    return values


def _like(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A CPU tensor of the whole `shape` in the dtype of `tensor`. Floating-point elements are NaN, so that missing values are detected."""
    empty = torch.empty(tuple(shape), dtype=tensor.dtype, device="cpu")
    if empty.is_floating_point():
        empty.fill_(float("nan"))
    return torch.nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else empty
