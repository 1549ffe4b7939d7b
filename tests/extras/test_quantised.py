"""Adapters over quantised weights of bitsandbytes and torchao: the losses of a loop by hand, checkpoints without the base, exact resumes,
strategies that accept them or refuse them by name, and the merged model, which transformers reads without fabricate."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from bitsandbytes.nn import Linear4bit
from click.testing import CliRunner
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup

from fabricate import CheckpointError, ConfigurationError, ModelSummary, RankError, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.cli.main import main
from fabricate.seeding import rng_state, set_rng_state
from fabricate.strategies.quantised import quantised_weights
from fabricate.testing import run_ranks
from tests.support.scripts import run_script

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning",
    "ignore:MatMul8bitLt. inputs will be cast",
    "ignore:.*register_constant.. on Enum subclasses",
)
BITSANDBYTES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
KINDS = [*BITSANDBYTES, "torchao-int8", "torchao-int4"]
TOKENS = torch.randint(1, 64, (16, 12), generator=torch.Generator().manual_seed(1))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]
STEPS = 4


def quantization(kind: str, **options: Any) -> Any:
    if kind in BITSANDBYTES:
        compute = {"bnb_4bit_compute_dtype": torch.float32} if kind == "nf4" else {}
        return transformers.BitsAndBytesConfig(**BITSANDBYTES[kind], **compute, **options)
    four = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    return transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2) if kind == "torchao-int8" else four)


def llama(folder: Path, seed: int = 0, tied: bool = False) -> Path:
    """A tiny Llama, saved; its linear layers have 64 rows or columns, the least that blocks of codes want."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("base"))


class Adapted(TrainModule):
    def __init__(self, base: Path, kind: str, lora: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self.base, self.kind, self.lora, self.options = base, kind, lora or {}, options
        self.losses: list[float] = []

    def configure_model(self) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.base, quantization_config=quantization(self.kind, **self.options), device_map={"": "cpu"}
        )
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        before = rng_state()
        torch.manual_seed(7)
        targets = ["q_proj", "v_proj"]
        config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM", **self.lora)
        self.model = peft.get_peft_model(model, config)
        set_rng_state(before)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_step(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))


def fit(base: Path, kind: str, run_dir: Path | None = None, steps: int = STEPS, **options: Any) -> Adapted:
    strategy, rows = options.pop("strategy", "single"), options.pop("rows", 4)
    module = Adapted(base, kind, **options.pop("quantised", {}))
    settings: dict[str, Any] = {"precision": "fp32", "progress": False, "seed": 1, "print_plan": "none"} | options
    val = ROWS[:4] if "validate_every" in options else None
    trainer = Trainer(max_steps=steps, run_dir=run_dir, strategy=strategy, **settings)
    trainer.fit(module, ROWS, val, batch_size=rows, shuffle=False)
    return module


def adapters(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "model" / "adapter_model.safetensors")


def by_hand(base: Path, kind: str) -> list[float]:
    module = Adapted(base, kind)
    module.configure_model()
    module.train()
    for child in module.modules():
        if isinstance(child, torch.nn.Dropout):
            child.p = 0.0
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for step in range(STEPS):
        batch = TOKENS[4 * step : 4 * step + 4]
        loss = module.model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class WithoutDropout(Adapted):
    def configure_model(self) -> None:
        super().configure_model()
        for child in self.modules():
            if isinstance(child, torch.nn.Dropout):
                child.p = 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_a_loop_by_hand(kind: str, base: Path) -> None:
    module = WithoutDropout(base, kind)
    Trainer(max_steps=STEPS, precision="fp32", progress=False, seed=1).fit(module, ROWS, batch_size=4, shuffle=False)
    distance = max(abs(a - b) for a, b in zip(module.losses, by_hand(base, kind), strict=True))
    print(f"{kind}: {distance:.1e}")
    assert distance < 1e-6
    assert module.losses[-1] != module.losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_hold_adapters_and_a_digest_and_a_resumed_run_ends_as_one_that_never_stopped(
    kind: str, base: Path, tmp_path: Path
) -> None:
    straight = fit(base, kind, tmp_path / "straight")
    first = fit(base, kind, tmp_path / "halves", steps=2)
    second = fit(base, kind, tmp_path / "halves")
    assert straight.losses == first.losses + second.losses
    ends = adapters(tmp_path / "straight"), adapters(tmp_path / "halves")
    assert len(ends[0]) == 8
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    with Reader(tmp_path / "halves" / "checkpoints" / "step-00000004") as reader:
        weights = [name for name in reader.manifest.tensors if name.startswith("model/") and "rotary" not in name]
        state: Any = reader.json("state.json")
    assert len(weights) == 8
    assert all("lora_" in name for name in weights)
    assert any(name.endswith("q_proj.base_layer.weight") for name in state["module"]["frozen"])
    assert (tmp_path / "straight" / "model" / "adapter_config.json").exists()


class Killed(Adapted):
    def on_step(self, step: int, loss: torch.Tensor) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(base: Path, run_dir: Path) -> None:
    trainer = Trainer(max_steps=STEPS, run_dir=run_dir, precision="fp32", progress=False, seed=1, save_every=1)
    trainer.fit(Killed(base, "nf4"), ROWS, batch_size=4, shuffle=False)


def test_a_run_that_is_killed_and_started_again_ends_as_one_that_never_stopped(base: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        run_ranks(killed, 1, base, tmp_path / "killed", timeout=600)
    assert sorted(os.listdir(tmp_path / "killed" / "checkpoints")) == ["step-00000001", "step-00000002"]
    module = Adapted(base, "nf4")
    trainer = Trainer(max_steps=STEPS, run_dir=tmp_path / "killed", precision="fp32", progress=False, seed=1)
    trainer.fit(module, ROWS, batch_size=4, shuffle=False)
    straight = fit(base, "nf4", tmp_path / "straight", save_every=1)
    assert module.losses == straight.losses[2:]
    ends = adapters(tmp_path / "straight"), adapters(tmp_path / "killed")
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def on_ranks(base: Path, folder: Path, kind: str, strategy: str) -> Any:
    """The losses of a run in two halves; or why it was refused, before its first step."""
    try:
        straight = fit(base, kind, folder / "straight", strategy=strategy, rows=2)
        first = fit(base, kind, folder / "halves", steps=2, strategy=strategy, rows=2)
        second = fit(base, kind, folder / "halves", strategy=strategy, rows=2)
    except ConfigurationError as error:
        return str(error)
    assert straight.losses == first.losses + second.losses
    ends = adapters(folder / "straight"), adapters(folder / "halves")
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    return straight.losses


TAKEN = [("ddp", "nf4"), ("ddp", "int8"), ("ddp", "torchao-int8"), ("fsdp", "nf4"), ("zero2", "nf4")]
REFUSED = [("fsdp", "int8"), ("fsdp", "torchao-int8"), ("zero2", "torchao-int8"), ("zero3", "nf4")]


def every_case(base: Path, folder: Path) -> dict[Any, Any]:
    return {case: on_ranks(base, folder / "-".join(case), case[1], case[0]) for case in [*TAKEN, *REFUSED]}


def test_two_ranks_train_and_resume_or_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    first, other = run_ranks(every_case, 2, base, tmp_path, timeout=600)
    assert first == other
    for case in TAKEN:
        assert len(first[case]) == STEPS, (case, first[case])
        assert first[case] == pytest.approx(first["ddp", case[1]], abs=1e-4)
    names = {"nf4": "bitsandbytes 4-bit", "int8": "bitsandbytes 8-bit", "torchao-int8": "torchao"}
    for strategy, kind in REFUSED:
        supports = (
            "no quantised weights, but " if strategy == "zero3" else "only the quantised weights of bitsandbytes "
        )
        assert first[strategy, kind].startswith(f"strategy='{strategy}' supports {supports}"), first[strategy, kind]
        assert f"q_proj.base_layer.weight and 13 more are quantised by {names[kind]}" in first[strategy, kind]
        assert not list((tmp_path / f"{strategy}-{kind}").glob("*/checkpoints/step-*"))


def refused(bases: list[Path]) -> list[str]:
    """The error where ranks have bases of their own, and where codes are stored in a dtype that FSDP would cast."""
    rank = int(os.environ["RANK"])
    storage = {"bnb_4bit_quant_storage": torch.float16}
    with pytest.raises(RankError) as unlike:
        fit(bases[rank], "nf4", strategy="ddp", rows=2)
    with pytest.raises(ConfigurationError) as rounded:
        fit(bases[0], "nf4", strategy="fsdp", rows=2, precision="bf16", quantised=storage)
    return [str(unlike.value), str(rounded.value)]


def test_ranks_with_unlike_bases_and_codes_that_would_be_rounded_are_refused(base: Path, tmp_path: Path) -> None:
    unlike, rounded = run_ranks(refused, 2, [base, llama(tmp_path / "other", seed=5)], timeout=600)[0]
    assert "differ from rank 0 in settings: the quantised model." in unlike
    assert "strategy='fsdp' gathers in bfloat16, but the codes of model." in rounded
    assert "are stored as float16" in rounded


class Headed(Adapted):
    """Trains the head of a quantised model, without an adapter."""

    def configure_model(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            self.base, quantization_config=quantization(self.kind), device_map={"": "cpu"}
        )
        self.model.requires_grad_(False)
        self.model.lm_head.requires_grad_(True)


def test_a_sharded_model_without_an_adapter_is_exported_without_quantised_weights_and_a_note_says_so(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    settings: dict[str, Any] = {"precision": "fp32", "progress": False, "seed": 1, "strategy": "fsdp"}
    trainer = Trainer(max_steps=1, run_dir=tmp_path, print_plan="full", **settings)
    trainer.fit(Headed(base, "nf4"), ROWS, batch_size=4, shuffle=False)
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" in exported
    assert "model.layers.0.self_attn.q_proj.weight" not in exported
    printed = "".join(capsys.readouterr())
    assert "will hold the weights without model.model.layers.0.self_attn.q_proj.weight" in printed


def test_another_base_on_resume_is_an_error_that_names_it(base: Path, tmp_path: Path) -> None:
    fit(base, "nf4", tmp_path / "run", steps=2)
    text = rf"not the ones it was trained with: .*then loaded from '{re.escape(str(base))}'"
    with pytest.raises(CheckpointError, match=text):
        fit(llama(tmp_path / "other", seed=5), "nf4", tmp_path / "run")


def test_other_scales_beside_the_same_codes_are_another_base(base: Path, tmp_path: Path) -> None:
    class Scaled(Adapted):
        def configure_model(self) -> None:
            super().configure_model()
            layer = next(layer for layer in self.modules() if isinstance(layer, Linear4bit))
            layer.weight.quant_state.offset += 0.5

    fit(base, "nf4", tmp_path, steps=2)
    trainer = Trainer(max_steps=STEPS, run_dir=tmp_path, precision="fp32", progress=False, seed=1)
    with pytest.raises(CheckpointError, match=r"not the ones it was trained with: \S*q_proj\.base_layer\.weight\."):
        trainer.fit(Scaled(base, "nf4"), ROWS, batch_size=4, shuffle=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_counts_quantised_bytes_and_the_parameters_that_they_stand_for(
    kind: str, base: Path, tmp_path: Path
) -> None:
    summary = ModelSummary()
    module = fit(base, kind, tmp_path, steps=1, plugins=[summary])
    plan = {n: line["value"] for n, line in json.loads((tmp_path / "plan.json").read_text())["settings"].items()}
    quantised = quantised_weights(module)
    assert len(quantised) == 14
    plain = [p for name, p in module.named_parameters() if name not in quantised]
    sizes = {t.data_ptr(): t.nbytes for each in quantised.values() for t in each.tensors()}
    memory = plan["memory_per_rank"]
    counted = memory["parameters"] + memory.get("scales of quantised weights", 0)
    assert counted == sum(sizes.values()) + sum(p.nbytes for p in plain)
    whole = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert plan["parameters_frozen"] == whole.num_parameters()
    (row,) = summary.layers
    assert row.parameters == row.trainable + whole.num_parameters()
    assert plan["quantised_weights"][0].startswith("14 by ")


def test_a_validation_leaves_the_weights_as_they_are(base: Path, tmp_path: Path) -> None:
    alone = fit(base, "nf4")
    validated = fit(base, "nf4", tmp_path, validate_every=1, validate_first=True, save_every=1)
    assert alone.losses == validated.losses
    layers = [layer for layer in validated.modules() if isinstance(layer, Linear4bit)]
    assert not any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers)


def test_save_frozen_is_refused_because_no_checkpoint_holds_quantised_weights(base: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"save_frozen=True, but .* are quantised, and checkpoints do not hold quantised weights",
    ):
        fit(base, "nf4", tmp_path, save_frozen=True)


def distances(merged: Any, trained: Any, base: Path) -> tuple[float, float]:
    """The largest differences of the logits of `merged` from those of `trained`, and from those of the base."""
    for layer in trained.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False  # which rounds its scales
    before: Any = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        expected, logits, untrained = (each(TOKENS).logits for each in (trained, merged, before))
    distance, change = ((logits - each).abs().max().item() for each in (expected, untrained))
    return distance, change


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_is_what_was_trained_and_transformers_reads_it_alone(
    kind: str, base: Path, tmp_path: Path
) -> None:
    fit(base, kind, tmp_path / "run")
    result = CliRunner().invoke(main, ["ckpt", "merge", str(tmp_path / "run"), str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert type(merged) is transformers.LlamaForCausalLM
    assert not hasattr(merged.config, "quantization_config")
    trained = Adapted(base, kind)
    trained.configure_model()
    model: Any = peft.PeftModel.from_pretrained(trained.model.unload(), tmp_path / "run" / "model").eval()
    distance, change = distances(merged, model, base)
    print(f"{kind}: {distance:.1e} from what was trained, {change:.1e} from the base")
    assert distance < (1e-5 if kind != "int8" else 0.02)  # bitsandbytes rounds activations to 8 bits as well
    assert change > 0.1


@pytest.mark.filterwarnings("ignore:.*`tie_word_embeddings=(True|False)`")
@pytest.mark.parametrize("lora", [{"init_lora_weights": "olora"}, {"modules_to_save": ["lm_head"]}])
def test_a_base_that_adapters_change_or_whose_layers_are_tied_is_merged_as_trained(
    lora: dict[str, Any], tmp_path: Path
) -> None:
    module = Adapted(llama(tmp_path / "base", tied=True), "nf4", lora)
    trainer = Trainer(max_steps=STEPS, run_dir=tmp_path / "run", precision="fp32", progress=False, seed=1)
    trainer.fit(module, ROWS, batch_size=4)
    result = CliRunner().invoke(main, ["ckpt", "merge", str(tmp_path / "run"), str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    for layer in module.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False  # which rounds its scales
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, module.model.eval()(TOKENS).logits, rtol=0, atol=1e-5)


def gpt2(folder: Path) -> Path:
    """A tiny GPT-2, saved. Its linear layers are `Conv1D`s, whose weights are transposed; c_proj of attention is square."""
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("adapter", ["lora", "ia3"])
@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_a_merged_gpt2_has_the_transposed_weights_of_its_layers(kind: str, adapter: str, tmp_path: Path) -> None:
    base, targets = gpt2(tmp_path / "base"), ["c_attn", "attn.c_proj"]
    lora = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    ia3 = peft.IA3Config(target_modules=targets, feedforward_modules=[], task_type="CAUSAL_LM")

    class AdaptedGPT2(Adapted):
        def configure_model(self) -> None:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                base, quantization_config=quantization(kind), device_map={"": "cpu"}
            )
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            self.model = peft.get_peft_model(model, lora if adapter == "lora" else ia3)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    module = AdaptedGPT2(base, kind)
    settings: dict[str, Any] = {"precision": "fp32", "progress": False, "seed": 1, "print_plan": "none"}
    Trainer(max_steps=STEPS, run_dir=tmp_path / "run", **settings).fit(module, ROWS, batch_size=4)
    result = CliRunner().invoke(main, ["ckpt", "merge", str(tmp_path / "run"), str(tmp_path / "merged")])
    assert result.exit_code == 0, result.output
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    distance, change = distances(merged, module.model.eval(), base)
    print(f"{kind}, {adapter}: {distance:.1e} from what was trained, {change:.1e} from the base")
    assert distance < (1e-5 if kind == "nf4" else 0.02)  # as above
    assert change > 0.1


def test_a_merge_over_another_base_or_without_one_is_refused(base: Path, tmp_path: Path) -> None:
    fit(base, "nf4", tmp_path / "run", steps=1)
    other = llama(tmp_path / "other", seed=5)
    for place, text in (
        (other, "not the ones it was trained with"),
        (tmp_path / "none", "Give its present place with --base"),
    ):
        arguments = ["ckpt", "merge", str(tmp_path / "run"), str(tmp_path / "merged"), "--base", str(place)]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code != 0
        assert text in result.output + str(result.exception)
        assert not (tmp_path / "merged").exists()


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_of_qlora_learns_and_leaves_adapter_and_tokenizer(tmp_path: Path) -> None:
    printed = run_script(EXAMPLES / "qlora.py", "--max-steps", "20", "--run-dir", "here", directory=tmp_path)
    match = re.search(r"step 20: validation loss (\S+);", printed)
    before = re.search(r"step 0  val_loss (\S+)", printed)
    assert match is not None
    assert before is not None
    assert float(match[1]) < float(before[1]) - 0.03
    names = {path.name for path in (tmp_path / "here" / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names


def test_the_example_of_a_classifier_learns(tmp_path: Path) -> None:
    printed = run_script(EXAMPLES / "lora_classifier.py", "--max-epochs", "1", "--run-dir", "here", directory=tmp_path)
    match = re.search(r"accuracy (\S+);", printed)
    assert match is not None
    assert float(match[1]) > 0.9
    assert (tmp_path / "here" / "model" / "adapter_config.json").exists()
