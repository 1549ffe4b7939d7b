"""The arguments of a Trainer, each value checked. Pure data; nothing is resolved here.

`Trainer.__init__` has the names, defaults and descriptions of the arguments; `Settings` has a field with a check for each of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_type_hints

from fabricate.configuration.batch_size_finder import BatchSizeFinder
from fabricate.errors import ConfigurationError, did_you_mean
from fabricate.values import Every, metric_mode

T = TypeVar("T")

CHANGES = (
    *("global_batch_size", "train", "seed", "plugins"),
    *("optimizer", "scheduler", "module", "constants", "max_grad_norm", "max_grad_value"),
)
"""The names that `accept_changes` can contain."""

_REMOTE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")

COMPILE_OPTIONS = ("backend", "mode", "fullgraph", "dynamic", "options")
"""The keys that a mapping for `compile` can have."""


# -- checks: each takes the name and the value of an argument, and returns the value for `Settings`


def _or_none(check: Callable[[str, Any], T]) -> Callable[[str, Any], T | None]:
    return lambda name, value: None if value is None else check(name, value)


def _or_never(name: str, value: Any) -> Every | None:
    """A duration, or None for never."""
    if value is None:
        return None
    if value is False or value == 0:
        raise ConfigurationError(
            f"{name}={value!r}: give a duration such as '500 steps' or '1 epoch', or None for never"
        )
    return Every.parse(name, value)


def _whole(least: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigurationError(f"{name}={value!r}: give a whole number of at least {least}, or None")
        return value

    return check


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(f"{name}={value!r}: give a positive number, or None not to clip")
    return value


def _seed(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise ConfigurationError(f"{name}={value!r}: give a whole number from 0 to {2**32 - 1}, or None")
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r}: give True or False")
    return value


def _updates(name: str, value: Any) -> int:
    """The number of updates; 0 for an ordinary fit."""
    if not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"{name}={value!r}: give True, False or a number of updates")
    return int(value)


def _few_batches(name: str, value: Any) -> int | float | None:
    """A number of batches, or a share of them. 0 (Lightning's default) becomes None."""
    if value == 0 and not isinstance(value, bool):
        return None
    share = isinstance(value, float) and 0 < value <= 1
    if not share and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigurationError(f"{name}={value!r}: give a number of batches, a share of the data up to 1.0, or None")
    return float(value) if share else int(value)


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            hint = did_you_mean(str(value), choices)
            raise ConfigurationError(
                f"{name}={value!r}: give {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}{hint}"
            )
        return str(value)

    return check


def _printed(name: str, value: Any) -> str:
    """What is printed of the plan; True and False for the default and for nothing."""
    value = {True: "summary", False: "none"}[value] if isinstance(value, bool) else value
    return _one_of("summary", "full", "none")(name, value)


def _time(example: str) -> Callable[[str, Any], Every]:
    def check(name: str, value: Any) -> Every:
        try:
            time = Every.parse(name, value)
        except ConfigurationError:
            time = None
        if time is None or time.unit not in ("minutes", "hours"):
            raise ConfigurationError(f"{name}={value!r}: give a time, for instance {example!r}")
        return time

    return check


def _compile(name: str, value: Any) -> str | Mapping[str, Any] | None:
    """None for no compilation, "blocks", or the options of torch.compile."""
    if value is False or value is None:
        return None
    if value is True:
        return {}
    if value == "blocks":
        return "blocks"
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{name}={value!r}: give True, 'blocks', or options of torch.compile such as {{'mode': 'max-autotune'}}"
        )
    for option in value:
        if option not in COMPILE_OPTIONS:
            raise ConfigurationError(
                f"{name}: torch.compile has no option {option!r}{did_you_mean(str(option), COMPILE_OPTIONS)}; known: "
                f"{', '.join(COMPILE_OPTIONS)}"
            )
    return dict(value)


def parse_keep(name: str, value: Any) -> dict[str, Any]:
    """The checkpoints to keep: a mapping with "last" (None: all), "metric", "mode" and, if requested, "best"."""
    defaults: dict[str, Any] = {"last": None, "metric": "val_loss", "mode": "min"}
    if value == "all":
        return defaults
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return {**defaults, "last": value}
    if isinstance(value, Mapping) and set(value) <= {"last", "best", "metric", "mode"}:
        parsed = {**defaults, "last": 1, **value}
        parsed["last"] = None if parsed["last"] == "all" else parsed["last"]
        counts = [1 if parsed["last"] is None else parsed["last"], parsed.get("best", 1)]
        if parsed["mode"] in ("min", "max") and all(type(c) is int and c >= 1 for c in counts):
            if "metric" in value:  # also without "best": trainer.validate(checkpoint="best") chooses by it
                metric_mode(f"{name}={value!r}", str(parsed["metric"]), value.get("mode"))
            return parsed
    raise ConfigurationError(
        f"{name}={value!r}: give a number of at least 1, 'all', or a mapping such as "
        "{'last': 2, 'best': 1, 'metric': 'val_loss', 'mode': 'min'}"
    )


def _path(name: str, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigurationError(f"{name}={value!r}: give the path of a directory, or None to write nothing")
    if _REMOTE.match(os.fspath(value)):
        raise ConfigurationError(
            f"{name}={os.fspath(value)!r} is not a directory of a file system. Checkpoints need renames and locks, which an "
            "object store does not have. "
            "Give a local or mounted directory, and copy checkpoints to the store in a hook, on_saved(self, path)"
        )
    return Path(os.fspath(value)).expanduser().absolute()  # a hook may change the working directory


def _plugins(name: str, value: Any) -> tuple[object, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigurationError(f"{name}={value!r}: give a list, {name}=[...]")
    if finder := next((plugin for plugin in value if isinstance(plugin, BatchSizeFinder)), None):
        raise ConfigurationError(
            f"{name}: a BatchSizeFinder is not a plugin. Pass it to fit as the batch size: fit(module, train, batch_size={finder})"
        )
    return tuple(value)


def _progress(name: str, value: Any) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    if (
        isinstance(value, str)
        or not isinstance(value, Iterable)
        or not all(isinstance(metric, str) for metric in value)
    ):
        raise ConfigurationError(
            f"{name}={value!r}: give True, False, or the metrics to show, {name}=['loss', 'accuracy']"
        )
    return tuple(value)


def _trackers(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise ConfigurationError(f"{name}={value!r}: give names, {name}=['tensorboard']")
    return (value,) if isinstance(value, str) else tuple(value)


def _changes(name: str, value: Any) -> tuple[str, ...]:
    value = (value,) if isinstance(value, str) else value
    if not isinstance(value, Iterable):
        raise ConfigurationError(
            f"{name}={value!r}: name what may differ, {name}=('optimizer',); known: {', '.join(CHANGES)}"
        )
    for change in value:
        if change not in CHANGES:
            raise ConfigurationError(f"{name}={change!r}{did_you_mean(change, CHANGES)}; known: {', '.join(CHANGES)}")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The checked arguments of a Trainer, by their names. A field without a check holds the value as given."""

    strategy: Any
    precision: Any
    max_steps: Annotated[int | None, _or_none(_whole(0))]
    max_epochs: Annotated[int | None, _or_none(_whole(0))]
    min_steps: Annotated[int | None, _or_none(_whole(0))]
    min_epochs: Annotated[int | None, _or_none(_whole(0))]
    max_time: Annotated[Every | None, _or_none(_time("11 hours"))]
    timeout: Annotated[Every, _time("30 minutes")]
    gradient_accumulation_steps: Annotated[int | None, _or_none(_whole(1))]
    global_batch_size: Annotated[int | None, _or_none(_whole(1))]
    max_grad_norm: Annotated[float | None, _or_none(_positive)]
    max_grad_value: Annotated[float | None, _or_none(_positive)]
    nonfinite: Annotated[str, _one_of("stop", "skip")]
    seed: Annotated[int | None, _or_none(_seed)]
    deterministic: Annotated[bool, _boolean]
    detect_anomaly: Annotated[bool, _boolean]
    compile: Annotated[str | Mapping[str, Any] | None, _compile]
    activation_checkpointing: Annotated[bool, _boolean]
    run_dir: Annotated[Path | None, _or_none(_path)]
    save: Annotated[str, _one_of("sync", "async")]
    save_every: Annotated[Every | None, _or_never]
    keep: Annotated[dict[str, Any], parse_keep]
    load_best: Annotated[bool, _boolean]
    save_frozen: Annotated[bool | None, _or_none(_boolean)]
    save_weights_only: Annotated[bool, _boolean]
    validate_every: Annotated[Every | None, _or_never]
    validate_first: Annotated[bool, _boolean]
    sanity_batches: Annotated[int, _whole(0)]
    log_every: Annotated[Every, Every.parse]
    progress: Annotated[bool | tuple[str, ...], _progress]
    print_plan: Annotated[str, _printed]
    plugins: Annotated[tuple[object, ...], _plugins]
    trackers: Annotated[tuple[Any, ...], _trackers]
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    overfit_batches: Annotated[int | float | None, _or_none(_few_batches)]
    fast_dev_run: Annotated[int, _updates]
    accept_changes: Annotated[tuple[str, ...], _changes]
    given: tuple[str, ...]
    """The names of the arguments that differ from their default."""

    @classmethod
    def checked(cls, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> Self:
        """The settings that `arguments` give; it may hold other names, which are not looked at. `defaults`: of all arguments.

        Raises `ConfigurationError` for the first wrong argument, with its value and the remedy.
        """
        values = {name: check(name, arguments[name]) for name, check in CHECKS.items()}
        given = [name for name in CHECKS if arguments[name] is not defaults[name] and arguments[name] != defaults[name]]
        settings = cls(**values, given=tuple(given))
        for unit in ("steps", "epochs"):
            least, most = getattr(settings, f"min_{unit}"), getattr(settings, f"max_{unit}")
            if least is not None and most is not None and least > most:
                raise ConfigurationError(
                    f"min_{unit}={least} is more than max_{unit}={most}. Lower min_{unit} or raise max_{unit}"
                )
        if settings.overfit_batches is not None:
            for name in ("limit_train_batches", "limit_val_batches"):
                if (limit := getattr(settings, name)) not in (None, 0):
                    raise ConfigurationError(
                        f"overfit_batches={settings.overfit_batches!r} and {name}={limit!r} are both set. Remove one of them"
                    )
        norm, value = settings.max_grad_norm, settings.max_grad_value
        if norm is not None and value is not None:
            raise ConfigurationError(
                f"max_grad_norm={norm!r} and max_grad_value={value!r} are both set. Remove one of them"
            )
        return settings.for_a_trial() if settings.fast_dev_run else settings

    def for_a_trial(self) -> Self:
        """The settings for `fast_dev_run`: N updates, then a validation of N batches."""
        number = self.fast_dev_run
        return replace(
            self,
            max_steps=number,
            max_epochs=None,
            min_steps=None,
            min_epochs=None,
            limit_train_batches=None,
            overfit_batches=None,
            limit_val_batches=0 if self.limit_val_batches == 0 else number,
            validate_every=Every(steps=number),
            trackers=(),
        )


def _check_of(hint: Any) -> Callable[[str, Any], Any]:
    checks = getattr(hint, "__metadata__", None)
    return checks[0] if checks else lambda name, value: value


CHECKS = {
    name: _check_of(hint) for name, hint in get_type_hints(Settings, include_extras=True).items() if name != "given"
}
"""The check of every argument, in the order of the signature."""
