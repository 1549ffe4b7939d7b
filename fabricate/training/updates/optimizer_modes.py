"""Optimizers with `train()` and `eval()`, such as schedule-free ones: the weights that they train differ from the weights that they intend
for evaluation.

`eval()` puts the weights for evaluation into the module, `train()` the trained ones. Evaluations, saves and exports use the weights for
evaluation. Both calls round, so a resumed run makes the same calls as an uninterrupted one. Must not know: when something is evaluated or
saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fabricate.training.state.run_state import Run


def train_mode(run: Run) -> None:
    """Put the trained weights into the module, unless they are there already. All ranks."""
    _switch(run, "train")


def eval_mode(run: Run) -> None:
    """Put the weights for evaluation into the module, unless they are there already. All ranks."""
    _switch(run, "eval")


@contextlib.contextmanager
def meant_weights(run: Run, *, stay: bool = False) -> Iterator[None]:
    """Put the weights for evaluation into the module while the body runs; afterwards the previous ones, unless `stay`."""
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
