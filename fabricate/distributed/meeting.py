"""The first contact of the ranks: they meet at an address, compare their packages and devices, and open torch's process group.

Must not know: strategies, hooks, what ranks send each other.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from fabricate.distributed.devices import backend, physical_name
from fabricate.errors import RankError

_READ_TIMEOUT = datetime.timedelta(seconds=30)
_NEWLINE = "\n"
_LONG_WAIT_SECONDS = 60.0
"""The time after which a rank reports that it waits for others."""
_GROUPS, _OTHER_FILES = 3, 512


def interface_towards(host: str) -> str | None:
    """The network interface through which this host reaches `host`; None if that is this host, or if it is unknown. gloo would use the
    interface of this host's name, which is the loopback on many hosts."""
    address = _address_towards(host)
    if address is None or address.startswith("127."):
        return None
    return next((n for n, own in psutil.net_if_addrs().items() if any(a.address == address for a in own)), None)


def _address_towards(host: str) -> str | None:
    """The address from which this host reaches `host`; None if it is unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket sends nothing when it connects
        address: str = probe.getsockname()[0]
        return address
    return None


def open_process_group(rank: int, world_size: int, device: torch.device, timeout: datetime.timedelta) -> None:
    """Open torch's default process group for the type of `device`, after `meet`. Accelerate uses this group. All ranks.

    The group carries CPU tensors too. A device other than the CPU is bound to it, so that NCCL need not guess the device. A single process
    needs no address.
    """
    store: Store = dist.HashStore()  # type: ignore[attr-defined]
    if world_size > 1:
        allow_connections(world_size)
        built = {"torch": torch.__version__, "the device": device.type}
        store = meet(rank, world_size, built, timeout, physical_name(device))
    try:
        dist.init_process_group(
            backend(device),
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
    except RuntimeError as exc:
        raise RankError(
            f"rank {rank} on {socket.gethostname()} could not open torch's process group ({backend(device)}): {exc}"
        ) from exc


def allow_connections(world_size: int) -> None:
    """Raise this process's limit of open files, if connections to `world_size` ranks need more: gloo connects every two ranks of a group,
    and up to three groups have all ranks. The default limit is often 1,024. Raises `RankError` if the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _GROUPS * world_size + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RankError(
            f"with {world_size} ranks, a rank may need {needed} open files for its connections, but the system allows {hard} "
            f"(ulimit -Hn). Raise the limit to {needed} on every host, with LimitNOFILE= of the service or nofile in limits.conf"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def meet(rank: int, world_size: int, built: dict[str, str], timeout: datetime.timedelta, device: str = "") -> Store:
    """Compare packages and devices of the ranks before they open a process group, because ranks that differ would hang in it. Returns the
    store at MASTER_ADDR, which rank 0 has to hold until the group is open. All ranks.

    built: the values that have to be the same on all ranks, by name. device: the name of this rank's physical device, which no other rank
    may use; empty: not compared. Raises `RankError`, the same on every rank.
    """
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        with _noting_a_long_wait(rank, timeout):
            store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
            store.set_timeout(timeout)
            compare_builds(store, rank, world_size, built, device)
    except dist.DistError as exc:
        raise RankError(
            f"rank {rank} on {socket.gethostname()} did not find all {world_size} ranks at {address} within {timeout}: start one "
            "process per rank, with an address that every host reaches, and a free port. On this rank: "
            f"{str(exc).partition(_NEWLINE)[0]}"
        ) from exc
    met: Store = store
    return met


@contextlib.contextmanager
def _noting_a_long_wait(rank: int, timeout: datetime.timedelta) -> Iterator[None]:
    """Print a note if the body takes long. Ranks 0 and 1 only: one of them waits if any rank is missing."""
    note = (
        f"note: rank {rank} has waited {_LONG_WAIT_SECONDS:g} seconds for the other ranks to begin a fit or an evaluation. Every rank "
        f"has to call it: do not put the call under `if trainer.is_main` or `if rank == 0`. The wait ends with an error after {timeout}"
    )
    timer = threading.Timer(_LONG_WAIT_SECONDS, print, (note,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if rank < 2:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def compare_builds(store: Store, rank: int, world_size: int, built: dict[str, str], device: str = "") -> None:
    """The comparison of `meet`, through the store alone: each rank reads the values of rank 0, and the last rank to compare writes the
    result. All ranks."""
    name = "fabricate/built"
    own = {"rank": rank, "host": socket.gethostname(), **built}
    if rank == 0:
        store.set(f"{name}/0", json.dumps(own))
    zero = json.loads(store.get(f"{name}/0"))
    if problem := _difference(zero, own, built) or _shared_device(store, name, rank, device):
        store.compare_set(f"{name}/problem", "", problem)
    if store.add(f"{name}/compared", 1) == world_size:
        has_problem = store.check([f"{name}/problem"])
        store.set(f"{name}/result", store.get(f"{name}/problem").decode() if has_problem else "")
    result = store.get(f"{name}/result").decode()
    if not result:
        return
    if store.add(f"{name}/read", 1) == world_size:
        store.set(f"{name}/all have read", "")
    if rank == 0:  # the store ends with rank 0's process
        with contextlib.suppress(dist.DistError):
            store.wait([f"{name}/all have read"], _READ_TIMEOUT)
    raise RankError(result)


def _difference(zero: Mapping[str, object], own: Mapping[str, object], topics: Iterable[str]) -> str:
    """The text of the error if a value of this rank differs from rank 0's, else an empty string."""
    topic = next((topic for topic in topics if zero[topic] != own[topic]), None)
    if topic is None:
        return ""
    return (
        f"{topic} is {zero[topic]} on rank 0 on {zero['host']} and {own[topic]} on rank {own['rank']} on {own['host']}; ranks "
        "that train together need the same: install the same packages on every host, and make GPUs visible on every host or on "
        "none (CUDA_VISIBLE_DEVICES)"
    )


def _shared_device(store: Store, name: str, rank: int, device: str) -> str:
    """The text of the error if another rank uses this rank's physical device, else an empty string."""
    if not device:
        return ""
    first = store.compare_set(f"{name}/device/{device}", "", str(rank)).decode()
    if first == str(rank):
        return ""
    return (
        f"rank {first} and rank {rank} on {socket.gethostname()} compute on one device ({device.partition(' ')[2]}), which the "
        "device's own backend (NCCL, for example) does not allow. Start one process per device, and let each process see either "
        "all devices of its host or only its own. Or open a process group that allows a shared device before the fit: "
        "torch.distributed.init_process_group('cpu:gloo,cuda:gloo')"
    )
