"""The launcher of this process, and the arguments that `fabricate run` passes to torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fabricate.errors import ConfigurationError, FabricateError, RankError
from fabricate.launch.commands import command, environment, listed_plugins
from fabricate.launch.ranks import Launch, detect
from fabricate.launch.settings import requests
from fabricate.launch.variables import Request

RANKED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "node[003-005,7],login1",
}
SHOW = """
import json, os, sys
names = ("RANK", "WORLD", "LOCAL", "GROUP", "MASTER", "ACCELERATE", "FSDP", "TORCHELASTIC")
variables = {name: value for name, value in os.environ.items() if name.startswith(names)}
sys.stdout.write(json.dumps(variables) + chr(10))
"""


def _launched(tmp_path: Path, *launcher: str) -> list[dict[str, str]]:
    """The variables that each process of a real launcher gets, by rank."""
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    base = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-m", *launcher, str(script)], env=base, capture_output=True, text=True, check=True
    )
    # Two ranks may write into one line.
    lines = process.stdout.replace("}{", "}\n{").splitlines()
    return sorted((json.loads(line) for line in lines if line.strip()), key=lambda environ: int(environ.get("RANK", 0)))


def test_a_plain_process_is_the_only_rank() -> None:
    assert detect({"PATH": "/bin"}) == Launch("python")


@pytest.mark.parametrize(
    ("marks", "launcher"),
    [
        ({}, "other"),
        ({"TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        ({"TORCHELASTIC_RUN_ID": "x", "ACCELERATE_MIXED_PRECISION": "no"}, "accelerate"),
        ({"TORCHELASTIC_RUN_ID": "x", "FABRICATE_LAUNCHED": "1"}, "fabricate"),
    ],
)
def test_each_launcher_is_known_by_its_variables(marks: dict[str, str], launcher: str) -> None:
    launch = detect(RANKED | marks)
    assert (launch.launcher, launch.rank, launch.local_rank, launch.world_size) == (launcher, 3, 1, 4)
    assert (launch.local_world_size, launch.node_rank, launch.environment) == (2, 1, {})


def test_a_single_process_of_fabricate_run_is_named_as_such() -> None:
    assert detect({"FABRICATE_LAUNCHED": "1"}) == Launch("fabricate")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": None}, "RANK is not set"),
        ({"RANK": "4"}, "RANK=4 with WORLD_SIZE=4"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"RANK": "-1"}, "RANK='-1' is not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": None}, "without LOCAL_RANK"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "without MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_variables_of_a_rank_that_do_not_fit_are_an_error(changes: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in (RANKED | changes).items() if value is not None}
    with pytest.raises(RankError, match=message):
        detect(environ)


@pytest.mark.parametrize("prefix", ["OMPI_COMM_WORLD", "PMI", "MV2_COMM_WORLD"])
def test_mpirun_without_ranks_is_an_error(prefix: str) -> None:
    with pytest.raises(RankError, match=rf"mpirun started 2 processes \({prefix}_SIZE=2\).*fabricate run"):
        detect({f"{prefix}_SIZE": "2", f"{prefix}_RANK": "0"})
    assert detect({f"{prefix}_SIZE": "1"}).launcher == "python"


def test_srun_tasks_are_ranks() -> None:
    launch = detect(SRUN)
    assert (launch.launcher, launch.rank, launch.world_size) == ("slurm", 5, 6)
    assert (launch.local_rank, launch.local_world_size, launch.node_rank) == (1, 2, 1)
    port = launch.environment.pop("MASTER_PORT")
    assert 10_000 <= int(port) < 30_000
    assert launch.environment == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node003",
    }


def test_the_port_under_srun_differs_between_jobs_and_steps_and_not_between_ranks() -> None:
    def port(**changes: str) -> str:
        return detect(SRUN | changes).environment["MASTER_PORT"]

    assert port() == port(SLURM_PROCID="4", SLURM_LOCALID="0")
    assert len({port(), port(SLURM_JOB_ID="4712"), port(SLURM_STEP_ID="1")}) == 3


def test_an_exported_master_address_is_kept_under_srun() -> None:
    launch = detect(SRUN | {"MASTER_ADDR": "fast", "MASTER_PORT": "1234"})
    assert (launch.environment["MASTER_ADDR"], launch.environment["MASTER_PORT"]) == ("fast", "1234")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[003-005,7],login1", "node003"),
        ("node7", "node7"),
        ("a,b", "a"),
        ("r[1-2]n[08,09]-ib,x", "r1n08-ib"),
        ("gpu-1.site", "gpu-1.site"),
    ],
)
def test_rank_0_is_on_the_first_host_of_the_node_list(nodes: str, first: str) -> None:
    assert detect(SRUN | {"SLURM_STEP_NODELIST": nodes}).environment["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("tasks", "node_rank", "expected"), [("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("2", 0, 2), ("2(x3)", 2, 2)]
)
def test_the_tasks_of_a_node_are_read_from_the_compressed_list(tasks: str, node_rank: int, expected: int) -> None:
    launch = detect(SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node_rank)})
    assert launch.local_world_size == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_ID": "4294967291"},  # the batch script itself
        {"SLURM_STEP_ID": "4294967290"},  # an interactive shell in an allocation
        {"SLURM_STEP_NUM_TASKS": "1"},  # srun -n 1 in a larger allocation
    ],
)
def test_one_process_in_an_allocation_is_not_a_rank_of_it(changes: dict[str, str]) -> None:
    assert detect(SRUN | changes) == Launch("python")


def test_srun_through_pmi2_is_not_mistaken_for_mpirun() -> None:
    assert detect(SRUN | {"PMI_SIZE": "6", "PMI_RANK": "5"}).launcher == "slurm"
    with pytest.raises(RankError, match="mpirun"):
        detect(SRUN | {"PMI_SIZE": "12", "PMI_RANK": "5"})


def test_srun_without_a_node_list_is_an_error() -> None:
    with pytest.raises(RankError, match="export MASTER_ADDR"):
        detect(SRUN | {"SLURM_STEP_NODELIST": ""})


def test_accelerate_launch_that_started_one_of_two_is_an_error(tmp_path: Path) -> None:
    (environ,) = _launched(tmp_path, "accelerate.commands.launch", "--cpu", "--num_processes", "2")
    with pytest.raises(RankError, match="asked for several processes and started one") as caught:
        detect(environ)
    for remedy in ("fabricate run", "torchrun --nproc-per-node", "accelerate launch --multi_gpu"):
        assert remedy in str(caught.value)


def test_accelerate_launch_with_one_process_is_one_rank_and_no_request(tmp_path: Path) -> None:
    (environ,) = _launched(tmp_path, "accelerate.commands.launch", "--num_processes", "1")
    assert detect(environ) == Launch("accelerate")
    assert requests(environ) == {}


def test_accelerate_launch_multi_gpu_starts_ranks_on_a_cpu_too(tmp_path: Path) -> None:
    flags = ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    ranks = _launched(tmp_path, "accelerate.commands.launch", *flags)
    assert [detect(environ) for environ in ranks] == [Launch("accelerate", r, r, 2, 2, 0) for r in range(2)]
    assert requests(ranks[0]) == {}


def test_the_flags_of_accelerate_launch_are_requests(tmp_path: Path) -> None:
    flags = ("--use_fsdp", "--fsdp_offload_params", "true", "--mixed_precision", "bf16", "--num_processes", "1")
    (environ,) = _launched(tmp_path, "accelerate.commands.launch", "--main_process_port", "0", *flags)
    assert detect(environ) == Launch("accelerate")
    assert requests(environ) == {
        "strategy": Request("fsdp:offload=cpu", "ACCELERATE_USE_FSDP"),
        "precision": Request("bf16", "ACCELERATE_MIXED_PRECISION"),
    }


def test_torchrun_ranks_are_found(tmp_path: Path) -> None:
    ranks = _launched(tmp_path, "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert [detect(environ) for environ in ranks] == [Launch("torchrun", r, r, 2, 2, 0) for r in range(2)]


def test_one_rank_needs_no_torchrun() -> None:
    assert command("s.py", ["--lr", "1"], nproc=1, python="py") == [
        "py",
        "-m",
        "fabricate.cli.runner",
        "--alone",
        "--",
        "s.py",
        "--lr",
        "1",
    ]


def test_the_ranks_of_one_node_meet_by_themselves() -> None:
    line = command("s.py", ["--log"], nproc=2, python="py")
    assert line == [
        "py",
        "-m",
        "fabricate.cli.runner",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--module",
        "--",
        "fabricate.cli.rank",
        "s.py",
        "--log",
    ]


def test_torchrun_counts_devices_and_binds_ranks_to_cores() -> None:
    for count in ("gpu", "auto"):
        line = command("s.py", [], nproc=count, numa_binding="node", python="py")
        assert line[3:] == [
            "--standalone",
            "--numa-binding",
            "node",
            "--nproc-per-node",
            count,
            "--module",
            "--",
            "fabricate.cli.rank",
            "s.py",
        ]
        assert "OMP_NUM_THREADS" not in environment({}, nproc=count)
    assert "--nproc-per-node" in command("s.py", [], nproc=1, numa_binding="node"), "one rank is bound by torchrun too"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc", "gpu"], "--nproc: torchrun cannot count the devices of this machine (Cuda is not available."),
        (
            ["--numa-binding", "node"],
            "--numa-binding: torch binds ranks to cores near NVIDIA GPUs, and there are none here",
        ),
        (["--nproc", "gpus"], "'gpus' is not a number of processes. Give a number, 'gpu' or 'auto'"),
    ],
)
def test_what_needs_gpus_says_that_there_are_none(options: list[str], message: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "fabricate", "run", __file__, *options], capture_output=True, text=True
    )
    assert process.returncode == 2
    assert message in process.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nproc": 0}, "--nproc 0"),
        ({"nproc": 1, "nnodes": 0}, "--nnodes 0"),
        ({"nproc": 1, "nnodes": 2}, "without --master-addr"),
        ({"nproc": 1, "nnodes": 2, "node_rank": 2, "master_addr": "a"}, "--node-rank 2 --nnodes 2"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        command("s.py", [], **settings)


def test_plugins_are_listed_with_semicolons_and_their_options_with_commas() -> None:
    assert listed_plugins(" ema:decay=0.9,start=10;no:wandb ;") == ["ema:decay=0.9,start=10", "no:wandb"]
    assert listed_plugins("") == []


def test_settings_travel_as_variables() -> None:
    base = {"FABRICATE_PLUGINS": "ema", "OMP_NUM_THREADS": "3"}
    variables = environment(base, nproc=2, strategy="ddp", precision="bf16", plugins=["wandb", "ema"], plan_only=True)
    assert base == {"FABRICATE_PLUGINS": "ema", "OMP_NUM_THREADS": "3"}
    assert variables == {
        "FABRICATE_LAUNCHED": "1",
        "FABRICATE_PLAN_ONLY": "1",
        "FABRICATE_PLUGINS": "ema;wandb",
        "FABRICATE_PRECISION": "bf16",
        "FABRICATE_STRATEGY": "ddp",
        "OMP_NUM_THREADS": "3",
    }


def test_ranks_that_may_be_restarted_open_a_new_store_each_time() -> None:
    assert environment({}, nproc=2, max_restarts=1)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_several_ranks_share_the_cores_and_one_is_left_alone() -> None:
    cores = len(os.sched_getaffinity(0))
    assert environment({}, nproc=2)["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert environment({}, nproc=10_000)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment({}, nproc=1)


@pytest.mark.parametrize(
    ("base", "settings", "message"),
    [
        ({"FABRICATE_STRATEGY": "ddp"}, {"strategy": "fsdp"}, "'ddp' and this command 'fsdp'"),
        ({}, {"plugins": ["ema;wandb"]}, "repeat --plugin for each of them"),
        ({}, {"plugins": ["ema,wandb"]}, "'ema,wandb' is not a name. Separate plugins with a semicolon"),
        (
            {"FABRICATE_PLUGINS": "ema,wandb"},
            {"plugins": ["x"]},
            "'ema,wandb' is not a name. Separate plugins with a semicolon",
        ),
    ],
)
def test_an_environment_that_contradicts_the_command_is_refused(
    base: dict[str, str], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(FabricateError, match=message):
        environment(base, **settings)


def test_importing_it_imports_neither_torch_nor_accelerate() -> None:
    code = "import sys, fabricate.launch; assert not {'torch', 'accelerate', 'yaml'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
