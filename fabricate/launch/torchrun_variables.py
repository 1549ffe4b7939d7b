"""torchrun's own variables, `PET_NNODES` and its companions: each is an option of torchrun.

Clusters (Kubeflow's TrainJob) set them in every pod, in which torchrun is meant to be started. `fabricate run` adopts them; a script
that was started without a launcher does not train alone beside them. Must not know how ranks are started; imports no torch.
Source: torch.distributed.run reads `PET_<OPTION>` for an option that its command line leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fabricate.errors import ConfigurationError


@dataclass(frozen=True)
class PodRequest:
    """What the variables request; None is unset."""

    nproc: int | str | None = None
    """Processes per node, or a word with which torchrun counts devices."""
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


def several_ranks(environ: Mapping[str, str]) -> bool:
    """Whether it is certain that `environ` asks for more than one rank; "gpu" and "auto" may be one."""
    count = environ.get("PET_NPROC_PER_NODE", "1")
    return environ.get("PET_NNODES", "1") not in ("1", "1:1") or (count.isdecimal() and int(count) > 1)


def read_pod(environ: Mapping[str, str]) -> PodRequest:
    """What `environ` requests. Raises ConfigurationError for a number of nodes that changes, which torchrun alone can start."""
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
    if colon and low == high:  # torchrun's way to write a number of nodes that does not change
        text = low
    if not text.isdecimal():
        raise ConfigurationError(
            f"{name}={text!r} is not a whole number, and `fabricate run` starts a fixed number of nodes; start an elastic number of them "
            "with torchrun, or unset the variable"
        )
    return int(text)
