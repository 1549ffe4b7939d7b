"""A model larger than the memory of a process: in shards it trains, as replicas it ends with an error that names the memory needed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKS, WIDTH, LIMIT = 96, 2048, 1440
TOWER = f'''
import sys, torch
from fabricate import FSDP, Callback, Trainer, TrainModule
from torch.utils.data import TensorDataset

class Tower(TrainModule):
    """{BLOCKS} layers of 16 MiB in float32, of which the last two train."""
    def configure_model(self):
        self.blocks = torch.nn.ModuleList(torch.nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({BLOCKS}))
        for block in self.blocks[:-2]:
            block.requires_grad_(False)

    def init_weights(self, submodule):
        submodule.weight.fill_(1 / {WIDTH})

    def training_step(self, batch):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x.mean()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

trainer = Trainer(max_steps=1, seed=1, progress=False, print_plan="full", strategy=sys.argv[1])
result = trainer.fit(Tower(), TensorDataset(torch.ones(2, {WIDTH})), batch_size=1)
print(f"trained {{result.steps}}")  # one piece, which the other rank cannot come between
'''
PARAMETERS = BLOCKS * WIDTH * WIDTH * 4 / 2**20


def limited(path: Path, strategy: str) -> subprocess.CompletedProcess[str]:
    """The tower on two ranks, each of which may have LIMIT MiB of data."""
    assert PARAMETERS > LIMIT, "the parameters alone are more than a process may have"
    script = path / "tower.py"
    script.write_text(TOWER)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT * 2**20, LIMIT * 2**20))

    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MALLOC_MMAP_THRESHOLD_": str(2**20),  # else the C library keeps what units freed
    }
    command = [sys.executable, "-m", "fabricate", "run", str(script), "--nproc", "2", "--", strategy]
    return subprocess.run(
        command, cwd=path, env=environment, preexec_fn=limit, capture_output=True, text=True, timeout=800
    )


@pytest.mark.timeout(900)
def test_a_model_larger_than_a_process_may_be_trains_in_shards_which_auto_chooses(tmp_path: Path) -> None:
    process = limited(tmp_path, "auto")
    assert process.returncode == 0, process.stderr[-4000:]
    assert process.stdout.count("trained 1") == 2
    line = next(line for line in process.stdout.splitlines() if line.startswith("  strategy"))
    assert "fsdp  [auto: 2 processes; a replica takes 1.6 GiB, more than 1.4 GiB (ulimit -d)]" in line
    assert "ddp not within 1.4 GiB (ulimit -d)" in process.stdout


@pytest.mark.timeout(900)
def test_deepspeeds_shards_train_a_model_larger_than_a_process_may_be(tmp_path: Path) -> None:
    """Its buckets are no larger than what is trained."""
    process = limited(tmp_path, "zero3")
    assert process.returncode == 0, process.stderr[-4000:]
    assert process.stdout.count("trained 1") == 2
    assert "bucket 32.0 MiB" in process.stdout


@pytest.mark.timeout(900)
def test_a_model_too_large_for_replicas_ends_with_what_takes_the_memory_and_what_helps(tmp_path: Path) -> None:
    process = limited(tmp_path, "ddp")
    assert process.returncode == 1
    assert "trained" not in process.stdout
    text = process.stderr
    assert "out of memory on rank" in text
    assert "strategy='ddp' keeps about 1.6 GiB on each rank (parameters 1.5 GiB, gradients 32.0 MiB" in text
    assert "a rank has 1.4 GiB (ulimit -d). What helps: divide them over more ranks with strategy='fsdp'" in text
