"""What a process that was forked from another, as notebooks start ranks, cannot use of what the other one had.

Must not know: who forked it, strategies, the loop.
"""

from __future__ import annotations

import multiprocessing

import torch

from fabricate.errors import ConfigurationError


def settle_fork(device: torch.device) -> str:
    """Make a forked process fit for computing on `device`: a line for the plan, empty where nothing had to be done.

    Raises `ConfigurationError` where the process that forked this one used the GPUs already, which cannot be mended here.
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
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, and the first operation that asks for them hangs
    return f"one thread per rank instead of {threads}: a forked process does not have the threads of its parent"
