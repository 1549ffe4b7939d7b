"""The values that `configure_optimizers` of a LightningModule may return, and when its schedulers advance.

A scheduler that advances once per update or epoch is passed to fabricate unchanged. Others (a frequency, a monitor, `lr_scheduler_step`)
are passed inside a `Driven`, which decides when they advance. Must not know: the module's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from fabricate import ConfigurationError

_FORMS = (
    "return an optimizer, a list of them, (optimizers, schedulers) as two lists, a mapping with 'optimizer' and 'lr_scheduler', or "
    "a list of "
    "such mappings"
)


@dataclass
class SchedulerConfig:
    """A scheduler with Lightning's options, as `trainer.lr_scheduler_configs` shows it."""

    scheduler: Any
    name: str | None = None
    interval: str = "epoch"
    frequency: int = 1
    reduce_on_plateau: bool = False
    monitor: str | None = None
    strict: bool = True


@dataclass
class Configured:
    """The optimizers and schedulers that `configure_optimizers` returned."""

    optimizers: list[torch.optim.Optimizer]
    schedulers: list[SchedulerConfig]

    def of(self, optimizer: torch.optim.Optimizer) -> list[SchedulerConfig]:
        """The schedulers of `optimizer`. A scheduler without the attribute `optimizer` belongs to the first optimizer."""
        first = self.optimizers[0]
        return [c for c in self.schedulers if getattr(c.scheduler, "optimizer", first) is optimizer]

    def at_epoch_end(self) -> list[SchedulerConfig]:
        """The schedulers that fabricate does not advance: by a metric, or by epoch if the same optimizer has another by step."""
        at_end = []
        for configs in map(self.of, self.optimizers):
            at_end += [c for c in configs if c.reduce_on_plateau or c.interval != _interval(configs)]
        return at_end


def read(where: str, returned: Any) -> Configured:
    """The optimizers and schedulers in `returned`. where: the method's name in errors."""
    optimizers, schedulers, monitor = _parts(where, returned)
    if not optimizers or not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "nothing"
        raise ConfigurationError(f"{where} returned {kinds} in place of an optimizer; {_FORMS}")
    configured = Configured(optimizers, [_scheduler(where, each, monitor) for each in schedulers])
    for config in configured.schedulers:
        owner = getattr(config.scheduler, "optimizer", optimizers[0])
        if not any(owner is optimizer for optimizer in optimizers):
            raise ConfigurationError(
                f"{where}: the {type(config.scheduler).__name__} is made for an optimizer that is not returned; return this "
                "optimizer too"
            )
    return configured


def _parts(where: str, returned: Any) -> tuple[list[Any], list[Any], str | None]:
    """The optimizers, the schedulers, and the monitor that is given with them."""
    if isinstance(returned, torch.optim.Optimizer):
        return [returned], [], None
    if isinstance(returned, Mapping):
        return _of_mapping(where, returned)
    if isinstance(returned, list | tuple):
        if len(returned) == 2 and isinstance(returned[0], list | tuple):
            schedulers = returned[1]
            return list(returned[0]), list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers], None
        if returned and all(isinstance(each, Mapping) for each in returned):
            parts = [_of_mapping(where, each) for each in returned]
            monitored = [({"scheduler": s, "monitor": m} if m else s) for _, each, m in parts for s in each]
            return [optimizer for optimizers, _, _ in parts for optimizer in optimizers], monitored, None
        return list(returned), [], None
    raise ConfigurationError(f"{where} returned {type(returned).__name__}; {_FORMS}")


def _of_mapping(where: str, returned: Mapping[str, Any]) -> tuple[list[Any], list[Any], str | None]:
    if unknown := sorted(set(returned) - {"optimizer", "lr_scheduler", "monitor"}):
        raise ConfigurationError(
            f"{where} returned a mapping with {unknown[0]!r}; it may hold 'optimizer', 'lr_scheduler' and 'monitor'"
        )
    schedulers = returned.get("lr_scheduler")
    several = schedulers if isinstance(schedulers, list | tuple) else [] if schedulers is None else [schedulers]
    return [returned.get("optimizer")], list(several), returned.get("monitor")


def _scheduler(where: str, given: Any, monitor: str | None) -> SchedulerConfig:
    options = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    if unknown := sorted(options.keys() - {field.name for field in fields(SchedulerConfig)}):
        allowed = ", ".join(field.name for field in fields(SchedulerConfig))
        raise ConfigurationError(
            f"{where}: a mapping for a scheduler has the unknown key {unknown[0]!r}; known keys are {allowed}"
        )
    if options.get("scheduler") is None:
        raise ConfigurationError(f"{where}: a mapping for a scheduler has to hold 'scheduler'")
    if isinstance(options["scheduler"], Mapping):
        options |= options.pop("scheduler")
    options.setdefault(
        "reduce_on_plateau", isinstance(options["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau)
    )
    options["monitor"] = options.get("monitor") or monitor
    config = SchedulerConfig(**options)
    kind = type(config.scheduler).__name__
    if config.interval not in ("step", "epoch") or not isinstance(config.frequency, int) or config.frequency < 1:
        raise ConfigurationError(
            f"{where}: {kind} with interval={config.interval!r}, frequency={config.frequency!r}: give 'step' or 'epoch', and a whole number"
        )
    if config.reduce_on_plateau and config.monitor is None:
        raise ConfigurationError(f"{where}: {kind} needs a metric: {{'scheduler': ..., 'monitor': 'val_loss'}}")
    if config.reduce_on_plateau and config.interval == "step":
        raise ConfigurationError(
            f"{where}: {kind} with interval='step' would need {config.monitor!r} after each update, but the metric is known only "
            "after an epoch; use interval='epoch'"
        )
    return config


class Driven:
    """The schedulers of one optimizer; fabricate calls `step` after each update or at the end of each epoch."""

    def __init__(
        self, configs: list[SchedulerConfig], due: Callable[[SchedulerConfig], bool], advance: Callable[..., None]
    ) -> None:
        """due: whether the update or the epoch that ends counts for a scheduler. advance: advances it."""
        self._configs, self._due, self._advance = configs, due, advance

    def step(self) -> None:
        """Advance the schedulers for which this update or epoch counts, except those that need a metric or the end of the epoch."""
        interval = _interval(self._configs)
        for config in self._configs:
            if not config.reduce_on_plateau and config.interval == interval and self._due(config):
                self._advance(config.scheduler, None)

    def state_dict(self) -> dict[str, Any]:
        """The states of all schedulers."""
        return {str(number): config.scheduler.state_dict() for number, config in enumerate(self._configs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for number, config in enumerate(self._configs):
            config.scheduler.load_state_dict(state[str(number)])


def for_fabricate(
    configured: Configured, due: Callable[[SchedulerConfig], bool], advance: Callable[..., None] | None
) -> list[Any]:
    """Each optimizer as fabricate's `configure_optimizers` returns it. advance: the function that advances a scheduler; None for its
    `step`."""
    return [_with_schedulers(optimizer, configured.of(optimizer), due, advance) for optimizer in configured.optimizers]


def _with_schedulers(optimizer: Any, configs: list[SchedulerConfig], due: Any, advance: Any) -> Any:
    if not configs:
        return optimizer
    first, interval = configs[0], _interval(configs)
    plain = len(configs) == 1 and first.frequency == 1 and not first.reduce_on_plateau and advance is None
    if plain:
        return optimizer, first.scheduler, interval
    names = "And".join(type(config.scheduler).__name__ for config in configs)
    kind = type(names, (Driven,), {})  # the plan and a resume use the name
    return optimizer, kind(configs, due, advance or advance_by), interval


def _interval(configs: list[SchedulerConfig]) -> str:
    """The interval at which fabricate advances the schedulers of one optimizer."""
    return "step" if any(config.interval == "step" for config in configs) else "epoch"


def advance_by(scheduler: Any, metric: Any) -> None:
    """Advance `scheduler`; metric: None if it needs none."""
    scheduler.step() if metric is None else scheduler.step(metric)
