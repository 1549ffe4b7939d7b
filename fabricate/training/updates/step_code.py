"""The names in the code of `training_step`, and notes about what they show. Must not know: the loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType

from fabricate.module import TrainModule

_CLIPPING = {"clip_grad_norm_": "max_grad_norm", "clip_grad_value_": "max_grad_value"}
"""The argument of `Trainer` that has the effect of each function."""


def notes_of_clipping(module: TrainModule) -> list[str]:
    """A note if `training_step`, or a method that it calls, clips gradients and computes none of its own. Decided by the names in the
    code."""
    names = names_in_step(module)
    if any("backward" in name or name in ("grad", "autograd") for name in names):
        return []
    return [
        f"{type(module).__name__}.training_step calls {name}, but gradients are computed after it returns: nothing is clipped, or, with "
        f"gradient accumulation, only the gradients of earlier micro-batches. Remove the call and use Trainer({argument}=...)"
        for name, argument in _CLIPPING.items()
        if name in names
    ]


def names_in_step(module: TrainModule) -> set[str]:
    """The names of globals, attributes and enclosing variables in the code of `training_step`, and of the user's methods that these names
    may stand for."""
    return _names(module, "training_step", set())


def _names(module: TrainModule, method: str, seen: set[str]) -> set[str]:
    seen.add(method)
    owner = next((kind for kind in type(module).__mro__ if method in vars(kind)), TrainModule)
    code = getattr(inspect.unwrap(getattr(owner, method, None)), "__code__", None)  # type: ignore[arg-type]
    if code is None or owner.__module__.startswith(("torch.", "fabricate.", "fabricate_")):
        return set()
    names = {name for each in _nested(code) for name in (*each.co_names, *each.co_freevars)}
    return names.union(
        *(_names(module, name, seen) for name in names if hasattr(type(module), name) and name not in seen)
    )


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
