"""Parity: every strategy on 1, 2 and 3 ranks, compared with a loop written by hand in plain PyTorch, in the same run.

Two models (a transformer, a convolutional net), AdamW and SGD with momentum, 20 updates of 24 rows in two micro-batches,
the global gradient clipped. Prints the largest relative difference of a loss and of a weight; above `TOLERANCE` it fails.

    python -m campaigns.parity                 # all of it; --out FILE writes the table in Markdown
    python -m campaigns.parity --strategies ddp fsdp --ranks 2
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fabricate import Callback, Trainer, TrainModule
from fabricate.testing import close_pools, run_ranks

ROWS, UPDATES, ACCUMULATION, MAX_GRAD_NORM, TOLERANCE = 24, 20, 2, 0.5, 1e-5
STRATEGIES = {"single": (1,), **dict.fromkeys(("ddp", "fsdp", "zero1", "zero2", "zero3"), (1, 2, 3))}
"""The numbers of ranks of each strategy."""

PAGE = f"""# Parity: every strategy trains like a loop written by hand

`python -m campaigns.parity --out docs/parity.md` wrote this page. It trains a small transformer and a convolutional net
on CPU ranks over gloo, in float32: {UPDATES} updates of {ROWS} rows, with {ACCUMULATION} accumulation steps, and
the norm of the whole gradient clipped to {MAX_GRAD_NORM}.

The reference is a single-process loop in plain PyTorch, which processes each batch of {ROWS} rows at once. "Losses differ
by" is the largest relative difference over all updates. "Weights differ by" is the largest difference at the end,
relative to the largest value of the tensor.
"""


class Transformer(TrainModule):
    """Two blocks over 8 tokens from a vocabulary of 12; the loss is the mean over all tokens. There are no biases: the gradient of a key's
    bias is zero, and AdamW would make steps from its rounding noise."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.embedding = torch.nn.Embedding(12, 16)
        self.blocks = torch.nn.ModuleList(
            [torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, bias=False) for _ in range(2)]
        )
        self.head = torch.nn.Linear(16, 12)

    def training_step(self, batch: Any) -> torch.Tensor:
        tokens, targets = batch
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            # eps above the rounding noise of a gradient, which AdamW would turn into steps of the size of lr.
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-6)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Convolutional(Transformer):
    """Two convolutions with group normalisation (batch statistics are each rank's own) on 8 x 8 images of 12 classes."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        del self.embedding
        self.blocks = torch.nn.ModuleList(
            [
                torch.nn.Sequential(torch.nn.Conv2d(n, 8, 3, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.GELU())
                for n in (1, 8)
            ]
        )
        self.head = torch.nn.Linear(8, 12)

    def training_step(self, batch: Any) -> torch.Tensor:
        images, targets = batch
        for block in self.blocks:
            images = block(images)
        return cross_entropy(self.head(images.mean((2, 3))), targets)


MODELS: dict[str, type[Transformer]] = {"transformer": Transformer, "convolutional": Convolutional}


def rows(model: str) -> TensorDataset:
    """The `ROWS * UPDATES` rows, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    number = ROWS * UPDATES
    if model == "transformer":
        tokens = torch.randint(0, 12, (number, 8), generator=generator)
        return TensorDataset(tokens, (tokens + tokens.roll(1, 1)) % 12)
    images = torch.randn(number, 1, 8, 8, generator=generator)
    return TensorDataset(images, (images.flatten(1).sum(1) % 12).long())


def build(model: str, optimizer: str) -> Transformer:
    """A new module, with the same initial weights in every call."""
    torch.manual_seed(1)
    return MODELS[model](optimizer)


@dataclass(frozen=True)
class Outcome:
    """losses: of each update, over all its rows. weights: at the end, by name."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


def by_hand(model: str, optimizer: str) -> Outcome:
    """Train in one process with plain PyTorch on whole batches: the reference for every strategy."""
    module, data = build(model, optimizer), rows(model)
    chosen = module.configure_optimizers()
    losses = []
    for begin in range(0, len(data), ROWS):
        loss = module.training_step(data[begin : begin + ROWS])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_GRAD_NORM)
        chosen.step()
        chosen.zero_grad()
        losses.append(loss.item())
    return Outcome(losses, {name: value.clone() for name, value in module.state_dict().items()})


class Losses(Callback):
    """Records every update's loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step(self, loss: torch.Tensor) -> None:
        self.values.append(float(loss))


def by_trainer(folder: str, strategy: str, world_size: int, cases: list[tuple[str, str]]) -> list[list[float]]:
    """The losses of the cases under `strategy`. All `world_size` ranks. Weights are exported to `folder`."""
    recorders = [Losses() for _ in cases]
    for (model, optimizer), losses in zip(cases, recorders, strict=True):
        trainer = Trainer(
            strategy=strategy,
            max_epochs=1,
            gradient_accumulation_steps=ACCUMULATION,
            max_grad_norm=MAX_GRAD_NORM,
            run_dir=Path(folder) / f"{model}-{optimizer}",
            save_every=None,
            progress=False,
            plugins=[losses],
        )
        trainer.fit(build(model, optimizer), rows(model), batch_size=ROWS // ACCUMULATION // world_size, shuffle=False)
    return [losses.values for losses in recorders]


def difference(one: Iterable[float], other: Iterable[float]) -> float:
    """The largest relative difference of two lists of numbers."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def compare(strategies: Iterable[str], ranks: Iterable[int]) -> Iterator[tuple[str, int, str, str, float, float]]:
    """The lines (strategy, ranks, model, optimizer, largest relative difference of a loss, largest difference of a weight relative to the
    largest weight)."""
    cases = [(model, optimizer) for model in MODELS for optimizer in ("adamw", "sgd")]
    expected = [by_hand(*case) for case in cases]
    for strategy in strategies:
        for world_size in sorted(set(STRATEGIES[strategy]) & set(ranks)):
            with tempfile.TemporaryDirectory() as folder:
                by_case = run_ranks(by_trainer, world_size, folder, strategy, world_size, cases, timeout=600)[0]
                for case, losses, hand in zip(cases, by_case, expected, strict=True):
                    weights = load_file(Path(folder) / "-".join(case) / "model" / "model.safetensors")
                    assert weights.keys() == hand.weights.keys()
                    apart = max(float((weights[n] - w).abs().max() / w.abs().max()) for n, w in hand.weights.items())
                    yield strategy, world_size, *case, difference(losses, hand.losses), apart


def main() -> int:
    """Print the table; return 1 if a difference is above `TOLERANCE`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table = [
        "| strategy | ranks | model | optimizer | losses differ by | weights differ by |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(table), flush=True)
    worst = 0.0
    for strategy, world_size, model, optimizer, losses, weights in compare(options.strategies, options.ranks):
        table.append(f"| {strategy} | {world_size} | {model} | {optimizer} | {losses:.1e} | {weights:.1e} |")
        print(table[-1], flush=True)
        worst = max(worst, losses, weights)
    close_pools()
    verdict = f"Largest difference {worst:.1e}, allowed {TOLERANCE:.0e}."
    print(verdict)
    if options.out is not None:
        options.out.write_text("\n".join([PAGE, *table, "", verdict, ""]))
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
