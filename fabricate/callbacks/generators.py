"""The states of the random generators of training, for callbacks that draw random numbers or restore an earlier state."""

from __future__ import annotations

import random
from typing import Any


def generator_states() -> dict[str, Any]:
    """The states of this process's global generators: Python's, NumPy's, torch's on the CPU and on the current device."""
    import numpy
    import torch

    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.accelerator.is_available():
        states["device"] = torch.get_device_module().get_rng_state()
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    """Restore states from `generator_states`."""
    import numpy
    import torch

    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "device" in states:
        torch.get_device_module().set_rng_state(states["device"])
