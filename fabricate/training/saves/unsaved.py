"""Notes on values that the user's objects hold outside checkpoints, with the way to save them.

Only the attributes of objects of the user's own classes are inspected: random generators when a fit begins, tensors and numbers when they
have changed. Must not know: the content of checkpoints (`saved_state`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from fabricate.checkpoint.state.logical import transient_names
from fabricate.data.identity import names_in
from fabricate.errors import few
from fabricate.metrics.torchmetrics_objects import is_torchmetric, path_inside
from fabricate.module import overrides
from fabricate.optim.optimizers import inner_optimizers
from fabricate.optim.schedules import captured
from fabricate.seeding import is_generator
from fabricate.training.saves.attributes import LIBRARIES, OURS, is_torchs, is_users, settings
from fabricate.training.saves.marks import Kind, Made, has_iterator, is_iterator, mark_of
from fabricate.training.saves.reachable import Reachable
from fabricate.training.state.run_state import Run


def unsaved_notes(run: Run) -> list[str]:
    """Notes for the plan about random generators, and state that layers write themselves, that a resume would not restore."""
    if run.run_dir is None:
        return []
    return [*_own_entries(run), *_generators(run), *_extra_state(run)]


def _extra_state(run: Run) -> Iterator[str]:
    own = torch.nn.Module.get_extra_state
    found = [name for name, child in run.module.named_modules() if type(child).get_extra_state is not own]
    layers = [name or type(run.module).__name__ for name in found]
    if layers and not overrides(run.module, "on_save"):
        yield (
            f"not in checkpoints: what get_extra_state gives of {few(layers)}. Save it in on_save(self, state) and put it back in "
            "on_load(self, state)"
        )


def _own_entries(run: Run) -> Iterator[str]:
    """A note about what layers, or hooks of them, add to `state_dict()` that is neither a parameter nor a buffer."""
    module = run.module
    if overrides(module, "on_save"):
        return
    saved = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names, ids = {name for name, _ in saved}, {id(tensor) for _, tensor in saved}
    lost = []
    for where, child in module.named_modules():
        entries = _written(child, run.engine.strategy.shards_parameters)
        named = {f"{where}.{key}" if where else key: value for key, value in entries.items()}
        lost += [name for name, value in named.items() if name not in names and id(value) not in ids]
    if lost:
        yield (
            f"not in checkpoints and exports: {few(list(dict.fromkeys(lost)))}, which layers or hooks write to state_dict() themselves. "
            "Use register_buffer for a tensor; or save the value in on_save(self, state) and put it back in on_load(self, state), and in "
            "on_load_weights(self, state) for load_from_checkpoint"
        )


def _written(layer: torch.nn.Module, sharded: bool) -> dict[str, Any]:
    """What `layer` writes to `state_dict()`, if its class or a hook determines that. Empty for parameters that are `sharded`, and for
    bitsandbytes, whose entries belong to weights that the script quantises again."""
    write = type(layer)._save_to_state_dict
    hooked = bool(layer._state_dict_hooks)
    own = write is not torch.nn.Module._save_to_state_dict and not write.__module__.startswith("bitsandbytes.")
    entries: dict[str, Any] = {}
    if sharded and next(layer.parameters(recurse=hooked), None) is not None:
        return entries
    if hooked:
        entries = layer.state_dict(keep_vars=True)
    elif own:
        layer._save_to_state_dict(entries, "", True)
    return {key: value for key, value in entries.items() if key.rpartition(".")[2] != "_extra_state"}


def _generators(run: Run) -> list[str]:
    found = {name: value for name, value in _held(run) if is_generator(value)} | _reachable(run).generators
    held = [f"{name} ({type(value).__name__})" for name, value in found.items()]
    for label, schedule in run.optim.schedules.items():
        for function in getattr(schedule.made, "lr_lambdas", ()):
            inside = captured(function).items()
            held += [f"{name} in scheduler {label!r}" for name, value in inside if is_generator(value)]
    if not held:
        return []
    return [
        f"these random generators are not in checkpoints, so a resumed run draws other numbers: {few(held)}. Draw from torch's, "
        "numpy's or Python's own generators, or save the state in on_save(self, state) and put it back in on_load(self, state). Those that "
        "your code seeds for each row need nothing"
    ]


def remember(run: Run) -> None:
    """Record the tensors and numbers that the user's objects hold when the fit begins, for `note_changed`."""
    if run.run_dir is not None:
        run.optim.held, run.optim.built = _marks(run), set(_built(run))


def note_changed(run: Run) -> None:
    """At a save, note values that have changed since the fit began, and what was made since, each once."""
    if outside := [name for name, metric in run.metrics.objects.items() if path_inside(run.module, metric) is None]:
        run.journal.note(
            f"the torchmetrics objects logged as {few(outside)} are not part of the module, so the checkpoint does not hold what "
            "they counted in this epoch: assign each in __init__, self.accuracy = ..., or put them into a torch.nn.ModuleDict"
        )
    if run.run_dir is None:
        return
    if later := [name for name in _built(run) if name not in run.optim.built]:
        run.optim.built |= set(later)
        run.journal.note(
            f"{few(later)} was made after the fit began, so a resume refuses this checkpoint. Make a layer or buffer in __init__, with its "
            "shape (torch.empty); give an optimizer all parameters in configure_optimizers, and train some of them later with UnfreezeAt"
        )
    held, unset = run.optim.held, repr(None)  # None and a missing attribute count as the same
    marks = _marks(run)
    # What was made since, such as a network for a metric, only counts once it changes.
    new = {name: mark for name, mark in marks.items() if held.get(name, unset) == unset}
    held.update({name: mark for name, mark in new.items() if isinstance(mark, Made | Kind)})
    if changed := [name for name, mark in marks.items() if held.get(name, unset) not in (mark, _NAMED)]:
        held.update(dict.fromkeys(changed, _NAMED))
        run.journal.note(
            f"{few(changed)} changed since the fit began but is not in the checkpoint, so a resumed run begins with the value "
            f"that the script sets. {_buffers(run)}ave the value in on_save(self, state) and restore it in on_load(self, state)"
            f"{_advice(changed, [marks[name] for name in changed])}"
        )


def _built(run: Run) -> Iterator[str]:
    """The names of the parameters, of the buffers that a resume needs, and of the groups of optimizers."""
    yield from (name for name, _ in run.module.named_parameters())
    transient = transient_names(run.module)
    yield from (name for name, _ in run.module.named_buffers() if name not in transient)
    for label, optimizer in run.optim.optimizers.items():
        yield from (f"group {number} of optimizer {label!r}" for number in range(len(optimizer.param_groups)))


def _advice(changed: list[str], marks: list[Any]) -> str:
    """What to do with values of some kinds, by the names of those that changed and their fingerprints."""
    kinds = {
        _ITERATOR: any(map(has_iterator, marks)),
        _OF_DATA: any(map(_is_of_data, changed)),
    }
    return "".join([*(text for text, is_there in kinds.items() if is_there), _A_RECORD])


_OF_DATA = ". A data set and a collate_fn have no on_save: keep what their rows depend on in the module or in a plugin"

_ITERATOR = (
    ". Of an iterator, save how many items it gave, and take as many from a new one in on_load; one that training does not read from needs "
    "nothing"
)

_A_RECORD = ". What is only a cache, an open file or a record for you needs nothing"


def _is_of_data(name: str) -> bool:
    return " (train)" in name or name.startswith("collate_fn")


def _buffers(run: Run) -> str:
    """The advice about buffers; none where ddp would replace those of each rank by those of rank 0."""
    one = run.engine.world_size == 1 or run.engine.strategy.name != "ddp"
    return "Use register_buffer for a tensor; or s" if one else "S"


def _held(run: Run) -> Iterator[tuple[str, Any]]:
    """Attributes that no checkpoint holds: of the module, its submodules and its optimizers, unless the module has `on_save`; of plugins
    without it; of the training data and its samplers."""
    if not overrides(run.module, "on_save"):
        for name, child in run.module.named_modules():
            where = f"{type(run.module).__name__}{'.' if name else ''}{name}"
            yield where, _kind(child)
            own = ((f"{where}.{setting}", value) for setting, value in settings(child).items())
            yield from own if is_torchs(child) else _attributes(where, child)
        yield from _of_optimizers(list(run.optim.optimizers.values()))
    for name, part in _plugins(run):
        yield from _attributes(name, part)
    data, collating = _data(run)
    assert run.source is not None
    for name, part in data:
        seeded = run.source.resumes == "by replay" or any(part is sampler for sampler in run.source.samplers)
        held = _attributes(name, part, seeded=seeded)
        yield from ((name, value) for name, value in held if not (seeded and is_iterator(value)))  # it is made again
        yield from _rows(name, part)
    if collating:
        yield from _attributes(*collating[0])


def _plugins(run: Run) -> list[tuple[str, Any]]:
    """The plugins whose state no checkpoint holds, with their names."""
    saving = {name for name, _ in run.calls.listeners("on_save")}
    listed = run.calls.manager.list_name_plugin()
    return [(name, plugin) for name, plugin in listed if plugin is not run.module and name not in saving]


def _data(run: Run) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """The training data whose state no checkpoint holds, with its samplers, and the function that makes its batches, with their names."""
    if run.source is None or run.source.resumes == "by its own state":
        return [], []
    parts = [*_with_inner(run.source.data), *run.source.samplers]
    collating = [] if run.source.collate_fn is None else [("collate_fn", run.source.collate_fn)]
    return [(f"{type(part).__name__} (train)", part) for part in parts if part is not None], collating


def _with_inner(data: Any) -> list[Any]:
    """A data set, and those inside it and inside sets of torch, such as `Subset` and `ConcatDataset`."""
    found, waiting = dict[int, Any](), [data]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in found:
            continue
        found[id(each)] = each
        waiting.append(getattr(each, "dataset", None))
        if type(each).__module__.startswith("torch.utils.data"):
            several = getattr(each, "datasets", ())
            waiting += several.values() if isinstance(several, dict) else several
    return list(found.values())


def _rows(name: str, part: Any) -> Iterator[tuple[str, Any]]:
    """What a step may change of torch's data sets and samplers, such as pseudo-labels, and a tensor that is the data."""
    if isinstance(part, torch.Tensor):
        yield name, part
    elif type(part).__module__.startswith("torch.utils.data"):
        for attribute in ("tensors", "indices", "weights"):
            if hasattr(part, attribute):
                yield f"{name}.{attribute}", getattr(part, attribute)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes of a torch module that hold its hooks."""


def _reachable(run: Run) -> Reachable:
    """What the methods of these objects, the hooks of layers and the function that makes batches reach in addition."""
    own = [] if overrides(run.module, "on_save") else list(run.module.named_modules())
    name = type(run.module).__name__
    layers = [(f"{name}{'.' if where else ''}{where}", child) for where, child in own if is_users(child)]
    hooks = [hook for _, child in own for kind in _HOOKS for hook in getattr(child, kind).values()]
    data, collating = _data(run)
    return Reachable([*layers, *_plugins(run), *data], [*collating, *(("hook", function) for function in hooks)])


def reached_by_reading(run: Run) -> Reachable:
    """What the code that reads rows and makes batches reaches. Without samplers, which draw the same on all ranks."""
    data, collating = _data(run)
    samplers = () if run.source is None else run.source.samplers
    return Reachable([(name, part) for name, part in data if all(part is not each for each in samplers)], collating)


def _of_optimizers(optimizers: list[Optimizer]) -> Iterator[tuple[str, Any]]:
    """What no checkpoint holds of optimizers: their attributes, state under a name and not a parameter, and the state that the optimizers
    inside them keep for themselves."""
    # attributes that every optimizer has, and the one that a torch schedule sets; checkpoints hold their state
    every = {*vars(torch.optim.SGD([torch.zeros(1)])), "_opt_called"}
    for optimizer in optimizers:
        label = type(optimizer).__name__
        inside = [pair for pair in inner_optimizers(optimizer, label) if pair[1] not in optimizers]
        for where, each in ((label, optimizer), *inside):
            common = every | _OF_BITSANDBYTES if _is_bitsandbytes(each) else every
            for name, value in _attributes(where, each):
                if name.rpartition(".")[2] not in common and not isinstance(value, Optimizer):
                    yield name, value
        yield from (
            (f"{label}.state[{key!r}]", v) for key, v in optimizer.state.items() if not isinstance(key, torch.Tensor)
        )
        for where, each in inside:
            if each.state is not optimizer.state:
                yield f"{where}.state", {parameter: kept for parameter, kept in each.state.items() if kept}


_OF_BITSANDBYTES = frozenset({"initialized", "mng", "page_mng"})
"""Attributes of bitsandbytes' optimizers that need no saving: a step sets the first again, the others belong to the process."""


def _is_bitsandbytes(optimizer: Optimizer) -> bool:
    """Whether the class of `optimizer`, or one that it extends, is of bitsandbytes. Decided by name, without an import."""
    return any(base.__module__.partition(".")[0] == "bitsandbytes" for base in type(optimizer).__mro__)


def _made_by_fsdp(kind: type) -> bool:
    """Whether `kind` is the class that `fully_shard` sets on a layer. Decided by name, because the import of torch.distributed.fsdp takes
    0.6 s."""
    return any(base.__module__.startswith("torch.distributed.fsdp") for base in kind.__mro__)


def _kind(value: Any) -> type:
    """The class of an object, before `fully_shard` changed it."""
    return next(kind for kind in type(value).__mro__ if not _made_by_fsdp(kind))


def _set_by_epoch(value: Any) -> tuple[str, ...]:
    """The attributes that `set_epoch` of an object sets, as the names in its code say: it is called in every epoch, after a resume too."""
    set_epoch = getattr(value, "set_epoch", None)
    return (
        ("epoch", "_epoch", *getattr(getattr(set_epoch, "__code__", None), "co_names", ()))
        if callable(set_epoch)
        else ()
    )


def _attributes(owner: str, value: Any, *, seeded: bool = False) -> Iterator[tuple[str, Any]]:
    """The attributes of an object of the user's class. `seeded`: whether a generator named "generator" is seeded in each epoch, and is
    therefore left out."""
    package = _kind(value).__module__.partition(".")[0]
    if package in LIBRARIES:
        return
    follows = _set_by_epoch(value)
    held = getattr(value, "__dict__", {})
    if is_torchmetric(value):  # checkpoints hold what it counts
        follows = (*value._defaults, *(name for name in held if name.startswith("_")))
    for name, attribute in held.items():
        if (
            name not in follows
            and name not in OURS
            and not (seeded and name == "generator" and type(attribute) is torch.Generator)
        ):
            yield f"{owner}.{name}", attribute


_NAMED = object()
"""Marks a value that a note has already named."""


def _marks(run: Run) -> dict[str, Any]:
    """A fingerprint of each value that no checkpoint holds."""
    optimizers = run.optim.optimizers.values()
    groups = (part for optimizer in optimizers for part in (optimizer.param_groups, *optimizer.param_groups))
    plugins = (plugin for _, plugin in run.calls.manager.list_name_plugin())
    saved = {id(each) for each in (*run.module.parameters(), *run.module.buffers(), *optimizers, *groups, *plugins)}
    saved |= _schedulers(run)
    saved |= {
        id(each) for source in run.validation.values() for each in (source.data, getattr(source.data, "dataset", None))
    }
    saved.discard(id(None))  # of a data set without an inner one
    held = [*_held(run), *_reachable(run).variables.items()]
    kept = _named_in_on_save(run)
    left = [(name, value) for name, value in held if id(value) not in saved and not _is_kept(name, kept)]
    marks = {name: mark_of(value, saved) for name, value in left}
    return {name: mark for name, mark in marks.items() if mark is not None}


def _named_in_on_save(run: Run) -> set[str]:
    """The names in the code of `on_save` of the module and of plugins, which may save what data sets and global variables hold."""
    objects = [run.module, *(plugin for _, plugin in run.calls.manager.list_name_plugin())]
    codes = [getattr(getattr(type(each), "on_save", None), "__code__", None) for each in objects]
    return {name for code in codes if code is not None for name in names_in(code)}


def _is_kept(name: str, named: set[str]) -> bool:
    """Whether the value called `name` in messages, of a data set or a variable, is among those `named` in an `on_save`."""
    last = name.rpartition("variable ")[2].partition(" of ")[0].rpartition(".")[2]
    return (_is_of_data(name) or "variable " in name) and last in named


def _schedulers(run: Run) -> set[int]:
    """The ids of the schedulers that `configure_optimizers` returned, and of those inside them."""
    pending, ids = [schedule.made for schedule in run.optim.schedules.values()], set()
    while pending:
        scheduler = pending.pop()
        ids.add(id(scheduler))
        pending += getattr(scheduler, "_schedulers", ())
    return ids
