"""A dry run predicts the memory and messages of real ranks: each strategy is measured on two to four of them, and on tensors without
memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from fabricate import TrainModule
from fabricate.cli.main import main
from fabricate.selfcheck.dry_run.largest import largest
from fabricate.selfcheck.dry_run.trainer import DryTrainer
from fabricate.testing import run_ranks
from fabricate.testing.ranks import run_alone

WORDS, WIDTH, TOKENS, ROWS = 48, 24, 16, 4
CASES: dict[int, tuple[tuple[str, str, bool], ...]] = {
    1: (("single", "fp32", False), ("single", "fp32", True)),
    2: (
        ("ddp", "fp32", False),
        ("ddp:communication_hook=bf16", "bf16", False),
        ("fsdp", "fp32", False),
        ("fsdp", "bf16", True),
        ("fsdp:offload=cpu", "fp32", False),
        ("fsdp:accumulate=whole", "fp32", False),
        ("fsdp:tp=2", "fp32", False),
    ),
    3: (("ddp", "fp32", True), ("fsdp:activation_checkpointing=true", "fp32", False)),
    4: (("fsdp:shard=2", "fp32", False),),
}
"""By number of ranks: strategy, precision, and whether the Trainer recomputes activations."""


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attend(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        return x + torch.nn.functional.dropout(self.down(torch.relu(self.up(x))), 0.1, self.training)


class Blocks(torch.nn.Module):
    tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Net(TrainModule):
    """A small language model, some of whose labels do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)

    def configure_model(self) -> None:
        self.inner = Blocks()
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, labels = batch
        loss = cross_entropy(self.head(self.inner(self.words(x))).flatten(0, 1), labels.flatten())
        self.log("perplexity", loss.detach().exp())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)


class Real(DryTrainer):
    fake = False


def rows(number: int) -> TensorDataset:
    tokens = torch.randint(0, WORDS, (2, number, TOKENS), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens[0], torch.where(torch.arange(TOKENS) % 4 == 0, -100, tokens[1]))


def measured(kind: type[DryTrainer], case: tuple[str, str, bool], room: int | None = None) -> Any:
    strategy, precision, recompute = case
    trainer = kind(
        strategy=strategy,
        precision=precision,
        activation_checkpointing=recompute,
        max_steps=2,
        max_grad_norm=1.0,
        gradient_accumulation_steps=2,
        seed=1,
    )
    trainer.room = room
    trainer.fit(Net(), rows(64), batch_size=ROWS)
    return trainer.measured


def on_real_ranks(world_size: int) -> dict[Any, Any]:
    return {case: measured(Real, case) for case in CASES[world_size]}


def on_fakes() -> dict[Any, Any]:
    by_case = {}
    for world_size, cases in CASES.items():
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        os.environ.update(ranks if world_size > 1 else {}, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        if world_size == 1:
            for name in ranks:
                os.environ.pop(name, None)
        for case in cases:
            by_case[world_size, case] = measured(DryTrainer, case)
    return by_case


@pytest.fixture(scope="module")
def fakes() -> dict[Any, Any]:
    return run_alone(on_fakes, timeout=300)


@pytest.fixture(scope="module")
def real() -> dict[Any, Any]:
    return {
        (world_size, case): answer
        for world_size in CASES
        for case, answer in run_ranks(on_real_ranks, world_size, world_size, timeout=300)[0].items()
    }


EVERY = [(world_size, case) for world_size, cases in CASES.items() for case in cases]


@pytest.mark.parametrize("key", EVERY, ids=str)
def test_memory_by_kind_is_that_of_real_ranks(fakes: Any, real: Any, key: Any) -> None:
    dry, run = fakes[key], real[key]
    assert dry.at_peak == pytest.approx(run.at_peak, rel=0.05)
    assert dry.in_forward == pytest.approx(run.in_forward, rel=0.05)
    assert dry.gradients == pytest.approx(run.gradients, rel=0.05)


@pytest.mark.parametrize("key", EVERY, ids=str)
def test_collectives_are_those_of_real_ranks(fakes: Any, real: Any, key: Any) -> None:
    assert fakes[key].sent == real[key].sent
    assert bool(fakes[key].sent) == (key[0] > 1)


def test_the_largest_micro_batch_is_found_with_few_trials() -> None:
    tried: list[int] = []

    def peak(rows: int) -> int:
        tried.append(rows)
        return 1000 + 7 * rows

    assert largest(peak, 4, 10_000) == (1285, 9995)
    assert len(tried) <= 5
    assert largest(peak, 4, 1006) == (0, 1007)
    assert largest(peak, 1, 1006) == (0, 1007)
    assert largest(lambda rows: 5, 4, 10) == (None, 5)
    tried.clear()
    bent = lambda rows: peak(rows) if rows > 300 else 3100 + rows // 10  # noqa: E731
    assert largest(bent, 1, 10_000) == (1285, 9995)
    assert len(tried) <= 8


SCRIPT = """
import torch
from fabricate import Trainer, TrainModule
from torch.utils.data import TensorDataset


class Large(TrainModule):
    def __init__(self, width=20_000):
        super().__init__()
        self.inner = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(45)])

    def training_step(self, batch):
        (x,) = batch
        for layer in self.inner:
            x = torch.relu(layer(x))
        return x.mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


trainer = Trainer(max_steps=1)
trainer.fit(Large(), TensorDataset(torch.zeros(8, 20_000)), batch_size=1)
raise RuntimeError("a dry run ends with the first fit")
"""


def dry_run(script: Path, *options: str) -> tuple[str, int]:
    """What the command prints, and the most memory that it took in bytes."""
    log = script.with_suffix(".log")
    with log.open("wb") as output:
        command = [sys.executable, "-m", "fabricate", "plan", str(script), "--dry-run", *options]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    text = log.read_text()
    assert process.returncode == 0, text[-3000:]
    return text, usage.ru_maxrss * 1024


def test_an_explicit_single_node_is_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda file, arguments, environment: started.append(environment))
    script = tmp_path / "any.py"
    script.write_text("")
    for nodes in ([], ["--nnodes", "1"], ["--nnodes", "1", "--ranks-per-node", "4"]):
        CliRunner().invoke(main, ["plan", str(script), "--dry-run", "--nproc", "16", *nodes])
    assert [each["LOCAL_WORLD_SIZE"] for each in started if "LOCAL_WORLD_SIZE" in each] == ["8", "16", "4"]


def test_a_model_of_18_billion_parameters_on_1024_ranks_fits_on_this_machine(tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text(SCRIPT)
    text, memory = dry_run(script, "--nproc", "1024", "--strategy", "fsdp:shard=8", "--memory", "80GB")
    assert memory < 2e9
    assert "fsdp, fp32, on 1,024 ranks on 128 nodes of 8; 1 micro-batch of 1 row per update" in text
    parameters = next(line.split() for line in text.splitlines() if line.split()[:1] == ["parameters"])
    assert parameters[1:] == ["8.4", "GiB", "8.4", "GiB"], "18 billion numbers of 4 bytes, in 8 shards"
    assert "largest micro-batch within 74.5 GiB: " in text
