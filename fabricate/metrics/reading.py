"""The reading of numbers from a device: one copy per dtype, and no wait before the numbers are needed.

Must not know: what the numbers are, when they are read (`reduction`, `counters`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Reading:
    """Numbers that are already on the host: Python numbers, and 0-dim tensors in its memory."""

    def __init__(self, numbers: Sequence[Any]) -> None:
        self._floats = [float(number) for number in numbers]

    def floats(self) -> list[float]:
        """The numbers, in order."""
        return self._floats


class DeviceReading(Reading):
    """Numbers of which some are on `device`. The constructor queues their copies, after the work that the device already has, and does not
    wait. Work that is queued later continues while the host reads."""

    def __init__(self, device: torch.device, numbers: Sequence[Any]) -> None:
        there = defaultdict(list)  # by dtype: one copy for each dtype, and no kernel for conversion
        for place, number in enumerate(numbers):
            if on_device(number):
                there[number.dtype].append(place)
        self._places = list(there.values())
        super().__init__([0.0 if on_device(number) else number for number in numbers])
        self._copies = [
            torch.stack([numbers[place].detach().reshape(()).to(device) for place in places]).to(
                "cpu", non_blocking=True
            )
            for places in self._places
        ]
        self._arrived = torch.accelerator.current_stream(device).record_event() if self._copies else None

    def floats(self) -> list[float]:
        """The numbers, in order. Waits until the copies are complete."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
            for places, copy in zip(self._places, self._copies, strict=True):
                for place, number in zip(places, copy.tolist(), strict=True):
                    self._floats[place] = float(number)
        return self._floats


def reader(device: torch.device) -> Callable[[Sequence[Any]], Reading]:
    """The function that makes a `Reading` in a run on `device`."""
    return Reading if device.type == "cpu" else functools.partial(DeviceReading, device)


def on_device(number: Any) -> bool:
    """Whether reading `number` waits for a device."""
    return isinstance(number, torch.Tensor) and not number.is_cpu


def exact(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype of `device`, for sums: MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
