"""Texts, tokenizer and loss picture of the language model demo. Nothing in here is about fabricate.

read_texts returns texts, load_tokenizer a tokenizer, to_blocks the rows that a model is trained on.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import datasets
import numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

BLOCK = 128  # tokens in a row
TEXT_LIMIT = 3_000_000  # characters of the standard library


def read_texts(name: str) -> dict[str, list[str]]:
    """Texts for "train" and "validation": the standard library's modules, wikitext's lines, or a file's."""
    if name == "wikitext":
        splits = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1")
        return {split: [text for text in splits[split]["text"] if text.strip()] for split in ("train", "validation")}
    if name == "stdlib":
        texts, room = [], TEXT_LIMIT
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            texts.append(path.read_text(encoding="utf-8", errors="replace")[:room])
            room -= len(texts[-1])
        texts = [text for text in texts if text]
    else:
        lines = Path(name).read_text(encoding="utf-8").splitlines(keepends=True)
        size = len(lines) // 100 + 1
        texts = ["".join(lines[at : at + size]) for at in range(0, len(lines), size)]
    return {"train": [text for n, text in enumerate(texts) if n % 20], "validation": texts[::20]}


def load_tokenizer(model: str, texts: list[str]) -> PreTrainedTokenizerBase:
    """The model's tokenizer; for "tiny" a byte-level BPE of 1024 tokens, made from `texts`, which are the same on every rank."""
    if model != "tiny":
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # gpt2 has no padding token
        return tokenizer
    bpe, end = Tokenizer(models.BPE()), "<|endoftext|>"
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 1024, "special_tokens": [end], "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(**options))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end, pad_token=end)


def to_blocks(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> datasets.Dataset:
    """Rows of BLOCK tokens. Every text's last row is padded; the label of padding is -100, so that the model does not learn it."""

    def cut(rows: dict[str, list[str]]) -> dict[str, Any]:
        options = {"truncation": True, "max_length": BLOCK, "padding": "max_length", "return_overflowing_tokens": True}
        tokens = tokenizer(rows["text"], return_tensors="np", **options)
        mask = tokens["attention_mask"].sum(1) > 1  # a row of one token predicts nothing
        ids, real = tokens["input_ids"][mask], tokens["attention_mask"][mask]
        return {"input_ids": ids, "attention_mask": real, "labels": numpy.where(real == 1, ids, -100)}

    rows = datasets.Dataset.from_dict({"text": texts})
    return rows.map(cut, batched=True, remove_columns=["text"]).with_format("torch")


def draw_losses(run_dir: Path) -> Path:
    """Draw RUN_DIR/loss.png: training and validation loss over steps, from RUN_DIR/metrics.jsonl."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for stage, name, style in (("train", "loss", "-"), ("validate", "val_loss", "o-")):
        points = [(line["step"], line["metrics"][name]) for line in lines if line["stage"] == stage]
        axes.plot(*zip(*points, strict=True), style, label={"train": "training", "validate": "validation"}[stage])
    axes.set(xlabel="step (optimizer updates)", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(run_dir / "loss.png", dpi=120)
    return run_dir / "loss.png"
