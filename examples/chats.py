"""The chat model, tokenizer and conversations of sft.py and dpo.py: from the hub or a folder, or tiny ones that are made here without the
network. Nothing in here is about fabricate."""

from __future__ import annotations

from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = """{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}{% generation %}\
{{ message['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
PEOPLE, COLOURS = ("anna", "bob", "carla", "dan", "eva", "finn"), ("red", "blue", "green", "black")
THINGS = ("cat", "dog", "hat", "bike", "boat")


def load_model(name: str) -> Any:
    """A causal language model; "tiny" has random weights, the same each time."""
    if name != "tiny":
        return AutoModelForCausalLM.from_pretrained(name)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=len(load_tokenizer("tiny")), max_position_embeddings=256, pad_token_id=0)
    # the same weights wherever it is called, as from a file
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def load_tokenizer(name: str) -> Any:
    """The model's tokenizer; for "tiny" one with a token for each byte, and a chat template."""
    if name != "tiny":
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(names)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    options = {"eos_token": special[0], "pad_token": special[0], "additional_special_tokens": special[1:]}
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, chat_template=TEMPLATE, **options)


def conversations(name: str) -> datasets.Dataset:
    """Rows with "messages": a data set of the hub or a JSON file, or "made": one or two questions each about who has what."""
    if name != "made":
        return _load(name)
    rows = []
    for number in range(480):
        person, thing, colour = PEOPLE[number % 6], THINGS[number // 6 % 5], COLOURS[(number * 7 + number // 30) % 4]
        question = _message("user", f"{person} has a {colour} {thing}. what has {person}?")
        messages = [question, _message("assistant", f"a {colour} {thing}")]
        if number % 3 == 0:
            messages += [_message("user", "which colour?"), _message("assistant", colour)]
        rows.append({"messages": messages})
    return datasets.Dataset.from_list(rows)


def preferences(name: str) -> datasets.Dataset:
    """Rows with "prompt", "chosen" and "rejected", lists of messages: of the hub or a JSON file, or "made", where short answers are
    preferred. In rows without a prompt, "chosen" and "rejected" are whole conversations, which differ in the last message."""
    if name != "made":
        dataset = _load(name)
        return dataset if "prompt" in dataset.column_names else dataset.map(_without_prompt)
    rows = []
    for row in conversations("made"):
        (question, answer), person = row["messages"][:2], row["messages"][0]["content"].split()[0]
        wordy = _message("assistant", f"well, as you say, {person} has {answer['content']}")
        rows.append({"prompt": [question], "chosen": [answer], "rejected": [wordy]})
    return datasets.Dataset.from_list(rows)


def _without_prompt(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["chosen"][:-1], "chosen": row["chosen"][-1:], "rejected": row["rejected"][-1:]}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _load(name: str) -> datasets.Dataset:
    if name.endswith((".json", ".jsonl")):
        return datasets.load_dataset("json", data_files=name, split="train")
    return datasets.load_dataset(name, split="train")
