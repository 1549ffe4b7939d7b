"""A fit that has to be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fabricate import ConfigurationError, Trainer, TrainModule

ROWS = [(torch.full((3,), float(row)), torch.tensor([float(row)])) for row in range(8)]


class Regression(TrainModule):
    """A module that counts its training steps in `ran`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.ran = 0

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch: Any) -> Any:
        self.ran += 1
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def refused(
    message: str,
    *,
    module: Any = None,
    train: Any = ROWS,
    val: Any = None,
    error: type[Exception] = ConfigurationError,
    forwards: int = 0,
    fit: dict[str, Any] | None = None,
    **arguments: Any,
) -> None:
    """Assert that a fit with these settings raises `error` with `message` (a part of it) after `forwards` calls of training_step."""
    module = Regression() if module is None else module
    loading = {"batch_size": 2} if train is ROWS else {}
    with pytest.raises(error) as caught:
        Trainer(**{"max_steps": 2, "progress": False, "sanity_batches": 0, **arguments}).fit(
            module, train, val, **(loading | (fit or {}))
        )
    assert message in str(caught.value)
    assert type(caught.value) is error
    assert getattr(module, "ran", 0) == forwards


def wrong_module(**methods: Any) -> Any:
    return type("Wrong", (Regression,), methods)()


def answering(answer: Callable[[Any, torch.Tensor], Any]) -> Any:
    def training_step(self: Any, batch: Any) -> Any:
        self.ran += 1
        return answer(self, self.loss(batch))

    return wrong_module(training_step=training_step)
