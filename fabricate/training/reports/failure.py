"""An exception that ends a run: what is added to its text, and who is notified of it.

Must not know: how ranks exchange messages, how a run is closed (`opening`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from fabricate.data.batches import describe
from fabricate.errors import ConfigurationError, first_line
from fabricate.launch import uncaught
from fabricate.training.reports.error_hints import explain
from fabricate.training.state.run_state import Run


@contextlib.contextmanager
def noting_failures(run: Run) -> Iterator[None]:
    """Add notes to an exception of a fit or an evaluation: where it occurred, and the shapes of the batch."""
    try:
        yield
    except BaseException as exc:
        at, now = run.progress, run.now
        epoch = at.epoch if now.epoch is None else now.epoch
        if now.stage == "train":
            step = max(run.calls.step, at.step)  # of a resumed run no hook has been called yet
            where = f"while training: rank {run.engine.rank}, epoch {epoch}, step {step}, micro-batch {at.micro_step}"
        else:
            doing = {"validate": "validating", "test": "testing", "predict": "predicting"}[now.stage]
            after = f", epoch {epoch}, after step {at.step}" if run.source is not None else ""
            where = f"while {doing}: rank {run.engine.rank}{after}, batch {now.batch_idx}"
        exc.add_note(where)
        if run.now.batch is not None:
            or_before = ", or one before it" if isinstance(exc, torch.AcceleratorError) else ""
            exc.add_note(f"the batch was {describe(run.now.batch)}{or_before}")
        with contextlib.suppress(OSError):  # the failure may be a full disk
            run.journal.event("failed", reason=f"{type(exc).__name__}: {first_line(exc)}")
        raise


def report(run: Run, exc: BaseException) -> None:
    """Report `exc` to listeners and to the other ranks. An error in a listener does not replace `exc`."""
    if isinstance(exc, SystemExit | GeneratorExit):
        return
    try:
        note = explain(run, exc)
    except Exception as second:  # if memory is full, anything may fail
        note = f"what could be changed is not known: {type(second).__name__}: {second}"
    if run.calls.on_exception is not None:
        run.now.failure = exc
        try:
            run.calls.on_exception(run.trainer, run.module, exc)
        except Exception as second:
            exc.add_note(f"on_exception raised {type(second).__name__}: {second}")
        run.now.failure = None
    if note := "; ".join(filter(None, (note, _how_to_go_on(run, exc)))):
        exc.add_note(note)
    if run.engine.world_size > 1:
        uncaught.install(run.engine.rank)
    first = run.engine.report_failure(exc, run.calls.places())
    if first:
        raise first from None  # `exc` is only the broken connection that the failure of another rank caused


def _how_to_go_on(run: Run, exc: BaseException) -> str:
    if run.checkpoints.newest is not None and not run.settings.save_weights_only:
        changed = "after this change, " if isinstance(exc, ConfigurationError) else ""
        return f"{changed}the same command continues from {run.checkpoints.newest}"
    return f"{uncaught.AGAIN}: nothing is saved" if run.engine.world_size > 1 and run.source is not None else ""
