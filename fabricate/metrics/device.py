"""Measurements of a device during a fit: how long it had no work, and how much memory it used.

They are chosen once for the device of a run; a CPU has neither. Must not know: what runs on the device, where figures are written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fabricate.metrics.timing import DeviceStopwatch, Moment, Stopwatch


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for a fit on `device`."""
    if device.type == "cpu":
        return Stopwatch()

    def mark() -> Moment:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    return DeviceStopwatch(mark)


def peak_memory(device: torch.device) -> Callable[[], int] | None:
    """A function that returns the most bytes that tensors of this process have taken on `device` since this call; None if this is not
    counted.

    None on a CPU, where the peak of the process would include libraries, data and everything that ran before.
    """
    if device.type == "cpu":
        return None
    try:
        torch.accelerator.reset_peak_memory_stats(device)
    except RuntimeError:  # a device whose allocator keeps no count
        return None
    return lambda: torch.accelerator.max_memory_allocated(device)
