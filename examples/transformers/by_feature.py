"""Accelerate's examples/by_feature, with fabricate: each feature is an argument, a callback, or a few lines around `fit`.

python examples/transformers/by_feature.py gradient_accumulation
fabricate run examples/transformers/by_feature.py --nproc 2 -- multi_process_metrics --model google-bert/bert-base-cased --glue nyu-mll/glue

Each example fine-tunes BERT on MRPC; without names of the hub, a tiny model and data set are built here.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import datasets
import numpy
import torch
from accelerate.utils import find_executable_batch_size
from sklearn.model_selection import StratifiedKFold
from tiny import tiny_model, write_rows
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fabricate import Callback, Profiler, Trainer, TrainModule

CLASSIFIER, LANGUAGE_MODEL = "BertForSequenceClassification", "LlamaForCausalLM"


class Paraphrases(TrainModule):
    def __init__(self, name: str, tokenizer: Any, warmup: int = 100) -> None:
        super().__init__()
        self.name, self.tokenizer, self.warmup = name, tokenizer, warmup

    def configure_model(self) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(self.name)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-5), f"linear:warmup={self.warmup}"

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(**batch).loss

    def validation_step(self, batch: Any) -> dict[str, Any]:  # every row counts once, on any number of ranks
        return {"outputs": (self.model(**batch).logits.argmax(-1), batch["labels"])}

    def predict_step(self, batch: Any) -> torch.Tensor:
        return self.model(**batch).logits

    def compute_metrics(self, outputs: list[Any]) -> dict[str, float]:
        return scores(*map(torch.stack, zip(*outputs, strict=True)))


def scores(predicted: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """GLUE's scores for MRPC."""
    hits = ((predicted == 1) & (labels == 1)).sum()
    f1 = 2 * hits / ((predicted == 1).sum() + (labels == 1).sum()).clamp(min=1)
    return {"accuracy": (predicted == labels).double().mean().item(), "f1": f1.double().item()}


class Writer(TrainModule):
    """A language model whose micro-batches have unequal numbers of labels."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_model(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.name)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-5)

    def training_step(self, batch: Any) -> dict[str, Any]:
        # Accelerate's example counts labels in this way; `return self.model(**batch).loss` is enough.
        labels = (batch["labels"] != -100).sum()
        return {"loss": self.model(**batch, use_cache=False, num_items_in_batch=labels).loss, "weight": labels}


class StopWhenFlat(Callback):
    """Stops when the loss of an update has not fallen below the lowest one for `patience` updates."""

    def __init__(self, patience: int = 5) -> None:
        self.patience, self.waited, self.lowest = patience, 0, float("inf")

    def on_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        self.waited = 0 if loss <= self.lowest else self.waited + 1
        self.lowest = min(self.lowest, float(loss))
        if self.waited >= self.patience:
            trainer.stop("the loss stays where it is")


class Feature:
    """One method for each of Accelerate's examples, with its name. `options.run`: the folder of the runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.run, self.shuffle = options.run, options.shuffle
        self.warmup, self.wikitext = options.warmup, options.wikitext
        self.name = options.model or tiny_model(self.run / CLASSIFIER, CLASSIFIER)
        self.writer = options.writer or tiny_model(self.run / LANGUAGE_MODEL, LANGUAGE_MODEL)
        self.tokenizer = AutoTokenizer.from_pretrained(self.name)
        files = {split: str(self.run / f"{split}.json") for split in ("train", "validation")}
        if options.glue is None:
            files = {split: write_rows(Path(file), "pairs", split) for split, file in files.items()}
            raw = datasets.load_dataset("json", data_files=files)
        else:
            raw = datasets.load_dataset(options.glue, "mrpc")
        self.rows = raw.map(self.tokens, batched=True, remove_columns=raw["train"].column_names)

    def tokens(self, rows: dict[str, list[Any]]) -> Any:
        return {**self.tokenizer(rows["sentence1"], rows["sentence2"], truncation=True), "labels": rows["label"]}

    def loader(self, rows: Any, size: int, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            rows, size, shuffle=shuffle, collate_fn=lambda rows: self.tokenizer.pad(rows, return_tensors="pt")
        )

    def fit(self, rows: int = 16, **arguments: Any) -> dict[str, float]:
        """Train for three epochs; return the metrics of the last validation."""
        module = Paraphrases(self.name, self.tokenizer, self.warmup)
        train, val = self.loader(self.rows["train"], rows, self.shuffle), self.loader(self.rows["validation"], 32)
        return Trainer(max_epochs=3, seed=42, **arguments).fit(module, train, val).metrics

    def gradient_accumulation(self) -> dict[str, float]:
        return self.fit(gradient_accumulation_steps=2)

    def automatic_gradient_accumulation(self) -> dict[str, float]:
        train = find_executable_batch_size(self._in_parts, starting_batch_size=256)
        return train()

    def _in_parts(self, batch_size: int) -> dict[str, float]:  # half as many rows after each out-of-memory error
        return self.fit(batch_size, global_batch_size=256)

    def memory(self) -> dict[str, float]:
        return find_executable_batch_size(self.fit, starting_batch_size=16)()

    def checkpointing(self) -> dict[str, float]:  # the same call resumes
        return self.fit(run_dir=self.run / "checkpointing", save_every="1 epoch")

    def early_stopping(self) -> dict[str, float]:
        return self.fit(plugins=[StopWhenFlat()])

    def multi_process_metrics(self) -> dict[str, float]:
        return self.fit()

    def tracking(self) -> dict[str, float]:
        return self.fit(run_dir=self.run / "tracking", trackers=["tensorboard"], log_every="1 epoch")

    def profiler(self) -> dict[str, float]:
        return self.fit(run_dir=self.run / "profiler", plugins=[Profiler()])

    def cross_validation(self) -> dict[str, float]:
        """Train three models, each validated on a third of the training set; return the metrics of their mean on the validation set."""
        rows, test, logits = self.rows["train"], self.rows["validation"], []
        for train, val in StratifiedKFold(3).split(numpy.zeros(len(rows)), rows["labels"]):
            module, trainer = Paraphrases(self.name, self.tokenizer), Trainer(max_epochs=3, seed=42)
            trainer.fit(module, self.loader(rows.select(train), 16, self.shuffle), self.loader(rows.select(val), 32))
            logits.append(torch.stack(trainer.predict(module, self.loader(test, 32)) or []))
        return scores(sum(logits).argmax(-1), torch.tensor(test["labels"]))

    def gradient_accumulation_for_autoregressive_models(self) -> dict[str, float]:
        if self.wikitext is not None:
            rows = datasets.load_dataset(self.wikitext, "wikitext-2-v1", split="train[:500]")
        else:
            file = write_rows(self.run / "text.json", "text", "train")
            rows = datasets.load_dataset("json", data_files=file, split="train")
        tokenizer = AutoTokenizer.from_pretrained(self.writer)

        def tokens_of(rows: dict[str, list[Any]]) -> Any:
            return tokenizer(rows["text"], return_attention_mask=False)

        rows = rows.filter(lambda row: row["text"])
        tokens = rows.map(tokens_of, batched=True, remove_columns=["text"])
        batches = DataLoader(tokens, 2, collate_fn=lambda rows: to_batch(tokenizer, rows))
        trainer = Trainer(max_epochs=3, seed=42, gradient_accumulation_steps=4, max_grad_norm=1.0)
        return trainer.fit(Writer(self.writer), batches).metrics


def to_batch(tokenizer: Any, rows: list[Any]) -> dict[str, torch.Tensor]:
    """A batch as in Accelerate's example: labels are already shifted, and the end of a text is not a label."""
    tokenizer.pad_token = tokenizer.eos_token
    longest = max(len(row["input_ids"]) for row in rows)
    batch = tokenizer.pad(rows, padding="max_length", max_length=longest + 1, return_tensors="pt")
    labels = batch["input_ids"][:, 1:]
    labels = torch.where(labels == tokenizer.pad_token_id, -100, labels)
    return {
        "input_ids": batch["input_ids"][:, :-1],
        "attention_mask": batch["attention_mask"][:, :-1],
        "labels": labels,
    }


NAMES = [
    name
    for name, value in vars(Feature).items()
    if callable(value) and name not in ("tokens", "loader", "fit") and name[0] != "_"
]


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("feature", choices=NAMES)
    parser.add_argument("--model", help="a classifier of the hub")
    parser.add_argument("--writer", help="a language model of the hub")
    parser.add_argument("--glue", help="nyu-mll/glue, or another data set with the configuration mrpc")
    parser.add_argument(
        "--wikitext", help="Salesforce/wikitext, or another data set with the configuration wikitext-2-v1"
    )
    parser.add_argument("--warmup", type=int, default=100, help="updates")
    parser.add_argument("--run", type=Path, default=Path("runs/by_feature"))
    parser.add_argument("--no-shuffle", dest="shuffle", action="store_false")
    options = parser.parse_args(argv)
    metrics: dict[str, float] = getattr(Feature(options), options.feature)()
    return metrics


if __name__ == "__main__":
    print(main())
