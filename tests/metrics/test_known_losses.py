"""Losses as public repositories write them: those that are means over rows get no note, the others get one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from fabricate.training.updates.step_output import Made

ROWS = 6
torch.manual_seed(0)
WEIGHT = torch.randn(5, 4, requires_grad=True)
X = torch.randn(ROWS, 5)
Y = torch.randn(ROWS, 4)
CLASSES = torch.randint(0, 4, (ROWS,))
SHARES = torch.rand(ROWS, 4).softmax(1)
BITS = (Y > 0).float()
MASK = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]])
TEACHER = torch.randn(ROWS, 4)


def out() -> torch.Tensor:
    return X @ WEIGHT


def log_p() -> torch.Tensor:
    return out().log_softmax(-1)


def focal() -> torch.Tensor:
    each = functional.cross_entropy(out(), CLASSES, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def dice() -> torch.Tensor:
    p = out().sigmoid()
    return (1 - (2 * (p * BITS).sum(1) + 1) / (p.sum(1) + BITS.sum(1) + 1)).mean()


def gaussian() -> torch.Tensor:
    mean, log_var = out()[:, :2], out()[:, 2:]
    return (0.5 * (log_var + (Y[:, :2] - mean) ** 2 / log_var.exp())).sum(-1).mean()


def vae() -> torch.Tensor:
    mean, log_var = out()[:, :2], out()[:, 2:]
    reconstruction = functional.mse_loss(out(), Y, reduction="sum") / ROWS
    return reconstruction - 0.5 * torch.mean(torch.sum(1 + log_var - mean.pow(2) - log_var.exp(), dim=-1))


def quantile() -> torch.Tensor:
    error = Y[:, :3] - out()[:, :3]
    levels = torch.tensor([0.1, 0.5, 0.9])
    return torch.max(levels * error, (levels - 1) * error).sum(-1).mean()


def ppo() -> torch.Tensor:
    ratio, advantage = (log_p() - TEACHER.log_softmax(-1)).exp(), Y
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def dpo() -> torch.Tensor:
    return -functional.logsigmoid(0.1 * (out()[:, 0] - out()[:, 1] - (TEACHER[:, 0] - TEACHER[:, 1]))).mean()


MEANS: dict[str, Callable[[], torch.Tensor]] = {
    "mse": lambda: functional.mse_loss(out(), Y),
    "mse by hand": lambda: ((out() - Y) ** 2).sum(-1).mean(),
    "sum over a batch, divided": lambda: ((out() - Y) ** 2).sum() / ROWS,
    "l1, huber and penalty": lambda: (
        functional.l1_loss(out(), Y) + functional.huber_loss(out(), Y) + 1e-3 * WEIGHT.abs().sum()
    ),
    "cross-entropy": lambda: functional.cross_entropy(out(), CLASSES),
    "label smoothing": lambda: functional.cross_entropy(out(), CLASSES, label_smoothing=0.1),
    "soft targets": lambda: torch.sum(-SHARES * functional.log_softmax(out(), dim=-1), dim=-1).mean(),
    "soft targets, of torch": lambda: functional.cross_entropy(out(), SHARES),
    "one-hot": lambda: -(functional.one_hot(CLASSES, 4) * log_p()).sum(dim=1).mean(),
    "picked": lambda: -log_p().gather(1, CLASSES[:, None]).mean(),
    "distillation": lambda: (
        functional.kl_div((out() / 2).log_softmax(1), (TEACHER / 2).softmax(1), reduction="batchmean") * 4
    ),
    "distillation by hand": lambda: (
        -(TEACHER.softmax(-1) * log_p()).sum(-1).mean() * 4 + functional.cross_entropy(out(), CLASSES) * 0.5
    ),
    "kl of each row": lambda: functional.kl_div(log_p(), SHARES, reduction="none").sum(-1).mean(),
    "several labels": lambda: functional.binary_cross_entropy_with_logits(out(), BITS, pos_weight=torch.ones(4) * 2),
    "focal": focal,
    "dice": dice,
    "gaussian": gaussian,
    "vae": vae,
    "quantile": quantile,
    "ppo": ppo,
    "dpo": dpo,
    "cosine": lambda: -functional.cosine_similarity(out(), TEACHER, dim=-1).mean(),
    "byol": lambda: (
        2 - 2 * (functional.normalize(out(), dim=-1) * functional.normalize(TEACHER, dim=-1)).sum(dim=-1)
    ).mean(),
    "triplet": lambda: functional.triplet_margin_loss(out(), Y, TEACHER),
    "hinge": lambda: functional.relu(1 - (2 * BITS - 1) * out()).mean(),
    "margin of ranks": lambda: functional.margin_ranking_loss(out()[:, 0], out()[:, 1], BITS[:, 0] * 2 - 1),
    "softplus": lambda: functional.softplus(-out()[:, 0]).mean() + functional.softplus(out()[:, 1]).mean(),
    "wasserstein": lambda: out()[:, 0].mean() - out()[:, 1].mean(),
    "diffusion": lambda: (X[:, :1].abs() * (out() - Y).pow(2)).mean(dim=[1]).mean(),
    "evidence": lambda: (SHARES * (out().exp().sum(1, keepdim=True).log() - out())).sum(-1).mean(),
    "mean of each row's mask": lambda: (((out() - Y) ** 2 * MASK).sum(-1) / MASK.sum(-1)).mean(),
}
NO_MEANS: dict[str, Callable[[], torch.Tensor]] = {
    "masked": lambda: ((out() - Y) ** 2 * MASK).sum() / MASK.sum(),
    "masked, selected": lambda: ((out() - Y) ** 2)[MASK.bool()].mean(),
    "masked, rescaled": lambda: ((out() - Y) ** 2 * MASK).mean() * (MASK.numel() / MASK.sum()),
    "masked, mean length": lambda: (((out() - Y) ** 2 * MASK).sum(-1) / MASK.sum(-1).mean()).mean(),
    "sum": lambda: ((out() - Y) ** 2).sum(),
    "root": lambda: functional.mse_loss(out(), Y).sqrt(),
    "weighted by its own sum": lambda: (((out() - Y) ** 2).mean(1) * SHARES[:, 0]).sum() / SHARES[:, 0].sum(),
    "dice of the batch": lambda: 1 - 2 * (out().sigmoid() * BITS).sum() / (out().sigmoid().sum() + BITS.sum()),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_known_loss_that_is_a_mean_over_rows_gets_no_note(name: str) -> None:
    made = Made.by(MEANS[name](), ROWS)
    assert not made.is_notable(), made


@pytest.mark.parametrize("name", NO_MEANS)
def test_a_known_loss_that_is_no_mean_over_rows_gets_a_note(name: str) -> None:
    made = Made.by(NO_MEANS[name](), ROWS)
    assert made.is_notable(), made
