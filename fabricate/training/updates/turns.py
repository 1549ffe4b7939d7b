"""Optimizers that take turns: each makes its own update on the rows of one window, with the parameters of the others frozen.

Must not know: the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fabricate.data.batches import Window
from fabricate.training.state.run_state import Run


def turns(run: Run, windows: Iterable[Window]) -> Iterator[Window]:
    """Each window once per optimizer, in their order. Its micro-batches are kept as they were read until the last turn."""
    for window in windows:
        kept: list[Any] = []
        for number, name in enumerate(run.optim.turns):
            last = number == len(run.optim.turns) - 1
            micro_batches = iter(kept) if number else _kept(window.micro_batches, kept)
            if number:
                run.progress.micro_step -= window.num_micro_steps
            yield replace(window, micro_batches=micro_batches, turn=name, first_turn=not number, last_turn=last)


def _kept(items: Iterable[Any], into: list[Any]) -> Iterator[Any]:
    for item in items:
        into.append(item)
        yield item


@contextmanager
def turn_of(run: Run, name: str) -> Iterator[None]:
    """While the body runs, `training_step` is called for the optimizer `name`, and parameters that only other optimizers hold require no
    gradient, so that backward stops there. If all parameters of this optimizer are frozen, those of the others keep their gradients, which
    nothing applies: the loss needs some to be computed."""
    object.__setattr__(run.module, "_turn", name)
    own = set(run.optim.updates[name].parameters)
    others = {p for update in run.optim.updates.values() for p in update.parameters if p.requires_grad} - own
    if not any(parameter.requires_grad for parameter in own):
        others = set()
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
