"""Models and data for the scripts of this folder: from the hub, from files, or tiny ones built here without the network.

`open_source` returns both. The tiny models have random weights and no dropout; the tiny data is made of sentences such as "anna has a red
cat .", the same ones each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers.utils import logging

NAMES, COLOURS, THINGS = (
    ["anna", "bob", "carla", "dan", "eva", "finn"],
    ["red", "blue", "green", "black"],
    ["cat", "dog", "hat", "bike"],
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, *NAMES, *COLOURS, *THINGS, "has", "a", "the", "of", "is", "not", "what", "colour", "owns", "?", "."]
_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SIZES = {
    "llama": {**_LAYERS, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "bert": {**_LAYERS, "max_position_embeddings": 64, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    "t5": {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0,
        "decoder_start_token_id": 0,
    },
}


@dataclass
class Source:
    """Arguments of all scripts, with the names that transformers uses."""

    model_name_or_path: str = field(default="tiny", metadata={"help": "a hub name, a folder, or tiny: built here"})
    dataset_name: str | None = field(default=None, metadata={"help": "on the hub; without it and a file: built here"})
    dataset_config_name: str | None = None
    train_file: str | None = None
    validation_file: str | None = None


def open_source(
    source: Source, args: transformers.TrainingArguments, kind: str, task: str
) -> tuple[str, datasets.DatasetDict]:
    """The model to load, and the data sets "train" and "validation". kind, task: of tiny models and data, see `tiny_model` and
    `tiny_rows`."""
    model, folder = source.model_name_or_path, Path(args.output_dir).with_name("tiny")
    datasets.disable_progress_bars()
    logging.disable_progress_bar()
    with args.main_process_first():  # the other processes find its files
        if model == "tiny":
            model = tiny_model(folder / kind, kind)
        if source.dataset_name is not None:
            return model, datasets.load_dataset(source.dataset_name, source.dataset_config_name)
        files = {"train": source.train_file, "validation": source.validation_file}
        if source.train_file is None:
            files = {split: write_rows(folder / f"{task}-{split}.json", task, split) for split in files}
        inside = {"field": "data"} if task == "questions" else {}  # the layout of SQuAD
        return model, datasets.load_dataset(str(files["train"]).rpartition(".")[2], data_files=files, **inside)


def tiny_model(folder: Path, kind: str) -> str:
    """Write a Llama, a GPT-2, a BERT or a T5 (`kind`: its class) with its tokenizer into `folder`, unless it is there; return the
    folder."""
    if (folder / "config.json").exists():
        return str(folder)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not kind.startswith(("GPT2", "Llama")):
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        words.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    options = {**special, "bos_token": "[CLS]", "eos_token": "[SEP]", "model_max_length": 64}
    own = folder.with_name(f"{folder.name}-{os.getpid()}")  # several processes may write at once
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **options).save_pretrained(own)
    torch.manual_seed(0)
    model = getattr(transformers, kind)
    tokens = {"vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    model(model.config_class(**tokens, **SIZES[model.config_class.model_type])).save_pretrained(own)
    with contextlib.suppress(OSError):
        own.rename(folder)
    shutil.rmtree(own, ignore_errors=True)
    return str(folder)


def tiny_rows(task: str, split: str, number: int | None = None) -> list[dict[str, Any]]:
    """`number` rows (default: 100 for "train", else 36) of the `task` "text", "pairs" (with a label), "questions" (as in SQuAD) or
    "summaries"."""
    draw = random.Random(f"{task} {split}")
    rows = []
    for place in range(number or (100 if split == "train" else 36)):
        facts = [(n, draw.choice(COLOURS), draw.choice(THINGS)) for n in draw.sample(NAMES, draw.randint(2, 4))]
        text = " ".join(f"{name} has a {colour} {thing} ." for name, colour, thing in facts)
        name, colour, thing = draw.choice(facts)
        if task == "pairs":
            label = draw.randint(0, 1)
            second = f"the {thing} of {name} is {'' if label else 'not '}{colour} ."
            rows.append({"sentence1": f"{name} has a {colour} {thing} .", "sentence2": second, "label": label})
        elif task == "questions":
            answer = {"text": [colour], "answer_start": [text.index(f"{name} has a ") + len(f"{name} has a ")]}
            question = f"what colour is the {thing} of {name} ?"
            rows.append({"id": f"{split}-{place}", "question": question, "context": text, "answers": answer})
        elif task == "summaries":
            rows.append({"text": text, "summary": " ".join(f"{name} owns a {thing} ." for name, _, thing in facts[:2])})
        else:
            rows.append({"text": text})
    return rows


def write_rows(path: Path, task: str, split: str, number: int | None = None) -> str:
    """Write `tiny_rows` to a JSON file; return its name."""
    rows = tiny_rows(task, split, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"data": rows}) if task == "questions" else "".join(json.dumps(row) + "\n" for row in rows)
    own = path.with_name(f"{path.name}-{os.getpid()}")
    own.write_text(text, encoding="utf-8")
    own.replace(path)
    return str(path)
