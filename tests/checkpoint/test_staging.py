"""Copies of a device's state for a save: parallel to the computation, in one block of memory, without waits of the training host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fabricate.checkpoint.state import staging
from fabricate.checkpoint.state.logical import chunk
from fabricate.checkpoint.state.staging import DeviceStaging, read_ahead
from tests.support.device_values import DEVICE, Device, Stream, device, put


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with device(monkeypatch) as fake:
        monkeypatch.setattr(torch, "Stream", lambda device: Stream(fake, "beside"))
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: fake.events.append(f"uses {device}"))
        monkeypatch.setattr(staging, "_pinned_memory", lambda size, device: staging._host_memory(size))
        yield fake


def _bytes(values: list[Any], dtype: torch.dtype) -> bytes:
    return torch.tensor(values, dtype=dtype).view(torch.uint8).numpy().tobytes()


def test_weights_are_copied_beside_the_computation_and_the_step_waits_for_them(there: Device) -> None:
    copies = DeviceStaging(DEVICE)
    chunks = [
        chunk("model/weight", put([1.0, 2.0])),
        chunk("model/mean", put([3], torch.int64)),
        chunk("host", torch.ones(1)),
    ]
    staged, ready = copies.copy(chunks, lambda name: name == "model/weight")
    begun = ["beside waits for the computation", "beside entered", "beside left", "recorded", "beside recorded"]
    assert (there.waits, there.events) == ([], begun)
    there.events.clear()
    copies.before_step()
    copies.before_step()
    assert there.events == ["waits for beside"], "once, on the device"
    there.events.clear()
    ready()
    assert there.events == ["uses meta", "asked", "beside asked"], (
        "the thread that writes waits without keeping a core busy"
    )
    contents = [bytes(each.data()) for each in staged]
    assert contents == [_bytes([1.0, 2.0], torch.float32), _bytes([3], torch.int64), _bytes([1.0], torch.float32)]
    assert there.waits == []


def test_the_memory_is_one_block_that_serves_every_save(there: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        staging, "_pinned_memory", lambda size, device: sizes.append(size) or torch.empty(size, dtype=torch.uint8)
    )
    copies = DeviceStaging(DEVICE)
    for _ in range(3):
        copies.copy([chunk("a", put([0.0] * 17)), chunk("b", put([0.0]))])
    copies.copy([chunk("a", put([0.0] * 17))])
    assert sizes == [128 + 64]
    copies.copy([chunk("a", put([0.0] * 100))])
    assert sizes == [192, 448]


def test_a_save_that_stops_training_copies_the_next_tensor_while_it_writes_one(there: Device) -> None:
    narrow, wide = chunk("narrow", put([1, 2], torch.int8)), chunk("wide", put([1.0], torch.float64))
    chunks = read_ahead([narrow, chunk("middle", put([2.0])), wide])
    assert [each.tensor for each in chunks] == ["wide", "middle", "narrow"], "as the writer takes them"
    contents = []
    for each in chunks:
        there.events.append(each.tensor)
        contents.append(bytes(each.data()))
    assert there.waits == []
    assert there.events == [
        *("wide", "recorded", "recorded", "waited for"),
        *("middle", "recorded", "waited for"),
        *("narrow", "waited for"),
    ]
    expected = (([1.0], torch.float64), ([2.0], torch.float32), ([1, 2], torch.int8))
    assert contents == [_bytes(values, dtype) for values, dtype in expected]
