"""Before ranks can send each other anything: where they meet, whether they are built of the same, opening torch's process group.

Must not know: strategies, hooks, what ranks send each other.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from fabricate.errors import RankError

_READ_TIMEOUT = datetime.timedelta(seconds=30)
_NEWLINE = "\n"


def interface_towards(host: str) -> str | None:
    """The network interface through which this host reaches `host`; None when that is itself, or not known. gloo would take
    the interface of this host's name, which on many hosts is the loopback."""
    address = _address_towards(host)
    if address is None or address.startswith("127."):
        return None
    return next((n for n, own in psutil.net_if_addrs().items() if any(a.address == address for a in own)), None)


def _address_towards(host: str) -> str | None:
    """This host's own address on the way to `host`; None when that is not known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket sends nothing when it connects
        address: str = probe.getsockname()[0]
        return address
    return None


def open_process_group(rank: int, world_size: int, device: torch.device, timeout: datetime.timedelta) -> None:
    """Open torch's default process group after `meet`, on a CPU or a CUDA device. Accelerate keeps it. All ranks.

    On CUDA it carries CPU tensors too (gloo), and `device` is this rank's from here on, so that NCCL need not guess it.
    """
    store = meet(rank, world_size, {"torch": torch.__version__, "the device": device.type}, timeout)
    backend, own = "gloo", None
    if device.type == "cuda":
        backend, own = "cpu:gloo,cuda:nccl", torch.device("cuda", (device.index or 0) % torch.cuda.device_count())
        torch.cuda.set_device(own)  # as Accelerate will
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=own)
    except RuntimeError as exc:
        raise RankError(
            f"rank {rank} on {socket.gethostname()} could not open torch's process group ({backend}): {exc}"
        ) from exc


def meet(rank: int, world_size: int, built: dict[str, str], timeout: datetime.timedelta) -> Store:
    """Compare what ranks are built of before they open a process group, in which they would wait for each other without a
    word. Returns the store at MASTER_ADDR, which rank 0 has to hold until the group is open. All ranks.

    built: what has to be the same everywhere, by what it is called. Raises `RankError`, the same on every rank.
    """
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        compare_builds(store, rank, world_size, built)
    except dist.DistError as exc:
        raise RankError(
            f"rank {rank} on {socket.gethostname()} did not meet all of {world_size} ranks at {address} within {timeout}: start one "
            f"process per rank, with an address that every host reaches, and a free port. Here: {str(exc).partition(_NEWLINE)[0]}"
        ) from exc
    met: Store = store
    return met


def compare_builds(store: Store, rank: int, world_size: int, built: dict[str, str]) -> None:
    """See `meet`. Needs nothing but the store, where each rank reads what rank 0 is built of, and the last one to have compared
    leaves the result. All ranks."""
    name = "fabricate/built"
    own = {"rank": rank, "host": socket.gethostname(), **built}
    if rank == 0:
        store.set(f"{name}/0", json.dumps(own))
    zero = json.loads(store.get(f"{name}/0"))
    if any(zero[topic] != own[topic] for topic in built):
        store.compare_set(f"{name}/different", "", json.dumps(own))
    if store.add(f"{name}/compared", 1) == world_size:
        different = store.check([f"{name}/different"])
        store.set(f"{name}/result", store.get(f"{name}/different").decode() if different else "null")
    other = json.loads(store.get(f"{name}/result"))
    if other is None:
        return
    if store.add(f"{name}/read", 1) == world_size:
        store.set(f"{name}/all have read", "")
    if rank == 0:  # with whose process the store would go
        with contextlib.suppress(dist.DistError):
            store.wait([f"{name}/all have read"], _READ_TIMEOUT)
    topic = next(topic for topic in built if zero[topic] != other[topic])
    raise RankError(
        f"{topic} is {zero[topic]} on rank 0 on {zero['host']} and {other[topic]} on rank {other['rank']} on {other['host']}; ranks that "
        "train together have the same: install the same packages on every host, and show each of them its GPUs, or none "
        "(CUDA_VISIBLE_DEVICES)"
    )
