"""Models of transformers that are larger than a device: the memory of a process, generation, and adapters of peft."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from fabricate import ConfigurationError, Trainer, TrainModule
from fabricate.callbacks.generate_samples import GenerateSamples
from fabricate.checkpoint.format.directory import Reader
from fabricate.seeding import rng_state, set_rng_state

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
LAYERS, WIDTH = 30, 640
LARGER = """
import json, sys
import torch, transformers
from fabricate import Trainer, TrainModule

class Large(TrainModule):
    def configure_model(self):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2])

    def validation_step(self, batch):
        return {"loss": self.model(input_ids=batch, labels=batch).loss}

    def predict_step(self, batch):
        greedy = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
        return self.model.generate(input_ids=batch, attention_mask=torch.ones_like(batch), **greedy)

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) * 1024

rows = torch.arange(16).reshape(2, 8)
torch.compiler.disable(len)  # what the first layer would import
before = resident("VmRSS")
trainer, module = Trainer(strategy=sys.argv[1], precision="fp32", seed=1, progress=False), Large()
loss = trainer.validate(module, rows, batch_size=2)["val_loss"]
tokens = torch.stack(list(trainer.predict(module, rows, batch_size=2))).tolist()
print(json.dumps({"loss": loss, "tokens": tokens, "grew": resident("VmHWM") - before}))
"""


def answer(script: Path, strategy: str, base: Path) -> dict[str, Any]:
    """What the script prints in a process of its own."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MALLOC_MMAP_THRESHOLD_": str(2**20),  # else the C library keeps what layers freed
    }
    command = [sys.executable, str(script), strategy, str(base)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    values: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return values


def test_a_model_larger_than_the_memory_it_takes_computes_and_generates_what_it_does_in_memory(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(tmp_path / "base")
    size = sum(p.nbytes for p in model.parameters())
    del model
    script = tmp_path / "larger.py"
    script.write_text(LARGER)
    mapped = f"device_map:max_memory=cpu:60MB,offload_folder={tmp_path / 'weights'}"

    whole, parts = (answer(script, strategy, tmp_path / "base") for strategy in ("single", mapped))
    print(f"model {size:,}, grew by {whole['grew']:,} in memory, {parts['grew']:,} under device_map")
    assert (parts["loss"], parts["tokens"]) == (whole["loss"], whole["tokens"])
    assert parts["grew"] < size / 2 < size < whole["grew"]
    assert not list((tmp_path / "weights").iterdir())


TOKENS = torch.randint(1, 64, (16, 12), generator=torch.Generator().manual_seed(1))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]
MAP: dict[str, int | str] = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.norm": "cpu",
    "lm_head": "disk",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Words:
    """A tokenizer: numbers as text."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, numbers: list[int]) -> str:
        return " ".join(map(str, numbers))


class Adapted(TrainModule):
    def __init__(self, base: Path, device_map: Any = None, init: Any = True) -> None:
        super().__init__()
        self.base, self.device_map, self.init = base, device_map, init
        self.tokenizer = Words()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        places = (
            {} if self.device_map is None else {"device_map": self.device_map, "offload_folder": self.base / "weights"}
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(self.base, **places)
        before = rng_state()
        torch.manual_seed(7)
        config = peft.LoraConfig(
            r=4,
            lora_dropout=0.1,
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
            init_lora_weights=self.init,
        )
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


def fit(
    module: Adapted, strategy: str, run_dir: Path, steps: int = 4, **settings: Any
) -> tuple[list[float], list[str]]:
    samples = GenerateSamples(["1 2 3"], model="model", max_new_tokens=4, do_sample=False)
    own = Trainer(
        strategy=strategy,
        precision="fp32",
        seed=1,
        progress=False,
        max_steps=steps,
        run_dir=run_dir,
        validate_every=2,
        plugins=[samples],
        **settings,
    )
    own.fit(module, ROWS, ROWS[:4], batch_size=4, shuffle=False)
    return module.losses, samples.texts


def adapters(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run_dir / "model" / "adapter_model.safetensors")


def only_adapters(run_dir: Path) -> bool:
    with Reader(run_dir / "checkpoints" / "step-00000004") as reader:
        weights = [name for name in reader.manifest.tensors if name.startswith("model/") and "rotary" not in name]
    return len(weights) == 12 and all("lora_" in name for name in weights)


@pytest.mark.parametrize("recomputed", [False, True])
def test_adapters_over_layers_on_disk_train_as_over_layers_in_memory(
    recomputed: bool, base: Path, tmp_path: Path
) -> None:
    mapped = f"device_map:max_memory=cpu:400KB,offload_folder={tmp_path / 'weights'}"
    alone = fit(Adapted(base), "single", tmp_path / "single", activation_checkpointing=recomputed)
    module = Adapted(base)
    assert fit(module, mapped, tmp_path / "mapped", activation_checkpointing=recomputed) == alone
    assert any(p.is_meta for p in module.parameters())
    ends = adapters(tmp_path / "single"), adapters(tmp_path / "mapped")
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert only_adapters(tmp_path / "mapped")


def test_adapters_over_a_model_that_transformers_placed_train_and_resume_exactly(base: Path, tmp_path: Path) -> None:
    losses, texts = fit(Adapted(base, MAP), "device_map", tmp_path / "straight")
    first, _ = fit(Adapted(base, MAP), "device_map", tmp_path / "halves", steps=2)
    second, same = fit(Adapted(base, MAP), "device_map", tmp_path / "halves")
    assert (losses, texts) == (first + second, same)
    assert len(texts[0].split()) == 7
    ends = adapters(tmp_path / "straight"), adapters(tmp_path / "halves")
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert only_adapters(tmp_path / "halves")
    merged = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "straight" / "model"
    )
    module = Adapted(base)
    Trainer(
        strategy="single", max_steps=4, run_dir=tmp_path / "halves", progress=False, precision="fp32", seed=1
    ).validate(module, ROWS[:4], batch_size=4, checkpoint="last")
    inputs = {"input_ids": TOKENS[:4]}
    assert torch.equal(merged.eval()(**inputs).logits, module.eval().model(**inputs).logits)


def test_what_no_update_would_reach_and_strategies_that_need_whole_layers_are_refused(
    base: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"strategy='single' needs all weights on a device, but a device_map placed model\."
    ):
        fit(Adapted(base, MAP), "single", tmp_path / "single")
    with pytest.raises(
        ConfigurationError,
        match=r"init_lora_weights=False needs the weights of the base layers, .* Use init_lora_weights=True or 'gaussian'",
    ):
        fit(Adapted(base, MAP, init=False), "device_map", tmp_path / "mapped")
    module = Adapted(base, MAP)
    module.configure_model()
    object.__setattr__(module, "_built", True)
    module.requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"the trainable parameters .* are not on the device"):
        fit(module, "device_map", tmp_path / "whole")
