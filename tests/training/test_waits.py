"""Avoidable waits of the host for a device: none for whole-number weights, one read of an fp16 update, one copy of predictions. They are
counted where torch's operators are dispatched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fabricate.distributed.loss_scaling import Scaled
from fabricate.strategies.single import Single
from fabricate.training.evaluations.evaluation import _rows
from fabricate.training.updates.losses import _product
from tests.support.device_values import device, put


@pytest.mark.parametrize(
    ("loss", "weight", "product"),
    [(0.5, 4, 2.0), (float("nan"), 0, 0.0), (0.5, torch.tensor(3), 1.5)],
    ids=["rows", "stand-in", "of the host"],
)
def test_the_weight_of_a_loss_is_not_sent_to_the_device(
    loss: float, weight: Any, product: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device(monkeypatch) as there:
        result = _product(put(loss), weight)
        assert there.waits == []
        assert (result.device.type, float(result)) == ("meta", product)


def test_a_weight_of_the_device_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with device(monkeypatch) as there:
        results = _product(put(0.5), put(4)), _product(put(float("nan")), put(0))
        assert there.waits == []
        assert [float(result) for result in results] == [2.0, 0.0]


def test_the_predictions_of_a_batch_leave_the_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with device(monkeypatch) as there:
        rows = _rows({"a": put([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}, 3, "predict_step returned")
        assert there.waits == ["to the host"]
    assert [row["a"].tolist() for row in rows] == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


class Reads(TorchDispatchMode):
    """Counts what is read from tensors."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def _plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, fused=True)


@pytest.mark.parametrize("make", [_plain, _fused])
@pytest.mark.parametrize("gradient", [1.0, float("inf")])
def test_an_fp16_update_is_read_once(make: Callable[[Any], torch.optim.Optimizer], gradient: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = make([weight]), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaling = Scaled(Single(), scaler)
    scaling.backward((weight * gradient).sum())
    scaling.unscale(optimizer)
    with Reads() as reads:
        applied = scaling.step(optimizer)
    finite = gradient == 1.0
    assert reads.count == 1
    assert applied is finite
    assert weight.tolist() == ([pytest.approx(-0.1)] * 2 if finite else [0.0, 0.0])
    assert scaler.get_scale() == (4.0 if finite else 2.0)
