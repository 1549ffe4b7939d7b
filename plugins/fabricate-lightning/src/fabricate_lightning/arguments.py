"""The translation of the arguments of Lightning's Trainer to fabricate's. A value without counterpart is an error that names it.

Must not know: callbacks, loggers, how a fit runs.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fabricate import ConfigurationError, Every, ModelSummary, Strategy

STRATEGIES = {
    "auto": "auto",
    "single_device": "single",
    "ddp": "ddp",
    "ddp_spawn": "ddp",
    "ddp_fork": "ddp",
    "ddp_notebook": "ddp",
    "ddp_find_unused_parameters_true": "ddp:find_unused_parameters=true",
    "ddp_find_unused_parameters_false": "ddp",
    "fsdp": "fsdp",
    "deepspeed": "zero2",
    "deepspeed_stage_1": "zero1",
    "deepspeed_stage_2": "zero2",
    "deepspeed_stage_2_offload": "zero2:offload_optimizer=cpu",
    "deepspeed_stage_3": "zero3",
    "deepspeed_stage_3_offload": "zero3:offload_optimizer=cpu,offload_param=cpu",
}
PRECISIONS: dict[str | int | None, str] = {
    **dict.fromkeys((None, 32, "32", "32-true"), "fp32"),
    **dict.fromkeys(("bf16-mixed", "bf16"), "bf16"),
    **dict.fromkeys((16, "16", "16-mixed"), "fp16"),
    "transformer-engine": "fp8:backend=te",
}
_NO_COUNTERPART: dict[str, tuple[tuple[Any, ...], str]] = {
    "benchmark": ((None, False), "set torch.backends.cudnn.benchmark = True in the script"),
    "profiler": ((None,), "use fabricate.Profiler with fabricate.Trainer and adapt(module)"),
    "barebones": ((False,), "leave it out"),
    "plugins": ((None, [], ()), "precisions and strategies have names, precision= and strategy="),
    "reload_dataloaders_every_n_epochs": ((0,), "let a sampler, or an iterable, change with the epoch"),
    "model_registry": ((None,), "upload what RUN_DIR/model/ holds"),
    "num_nodes": ((1,), "start the nodes with fabricate run --nnodes N, or another launcher"),
}
"""Arguments that have no counterpart: the values that change nothing, and what to do instead."""


def translated(given: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """The arguments of fabricate's Trainer for those of Lightning's. `ConfigurationError` for a value without counterpart."""
    for name, (harmless, instead) in _NO_COUNTERPART.items():
        if not any(given[name] is value or given[name] == value for value in harmless):
            raise ConfigurationError(f"Trainer({name}={given[name]!r}) has no counterpart in fabricate; {instead}")
    settings: dict[str, Any] = {
        "fast_dev_run": given["fast_dev_run"],
        "min_epochs": given["min_epochs"],
        "min_steps": given["min_steps"],
        "overfit_batches": given["overfit_batches"],
        "log_every": Every(steps=50 if given["log_every_n_steps"] is None else max(1, given["log_every_n_steps"])),
        "progress": given["enable_progress_bar"] is not False,
        "detect_anomaly": given["detect_anomaly"],
        "gradient_accumulation_steps": given["accumulate_grad_batches"],
        "plugins": [ModelSummary()] if given["enable_model_summary"] else [],
    }
    _check_processes(given, world_size)
    parts = (_length(given), _limits(given), _validation(given), _clipping(given), _strategy(given, world_size))
    return settings | {name: value for part in parts for name, value in part}


Pairs = Iterator[tuple[str, Any]]


def _length(given: Mapping[str, Any]) -> Pairs:
    epochs, steps, time = given["max_epochs"], given["max_steps"], given["max_time"]
    if epochs == -1 and steps == -1:
        raise ConfigurationError(
            "Trainer(max_epochs=-1) never ends; give max_steps, or max_time with a large max_epochs"
        )
    yield "max_epochs", 1000 if epochs is None and steps == -1 else None if epochs == -1 else epochs
    yield "max_steps", None if steps == -1 else steps
    if time is not None:
        yield "max_time", Every(minutes=_seconds("max_time", time) / 60)
    deterministic = given["deterministic"]
    if deterministic not in (None, True, False):
        raise ConfigurationError(
            f"Trainer(deterministic={deterministic!r}) has no counterpart in fabricate; give True or False"
        )
    yield "deterministic", bool(deterministic)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, str):
        parts = value.split(":")
        if len(parts) == 4 and all(part.strip().isdigit() for part in parts):
            value = dict(zip(("days", "hours", "minutes", "seconds"), map(int, parts), strict=True))
    if isinstance(value, Mapping):
        value = datetime.timedelta(**value)
    if not isinstance(value, datetime.timedelta):
        raise ConfigurationError(
            f"Trainer({name}={value!r}): give 'DD:HH:MM:SS', a timedelta or its arguments as a mapping"
        )
    return value.total_seconds()


def _limits(given: Mapping[str, Any]) -> Pairs:
    for stage in ("train", "val", "test", "predict"):
        name = f"limit_{stage}_batches"
        value = given[name]
        if given["fast_dev_run"] and stage in ("test", "predict"):  # fabricate's own limits fits and validations
            value = int(given["fast_dev_run"])
        if value == 0 and value is not False and value is not None and stage != "val":
            raise ConfigurationError(f"Trainer({name}={value!r}) leaves nothing to read; leave the call out")
        whole = isinstance(value, float) and value == 1.0
        yield name, None if value is None or whole else 0 if value == 0 else value


def _validation(given: Mapping[str, Any]) -> Pairs:
    sanity = given["num_sanity_val_steps"]
    yield "sanity_batches", 2 if sanity is None else 10**9 if sanity == -1 else sanity
    interval, epochs, batches = (
        given["val_check_interval"],
        given["check_val_every_n_epoch"],
        given["accumulate_grad_batches"],
    )
    if isinstance(interval, str | datetime.timedelta | Mapping):
        yield "validate_every", Every(minutes=_seconds("val_check_interval", interval) / 60)
    elif interval is None or (isinstance(interval, float) and interval == 1.0):
        yield "validate_every", Every(epochs=epochs or 1)
    elif epochs not in (None, 1):
        raise ConfigurationError(
            f"Trainer(val_check_interval={interval!r}, check_val_every_n_epoch={epochs}): fabricate supports only one of the two; "
            "leave one out"
        )
    elif isinstance(interval, float):
        yield "validate_every", interval
    elif interval % batches:
        raise ConfigurationError(
            f"Trainer(val_check_interval={interval}, accumulate_grad_batches={batches}): fabricate validates only between two "
            f"updates; give a val_check_interval that is a multiple of {batches}"
        )
    else:
        yield "validate_every", Every(steps=interval // batches)


def _clipping(given: Mapping[str, Any]) -> Pairs:
    value, algorithm = given["gradient_clip_val"], given["gradient_clip_algorithm"] or "norm"
    algorithm = str(getattr(algorithm, "value", algorithm)).lower()
    if algorithm not in ("norm", "value"):
        raise ConfigurationError(f"Trainer(gradient_clip_algorithm={algorithm!r}): give 'norm' or 'value'")
    if value:
        yield "max_grad_norm" if algorithm == "norm" else "max_grad_value", value


def _strategy(given: Mapping[str, Any], world_size: int) -> Pairs:
    strategy = given["strategy"]
    if isinstance(strategy, Strategy):
        yield "strategy", strategy
    elif strategy in STRATEGIES:
        name = STRATEGIES[strategy]
        if given["sync_batchnorm"] and world_size > 1:
            if name not in ("auto", "ddp"):
                raise ConfigurationError(
                    f"Trainer(sync_batchnorm=True, strategy={strategy!r}): fabricate supports sync_batchnorm with strategy='ddp' "
                    "only; use that"
                )
            name = "ddp:sync_batchnorm=true"
        yield "strategy", name
    else:
        raise ConfigurationError(
            f"Trainer(strategy={strategy!r}) has no counterpart in fabricate; give a name ({', '.join(STRATEGIES)}) or a fabricate.Strategy"
        )
    precision = given["precision"]
    if not isinstance(precision, str | int | None) or precision not in PRECISIONS:
        allowed = ", ".join(str(name) for name in PRECISIONS if isinstance(name, str))
        raise ConfigurationError(
            f"Trainer(precision={precision!r}) has no counterpart in fabricate; give one of {allowed}"
        )
    yield "precision", PRECISIONS[precision]


def _check_processes(given: Mapping[str, Any], world_size: int) -> None:
    """Refuse devices that the started processes would not use."""
    devices, accelerator = given["devices"], given["accelerator"]
    number = len(devices) if isinstance(devices, list | tuple) else devices
    if str(number) not in ("auto", "-1", str(world_size)):
        raise ConfigurationError(
            f"Trainer(devices={devices!r}): {world_size} process{'es were' if world_size > 1 else ' was'} started, and fabricate "
            f"itself starts no processes; start them with fabricate run script.py --nproc {number}"
        )
    if not given["use_distributed_sampler"] and world_size > 1:
        raise ConfigurationError(
            "Trainer(use_distributed_sampler=False) on several ranks: fabricate divides the data; leave it out"
        )
    present = torch.accelerator.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in (
        "true",
        "1",
        "yes",
    )
    kind = str(torch.accelerator.current_accelerator().type) if present else "cpu"  # type: ignore[union-attr]
    wanted = {"auto": kind, "gpu": kind if kind in ("cuda", "mps") else "a GPU"}.get(accelerator, accelerator)
    if wanted != kind:
        how = "set ACCELERATE_USE_CPU=true before the start" if wanted == "cpu" else "give 'auto'"
        raise ConfigurationError(f"Trainer(accelerator={accelerator!r}): this process would run on {kind}; {how}")
