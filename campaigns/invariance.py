"""Invariance: the same global batches of 12 rows under every split, compared with one loop written by hand in float64.

12 = ranks x micro-batch x accumulation, in every way with 1, 2 and 3 ranks, under every strategy that runs there. Rows have unequal numbers
of labels, some none; the last window of an epoch has 7 rows. Two modules: a tagger (AdamW, clipping, a schedule) and transformers' GPT-2
with its own loss (SGD with momentum), the latter also with raw Accelerate and transformers.Trainer.

    python -m campaigns.invariance             # --out FILE writes the tables in Markdown
    python -m campaigns.invariance --strategies ddp --no-peers
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate

from fabricate import Callback, Trainer, TrainModule
from fabricate.testing import close_pools, run_ranks

GLOBAL_BATCH, ROWS, TOKENS, KINDS, EPOCHS, TOLERANCE = 12, 31, 6, 16, 2, 1e-5
STRATEGIES = {"single": (1,), **dict.fromkeys(("ddp", "fsdp", "zero1", "zero2", "zero3"), (2, 3))}
"""The numbers of ranks of each strategy."""
PEERS = ("Accelerate", "transformers.Trainer")

PAGE = f"""# Invariance: the same update for every split of the global batch

`python -m campaigns.invariance --out docs/invariance.md` wrote this page, on CPU ranks over gloo. A global batch of {GLOBAL_BATCH}
rows is split into ranks x micro-batch x accumulation, in all possible ways with 1, 2 and 3 ranks. The data has {ROWS} rows
and is read for {EPOCHS} epochs, so every third [window](glossary.md) has only {ROWS % GLOBAL_BATCH} rows.
Each row has 0 to {TOKENS} labels, and some micro-batches have none.

Every row of the table below is a run that is compared with the same reference: a loop written by hand in float64, which
computes each global batch at once in one process. "Loss" is the largest relative difference of an update's loss.
"Weights" is the distance between the final weights, relative to the distance between the reference's initial and final
weights. Training is in float32, whose rounding error is about 1e-7. If a figure is above {TOLERANCE:g}, the command
fails.

"Tagger" has two layers and trains with AdamW, clipping of the gradient's norm and a linear schedule. "GPT-2" is
transformers' model with its own loss, and trains with SGD with momentum. Its `training_step` returns only this loss,
without a weight.
"""
BESIDE = f"""
## The same with Accelerate and transformers.Trainer

The table below shows the training of GPT-2 with two other frameworks, used as their documentation shows:
Accelerate {accelerate.__version__} with
`accelerator.accumulate`, `backward`, `step` and a prepared `DataLoader`, and `transformers.Trainer` {transformers.__version__} with
`gradient_accumulation_steps`. The figures are distances between final weights, as above.

Accelerate averages the means of micro-batches and ranks without weighting them by their number of labels. In a shorter
last window, it still divides by the configured number of accumulation steps. On several ranks, Accelerate repeats rows at
the end of the data, so that all ranks have the same number of batches. transformers.Trainer divides by the number of
labels of the whole window. Its result is exact except for the repeated rows.
"""


# ------------------------------------------------------------------------------------------------------ what is trained


class Tagger(TrainModule):
    """A model that predicts a class for each of `TOKENS` tokens; the loss is over those with a label."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(KINDS, 8)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)])
        self.head = torch.nn.Linear(8, KINDS)

    def training_step(self, batch: Any) -> torch.Tensor:
        hidden = self.embedding(batch["input_ids"])
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01), "linear"


class Causal(TrainModule):
    """GPT-2 with random weights. Its loss is over the labels without the first of each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        config = transformers.GPT2Config(
            n_positions=TOKENS, n_embd=16, n_layer=2, n_head=2, vocab_size=KINDS, bos_token_id=0, eos_token_id=0
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        self.model = transformers.GPT2LMHeadModel(config)
        self.model.loss_type = "ForCausalLM"

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


MODULES: dict[str, Callable[[], TrainModule]] = {"tagger": Tagger, "gpt2": Causal}
MAX_GRAD_NORM = {"tagger": 0.1, "gpt2": None}


def rows() -> list[dict[str, torch.Tensor]]:
    """The rows. Rows 4 to 7 have no label, so that a whole micro-batch of 1, 2 or 4 rows has none."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, KINDS, (ROWS, TOKENS), generator=generator)
    lengths = torch.randint(0, TOKENS + 1, (ROWS,), generator=generator)
    lengths[4:8] = 0
    labels = torch.where(torch.arange(TOKENS) < lengths[:, None], tokens, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


Result = tuple[list[float], dict[str, torch.Tensor]]
"""The loss of every update, and the whole weights at the end."""


def by_hand(name: str) -> Result:
    """Train whole global batches in float64, with the module's logits and the rest written by hand."""
    module = copy.deepcopy(MODULES[name]()).double()
    losses: list[float] = []
    starts = [*range(0, ROWS, GLOBAL_BATCH)] * EPOCHS
    if name == "tagger":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step, start in enumerate(starts):
        batch = default_collate(rows()[start : start + GLOBAL_BATCH])
        if name == "tagger":
            optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / len(starts))
            loss = module.training_step(batch)
        else:  # the model's own loss would be rounded to float32
            logits = module.model(input_ids=batch["input_ids"]).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss.backward()
        if (clip := MAX_GRAD_NORM[name]) is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in module.named_parameters()}


# ------------------------------------------------------------------------------------------------------ by fabricate


class Recorder(Callback):
    """Records the losses of `on_step`, and the whole weights at the end, gathered on all ranks."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.weights: dict[str, torch.Tensor] = {}

    def on_step(self, loss: torch.Tensor) -> None:
        self.losses.append(loss)

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.weights = {n: trainer.strategy.gather(p).clone() for n, p in module.named_parameters()}


@dataclass(frozen=True)
class Split:
    """One way to make a global batch."""

    ranks: int
    micro_batch: int
    accumulation: int

    def cells(self) -> list[str]:
        """The cells of a table."""
        return [str(self.ranks), str(self.micro_batch), str(self.accumulation)]


def splits(ranks: int) -> Iterator[Split]:
    """Every way to make `GLOBAL_BATCH` rows on `ranks` ranks."""
    each = GLOBAL_BATCH // ranks
    yield from (Split(ranks, size, each // size) for size in range(1, each + 1) if each % size == 0)


def train(strategy: str, name: str, split: Split, precision: str = "fp32") -> Result:
    """Run one fit. All ranks."""
    recorder = Recorder()
    trainer = Trainer(
        strategy=strategy,
        precision=precision,
        max_epochs=EPOCHS,
        gradient_accumulation_steps=split.accumulation,
        max_grad_norm=MAX_GRAD_NORM[name],
        progress=False,
        plugins=[recorder],
    )
    trainer.fit(MODULES[name](), rows(), batch_size=split.micro_batch, shuffle=False)
    return [float(loss) for loss in recorder.losses], recorder.weights


# ---------------------------------------------------------------------------------------------------------- by others


class Bare(torch.nn.Module):
    """The same GPT-2 without fabricate, with the same parameter names."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Causal().model


def by_accelerate(split: Split) -> dict[str, torch.Tensor]:
    """Train as in Accelerate's documentation; return the weights."""
    accelerator = Accelerator(gradient_accumulation_steps=split.accumulation, cpu=True)
    bare = Bare()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(
        bare.model,
        optimizer,
        DataLoader(rows(), batch_size=split.micro_batch),  # type: ignore[arg-type]
    )
    for _ in range(EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in bare.named_parameters()}


def by_transformers(split: Split) -> dict[str, torch.Tensor]:
    """Train as in transformers' documentation, without its clipping and shuffling; return the weights."""
    bare = Bare()
    with tempfile.TemporaryDirectory() as directory:
        arguments = transformers.TrainingArguments(
            directory,
            use_cpu=True,
            ddp_backend="gloo" if split.ranks > 1 else None,
            per_device_train_batch_size=split.micro_batch,
            gradient_accumulation_steps=split.accumulation,
            num_train_epochs=EPOCHS,
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        transformers.Trainer(
            bare.model,
            arguments,
            train_dataset=rows(),  # type: ignore[arg-type]
            data_collator=default_collate,
            optimizers=(optimizer, constant),
        ).train()
    return {n: p.detach().clone() for n, p in bare.named_parameters()}


def by_peer(peer: str, split: Split) -> dict[str, torch.Tensor]:
    """The weights at the end; Accelerate's shared state is reset."""
    try:
        return (by_accelerate if peer == "Accelerate" else by_transformers)(split)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


# ---------------------------------------------------------------------------------------------------------- the tables


def distance(name: str, weights: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The distance of the weights, relative to the distance between the initial and the `wanted` weights."""
    first = {n: p.detach() for n, p in MODULES[name]().named_parameters()}

    def norm(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
        return float(torch.stack([(left[n].double() - right[n].double()).norm() for n in wanted]).norm())

    return norm(weights, wanted) / norm(first, wanted)


def compare(strategy: str, split: Split, precision: str = "fp32") -> dict[str, tuple[float, float]]:
    """The largest relative difference of a loss and the distance of the weights, by module."""
    distances = {}
    for name in MODULES:
        wanted_losses, wanted = by_hand(name)
        alone = split.ranks == 1
        case = strategy, name, split, precision
        results = [train(*case)] if alone else run_ranks(train, split.ranks, *case)
        losses = [
            abs(loss - want) / abs(want) for got, _ in results for loss, want in zip(got, wanted_losses, strict=True)
        ]
        distances[name] = (max(losses), max(distance(name, weights, wanted) for _, weights in results))
    return distances


def beside(split: Split) -> dict[str, float]:
    """The distance of GPT-2's weights, by peer."""
    wanted = by_hand("gpt2")[1]
    distances = {}
    for peer in PEERS:
        results = [by_peer(peer, split)] if split.ranks == 1 else run_ranks(by_peer, split.ranks, peer, split)
        distances[peer] = max(distance("gpt2", weights, wanted) for weights in results)
    return distances


def markdown(lines: Iterable[list[str]]) -> str:
    """A Markdown table of lines of cells; the first line is the header."""
    heads, *others = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *others]) + "\n"


def main() -> int:
    """Print the tables; return 1 if a figure of fabricate is above the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        [
            "strategy",
            "ranks",
            "micro-batch",
            "accumulation",
            *(f"{n}: {w}" for n in MODULES for w in ("loss", "weights")),
        ]
    ]
    worst = 0.0
    for strategy in options.strategies:
        for split in (split for ranks in STRATEGIES[strategy] for split in splits(ranks)):
            distances = [value for pair in compare(strategy, split).values() for value in pair]
            worst = max(worst, *distances)
            lines.append([f"`{strategy}`", *split.cells(), *(f"{value:.1e}" for value in distances)])
            print(*lines[-1], flush=True)
    text = f"{markdown(lines)}\nThe largest figure in the table is {worst:.1e}.\n"
    if not options.no_peers:
        others = [["ranks", "micro-batch", "accumulation", *PEERS]]
        for split in (split for ranks in (1, 2, 3) for split in splits(ranks)):
            others.append([*split.cells(), *(f"{value:.1e}" for value in beside(split).values())])
            print(*others[-1], flush=True)
        text += f"{BESIDE}\n{markdown(others)}"
    close_pools()
    print(f"\n{text}")
    if options.out is not None:
        options.out.write_text(f"{PAGE}\n{text}", encoding="utf-8")
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
