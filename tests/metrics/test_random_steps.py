"""Whatever a step computes is read without an error: random losses in training, random metrics in evaluations."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from fabricate import ConfigurationError
from fabricate.metrics.step_watch import StepWatch
from fabricate.training.updates.step_output import Made

pytestmark = pytest.mark.filterwarnings("ignore")  # some random arguments make no sense
ROWS = 6
SHAPES: list[tuple[int, ...]] = [(ROWS,), (ROWS, 5), (ROWS, 4, 3), (ROWS, 1), (5,), (), (2 * ROWS, 3)]
FACTORS: list[Any] = [2, 0.5, 1 / ROWS, 0, math.inf, math.nan, torch.tensor(0.3), torch.tensor(0.0), torch.tensor(4)]
UNARY: list[Callable[[Any], Any]] = [
    *(torch.exp, torch.abs, torch.sqrt, torch.neg, torch.square, torch.tanh, functional.softplus, torch.nan_to_num),
    *(torch.flatten, torch.squeeze, torch.detach, torch.clone, torch.Tensor.double, lambda x: x.clamp(-1, 1)),
    *(lambda x: x.log_softmax(-1), lambda x: x[x > 0], lambda x: x[:3], lambda x: x[0], lambda x: x.mT @ x),
    *(lambda x: x[torch.arange(len(x)).flip(0)], lambda x: torch.stack(list(x.unbind())), lambda x: torch.cat([x, x])),
    *(lambda x: torch.where(x > 0, x, 0.0), lambda x: x.masked_select(x > 0), lambda x: x.expand(2, *x.shape)),
    *(lambda x: x.transpose(0, -1), lambda x: torch.stack([x.mean(), x.sum()]), lambda x: x.unsqueeze(-1)),
]
REDUCTIONS: list[Callable[..., Any]] = [
    *(torch.sum, torch.mean, torch.nansum, torch.nanmean, torch.amax, torch.logsumexp, torch.linalg.vector_norm),
    *(torch.std, torch.var),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    *(torch.add, torch.sub, torch.mul, torch.mul, torch.mul, torch.div, torch.maximum, torch.matmul),
    *(lambda x, y: torch.where(y > 0, x, y), lambda x, y: torch.einsum("b...,b...->b", x, y)),
    *(lambda x, y: functional.cosine_similarity(x, y, dim=-1), lambda x, y: torch.dot(x.flatten(), y.flatten())),
    *(functional.mse_loss, lambda x, y: functional.mse_loss(x, y, reduction="none")),
    *(lambda x, y: functional.smooth_l1_loss(x, y, reduction="sum"), lambda x, y: functional.kl_div(x, y.sigmoid())),
]
INVALID = (RuntimeError, IndexError, ValueError, TypeError)
"""What torch raises for shapes that do not fit."""


class Draws:
    """Random expressions of a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)

    def leaf(self) -> torch.Tensor:
        values = torch.randn(self.random.choice(SHAPES), requires_grad=self.random.random() < 0.5)
        return values if values.requires_grad else self.random.choice([values, (values > 0).float(), values > 0])

    def reduced(self, values: torch.Tensor) -> torch.Tensor:
        if not values.ndim or self.random.random() < 0.2:
            result: torch.Tensor = self.random.choice([torch.sum, torch.mean])(values)
            return result
        dim = self.random.randrange(-values.ndim, values.ndim)
        result = self.random.choice(REDUCTIONS)(values, dim=dim, keepdim=self.random.random() < 0.3)
        return result

    def expression(self, depth: int) -> torch.Tensor:
        if not depth:
            return self.leaf()
        values, kind = self.expression(depth - 1), self.random.random()
        values = values if values.is_floating_point() else values.float()
        with contextlib.suppress(*INVALID):
            if kind < 0.3:
                return self.random.choice(UNARY)(values)
            if kind < 0.6:
                return self.random.choice(BINARY)(values, self.expression(self.random.randrange(depth)))
        return self.reduced(values)

    def number(self) -> torch.Tensor:
        while True:
            with contextlib.suppress(*INVALID):
                values = self.expression(self.random.randrange(1, 7))
                while values.numel() != 1:
                    values = self.reduced(values if values.is_floating_point() else values.float())
                number = values.reshape(()) * self.random.choice([1, 1, *FACTORS])
                return number / self.random.choice([1, 1, 0, math.inf]) if self.random.random() < 0.2 else number


@pytest.mark.parametrize("seed", range(10))
def test_the_form_of_a_random_loss_is_read(seed: int) -> None:
    draws = Draws(seed)
    for _ in range(100):
        loss = draws.number()
        for rows in (ROWS, 1, 4, None) if loss.requires_grad else ():
            made = Made.by(loss, rows)
            assert made.is_notable() in (True, False)
            assert isinstance(made.part(), str)


@pytest.mark.parametrize("seed", range(10))
def test_what_random_steps_of_an_evaluation_compute_is_read(seed: int) -> None:
    for program in range(10):
        watch: StepWatch | None = StepWatch()
        for batch in range(12):
            draws = Draws(1000 * seed + program)
            assert watch is not None
            with torch.no_grad(), watch:
                torch.manual_seed(batch)
                computed = [draws.number() for _ in range(3)]
                labels = torch.tensor([-100, 0, 1, 2, 0, 1])
                if program % 2:
                    computed.append(functional.cross_entropy(torch.randn(ROWS, 3), labels))
                values = [each.item() if place % 2 else each for place, each in enumerate(computed)]
            watch = _read(watch, [(str(place), value, None, "mean") for place, value in enumerate(values)])
            if watch is None:
                break


def _read(watch: StepWatch, logged: list[Any]) -> StepWatch | None:
    """Read a step as an evaluation does. Returns the record for the next."""
    texts: list[Any] = [
        watch.summed(logged, ROWS, {5, 6}),
        watch.function_of_a_mean(logged, ROWS, {5}),
        watch.unknown(logged, ROWS),
    ]
    with contextlib.suppress(ConfigurationError):  # equal to a cross-entropy by chance
        if watch.weigh(logged, ROWS) is not None:
            texts.append(watch.beside(logged, ROWS, {5}))
            assert all(isinstance(text, str | list) for text in texts)
            return watch
        texts += [watch.of_other_than_rows(logged, ROWS, None, {5}), watch.gives_losses_over_rows(logged, ROWS)]
    return watch.another_look()
