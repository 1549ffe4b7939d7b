"""From settings to choices: the strategy, the precision and the device of a run, and the source of each choice.

Owns the decision between an argument, the launcher's value, a strategy's file and "auto". Builds nothing on a device and sends no message
to another rank. Must not know: data, the engine, the loop, checkpoints.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fabricate.configuration.arguments import Settings
from fabricate.configuration.launched import Launched, launched
from fabricate.distributed.devices import choose_device
from fabricate.errors import ConfigurationError, first_line, size_text
from fabricate.launch.ranks import Launch, detect
from fabricate.launch.settings import requests
from fabricate.launch.variables import Request
from fabricate.model.memory import Need, capacity, need_ahead, total
from fabricate.module import TrainModule
from fabricate.precisions.base import Precision
from fabricate.registry.hook_calls import Origin
from fabricate.registry.registry import Registry, distribution_of
from fabricate.strategies.base import Strategy


@dataclass(frozen=True)
class Choice:
    """A strategy or precision, the source of the choice, and the origin of the object's plugin."""

    chosen: Any
    source: str
    origin: Origin


@dataclass(frozen=True)
class Resolved:
    """The resolved choices of a run. A pair (value, source) is None if nothing sets it; `batch_size` is that of a strategy's file."""

    launch: Launch
    registry: Registry
    device: torch.device
    device_source: str
    choices: dict[str, Choice]
    accumulation: tuple[int, str] | None
    max_grad_norm: tuple[float, str] | None
    batch_size: tuple[int, str] | None
    global_batch_size: tuple[int, str] | None
    seed: tuple[int, str]
    plan_only: bool
    launched: dict[str, Launched] = field(default_factory=dict)
    """Arguments of the Trainer that `fabricate run` set."""

    @property
    def strategy(self) -> Strategy:
        """The strategy object of this fit."""
        strategy: Strategy = self.choices["strategy"].chosen
        return strategy

    @property
    def precision(self) -> Precision:
        """The precision object of this fit."""
        precision: Precision = self.choices["precision"].chosen
        return precision


def resolve(settings: Settings, module: TrainModule, training: bool = True) -> Resolved:
    """Resolve names to objects and "auto" to a choice, and compare the launcher's values with the Trainer's. Two different values for a
    setting are an error that names both. The memory need of `module` is estimated if a choice depends on it; `module` is not changed. All
    ranks, no collectives."""
    launch, requested = detect(os.environ), requests(os.environ)
    registry = Registry(settings.plugins)
    device, device_source = choose_device(os.environ, requested, launch.local_rank)
    choices: dict[str, Choice] = {}
    for kind, value in (("strategy", settings.strategy), ("precision", settings.precision)):
        name, source = _choose(kind, value, requested.get(kind), device)
        if name == "auto":
            precision = _choose("precision", settings.precision, requested.get("precision"), device)[0]
            computes: Precision = registry.resolve("precision", precision)[0]
            ahead = functools.partial(_need, settings, module, training, computes)
            name, source = _automatic(launch, device, registry, ahead)
        chosen, offer = registry.resolve(kind, name)
        choices[kind] = Choice(chosen, source, offer.origin if offer is not None else distribution_of(chosen))
        if kind == "strategy":
            requested = _with_file(requested, chosen)
    max_grad_norm = _agreed("max_grad_norm", settings.max_grad_norm, requested, float)
    _check_max_grad_value(settings, choices["strategy"].chosen, max_grad_norm)
    if settings.seed is not None:
        seed = (settings.seed, "argument")
    else:
        seed = (torch.initial_seed() % 2**32, "torch's initial seed; random generators are not seeded")
    return Resolved(
        launch=launch,
        registry=registry,
        device=device,
        device_source=device_source,
        choices=choices,
        accumulation=_agreed("gradient_accumulation_steps", settings.gradient_accumulation_steps, requested, int),
        max_grad_norm=max_grad_norm,
        batch_size=_agreed("batch_size", None, requested, int),
        global_batch_size=_agreed("global_batch_size", settings.global_batch_size, requested, int),
        seed=seed,
        plan_only="plan_only" in requested,
        launched=launched(os.environ),
    )


def _with_file(requested: Mapping[str, Request], strategy: Strategy) -> dict[str, Request]:
    """The requests of the launcher, with the settings of the strategy's configuration file. Raises `ConfigurationError` if they differ."""
    merged = dict(requested)
    for name, (value, source) in strategy.asks().items():
        request = merged.setdefault(name, Request(str(value), source))
        if type(value)(request.value) != value:
            raise ConfigurationError(
                f"{name}: {request.source} says {request.value!r} and {source} says {value!r}; remove one, or make them equal"
            )
    return merged


def _check_max_grad_value(settings: Settings, strategy: Strategy, max_grad_norm: tuple[float, str] | None) -> None:
    """Raise `ConfigurationError` if `max_grad_value` is combined with `max_grad_norm`, or with a strategy that hides gradients."""
    if settings.max_grad_value is None:
        return
    if max_grad_norm is not None:
        raise ConfigurationError(
            f"max_grad_value={settings.max_grad_value} is set in the Trainer and max_grad_norm={max_grad_norm[0]} by "
            f"{max_grad_norm[1]}; remove one"
        )
    if not strategy.exposes_gradients:
        raise ConfigurationError(
            f"max_grad_value={settings.max_grad_value}: strategy={strategy.name!r} does not give access to "
            "gradients, so they cannot be clipped by value; use max_grad_norm="
        )


def _need(settings: Settings, module: TrainModule, training: bool, precision: Precision) -> Need:
    return need_ahead(module, training, settings.max_steps).computed_in(precision)


def _automatic(launch: Launch, device: torch.device, registry: Registry, ahead: Callable[[], Need]) -> tuple[str, str]:
    """The strategy for "auto" and the reason: "single" for one process; else "ddp", or "fsdp" if a replica and its training state do not
    fit into memory."""
    if launch.world_size == 1:
        return "single", "auto: one process"
    reason = f"auto: {launch.world_size} processes"
    try:
        needed = ahead()
    except Exception as exc:  # any error of configure_model; the fit will call it again and report the error
        return "ddp", f"{reason}; memory is not known before building ({first_line(exc)})"
    replica: Strategy = registry.resolve("strategy", "ddp")[0]
    takes = total(needed.per_rank(replica, launch.world_size), device.type != "cpu")
    room, where = capacity(device, launch.local_world_size)
    fits = f"{reason}; a replica takes {size_text(takes)}"
    if takes > room:
        return "fsdp", f"{fits}, more than {size_text(room)} ({where})"
    return "ddp", f"{fits} of {size_text(room)} ({where})"


def _choose(kind: str, value: Any, request: Request | None, device: torch.device) -> tuple[Any, str]:
    """The name or object of a strategy or precision, and its source. "auto": `_automatic` has to choose the strategy."""
    automatic = isinstance(value, str) and value == "auto"
    if request is not None:
        own = getattr(value, "name", value)
        names = {str(own), str(own).partition(":")[0]}  # the Trainer's value may have options, which the request lacks
        if not automatic and request.value not in (names | {"no"} if "fp32" in names else names):
            raise ConfigurationError(
                f"{kind}={own!r} is set in the Trainer and {request.value!r} by {request.source}; remove one, or make "
                "them equal"
            )
        return (request.value, request.source) if automatic else (value, "argument")
    if not automatic:
        return value, "argument"
    if kind == "strategy":
        return "auto", ""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16", "auto: the device computes in bf16 natively"
    return "fp32", f"auto: {device.type} is not known to compute in bf16 natively"


def _agreed(argument: str, own: Any, requested: Mapping[str, Request], kind: type) -> tuple[Any, str] | None:
    """The value of `argument` and its source, None if it is not set. Raises `ConfigurationError` if `own`, the Trainer's value, and a
    request differ."""
    request = requested.get(argument)
    if request is None:
        return (own, "argument") if own is not None else None
    value = kind(request.value)
    if own is not None and own != value:
        raise ConfigurationError(
            f"{argument}={own} is set in the Trainer and {value} by {request.source}; remove one, or make them equal"
        )
    return (value, request.source)
