"""Which device a process computes on, found through `torch.accelerator`, and how ranks on such devices send each other tensors.

Owns the choice and its refusals: what is there is used, or refused by name, and never left aside for the CPU. Must not know:
strategies, what ranks send each other.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import torch
import torch.distributed as dist
from accelerate.utils import is_torch_xla_available

from fabricate.errors import ConfigurationError
from fabricate.launch.variables import Request

KINDS = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU", "xpu": "MULTI_XPU", "npu": "MULTI_NPU", "mps": ""}
"""The kinds of device that are chosen, and what Accelerate calls several ranks on them; empty: torch has no process group there."""
_NAMES = "give cpu, cuda, cuda:1, xpu, npu or mps, or unset it"
_ON_CPU = "to compute on the CPU instead, set ACCELERATE_TORCH_DEVICE=cpu"


def choose_device(
    environ: Mapping[str, str], requested: Mapping[str, Request], local_rank: int
) -> tuple[torch.device, str]:
    """The device of the process with this rank on its host, and where the choice comes from. All ranks, no messages.

    The index is the local rank modulo the number of devices that the process sees: one, where the scheduler shows each process its own.
    Raises `ConfigurationError` for a device that is not there, and for one that fabricate does not compute on.
    """
    _refuse_xla(environ, requested)
    available = torch.accelerator.current_accelerator(check_available=True)
    if "device" in requested:
        return _requested(requested, available, local_rank), requested["device"].source
    if "cpu" in requested:
        return torch.device("cpu"), requested["cpu"].source
    if available is None:
        return torch.device("cpu"), "no accelerator here"
    if available.type not in KINDS:
        raise ConfigurationError(
            f"this machine has a device of type {available.type!r}, which fabricate does not support; {_ON_CPU}"
        )
    return torch.device(available.type, local_rank % torch.accelerator.device_count()), "detected"


def _requested(requested: Mapping[str, Request], available: torch.device | None, local_rank: int) -> torch.device:
    """What ACCELERATE_TORCH_DEVICE names."""
    named = f"{requested['device'].source}={requested['device'].value!r}"
    try:
        device = torch.device(requested["device"].value)
    except RuntimeError as exc:
        raise ConfigurationError(f"{named} is not a device; {_NAMES}") from exc
    if device.type not in KINDS:
        raise ConfigurationError(
            f"{named} is a device of type {device.type!r}, which fabricate does not support; {_NAMES}"
        )
    if device.type == "cpu":
        return torch.device("cpu")
    if "cpu" in requested:
        raise ConfigurationError(f"{named} and {requested['cpu'].source} name different devices; unset one of them")
    count = torch.accelerator.device_count() if available is not None and available.type == device.type else 0
    index = local_rank % (count or 1) if device.index is None else device.index
    if index >= count:
        there = (
            f"{count} of that kind" if count else f"{'no accelerator' if available is None else available.type} here"
        )
        raise ConfigurationError(f"{named}: torch finds {there}; give a device that exists, or unset the variable")
    return torch.device(device.type, index)


def _refuse_xla(environ: Mapping[str, str], requested: Mapping[str, Request]) -> None:
    if is_torch_xla_available():
        raise ConfigurationError(
            "torch_xla is installed, so Accelerate uses XLA devices (TPUs), which fabricate does not support; uninstall "
            "torch_xla, or set USE_TORCH_XLA=0 before Python starts"
        )
    kind = environ.get("PJRT_DEVICE", "")
    if kind.upper() in ("TPU", "NEURON") and not requested.keys() & {"device", "cpu"}:
        raise ConfigurationError(
            f"PJRT_DEVICE={kind!r} asks for an XLA device, which fabricate does not support; unset it, or, {_ON_CPU}"
        )


def note_on(device: torch.device) -> str:
    """A line for the plan about a kind of device on which fabricate was not tried; empty for the others."""
    if device.type in ("cpu", "cuda"):
        return ""
    return (
        f"fabricate has not been tested on {device.type}, and checkpoints do not hold the state of this device's random generator; "
        f"{_ON_CPU}"
    )


def make_current(device: torch.device) -> None:
    """Let this process allocate on `device` where only its kind is named, also after the fit. NCCL relies on it."""
    if device.index is not None and device.type != "mps":
        torch.accelerator.set_device_index(device.index)


def backend(device: torch.device) -> str:
    """The backends of a process group of ranks on such devices. It carries CPU tensors too."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def distributed_type(device: torch.device, in_group: bool) -> str:
    """What Accelerate calls a process on `device` with or without a process group."""
    return KINDS.get(device.type, "") if in_group else "NO"


def physical_name(device: torch.device) -> str:
    """A name that two processes have in common exactly if they compute on one physical device; empty where that is not known, and
    for a CPU."""
    if device.type not in ("cuda", "xpu"):
        return ""
    number = str(torch.get_device_module(device).get_device_properties(device).uuid)
    return f"{socket.gethostname()} {number}" if set(number) - {"0", "-"} else ""
