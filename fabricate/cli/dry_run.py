"""`fabricate plan SCRIPT --dry-run`: one process instead of all ranks.

Owns the meaning of the options. Must not know: how an update is tried (`fabricate.selfcheck.dry_run`). Imports no torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from fabricate.cli.launch import places, prepared
from fabricate.errors import ConfigurationError
from fabricate.launch.config_files import ConfigFile, read_config

__all__ = ["dry_run_of"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_NODE = 8
"""Ranks per node if no option gives the number: most machines with several GPUs have 8."""


def dry_run_of(
    options: Mapping[str, Any], memory: str | None, ranks_per_node: int | None
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of the process that tries the updates. options: those for starting a script."""
    addressed = {**options, "node_rank": None}
    if (options["nnodes"] or 1) > 1:
        addressed["master_addr"] = options["master_addr"] or "127.0.0.1"  # no connection to it is opened
    _, environment = prepared(**addressed)
    file = read_config(options["config"]) if options["config"] is not None else ConfigFile("")
    where = places(file, *(addressed[name] for name in ("nproc", "nnodes", "node_rank", "master_addr", "master_port")))
    nproc, nnodes = where["nproc"], where["nnodes"]
    if not isinstance(nproc, int):
        raise ConfigurationError(
            f"--nproc {nproc} depends on the devices of this machine. With --dry-run, give a number of ranks"
        )
    world_size = nproc * nnodes
    environment = {name: value for name, value in environment.items() if not name.startswith("PET_")}
    environment |= {"ACCELERATE_TORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if world_size > 1:
        on_one_node = options["nnodes"] == 1 and ranks_per_node is None
        local = nproc if on_one_node else _per_node(nproc, nnodes, ranks_per_node)
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # no socket is opened on it
    room = read_size(memory) if memory is not None else 0
    begin = "from fabricate.selfcheck.dry_run.start import main; main()"
    return [sys.executable, "-c", begin, str(room), options["script"], *options["arguments"]], environment


def _per_node(nproc: int, nnodes: int, ranks_per_node: int | None) -> int:
    if nnodes > 1:
        if ranks_per_node not in (None, nproc):
            raise ConfigurationError(
                f"--ranks-per-node {ranks_per_node} and --nproc {nproc} contradict each other (--nnodes {nnodes}). Leave "
                "--ranks-per-node out"
            )
        return nproc
    if ranks_per_node is None:
        return _NODE if nproc % _NODE == 0 else nproc
    if nproc % ranks_per_node:
        raise ConfigurationError(
            f"--ranks-per-node {ranks_per_node} does not divide --nproc {nproc}. Give a divisor of it"
        )
    return ranks_per_node


def read_size(text: str) -> int:
    """The size in bytes: "80GB" is 80 * 10**9, "80GiB" is 80 * 2**30."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigurationError(f"--memory {text!r} is not a size. Give a number with a unit, such as 80GB or 24GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
