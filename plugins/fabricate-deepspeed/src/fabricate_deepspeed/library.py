"""The import of DeepSpeed: once, for the device of the run, without lasting changes to the process.

Must not know: strategies, configuration.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from fabricate import ConfigurationError


def missing() -> bool:
    """Whether the package is not installed. Imports nothing."""
    return importlib.util.find_spec("deepspeed") is None


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set `variables` in the environment; on exit, undo every change that was made to the environment inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def load(device: torch.device) -> ModuleType:
    """The package, bound to the kind of `device`, which it determines when it is imported. The first call takes seconds."""
    with environment(**({"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {})):
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        if accelerator.device_name() != device.type:
            raise ConfigurationError(
                f"DeepSpeed was imported for {accelerator.device_name()} in this process, but the run is on {device.type}; start "
                "a new process, or unset DS_ACCELERATOR"
            )
        if device.type == "cpu":
            # DeepSpeed's shared-memory reduction is for inference and would be compiled now, for half a minute.
            importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
            # DeepSpeed tests for oneDNN's fast kernels; torch computes in float16 without them, as the precision
            # verifies.
            accelerator.is_fp16_supported = lambda: True
    return deepspeed


@contextlib.contextmanager
def refusals(where: str) -> Iterator[None]:
    """Raise DeepSpeed's errors about a configuration as `ConfigurationError`."""
    from deepspeed.runtime.config import DeepSpeedConfigError

    try:
        yield
    except (DeepSpeedConfigError, ValueError, AssertionError) as exc:
        raise ConfigurationError(f"DeepSpeed refuses {where}: {exc}") from exc


class Setup:
    """The settings of the process for DeepSpeed, between `start` and `stop`: LOCAL_RANK is the index of the device, because DeepSpeed makes
    the name of the device from it, also during a forward; torch's warnings about calls in DeepSpeed are off. `stop` restores LOCAL_RANK,
    the level of DeepSpeed's logger, which a configuration file may set for the whole process, and torch's linear function, which ZeRO-3
    replaces."""

    def __init__(self) -> None:
        self._levels: dict[logging.Logger | logging.Handler, int] = {}
        self._filter: Any = None
        self._local_rank: str | None = None
        self._linear = torch.nn.functional.linear

    def start(self, device: torch.device) -> None:
        """Apply the settings, unless they are applied already."""
        if self._filter is None:
            self._linear = torch.nn.functional.linear
            self._local_rank = os.environ.get("LOCAL_RANK")
            os.environ["LOCAL_RANK"] = str(device.index or 0)
            logger = logging.getLogger("DeepSpeed")
            self._levels = {target: target.level for target in (logger, *logger.handlers)}
            warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)
            self._filter = warnings.filters[0]

    def stop(self) -> None:
        """Restore the process, if the settings are applied."""
        if self._filter is None:
            return
        os.environ.pop("LOCAL_RANK", None)
        os.environ.update({} if self._local_rank is None else {"LOCAL_RANK": self._local_rank})
        for target, level in self._levels.items():
            target.setLevel(level)
        torch.nn.functional.linear = self._linear
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        self._levels, self._filter = {}, None
