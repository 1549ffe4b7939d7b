"""Every strategy on two real ranks, compared with a loop by hand; `python -m campaigns.parity` is the long form, and has one process and
three ranks as well (one process here: test_one_process.py)."""

from __future__ import annotations

from campaigns.parity import STRATEGIES, TOLERANCE, compare


def test_every_strategy_equals_the_loop_written_by_hand() -> None:
    table = list(compare(["single"], (1,))) + list(compare(set(STRATEGIES) - {"single"}, (2,)))
    assert len(table) == 4 * len(STRATEGIES)
    assert [row for row in table if max(row[-2:]) > TOLERANCE] == []
