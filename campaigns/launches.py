"""The second table of campaigns.matrix: every launcher with every strategy, from the launcher and from the script.

A launcher passes settings to its ranks in environment variables. Accelerate's code makes those of `accelerate launch` from its flags, and
fabricate's code those of `fabricate run`; then a plan is made as on rank 0 of two. A row has the effective strategy, or the reason of the
refusal. tests/extras/test_launchers.py starts real ranks with the launchers. `campaigns.matrix` prints the table.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch.utils.data import TensorDataset

from fabricate import FabricateError, Trainer, TrainModule
from fabricate.launch.commands import environment

RANK_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ELASTIC = RANK_0 | MEETING | {"TORCHELASTIC_RUN_ID": "none"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NODEID": "0",
}
REFUSED = "refused"
SAYS_NOTHING = ""
TWO = "--num_processes 2"
MESH = f"--use_fsdp {TWO} --use_parallelism_config --parallelism_config"
# The start, and the strategy that it sets: none, one, or a refused one.
STARTS = (
    ("python train.py", SAYS_NOTHING),
    ("torchrun --nproc-per-node 2 train.py", SAYS_NOTHING),
    ("srun --ntasks 2 python train.py", SAYS_NOTHING),
    ("fabricate run train.py --nproc 2", SAYS_NOTHING),
    ("fabricate run train.py --nproc 2 --strategy ddp", "ddp"),
    ("fabricate run train.py --nproc 2 --strategy fsdp", "fsdp"),
    ("fabricate run train.py --nproc 2 --strategy zero2", "zero2"),
    ("fabricate run train.py --nproc 2 --strategy zero3", "zero3"),
    ("fabricate run train.py --nproc 2 --strategy single", REFUSED),
    ("fabricate run train.py --nproc 2 --strategy fsdp:tp=2", "fsdp:tp=2"),
    ("accelerate launch train.py", SAYS_NOTHING),
    ("accelerate launch --cpu --num_processes 2 train.py", REFUSED),
    (f"accelerate launch --multi_gpu {TWO} train.py", SAYS_NOTHING),
    (f"accelerate launch --use_fsdp {TWO} train.py", "fsdp"),
    (f"accelerate launch --use_fsdp {TWO} --fsdp_sharding_strategy NO_SHARD train.py", REFUSED),
    (f"accelerate launch --use_fsdp {TWO} --mixed_precision bf16 train.py", "fsdp"),
    (f"accelerate launch {MESH}_dp_shard_size 2 train.py", "fsdp:shard=2"),
    (f"accelerate launch {MESH}_tp_size 2 train.py", "fsdp:tp=2"),
    (f"accelerate launch {MESH}_cp_size 2 train.py", REFUSED),
    (f"accelerate launch --use_deepspeed {TWO} --zero_stage 2 train.py", "zero2"),
    (f"accelerate launch --use_deepspeed {TWO} --zero_stage 3 train.py", "zero3"),
    (f"accelerate launch --use_megatron_lm {TWO} train.py", REFUSED),
    (f"accelerate launch --multi_gpu {TWO} --dynamo_backend inductor train.py", REFUSED),
)
ASKED = ("auto", "ddp", "fsdp", "zero3")


@dataclass(frozen=True)
class Start:
    """One row: the start of the script, the strategy in the script, and the result."""

    how: str
    request: str
    instruction: str
    strategy: str = ""
    precision: str = ""
    device: str = ""
    ranks: int = 0
    refused: str = ""


def variables(how: str) -> dict[str, str]:
    """The environment variables of rank 0 after this start."""
    words = how.split()
    if words[0] == "torchrun":
        return ELASTIC
    if words[0] == "srun":
        return SLURM
    if words[:2] == ["fabricate", "run"]:
        strategy = words[words.index("--strategy") + 1] if "--strategy" in words else None
        return ELASTIC | environment({}, nproc=2, strategy=strategy)
    return _accelerate(words[2:]) if words[0] == "accelerate" else {}


def _accelerate(flags: list[str]) -> dict[str, str]:
    before = dict(os.environ)
    with contextlib.redirect_stderr(io.StringIO()), _quiet():
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(flags))
        if arguments.use_deepspeed:
            arguments.deepspeed_fields_from_accelerate_config = ""
            variables: Mapping[str, str] = prepare_deepspeed_cmd_env(arguments)[1]
        elif arguments.multi_gpu or arguments.use_fsdp or arguments.use_megatron_lm:
            variables = prepare_multi_gpu_env(arguments)
        else:
            return {k: v for k, v in prepare_simple_launcher_cmd_env(arguments)[1].items() if before.get(k) != v}
    return ELASTIC | {name: value for name, value in variables.items() if before.get(name) != value}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.tp_plan = {"blocks.0": "colwise", "blocks.1": "rowwise"}

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def plans() -> list[Start]:
    """All rows. Starts no process, and restores the environment."""
    others = {
        k: v
        for k, v in os.environ.items()
        if k not in RANK_0 and not k.startswith(("SLURM_", "ACCELERATE_", "FABRICATE_"))
    }
    rows, data = [], TensorDataset(torch.zeros(8, 4))
    for how, instruction in STARTS:
        environ = variables(how)
        for request in ASKED:
            with mock.patch.dict(os.environ, others | environ, clear=True):
                try:
                    plan = Trainer(strategy=request, max_steps=1, progress=False).plan(Net(), data, batch_size=2)
                except FabricateError as exc:
                    rows.append(Start(how, request, instruction, refused=str(exc).partition("\n")[0]))
                else:
                    values = (plan["strategy"], plan["precision"], str(plan["device"]), plan["world_size"])
                    rows.append(Start(how, request, instruction, *values))
    return rows


def wrong(row: Start) -> str:
    """The fault of a row that is neither in effect nor refused; empty if it is correct."""
    if row.instruction == REFUSED:
        return "" if row.refused else f"{row.strategy} runs instead of a refusal"
    alone = row.how.startswith("python") or row.how == "accelerate launch train.py"
    wanted = (row.instruction or ("single" if alone else "ddp")) if row.request == "auto" else row.request
    if row.instruction not in (SAYS_NOTHING, wanted):
        named = all(name in row.refused for name in (wanted, row.instruction))
        return "" if named else f"{row.strategy or row.refused} instead of a refusal"
    return "" if row.strategy == wanted.partition(":")[0] else f"{row.strategy or row.refused} instead of {wanted}"


def text(row: Start) -> str:
    """A row of the page."""
    ranks = "1 process" if row.ranks == 1 else f"{row.ranks} ranks"
    came = f"{row.strategy}, {row.precision}, {row.device}, {ranks}"
    return f"| `{row.how}` | `{row.request}` | {'refused: ' + row.refused.replace('|', chr(92) + '|') if row.refused else came} |"
