"""Tokens and labels of conversations and of prompts with completions, by the tokenizer's own chat template.

Tokens that are not learnt have the label -100. Must not know: batches, packing, models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fabricate import ConfigurationError
from fabricate_text.packing import IGNORED, column_names

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The mark before the assistant's words in a chat template, as transformers recognises it."""


def tokenize_chats(dataset: Any, tokenizer: Any, *, column: str = "messages", learn: str = "assistant") -> Any:
    """`dataset` with each conversation as "input_ids" and "labels", lists of whole numbers of one length per row.

    dataset: a `datasets.Dataset` or `IterableDataset`; `column` holds lists of {"role": ..., "content": ...}. tokenizer: a tokenizer of
    transformers with a chat template. learn: "assistant", the tokens that the template encloses in {% generation %}, or "all".

    Other columns are dropped. Raises `ConfigurationError` for a template without these marks, and for a conversation without a token to
    learn.
    """
    if learn not in ("assistant", "all"):
        raise ConfigurationError(f"tokenize_chats: learn={learn!r}: give 'assistant' or 'all'")
    template = _template(tokenizer, "tokenize_chats")
    if learn == "assistant" and not _MARK.search(template):
        raise ConfigurationError(
            f"tokenize_chats: the chat template of {_name(tokenizer)} has no {{% generation %}} ... {{% endgeneration %}} around the "
            "assistant's messages, so it is not known which tokens are theirs. Set tokenizer.chat_template to a copy with these "
            "marks, or pass learn='all'. To learn only the last message, use tokenize_completions, which makes its mask from the "
            "length of the prompt"
        )
    return _mapped(dataset, _chat, column, {"tokenizer": tokenizer, "column": column, "learn": learn})


def tokenize_completions(
    dataset: Any, tokenizer: Any, *, prompt: str = "prompt", completion: str = "completion", learn: str = "completion"
) -> Any:
    """`dataset` with each prompt and completion as "input_ids" and "labels", as `tokenize_completion` gives them. prompt, completion:
    their columns; learn: "completion" or "all". Other columns are dropped."""
    if learn not in ("completion", "all"):
        raise ConfigurationError(f"tokenize_completions: learn={learn!r}: give 'completion' or 'all'")
    options = {"tokenizer": tokenizer, "prompt": prompt, "completion": completion, "learn": learn}
    return _mapped(dataset, _completion, prompt, options)


def tokenize_completion(tokenizer: Any, prompt: Any, completion: Any) -> dict[str, list[int]]:
    """One prompt with its completion: {"input_ids": [...], "labels": [...]}, with the label -100 at the tokens of the prompt.

    prompt, completion: two texts, to which the tokenizer's end of sequence is added, or two lists of messages, which its chat template
    renders. The mask has the length of the prompt alone, tokenized as for generation; `ConfigurationError` if the tokens of prompt and
    completion together do not begin with these tokens.
    """
    if isinstance(prompt, str) != isinstance(completion, str):
        raise ConfigurationError(
            f"tokenize_completion: prompt is a {type(prompt).__name__} and completion a {type(completion).__name__}; "
            "give two texts or two lists of messages"
        )
    if isinstance(prompt, str):
        end = tokenizer.eos_token or ""
        before = tokenizer(prompt)["input_ids"]
        ids = tokenizer(prompt + completion + ("" if completion.endswith(end) else end))["input_ids"]
    else:
        _template(tokenizer, "tokenize_completion")
        before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids = tokenizer.apply_chat_template([*prompt, *completion], return_dict=True)["input_ids"]
    if ids[: len(before)] != before:
        start = next(place for place, token in enumerate(before) if ids[place : place + 1] != [token])
        raise ConfigurationError(
            f"tokenize_completion: the prompt alone ends in the tokens {tokenizer.decode(before[start:])!r}, but has other tokens "
            "there when the completion follows, so the model would be trained with another prompt than it gets later. End a text "
            "where a token ends (put the space before the completion, not after the prompt), or use a chat template that renders "
            "both alike"
        )
    if len(ids) == len(before):
        raise ConfigurationError(
            f"tokenize_completion: the completion after the prompt {prompt!r} has no tokens; leave such rows out"
        )
    return {"input_ids": ids, "labels": [IGNORED] * len(before) + ids[len(before) :]}


def _chat(row: Mapping[str, Any], tokenizer: Any, column: str, learn: str) -> dict[str, list[int]]:
    if learn == "all":
        ids = tokenizer.apply_chat_template(row[column], return_dict=True)["input_ids"]
        return {"input_ids": ids, "labels": ids}
    marked = tokenizer.apply_chat_template(row[column], return_dict=True, return_assistant_tokens_mask=True)
    labels = [
        token if own else IGNORED for token, own in zip(marked["input_ids"], marked["assistant_masks"], strict=True)
    ]
    if not any(marked["assistant_masks"]):
        raise ConfigurationError(
            f"tokenize_chats: a conversation has no token of the assistant: {str(row[column])[:200]}; leave such rows out"
        )
    return {"input_ids": marked["input_ids"], "labels": labels}


def _completion(
    row: Mapping[str, Any], tokenizer: Any, prompt: str, completion: str, learn: str
) -> dict[str, list[int]]:
    tokens = tokenize_completion(tokenizer, row[prompt], row[completion])
    return tokens if learn == "completion" else tokens | {"labels": tokens["input_ids"]}


def _mapped(dataset: Any, function: Any, needed: str, options: dict[str, Any]) -> Any:
    columns = column_names(dataset)
    if needed not in columns:
        raise ConfigurationError(
            f"the data has the columns {columns} and no {needed!r}; pass the name of the column that holds it"
        )
    return dataset.with_format(None).map(function, remove_columns=columns, fn_kwargs=options)


def _template(tokenizer: Any, function: str) -> str:
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ConfigurationError(
            f"{function}: {_name(tokenizer)} has no chat template of its own; set tokenizer.chat_template, or give texts as prompt and "
            "completion to tokenize_completions"
        )
    return template


def _name(tokenizer: Any) -> str:
    return f"the tokenizer {tokenizer.name_or_path!r}" if tokenizer.name_or_path else "the tokenizer"
