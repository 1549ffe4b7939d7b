"""What a Trainer was asked for: its arguments, checked value by value. Pure data; nothing is resolved here.

`Trainer` documents the arguments; `check_arguments` is where a wrong name or value is told so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabricate.errors import ConfigurationError, did_you_mean
from fabricate.values import Every

CHANGES = ("global_batch_size", "train", "seed", "plugins")
"""What `accept_changes` may name."""

COMPILE_OPTIONS = ("backend", "mode", "fullgraph", "dynamic", "options")
"""What a mapping given as `compile` may hold."""

_ELSEWHERE = {
    "callbacks": "plugins=[...]",
    "logger": "trackers=[...]",
    "loggers": "trackers=[...]",
    "report_to": "trackers=[...]",
    "accumulate_grad_batches": "gradient_accumulation_steps=",
    "gradient_clip_val": "max_grad_norm=",
    "gradient_clip_algorithm": "max_grad_norm= or max_grad_value=",
    "devices": "the launcher (fabricate run --nproc N)",
    "accelerator": "the launcher, or ACCELERATE_USE_CPU=true",
    "num_nodes": "the launcher (fabricate run --nnodes N)",
    "default_root_dir": "run_dir=",
    "output_dir": "run_dir=",
    "val_check_interval": "validate_every=",
    "check_val_every_n_epoch": "validate_every=",
    "log_every_n_steps": "log_every=",
    "enable_progress_bar": "progress=",
    "enable_checkpointing": "run_dir=",
    "mixed_precision": "precision=",
    "bf16": "precision='bf16'",
    "fp16": "precision='fp16'",
    "num_train_epochs": "max_epochs=",
    "learning_rate": "configure_optimizers",
    "train_dataset": "trainer.fit(module, train, val)",
    "torch_compile": "compile=",
    "num_sanity_val_steps": "validate_first=",
    "per_device_train_batch_size": "fit(..., batch_size=)",
}
"""Lightning's and transformers' names for arguments, and what to use here."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a Trainer. `strategy` and `precision` as given, durations parsed, `keep` as a mapping."""

    strategy: Any
    precision: Any
    max_steps: int | None
    max_epochs: int | None
    max_time: Every | None
    timeout: Every
    gradient_accumulation_steps: int | None
    global_batch_size: int | None
    max_grad_norm: float | None
    max_grad_value: float | None
    nonfinite: str
    seed: int | None
    deterministic: bool
    compile: str | Mapping[str, Any] | None
    run_dir: Path | None
    save: str
    save_every: Every | None
    keep: dict[str, Any]
    save_frozen: bool
    validate_every: Every | None
    validate_first: bool
    log_every: Every
    progress: bool
    plugins: tuple[object, ...]
    trackers: tuple[Any, ...]
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    fast_dev_run: bool
    accept_changes: tuple[str, ...]


def check_arguments(known: Iterable[str], unknown: Mapping[str, Any], **given: Any) -> Settings:
    """The settings, or a `ConfigurationError` that names the first argument that is wrong, its value and the remedy."""
    for name in unknown:
        hint = f"; use {_ELSEWHERE[name]}" if name in _ELSEWHERE else did_you_mean(name, known)
        raise ConfigurationError(f"Trainer has no argument {name!r}{hint}")
    for name, least in (
        ("max_steps", 0),
        ("max_epochs", 0),
        ("gradient_accumulation_steps", 1),
        ("global_batch_size", 1),
    ):
        value = given[name]
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigurationError(f"{name}={value!r}: give a whole number of at least {least}, or None")
    for name in ("max_grad_norm", "max_grad_value"):
        clip = given[name]
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
            raise ConfigurationError(f"{name}={clip!r}: give a positive number, or None not to clip")
    if given["max_grad_norm"] is not None and given["max_grad_value"] is not None:
        raise ConfigurationError(
            f"max_grad_norm={given['max_grad_norm']!r} and max_grad_value={given['max_grad_value']!r} are both set; choose one of them"
        )
    if not isinstance(given["save_frozen"], bool):
        raise ConfigurationError(f"save_frozen={given['save_frozen']!r}: give True or False")
    if given["nonfinite"] not in ("stop", "skip"):
        hint = did_you_mean(str(given["nonfinite"]), ("stop", "skip"))
        raise ConfigurationError(f"nonfinite={given['nonfinite']!r}{hint}; give 'stop' or 'skip'")
    if given["save"] not in ("sync", "async"):
        hint = did_you_mean(str(given["save"]), ("sync", "async"))
        raise ConfigurationError(f"save={given['save']!r}{hint}; give 'sync' or 'async'")
    seed = given["seed"]
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32):
        raise ConfigurationError(f"seed={seed!r}: give a whole number from 0 to {2**32 - 1}, or None")
    if isinstance(given["plugins"], str) or not isinstance(given["plugins"], Iterable):
        raise ConfigurationError(f"plugins={given['plugins']!r}: give a list, plugins=[...]")
    for change in given["accept_changes"]:
        if change not in CHANGES:
            raise ConfigurationError(
                f"accept_changes={change!r}{did_you_mean(change, CHANGES)}; known: {', '.join(CHANGES)}"
            )
    for name in ("save_every", "validate_every", "log_every"):
        given[name] = Every.parse(name, given[name]) if given[name] is not None or name == "log_every" else None
    for name, example in (("max_time", "11 hours"), ("timeout", "30 minutes")):
        if given[name] is not None or name == "timeout":
            given[name] = Every.parse(name, given[name])
            if given[name].unit not in ("minutes", "hours"):
                raise ConfigurationError(f"{name}={str(given[name])!r}: give a time, for instance {example!r}")
    given["compile"] = _parse_compile(given["compile"])
    given["keep"] = parse_keep(given["keep"])
    given["run_dir"] = Path(os.fspath(given["run_dir"])) if given["run_dir"] is not None else None
    given["trackers"] = (given["trackers"],) if isinstance(given["trackers"], str) else tuple(given["trackers"])
    given["plugins"], given["accept_changes"] = tuple(given["plugins"]), tuple(given["accept_changes"])
    if given["fast_dev_run"]:
        given |= {
            "max_steps": 1,
            "max_epochs": None,
            "limit_train_batches": None,
            "limit_val_batches": 1,
            "trackers": (),
        }
        given |= {"validate_every": Every(steps=1)}
    return Settings(**given)


def _parse_compile(compile: bool | str | Mapping[str, Any]) -> str | Mapping[str, Any] | None:
    if compile is False or compile is None:
        return None
    if compile is True:
        return {}
    if compile == "blocks":
        return "blocks"
    if isinstance(compile, Mapping):
        for name in compile:
            if name not in COMPILE_OPTIONS:
                raise ConfigurationError(
                    f"compile: torch.compile has no option {name!r}{did_you_mean(str(name), COMPILE_OPTIONS)}; known: "
                    f"{', '.join(COMPILE_OPTIONS)}"
                )
        return dict(compile)
    raise ConfigurationError(
        f"compile={compile!r}: give True, 'blocks', or options of torch.compile such as {{'mode': 'max-autotune'}}"
    )


def parse_keep(keep: int | str | Mapping[str, Any]) -> dict[str, Any]:
    """`keep` as a mapping with last (None: all), metric, mode and, where asked for, best."""
    defaults: dict[str, Any] = {"last": None, "metric": "val_loss", "mode": "min"}
    if keep == "all":
        return defaults
    if isinstance(keep, int) and not isinstance(keep, bool) and keep >= 1:
        return {**defaults, "last": keep}
    if isinstance(keep, Mapping) and set(keep) <= {"last", "best", "metric", "mode"}:
        parsed = {**defaults, "last": 1, **keep}
        counts = [parsed["last"], parsed.get("best", 1)]
        if parsed["mode"] in ("min", "max") and all(type(c) is int and c >= 1 for c in counts):
            return parsed
    raise ConfigurationError(
        f"keep={keep!r}: give a number of at least 1, 'all', or a mapping such as "
        "{'last': 2, 'best': 1, 'metric': 'val_loss', 'mode': 'min'}"
    )
