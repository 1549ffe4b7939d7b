"""Copies of random states, buffers and torchmetrics objects, for callbacks that draw random numbers or restore an earlier state."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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


def kept_buffers(module: torch.nn.Module) -> Callable[[], None]:
    """Copy the buffers of `module`, and the state of torchmetrics objects in it. The returned function restores them, also if code has
    assigned other tensors."""
    kept = kept_registered(module), kept_torchmetrics(module)

    def restore() -> None:
        for each in kept:
            each()

    return restore


def kept_registered(module: torch.nn.Module) -> Callable[[], None]:
    """As `kept_buffers`, without torchmetrics objects."""
    return _restores(
        [
            (layer._buffers, {name: _cloned(value) for name, value in layer._buffers.items()})
            for layer in module.modules()
            if isinstance(layer._buffers, dict)  # not of a module of torch.jit
        ]
    )


_COUNTS = ("_update_count", "_computed", "min_val", "max_val", "_num_vals_seen")
"""What torchmetrics objects count in attributes that are no states: all of them, `MinMaxMetric`, `Running`."""


def kept_torchmetrics(module: torch.nn.Module) -> Callable[[], None]:
    """As `kept_buffers`, without buffers."""
    places: list[dict[str, Any]] = [vars(each) for each in module.modules()]
    return _restores(
        [
            (place, {name: _cloned(place[name]) for name in (*place["_defaults"], *_COUNTS) if name in place})
            for place in places
            if "_defaults" in place and "_update_count" in place
        ]
    )


def _restores(held: list[tuple[dict[str, Any], dict[str, Any]]]) -> Callable[[], None]:
    """A function that puts values back into the mappings that they come from."""

    def restore() -> None:
        import torch

        for place, values in held:
            for name, value in values.items():
                now = place.get(name)
                if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.shape == value.shape:
                    with torch.no_grad():
                        now.copy_(value)  # other code may hold the tensor
                else:
                    place[name] = value

    return restore


def _cloned(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value.detach().clone() if hasattr(value, "detach") else value
