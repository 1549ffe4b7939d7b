"""A tensor that is changed in place after it was logged counts with the value that it had when it was logged."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset

from fabricate import Trainer
from tests.support.regression import Hears, Regression


class Changing(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.correct = torch.zeros(()), torch.zeros(())
        self.register_buffer("tau", torch.ones(()))

    def training_step(self, batch: Any) -> torch.Tensor:
        self.log("seen", self.seen)
        self.seen += 1
        return super().training_step(batch)

    def on_step(self) -> None:
        self.log("tau", self.get_buffer("tau"))
        self.get_buffer("tau").mul_(0.5)

    def validation_step(self, batch: Any) -> None:
        self.correct += len(batch[0])

    def on_eval_end(self) -> None:
        self.log("correct", self.correct, reduce="sum")
        self.correct.zero_()


def test_what_is_changed_in_place_after_log_counts_as_it_was() -> None:
    data, heard = TensorDataset(torch.rand(16, 3), torch.rand(16, 1)), Hears()
    trainer = Trainer(max_epochs=1, log_every=1, sanity_batches=0, progress=False, plugins=[heard])
    result = trainer.fit(Changing(), data, data, batch_size=4)
    assert [values["seen"] for _, values in heard.logs] == [0, 1, 2, 3]
    assert [values["tau"] for _, values in heard.logs] == [1, 0.5, 0.25, 0.125]
    assert result.metrics["val_correct"] == 16
