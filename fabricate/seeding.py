"""Random generators: seeding, seeds derived from names, and the state of all global generators.

Must not know: ranks, the loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch

from fabricate.errors import ConfigurationError


def seed_everything(seed: int) -> int:
    """Seed the global generators of Python, NumPy and torch (CPU and every device) with `seed`, from 0 to 2**32 - 1. Returns `seed`."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ConfigurationError(f"seed={seed!r}: give a whole number from 0 to {2**32 - 1}")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def is_generator(value: object) -> bool:
    """Whether `value` is a random generator of torch, NumPy or Python."""
    if isinstance(value, random.SystemRandom):  # it has no state
        return False
    return isinstance(value, torch.Generator | random.Random | numpy.random.Generator | numpy.random.RandomState)


def is_global(generator: object) -> bool:
    """Whether a generator is the global one of torch, NumPy or Python, from which their functions draw."""
    functions: list[Any] = [numpy.random.rand, random.random]
    return any(generator is each for each in (torch.default_generator, *(each.__self__ for each in functions)))


def state_of(generator: Any) -> Any:
    """The state of a random generator of torch, NumPy or Python."""
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def set_state_of(generator: Any, state: Any) -> None:
    """Restore a random generator to a state from `state_of`."""
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def derive_seed(seed: int, *path: object) -> int:
    """A 32-bit seed that depends only on `seed` and `path` (SHA-256 of their text), not on the world size or the order of calls."""
    return int.from_bytes(hashlib.sha256(repr((seed, *path)).encode()).digest()[:4], "little")


def rng_state() -> dict[str, Any]:
    """The state of this rank's global generators: Python, NumPy, torch on the CPU and on the current CUDA device."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


@contextlib.contextmanager
def unchanged_generators() -> Iterator[None]:
    """Run the body, then restore the global generators of this rank. For code that imports a library, which may draw from them."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the generators to a state from `rng_state`."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
