"""The device on which a process computes. There is no accelerator here: the tests replace functions of `torch.accelerator` and
`torch.cuda`; the code of fabricate and Accelerate is real."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import imports

from fabricate import ConfigurationError, FabricateError, Trainer, TrainModule
from fabricate.configuration.plan import Plan
from fabricate.distributed.devices import backend, choose_device, physical_name
from fabricate.distributed.engine import Engine
from fabricate.launch.ranks import Launch, detect
from fabricate.launch.settings import requests
from fabricate.precisions.builtin import FP32
from fabricate.strategies.ddp import DDP
from fabricate.strategies.single import Single

GIGABYTES = 80 * 10**9
RANKED = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}


def see(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    """Let torch say that this process sees `count` devices of `kind`; no one else's answers are changed."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    def properties(device: torch.device) -> Any:
        if (device.index or 0) >= count:
            raise AssertionError("Invalid device id")  # as torch
        return SimpleNamespace(name="NVIDIA H100", total_memory=GIGABYTES, uuid=f"{kind}-{device.index}")

    def memory(device: torch.device) -> tuple[int, int]:
        total: int = properties(device).total_memory
        return total, total

    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: GIGABYTES)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", memory)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 0)
    if kind == "cuda":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: properties(device).name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def plan(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], strategy: str = "auto") -> Plan:
    """The plan of a rank with these variables of its launcher."""
    for name in list(os.environ):
        if name.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_", "SLURM_", "ACCELERATE_", "PET_", "SM_")):
            monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return Trainer(strategy=strategy, max_steps=1, progress=False).plan(Net(), torch.zeros(64, 4), batch_size=2)


# ------------------------------------------------------------------------------------------------- launchers


def torchrun(rank: int, world_size: int, local_world_size: int) -> dict[str, str]:
    places = {"RANK": rank, "WORLD_SIZE": world_size}
    places |= {"LOCAL_RANK": rank % local_world_size, "LOCAL_WORLD_SIZE": local_world_size}
    return RANKED | {name: str(place) for name, place in places.items()}


def srun(rank: int, tasks: int, nodes: int, **more: str) -> dict[str, str]:
    per_node = tasks // nodes
    return more | {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node),
        "SLURM_STEP_NODELIST": f"gpu[1-{nodes}]",
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
    }


KUBEFLOW = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0"}
SAGEMAKER = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "8", "MASTER_ADDR": "algo-1"}
STARTS = {
    # By name: the variables of a rank, the devices that it sees, its device, the ranks.
    "python": ({}, 1, "cuda:0", 1),
    "python on a host with eight": ({}, 8, "cuda:0", 1),
    "torchrun with one": (torchrun(0, 1, 1), 1, "cuda:0", 1),
    "torchrun with eight": (torchrun(5, 8, 8), 8, "cuda:5", 8),
    "torchrun, 2 nodes x 8": (torchrun(13, 16, 8), 8, "cuda:5", 16),
    "torchrun, each rank sees its own": (torchrun(3, 4, 4) | {"CUDA_VISIBLE_DEVICES": "3"}, 1, "cuda:0", 4),
    "srun --gpus-per-task=1": (srun(7, 8, 1, SLURM_GPUS_PER_TASK="1", CUDA_VISIBLE_DEVICES="0"), 1, "cuda:0", 8),
    "srun --gpu-bind=single:1": (srun(6, 8, 1, SLURM_GPU_BIND="single:1"), 1, "cuda:0", 8),
    "srun, 2 nodes x 8, all visible": (srun(11, 16, 2), 8, "cuda:3", 16),
    "srun, 2 nodes x 8, one each": (srun(11, 16, 2, SLURM_GPUS_PER_TASK="1"), 1, "cuda:0", 16),
    "Kubeflow, one GPU": (KUBEFLOW | {"PET_NNODES": "1"} | torchrun(0, 1, 1), 1, "cuda:0", 1),
    "Kubeflow, two pods": (KUBEFLOW | torchrun(1, 2, 1), 1, "cuda:0", 2),
    "SageMaker": (torchrun(2, 8, 8) | SAGEMAKER, 8, "cuda:2", 8),
    "more ranks than devices": (torchrun(3, 4, 4), 2, "cuda:1", 4),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_launcher_that_shows_some_devices_gets_a_plan_on_one_of_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ, count, device, world_size = STARTS[name]
    see(monkeypatch, "cuda", count)
    resolved = plan(monkeypatch, environ)
    assert (str(resolved["device"]), resolved["world_size"]) == (device, world_size)
    assert resolved["strategy"] == ("single" if world_size == 1 else "ddp")
    assert resolved["distributed_type"] == ("NO" if world_size == 1 else "MULTI_GPU")
    assert resolved["precision"] == "bf16"
    assert "74.5 GiB (free on NVIDIA H100)" in resolved.source("memory_per_rank")


@pytest.mark.parametrize(
    ("environ", "shards"),
    [
        (srun(11, 16, 2), "over 8 ranks, in 2 copies"),
        (torchrun(11, 16, 8), "over 8 ranks, in 2 copies"),
        (srun(1, 4, 1), "over 4 ranks"),
    ],
)
def test_a_copy_per_node_knows_the_ranks_of_a_node_from_every_launcher(
    environ: dict[str, str], shards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun sets no LOCAL_WORLD_SIZE, and a strategy does not read the environment."""
    see(monkeypatch, "cuda", 8)
    assert plan(monkeypatch, environ, "fsdp:shard=node")["shards"].endswith(shards)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("ddp", "MULTI_GPU"),
        ("fsdp", "FSDP"),
        ("zero1", "DEEPSPEED"),
        ("zero2:offload_optimizer=cpu", "DEEPSPEED"),
        ("zero3", "DEEPSPEED"),
    ],
)
def test_a_strategy_for_ranks_on_one_process_says_that_nothing_is_divided(
    strategy: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, "cuda", 1)
    resolved = plan(monkeypatch, torchrun(0, 1, 1), strategy)
    name = strategy.partition(":")[0]
    assert resolved["distributed_type"] == kind
    assert f"strategy={name!r} on one process: nothing is divided between ranks" in resolved.notes


# ------------------------------------------------------------------------------------------------- the Accelerator's environment


def test_one_gpu_under_torchrun_is_one_process_for_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes images set the variables of torchrun always."""
    see(monkeypatch, "cuda", 1)
    for name, value in torchrun(0, 1, 1).items():
        monkeypatch.setenv(name, value)
    engine = Engine(detect(os.environ), Single(), FP32(), torch.device("cuda", 0))
    try:
        with engine._environment():
            state = PartialState()
            assert (str(state.device), str(state.distributed_type.value), state.num_processes) == ("cuda:0", "NO", 1)
    finally:
        PartialState._reset_state()
    assert os.environ["LOCAL_RANK"] == "0"


def test_accelerate_and_the_module_are_on_the_device_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the local rank's, which a process may not see, and with an index."""
    see(monkeypatch, "cuda", 1)
    launch = Launch("slurm", rank=7, local_rank=7, world_size=8, local_world_size=8)
    with Engine(launch, DDP(), FP32(), torch.device("cuda", 0))._environment():
        assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cuda:0"
        assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("7", "8")
    assert "ACCELERATE_TORCH_DEVICE" not in os.environ


# ------------------------------------------------------------------------------------------------- kinds of devices


def chosen(environ: dict[str, str], local_rank: int = 0) -> tuple[str, str]:
    device, source = choose_device(environ, requests(environ), local_rank)
    return str(device), source


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_an_accelerator_is_chosen_and_never_left_aside_for_the_cpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, kind, 2)
    assert chosen({}, 3) == (f"{kind}:1", "detected")
    assert chosen({"ACCELERATE_USE_CPU": "true"}) == ("cpu", "ACCELERATE_USE_CPU")


def test_without_an_accelerator_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert chosen({}) == ("cpu", "no accelerator here")


@pytest.mark.parametrize("kind", ["hpu", "mtia"])
def test_a_kind_that_fabricate_does_not_compute_on_is_refused_by_name(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, kind, 1)
    with pytest.raises(ConfigurationError, match=f"a device of type '{kind}'.*ACCELERATE_TORCH_DEVICE=cpu"):
        chosen({})
    assert chosen({"ACCELERATE_TORCH_DEVICE": "cpu"}) == ("cpu", "ACCELERATE_TORCH_DEVICE")
    with pytest.raises(
        ConfigurationError, match=f"ACCELERATE_TORCH_DEVICE='{kind}' is a device of type '{kind}'.*give cpu, cuda"
    ):
        chosen({"ACCELERATE_TORCH_DEVICE": kind})


def test_the_variable_of_accelerate_that_names_a_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "cuda", 4)
    assert chosen({"ACCELERATE_TORCH_DEVICE": "cuda:2"}) == ("cuda:2", "ACCELERATE_TORCH_DEVICE")
    assert chosen({"ACCELERATE_TORCH_DEVICE": "cuda"}, 5)[0] == "cuda:1"
    assert chosen({"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_CPU": "1"})[0] == "cpu"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ACCELERATE_TORCH_DEVICE": "cuda:4"}, "ACCELERATE_TORCH_DEVICE='cuda:4': torch finds 4 of that kind"),
        ({"ACCELERATE_TORCH_DEVICE": "xpu"}, "ACCELERATE_TORCH_DEVICE='xpu': torch finds cuda here"),
        ({"ACCELERATE_TORCH_DEVICE": "gpu"}, "ACCELERATE_TORCH_DEVICE='gpu' is not a device; give cpu, cuda"),
        ({"ACCELERATE_TORCH_DEVICE": "cuda", "ACCELERATE_USE_CPU": "1"}, "name different devices; unset one of them"),
        ({"PJRT_DEVICE": "TPU"}, "PJRT_DEVICE='TPU' asks for an XLA device, which fabricate does not support;"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(
    environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, "cuda", 4)
    with pytest.raises(ConfigurationError, match=message):
        chosen(environ)


def test_xla_is_refused_by_name_where_accelerate_would_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "_torch_xla_available", True)  # what Accelerate finds when it is imported
    imports.is_torch_xla_available.cache_clear()
    try:
        with pytest.raises(ConfigurationError, match=r"torch_xla is installed.*USE_TORCH_XLA=0"):
            chosen({"ACCELERATE_USE_CPU": "1"})
    finally:
        imports.is_torch_xla_available.cache_clear()


def test_a_tpu_is_not_silently_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigurationError, match="PJRT_DEVICE='TPU' asks for an XLA device, which fabricate does not support;"
    ):
        plan(monkeypatch, {"PJRT_DEVICE": "TPU"})


def test_a_device_without_process_groups_takes_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "mps", 1)
    resolved = plan(monkeypatch, {})
    assert (str(resolved["device"]), resolved["strategy"]) == ("mps:0", "single")
    assert any(note.startswith("fabricate has not been tested on mps") for note in resolved.notes)
    for environ, strategy in (({}, "ddp"), (torchrun(0, 2, 2), "auto")):
        with pytest.raises(FabricateError, match="torch has no process group for this type of device"):
            plan(monkeypatch, environ, strategy)


# ------------------------------------------------------------------------------------------------- process groups on devices


def test_a_process_group_of_devices_carries_cpu_tensors_too() -> None:
    assert backend(torch.device("cpu")) == "gloo"
    assert backend(torch.device("cuda", 3)) == "cpu:gloo,cuda:nccl"
    assert backend(torch.device("xpu", 0)) == f"cpu:gloo,xpu:{dist.get_default_backend_for_device('xpu')}"


def test_a_physical_device_has_one_name_whatever_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, "cuda", 2)
    assert physical_name(torch.device("cpu")) == ""
    first, second = (physical_name(torch.device("cuda", index)) for index in (0, 1))
    assert first != second
    assert first.endswith("cuda-0")
