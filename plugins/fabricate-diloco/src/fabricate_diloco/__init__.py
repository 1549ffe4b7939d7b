"""Offers the strategy "diloco"."""

from __future__ import annotations

from collections.abc import Callable

from fabricate import hookimpl


@hookimpl
def register_strategies(register: Callable[..., None]) -> None:
    summary = "replicas that synchronise once in many updates"
    register("diloco", "fabricate_diloco.strategy:DiLoCo", summary=summary)
