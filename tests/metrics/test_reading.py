"""The read of a log boundary from a device: one copy without a wait before it is needed, and exact sums until then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fabricate.metrics.counters import Progress, Tokens
from fabricate.metrics.reading import exact, reader
from fabricate.metrics.reduction import Metrics
from tests.support.device_values import DEVICE, Device, device, put


class Alone:
    def combine_json(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        return combine([value])


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with device(monkeypatch) as fake:
        yield fake


def _logged() -> Metrics:
    """Tensors of the device and of the host, numbers, and whole numbers that float32 cannot hold."""
    metrics = Metrics(Alone(), DEVICE)
    for number in range(4):
        metrics.take([("a", put(float(number)), None, "mean")], put(number))
        metrics.take([("b", number, put(2.0), "mean"), ("n", put(2**24 + 1), None, "sum")], 1)
        metrics.take([("host", torch.tensor([0.5]), None, "mean"), ("half", put(0.1, torch.bfloat16), 3, "mean")], 1)
    return metrics


EXPECTED = {"a": 14 / 6, "b": 1.5, "n": 4.0 * (2**24 + 1), "host": 0.5, "half": float(torch.tensor(0.1).bfloat16())}


def test_a_log_boundary_begins_one_copy_and_waits_when_the_values_are_needed(there: Device) -> None:
    metrics = _logged()
    metrics.begin([put(0.25), 7, torch.tensor(0.5)])
    assert (there.waits, there.events) == ([], ["recorded"])
    metrics.take([("a", put(100.0), None, "mean")], 1)
    assert metrics.complete() == (EXPECTED, [0.25, 7.0, 0.5])
    assert (there.waits, there.events) == ([], ["recorded", "waited for"])
    assert metrics.reduce() == {"a": 100.0}, "what is added while a copy is in progress belongs to the next line"


def test_a_number_of_the_host_is_read_before_it_changes(there: Device) -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    reading = reader(DEVICE)([rate, put(1)])
    rate.fill_(9.0)
    assert reading.floats() == reading.floats() == [0.1, 1.0]


def test_a_long_way_to_the_next_boundary_is_folded_without_a_wait(there: Device) -> None:
    metrics = _logged()
    metrics.compact()
    assert there.waits == []
    assert metrics.reduce() == pytest.approx(EXPECTED, rel=1e-15)


def test_a_checkpoint_reads_all_pending_entries_at_once(there: Device) -> None:
    state = _logged().state()
    assert (there.waits, there.events) == ([], ["recorded", "waited for"])
    assert state["pending"][:3] == [["a", 0.0, 0.0, "mean"], ["b", 0.0, 2.0, "mean"], ["n", 2.0**24 + 1, 1.0, "sum"]]


def test_weights_are_added_up_exactly_on_the_device(there: Device) -> None:
    progress = Progress()
    tokens = Tokens(progress, exact(DEVICE))
    for weight in (2.0**24, 1.0, 1.0, 1.0):
        tokens.add(put(weight, torch.float32))
    assert there.waits == []
    tokens.read()
    assert progress.tokens == 2**24 + 3


def test_a_cpu_reads_numbers_where_they_are() -> None:
    assert reader(torch.device("cpu"))([torch.tensor(2), 0.5]).floats() == [2.0, 0.5]
