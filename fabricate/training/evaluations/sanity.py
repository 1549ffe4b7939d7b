"""A few batches of validation before the first step, so that an error in it shows now and not after an epoch.

It leaves no trace: plugins get no `on_eval_start` and `on_eval_end` (wrappers of `eval_step` run, because a step may need them), and the
state of the run, of the module, of the user's plugins and data, and of the global variables that their methods name is restored. Must not
know: the loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from fabricate.distributed.group import restore_buffers
from fabricate.metrics.torchmetrics_objects import snapshot_torchmetrics
from fabricate.training.evaluations.evaluation import check_keep, evaluate
from fabricate.training.saves.attributes import remembered
from fabricate.training.state.run_state import Run


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
    if len(sets) == len(run.validation):  # a one-shot iterator is left for the validation itself
        run.journal.validated = frozenset(metrics)
        check_keep(run, metrics)
        for schedule in run.optim.schedules.values():
            schedule.check(metrics)


@contextlib.contextmanager
def put_back(run: Run) -> Iterator[None]:
    """Restore, after the body, everything that the run and the module changed in it."""
    latest, before = dict(run.journal.latest), dataclasses.replace(run.requests, paths=list(run.requests.paths))
    restore_metrics = snapshot_torchmetrics(run.module)
    plugins = [plugin for _, plugin in run.calls.manager.list_name_plugin()]
    data = [source.data for source in run.validation.values()]  # a stream may hold its position
    parts = [getattr(each, "dataset", None) for each in data]
    restore_attributes = remembered(run.module, [*plugins, *data, *parts])
    buffers = [(buffer, buffer.clone()) for buffer in run.module.buffers()]
    run.engine.moment.trial, changing = True, dict(run.optim.changing)
    try:
        yield
    finally:
        run.engine.moment.trial = False
        restore_attributes()
        restore_metrics()
        restore_buffers(buffers)
        run.journal.latest, run.optim.changing = latest, changing
        requests = run.requests
        requests.stop, requests.save, requests.paths, requests.evaluate = (
            before.stop,
            before.save,
            before.paths,
            before.evaluate,
        )
