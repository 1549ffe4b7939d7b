"""The memory of tensors as bytes, whatever their strides, and fits on data whose rows have such strides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fabricate import Trainer, TrainModule
from fabricate.checkpoint.state.contents import not_finite
from fabricate.data.flat_bytes import flat_bytes
from fabricate.strategies.sharding import broadcast
from fabricate.testing import run_ranks
from fabricate.training.saves.replicas import bits

COLUMN = np.arange(8, dtype=np.float32)[:, None]  # a row of it is one element with the stride 0
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "row of a column": lambda: torch.from_numpy(COLUMN)[5],
    "expanded": lambda: torch.ones(1, 1).expand(4, 1),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "one number": lambda: torch.tensor(3.0),
    "nothing": lambda: torch.empty(0, 3),
    "nothing, of numpy": lambda: torch.from_numpy(np.zeros(0, dtype=np.int64)),
    "no columns, of numpy": lambda: torch.from_numpy(np.zeros((3, 0))),
    "conjugated": lambda: torch.arange(6.0).to(torch.complex64).conj(),
    "negated": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "bf16": lambda: torch.arange(4, dtype=torch.bfloat16)[::2],
}


@pytest.mark.parametrize("kind", TENSORS)
def test_the_bytes_are_those_of_the_elements_in_order(kind: str) -> None:
    tensor = TENSORS[kind]()
    data = flat_bytes(tensor)
    assert (data.dtype, data.shape) == (torch.uint8, (tensor.numel() * tensor.element_size(),))
    assert torch.equal(data.clone().view(tensor.dtype), tensor.flatten())


@pytest.mark.parametrize("kind", TENSORS)
def test_equal_elements_have_equal_bits_and_finite_ones_are_found(kind: str) -> None:
    tensor = TENSORS[kind]()
    copy = tensor.resolve_conj().resolve_neg().clone()
    assert torch.equal(bits(tensor), bits(copy))
    assert not not_finite([("it", tensor)], tensor.device)


class Odd(TrainModule):
    """A parameter, a buffer and outputs of one element with the stride 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.scale = torch.nn.Parameter(torch.from_numpy(COLUMN.copy())[1])
        self.register_buffer("shift", torch.from_numpy(COLUMN.copy())[2])

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]) * self.scale + self.shift, batch[1])

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.training_step(batch), "outputs": list(batch[1])}

    def compute_metrics(self, outputs: list[torch.Tensor]) -> dict[str, float]:
        return {"sum": float(sum(outputs))}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def test_targets_from_a_column_of_numpy_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    data = TensorDataset(torch.ones(8, 2), torch.from_numpy(COLUMN))
    for epochs in (1, 2):
        module = Odd()
        result = Trainer(max_epochs=epochs, seed=1, run_dir=tmp_path, progress=False).fit(
            module, data, data, batch_size=2
        )
        assert result.metrics["val_sum"] == COLUMN.sum()
    assert result.steps == 8


def test_rows_without_labels_in_empty_arrays_of_numpy_are_trained_on_and_collected() -> None:
    class Detects(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any) -> torch.Tensor:
            numbers = torch.tensor([[float(len(row["labels"]))] for row in batch])
            return (self.layer(torch.stack([row["image"] for row in batch])) - numbers).square().mean()

        def validation_step(self, batch: Any) -> Any:
            return {"loss": self.training_step(batch), "outputs": [row["labels"] for row in batch]}

        def compute_metrics(self, outputs: list[torch.Tensor]) -> dict[str, float]:
            return {"labels": sum(map(len, outputs))}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = [{"image": torch.ones(2), "labels": torch.from_numpy(np.arange(row % 3))} for row in range(6)]
    result = Trainer(max_epochs=1, progress=False).fit(
        Detects(), *[torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=list)] * 2
    )
    assert result.metrics["val_labels"] == 6


def broadcast_views() -> list[Any]:
    data = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
    Trainer(max_steps=1, strategy="ddp", progress=False).fit(Odd(), data, batch_size=2)  # connects the ranks
    complex_numbers = torch.arange(4.0) + 1j * torch.distributed.get_rank()
    conjugated, negated = complex_numbers.conj(), complex_numbers.clone().conj().imag
    broadcast(conjugated)
    broadcast(negated)
    return [torch.view_as_real(conjugated.resolve_conj()).tolist(), negated.tolist()]


def test_conjugated_and_negated_tensors_are_broadcast_in_place() -> None:
    first, second = run_ranks(broadcast_views, 2)
    assert first == second == [[[float(number), 0.0] for number in range(4)], [0.0] * 4]
