"""Offers the precision "fp8"; what it needs is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable

from fabricate import hookimpl


@hookimpl
def register_precisions(register: Callable[..., None]) -> None:
    register(
        "fp8", "fabricate_fp8.precision:FP8", summary="float8 matrix products in linear layers, bfloat16 elsewhere"
    )
