"""Lightning's callbacks that fabricate replaces by plugins and arguments of its Trainer. All other callbacks are called.

Must not know: the Trainer's own arguments (`arguments`), when hooks are called (`adapter`).
"""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fabricate import (
    ConfigurationError,
    DeviceStats,
    Every,
    ModelSummary,
    SaveOnException,
    StochasticWeightAveraging,
    Throughput,
)
from fabricate_lightning.kinds import is_a, overridden

REFUSED = {
    "WeightAveraging": "plugins=['ema'] of fabricate.Trainer averages weights, with adapt(module)",
    "GradientAccumulationScheduler": "accumulate_grad_batches has one value for a fit",
    "BatchSizeFinder": "batch_size=fabricate.BatchSizeFinder() of fabricate.Trainer.fit, with adapt(module) and a data set",
    "LearningRateFinder": "fabricate.LearningRateFinder in a fabricate.Trainer, with adapt(module)",
    "BaseFinetuning": "fabricate.UnfreezeAt in a fabricate.Trainer, with adapt(module)",
    "ModelPruning": "torch.nn.utils.prune in a hook of the module",
    "SpikeDetection": "use EarlyStopping(check_finite=True); a loss that is not finite also ends a fit without it",
}
"""Callbacks that cannot run, and what to use instead."""
_SHOWN = ("ProgressBar", "LearningRateMonitor")


@dataclass
class Translated:
    """The result of translating callbacks."""

    called: list[Any] = field(default_factory=list)
    """The callbacks whose hooks are called."""
    checkpoints: list[Any] = field(default_factory=list)
    """The ModelCheckpoint objects."""
    plugins: list[Any] = field(default_factory=list)
    """Plugins of fabricate's Trainer."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of fabricate's Trainer."""
    notes: list[str] = field(default_factory=list)
    """Differences from Lightning that the callbacks cause."""


def translated(callbacks: Iterable[Any]) -> Translated:
    """The translation of `callbacks`. Raises `ConfigurationError` for a callback that cannot run."""
    translation = Translated()
    for callback in callbacks:
        _check(callback)
        plugin = next((make for name, make in _PLUGINS.items() if is_a(callback, name)), None)
        if is_a(callback, "ModelCheckpoint"):
            translation.checkpoints.append(callback)
        elif is_a(callback, "Timer"):
            translation.settings["max_time"] = Every(minutes=_duration(callback) / 60)
        elif plugin is not None:
            translation.plugins.append(plugin(callback))
        elif not any(is_a(callback, name) for name in _SHOWN):
            translation.called.append(callback)
        translation.notes.extend(_differences(callback))
    if any(isinstance(plugin, StochasticWeightAveraging) for plugin in translation.plugins):
        translation.notes.append(
            "StochasticWeightAveraging averages weights at the end of each epoch (in Lightning: at the start). Batch norm "
            "statistics are computed anew after the fit (in Lightning: in an additional epoch)"
        )
    if translation.checkpoints:
        _keep(translation)
    return translation


def _differences(callback: Any) -> Iterable[str]:
    """How fabricate's counterpart of `callback` differs."""
    if is_a(callback, "LearningRateMonitor") and callback.logging_interval == "epoch":
        yield "LearningRateMonitor(logging_interval='epoch') writes at each log boundary (in Lightning: once per epoch)"
    if is_a(callback, "Timer"):
        yield "Timer ends the fit after an update, also with interval='epoch'; its time_elapsed() stays 0"
    if kind := next((name for name in ("DeviceStatsMonitor", "ThroughputMonitor") if is_a(callback, name)), None):
        yield f"{kind} writes to metrics.jsonl and trainer.core.rates, by fabricate's names (in Lightning: to the loggers)"


def _check(callback: Any) -> None:
    """Refuse a callback that cannot run, and methods of a user's subclass that would not be called."""
    if refused := next((name for name in REFUSED if is_a(callback, name)), None):
        raise ConfigurationError(f"callbacks: {type(callback).__name__} cannot run under fabricate; {REFUSED[refused]}")
    for kind in ("ModelCheckpoint", "Timer", *_PLUGINS):
        if is_a(callback, kind) and (own := overridden(callback, kind)):
            raise ConfigurationError(
                f"callbacks: {type(callback).__name__}.{own[0]} would not be called, because fabricate replaces {kind}; put this "
                "method into a separate callback"
            )


def _averaging(callback: Any) -> StochasticWeightAveraging:
    given = vars(callback)  # only private attributes hold its arguments
    if given["_avg_fn"] is not callback.avg_fn:
        raise ConfigurationError(
            "callbacks: StochasticWeightAveraging(avg_fn=...) has no counterpart in fabricate, which takes the plain mean of the "
            "weights; leave avg_fn out"
        )
    return StochasticWeightAveraging(
        *(given[f"_{name}"] for name in ("swa_lrs", "swa_epoch_start", "annealing_epochs", "annealing_strategy"))
    )


_PLUGINS: dict[str, Callable[[Any], Any]] = {
    "OnExceptionCheckpoint": lambda callback: SaveOnException(),
    "DeviceStatsMonitor": lambda callback: DeviceStats(),
    "ThroughputMonitor": lambda callback: Throughput(),
    "ModelSummary": lambda callback: ModelSummary(),
    "StochasticWeightAveraging": _averaging,
}
"""Callbacks that fabricate replaces by a plugin."""


def _duration(callback: Any) -> float:
    remaining = callback.time_remaining()
    if remaining is None:
        raise ConfigurationError("callbacks: Timer() without a duration ends nothing; leave it out, or give a duration")
    return float(remaining)


def _keep(translation: Translated) -> None:
    """Set which checkpoints are kept, and when they are saved."""
    translation.settings["keep"] = _kept(translation.checkpoints)
    cadences = {str(every): every for c in translation.checkpoints if (every := _cadence(c)) is not None}
    if len(cadences) > 1:
        raise ConfigurationError(
            f"callbacks: ModelCheckpoint every {' and every '.join(cadences)}: a run has one interval for saves; leave one out"
        )
    translation.settings["save_every"] = next(iter(cadences.values()), None)
    if any(c.save_on_exception for c in translation.checkpoints):
        translation.plugins.append(SaveOnException())
    if any(c.filename is not None for c in translation.checkpoints):
        translation.notes.append("ModelCheckpoint(filename=...) is not used: checkpoints are named by their step")
    weights_only = [c.save_weights_only for c in translation.checkpoints]
    translation.settings["save_weights_only"] = all(weights_only)
    if any(weights_only) and not all(weights_only):
        translation.notes.append(
            "one ModelCheckpoint has save_weights_only=True and another does not: all checkpoints hold the full state"
        )


def _kept(checkpoints: list[Any]) -> Any:
    """The argument `keep` of fabricate's Trainer for these ModelCheckpoint objects."""
    monitored = [c for c in checkpoints if c.monitor is not None and c.save_top_k != 0]
    if len({(c.monitor, c.mode) for c in monitored}) > 1:
        names = " and ".join(repr(c.monitor) for c in monitored)
        raise ConfigurationError(
            f"callbacks: there are ModelCheckpoints that monitor {names}, but the best checkpoints can be kept by one metric only; "
            "keep one of them"
        )
    if any(c.save_top_k == -1 for c in checkpoints):
        return "all"
    keep: dict[str, Any] = {"last": max([1, *(c.save_top_k for c in checkpoints if c.monitor is None)])}
    if monitored:
        best = max(c.save_top_k for c in monitored)
        keep |= {"best": best, "metric": monitored[0].monitor, "mode": monitored[0].mode}
    return keep


def _cadence(checkpoint: Any) -> Every | None:
    """The interval at which a ModelCheckpoint saves; None for never. Its arguments are in its `state_key`."""
    key = str(checkpoint.state_key)
    steps = re.search(r"'every_n_train_steps': (\d+)", key)
    if steps and int(steps[1]):
        return Every(steps=int(steps[1]))
    interval = re.search(r"'train_time_interval': datetime\.timedelta\((.*?)\)", key)
    if interval:
        parts = {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)", interval[1])}
        return Every(minutes=datetime.timedelta(**parts).total_seconds() / 60)
    return Every(epochs=checkpoint.every_n_epochs) if checkpoint.every_n_epochs else None


def saved(checkpoints: Iterable[Any], path: Path) -> None:
    """Set the attributes of the ModelCheckpoint objects for a new checkpoint at `path`: its path, and the best ones so far. A checkpoint
    whose manifest does not hold the monitored metric was not validated, and is not among them."""
    recorded = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["manifest"]["metrics"]
    for checkpoint in checkpoints:
        checkpoint.dirpath, checkpoint.last_model_path = str(path.parent), str(path)
        if checkpoint.monitor is None:
            checkpoint.best_model_path = str(path)
        elif isinstance(value := recorded.get(checkpoint.monitor), int | float):
            checkpoint.current_score = score = torch.tensor(float(value))
            best = checkpoint.best_model_score
            if best is None or (score < best if checkpoint.mode == "min" else score > best):
                checkpoint.best_model_path, checkpoint.best_model_score = str(path), score
            _rank(checkpoint, path, score)


def _rank(checkpoint: Any, path: Path, score: torch.Tensor) -> None:
    """Add a checkpoint at `path` to the `save_top_k` best ones of a ModelCheckpoint."""
    scores, most = checkpoint.best_k_models, checkpoint.save_top_k
    if most:
        worst = max if checkpoint.mode == "min" else min
        scores[str(path)] = score
        if 0 < most < len(scores):
            del scores[worst(scores, key=scores.__getitem__)]
        checkpoint.kth_best_model_path = worst(scores, key=scores.__getitem__)
        checkpoint.kth_value = scores[checkpoint.kth_best_model_path]


def named_groups(optimizers: Iterable[torch.optim.Optimizer], configs: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """The parameter groups by the names of Lightning's LearningRateMonitor."""
    names = {
        id(config.scheduler.optimizer): config.name for config in configs if hasattr(config.scheduler, "optimizer")
    }
    groups: dict[str, dict[str, Any]] = {}
    seen: Counter[str] = Counter()
    for optimizer in optimizers:
        name = kind = names.get(id(optimizer)) or f"lr-{type(optimizer).__name__}"
        if seen[kind]:
            name = f"{kind}-{seen[kind]}"
        seen[kind] += 1
        for number, group in enumerate(optimizer.param_groups, 1):
            own = group.get("name", f"pg{number}" if len(optimizer.param_groups) > 1 else None)
            groups[f"{name}/{own}" if own else name] = group
    return groups


def monitored(monitor: Any, groups: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """What LearningRateMonitor, `monitor`, gives loggers for the parameter `groups`; it remembers these values."""
    values: dict[str, float] = {}
    for name, group in groups.items():
        values[name] = float(group["lr"])
        monitor.lrs.setdefault(name, []).append(values[name])
        if monitor.log_momentum:
            momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0)
            values[f"{name}-momentum"] = monitor.last_momentum_values[f"{name}-momentum"] = momentum
        if monitor.log_weight_decay:
            decay = group["weight_decay"]
            values[f"{name}-weight_decay"] = monitor.last_weight_decay_values[f"{name}-weight_decay"] = decay
    return values
