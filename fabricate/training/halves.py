"""A check of loss weights: the loss of one batch against the weighted mean of the losses of its halves.

Must not know: the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fabricate.data.batches import rows_at, visible_rows
from fabricate.module import step_function
from fabricate.seeding import rng_state, set_rng_state
from fabricate.training.evaluations.evaluation import evaluation_mode
from fabricate.training.evaluations.sanity import put_back
from fabricate.training.state.run_state import Run
from fabricate.training.updates.losses import recognised
from fabricate.training.updates.step_output import unpack

_CLOSE = 1e-3
_WEIGHED = {
    "rows": "weighed by their rows",
    "counted": "weighed by their labels",
    "given": "with the weights it returns",
}


def compare_halves(run: Run) -> str:
    """A note if the loss of the current batch differs from the weighted mean of the losses of its halves. "" if they agree, if the batch
    cannot be halved, or if parameters are sharded. This rank only, in eval mode; everything is as before afterwards."""
    batch = run.now.batch
    rows = visible_rows(batch)
    if rows is None or rows < 2 or run.engine.strategy.name not in ("single", "ddp"):
        return ""
    try:
        order = list(range(rows))
        halves = [rows_at(batch, half, rows) for half in (order[: rows // 2], order[rows // 2 :])]
        with _aside(run):
            whole, one, other = (_loss(run, each) for each in (batch, *halves))
    except Exception:  # this batch cannot be halved, or the step fails with a half
        return ""
    total = one[1] + other[1]
    mean = (one[0] * one[1] + other[0] * other[1]) / total if total else whole[0]
    if not abs(mean - whole[0]) > _CLOSE * max(abs(whole[0]), 1e-8):
        return ""
    return (
        f"a batch of {rows} rows has the loss {whole[0]:.6g}, and the mean of its halves, {_WEIGHED[whole[2]]}, is {mean:.6g}: the update "
        "depends on how a global batch is split. Return {'loss': loss, 'weight': what its mean was taken over} from training_step. A loss "
        "over pairs or statistics of a batch depends on the split by design"
    )


def _loss(run: Run, batch: Any) -> tuple[float, float, str]:
    """The loss of `batch`, its weight, and the source of the weight."""
    loss, given, _ = unpack(step_function(run.module, "train")(batch, 0))
    rule = recognised(loss, given)
    weight, _ = rule(1).weigh(loss, given, batch, None)
    return float(loss.detach()), float(weight), rule.source


@contextmanager
def _aside(run: Run) -> Iterator[None]:
    """Run the body in eval mode; afterwards modes, generators, attributes and logged values are as before."""
    generators, logged = rng_state(), list(run.module._logged)
    try:
        with put_back(run), evaluation_mode(run):
            yield
    finally:
        set_rng_state(generators)
        run.module._logged[:] = logged
