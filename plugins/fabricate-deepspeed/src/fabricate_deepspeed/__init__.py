"""Offers the strategies "zero1", "zero2" and "zero3"; "zero0" is refused, with the strategies to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from fabricate import ConfigurationError, hookimpl


def _stage_zero(**options: str) -> NoReturn:
    raise ConfigurationError(
        "strategy='zero0': stage 0 shards nothing, it is data parallelism; use strategy='ddp', or stage 1, 2 or 3"
    )


@hookimpl
def register_strategies(register: Callable[..., None]) -> None:
    register("zero0", _stage_zero, summary="refused: stage 0 is strategy='ddp'")
    register("zero1", "fabricate_deepspeed.stage12:ZeRO1", summary="DeepSpeed ZeRO-1: optimizer state in shards")
    register("zero2", "fabricate_deepspeed.stage12:ZeRO2", summary="DeepSpeed ZeRO-2: and gradients")
    register("zero3", "fabricate_deepspeed.stage3:ZeRO3", summary="DeepSpeed ZeRO-3: and parameters")
