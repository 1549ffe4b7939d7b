"""What a module or a data set holds that no checkpoint has, named with the way to save it.

Seen is what lies in the attributes of objects of the user's own classes: random generators when a fit begins, tensors and numbers once they
have changed. Must not know: what a checkpoint has (`saved_state`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fabricate.errors import few
from fabricate.module import overrides
from fabricate.optim.schedules import captured
from fabricate.training.run_state import Run

_SEEDED = ("generator", torch.Generator)
"""Of data: seeded for each epoch."""
_LIBRARIES = ("torch", "transformers", "torchmetrics", "peft", "datasets", "fabricate", "builtins", "accelerate")


def generator_notes(run: Run) -> list[str]:
    """A note for the plan about the random generators that a resumed run would not find as they were."""
    if run.run_dir is None:
        return []
    held = [f"{name} ({type(value).__name__})" for name, value in _held(run) if _draws(value)]
    for label, schedule in run.optim.schedules.items():
        for function in getattr(schedule.made, "lr_lambdas", ()):
            inside = captured(function).items()
            held += [f"{name} in scheduler {label!r}" for name, value in inside if _draws(value)]
    if not held:
        return []
    return [
        f"not in checkpoints, so that a resumed run draws other numbers: {few(held)}. Draw from torch's, numpy's or Python's own "
        "generators, or save the state in on_save(self, state) and put it back in on_load(self, state)"
    ]


def remember(run: Run) -> None:
    """Take down the tensors and numbers that are held when the fit begins, for `changed_note`."""
    if run.run_dir is not None:
        run.optim.held = {name: _mark(value) for name, value in _held(run) if _counts(value)}


def note_changed(run: Run) -> None:
    """At a save: name what has changed since the fit began, once."""
    held, run.optim.held = run.optim.held, {}
    now = {name: _mark(value) for name, value in _held(run) if _counts(value)} if held else {}
    if changed := [name for name, mark in now.items() if name in held and held[name] != mark]:
        run.journal.note(
            f"{few(changed)} changed since the fit began and is not in the checkpoint, so that a resumed run begins with what __init__ "
            "sets: use register_buffer for a tensor, or put it into `state` in on_save(self, state) and take it out in on_load(self, state)"
        )


def _held(run: Run) -> Iterator[tuple[str, Any]]:
    """The attributes of the module, its submodules and the training data, as far as their classes are not a library's."""
    if not overrides(run.module, "on_save"):
        for name, child in run.module.named_modules():
            yield from _attributes(f"{type(run.module).__name__}{'.' if name else ''}{name}", child)
    data = run.source.data if run.source is not None and run.source.resumes != "by its own state" else None
    if data is not None:
        yield from _attributes(f"{type(data).__name__} (train)", data)
        if (inner := getattr(data, "dataset", None)) is not None:
            yield from _attributes(f"{type(inner).__name__} (train)", inner)


def _attributes(owner: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value).__module__.partition(".")[0] in _LIBRARIES:
        return
    for name, attribute in getattr(value, "__dict__", {}).items():
        if (name, type(attribute)) != _SEEDED:
            yield f"{owner}.{name}", attribute


def _draws(value: Any) -> bool:
    return isinstance(value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState)


def _counts(value: Any) -> bool:
    return type(value) in (int, float) or isinstance(value, torch.Tensor)


def _mark(value: Any) -> Any:
    """Another one where a number or a tensor has changed."""
    if not isinstance(value, torch.Tensor):
        return value
    return id(value), None if value.is_inference() else value._version
