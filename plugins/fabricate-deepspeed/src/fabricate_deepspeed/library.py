"""DeepSpeed itself: imported once, for the device of the run, without leaving anything changed in the process.

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

        accelerator = get_accelerator()
        if accelerator.device_name() != device.type:
            raise ConfigurationError(
                f"DeepSpeed was imported for {accelerator.device_name()} in this process, but the run is on {device.type}; start "
                "a new process, or unset DS_ACCELERATOR"
            )
        if device.type == "cpu":
            # Its shared-memory reduction is for inference and would be compiled now, for half a minute.
            importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
            # It means oneDNN's fast kernels; torch computes in float16 without them, which the precision verifies.
            accelerator.is_fp16_supported = lambda: True
    return deepspeed


@contextlib.contextmanager
def refusals(where: str) -> Iterator[None]:
    """What DeepSpeed says about a configuration, as an error of fabricate's."""
    from deepspeed.runtime.config import DeepSpeedConfigError

    try:
        yield
    except (DeepSpeedConfigError, ValueError, AssertionError) as exc:
        raise ConfigurationError(f"DeepSpeed refuses {where}: {exc}") from exc


class Setup:
    """The process as DeepSpeed wants it, between `start` and `stop`: LOCAL_RANK, from which it makes the name of the device also in
    the course of a forward, is the index of the device, and torch's words about calls that DeepSpeed makes are not repeated. Afterwards
    the level of DeepSpeed's logger, which a configuration file may set for the whole process, is as before, and so is torch's linear
    function, which ZeRO-3 replaces by one of its own."""

    def __init__(self) -> None:
        self._levels: dict[logging.Logger | logging.Handler, int] = {}
        self._filter: Any = None
        self._local_rank: str | None = None
        self._linear = torch.nn.functional.linear

    def start(self, device: torch.device) -> None:
        """Begin, unless it was begun."""
        if self._filter is None:
            self._linear = torch.nn.functional.linear
            self._local_rank = os.environ.get("LOCAL_RANK")
            os.environ["LOCAL_RANK"] = str(device.index or 0)
            logger = logging.getLogger("DeepSpeed")
            self._levels = {target: target.level for target in (logger, *logger.handlers)}
            warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)
            self._filter = warnings.filters[0]

    def stop(self) -> None:
        """End, if it was begun."""
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
