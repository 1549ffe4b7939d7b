"""Checks and settings for a forked process, such as a rank started from a notebook: it cannot use the GPU state and the threads of its
parent.

Must not know: who forked it, strategies, the loop.
"""

from __future__ import annotations

import multiprocessing

import torch

from fabricate.errors import ConfigurationError


def settle_fork(device: torch.device) -> str:
    """Prepare a forked process for computing on `device`. Returns a note for the plan, empty if nothing had to be done.

    Raises `ConfigurationError` if the parent process has used the GPUs already, because then this process cannot use them.
    """
    if getattr(multiprocessing.current_process(), "_start_method", None) != "fork":
        return ""
    if device.type == "cuda" and torch.cuda._is_in_bad_fork():
        raise ConfigurationError(
            "this process was forked from one that had already used the GPUs, so this process cannot use them. Restart the "
            "notebook's kernel, and call nothing that touches a GPU (tensor.cuda(), torch.cuda.get_device_properties(), an "
            "Accelerator) before notebook_launcher"
        )
    threads = torch.get_num_threads()
    if threads == 1:
        return ""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: the first operation that uses them would hang
    return f"one thread per rank instead of {threads}: a forked process does not have the threads of its parent"
