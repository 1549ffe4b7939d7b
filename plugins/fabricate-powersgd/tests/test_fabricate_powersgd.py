"""The conformance kit, the messages sent, and a resume bit for bit."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from fabricate_powersgd.strategy import PowerSGD, share
from torch.utils.data import TensorDataset

from fabricate import Callback, ConfigurationError, Trainer, TrainModule
from fabricate.testing import check_strategy, run_ranks

ROWS = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
STRATEGY = "powersgd:start=2,bucket_cap_mb=1"


class Wide(TrainModule):
    """Gradients of more than one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 9000), torch.nn.Linear(9000, 32)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.down(torch.tanh(self.up(batch))) - batch.flip(1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Gradients(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_before_step(self, module: TrainModule) -> None:
        self.steps.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})


def fit(
    strategy: str, steps: int = 5, **arguments: Any
) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module, gradients = Wide(), Gradients()
    trainer = Trainer(strategy=strategy, max_steps=steps, seed=3, progress=False, plugins=[gradients], **arguments)
    trainer.fit(module, ROWS, batch_size=4)
    return gradients.steps, {name: p.detach().clone() for name, p in module.named_parameters()}


def interrupted(root: Path, strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    options: dict[str, Any] = {"save_every": "4 steps", "keep": "all"}
    _, straight = fit(strategy, 6, run_dir=root / "straight", **options)
    fit(strategy, 4, run_dir=root / "halves", **options)
    return straight, fit(strategy, 6, run_dir=root / "halves", **options)[1]


def test_it_keeps_what_a_strategy_promises() -> None:
    check_strategy("powersgd:start=1", equivalent=False)


def test_thin_matrices_are_sent_after_the_first_updates() -> None:
    for (thin, _), (plain, _) in zip(run_ranks(fit, 2, STRATEGY), run_ranks(fit, 2, "ddp"), strict=True):
        ranks = [int(torch.linalg.matrix_rank(step["up.weight"])) for step in thin]
        assert ranks[2:] == [1, 1, 1]
        assert min(ranks[:2]) > 1
        for name in ("up.weight", "up.bias"):
            for step in (0, 1):
                torch.testing.assert_close(thin[step][name], plain[step][name])
        near = torch.nn.functional.cosine_similarity(*(s[2]["up.weight"].flatten() for s in (thin, plain)), dim=0)
        assert near > 0.2
        torch.testing.assert_close(thin[2]["down.bias"], plain[2]["down.bias"])


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Two updates after the first approximation, with errors in the checkpoint."""
    for straight, halves in run_ranks(interrupted, 2, tmp_path, STRATEGY):
        assert straight.keys() == halves.keys()
        assert all(torch.equal(straight[name], halves[name]) for name in straight)


def test_the_error_of_a_rank_is_not_lost_on_another_number_of_ranks() -> None:
    rows = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    for world_size in (1, 2, 3):
        errors = [share(rows, rank, world_size) for rank in range(world_size)]
        torch.testing.assert_close(torch.stack(errors).mean(0), rows.mean(0))
    assert torch.equal(share(rows, 1, 2), rows[1])


def refused(strategy: str, **arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Trainer(strategy=strategy, max_steps=1, progress=False, **arguments).plan(Wide(), ROWS, batch_size=4)
    return str(caught.value)


def fit_sparse() -> str:
    module = Wide()
    module.words = torch.nn.Embedding(4, 4, sparse=True)
    with pytest.raises(ConfigurationError) as caught:
        Trainer(strategy="powersgd", max_steps=1, progress=False).fit(module, ROWS, batch_size=4)
    return str(caught.value)


def test_sparse_gradients_are_refused_by_the_name_of_their_layer() -> None:
    for message in run_ranks(fit_sparse, 2):
        assert "powersgd: it cannot exchange sparse gradients, those of words; set sparse=False" in message


def test_what_would_keep_a_value_that_is_not_finite_is_refused() -> None:
    for arguments in ({"nonfinite": "skip"}, {"precision": "fp16"}):
        for message in run_ranks(refused, 2, "powersgd", **arguments):
            assert "a gradient that is not finite would stay in the error feedback and be added to" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, ": give rank of at least 1 and start of at least 0"),
        ({"start": -1}, ": give rank of at least 1 and start of at least 0"),
        ({"communication_hook": "bf16"}, "leave communication_hook out"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PowerSGD(**options)


class Labels(TrainModule):
    """A cross-entropy of rows with one or five labels: the number of labels of an update is known only after its backward."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up, self.down = torch.nn.Linear(12, 16).double(), torch.nn.Linear(16, 9).double()
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return logits

    def training_step(self, batch: Any) -> torch.Tensor:
        x, labels = batch
        return torch.nn.functional.cross_entropy(self(x).flatten(0, 1), labels.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def labelled() -> tuple[torch.Tensor, torch.Tensor]:
    """24 rows of five tokens. Every second global batch has few labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 5, 12, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 9, (24, 5), generator=generator)
    labels[torch.arange(24) // 4 % 2 == 1, 1:] = -100
    return x, labels


def fit_labels(start: int) -> dict[str, torch.Tensor]:
    module = Labels()
    trainer = Trainer(strategy=f"powersgd:start={start}", max_epochs=2, seed=3, progress=False, precision="fp32")
    trainer.fit(module, TensorDataset(*labelled()), batch_size=2, shuffle=False)
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def by_hand(start: int) -> dict[str, torch.Tensor]:
    """PowerSGD of rank 1 on two ranks, whose gradients are those of the mean over the labels of both."""
    module, (x, labels) = Labels(), labelled()
    columns: dict[str, torch.Tensor] = {}
    errors: dict[str, list[torch.Tensor]] = {}
    for update in range(12):
        first = 4 * (update % 6)
        shares = [slice(first, first + 2), slice(first + 2, first + 4)]
        count = int((labels[first : first + 4] != -100).sum())
        gradients = []
        for rows in shares:
            logits = module(x[rows]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[rows].flatten(), reduction="sum")
            gradients.append(torch.autograd.grad(2 * loss / count, list(module.parameters())))
        for (name, parameter), *both in zip(module.named_parameters(), *gradients, strict=True):
            if parameter.ndim == 1 or update < start:
                mean = (both[0] + both[1]) / 2
            else:
                wholes = [g + e for g, e in zip(both, errors.get(name, [torch.zeros_like(parameter)] * 2), strict=True)]
                if name not in columns:
                    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                    columns[name] = torch.randn(parameter.shape[1], 1, generator=generator).double()
                basis = torch.linalg.qr(sum(whole @ columns[name] for whole in wholes)).Q
                columns[name] = (wholes[0].T @ basis + wholes[1].T @ basis) / 2
                mean = basis @ columns[name].T
                errors[name] = [whole - mean for whole in wholes]
            parameter.data -= 0.3 * mean
    return dict(module.named_parameters())


@pytest.mark.parametrize("start", [0, 2])
def test_errors_have_the_unit_of_the_mean_loss_if_updates_have_unequal_numbers_of_labels(start: int) -> None:
    expected = by_hand(start)
    for weights in run_ranks(fit_labels, 2, start):
        for name, parameter in weights.items():
            torch.testing.assert_close(parameter, expected[name].detach(), rtol=1e-9, atol=1e-12)
