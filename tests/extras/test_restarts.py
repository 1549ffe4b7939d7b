"""`fabricate run --max-restarts`: killed ranks start again, and the run ends like an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from fabricate import Callback, Trainer, TrainModule

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def training_step(self, batch):
        time.sleep(0.01)
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

class Pids(Callback):
    def on_fit_start(self):
        Path(sys.argv[2], f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}-{os.getpid()}").touch()

torch.manual_seed(1)
rows = torch.randn(64, 4)
trainer = Trainer(max_steps=150, seed=1, run_dir=sys.argv[1], save_every=10, log_every=5, progress=False, plugins=[Pids()])
trainer.fit(Module(), rows, batch_size=4)
"""
KILLS, RANKS = 3, 2


def command(folder: Path, run_dir: str, *options: str, ranks: int = RANKS) -> list[str]:
    run = [sys.executable, "-m", "fabricate", "run", "train.py", "--nproc", str(ranks), "--shutdown-timeout", "3"]
    (folder / f"pids-{run_dir}").mkdir(exist_ok=True)
    return [*run, *options, "--", run_dir, f"pids-{run_dir}"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_killed_at_random_moments_end_as_if_undisturbed(folder: Path, strategy: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    whole = command(folder, "whole", "--strategy", strategy)
    subprocess.run(whole, cwd=folder, env=environment, check=True, capture_output=True)
    killed = command(folder, "killed", "--strategy", strategy, "--max-restarts", str(KILLS))
    drawn = random.Random(f"{strategy} {time.time()}")
    with (folder / "output").open("w") as output:
        running = subprocess.Popen(killed, cwd=folder, env=environment, stdout=output, stderr=output)
        try:
            for restart in range(KILLS):
                deadline = time.monotonic() + 120
                while len(pids := list((folder / "pids-killed").glob(f"{restart}-*"))) < RANKS:
                    assert running.poll() is None, (folder / "output").read_text()
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                time.sleep(drawn.uniform(0, 0.8))
                os.kill(int(drawn.choice(pids).name.rpartition("-")[2]), signal.SIGKILL)
            assert running.wait(300) == 0, (folder / "output").read_text()
        finally:
            running.kill()
    assert f"restart {KILLS} of {KILLS}: all ranks start again" in (folder / "output").read_text()
    compared = [sys.executable, "-m", "fabricate", "diff", "whole", "killed"]
    process = subprocess.run(compared, cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout


def test_the_ranks_of_all_nodes_start_again_after_one_was_killed_in_a_fit(folder: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command(folder, "whole"), cwd=folder, env=environment, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
    with (folder / "output").open("w") as output:
        nodes = []
        for node in ("0", "1"):
            options = (*meeting, "--max-restarts", "2", "--node-rank", node)
            run = command(folder, "killed", *options, ranks=1)
            nodes.append(subprocess.Popen(run, cwd=folder, env=environment, stdout=output, stderr=output))
        try:
            deadline = time.monotonic() + 120
            while not list((folder / "killed" / "checkpoints").glob("step-*")):
                assert time.monotonic() < deadline, (folder / "output").read_text()
                time.sleep(0.01)
            one = random.Random(time.time()).choice(list((folder / "pids-killed").iterdir()))
            os.kill(int(one.name.rpartition("-")[2]), signal.SIGKILL)
            assert [node.wait(300) for node in nodes] == [0, 0], (folder / "output").read_text()
        finally:
            for node_process in nodes:
                node_process.kill()
    assert "resumed from" in (folder / "output").read_text()
    compared = [sys.executable, "-m", "fabricate", "diff", "whole", "killed"]
    process = subprocess.run(compared, cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout


def test_an_error_in_the_configuration_is_not_tried_again(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("max_steps=150", "max_steps=0.5"))
    run = command(folder, "wrong", "--max-restarts", "5")
    process = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr.count("Traceback (most recent call last)") == 1
    assert "all ranks start again" not in process.stderr
    assert "correct it and start the same command again" in process.stderr.splitlines()[-1]
