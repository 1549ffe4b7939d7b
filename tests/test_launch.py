"""Who started this process, what it was told, and what `fabricate run` hands to torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fabricate.errors import ConfigurationError, FabricateError, RankError
from fabricate.launch import (
    Launch,
    Request,
    command,
    detect,
    environment,
    fsdp_keys,
    listed_plugins,
    read_config,
    requests,
)

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
told = {name: value for name, value in os.environ.items() if name.startswith(names)}
sys.stdout.write(json.dumps(told) + chr(10))
"""


def _launched(tmp_path: Path, *launcher: str) -> list[dict[str, str]]:
    """The variables that each process of a real launcher gets, by rank."""
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    base = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(script)], env=base, capture_output=True, text=True, check=True
    )
    # Two ranks may write into one line.
    lines = done.stdout.replace("}{", "}\n{").splitlines()
    return sorted((json.loads(line) for line in lines if line.strip()), key=lambda told: int(told.get("RANK", 0)))


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
    found = detect(RANKED | marks)
    assert (found.launcher, found.rank, found.local_rank, found.world_size) == (launcher, 3, 1, 4)
    assert (found.local_world_size, found.node_rank, found.environment) == (2, 1, {})


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
    found = detect(SRUN)
    assert (found.launcher, found.rank, found.world_size) == ("slurm", 5, 6)
    assert (found.local_rank, found.local_world_size, found.node_rank) == (1, 2, 1)
    port = found.environment.pop("MASTER_PORT")
    assert 10_000 <= int(port) < 30_000
    assert found.environment == {
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
    found = detect(SRUN | {"MASTER_ADDR": "fast", "MASTER_PORT": "1234"})
    assert (found.environment["MASTER_ADDR"], found.environment["MASTER_PORT"]) == ("fast", "1234")


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
    found = detect(SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node_rank)})
    assert found.local_world_size == expected


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
    (told,) = _launched(tmp_path, "accelerate.commands.launch", "--cpu", "--num_processes", "2")
    with pytest.raises(RankError, match="asked for several processes and started one") as caught:
        detect(told)
    for remedy in ("fabricate run", "torchrun --nproc-per-node", "accelerate launch --multi_gpu"):
        assert remedy in str(caught.value)


def test_accelerate_launch_with_one_process_is_one_rank_and_no_request(tmp_path: Path) -> None:
    (told,) = _launched(tmp_path, "accelerate.commands.launch", "--num_processes", "1")
    assert detect(told) == Launch("accelerate")
    assert requests(told) == {}


def test_accelerate_launch_multi_gpu_starts_ranks_on_a_cpu_too(tmp_path: Path) -> None:
    flags = ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")
    ranks = _launched(tmp_path, "accelerate.commands.launch", *flags)
    assert [detect(told) for told in ranks] == [Launch("accelerate", r, r, 2, 2, 0) for r in range(2)]
    assert requests(ranks[0]) == {}


def test_the_flags_of_accelerate_launch_are_requests(tmp_path: Path) -> None:
    flags = ("--use_fsdp", "--fsdp_offload_params", "true", "--mixed_precision", "bf16", "--num_processes", "1")
    (told,) = _launched(tmp_path, "accelerate.commands.launch", "--main_process_port", "0", *flags)
    assert detect(told) == Launch("accelerate")
    assert requests(told) == {
        "strategy": Request("fsdp:offload=cpu", "ACCELERATE_USE_FSDP"),
        "precision": Request("bf16", "ACCELERATE_MIXED_PRECISION"),
    }


def test_torchrun_ranks_are_found(tmp_path: Path) -> None:
    ranks = _launched(tmp_path, "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert [detect(told) for told in ranks] == [Launch("torchrun", r, r, 2, 2, 0) for r in range(2)]


def test_what_accelerate_exports_by_default_is_not_a_request() -> None:
    exported = {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_GRADIENT_CLIPPING": "none",
        "ACCELERATE_USE_CPU": "False",
        "ACCELERATE_USE_FSDP": "false",
    }
    assert requests(exported) == {}


@pytest.mark.parametrize(
    ("environ", "name", "value"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "BF16"}, "precision", "bf16"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps", "4"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "max_grad_norm", "0.5"),
        ({"ACCELERATE_USE_CPU": "Yes"}, "cpu", "true"),
        ({"ACCELERATE_USE_FSDP": "1"}, "strategy", "fsdp"),
        ({"FABRICATE_STRATEGY": "zero3:offload_optimizer=cpu"}, "strategy", "zero3:offload_optimizer=cpu"),
        ({"FABRICATE_PRECISION": "fp8"}, "precision", "fp8"),
        ({"FABRICATE_PLUGINS": "ema;wandb"}, "plugins", "ema;wandb"),
        ({"FABRICATE_PLAN_ONLY": "1"}, "plan_only", "true"),
    ],
)
def test_a_setting_is_requested_by_its_variable(environ: dict[str, str], name: str, value: str) -> None:
    (source,) = environ
    assert requests(environ) == {name: Request(value, source)}


def test_the_options_of_fsdp_travel_with_it() -> None:
    told = requests(
        {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_RESHARD_AFTER_FORWARD": "false",
            "FSDP_ACTIVATION_CHECKPOINTING": "true",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block, Head",
        }
    )
    assert told["strategy"].value == "fsdp:reshard_after_forward=false,activation_checkpointing=true,wrap=Block+Head"


def test_the_options_of_deepspeed_travel_with_it(tmp_path: Path) -> None:
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
    assert requests(deepspeed)["strategy"].value == "zero2:offload_optimizer=cpu"
    deepspeed["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = "3"
    assert requests(deepspeed)["strategy"].value == "zero3:offload_optimizer=cpu"
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    deepspeed["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(file)
    assert requests(deepspeed)["strategy"].value == f"zero1:config={file}"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf61"}, "'bf61' is not one of no, fp16, bf16, fp8; did you mean 'bf16'"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2.5"}, "is not a positive whole number"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "-1"}, "is not a positive number"),
        ({"ACCELERATE_USE_CPU": "maybe"}, "neither true nor false"),
        ({"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_DEEPSPEED": "true"}, "are both true"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "4"}, "stage '4'"),
        (
            {"FABRICATE_PRECISION": "fp32", "ACCELERATE_MIXED_PRECISION": "bf16"},
            "FABRICATE_PRECISION says 'fp32' and ACCELERATE_MIXED_PRECISION says 'bf16'",
        ),
        (
            {"FABRICATE_STRATEGY": "ddp", "ACCELERATE_USE_FSDP": "true"},
            "FABRICATE_STRATEGY says 'ddp' and ACCELERATE_USE_FSDP says 'fsdp'",
        ),
    ],
)
def test_a_request_that_cannot_be_honoured_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        requests(environ)


def test_two_requests_that_agree_are_one() -> None:
    told = requests({"FABRICATE_PRECISION": "bf16", "ACCELERATE_MIXED_PRECISION": "BF16"})
    assert told == {"precision": Request("bf16", "FABRICATE_PRECISION")}


def _written(tmp_path: Path, content: str, name: str = "config") -> str:
    file = tmp_path / name
    file.write_text(content)
    return str(file)


def test_an_accelerate_file_is_read(tmp_path: Path) -> None:
    path = _written(
        tmp_path,
        """
        compute_environment: LOCAL_MACHINE
        debug: false
        distributed_type: FSDP
        downcast_bf16: 'no'
        enable_cpu_affinity: false
        fsdp_config:
          fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
          fsdp_offload_params: true
          fsdp_reshard_after_forward: false
          fsdp_transformer_layer_cls_to_wrap: Block
        machine_rank: 0
        main_process_ip: node1
        main_process_port: 29501
        main_training_function: main
        mixed_precision: bf16
        num_machines: 2
        num_processes: 8
        rdzv_backend: static
        same_network: true
        tpu_env: []
        tpu_use_cluster: false
        use_cpu: false
        """,
    )
    read = read_config(path)
    assert read.strategy == "fsdp:offload=cpu,reshard_after_forward=false,wrap=Block"
    assert (read.precision, read.num_processes, read.num_nodes, read.node_rank) == ("bf16", 8, 2, None)
    assert (read.master_addr, read.master_port, read.variables) == ("node1", 29501, {})
    assert read.unused == ()


def test_the_deepspeed_part_of_an_accelerate_file_is_read(tmp_path: Path) -> None:
    section = {"zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    content = {"distributed_type": "DEEPSPEED", "num_processes": -1, "deepspeed_config": section}
    read = read_config(_written(tmp_path, json.dumps(content)))
    assert (read.strategy, read.num_processes) == ("zero3", None)
    assert read.variables == {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
    }


def test_multi_cpu_asks_for_the_cpu(tmp_path: Path) -> None:
    read = read_config(_written(tmp_path, "distributed_type: MULTI_CPU\nnum_processes: 2"))
    assert (read.strategy, read.num_processes, read.variables) == (None, 2, {"ACCELERATE_USE_CPU": "true"})


def test_the_gpus_of_an_accelerate_file_are_made_visible(tmp_path: Path) -> None:
    assert read_config(_written(tmp_path, "distributed_type: NO\ngpu_ids: 0,1")).variables == {
        "CUDA_VISIBLE_DEVICES": "0,1"
    }
    assert read_config(_written(tmp_path, "distributed_type: NO\ngpu_ids: all")).variables == {}


def test_a_deepspeed_file_is_told_by_its_content(tmp_path: Path) -> None:
    path = _written(tmp_path, '{"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}}', "ds.yaml")
    assert read_config(path).strategy == f"zero3:config={path}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("learning_rate: 0.1", "is not understood.*it sets learning_rate"),
        ("- 1", "holds no settings"),
        ("{", "is neither YAML nor JSON"),
        ('{"zero_optimization": {"stage": 7}}', "stage 7"),
        ("distributed_type: XLA", "distributed_type XLA is not one of"),
        ("distributed_type: 'NO'\nnum_processes: 2", "distributed_type NO runs one"),
        ("distributed_type: MULTI_GPU\nnum_processes: many", "num_processes 'many' is not a whole number"),
        ("distributed_type: MULTI_GPU\nmixed_precision: bf61", "bf61"),
        ("distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}", "distributed_type is MULTI_GPU"),
        ("distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: INDUCTOR}", "dynamo_config.dynamo_backend"),
        ("compute_environment: AMAZON_SAGEMAKER", "LOCAL_MACHINE only"),
    ],
)
def test_a_file_that_cannot_be_honoured_is_named(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_config(_written(tmp_path, content))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_config(str(tmp_path / "absent.yaml"))


def test_a_comma_in_the_path_of_a_deepspeed_file_is_refused(tmp_path: Path) -> None:
    path = _written(tmp_path, '{"zero_optimization": {"stage": 3}}', "a,b.json")
    with pytest.raises(ConfigurationError, match="holds a comma"):
        read_config(path)


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
    assert line == ["py", "-m", "fabricate.cli.runner", "--standalone", "--nproc-per-node", "2", "--", "s.py", "--log"]


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
    made = environment(base, nproc=2, strategy="ddp", precision="bf16", plugins=["wandb", "ema"], plan_only=True)
    assert base == {"FABRICATE_PLUGINS": "ema", "OMP_NUM_THREADS": "3"}
    assert made == {
        "FABRICATE_LAUNCHED": "1",
        "FABRICATE_PLAN_ONLY": "1",
        "FABRICATE_PLUGINS": "ema;wandb",
        "FABRICATE_PRECISION": "bf16",
        "FABRICATE_STRATEGY": "ddp",
        "OMP_NUM_THREADS": "3",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def test_several_ranks_share_the_cores_and_one_is_left_alone() -> None:
    cores = len(os.sched_getaffinity(0))
    assert environment({}, nproc=2)["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert environment({}, nproc=10_000)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment({}, nproc=1)


@pytest.mark.parametrize(
    ("base", "settings", "message"),
    [
        ({"FABRICATE_STRATEGY": "ddp"}, {"strategy": "fsdp"}, "'ddp', this command 'fsdp'"),
        ({}, {"plugins": ["ema;wandb"]}, "repeat --plugin for each of them"),
        ({}, {"plugins": ["ema,wandb"]}, "'ema,wandb' is no name; put ; between plugins"),
        ({"FABRICATE_PLUGINS": "ema,wandb"}, {"plugins": ["x"]}, "'ema,wandb' is no name; put ; between plugins"),
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


# ------------------------------------------------------------------------------------------------- FSDP, version 1's keys


def _fsdp_table() -> list[tuple[str, str, str]]:
    page = Path(__file__).parent.parent / "docs" / "strategies" / "fsdp.md"
    return re.findall(r"^\| `(fsdp_\w+)` \| `(.+?)` \| (.+) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_table_of_fsdp_keys_has_every_key() -> None:
    keys = {key for key, _, _ in _fsdp_table()}
    known = {name.removeprefix("fsdp_config.") for name in (*fsdp_keys.VARIABLES, *fsdp_keys.MEANINGLESS)}
    assert keys == known


@pytest.mark.parametrize(("key", "value", "becomes"), _fsdp_table(), ids=lambda text: text)
def test_a_key_of_fsdp_becomes_what_the_table_says(tmp_path: Path, key: str, value: str, becomes: str) -> None:
    also = "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n" if key == "fsdp_min_num_params" else ""
    path = tmp_path / "fsdp.yaml"
    path.write_text(f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n{also}  {key}: {value}\n")
    if becomes.startswith("refused: "):
        with pytest.raises(ConfigurationError) as caught:
            read_config(str(path))
        assert becomes.removeprefix("refused: ") in str(caught.value)
        assert key in str(caught.value)
        return
    read = read_config(str(path))
    if becomes == "no meaning now":
        assert (read.strategy, read.unused) == ("fsdp", (f"fsdp_config.{key}",))
        return
    options = becomes.split("`")[1]
    assert read.unused == ()
    assert read.strategy == ("fsdp" if options in ("fsdp", "wrap=auto") else f"fsdp:{options}")
    # The same by the variables that `accelerate launch` makes of it.
    variable = fsdp_keys.VARIABLES[f"fsdp_config.{key}"]
    environ = {"ACCELERATE_USE_FSDP": "true", variable: value} | (
        {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"} if also else {}
    )
    assert requests(environ)["strategy"].value == read.strategy


def test_a_key_of_fsdp_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_wrapping: true\n")
    with pytest.raises(ConfigurationError, match=r"fsdp_config\.fsdp_wrapping"):
        read_config(str(path))
