"""Offers the strategy "powersgd"; what it needs is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable

from fabricate import hookimpl


@hookimpl
def register_strategies(register: Callable[..., None]) -> None:
    register(
        "powersgd",
        "fabricate_powersgd.strategy:PowerSGD",
        summary="replicas that exchange low-rank approximations of gradients",
    )
