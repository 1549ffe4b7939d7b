"""The optimizer and the schedule that `transformers.Trainer` would make of its arguments.

Must not know: a Trainer. transformers is imported only for its Adafactor.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fabricate.errors import ConfigurationError

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "adamw_torch": (),
    "adamw_torch_fused": (),
    "adafactor": (),
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
}
"""The optimizers that can be built here, and the options that `optim_args` may set for each."""
_SWITCHES = ("nesterov", "centered")
_SCHEDULE_OPTIONS = {"num_decay_steps": "decay", "min_lr_rate": "minimum", "min_lr_ratio": "minimum"}
"""Keys of `lr_scheduler_kwargs` that have another name here."""
_BY_METRIC = ("reduce_lr_on_plateau", "greedy")


@dataclass(frozen=True)
class Wanted:
    """An optimizer by name with its options, the weight decay of the decayed parameters, and the `schedule` that follows it in the return
    value of `configure_optimizers`."""

    name: str
    options: dict[str, Any]
    weight_decay: float
    schedule: tuple[str, ...]


def wanted(args: Any) -> Wanted:
    """The optimizer and the schedule that a `TrainingArguments` describes. Raises `ConfigurationError` for those that cannot be built
    here."""
    name = _value(args.optim)
    if name not in _OPTIONS:
        raise ConfigurationError(
            f"TrainingArguments.optim={name!r} cannot be built from its name (only {', '.join(_OPTIONS)} can); return the "
            "optimizer from configure_optimizers, and leave optim at its default"
        )
    options: dict[str, Any] = {"lr": args.learning_rate}
    if name.startswith("adamw_torch"):
        options |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        options |= {"fused": True} if name.endswith("_fused") else {}
    return Wanted(name, options | _own_options(name, args.optim_args), args.weight_decay, _schedule(args))


def built(wanted: Wanted, module: torch.nn.Module) -> tuple[Any, ...]:
    """The optimizer over the trainable parameters of `module`, and its schedule, in the form that `configure_optimizers` returns."""
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            layer = module.get_submodule(name.rpartition(".")[0])
            plain = isinstance(layer, torch.nn.LayerNorm) or _NOT_DECAYED.search(name.lower())
            (others if plain else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": wanted.weight_decay}, {"params": others, "weight_decay": 0.0}]
    filled = [group for group in groups if group["params"]]
    return _kind(wanted.name)(filled, **wanted.options), *wanted.schedule


def _kind(name: str) -> Any:
    if name == "adafactor":
        from transformers import Adafactor

        return functools.partial(Adafactor, scale_parameter=False, relative_step=False)
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    return kinds.get(name, torch.optim.AdamW)


def _own_options(name: str, text: str | None) -> dict[str, Any]:
    """The options in `optim_args`, such as "momentum=0.9,nesterov=true", as values."""
    options: dict[str, Any] = {}
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        option, _, value = part.partition("=")
        if option not in _OPTIONS[name]:
            allowed = ", ".join(_OPTIONS[name]) or "none"
            raise ConfigurationError(
                f"TrainingArguments.optim_args={text!r}: {option} has no effect on optim={name!r}, whose options here are: {allowed}"
            )
        options[option] = value.lower() in ("true", "1", "yes") if option in _SWITCHES else float(value)
    return options


def _schedule(args: Any) -> tuple[str, ...]:
    """The schedule by its name here, such as "linear:warmup=0.1", and, if it advances by a metric, the name of the metric."""
    kind, kwargs = _value(args.lr_scheduler_type), args.lr_scheduler_kwargs or {}
    warmup = args.warmup_steps or getattr(args, "warmup_ratio", None) or 0
    if warmup and kind in ("constant", *_BY_METRIC):
        raise ConfigurationError(
            f"TrainingArguments.warmup_steps={warmup!r} has no effect in transformers with lr_scheduler_type={kind!r}; use "
            "'constant_with_warmup', or leave it out"
        )
    options: dict[str, Any] = {"warmup": warmup if warmup < 1 else int(warmup)} if warmup else {}
    options |= {_SCHEDULE_OPTIONS.get(key, key): value for key, value in _plain(kwargs).items()}
    text = ",".join(f"{key}={value}" for key, value in options.items())
    named = f"{kind}:{text}" if text else kind
    if kind not in _BY_METRIC:
        return (named,)
    return named, f"val_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"


def _plain(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    for key, value in kwargs.items():
        if not isinstance(value, bool | int | float | str):
            raise ConfigurationError(
                f"TrainingArguments.lr_scheduler_kwargs: {key}={value!r} cannot be written in a schedule's name; return the scheduler from "
                "configure_optimizers"
            )
    return kwargs


def _value(name: Any) -> str:
    return str(getattr(name, "value", name))
