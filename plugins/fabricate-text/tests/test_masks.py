"""The tokens that are learnt in conversations and in prompts with completions, with a tokenizer that is made here."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from fabricate_text import pack, tokenize_chats, tokenize_completion, tokenize_completions
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fabricate import ConfigurationError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
UNMARKED = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]


def tokenizer(template: str | None = TEMPLATE, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """Every byte is a token, and so are two that are in `merges`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<end>", *alphabet, *map("".join, merges)]
    bpe = Tokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", pad_token="<end>")
    fast.chat_template = template
    return fast


def learnt(row: dict[str, list[int]], own: Any) -> str:
    assert len(row["input_ids"]) == len(row["labels"])
    assert all(label in (-100, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    return str(own.decode([label for label in row["labels"] if label != -100]))


def test_of_a_conversation_what_the_template_marks_is_learnt() -> None:
    rows = datasets.Dataset.from_dict({"messages": [CHAT, CHAT[:2]], "source": ["a", "b"]})
    own = tokenizer()
    tokens = tokenize_chats(rows, own)
    assert tokens.column_names == ["input_ids", "labels"]
    assert (
        own.decode(tokens[0]["input_ids"]) == "<user>hi<end><assistant>yes?<end><user>bye<end><assistant>so long<end>"
    )
    assert [learnt(row, own) for row in tokens] == ["yes?<end>so long<end>", "yes?<end>"]
    assert list(tokenize_chats(rows.to_iterable_dataset(), own)) == list(tokens)
    assert [learnt(row, own) for row in tokenize_chats(rows, own, learn="all")] == [
        own.decode(ids) for ids in tokens["input_ids"]
    ]
    (packed,) = pack(tokens, 200)
    assert learnt(packed, own) == "yes?<end>so long<end>yes?<end>"


def test_a_template_without_marks_is_refused_and_the_prompts_length_does_instead() -> None:
    own = tokenizer(UNMARKED)
    with pytest.raises(ConfigurationError, match=r"has no {% generation %} .*use tokenize_completions"):
        tokenize_chats(datasets.Dataset.from_dict({"messages": [CHAT]}), own)
    rows = datasets.Dataset.from_dict({"prompt": [CHAT[:3], CHAT[:1]], "completion": [CHAT[3:], CHAT[1:2]]})
    tokens = tokenize_completions(rows, own)
    assert own.decode(tokens[0]["input_ids"]) == own.apply_chat_template(CHAT, tokenize=False)
    assert [learnt(row, own) for row in tokens] == ["so long<end>", "yes?<end>"]


def test_of_texts_the_completion_is_learnt_with_one_end() -> None:
    own = tokenizer(None)
    rows = datasets.Dataset.from_dict({"question": ["1 + 1 =", "2 + 2 ="], "answer": [" 2", " 4<end>"]})
    tokens = tokenize_completions(rows, own, prompt="question", completion="answer")
    assert [learnt(row, own) for row in tokens] == [" 2<end>", " 4<end>"]
    assert own.decode(tokens[0]["input_ids"]) == "1 + 1 = 2<end>"
    everything = tokenize_completions(rows, own, prompt="question", completion="answer", learn="all")
    assert learnt(everything[0], own) == "1 + 1 = 2<end>"


def test_a_prompt_that_reads_otherwise_before_its_completion_is_refused() -> None:
    own = tokenizer(merges=(("\u0120", "2"),))  # the byte of a space
    assert learnt(tokenize_completion(own, "1 + 1 =", " 2"), own) == " 2<end>"
    with pytest.raises(
        ConfigurationError, match=r"the prompt alone ends in the tokens ' '.*put the space before the completion"
    ):
        tokenize_completion(own, "1 + 1 = ", "2")
    thinks = tokenizer(UNMARKED.replace("<assistant>{% endif %}", "<assistant><thinks>{% endif %}"))
    with pytest.raises(ConfigurationError, match="the prompt alone ends in the tokens 'thinks>'"):
        tokenize_completion(thinks, CHAT[:1], [{"role": "assistant", "content": "<no>"}])


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        (CHAT[:1], "yes", "give two texts or two lists of messages"),
        (CHAT[:1], [], "the prompt alone ends in the tokens"),
    ],
)
def test_prompts_and_completions_that_do_not_match_are_refused(prompt: Any, completion: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        tokenize_completion(tokenizer(), prompt, completion)


def test_data_without_anything_to_learn_is_refused() -> None:
    own = tokenizer()
    with pytest.raises(ConfigurationError, match="a conversation has no token of the assistant"):
        tokenize_chats(datasets.Dataset.from_dict({"messages": [CHAT[:1]]}), own)
    with pytest.raises(ConfigurationError, match=r"has the columns \['text'\] and no 'messages'"):
        tokenize_chats(datasets.Dataset.from_dict({"text": ["x"]}), own)
    with pytest.raises(ConfigurationError, match="has no chat template"):
        tokenize_chats(datasets.Dataset.from_dict({"messages": [CHAT]}), tokenizer(None))
    with pytest.raises(ConfigurationError, match="give 'assistant' or 'all'"):
        tokenize_chats(datasets.Dataset.from_dict({"messages": [CHAT]}), own, learn="user")
    with pytest.raises(ConfigurationError, match="give 'completion' or 'all'"):
        tokenize_completions(datasets.Dataset.from_dict({"prompt": ["x"], "completion": ["y"]}), own, learn="prompt")
