"""Forward passes over the training data without training, for layers that collect statistics of their inputs.

Must not know: when it is called, and what the layers collect.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from fabricate.data.source import Source
from fabricate.distributed.group import remembered_buffers
from fabricate.errors import ConfigurationError, FabricateError
from fabricate.metrics.torchmetrics_objects import snapshot_torchmetrics
from fabricate.module import refusing_logs
from fabricate.seeding import rng_state, set_rng_state
from fabricate.training.state.run_state import Run


def calibrate(run: Run, batches: int | None) -> None:
    """See `Trainer.calibrate`. All ranks."""
    source = _checked(run, batches)
    if run.now.complete:
        _read(run, source, batches)
    elif run.now.epoch is not None:
        raise FabricateError(
            "trainer.calibrate() can only run in on_complete, when training no longer reads the training data; call it there"
        )


def _checked(run: Run, batches: int | None) -> Source:
    """The training data. Raises an error if it is known that the data cannot be read again, or if calibration is not possible."""
    source = run.source
    if source is None:
        raise FabricateError("trainer.calibrate() needs training data, which only fit has")
    if batches is not None and (not isinstance(batches, int) or isinstance(batches, bool) or batches < 1):
        raise ConfigurationError(
            f"trainer.calibrate(batches={batches!r}): give a whole number of at least 1, or None for one pass"
        )
    if isinstance(source.data, Iterator):
        raise ConfigurationError(
            f"train is a one-shot iterator ({type(source.data).__name__}), which is exhausted when the fit is complete, but "
            "trainer.calibrate() has to read it again. Give an object whose __iter__ starts over (a list, a DataLoader, a class "
            "with __iter__)"
        )
    if batches is None and source.updates_per_epoch is None:
        raise ConfigurationError(
            "train has no length, so one pass over it may never end; give the number of micro-batches, "
            "trainer.calibrate(batches=...)"
        )
    if run.optim.turns:
        raise ConfigurationError(
            "trainer.calibrate() runs training_step(batch), but this module's training_step takes an optimizer, which calibrate "
            "does not support; leave the call out, or use a module whose training_step takes only the batch"
        )
    return source


def _read(run: Run, source: Source, batches: int | None) -> None:
    module, engine = run.module, run.engine
    generators, restore_metrics, state = rng_state(), snapshot_torchmetrics(module), source.state
    with refusing_logs(module, ""), torch.no_grad():
        try:
            for micro_step, (batch, rows) in enumerate(_micro_batches(run, source, batches)):
                run.now.batch = batch = engine.to_device(batch)
                # A stand-in runs only because collectives need every rank; it must not change statistics.
                with _unchanged_buffers(module) if rows == 0 else contextlib.nullcontext():
                    engine.evaluate("train", batch, micro_step)
                module._logged.clear()
            run.now.batch = None
        finally:
            restore_metrics()
            set_rng_state(generators)
            source.state = state
    engine.strategy.after_evaluation(engine.model)


def _micro_batches(run: Run, source: Source, batches: int | None) -> Iterator[Any]:
    """The micro-batches of the epoch that would come next: the first `batches`, or all."""
    with contextlib.closing(source.windows(run.data_epoch())) as windows:
        yield from itertools.islice(itertools.chain.from_iterable(window.micro_batches for window in windows), batches)


@contextlib.contextmanager
def _unchanged_buffers(module: torch.nn.Module) -> Iterator[None]:
    restore = remembered_buffers(module)
    yield
    restore()
