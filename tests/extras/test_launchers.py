"""One script, unchanged, under every launcher: the same losses for the same global batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fabricate.testing.ranks import free_port

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"
NOTEBOOK = Path(__file__).parents[1] / "scripts" / "notebook.py"
FILES = Path(__file__).parents[2] / "examples" / "configs"
LIMIT_SECONDS = 800
pytestmark = pytest.mark.timeout(900)
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 2
main_training_function: main
rdzv_backend: static
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Linear
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_use_orig_params: true
"""
# As `accelerate config` writes them.
REPLICAS = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: {kind}
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: {use_cpu}
"""
DEEPSPEED = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 2
deepspeed_config:
  deepspeed_config_file: {file}
  zero3_init_flag: false
"""


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]


def accelerate(*flags: str) -> list[str]:
    return [sys.executable, "-m", "accelerate.commands.launch", *flags]


def fabricate(*flags: str) -> list[str]:
    return [sys.executable, "-m", "fabricate", "run", str(SCRIPT), *flags, "--"]


def yaml(root: Path, name: str, text: str) -> str:
    (root / name).write_text(text)
    return str(root / name)


def srun(port: str) -> list[str]:
    """What `srun` gives each of two tasks, by hand: nothing here has SLURM. Both end, or the first that fails is told."""
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "MASTER_PORT": port,
    }
    each = " ".join(f"{name}={value}" for name, value in variables.items())
    task = f'{each} SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks="$tasks $!"'
    wait = "code=0; for task in $tasks; do wait $task || code=$?; done; exit $code"
    return ["sh", "-c", f"for task in 0 1; do {task}; done; {wait}", "srun", sys.executable]


def started(root: Path) -> dict[str, list[str]]:
    """The command lines. A name is also the name of the run directory."""
    gpus = yaml(root, "gpus.yaml", REPLICAS.format(kind="MULTI_GPU", use_cpu="false"))
    cpus = yaml(root, "cpus.yaml", REPLICAS.format(kind="MULTI_CPU", use_cpu="true"))
    fsdp, stage2 = yaml(root, "fsdp.yaml", FSDP), str(FILES / "deepspeed_zero2.json")
    deepspeed = yaml(root, "deepspeed.yaml", DEEPSPEED.format(file=stage2))
    run = {
        "python": [sys.executable, str(SCRIPT)],
        "python-ddp": ["env", "FABRICATE_STRATEGY=ddp", sys.executable, str(SCRIPT)],
        "fabricate-offload": fabricate("--nproc", "1", "--strategy", "zero2:offload_optimizer=cpu"),
        "torchrun": [*torchrun(), str(SCRIPT)],
        "accelerate": [*accelerate(), str(SCRIPT)],
        "accelerate-gpus-file": [
            *accelerate("--config_file", gpus, "--main_process_port", str(free_port())),
            str(SCRIPT),
        ],
        "accelerate-cpus-file": [
            *accelerate("--config_file", cpus, "--main_process_port", str(free_port())),
            str(SCRIPT),
        ],
        "fabricate-cpus-file": fabricate("--config", cpus),
        "accelerate-fsdp-file": [
            *accelerate("--config_file", fsdp, "--main_process_port", str(free_port())),
            str(SCRIPT),
        ],
        "accelerate-deepspeed-file": [
            *accelerate("--config_file", deepspeed, "--main_process_port", str(free_port())),
            str(SCRIPT),
        ],
        "fabricate-fsdp": fabricate("--nproc", "2", "--strategy", "fsdp"),
        "fabricate-fsdp-file": fabricate("--config", fsdp),
        "fabricate-deepspeed-file": fabricate("--nproc", "2", "--config", str(FILES / "deepspeed_zero3.json")),
        "srun": [*srun(str(free_port())), str(SCRIPT)],
        "notebook": [sys.executable, str(NOTEBOOK), str(free_port())],
    }
    return {name: [*command, str(root / name)] for name, command in run.items()} | {
        "failing": [*torchrun(), str(SCRIPT), str(root / "failing"), "--fails"]
    }


@dataclass
class Ended:
    code: int
    output: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Ended]]:
    """What each of the commands wrote and how it ended; three run at a time, for the sake of two cores."""
    root = tmp_path_factory.mktemp("launchers")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FABRICATE_", "MASTER_"))}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(root / "no-config-here")}
    waiting, running = started(root), dict[str, Any]()
    by_launcher: dict[str, Ended] = {}
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
                    by_launcher[name] = Ended(process.returncode, (root / f"{name}.txt").read_text())
                    del running[name]
            assert time.monotonic() < deadline, f"still running: {sorted(running)}"
            time.sleep(0.05)
    finally:
        for process in running.values():
            process.terminate()
            process.wait()
    return root, by_launcher


def losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"]["loss"] for line in lines if line["stage"] == "train"]


def setting(run_dir: Path, name: str) -> Any:
    """A line of the plan: its value, and where that is from."""
    entry = json.loads((run_dir / "plan.json").read_text())["settings"][name]
    return entry["value"], entry["source"]


def settings(run_dir: Path) -> dict[str, Any]:
    return {name: setting(run_dir, name)[0] for name in ("world_size", "strategy", "precision", "global_batch_size")}


@pytest.mark.parametrize(
    ("name", "world_size", "strategy"),
    [
        ("python", 1, "single"),
        ("python-ddp", 1, "ddp"),
        ("fabricate-offload", 1, "zero2"),
        ("torchrun", 2, "ddp"),
        ("accelerate", 1, "single"),
        ("accelerate-gpus-file", 2, "ddp"),
        ("fabricate-cpus-file", 2, "ddp"),
        ("fabricate-fsdp", 2, "fsdp"),
        ("srun", 2, "ddp"),
    ],
)
def test_the_same_script_computes_the_same_under_every_launcher(
    ended: tuple[Path, dict[str, Ended]], name: str, world_size: int, strategy: str
) -> None:
    root, by_launcher = ended
    assert by_launcher[name].code == 0, by_launcher[name].output
    assert settings(root / name) == {
        "world_size": world_size,
        "strategy": strategy,
        "precision": "fp32",
        "global_batch_size": 12,
    }
    assert len(losses(root / name)) == 8
    assert losses(root / name) == pytest.approx(losses(root / "python"), rel=1e-5)
    assert by_launcher[name].output.count("  runs on  ") == 1, "by rank 0 only"


@pytest.mark.parametrize(
    ("name", "strategy", "precision", "source"),
    [
        ("accelerate-fsdp-file", "fsdp", "bf16", "ACCELERATE_MIXED_PRECISION"),
        ("fabricate-fsdp-file", "fsdp", "bf16", "FABRICATE_PRECISION"),
        ("accelerate-deepspeed-file", "zero2", "fp16", "fp16.enabled in "),
        ("fabricate-deepspeed-file", "zero3", "fp16", "fp16.enabled in "),
    ],
)
def test_the_files_that_users_of_accelerate_have_are_kept(
    ended: tuple[Path, dict[str, Ended]], name: str, strategy: str, precision: str, source: str
) -> None:
    """As they are, with `accelerate launch` or `fabricate run`, for a script that knows nothing of them."""
    root, by_launcher = ended
    assert by_launcher[name].code == 0, by_launcher[name].output
    wanted = {"world_size": 2, "strategy": strategy, "precision": precision, "global_batch_size": 12}
    assert settings(root / name) == wanted
    assert source in setting(root / name, "precision")[1]
    if strategy == "fsdp":
        assert losses(root / name) == pytest.approx(losses(root / "python"), rel=0.01)
        assert losses(root / name) != pytest.approx(losses(root / "python"), rel=1e-5), "bf16 was to be used"
        assert setting(root / name, "offload")[0] == "shards and the update in host memory"
        return
    # The loss scale of the files begins so high that updates are left out: one stage is compared with the other.
    other = {"zero2": "fabricate-deepspeed-file", "zero3": "accelerate-deepspeed-file"}[strategy]
    assert len(losses(root / name)) == 8
    assert losses(root / name) == pytest.approx(losses(root / other), rel=0.01)
    clipping = setting(root / name, "clipping")
    assert clipping[0] == "to the norm 1"
    assert clipping[1].startswith("by DeepSpeed, once per update; gradient_clipping in ")


def test_a_notebook_trains_on_two_processes_after_it_trained_on_one(ended: tuple[Path, dict[str, Ended]]) -> None:
    """Threads of the notebook's own computations do not survive the fork; ranks compute all the same."""
    root, by_launcher = ended
    assert by_launcher["notebook"].code == 0, by_launcher["notebook"].output
    wanted = {"world_size": 2, "strategy": "ddp", "precision": "bf16", "global_batch_size": 12}
    assert settings(root / "notebook") == wanted
    assert setting(root / "notebook", "precision")[1] == "MIXED_PRECISION"
    assert (
        "one thread per rank instead of 2: a forked process does not have the threads of its parent"
        in by_launcher["notebook"].output
    )
    assert losses(root / "notebook") == pytest.approx(losses(root / "python"), rel=0.05)


def test_processes_that_accelerate_launch_would_not_start_are_an_error_that_says_how(
    ended: tuple[Path, dict[str, Ended]],
) -> None:
    root, by_launcher = ended
    assert by_launcher["accelerate-cpus-file"].code != 0
    assert "asked for several processes and started one" in by_launcher["accelerate-cpus-file"].output
    assert (
        "accelerate launch --multi_gpu --num_processes N script.py` (on a CPU as well)"
        in by_launcher["accelerate-cpus-file"].output
    )
    assert not (root / "accelerate-cpus-file").exists()


def test_a_rank_that_fails_ends_all_of_them_and_says_why_once(ended: tuple[Path, dict[str, Ended]]) -> None:
    failing = ended[1]["failing"]
    assert failing.code != 0
    assert failing.output.count("failing now") == 1
    assert "ValueError: rank 1 has had enough" in failing.output
    assert failing.output.count('    raise ValueError("rank 1 has had enough")') == 1, (
        "one traceback, of the rank that failed"
    )
    assert failing.output.count("Traceback (most recent call last)") == 2, "the other one is torchrun's own"
    assert "\nrank 0 stopped because of that\n" in failing.output
    _, _, summary = failing.output.rpartition("Root Cause")
    assert "rank 1 failed: ValueError: rank 1 has had enough" in summary
    assert 'train.py:44, in training_step: raise ValueError("rank 1 has had enough")' in summary
    assert "correct it and start the same command again: nothing is saved" in summary
    assert "while training: rank 1, epoch 0, step 3" in failing.output
