"""Precision: the same training in every precision, the distance of each loss from float32's, and the observed dtypes.

A small transformer on sequences that it can learn, always with optimi's AdamW (in bfloat16 it compensates rounding). A loss that differs
from float32's by more than its bound fails. fp8 is emulated if the device does not have it.

    python -m campaigns.precision              # --out FILE writes the table in Markdown, --updates N shortens it
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optimi
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fabricate import Trainer, TrainModule

ROWS, TOKENS, KINDS, UPDATES = 512, 16, 32, 200
BOUNDS = {"fp32": 0.0, "tf32": 0.005, "bf16": 0.01, "fp16": 0.005, "bf16-true": 0.02, "fp8": 0.02}
"""The largest relative difference of the mean loss over the last tenth of the updates from float32's."""
GPU = torch.cuda.is_available()
PRECISIONS = {name: name for name in BOUNDS if GPU or name != "tf32"}
if not GPU or torch.cuda.get_device_capability() < (8, 9):
    PRECISIONS["fp8"] = "fp8:emulate=true"

PAGE = """# Precision: the same training in every precision

`python -m campaigns.precision --out docs/precision.md` wrote this page, on {device}. A small transformer was trained for {updates}
updates of 32 rows with AdamW of `torch-optimi`, once in each precision. The column "loss" is the mean over the last {last} updates; the
first loss was {first:.3f}. "From fp32" is the relative difference of this mean from that of fp32; if it exceeds the bound, the command
fails. The dtypes are those observed in the first update, which every fit writes to `events.jsonl`.
"""


class Next(TrainModule):
    """A model that predicts the next of `KINDS` tokens; its sizes are multiples of 16, as float8 needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(KINDS, 64)
        self.blocks = torch.nn.ModuleList(
            [torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.head = torch.nn.Linear(64, KINDS)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(TOKENS - 1))

    def training_step(self, batch: Any) -> torch.Tensor:
        hidden = self.embedding(batch[0][:, :-1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return cross_entropy(self.head(hidden).flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return optimi.AdamW(self.parameters(), lr=3e-3, weight_decay=0.01), "cosine:warmup=0.1"


def sequences() -> TensorDataset:
    """Sequences in which each token is a function of the previous one, except one in eight, which is random."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(0, KINDS, (ROWS, TOKENS), generator=generator)
    keep = torch.rand(ROWS, TOKENS, generator=generator) < 0.125
    for at in range(1, TOKENS):
        rows[:, at] = torch.where(keep[:, at], rows[:, at], (3 * rows[:, at - 1] + 1) % KINDS)
    return TensorDataset(rows)


@dataclass(frozen=True)
class Line:
    """One training. `difference` is relative to float32's `loss`; `observed` as in events.jsonl."""

    precision: str
    first: float
    loss: float
    difference: float
    bound: float
    observed: dict[str, Any]

    def cells(self) -> list[str]:
        """The cells of a line of the table."""
        layers = ", ".join(f"{dtype} ({', '.join(kinds)})" for dtype, kinds in self.observed["activations"].items())
        dtypes = [", ".join(self.observed[topic]) for topic in ("parameters", "gradients", "optimizer_state")]
        return [self.precision, f"{self.loss:.4f}", f"{self.difference:.2%}", f"{self.bound:.1%}", layers, *dtypes]


COLUMNS = ["precision", "loss", "from fp32", "bound", "activations", "parameters", "gradients", "optimizer state"]


def train(precision: str, updates: int) -> tuple[list[float], dict[str, Any]]:
    """The losses of all updates, and the dtypes observed in the first."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            precision=precision,
            max_steps=updates,
            seed=3,
            log_every=1,
            run_dir=directory,
            save_every=None,
            progress=False,
        )
        trainer.fit(Next(), sequences(), batch_size=32)
        lines = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in Path(directory, "events.jsonl").read_text().splitlines()]
    losses = [line["metrics"]["loss"] for line in lines if line["stage"] == "train"]
    return losses, next(event for event in events if event["event"] == "observed")


def table(names: Iterable[str], updates: int) -> list[Line]:
    """One line per precision; float32 is always trained, as the reference."""
    last = max(1, updates // 10)
    runs = {name: train(PRECISIONS[name], updates) for name in dict.fromkeys(("fp32", *names))}
    wanted = sum(runs["fp32"][0][-last:]) / last
    means = {name: sum(losses[-last:]) / last for name, (losses, _) in runs.items()}
    return [
        Line(PRECISIONS[name], losses[0], means[name], abs(means[name] / wanted - 1), BOUNDS[name], observed)
        for name, (losses, observed) in runs.items()
    ]


def main() -> int:
    """Print the table; return 1 if a loss differs by more than its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--updates", type=int, default=UPDATES)
    options = parser.parse_args()
    lines = table(PRECISIONS, options.updates)
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(line.cells() for line in lines)]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    print(text)
    if options.out is not None:
        device = torch.cuda.get_device_name() if GPU else "a CPU"
        head = PAGE.format(
            device=device, updates=options.updates, last=max(1, options.updates // 10), first=lines[0].first
        )
        options.out.write_text(f"{head}\n{text}\n", encoding="utf-8")
    wrong = [line.precision for line in lines if not line.difference <= line.bound]
    if wrong:
        print(f"outside of their bounds: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
