"""A few batches of validation before the first step, so that what is wrong with it shows now and not after an epoch.

Nothing counts: plugins do not get its start and end (wrappers of `eval_step` run, which a step may need), and everything that the module
or the run remembers is put back. Must not know: the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from fabricate.metrics.torchmetrics_objects import snapshot_torchmetrics
from fabricate.module import TrainModule
from fabricate.training.evaluation import check_keep, evaluate
from fabricate.training.run_state import Run

_OURS = frozenset(
    {*vars(torch.nn.Module()), "_trainer", "_logged", "_no_log", "_turn", "_uses_trainer", "_arguments", "_built"}
)


def check_validation(run: Run) -> None:
    """Validate on the first `sanity_batches` of each set. All ranks; before the first step of a fit that is not resumed."""
    settings = run.settings
    sets = {name: source for name, source in run.validation.items() if not isinstance(source.data, Iterator)}
    if not settings.sanity_batches or not sets or not run.validates or settings.fast_dev_run:
        return
    try:
        with put_back(run):
            metrics = evaluate(run, sets, "validate", most=settings.sanity_batches)
    except Exception as exc:
        exc.add_note(
            f"in the check of validation before training ({settings.sanity_batches} batches); sanity_batches=0 leaves it out"
        )
        raise
    if len(sets) == len(run.validation):  # an iterator that can be read once is left for the validation itself
        run.journal.validated = frozenset(metrics)
        check_keep(run, metrics)
        for schedule in run.optim.schedules.values():
            schedule.check(metrics)


@contextlib.contextmanager
def put_back(run: Run) -> Iterator[None]:
    """Afterwards the run and the module remember nothing of what happened inside."""
    latest, before = dict(run.journal.latest), dataclasses.replace(run.requests, paths=list(run.requests.paths))
    restore_metrics, restore_attributes = snapshot_torchmetrics(run.module), _attributes(run.module)
    buffers = [(buffer, buffer.clone()) for buffer in run.module.buffers()]
    try:
        yield
    finally:
        restore_attributes()
        restore_metrics()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        run.journal.latest = latest
        asked = run.requests
        asked.stop, asked.save, asked.paths, asked.evaluate = before.stop, before.save, before.paths, before.evaluate


def _attributes(module: TrainModule) -> Any:
    """Remember the attributes that user code put on `module`, with what its lists, mappings and sets hold; the returned function puts
    them back: steps collect in lists what hooks use at the end."""
    own = {name: value for name, value in vars(module).items() if name not in _OURS}
    held = [(value, value.copy()) for value in own.values() if isinstance(value, list | dict | set | deque)]

    def restore() -> None:
        for name in [name for name in vars(module) if name not in _OURS and name not in own]:
            del vars(module)[name]
        vars(module).update(own)
        for value, before in held:
            value.clear()
            value.extend(before) if isinstance(value, list | deque) else value.update(before)

    return restore
