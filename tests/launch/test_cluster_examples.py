"""The scripts in examples/cluster, with stand-ins for the commands of a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
SRUN = """#!/bin/bash
trap 'echo saved >> log; exit 75' USR1
echo "srun $*" >> log
[ -n "$FAILS" ] && exit 3
[ -n "$ENDS" ] && exit 0
while true; do sleep 0.05; done
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A cluster of three commands, which write to the file `log`."""
    for name, text in {
        "srun": SRUN,
        "scontrol": '#!/bin/bash\necho "scontrol $*" >> log\n',
        "fabricate": '#!/bin/bash\necho "fabricate $*" >> log\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def test_a_slurm_job_saves_before_its_time_is_up_and_is_queued_again(
    environment: dict[str, str], tmp_path: Path
) -> None:
    job = subprocess.Popen(["bash", str(CLUSTER / "slurm.sh")], env=environment, cwd=tmp_path)
    while not (tmp_path / "log").exists():
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 75
    assert log(tmp_path) == ["srun --kill-on-bad-exit=1 python train.py", "saved", "scontrol requeue 7"]


@pytest.mark.parametrize(("how", "code"), [("FAILS", 3), ("ENDS", 0)])
def test_a_slurm_job_that_ends_or_fails_is_not_queued_again(
    environment: dict[str, str], tmp_path: Path, how: str, code: int
) -> None:
    process = subprocess.run(
        ["bash", str(CLUSTER / "slurm.sh")], env=environment | {how: "1"}, cwd=tmp_path, check=False
    )
    assert process.returncode == code
    assert log(tmp_path) == ["srun --kill-on-bad-exit=1 python train.py"]


def test_a_job_of_skypilot_starts_a_rank_per_gpu(environment: dict[str, str], tmp_path: Path) -> None:
    job: dict[str, Any] = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    gpus = {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    subprocess.run(["bash", "-c", job["run"]], env=environment | gpus, cwd=tmp_path, check=True)
    assert log(tmp_path) == ["fabricate run train.py --nproc 8 --max-restarts 3 -- --run-dir /runs/train"]
