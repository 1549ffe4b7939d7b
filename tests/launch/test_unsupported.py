"""Tensor, context, sequence and pipeline parallelism: every way to request them gives an error that names what is missing and what to
use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

from fabricate import ConfigurationError, Trainer, TrainModule
from fabricate.launch.config_files import read_config
from fabricate.launch.settings import requests
from fabricate.testing import run_ranks


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rows() -> TensorDataset:
    return TensorDataset(torch.ones(8, 4))


@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [
        ("fsdp:tp=2", "2 ranks form a group that reads the same rows, .* `fabricate run script.py --nproc 2`"),
        ("tp=2", "is not known; that is tensor parallelism, .* use 'fsdp:tp=2'"),
        ("ddp:tensor_parallel=2", "that is tensor parallelism, .* use 'fsdp:tp=2'"),
        ("pp", "that is pipeline parallelism"),
        ("fsdp:cp=2", "that is context parallelism, .* torch has no sharded attention on a CPU"),
        ("zero3:ulysses=2", "that is sequence parallelism"),
        ("hsdp", "; for replicas of a sharded model use strategy='fsdp:shard=node', or set shard="),
    ],
)
def test_a_strategy_that_is_not_there_says_what_to_use(strategy: str, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=wanted):
        Trainer(max_steps=1, strategy=strategy, progress=False).fit(Net(), rows(), batch_size=2)


MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
SHARDS = {"ACCELERATE_USE_FSDP": "true"}


@pytest.mark.parametrize("word", ["CP", "SP"])
def test_a_dimension_that_accelerate_launch_was_told_of_is_refused(word: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"PARALLELISM_CONFIG_{word}_SIZE=2; that is .* parallelism, .*set it to 1"
    ):
        requests({**MESH, f"PARALLELISM_CONFIG_{word}_SIZE": "2"})


def strategy_of(environ: dict[str, str]) -> str | None:
    settings = requests(environ)
    return settings["strategy"].value if "strategy" in settings else None


def test_replicas_and_shards_become_the_strategy() -> None:
    replicate, shard = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"
    assert strategy_of({**MESH, replicate: "1", shard: "1"}) is None
    assert strategy_of({**MESH, replicate: "2"}) == "ddp"
    assert strategy_of({**MESH, **SHARDS, shard: "2"}) == "fsdp:shard=2"
    assert strategy_of({**MESH, **SHARDS, replicate: "2", shard: "4"}) == "fsdp:shard=4"
    assert strategy_of({replicate: "2", shard: "4"}) is None, "not in use"
    tensor = "PARALLELISM_CONFIG_TP_SIZE"
    assert strategy_of({**MESH, **SHARDS, tensor: "2"}) == "fsdp:tp=2"
    assert strategy_of({**MESH, **SHARDS, shard: "2", tensor: "2"}) == "fsdp:shard=2,tp=2"
    assert strategy_of({**MESH, tensor: "2", "WORLD_SIZE": "2"}) == "fsdp:tp=2", "nothing beside it"
    for environ, wanted in (
        ({**MESH, shard: "2"}, "ACCELERATE_USE_FSDP is not true"),
        ({**MESH, **SHARDS, replicate: "2"}, "shards nothing"),
        ({**MESH, **SHARDS, shard: "2", "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "remove one"),
        ({**MESH, shard: "two"}, "is not a whole number"),
        ({**MESH, tensor: "2", "WORLD_SIZE": "4"}, "PARALLELISM_CONFIG_TP_SIZE=2 .* use strategy='fsdp:tp=2'"),
        ({**MESH, tensor: "2", "ACCELERATE_USE_DEEPSPEED": "true"}, "use strategy='fsdp:tp=2'"),
        ({**MESH, **SHARDS, tensor: "2", replicate: "2"}, "shards nothing"),
    ):
        with pytest.raises(ConfigurationError, match=wanted):
            requests(environ)


def test_the_section_of_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    section = "  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n  parallelism_config_cp_backend: torch\n"
    path.write_text(f"distributed_type: FSDP\nnum_processes: 4\nparallelism_config:\n{section}")
    config = read_config(str(path))
    assert (config.strategy, config.unused) == ("fsdp:shard=2", ("parallelism_config.parallelism_config_cp_backend",))
    path.write_text(
        f"distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n{section}  parallelism_config_tp_size: 2\n"
    )
    assert read_config(str(path)).strategy == "fsdp:shard=2,tp=2"


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("ACCELERATE_USE_MEGATRON_LM", "true", "is true, but fabricate has no strategy for Megatron-LM; use"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", r"with Trainer\(compile=True\)"),
    ],
)
def test_other_engines_that_accelerate_launch_was_told_of_are_refused(name: str, value: str, wanted: str) -> None:
    with pytest.raises(ConfigurationError, match=wanted):
        requests({name: value})


def on_two_ranks() -> list[str]:
    errors = []
    for strategy in ("ddp", "fsdp"):
        module = Net()
        parallelize_module(module.layer, init_device_mesh("cpu", (2,)), ColwiseParallel())
        try:
            Trainer(max_steps=1, strategy=strategy, progress=False).fit(module, rows(), batch_size=2)
        except ConfigurationError as exc:
            errors.append(str(exc))
    return errors


def test_a_module_that_a_plan_divided_is_refused_before_the_first_step() -> None:
    for texts in run_ranks(on_two_ranks, 2):
        assert [text.startswith("Net is sharded already (a tp_plan?), but strategy=") for text in texts] == [True, True]
