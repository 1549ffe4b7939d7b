"""A separate random state for reading data. It depends on seed and epoch only, not on what the model draws.

Owns the global generators of python, numpy and torch (CPU) while data is read. Must not know data sets or sources.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from fabricate.data.order import batch_seed


class RandomScope:
    """A context in which the global generators of python, numpy and torch (CPU) have the state of this object, not that of the caller.

    When it is entered again, the generators continue from their last state."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: tuple[Any, Any, torch.Tensor] | None = None
        self._outside: tuple[Any, Any, torch.Tensor] | None = None

    @property
    def state(self) -> tuple[Any, Any, torch.Tensor] | None:
        """The state of the generators inside; None before the first entry."""
        return self._inside

    @state.setter
    def state(self, state: tuple[Any, Any, torch.Tensor]) -> None:
        self._inside = state

    def __enter__(self) -> None:
        self._outside = _random_state()
        if self._inside is None:
            seed_generators(self._seed)
        else:
            _set_random_state(self._inside)

    def __exit__(self, *exception: object) -> None:
        assert self._outside is not None
        self._inside = _random_state()
        _set_random_state(self._outside)


def _random_state() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def _set_random_state(state: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def seed_generators(seed: int) -> None:
    random.seed(seed)
    # With the two words alone, NumPy would draw the same numbers as `random`.
    np.random.seed((seed & 0xFFFFFFFF, seed >> 32, 1))
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the accelerators


def begin_epoch(parts: Iterable[Any], seed: int, epoch: int) -> list[torch.Generator]:
    """Set the epoch of samplers, loaders and data sets, and seed their generators. Returns these generators."""
    generators = []
    for part in parts:
        set_epoch(part, epoch)
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.manual_seed(batch_seed(seed, epoch))
            generators.append(generator)
    return generators


def set_epoch(part: Any, epoch: int) -> None:
    """Call `part.set_epoch` if it exists."""
    if callable(method := getattr(part, "set_epoch", None)):
        method(epoch)
