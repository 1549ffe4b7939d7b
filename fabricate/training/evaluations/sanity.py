"""A few batches of validation before the first step, so that an error in it shows now and not after an epoch.

It leaves no trace: plugins get no `on_eval_start` and `on_eval_end` (wrappers of `eval_step` run, because a step may need them), and the
state of the run, of the module, of optimizers and schedules, of the user's plugins and data, and of the global variables that their methods
name is restored. Must not know: the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fabricate.distributed.group import remembered_buffers
from fabricate.errors import ConfigurationError, few
from fabricate.metrics.torchmetrics_objects import snapshot_torchmetrics
from fabricate.training.evaluations.evaluation import check_keep, evaluate
from fabricate.training.saves.attributes import remembered
from fabricate.training.state.run_state import Run

_OURS = ("fabricate.", "fabricate_")
"""How the modules of callbacks and plugins begin that add nothing to the metrics of an evaluation."""
_SMALL = 2**20
"""Frozen parameters with fewer elements are restored, such as prototypes; a large frozen model would need its memory twice."""


def check_validation(run: Run) -> None:
    """Validate on the first `sanity_batches` of each set. All ranks; before the first step of a fit that is not resumed."""
    settings = run.settings
    sets = {name: source for name, source in run.validation.items() if not isinstance(source.data, Iterator)}
    if not settings.sanity_batches or not sets or not run.validates or settings.fast_dev_run:
        return
    try:
        with put_back(run), _trained_as_before(run):
            metrics = evaluate(run, sets, "validate", most=settings.sanity_batches)
    except Exception as exc:
        exc.add_note(
            f"in the check of validation before training ({settings.sanity_batches} batches); sanity_batches=0 leaves it out"
        )
        raise
    if len(sets) == len(run.validation):  # a one-shot iterator is left for the validation itself
        _check_names(run, metrics)


def _check_names(run: Run, metrics: dict[str, float]) -> None:
    """Raise `ConfigurationError` unless `metrics` contain those that choose checkpoints and move schedules. A note says so instead if a
    plugin may add metrics to those of an evaluation, because plugins got no events."""
    added_by = _evaluation_plugins(run)
    if not added_by:
        run.journal.validated = frozenset(metrics)
    try:
        check_keep(run, metrics)
        for schedule in run.optim.schedules.values():
            schedule.check(metrics)
    except ConfigurationError as exc:
        if not added_by:
            raise
        run.journal.note(
            f"{exc}. If {few(added_by)} adds this metric in a hook of the evaluation, all is well; else the first validation fails"
        )


def _evaluation_plugins(run: Run) -> list[str]:
    """The plugins of the user that have hooks around an evaluation, in which they may log metrics."""
    listeners = [each for hook in ("on_eval_start", "on_eval_end") for each in run.calls.manager.listeners(hook)]
    own = {id(each.plugin): type(each.plugin) for each in listeners if each.plugin is not run.module}
    return sorted({kind.__name__ for kind in own.values() if not kind.__module__.startswith(_OURS)})


@contextlib.contextmanager
def _trained_as_before(run: Run) -> Iterator[None]:
    """Restore, after the body, the weights and the options of the optimizers, which the module may change in a hook. Not after an
    exception, which ends the fit. All ranks."""
    restores = (_options(run), _weights(run))
    yield
    for restore in restores:
        restore()


def _options(run: Run) -> Callable[[], None]:
    """Record the options of the optimizers. The returned function restores them: the same objects, with their values."""
    groups = [group for optimizer in run.optim.optimizers.values() for group in optimizer.param_groups]
    before_each = [
        {name: (value, _copy(value)) for name, value in group.items() if name != "params"} for group in groups
    ]

    def restore() -> None:
        for group, before in zip(groups, before_each, strict=True):
            for name in group.keys() - before.keys() - {"params"}:
                del group[name]
            for name, (value, earlier) in before.items():
                if isinstance(value, torch.Tensor):
                    value.copy_(earlier)
                group[name] = value

    return restore


def _weights(run: Run) -> Callable[[], None]:
    """Record the weights. The returned function restores them; all ranks call it."""
    parameters = [p for p in run.module.parameters() if p.requires_grad or p.numel() < _SMALL]
    memories = [run.engine.strategy.local_part(parameter).memory for parameter in parameters]
    weights = [(memory, memory.clone()) for memory in memories if type(memory) is torch.Tensor]

    def restore() -> None:
        changed = [(memory, value) for memory, value in weights if not torch.equal(memory, value)]
        with torch.no_grad():
            for memory, value in changed:
                memory.copy_(value)
        if any(run.engine.agree([len(changed)])):
            run.engine.strategy.after_load()

    return restore


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def put_back(run: Run) -> Iterator[None]:
    """Restore, after the body, everything that the run and the module changed in it."""
    latest, before = dict(run.journal.latest), dataclasses.replace(run.requests, paths=list(run.requests.paths))
    restore_metrics = snapshot_torchmetrics(run.module)
    plugins = [plugin for _, plugin in run.calls.manager.list_name_plugin()]
    data = [source.data for source in run.validation.values()]  # a stream may hold its position
    parts = [getattr(each, "dataset", None) for each in data]
    schedules = [schedule.made for schedule in run.optim.schedules.values()]
    restore_attributes = remembered(run.module, [*plugins, *data, *parts, *schedules])
    restore_buffers = remembered_buffers(run.module)
    run.engine.moment.trial, changing = True, dict(run.optim.changing)
    try:
        yield
    finally:
        run.engine.moment.trial = False
        restore_attributes()
        restore_metrics()
        restore_buffers()
        run.journal.latest, run.optim.changing = latest, changing
        requests = run.requests
        requests.stop, requests.save, requests.paths, requests.evaluate = (
            before.stop,
            before.save,
            before.paths,
            before.evaluate,
        )
