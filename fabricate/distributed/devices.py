"""The device on which a process computes, found through `torch.accelerator`, and the backend with which ranks on it exchange tensors.

Owns the choice and its errors: an accelerator that exists is used, or named in an error; the CPU never replaces it silently. Must not know:
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
"""The supported types of device, each with Accelerate's name for several ranks on it; empty: torch has no process group for this type."""
_NAMES = "give cpu, cuda, cuda:1, xpu, npu or mps, or unset it"
_ON_CPU = "to compute on the CPU instead, set ACCELERATE_TORCH_DEVICE=cpu"


def choose_device(
    environ: Mapping[str, str], requested: Mapping[str, Request], local_rank: int
) -> tuple[torch.device, str]:
    """The device of the process with this local rank, and the source of the choice. All ranks, no messages.

    The index is the local rank modulo the number of devices that the process sees (1 if the scheduler shows each process only its own
    device). Raises `ConfigurationError` for a device that does not exist or that fabricate does not support.
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
    """The device that ACCELERATE_TORCH_DEVICE names. Raises `ConfigurationError` if it cannot be used."""
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
    """A note for the plan if fabricate has not been tested on this type of device, else an empty string."""
    if device.type in ("cpu", "cuda"):
        return ""
    return (
        f"fabricate has not been tested on {device.type}, and checkpoints do not hold the state of this device's random generator; "
        f"{_ON_CPU}"
    )


def make_current(device: torch.device) -> None:
    """Make `device` the current device of this process, so that code that names only the type uses it. It stays so after the fit. NCCL
    relies on it."""
    if device.index is not None and device.type != "mps":
        torch.accelerator.set_device_index(device.index)


def backend(device: torch.device) -> str:
    """The backends of a process group of ranks on such devices, which carries CPU tensors too."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def distributed_type(device: torch.device, in_group: bool) -> str:
    """Accelerate's name for a process on `device`, with a process group (`in_group`) or without."""
    return KINDS.get(device.type, "") if in_group else "NO"


def physical_name(device: torch.device) -> str:
    """A name that is the same in two processes exactly if they compute on the same physical device; empty for a CPU and for an unknown
    device."""
    if device.type not in ("cuda", "xpu"):
        return ""
    number = str(torch.get_device_module(device).get_device_properties(device).uuid)
    return f"{socket.gethostname()} {number}" if set(number) - {"0", "-"} else ""
