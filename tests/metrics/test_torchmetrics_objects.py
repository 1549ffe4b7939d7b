"""The torchmetrics objects inside a module: recognised, saved and restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics

from fabricate.metrics.torchmetrics_objects import (
    is_torchmetric,
    load_torchmetrics_state,
    snapshot_torchmetrics,
    torchmetrics_state,
)


def test_a_torchmetrics_object_is_recognised() -> None:
    assert is_torchmetric(torchmetrics.MeanMetric())
    assert not is_torchmetric(torch.tensor(1.0))


def test_a_snapshot_puts_back_every_torchmetrics_state() -> None:
    module = torch.nn.Module()
    module.mean, module.cat = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
    module.mean.update(torch.tensor(1.0))
    module.cat.update(torch.tensor(1.0))
    restore = snapshot_torchmetrics(module)
    module.mean.update(torch.tensor(9.0))
    module.cat.update(torch.tensor(9.0))
    module.cat.compute()
    restore()
    assert float(module.mean.compute()) == 1.0
    assert float(module.cat.compute()) == 1.0
    assert module.mean.update_count == module.cat.update_count == 1


def test_a_snapshot_puts_back_how_often_a_tracker_was_incremented() -> None:
    module = torch.nn.Module()
    tracker = module.tracker = torchmetrics.wrappers.MetricTracker(torchmetrics.SumMetric(), maximize=True)
    restore = snapshot_torchmetrics(module)
    for number in (1.0, 2.0):
        tracker.increment()
        tracker.update(torch.tensor(number))
    again = snapshot_torchmetrics(module)
    restore()
    with pytest.raises(ValueError, match="cannot be called before"):
        tracker.update(torch.tensor(1.0))
    again()
    assert tracker.compute_all().tolist() == [1.0, 2.0]
    assert tracker.n_steps == 2


def test_the_state_of_torchmetrics_objects_goes_through_a_copy() -> None:
    one: Any = torch.nn.Module()
    two: Any = torch.nn.Module()
    for module in (one, two):
        module.inner = torch.nn.ModuleDict({"mean": torchmetrics.MeanMetric(), "cat": torchmetrics.CatMetric()})
    one.inner["mean"].update(torch.tensor(2.0))
    one.inner["cat"].update(torch.tensor([1.0, 2.0]))
    state = torchmetrics_state(one)
    assert list(state) == ["inner.mean", "inner.cat"]
    one.inner["mean"].update(torch.tensor(100.0))
    load_torchmetrics_state(two, state)
    two.inner["mean"].update(torch.tensor(4.0))
    two.inner["cat"].update(torch.tensor([3.0]))
    assert float(two.inner["mean"].compute()) == 3.0
    assert two.inner["cat"].compute().tolist() == [1.0, 2.0, 3.0]
