"""The settings of a run from outside its script: environment variables, and configuration files of Accelerate and DeepSpeed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fabricate.errors import ConfigurationError
from fabricate.launch import accelerate_fsdp
from fabricate.launch.config_files import read_config
from fabricate.launch.settings import requests
from fabricate.launch.variables import Request


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
    settings = requests(
        {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_RESHARD_AFTER_FORWARD": "false",
            "FSDP_ACTIVATION_CHECKPOINTING": "true",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block, Head",
        }
    )
    assert (
        settings["strategy"].value == "fsdp:reshard_after_forward=false,activation_checkpointing=true,wrap=Block+Head"
    )


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
        ({"FABRICATE_PRECISON": "bf16"}, "FABRICATE_PRECISON='bf16': .*; did you mean FABRICATE_PRECISION\\? Rename"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        requests(environ)


def test_variables_of_other_programs_are_left_alone() -> None:
    assert requests({"FABRICATE_HOME": "here", "FABRICATE_WORKERS": "2", "FABRICATE": "x"}) == {}


def test_two_requests_that_agree_are_one() -> None:
    settings = requests({"FABRICATE_PRECISION": "bf16", "ACCELERATE_MIXED_PRECISION": "BF16"})
    assert settings == {"precision": Request("bf16", "FABRICATE_PRECISION")}


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
    config = read_config(path)
    assert config.strategy == "fsdp:offload=cpu,reshard_after_forward=false,wrap=Block"
    assert (config.precision, config.num_processes, config.num_nodes, config.node_rank) == ("bf16", 8, 2, None)
    assert (config.master_addr, config.master_port, config.variables) == ("node1", 29501, {})
    assert config.unused == ()


def test_the_deepspeed_part_of_an_accelerate_file_is_read(tmp_path: Path) -> None:
    section = {"zero_stage": 3, "gradient_accumulation_steps": 4, "gradient_clipping": 1.0}
    content = {"distributed_type": "DEEPSPEED", "num_processes": -1, "deepspeed_config": section}
    config = read_config(_written(tmp_path, json.dumps(content)))
    assert (config.strategy, config.num_processes) == ("zero3", None)
    assert config.variables == {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
    }


def test_stage_0_and_gpu_0_of_an_accelerate_file_are_not_taken_for_no_value(tmp_path: Path) -> None:
    content = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0}"
    assert read_config(_written(tmp_path, content)).strategy == "zero0"
    content = "distributed_type: NO\ngpu_ids: 0"
    assert read_config(_written(tmp_path, content)).variables == {"CUDA_VISIBLE_DEVICES": "0"}


def test_multi_cpu_asks_for_the_cpu(tmp_path: Path) -> None:
    config = read_config(_written(tmp_path, "distributed_type: MULTI_CPU\nnum_processes: 2"))
    assert (config.strategy, config.num_processes, config.variables) == (None, 2, {"ACCELERATE_USE_CPU": "true"})


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
        ("learning_rate: 0.1", "sets neither distributed_type .*This one sets learning_rate.*has to end in .yaml"),
        ("- 1", "holds no settings"),
        ("{", "is not valid YAML or JSON"),
        ("max_steps: 7\nseed: 1\nmax_steps: 9", "max_steps is set twice. Remove one"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1, fsdp_version: 2}", "fsdp_version is set twice"),
        ('{"zero_optimization": {"stage": 2, "stage": 3}}', "stage is set twice"),
        ('{"zero_optimization": {"stage": 7}}', "stage 7"),
        ("distributed_type: XLA", "distributed_type XLA is not one of"),
        ("distributed_type: 'NO'\nnum_processes: 2", "distributed_type NO starts one"),
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


# ------------------------------------------------------------------------------------------------- FSDP, version 1's keys


def _fsdp_table() -> list[tuple[str, str, str]]:
    page = Path(__file__).parents[2] / "docs" / "strategies" / "fsdp.md"
    return re.findall(r"^\| `(fsdp_\w+)` \| `(.+?)` \| (.+) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_table_of_accelerate_fsdp_has_every_key() -> None:
    keys = {key for key, _, _ in _fsdp_table()}
    names = {name.removeprefix("fsdp_config.") for name in (*accelerate_fsdp.VARIABLES, *accelerate_fsdp.MEANINGLESS)}
    assert keys == names


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
    config = read_config(str(path))
    if becomes == "no meaning now":
        assert (config.strategy, config.unused) == ("fsdp", (f"fsdp_config.{key}",))
        return
    options = becomes.split("`")[1]
    assert config.unused == ()
    assert config.strategy == ("fsdp" if options in ("fsdp", "wrap=auto") else f"fsdp:{options}")
    # The same by the variables that `accelerate launch` makes of it.
    variable = accelerate_fsdp.VARIABLES[f"fsdp_config.{key}"]
    environ = {"ACCELERATE_USE_FSDP": "true", variable: value} | (
        {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"} if also else {}
    )
    assert requests(environ)["strategy"].value == config.strategy


def test_a_key_of_fsdp_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fsdp.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_wrapping: true\n")
    with pytest.raises(ConfigurationError, match=r"fsdp_config\.fsdp_wrapping"):
        read_config(str(path))
