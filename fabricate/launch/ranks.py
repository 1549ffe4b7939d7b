"""How this process was started: its launcher, and its place among the ranks.

Owns the variables that torchrun, `accelerate launch`, `srun`, mpirun and `fabricate run` set. Must not know settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fabricate.errors import RankError
from fabricate.launch.accelerate_variables import from_notebook
from fabricate.launch.torchrun_variables import several_ranks

_MPI = ("OMPI_COMM_WORLD", "PMI", "MV2_COMM_WORLD")
# SLURM's batch, interactive and extern steps, with one process each, have numbers from here on.
_FIRST_INTERNAL_STEP = 0xFFFFFFF0
_HOW_TO_START = (
    "`fabricate run script.py --nproc N`, `torchrun --nproc-per-node N script.py` or "
    "`accelerate launch --multi_gpu --num_processes N script.py` (on a CPU as well)"
)


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, and its place among the ranks.

    `environment`: the variables that torch needs and the launcher did not set. These are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT under `srun`, none otherwise. The code that opens the process group sets them meanwhile.
    """

    launcher: Literal["python", "torchrun", "accelerate", "fabricate", "slurm", "other"]
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    environment: dict[str, str] = field(default_factory=dict)


def detect(environ: Mapping[str, str]) -> Launch:
    """The launch that `environ` describes. Every rank calls this with its own environment.

    Raises RankError if several ranks were requested and not started, or if the ranks could not find each other.

        detect(os.environ).world_size
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _ranked(environ, _launcher(environ))
    slurm = _is_slurm_task(environ)
    for prefix in _MPI:
        size = environ.get(f"{prefix}_SIZE", "1")
        # `srun --mpi=pmi2` exports PMI_* as well; the numbers then agree with SLURM's.
        same = slurm and (environ.get(f"{prefix}_RANK"), size) == (environ["SLURM_PROCID"], _slurm_tasks(environ))
        if size not in ("0", "1") and not same:
            raise RankError(
                f"mpirun started {size} processes ({prefix}_SIZE={size}) without RANK and WORLD_SIZE, so each would "
                f"train alone; start them with `srun`, {_HOW_TO_START}"
            )
    if slurm:
        return _slurm(environ)
    launcher = _launcher(environ)
    if launcher == "accelerate" and "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        raise RankError(
            "accelerate launch was asked for several processes and started one (MASTER_ADDR and MASTER_PORT are set, RANK is "
            f"not): without --multi_gpu, --use_fsdp or --use_deepspeed it never starts more. Start them with {_HOW_TO_START}; if "
            "you want one process, use --num_processes 1 and unset MASTER_ADDR and MASTER_PORT"
        )
    if several_ranks(environ):
        asked = ", ".join(f"{name}={environ[name]}" for name in ("PET_NNODES", "PET_NPROC_PER_NODE") if name in environ)
        raise RankError(
            f"the environment asks for several ranks ({asked}), and this process was started without a launcher: each pod would train "
            "alone. Start it with `fabricate run script.py` or `torchrun script.py`, which read these variables; if you want one process, "
            "unset them"
        )
    return Launch("python" if launcher == "other" else launcher)


def _launcher(environ: Mapping[str, str]) -> Literal["fabricate", "accelerate", "torchrun", "other"]:
    if environ.get("FABRICATE_LAUNCHED") == "1":
        return "fabricate"
    if "ACCELERATE_MIXED_PRECISION" in environ or from_notebook(environ):
        return "accelerate"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "other"


def _ranked(environ: Mapping[str, str], launcher: Literal["fabricate", "accelerate", "torchrun", "other"]) -> Launch:
    """The launch that RANK, WORLD_SIZE and the related variables describe."""
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", least=1)
    if rank >= world_size:
        raise RankError(f"RANK={rank} with WORLD_SIZE={world_size}: ranks count from 0 to {world_size - 1}")
    if world_size > 1:
        missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise RankError(
                f"WORLD_SIZE={world_size} without {' and '.join(missing)}: without these a rank can find neither the other ranks "
                f"nor its device; export them, or start with {_HOW_TO_START}"
            )
    local_rank = _number(environ, "LOCAL_RANK", default=0)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", default=world_size, least=1)
    if local_rank >= local_world_size:
        raise RankError(f"LOCAL_RANK={local_rank} with LOCAL_WORLD_SIZE={local_world_size}: local ranks count from 0")
    node_rank = _number(environ, "GROUP_RANK", default=(rank - local_rank) // local_world_size)
    return Launch(launcher, rank, local_rank, world_size, local_world_size, node_rank)


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None, least: int = 0) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise RankError(
                f"{name} is not set, although other variables of a launcher are; start the ranks with {_HOW_TO_START}"
            )
        return default
    if not text.isdecimal() or int(text) < least:
        raise RankError(
            f"{name}={text!r} is not a whole number of at least {least}; start the ranks with {_HOW_TO_START}"
        )
    return int(text)


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether this is one of several tasks of an `srun`, and not a batch script or an interactive shell inside an allocation."""
    return (
        "SLURM_PROCID" in environ
        and environ.get("SLURM_STEP_ID", "").isdecimal()
        and int(environ["SLURM_STEP_ID"]) < _FIRST_INTERNAL_STEP
        and _slurm_tasks(environ) not in ("0", "1")
    )


def _slurm_tasks(environ: Mapping[str, str]) -> str:
    """The number of tasks of this step; the allocation may have room for more."""
    return environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"


def _slurm(environ: Mapping[str, str]) -> Launch:
    node_rank = _number(environ, "SLURM_NODEID", default=0)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if not nodes and "MASTER_ADDR" not in environ:
        raise RankError(
            "srun: neither SLURM_STEP_NODELIST nor SLURM_NODELIST is set; export MASTER_ADDR, the host of rank 0"
        )
    # One port per job and step, below the range from which the system assigns ports.
    port = 10_000 + (_number(environ, "SLURM_JOB_ID") * 31 + _number(environ, "SLURM_STEP_ID")) % 20_000
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": _slurm_tasks(environ),
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _tasks_on(environ, node_rank),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }
    place = _ranked({**variables, "GROUP_RANK": str(node_rank)}, "other")
    return Launch(
        "slurm", place.rank, place.local_rank, place.world_size, place.local_world_size, place.node_rank, variables
    )


def _first_host(nodes: str) -> str:
    """The first host in SLURM's compressed list: node003 in "node[003-005,7],login"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group()) if first else nodes


def _tasks_on(environ: Mapping[str, str], node_rank: int) -> str:
    """The number of tasks on one node: "4(x2),3" means 4, 4 and 3."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or _slurm_tasks(environ)
    counts: list[str] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [count] * int(times or 1)
    if node_rank >= len(counts):
        raise RankError(
            f"SLURM_NODEID={node_rank}, but the tasks per node {text!r} are those of {len(counts)} nodes; unset SLURM_ variables that "
            "were exported by hand, and start with srun"
        )
    return counts[node_rank]
