"""The transfer of batches to the device: the tensors in them, and no copies without a device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from fabricate.data.transfer import Transfer, opaque, tensors


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    name: str = "pair"


class Own:
    """Moves by itself; nobody can see the tensors in it."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Own:
        return self


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        (torch.zeros(2), 1),
        ({"a": torch.zeros(2), "b": [torch.zeros(1), (torch.zeros(1), "text")], "c": 3}, 3),
        (BatchEncoding({"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2)}), 2),
        (Pair(torch.zeros(2)), 1),
        ([], 0),
    ],
)
def test_every_tensor_of_a_batch_is_found(batch: Any, number: int) -> None:
    assert len(list(tensors(batch))) == number
    assert not opaque(batch)


def test_what_moves_by_itself_is_recognised_wherever_it_is() -> None:
    assert opaque(Own())
    assert opaque({"a": torch.zeros(1), "b": [Own()]})


def test_sparse_tensors_are_not_left_to_a_stream_that_they_cannot_record() -> None:
    sparse = torch.eye(3).to_sparse()
    assert opaque(sparse)
    assert opaque({"a": [torch.zeros(1), sparse]})
    assert opaque(Pair(sparse))


def test_batches_stay_where_they_are_without_a_device() -> None:
    batch = [torch.zeros(2)]
    assert Transfer(torch.device("cpu"), lambda value: value)(batch) is batch
