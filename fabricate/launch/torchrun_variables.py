"""torchrun's own variables, such as `PET_NNODES`: each sets an option of torchrun.

Clusters (Kubeflow's TrainJob) set them in every pod, for a torchrun that is started there. `fabricate run` adopts them. A script that was
started without a launcher raises an error, because every pod would train alone. Must not know how ranks are started; imports no torch.
Source: torch.distributed.run reads `PET_<OPTION>` for an option that its command line leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fabricate.errors import ConfigurationError


@dataclass(frozen=True)
class PodRequest:
    """The settings in these variables; None: unset."""

    nproc: int | str | None = None
    """The number of processes per node, or a word for which torchrun counts devices, such as "gpu"."""
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


def several_ranks(environ: Mapping[str, str]) -> bool:
    """Whether `environ` certainly requests more than one rank; "gpu" and "auto" may mean one."""
    count = environ.get("PET_NPROC_PER_NODE", "1")
    return environ.get("PET_NNODES", "1") not in ("1", "1:1") or (count.isdecimal() and int(count) > 1)


def read_pod(environ: Mapping[str, str]) -> PodRequest:
    """The settings in `environ`. Raises ConfigurationError for a variable number of nodes, which only torchrun can start."""
    nproc = environ.get("PET_NPROC_PER_NODE")
    return PodRequest(
        nproc=int(nproc) if nproc is not None and nproc.isdecimal() else nproc,
        nnodes=_number(environ, "PET_NNODES"),
        node_rank=_number(environ, "PET_NODE_RANK"),
        master_addr=environ.get("PET_MASTER_ADDR"),
        master_port=_number(environ, "PET_MASTER_PORT"),
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    low, colon, high = text.partition(":")
    if colon and low == high:  # torchrun's notation for a fixed number of nodes
        text = low
    if not text.isdecimal():
        raise ConfigurationError(
            f"{name}={text!r} is not a whole number, and `fabricate run` starts a fixed number of nodes; start an elastic number of them "
            "with torchrun, or unset the variable"
        )
    return int(text)
