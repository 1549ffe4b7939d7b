"""The memory of a rank of shards while its model is built, initialised or read from files: near its part, not near the model."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fabricate import Trainer, TrainModule
from fabricate.testing import run_ranks

WIDTH, LAYERS = 512, 16
WHOLE = 200
"""MiB of parameters, in float32, of either model; no layer has more than 4."""


class Drawn(TrainModule):
    """Initialised from the seed."""

    def configure_model(self) -> None:
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(WHOLE // 4))

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch.float()
        for layer in self.layers:
            x = layer(x)
        return x


class Read(TrainModule):
    """Read from safetensors."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def configure_model(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=batch.long()).logits
        return logits


def config() -> Any:
    """Of a Llama of 200 MiB."""
    return transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=12,
        num_attention_heads=8,
        vocab_size=1024,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def mebibytes(field: str) -> int:
    fields = Path("/proc/self/status").read_text().split()
    return int(fields[fields.index(f"{field}:") + 1]) // 1024


def peak(module: TrainModule, rows: torch.Tensor, strategy: str) -> tuple[int, float]:
    """MiB at most while `module` is built and predicts, and the sum of the predictions on rank 0."""
    gc.collect()  # of the model before
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = mebibytes("VmRSS")
    predicted = Trainer(strategy=strategy, seed=3, progress=False).predict(module, rows, batch_size=1)
    total = float(torch.stack(predicted).double().abs().sum()) if predicted else 0.0
    return mebibytes("VmHWM") - before, total


def peaks(path: str) -> dict[str, tuple[int, float]]:
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed counts no more
    numbers, tokens = torch.ones(2, 1024), torch.ones(2, 4)
    peak(Read(path), tokens, "fsdp")  # what is imported and started once
    return {
        "drawn in parts": peak(Drawn(), numbers, "fsdp"),
        "read in parts": peak(Read(path), tokens, "fsdp"),
        "drawn whole": peak(Drawn(), numbers, "ddp"),
        "read whole": peak(Read(path), tokens, "ddp"),
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config())
    assert WHOLE - 10 < sum(p.numel() for p in model.parameters()) * 4 / 2**20 < WHOLE + 10
    folder = str(tmp_path_factory.mktemp("llama"))
    model.save_pretrained(folder)
    return folder


def test_a_rank_of_shards_takes_little_more_than_its_part(path: str) -> None:
    ranks = run_ranks(peaks, 2, path, timeout=800)
    print(ranks)
    for rank in ranks:
        assert rank["drawn in parts"][0] < 0.7 * WHOLE, ranks
        assert rank["read in parts"][0] < 0.9 * WHOLE, ranks  # with the pages of the files that were touched
        assert rank["drawn whole"][0] > 0.95 * WHOLE, ranks
        assert rank["read whole"][0] > 0.95 * WHOLE, ranks
    for kind in ("drawn", "read"):
        assert ranks[0][f"{kind} in parts"][1] == pytest.approx(ranks[0][f"{kind} whole"][1], rel=1e-6)
