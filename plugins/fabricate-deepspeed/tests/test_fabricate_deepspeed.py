"""The conformance kit."""

from __future__ import annotations

import pytest

from fabricate.testing import check_strategy


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_it_keeps_what_a_strategy_promises(strategy: str) -> None:
    check_strategy(strategy, world_sizes=(2,), timeout=120)
