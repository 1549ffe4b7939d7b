"""One script, unchanged, under every launcher: the same losses for the same global batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
LIMIT_SECONDS = 240


def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port()]


def accelerate(*flags: str) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", *flags]


def fabricate(*flags: str) -> list[str]:
    return [sys.executable, "-m", "fabricate", "run", str(SCRIPT), *flags, "--"]


def started(root: Path) -> dict[str, list[str]]:
    """The command lines. A name is also the name of the run directory."""
    both = ["--multi_gpu", "--num_processes", "2", "--main_process_port", port()]
    run = {
        "python": [sys.executable, str(SCRIPT)],
        "torchrun": [*torchrun(), str(SCRIPT)],
        "accelerate": [*accelerate(), str(SCRIPT)],
        "accelerate-multi": [*accelerate(*both), str(SCRIPT)],
        "accelerate-cpu": [*accelerate("--cpu", "--num_processes", "2"), str(SCRIPT)],
        "fabricate-fsdp": fabricate("--nproc", "2", "--strategy", "fsdp"),
    }
    return {name: [*command, str(root / name)] for name, command in run.items()} | {
        "failing": [*torchrun(), str(SCRIPT), str(root / "failing"), "--fails"]
    }


@dataclass
class Ended:
    code: int
    output: str
    at: float


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ended]]:
    """What each of the commands wrote and how it ended; three run at a time, for the sake of two cores."""
    root = tmp_path_factory.mktemp("launchers")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FABRICATE_", "MASTER_"))}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(root / "no-config-here")}
    waiting, running = started(root), dict[str, Any]()
    found: dict[str, Ended] = {}
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while waiting or running:
            while waiting and len(running) < 3:
                name = next(iter(waiting))
                with (root / f"{name}.txt").open("wb") as output:
                    running[name] = subprocess.Popen(
                        waiting.pop(name), env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                    )
            for name, process in list(running.items()):
                if process.poll() is not None:
                    found[name] = Ended(process.returncode, (root / f"{name}.txt").read_text(), time.time())
                    del running[name]
            assert time.monotonic() < deadline, f"still running: {sorted(running)}"
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.terminate()
            process.wait()
    return root, found


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"]["loss"] for line in lines if line["stage"] == "train"]


def settings(run_dir: Path) -> dict[str, Any]:
    plan = json.loads((run_dir / "plan.json").read_text())["settings"]
    return {name: plan[name]["value"] for name in ("world_size", "strategy", "precision", "global_batch_size")}


@pytest.mark.parametrize(
    ("name", "world_size", "strategy"),
    [
        ("python", 1, "single"),
        ("torchrun", 2, "ddp"),
        ("accelerate", 1, "single"),
        ("accelerate-multi", 2, "ddp"),
        ("fabricate-fsdp", 2, "fsdp"),
    ],
)
def test_the_same_script_computes_the_same_under(
    ended: tuple[Path, dict[str, Ended]], name: str, world_size: int, strategy: str
) -> None:
    root, found = ended
    assert found[name].code == 0, found[name].output
    assert settings(root / name) == {
        "world_size": world_size,
        "strategy": strategy,
        "precision": "fp32",
        "global_batch_size": 12,
    }
    assert len(losses(root / name)) == 8
    assert losses(root / name) == pytest.approx(losses(root / "python"), rel=1e-5)
    assert found[name].output.count("fabricate plan") == 1, "by rank 0 only"


def test_processes_that_accelerate_launch_would_not_start_are_an_error_that_says_how(
    ended: tuple[Path, dict[str, Ended]],
) -> None:
    root, found = ended
    assert found["accelerate-cpu"].code != 0
    assert "asked for several processes and started one" in found["accelerate-cpu"].output
    assert (
        "accelerate launch --multi_gpu --num_processes N script.py` (on a CPU as well)"
        in found["accelerate-cpu"].output
    )
    assert not (root / "accelerate-cpu").exists()


def test_a_rank_that_fails_ends_all_of_them_soon_and_says_why_once(ended: tuple[Path, dict[str, Ended]]) -> None:
    failing = ended[1]["failing"]
    assert failing.code != 0
    (failed_at,) = (float(line.split()[-1]) for line in failing.output.splitlines() if "failing at" in line)
    assert failing.at - failed_at < 20
    assert "ValueError: rank 1 has had enough" in failing.output
    assert failing.output.count('raise ValueError("rank 1 has had enough")') == 1, (
        "one traceback, of the rank that failed"
    )
    assert "while training: rank 1, epoch 0, step 3" in failing.output
