"""Ranks that would not run the same thing: one error, the same on every rank, that says what differs and where."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from fabricate import Callback, RankError, Trainer, TrainModule
from fabricate.testing import run_ranks


class Regression(TrainModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, width)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hears(Callback):
    def on_step(self) -> None: ...


class HearsToo(Callback):
    def on_step(self) -> None: ...


def _told(case: str) -> str:
    """What `Trainer.fit` raises where the last rank differs in `case`."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    listed: list[Callback] = [Hears(), HearsToo()]
    arguments: dict[str, Any] = {"max_steps": 3, "plugins": listed}
    if last and case == "plugin":
        arguments["plugins"] = listed[:1]
    elif last and case == "order":
        arguments["plugins"] = listed[::-1]
    elif last and case == "steps":
        arguments["max_steps"] = 2
    module = Regression(1)
    if last and case == "frozen":
        module.layer.bias.requires_grad_(False)
    with pytest.raises(RankError) as caught:
        Trainer(progress=False, **arguments).fit(module, torch.ones(12, 4), batch_size=2)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            "plugin",
            "ranks [2] have other listeners of hooks than rank 0: on_step is ['Hears', 'HearsToo'] on rank 0 and ['Hears'] on rank 2",
        ),
        ("order", "on_step is ['Hears', 'HearsToo'] on rank 0 and ['HearsToo', 'Hears'] on rank 2"),
        ("steps", "ranks [2] have other settings than rank 0: total steps is 3 on rank 0 and 2 on rank 2"),
        ("frozen", "layer.bias is [[1], True] on rank 0 and [[1], False] on rank 2"),
    ],
)
def test_what_differs_is_told_on_every_rank(case: str, told: str) -> None:
    messages = run_ranks(_told, 3, case)
    assert told in messages[0]
    assert messages[1:] == messages[:1] * 2
