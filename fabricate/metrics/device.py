"""What a device knows of itself while a fit runs: how long it had no work, how much memory it held.

Chosen once for the device of a run; a CPU has neither. Must not know: what runs on it, where figures are written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fabricate.metrics.timing import DeviceStopwatch, Moment, Stopwatch


def stopwatch(device: torch.device) -> Stopwatch:
    """What times a fit on `device`."""
    if device.type == "cpu":
        return Stopwatch()

    def mark() -> Moment:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    return DeviceStopwatch(mark)


def peak_memory(device: torch.device) -> Callable[[], int] | None:
    """What gives the most bytes that tensors of this process have taken on `device` since this call; None where that is not counted.

    Not on a CPU: the peak of the process counts libraries, data and whatever ran before.
    """
    if device.type == "cpu":
        return None
    try:
        torch.accelerator.reset_peak_memory_stats(device)
    except RuntimeError:  # a device whose allocator keeps no count
        return None
    return lambda: torch.accelerator.max_memory_allocated(device)
