"""Losses are weighted by the labels that they count, in every split; NEFTune's noise has the right size, in training only, and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
import transformers
from fabricate_text import NEFTune, Pad, next_token_loss, next_tokens, pack, use_liger
from fabricate_text.neftune import packed_lengths

from fabricate import Callback, ConfigurationError, Trainer, TrainModule

GENERATOR = torch.Generator().manual_seed(0)
TOKENS = [torch.randint(1, 50, (int(n),), generator=GENERATOR).tolist() for n in (3, 17, 5, 12, 2, 9, 20, 4)]
LABELS = [[-100 if place < 2 and len(ids) > 4 else token for place, token in enumerate(ids)] for ids in TOKENS]
ROWS = datasets.Dataset.from_dict({"input_ids": TOKENS, "labels": LABELS})
Step = Callable[[Any, dict[str, Any]], Any]


def smoothed(model: Any, batch: dict[str, Any]) -> Any:
    return next_token_loss(model(**batch).logits, batch["labels"], label_smoothing=0.2)


def fused(model: Any, batch: dict[str, Any]) -> Any:
    """A loss from which torch does not see how many labels it counts, as Liger's kernel."""
    return {"loss": Opaque.apply(model(**batch).loss), "weight": next_tokens(batch["labels"])}  # type: ignore[no-untyped-call]


def plain(model: Any, batch: dict[str, Any]) -> Any:
    return model(**batch).loss


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Tiny(TrainModule):
    def __init__(self, step: Step = plain, dropout: float = 0.0) -> None:
        super().__init__()
        self.step = step
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            attention_dropout=dropout,
        )
        self.model = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: dict[str, Any]) -> Any:
        return self.step(self.model, batch)

    def validation_step(self, batch: dict[str, Any]) -> Any:
        return self.step(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit(module: Any, steps: int, batch_size: int = 8, rows: Any = ROWS, **arguments: Any) -> dict[str, torch.Tensor]:
    options = {"global_batch_size": len(rows)} | arguments
    trainer = Trainer(max_steps=steps, seed=1, progress=False, print_plan="none", **options)
    trainer.fit(module, rows, batch_size=batch_size, shuffle=False, collate_fn=Pad(0))
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("step", [smoothed, fused])
def test_an_update_is_that_of_the_whole_batch_in_every_split(step: Step) -> None:
    whole = fit(Tiny(step), 2, batch_size=8)
    for name, weights in fit(Tiny(step), 2, batch_size=2).items():
        torch.testing.assert_close(weights, whole[name], rtol=1e-4, atol=1e-6)
    if step is fused:
        for name, weights in fit(Tiny(plain), 2, batch_size=2).items():
            torch.testing.assert_close(weights, whole[name], rtol=1e-4, atol=1e-6)


def test_a_smoothed_loss_is_that_of_transformers() -> None:
    model, batch = Tiny().model, Pad(0)(list(ROWS))
    outputs = model(**batch)
    labels = batch["labels"]
    smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.2)
    loss_and_weight = next_token_loss(outputs.logits, labels, 0.2)
    torch.testing.assert_close(loss_and_weight["loss"], smoother(outputs, labels, shift_labels=True))
    assert loss_and_weight["weight"] == sum(label != -100 for row in LABELS for label in row[1:])
    torch.testing.assert_close(next_token_loss(outputs.logits, labels)["loss"], outputs.loss)
    with pytest.raises(ConfigurationError, match="label_smoothing=2: give a number from 0 to 1"):
        next_token_loss(outputs.logits, labels, 2)


def test_ligers_kernels_are_refused_by_name_before_the_first_step() -> None:
    class Fast(Tiny):
        def configure_model(self) -> None:
            self.model = use_liger(self.model)

    with pytest.raises(
        ConfigurationError, match=r"use_liger: the kernels of Liger for LlamaForCausalLM .* leave use_liger out"
    ):
        fit(Fast(fused), 1)


class Embedded(Callback):
    """What the first layer gets, in training."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []

    def on_fit_start(self, module: Any) -> None:
        layer = module.model.model.layers[0]
        layer.register_forward_pre_hook(lambda _, inputs: self.inputs.append(inputs[0].detach().clone()))


def by_position(model: Any, batch: dict[str, Any]) -> Any:
    return model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss


def inner_alone(model: Any, batch: dict[str, Any]) -> Any:
    hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    return next_token_loss(model.lm_head(hidden), batch["labels"])


@pytest.mark.parametrize(
    ("packed", "step"), [(False, plain), (False, by_position), (False, inner_alone), (True, plain)]
)
def test_noise_has_the_size_of_the_row_that_it_is_added_to(packed: bool, step: Step) -> None:
    rows = pack(ROWS, 24) if packed else ROWS
    batch, looks, module = Pad(0)(list(rows)), Embedded(), Tiny(step)
    embedding = module.model.get_input_embeddings()
    before = embedding(batch["input_ids"]).detach()
    fit(module, 1, rows=rows, batch_size=len(rows), plugins=[looks, NEFTune(alpha=4)])
    noise = (looks.inputs[0] - before).abs().amax(2)
    lengths = packed_lengths(batch["position_ids"]) if packed else batch["attention_mask"].sum(1, keepdim=True)
    bound = (4 / (lengths * 16).float().sqrt()).expand_as(noise)
    assert (noise <= bound * 1.0001).all()
    assert (noise > bound * 0.5).all(), "the largest of 16"
    assert not embedding._forward_hooks
    if packed:
        assert packed_lengths(torch.tensor([[0, 1, 2, 0, 0, 1]])).tolist() == [[3, 3, 3, 1, 2, 2]]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_noise_is_added_once_to_an_embedding_that_peft_wraps() -> None:
    inputs = []
    for options in ({}, {"modules_to_save": ["embed_tokens"]}, {"target_modules": ["q_proj", "embed_tokens"]}):
        module, looks = Tiny(), Embedded()
        settings = peft.LoraConfig(r=2, **{"target_modules": ["q_proj"], **options})  # type: ignore[arg-type]
        module.model = peft.get_peft_model(module.model, settings).base_model.model
        fit(module, 1, plugins=[looks, NEFTune(alpha=4)])
        inputs.append(looks.inputs[0])
    assert torch.equal(inputs[1], inputs[0])
    assert torch.equal(inputs[2], inputs[0])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_noise_is_added_also_if_only_virtual_tokens_are_trained() -> None:
    module, batch = Tiny(), Pad(0)(list(ROWS))
    clean = module.model.get_input_embeddings()(batch["input_ids"]).detach()
    looks = Embedded()
    looks.on_fit_start(module)
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    module.model = peft.get_peft_model(module.model, tuning)
    fit(module, 1, plugins=[NEFTune(alpha=4)])
    noise = (looks.inputs[0][:, 3:] - clean).abs()
    assert 0 < noise.max() <= 4 / (clean.shape[1] * 16) ** 0.5


def test_noise_of_a_decoder_has_the_size_of_its_own_rows() -> None:
    config = transformers.T5Config(
        vocab_size=50,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )

    class Translates(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.T5ForConditionalGeneration(config)
            self.noise: dict[int, torch.Tensor] = {}

        def training_step(self, batch: dict[str, Any]) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    class Looks(Callback):
        def on_fit_start(self, module: Any) -> None:
            for stack in (module.model.encoder, module.model.decoder):
                stack.embed_tokens.register_forward_hook(self.compare)

        def compare(self, shared: Any, inputs: tuple[torch.Tensor], embedded: torch.Tensor) -> None:
            clean = torch.nn.functional.embedding(inputs[0], shared.weight)
            module.noise[inputs[0].shape[1]] = (embedded - clean).detach().abs().amax((1, 2))

    ids, mask = torch.full((2, 40), 3), torch.arange(40).expand(2, 40) < torch.tensor([[40], [10]])
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.full((2, 5), 7)}
    module, plugins = Translates(), [NEFTune(alpha=4), Looks()]
    options: dict[str, Any] = {"seed": 1, "progress": False, "print_plan": "none"}
    Trainer(max_steps=1, plugins=plugins, **options).fit(module, [batch])
    bounds = {40: torch.tensor([40.0, 10.0]), 5: torch.tensor([5.0, 5.0])}  # the decoder gets no mask
    for length, noise in module.noise.items():
        bound = 4 / (bounds[length] * 16).sqrt()
        assert (noise <= bound * 1.0001).all()
        assert (noise > bound * 0.8).all(), "the largest of many"
    assert module.noise.keys() == bounds.keys()


def test_noise_has_the_size_of_the_row_also_if_a_part_without_text_ran_before() -> None:
    vision = {"hidden_size": 16, "image_size": 8, "patch_size": 4}
    layers = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {
        "hidden_size": 16,
        "ffn_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 16,
    }

    class Describes(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.zeros(2)
            config = transformers.Blip2Config(
                vision_config=vision | layers,
                qformer_config={"hidden_size": 16, "encoder_hidden_size": 16, "vocab_size": 50} | layers,
                text_config=text | {"model_type": "opt", "vocab_size": 60},
                num_query_tokens=2,
                image_token_index=55,
            )
            self.model = transformers.Blip2ForConditionalGeneration(config)

        def training_step(self, batch: dict[str, Any]) -> Any:
            hook = self.model.get_input_embeddings().register_forward_hook(self.compare)
            loss = self.model(**batch).loss
            hook.remove()
            return loss

        def compare(self, embedding: Any, inputs: tuple[torch.Tensor], embedded: torch.Tensor) -> None:
            clean = torch.nn.functional.embedding(inputs[0], embedding.weight)
            self.noise = (embedded - clean).detach().abs().amax((1, 2))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    ids = torch.full((2, 40), 3)
    ids[:, :2] = 55  # the places of the image
    mask = torch.arange(40).expand(2, 40) < torch.tensor([[40], [10]])
    batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": ids, "pixel_values": torch.randn(2, 3, 8, 8)}
    module = Describes()
    Trainer(max_steps=1, seed=1, progress=False, print_plan="none", plugins=[NEFTune(alpha=4)]).fit(module, [batch])
    bound = 4 / (torch.tensor([40.0, 10.0]) * 16).sqrt()
    assert (module.noise <= bound * 1.0001).all()
    assert (module.noise > bound * 0.8).all(), "the largest of many"


def test_noise_is_added_in_training_only_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(name: str, steps: int, *plugins: Any, dropout: float = 0.1) -> dict[str, torch.Tensor]:
        options = {"run_dir": tmp_path / name, "save_every": "2 steps", "keep": "all"}
        return fit(Tiny(dropout=dropout), steps, batch_size=4, plugins=plugins, **options)

    whole = run("whole", 5, NEFTune(alpha=5))
    run("resumed", 2, NEFTune(alpha=5))
    resumed = run("resumed", 5, NEFTune(alpha=5))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not torch.equal(whole["model.lm_head.weight"], run("plain", 5)["model.lm_head.weight"])


class Validated(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_eval_end(self, metrics: dict[str, float]) -> None:
        self.losses.append(metrics["val_loss"])


def test_no_noise_is_added_in_validation() -> None:
    losses = []
    for noise in ([], [NEFTune(alpha=50)]):
        looks = Validated()
        trainer = Trainer(
            max_steps=1, seed=1, progress=False, print_plan="none", plugins=[looks, *noise], validate_first=True
        )
        trainer.fit(Tiny(smoothed), ROWS, ROWS, batch_size=8, collate_fn=Pad(0))
        losses.append(looks.losses)
    assert losses[0][0] == losses[1][0], "before the first step"
    assert losses[0][1] != losses[1][1], "trained with noise"


def test_noise_needs_one_model_and_a_size() -> None:
    with pytest.raises(ConfigurationError, match="NEFTune: alpha=0: give a number above 0"):
        NEFTune(0)
    both = Tiny()
    both.other = Tiny().model
    with pytest.raises(
        ConfigurationError, match="has 2 models of transformers and trains 2 of them, but NEFTune needs exactly one,"
    ):
        fit(both, 1, plugins=[NEFTune()])
