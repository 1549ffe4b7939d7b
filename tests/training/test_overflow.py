"""A gradient that overflows in one element, on one rank, of one shard: the update is skipped on all ranks, and leaves no trace."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fabricate import Callback, Trainer, TrainModule
from fabricate.testing import run_ranks

X = torch.randn(14, 3, generator=torch.Generator().manual_seed(1))
SPOILT, STEPS = 2, 5
"""The attempt that overflows, counted from 0; windows have 4 rows, the last of an epoch has 2."""
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "zero1": 2, "zero2": 2, "zero3": 2}
LEFT_OUT = {"fp16:init_scale=128": "loss scale overflow", "fp32": "non-finite gradients"}
Answer = tuple[list[tuple[int, str]], list[float], dict[str, np.ndarray[Any, Any]]]
"""Updates left out, the losses of the others, and the weights at the end."""


class Fused(TrainModule):
    """A fused optimizer makes its step even if the gradients overflowed, and leaves the weights as they are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return (self.layer(batch[0])[:, 0] - 20).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def test_the_first_update_of_a_fused_optimizer_may_overflow() -> None:
    skipped: list[int] = []

    class Hears(Callback):
        def on_step_skipped(self, step: int) -> None:
            skipped.append(step)

    trainer = Trainer(max_steps=3, precision="fp16", progress=False, plugins=[Hears()])
    assert trainer.fit(Fused(), TensorDataset(X), batch_size=4).steps == 3
    assert skipped[0] == 0


class Overflows(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)])

    def loss(self, x: torch.Tensor, spoilt: bool) -> torch.Tensor:
        hidden = torch.tanh(self.blocks[0](x))
        loss = (self.blocks[1](hidden).float()[:, 0] - x.sum(1)).square().mean()
        if spoilt and (x == X[9]).all(1).any():
            # Zero, with an infinite gradient for the last unit: a row of its weight, which one rank holds where it is sharded.
            change = hidden[:, 3].float().sum()
            loss = loss + (change - change.detach()).sqrt()
        return loss

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.loss(batch[0], self.trainer.step + self.trainer.progress.skipped == SPOILT)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Recorder(Callback):
    def __init__(self) -> None:
        self.left_out: list[tuple[int, str]] = []
        self.losses: list[float] = []
        self.weights: dict[str, np.ndarray[Any, Any]] = {}

    def on_step_skipped(self, step: int, reason: str) -> None:
        self.left_out.append((step, reason))

    def on_step(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        whole = {name: trainer.strategy.gather(parameter) for name, parameter in module.named_parameters()}
        self.weights = {name: tensor.detach().clone().numpy() for name, tensor in whole.items()}


def job(world_size: int) -> dict[tuple[str, str], Answer | str]:
    results: dict[tuple[str, str], Answer | str] = {}
    for strategy in (name for name, needed in STRATEGIES.items() if needed == world_size):
        for precision in LEFT_OUT:
            recorder = Recorder()
            try:
                trainer = Trainer(
                    strategy=strategy,
                    precision=precision,
                    nonfinite="skip",
                    max_steps=STEPS,
                    global_batch_size=4,
                    progress=False,
                    plugins=[recorder],
                )
                trainer.fit(Overflows(), TensorDataset(X), batch_size=2, shuffle=False)
                results[strategy, precision] = recorder.left_out, recorder.losses, recorder.weights
            except Exception as exception:
                results[strategy, precision] = "".join(traceback.format_exception(exception))
    return results


@pytest.fixture(scope="module")
def answers() -> dict[int, list[dict[tuple[str, str], Answer | str]]]:
    return {1: [job(1)], 2: run_ranks(job, 2, 2)}


@pytest.mark.parametrize("precision", LEFT_OUT)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_element_that_overflows_leaves_the_update_out_everywhere(
    answers: dict[int, list[dict[tuple[str, str], Answer | str]]], strategy: str, precision: str
) -> None:
    module, losses = Overflows(), []
    optimizer = module.configure_optimizers()
    for attempt, start in enumerate([0, 4, 8, 12, 0, 4]):
        if attempt != SPOILT:
            loss = module.loss(X[start : start + 4], spoilt=False)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    near = 1e-2 if "fp16" in precision else 1e-5
    for rank in answers[STRATEGIES[strategy]]:
        answer = rank[strategy, precision]
        assert not isinstance(answer, str), answer
        left_out, losses_of_rank, weights = answer
        assert left_out == [(SPOILT, LEFT_OUT[precision])]
        assert losses_of_rank == pytest.approx(losses, rel=near)
        for name, parameter in module.named_parameters():
            np.testing.assert_allclose(weights[name], parameter.detach(), rtol=near, atol=near, err_msg=name)
