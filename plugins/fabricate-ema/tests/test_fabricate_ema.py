"""The conformance kit, on replicas and on shards."""

from __future__ import annotations

from fabricate.testing import check_plugin


def test_it_keeps_what_a_plugin_promises() -> None:
    # Not neutral: what is validated is the average.
    check_plugin("ema:decay=0.9", neutral=False, strategies=("single", "ddp", "fsdp"))
