"""Texts that a language model generates at each validation: from its present weights, without an effect on training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, ConfigurationError, GenerateSamples, Trainer, TrainModule
from fabricate.testing import run_ranks

PROMPTS = ["ab", "hello"]


class Letters:
    """A tokenizer: one token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 32 for letter in text]

    def decode(self, numbers: list[int]) -> str:
        return "".join(chr(96 + number) for number in numbers)


class Language(TrainModule):
    def __init__(self, llama: bool = False) -> None:
        super().__init__()
        self.tokenizer = Letters()
        self.llama = llama

    def configure_model(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        if self.llama:  # has a tp_plan
            shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
            self.gpt = LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape, bos_token_id=0, eos_token_id=31))
            return
        sizes = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        self.gpt = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=31))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Own(TrainModule):
    """A model of the user's own, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = Letters()
        self.next = torch.nn.Embedding(32, 32)

    def generate(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        for _ in range(length):
            tokens = torch.cat([tokens, self.next(tokens[:, -1:]).argmax(-1)], 1)
        return tokens

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.next(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: torch.Tensor) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=50.0)


def rows() -> torch.Tensor:
    return torch.arange(16 * 12).remainder(7).add(1).reshape(16, 12)


def fit(*plugins: object, module: TrainModule | None = None, **arguments: Any) -> TrainModule:
    module = module or Language()
    defaults = {
        "max_steps": 4,
        "seed": 3,
        "validate_every": 2,
        "sanity_batches": 0,
        "progress": False,
        "print_plan": "none",
    }
    Trainer(**{**defaults, "plugins": plugins, **arguments}).fit(module, rows(), rows(), batch_size=2)
    return module


def sampled(strategy: str, run_dir: Path, precision: str = "fp32") -> tuple[list[str], list[bool]]:
    """The texts of the last validation, and of each weight whether it is as in a fit without samples."""
    callback = GenerateSamples(PROMPTS, max_new_tokens=6, do_sample=True, top_k=4)
    llama = "tp" in strategy
    module = fit(callback, module=Language(llama), strategy=strategy, run_dir=run_dir, precision=precision)
    other = fit(module=Language(llama), strategy=strategy, precision=precision)
    same = [torch.equal(local(p), local(q)) for p, q in zip(module.parameters(), other.parameters(), strict=True)]
    return callback.texts, same


def local(parameter: torch.nn.Parameter) -> torch.Tensor:
    to_local = getattr(parameter, "to_local", None)
    return to_local() if to_local is not None else parameter.detach()


def test_the_texts_are_those_of_the_weights_and_training_is_as_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, same = sampled("single", tmp_path)
    assert all(same)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(s, p) for s in (2, 4) for p in PROMPTS]
    assert [line["text"] for line in lines[2:]] == texts
    assert f"sample at step 4: {texts[1]}" in capsys.readouterr().out

    module = fit()  # by hand, from the same weights
    module.eval()
    torch.manual_seed(0)
    options = {"max_new_tokens": 6, "do_sample": True, "top_k": 4, "pad_token_id": 31}
    for prompt, text in zip(PROMPTS, texts, strict=True):
        tokens = torch.tensor([Letters().encode(prompt)])
        assert text == Letters().decode(module.gpt.generate(tokens, **options)[0].tolist())  # type: ignore[union-attr, operator]
        assert text.startswith(prompt)
        assert len(text) > len(prompt)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp:tp=2", "zero2", "zero3"])
def test_ranks_generate_what_their_weights_say(tmp_path: Path, strategy: str) -> None:
    (first, same), (second, same_there) = run_ranks(sampled, 2, strategy, tmp_path)
    together = strategy.startswith("fsdp") or strategy == "zero3"
    assert [text[: len(prompt)] for text, prompt in zip(first, PROMPTS, strict=True)] == PROMPTS
    assert second == (first if together else [])
    assert all(same)
    assert all(same_there)


def test_two_of_them_keep_the_texts_of_each_other(tmp_path: Path) -> None:
    prompts = ["abc", "cba"]
    for steps in (4, 8):
        fit(*[GenerateSamples([p], length=4) for p in prompts], module=Own(), run_dir=tmp_path, max_steps=steps)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    written = sorted((line["step"], line["prompt"]) for line in lines)
    assert written == [(step, prompt) for step in (2, 4, 6, 8) for prompt in prompts]


def test_texts_of_lost_updates_go_if_the_next_fit_validates_at_other_steps(tmp_path: Path) -> None:
    with pytest.raises(InterruptedError):  # after the validation of step 2, before a save
        fit(GenerateSamples(["abc"], length=4), Dies(), module=Own(), run_dir=tmp_path, validate_every=1, save_every=4)
    before = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    fit(GenerateSamples(["abc"], length=4), module=Own(), run_dir=tmp_path, validate_every=4, save_every=4)
    after = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert (before, after) == ([1, 2], [4])


def test_a_fit_that_begins_again_replaces_the_texts_of_the_one_that_was_killed(tmp_path: Path) -> None:
    for _ in range(2):  # the first is not saved
        with pytest.raises(InterruptedError):
            fit(GenerateSamples(["abc"], length=4), Dies(), module=Own(), run_dir=tmp_path)
    fit(GenerateSamples(["abc"], length=4), module=Own(), run_dir=tmp_path)
    assert [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == [2, 4]
    fit(GenerateSamples(["abc"], length=4), module=Own(), run_dir=tmp_path, max_steps=6)
    assert [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == [2, 4, 6]


class Dies(Callback):
    def on_step(self, step: int) -> None:
        if step == 3:
            raise InterruptedError


def test_a_model_of_the_users_own_generates(tmp_path: Path) -> None:
    callback = GenerateSamples(["abc"], length=4)
    fit(callback, module=Own(), max_steps=30, validate_every=30)
    assert callback.texts == ["abcdefg"]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GenerateSamples("text"), r"GenerateSamples\(prompts='text'\): give a list"),
        (lambda: fit(GenerateSamples(PROMPTS, tokenizer=1)), r"GenerateSamples\(tokenizer=1\).*encode and decode"),
        (lambda: fit(GenerateSamples(PROMPTS, model="no")), r"Language.no is not a module with a method generate"),
        (lambda: fit(GenerateSamples(PROMPTS), validate_every=None), "but this fit runs none"),
    ],
)
def test_what_cannot_generate_is_refused_before_the_first_step(build: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        build()
