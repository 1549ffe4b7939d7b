"""A batch, whole and in halves: whether the weight of a loss is the number of items in its mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fabricate import Trainer
from tests.support.regression import Regression, weights


class Tokens(Regression):
    """A mean over the labels that are there: 1 of the first rows, 3 of the others."""

    def __init__(self, weighs: bool) -> None:
        super().__init__()
        self.weighs = weighs

    def training_step(self, batch: Any) -> Any:
        self.log("seen", 1.0)
        mask = batch[1] > 0
        loss = ((self.layers(batch[0]) - batch[1]).square() * mask).sum() / mask.sum()
        return {"loss": loss, "weight": mask.sum()} if self.weighs else loss


def test_a_trial_says_when_the_halves_of_a_batch_do_not_make_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        (torch.full((3,), row / 4), torch.tensor([1.0 + row] * (1 if row < 2 else 3) + [0.0] * (2 if row < 2 else 0)))
        for row in range(4)
    ]
    for weighs in (False, True):
        torch.manual_seed(0)
        Trainer(max_epochs=1, fast_dev_run=True, progress=False).fit(Tokens(weighs), rows, batch_size=4, shuffle=False)
        noted = capsys.readouterr().err
        assert ("the mean of its halves, weighed by their rows, is" in noted) == (not weighs)


def test_the_comparison_leaves_the_run_as_it_is() -> None:
    ends = []
    for trial in (False, True):
        torch.manual_seed(0)
        module = Tokens(weighs=False)
        rows = [(torch.full((3,), row / 4), torch.ones(3)) for row in range(4)]
        trainer = Trainer(max_steps=2, fast_dev_run=2 if trial else False, seed=1, progress=False)
        metrics = trainer.fit(module, rows, batch_size=4).metrics
        ends.append((metrics["loss"], metrics["seen"], module.training, [float(w.sum()) for w in weights(module)]))
    assert ends[0] == ends[1]
