"""`fabricate ckpt merge` over bases that are not quantised: the merged model computes what was trained, whatever the adapters change."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from fabricate import Trainer, TrainModule
from fabricate.cli.main import main

# Of transformers, where peft asks for a property by its older name; of peft, about what these tests check.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning",
    "ignore:.*`tie_word_embeddings=(True|False)`",
    "ignore:Setting `save_embedding_layers` to `True`",
)
TOKENS = torch.randint(1, 32, (8, 6), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": each, "labels": each} for each in TOKENS]
ATTENTION = ["q_proj", "v_proj"]
INITIALISED = {
    "pissa": peft.LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights="pissa"),
    "olora": peft.LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights="olora"),
    "mica": peft.LoraConfig(r=4, target_modules=ATTENTION, init_lora_weights="mica"),
    "vera": peft.VeraConfig(r=4, target_modules=ATTENTION),
}
"""Initialisations that read or change the weights of the base, or make values that all layers share."""
OF_SHARED_WEIGHTS = {
    "head": peft.LoraConfig(r=4, target_modules=[*ATTENTION, "lm_head"]),
    "embedding": peft.LoraConfig(r=4, target_modules=[*ATTENTION, "embed_tokens"]),
    "both": peft.LoraConfig(r=4, target_modules=[*ATTENTION, "embed_tokens"], ensure_weight_tying=True),
    "saved head": peft.LoraConfig(r=4, target_modules=ATTENTION, modules_to_save=["lm_head"]),
    "saved embedding": peft.LoraConfig(r=4, target_modules=ATTENTION, modules_to_save=["embed_tokens"]),
}
"""Adapters of layers that have one weight in a model with tied embeddings."""


def llama(tied: bool) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=8,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)


class Adapted(TrainModule):
    def __init__(self, base: Path | None, config: Any) -> None:
        super().__init__()
        self.base, self.config = base, config

    def configure_model(self) -> None:
        of_code = self.base is None
        model = llama(tied=False) if of_code else transformers.AutoModelForCausalLM.from_pretrained(self.base)
        self.model = peft.get_peft_model(model, copy.deepcopy(self.config))

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(run_dir: Path, base: Path | None, config: Any) -> torch.Tensor:
    """The logits of the trained model."""
    module = Adapted(base, config)
    trainer = Trainer(max_steps=4, run_dir=run_dir, precision="fp32", progress=False, seed=1, save_frozen=False)
    trainer.fit(module, ROWS, batch_size=2)
    return logits(module.model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits
    return found


def merge(run_dir: Path, *options: str) -> Any:
    return CliRunner().invoke(main, ["ckpt", "merge", str(run_dir), str(run_dir / "merged"), *options])


def check(run_dir: Path, config: Any, tied: bool) -> Any:
    """Compare the merged model with the trained one, and return it."""
    llama(tied).save_pretrained(run_dir / "base")
    trained = fit(run_dir, run_dir / "base", config)
    result = merge(run_dir)
    assert result.exit_code == 0, result.output
    base, merged = (transformers.AutoModelForCausalLM.from_pretrained(run_dir / name) for name in ("base", "merged"))
    torch.testing.assert_close(logits(merged), trained, rtol=0, atol=1e-5)
    assert (logits(base) - trained).abs().max() > 0.01
    adapted = peft.PeftModel.from_pretrained(base, run_dir / "model")
    torch.testing.assert_close(logits(adapted), trained, rtol=0, atol=1e-5)
    return merged


@pytest.mark.parametrize("name", INITIALISED)
def test_the_initialisation_of_adapters_is_merged_once(name: str, tmp_path: Path) -> None:
    check(tmp_path, INITIALISED[name], tied=False)


@pytest.mark.parametrize("name", OF_SHARED_WEIGHTS)
def test_tied_layers_are_merged_each_with_its_own_adapter(name: str, tmp_path: Path) -> None:
    merged = check(tmp_path, OF_SHARED_WEIGHTS[name], tied=True)
    tied = json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
    assert not tied or torch.equal(merged.get_input_embeddings().weight, merged.get_output_embeddings().weight)


def test_of_patterns_that_match_one_layer_the_first_counts(tmp_path: Path) -> None:
    # peft writes patterns with sorted keys into adapter_config.json, so only the merged model is compared.
    patterns = {"self_attn.q_proj": 8, "layers.1.self_attn.q_proj": 64}
    llama(tied=False).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=ATTENTION, alpha_pattern=patterns)
    trained = fit(tmp_path, tmp_path / "base", config)
    assert merge(tmp_path).exit_code == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), trained, rtol=0, atol=1e-5)


def test_a_base_that_was_built_in_code_has_to_be_given(tmp_path: Path) -> None:
    trained = fit(tmp_path, None, peft.LoraConfig(r=4, target_modules=ATTENTION))
    refused = merge(tmp_path)
    assert refused.exit_code == 2
    assert "names no place of its base model" in refused.output
    assert "give this folder with --base" in refused.output
    llama(tied=False).save_pretrained(tmp_path / "base")
    result = merge(tmp_path, "--base", str(tmp_path / "base"))
    assert result.exit_code == 0, result.output
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), trained, rtol=0, atol=1e-5)


class Resized(Adapted):
    """Its base has tokens that the script added."""

    def configure_model(self) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(self.base)
        model.resize_token_embeddings(40, mean_resizing=False)
        self.model = peft.get_peft_model(model, copy.deepcopy(self.config))


def test_a_base_that_was_resized_has_to_be_given(tmp_path: Path) -> None:
    llama(tied=False).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=ATTENTION, modules_to_save=["embed_tokens", "lm_head"])
    module = Resized(tmp_path / "base", config)
    Trainer(max_steps=2, run_dir=tmp_path, precision="fp32", progress=False, seed=1).fit(module, ROWS, batch_size=2)
    refused = merge(tmp_path)
    assert refused.exit_code == 2
    assert "has the shape (40, 16), but (32, 16) with the base model" in refused.output
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(40, mean_resizing=False)
    base.save_pretrained(tmp_path / "resized")
    result = merge(tmp_path, "--base", str(tmp_path / "resized"))
    assert result.exit_code == 0, result.output
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(module.model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_merge_writes_the_tokenizer_of_the_base_and_makes_none(has_tokenizer: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(base)
    if has_tokenizer:
        words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "word": 2}, unk_token="[UNK]"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(base)
    fit(tmp_path, base, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    result = merge(tmp_path)
    assert result.exit_code == 0, result.output
    written = sorted(file.name for file in (tmp_path / "merged").glob("tokenizer*"))
    assert ("the base model has no tokenizer" in result.output) is not has_tokenizer
    assert written == (["tokenizer.json", "tokenizer_config.json"] if has_tokenizer else [])
