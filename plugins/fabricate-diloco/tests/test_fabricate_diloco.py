"""The conformance kit."""

from __future__ import annotations

from fabricate.testing import check_strategy


def test_it_keeps_what_a_strategy_promises() -> None:
    check_strategy("diloco:every=2", equivalent=False)
