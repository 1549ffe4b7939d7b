"""DeepSpeed itself: imported once, for the device of the run, without leaving anything changed in the process.

Must not know: strategies, configuration.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from types import ModuleType

import torch

from fabricate import ConfigurationError


def missing() -> bool:
    """Whether the package is not installed. Imports nothing."""
    return importlib.util.find_spec("deepspeed") is None


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """`variables` in the environment, and the environment as before afterwards, whatever was set inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def load(device: torch.device) -> ModuleType:
    """The package, bound to the kind of `device`. Seconds the first time. It decides on the device when it is imported."""
    with environment(**({"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {})):
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        found = get_accelerator()
        if found.device_name() != device.type:
            raise ConfigurationError(
                f"DeepSpeed was imported for {found.device_name()} in this process and the run is on {device.type}; start a new "
                "process, or unset DS_ACCELERATOR"
            )
        if device.type == "cpu":
            # Its shared-memory reduction is for inference and would be compiled now, for half a minute.
            importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
            # It means oneDNN's fast kernels; torch computes in float16 without them, which the precision verifies.
            found.is_fp16_supported = lambda: True
    return deepspeed


@contextlib.contextmanager
def log_level_kept() -> Iterator[None]:
    """DeepSpeed's logger as before afterwards: a configuration file may set its level for the whole process."""
    logger = logging.getLogger("DeepSpeed")
    levels = {target: target.level for target in (logger, *logger.handlers)}
    try:
        yield
    finally:
        for target, level in levels.items():
            target.setLevel(level)
