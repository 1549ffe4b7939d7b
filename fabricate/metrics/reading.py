"""Numbers on their way from a device to the host: one copy for all of them, and nothing waits before it is needed.

Must not know: what the numbers are, when they are read (`reduction`, `counters`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Reading:
    """Numbers that the host has already: plain ones, and 0-dim tensors in its memory."""

    def __init__(self, numbers: Sequence[Any]) -> None:
        self._floats = [float(number) for number in numbers]

    def floats(self) -> list[float]:
        """The numbers, in order."""
        return self._floats


class DeviceReading(Reading):
    """Numbers of which some are on `device`. Their copy is queued at once, behind the work that the device has by then, and not waited
    for: what is queued afterwards runs on while the host reads."""

    def __init__(self, device: torch.device, numbers: Sequence[Any]) -> None:
        there = defaultdict(list)  # by dtype: one copy of each kind, and no kernel that converts
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
        """The numbers, in order. Waits until the device has come to the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
            for places, copy in zip(self._places, self._copies, strict=True):
                for place, number in zip(places, copy.tolist(), strict=True):
                    self._floats[place] = float(number)
        return self._floats


def reader(device: torch.device) -> Callable[[Sequence[Any]], Reading]:
    """What reads numbers of a run on `device`."""
    return Reading if device.type == "cpu" else functools.partial(DeviceReading, device)


def on_device(number: Any) -> bool:
    """Whether reading `number` waits for a device."""
    return isinstance(number, torch.Tensor) and not number.is_cpu


def exact(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype of `device`, for sums: MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
