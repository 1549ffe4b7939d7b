"""The names of the built-in strategies: one process, replicas (DDP), shards (FSDP2), a model larger than the device."""

from __future__ import annotations

from collections.abc import Callable

from fabricate.hooks import hookimpl
from fabricate.strategies.ddp import DDP
from fabricate.strategies.device_map import DeviceMap
from fabricate.strategies.fsdp import FSDP
from fabricate.strategies.single import Single


@hookimpl
def register_strategies(register: Callable[..., None]) -> None:
    register("single", Single, summary="one process, one device")
    register("ddp", DDP, summary="a full replica per rank, gradients averaged")
    register("fsdp", FSDP, summary="parameters, gradients and optimizer state sharded (FSDP2)")
    register("device_map", DeviceMap, summary="one process, layers loaded from host memory and disk as they run")
