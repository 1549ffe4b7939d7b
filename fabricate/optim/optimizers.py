"""Read the return value of `configure_optimizers` into named optimizers and schedules.

Must not know: strategies, the loop.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import lr_scheduler

from fabricate.errors import ConfigurationError, few
from fabricate.optim.named_schedules import ENDS_IN_WARMUP, named_schedule, schedule_names
from fabricate.optim.schedules import Schedule, own_lengths, takes_metric, warmup_lengths
from fabricate.values import metric_mode


def configured_optimizers(where: str, module: Any) -> Any:
    """The return value of `module.configure_optimizers()`. Raises ConfigurationError for an optimizer without parameters, and for a form
    that only Lightning accepts."""
    try:
        answer = module.configure_optimizers()
    except ValueError as exc:
        if "empty parameter list" not in str(exc):
            raise
        count = sum(p.requires_grad for p in module.parameters())
        raise ConfigurationError(
            f"{where} makes an optimizer without parameters ({exc}), although the module has {count} trainable ones. Pass "
            "self.parameters(), or a list: an iterator that was read before is empty"
        ) from exc
    of_lightning = isinstance(answer, Mapping) and "lr_scheduler" in answer
    parts = answer if isinstance(answer, tuple | list) else ()
    if len(parts) == 2 and all(isinstance(part, list) for part in parts):  # a list of optimizers and one of schedulers
        of_lightning = not any(isinstance(each, torch.optim.Optimizer) for each in parts[1])
    if of_lightning or any(
        isinstance(part, Mapping) and not {"scheduler", "optimizer"}.isdisjoint(part) for part in parts
    ):
        raise ConfigurationError(
            f"{where} returned a form that only Lightning accepts. Return (optimizer, scheduler) to advance the scheduler once per update, "
            "(optimizer, scheduler, 'epoch') to advance it once per epoch, or a mapping of names to such tuples"
        )
    return answer


class Optimizers(NamedTuple):
    """The optimizers and schedules that `configure_optimizers` returned, by name ("main" if it gives no name)."""

    optimizers: dict[str, torch.optim.Optimizer]
    schedules: dict[str, Schedule]
    named: dict[str, tuple[str, ...]]
    """For each name that `training_step` may give, the optimizers that then step: one, or those of a list."""


def read_optimizers(where: str, configured: Any, total_steps: int | None, *, in_turn: bool = False) -> Optimizers:
    """The optimizers and schedules in `configured`. `where`: the name of the method in errors. `total_steps`: the number of steps to come
    (None: not known), which is the length of schedules with a name. `in_turn`: whether each optimizer has a turn in every step."""
    result = Optimizers({}, {}, {})
    named = configured if isinstance(configured, Mapping) else {"main": configured}
    # If training_step names the optimizer, the number of updates of each is not known.
    alone = len(named) == 1 or in_turn
    total, unknown = (total_steps, "train has no length") if alone else (None, "several optimizers share the updates")
    members = {str(name): _members(str(name), given) for name, given in named.items()}
    result.named.update({name: tuple(labels) for name, labels in members.items()})
    for label, value in (pair for labels in members.values() for pair in labels.items()):
        optimizer, *rest = _parts(where, label, value)
        _check_optimizer(where, label, optimizer)
        if any(optimizer is other for other in result.optimizers.values()):
            raise ConfigurationError(f"{where}: optimizer {label!r} is listed twice; create one for each name")
        result.optimizers[label] = optimizer
        if rest and rest[0] is not None:
            own = f"{where}: the scheduler of {label!r}"
            result.schedules[label] = _schedule(own, optimizer, *rest, total=total, why_unknown=unknown)
    if not result.optimizers:
        raise ConfigurationError(f"{where} returned no optimizer")
    return result


def _members(name: str, value: Any) -> dict[str, Any]:
    """`value` by its name; or, if it is a list of optimizers that step together, each by its own label: "main.Muon", "main.AdamW"."""
    several = value if isinstance(value, tuple | list) else ()
    first = [each[0] if isinstance(each, tuple | list) and each else each for each in several]
    if len(first) < 2 or not all(isinstance(each, torch.optim.Optimizer) for each in first):
        return {name: value}
    kinds = [type(optimizer).__name__ for optimizer in first]
    numbers = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    labels = [f"{name}.{kind}{number + 1 if number else ''}" for kind, number in zip(kinds, numbers, strict=True)]
    return dict(zip(labels, several, strict=True))


def _parts(where: str, name: str, value: Any) -> tuple[Any, ...]:
    """The optimizer in `value` and, if they are given, its scheduler and when this advances."""
    parts = tuple(value) if isinstance(value, tuple | list) else (value,)
    optimizers = [isinstance(part, torch.optim.Optimizer) for part in parts]
    if optimizers not in ([True], [True, False], [True, False, False]):
        raise ConfigurationError(
            f"{where} returned {type(value).__name__}{f' for {name!r}' if name != 'main' else ''}; return an optimizer, "
            "(optimizer, scheduler) or (optimizer, scheduler, 'epoch'). For several: a list of these if they step together, or a mapping "
            "of names to these"
        )
    return parts


def _check_optimizer(where: str, name: str, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            f"{where}: LBFGS evaluates the loss several times per update, which the loop does not support; choose another "
            "optimizer, or run LBFGS by hand after the fit"
        )
    _refuse_prepared(f"{where}: optimizer {name!r}", optimizer)
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError as exc:
        raise ConfigurationError(
            f"{where}: optimizer {name!r}, {type(optimizer).__name__}, is not complete ({exc}). In its __init__, call "
            "super().__init__(params, defaults) first"
        ) from exc
    if not any(p.requires_grad for g in optimizer.param_groups for p in g["params"]):
        raise ConfigurationError(
            f"{where}: optimizer {name!r} holds no trainable parameter; give it parameters that require grad"
        )


def _refuse_prepared(what: str, part: Any) -> None:
    """Raise `ConfigurationError` for an optimizer or a scheduler that `accelerator.prepare` returned."""
    if type(part).__module__.startswith("accelerate."):
        raise ConfigurationError(
            f"{what} is {type(part).__name__}, which accelerator.prepare returned; return the one that was passed to prepare, because "
            "the loop steps it itself"
        )


def _schedule(
    where: str,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    advances: str | None = None,
    *,
    total: int | None,
    why_unknown: str,
) -> Schedule:
    text = None
    given = scheduler
    if isinstance(given, str):
        scheduler, text = named_schedule(where, optimizer, given, total, why_unknown)
    if isinstance(scheduler, type):
        raise ConfigurationError(
            f"{where} is the class {scheduler.__name__}; return an object, {scheduler.__name__}(optimizer, ...)"
        )
    _refuse_prepared(where, scheduler)
    if not all(callable(getattr(scheduler, n, None)) for n in ("step", "state_dict", "load_state_dict")):
        raise ConfigurationError(
            f"{where} is {type(scheduler).__name__}; it needs step(), state_dict(), load_state_dict(), or to be one of the names "
            f"{', '.join(schedule_names())}"
        )
    advances = _moment(where, given, scheduler, advances)
    by_metric = takes_metric(scheduler)
    name = text or type(scheduler).__name__
    return Schedule(scheduler, advances, text if text and not by_metric else f"{name}, advanced by {advances}")


def _moment(where: str, given: Any, scheduler: Any, advances: str | None) -> str:
    """When `scheduler` advances: "step", "epoch" or the name of a metric."""
    kind, by_metric = type(scheduler).__name__, takes_metric(scheduler)
    if isinstance(given, str) and advances is not None and not by_metric:
        raise ConfigurationError(
            f"{where} is {given!r}, and schedules with a name advance per update; leave {advances!r} out"
        )
    if by_metric and advances is None and getattr(scheduler, "mode", "min") == "max":
        raise ConfigurationError(
            f"{where}: {kind} has mode='max', and the metric by which it advances is val_loss if none is named; name the metric: "
            "(optimizer, scheduler, 'val_accuracy')"
        )
    advances = advances or ("val_loss" if by_metric else "step")
    if (advances in ("step", "epoch")) == by_metric:
        takes = "give 'step' (updates, the default) or 'epoch'"
        raise ConfigurationError(
            f"{where} cannot advance by {advances!r}; {f'{kind} takes the name of a metric' if by_metric else takes}"
        )
    if by_metric and isinstance(given, str) and "mode=" not in given:
        metric_mode(f"{where} is {given!r}", advances, None)
    return advances


def parameter_groups(module: torch.nn.Module, options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """See `TrainModule.parameter_groups`. Shapes are not used, because some strategies have flattened the parameters by then."""
    named = {id(parameter): name for name, parameter in module.named_parameters()}  # a tied parameter has one name here
    kinds = {  # FSDP adds a prefix to the names of classes
        f"{prefix}.{key}" if prefix else key: f"{type(layer).__name__.removeprefix('FSDP')}.{key}"
        for prefix, layer in module.named_modules()
        for key in layer._parameters
    }
    by_pattern: dict[str | None, list[torch.nn.Parameter]] = {None: [], **{pattern: [] for pattern in options}}
    for parameter in module.parameters():
        name = named[id(parameter)]
        texts = (name, kinds[name])
        by_pattern[next((p for p in options if any(re.search(p, text) for text in texts)), None)].append(parameter)
    if unused := [pattern for pattern in options if not by_pattern[pattern]]:
        raise ConfigurationError(
            f"parameter_groups: {', '.join(map(repr, unused))} matches no parameter, or only parameters that an earlier pattern "
            "matches; correct or remove it. Names are, for instance, "
            f"{', '.join(f'{name!r} ({kinds[name]})' for name in list(named.values())[:4])}"
        )
    rest: list[dict[str, Any]] = [{"params": by_pattern[None]}] if by_pattern[None] else []
    return rest + [{"params": by_pattern[pattern], **options[pattern]} for pattern in options]


_ALIGNED = {"params", "param_names"}
"""The entries of a group that are lists with an item for each parameter; it has names if the optimizer was given named parameters."""


def reorder(group: dict[str, Any], order: Sequence[int]) -> None:
    """Put the parameters of a group at the numbers `order` of its list, in place."""
    for key in _ALIGNED & group.keys():
        group[key][:] = [group[key][number] for number in order]


def leave_out_frozen(optimizers: Mapping[str, torch.optim.Optimizer]) -> list[str]:
    """Remove the frozen parameters from the optimizers' groups; the groups stay. Returns notes for the plan."""
    notes = []
    for name, optimizer in optimizers.items():
        before = sum(len(group["params"]) for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            trained = [p.requires_grad for p in group["params"]]
            for key in _ALIGNED & group.keys():
                group[key] = list(itertools.compress(group[key], trained))
        if left_out := before - sum(len(group["params"]) for group in optimizer.param_groups):
            notes.append(f"optimizer {name!r}: {left_out} of {before} parameters are frozen and left out")
    return notes


def notes_of_untrained(module: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> list[str]:
    """Notes for the plan about parameters and layers that are trainable but will not be trained."""
    held = {id(p) for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    notes = (
        [
            f"not in any optimizer, so they are not trained: {few(left)}; pass them to one in configure_optimizers, or freeze "
            "them with requires_grad_(False)"
        ]
        if left
        else []
    )
    registered = {id(p) for p in module.parameters()}
    for place, kind, layers in _layers_in_containers(module):
        if any(p.requires_grad and id(p) not in registered for layer in layers for p in layer.parameters()):
            notes.append(
                f"{place} is a {kind} of layers, which torch does not see: they are not trained, moved or saved; use "
                f"torch.nn.{'ModuleDict' if kind == 'dict' else 'ModuleList'}, or freeze them if that is meant"
            )
    return notes


def _layers_in_containers(module: torch.nn.Module) -> Iterator[tuple[str, str, list[torch.nn.Module]]]:
    """The place, the kind and the layers of each public attribute that is a plain list, tuple or dict with layers in it."""
    for name, child in module.named_modules():
        for attribute, value in vars(child).items():
            if isinstance(value, list | tuple | dict) and not attribute.startswith("_"):
                inside = value.values() if isinstance(value, dict) else value
                if layers := [each for each in inside if isinstance(each, torch.nn.Module)]:
                    where = ".".join(filter(None, (type(module).__name__, name, attribute)))
                    yield where, type(value).__name__, layers


def notes_of_length(schedules: Mapping[str, Schedule], total_steps: int | None, max_epochs: int | None) -> list[str]:
    """Notes for the plan about schedulers that were made for another length than this fit has. Raises `ConfigurationError` for a scheduler
    that would fail during the fit. `total_steps`: the updates of each optimizer, None if not known."""
    notes = []
    for schedule in schedules.values():
        if schedule.text.endswith(ENDS_IN_WARMUP):
            notes.append(
                f"the schedule is {schedule.text}: the learning rate does not reach its full value in this fit"
            )
        per_epoch = schedule.advances == "epoch"
        comes, unit = (max_epochs, "epochs") if per_epoch else (total_steps, "updates")
        for name, length in dict.fromkeys(warmup_lengths(schedule.made)):
            if comes is not None and length > comes:
                notes.append(
                    f"{type(schedule.made).__name__} warms up over {length} {unit} ({name}) and this fit has {comes}: the learning rate "
                    "does not reach its full value"
                )
        for name, length in dict.fromkeys(own_lengths(schedule.made)) if comes is not None else ():
            if length == comes:
                continue
            said = f"{type(schedule.made).__name__} is made for {length} {unit} ({name}) and this fit has {comes}"
            remedy = "count with self.trainer.total_steps (updates, on any number of ranks), or name a schedule: (optimizer, 'cosine')"
            if not per_epoch and length == max_epochs:
                remedy = "advance it once per epoch: (optimizer, scheduler, 'epoch')"
            if isinstance(schedule.made, lr_scheduler.OneCycleLR) and comes is not None and length < comes:
                raise ConfigurationError(f"{said}, after which it cannot go on; {remedy}")
            notes.append(f"{said}; {remedy}")
    return notes


def inner_optimizers(outer: torch.optim.Optimizer, name: str) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """The optimizers that `outer`, called `name`, holds as attributes, or in lists, tuples and dicts there: each with its place, and those
    inside it."""
    yield from _inside(outer, name, {id(outer)})


def _inside(outer: torch.optim.Optimizer, name: str, seen: set[int]) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    for attribute, value in vars(outer).items():
        several = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for each in several:
            if isinstance(each, torch.optim.Optimizer) and id(each) not in seen:
                seen.add(id(each))
                place = f"{name}.{attribute}"
                yield place, each
                yield from _inside(each, place, seen)
