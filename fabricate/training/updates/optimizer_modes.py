"""Optimizers with `train()` and `eval()`, as schedule-free ones have: they train other weights than they mean.

`eval()` puts the weights that the optimizer means into the module, `train()` those that it trains. What evaluates, saves or exports
wants the former. Both round, so that a run which resumes goes through the same calls as one that never stopped. Must not know: when
something is evaluated or saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fabricate.training.state.run_state import Run


def train_mode(run: Run) -> None:
    """Put the weights that are trained into the module, if others are there. All ranks."""
    _switch(run, "train")


def eval_mode(run: Run) -> None:
    """Put the weights that the optimizers mean into the module, if others are there. All ranks."""
    _switch(run, "eval")


@contextlib.contextmanager
def meant_weights(run: Run, *, stay: bool = False) -> Iterator[None]:
    """While inside, the module has the weights that the optimizers mean; afterwards those that it had, unless these `stay`."""
    before = run.optim.mode
    eval_mode(run)
    try:
        yield
    finally:
        if before == "train" and not stay:
            train_mode(run)


def _switch(run: Run, mode: str) -> None:
    with_modes = [
        o for o in run.optim.optimizers.values() if all(callable(getattr(o, m, None)) for m in ("train", "eval"))
    ]
    if not with_modes or run.optim.mode == mode:
        return
    if run.checkpoints.background is not None:
        run.checkpoints.background.before_step()
    for optimizer in with_modes:
        getattr(optimizer, mode)()
    run.optim.mode = mode
    run.engine.strategy.after_load()
