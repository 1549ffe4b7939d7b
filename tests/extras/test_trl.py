"""The examples of fine-tuning: their losses on one batch equal those of TRL's trainers, and they run as by a user."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from fabricate_text import Pad, pack, tokenize_chats, tokenize_completions

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """TRL's trainers make an Accelerator, whose shared state would stay."""
    yield
    for kind in (PartialState, AcceleratorState, GradientState):
        kind._shared_state.clear()


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Any:
    """The examples import each other. What TRL imports warns and sets variables of the environment: at once, before the tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl.trainer.dpo_trainer
        import trl.trainer.sft_trainer  # noqa: F401
    datasets.disable_progress_bars()
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


def options(folder: Path) -> dict[str, Any]:
    common = {
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    return {"output_dir": str(folder), "per_device_train_batch_size": 6, "seed": 0, **common}


def moved(model: Any) -> Any:
    """`model` with other weights, the same each time: a policy that is no longer its reference."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["assistant", "completion", "packed"])
def test_sft_has_the_loss_and_gradients_of_trl(tmp_path: Path, kind: str) -> None:
    from chats import conversations, load_model, load_tokenizer
    from sft import SFT
    from trl import SFTConfig, SFTTrainer

    rows, tokenizer = conversations("made").select(range(6)), load_tokenizer("tiny")
    arguments: dict[str, Any] = {"assistant_only_loss": kind != "completion", "max_length": 512}
    if kind == "completion":
        halves = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
        rows = datasets.Dataset.from_list(halves)
        ours = tokenize_completions(rows, tokenizer)
    else:
        ours = tokenize_chats(rows, tokenizer)
    if kind == "packed":
        arguments |= {"packing": True, "max_length": 256}
        ours = pack(ours, 256)
    trl = SFTTrainer(
        model=load_model("tiny"),
        args=SFTConfig(**options(tmp_path), **arguments),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    module = SFT()
    module.configure_model()
    loss = module.training_step(Pad(tokenizer.pad_token_id)(list(ours)))
    theirs = trl.compute_loss(trl.model, next(iter(trl.get_train_dataloader())))
    torch.testing.assert_close(loss, theirs)
    actual, expected = gradients(module.model, loss), gradients(trl.model, theirs)
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reference", ["frozen", "shared", "adapters"])
def test_dpo_has_the_loss_and_gradients_of_trl(tmp_path: Path, reference: str) -> None:
    from chats import load_model, preferences
    from dpo import DPO, PadPairs, to_pairs
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    module = DPO(beta=0.3, reference=reference)
    module.configure_model()
    moved(module.model)
    logged = {}
    module.log = lambda name, value: logged.update({name: float(value)})  # type: ignore[method-assign]
    rows = preferences("made").select(range(6))
    batch = PadPairs(module.tokenizer.pad_token_id)(list(to_pairs(rows, module.tokenizer)))
    loss = module.training_step(batch)["loss"]

    model = load_model("tiny")
    trl = DPOTrainer(
        model=model,
        ref_model=None if reference == "adapters" else load_model("tiny"),
        args=DPOConfig(**options(tmp_path), beta=0.3, max_length=512),
        train_dataset=rows,
        processing_class=module.tokenizer,
        peft_config=LoraConfig(target_modules="all-linear") if reference == "adapters" else None,
    )
    trl.model.load_state_dict(module.model.state_dict())
    theirs = trl.compute_loss(trl.model, next(iter(trl.get_train_dataloader())))
    assert abs(float(loss) - 0.6931) > 0.01
    torch.testing.assert_close(loss, theirs)
    ours, expected = gradients(module.model, loss), gradients(trl.model, theirs)
    assert ours.keys() <= expected.keys() if reference == "shared" else ours.keys() == expected.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_whole_conversations_are_split_before_their_last_message(tmp_path: Path) -> None:
    from chats import load_tokenizer, preferences
    from dpo import to_pairs

    pairs = preferences("made").select(range(2))
    lines = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in pairs]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = load_tokenizer("tiny")
    assert list(to_pairs(preferences(str(tmp_path / "pairs.jsonl")), tokenizer)) == list(to_pairs(pairs, tokenizer))


def run(*command: str, directory: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [sys.executable, *command], cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, (
        f"{command} ended with {process.returncode}\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
    )
    return process.stdout


def test_the_example_of_sft_learns_and_its_model_is_the_next_ones_start(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    script = str(EXAMPLES / "sft.py")
    arguments = ("--max-epochs", "2", "--neftune-alpha", "1", "--label-smoothing", "0.05", "--run-dir", "here")
    printed = run(script, *arguments, directory=tmp_path)
    loss = re.search(r"validation loss (\S+)", printed)
    assert loss is not None
    assert float(loss[1]) < 1, "from 5.6, the logarithm of 259"
    folder = tmp_path / "here" / "model"
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 259
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(40)))
    again = ("--model", "here/model", "--dataset", "chats.jsonl", "--max-epochs", "1", "--run-dir", "again")
    assert "validation loss" in run(script, *again, directory=tmp_path)


@pytest.mark.parametrize("reference", ["frozen", "shared", "adapters"])
def test_the_example_of_dpo_stops_and_goes_on_exactly(tmp_path: Path, reference: str) -> None:
    script = str(EXAMPLES / "dpo.py")
    lines = []
    for name, parts in (("whole", ("20",)), ("halves", ("10", "20"))):
        for steps in parts:
            arguments = ("--reference", reference, "--max-steps", steps, "--run-dir", name)
            run(script, *arguments, directory=tmp_path)
        texts = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        lines.append([(line["step"], line["metrics"]) for line in map(json.loads, texts)])
    assert lines[0] == lines[1]
    assert lines[0][-1][1]["loss"] < 0.6
