"""The trackers of a fit, from Accelerate and from the user: their names and options, how they start and how they end.

Must not know: process groups, the loop, what is logged (`fabricate.training.reports`).
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fabricate.distributed.accelerator import RunAccelerator, Silent
from fabricate.errors import ConfigurationError, PluginError
from fabricate.registry.names import parse_name


class Trackers:
    """The trackers of one fit."""

    def __init__(self, log_with: Sequence[Any], directory: str | None) -> None:
        """`log_with`: the result of `check_trackers`."""
        self.named = [tracker for tracker in log_with if not inspect.isfunction(tracker)]
        """The value for Accelerate's `log_with`: names and objects."""
        self._made_later = [tracker for tracker in log_with if inspect.isfunction(tracker)]
        self.directory = directory
        """The directory of trackers that write files."""

    def __bool__(self) -> bool:
        return bool(self.named or self._made_later)

    def start(
        self,
        accelerator: RunAccelerator,
        config: Mapping[str, Any],
        trackers: Sequence[Any],
        options: Mapping[str, Mapping[str, Any]],
        configured: Collection[str],
    ) -> Sequence[Any]:
        """Start `trackers` (as the user named them) with the hyper-parameters `config`, and return them. All ranks; trackers act on rank 0.
        options: by the name of a tracker; options of the user override them. configured: the names of trackers that already have their
        hyper-parameters."""
        flat = {n: value if isinstance(value, int | float | str | bool) else str(value) for n, value in config.items()}
        project, given = tracker_options(trackers)
        together = {name: {**options.get(name, {}), **given.get(name, {})} for name in {*options, *given}}
        if accelerator.is_main_process:  # made only now, because a tracker may read the rank from Accelerate
            os.makedirs(self.directory or ".", exist_ok=True)
            accelerator.log_with += [_checked_tracker(make(project, self.directory)) for make in self._made_later]
        with accelerator.building():
            accelerator.init_trackers(project, init_kwargs=together)
        started: Sequence[Any] = accelerator.trackers
        for tracker in started:
            if tracker.name not in configured:
                tracker.store_init_configuration(flat)
        return started


def library_object(accelerator: RunAccelerator, name: str) -> Any:
    """The library's own object of the tracker `name`, on rank 0. On other ranks, and while validation is tried before training, an object
    that does nothing."""
    if not accelerator.is_main_process:
        return Silent()
    for tracker in accelerator.trackers:
        if tracker.name == name:
            return Silent() if accelerator.moment.trial else tracker.tracker
    running = ", ".join(repr(tracker.name) for tracker in accelerator.trackers) or "none"
    raise ConfigurationError(
        f"trainer.tracker({name!r}): the trackers of this fit are {running}; Trainer(trackers=[{name!r}]) adds one"
    )


def finish_trackers(accelerator: RunAccelerator, failed: bool) -> None:
    """Finish the trackers. (Accelerate's `end_training` would destroy the process group, which outlives a fit.) failed: whether the fit
    ends with an exception, which W&B and MLflow show. Accelerate's trackers do not pass it on."""
    for tracker in accelerator.trackers:
        if failed and tracker.name == "wandb":
            tracker.tracker.finish(exit_code=1)
        elif failed and tracker.name == "mlflow":
            sys.modules["mlflow"].end_run(status="FAILED")
        else:
            tracker.finish()


def _checked_tracker(made: Any) -> Any:
    from accelerate.tracking import GeneralTracker

    if not isinstance(made, GeneralTracker):
        raise PluginError(
            f"a registered tracker made a {type(made).__name__}, not an accelerate GeneralTracker; register a function that returns "
            "one"
        )
    return made


def tracker_names() -> list[str]:
    """The names of Accelerate's trackers, whether their packages are installed or not."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return sorted(str(getattr(n, "value", n)) for n in LOGGER_TYPE_TO_CLASS)


def needs_directory(tracker: Any) -> bool:
    """Whether a tracker from the result of `check_trackers` writes into the run directory."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

    if isinstance(tracker, str):
        return bool(LOGGER_TYPE_TO_CLASS[tracker].requires_logging_directory)
    return not isinstance(tracker, GeneralTracker)


def tracker_options(trackers: Sequence[Any]) -> tuple[str, dict[str, dict[str, str]]]:
    """The project ("wandb:project=name", else WANDB_PROJECT, else "fabricate"), and the other options of Accelerate's trackers."""
    projects, options = [], {}
    for tracker in trackers:
        if isinstance(tracker, str) and tracker.partition(":")[0] in tracker_names():
            name, given = parse_name("trackers", tracker)
            projects += [given.pop("project")] if "project" in given else []
            options[name] = given
    if len(set(projects)) > 1:
        raise ConfigurationError(
            f"trackers: the projects {' and '.join(projects)} differ, but Accelerate gives all trackers the same project; name only one"
        )
    return next(iter(projects), os.environ.get("WANDB_PROJECT") or "fabricate"), {n: o for n, o in options.items() if o}


def check_trackers(
    trackers: Sequence[Any], find: Callable[[str, Sequence[str]], Callable[[str, str], Any]]
) -> list[Any]:
    """The `log_with` of an `Engine`: names of Accelerate's trackers, tracker objects, and functions from `find` that make registered
    trackers. Raises `ConfigurationError` for a tracker whose package is not installed; Accelerate would silently drop it."""
    from accelerate.tracking import GeneralTracker, get_available_trackers

    chosen: list[Any] = []
    available = tracker_names()
    for tracker in trackers:
        if isinstance(tracker, GeneralTracker):
            chosen.append(tracker)
        elif not isinstance(tracker, str):
            raise ConfigurationError(
                f"trackers={tracker!r}: give a name ({', '.join(available)}) or an accelerate GeneralTracker"
            )
        elif (name := tracker.partition(":")[0]) not in available:
            chosen.append(find(tracker, available))
        elif name not in [str(getattr(n, "value", n)) for n in get_available_trackers()]:
            raise ConfigurationError(f"trackers={tracker!r}: its package is not installed; run pip install {name}")
        else:
            chosen.append(name)
    return chosen
