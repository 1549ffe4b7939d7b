"""Measurements on a device whose host runs ahead: the time without work, and the memory in use. The device here is a model."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from fabricate.metrics.device import peak_memory, stopwatch
from fabricate.metrics.timing import DeviceStopwatch, Stopwatch


class Event:
    """A moment that the modelled device passes at `at`, on the clock that both share."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.at = max(machine.now, machine.busy_until)

    def query(self) -> bool:
        return self._machine.now >= self.at

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


class Machine:
    """A host that queues work for a device in no time, and waits only for its loader and at most two updates ahead."""

    def __init__(self, device_seconds: float, loader_seconds: float) -> None:
        self.now = self.busy_until = 0.0
        self._work, self._load = device_seconds, loader_seconds
        self._done: list[float] = []

    def batches(self, number: int) -> Iterator[int]:
        for batch in range(number):
            self.now += self._load
            yield batch

    def queue(self) -> None:
        self.busy_until = max(self.now, self.busy_until) + self._work
        self._done.append(self.busy_until)
        if len(self._done) > 2:
            self.now = max(self.now, self._done[-3])


@pytest.mark.parametrize(
    ("device_seconds", "loader_seconds", "share"), [(0.1, 0.08, 0.008), (0.1, 0.15, 1 / 3), (0.1, 0.0, 0.0)]
)
def test_waiting_for_data_is_the_time_in_which_the_device_had_no_work(
    device_seconds: float, loader_seconds: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(device_seconds, loader_seconds)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    watch = DeviceStopwatch(lambda: Event(machine))
    for _ in watch.timed(machine.batches(100)):
        machine.queue()
    machine.now = machine.busy_until
    assert watch.lap(100, 100)["data_share"] == pytest.approx(share, abs=0.005)


def test_the_host_of_a_cpu_waits_for_its_data_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(0.1, 0.08)
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    watch = stopwatch(torch.device("cpu"))
    assert type(watch) is Stopwatch
    for _ in watch.timed(machine.batches(10)):
        machine.now += 0.12
    assert watch.lap(10, 10)["data_share"] == pytest.approx(0.4)


def test_the_peak_of_memory_is_the_devices_and_not_guessed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 2**30)
    device = torch.device("cuda", 1)
    peak = peak_memory(device)
    assert peak is not None
    assert (peak(), reset) == (2**30, [device])
    assert peak_memory(torch.device("cpu")) is None

    def not_counted(device: torch.device) -> None:
        raise RuntimeError("Allocator for mps is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", not_counted)
    assert peak_memory(torch.device("mps")) is None
