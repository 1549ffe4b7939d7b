"""The batch size is found on two ranks under the strategies that tests/training/test_batch_size.py leaves out."""

from __future__ import annotations

import pytest

from fabricate.testing import close_pools, run_ranks
from tests.training.test_batch_size import searched_on_ranks


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_ranks_find_what_fits_on_all_of_them_under_every_strategy(strategy: str) -> None:
    close_pools()  # a process that had a process group cannot search
    try:
        assert run_ranks(searched_on_ranks, 2, strategy) == [({8: True, 16: False, 12: True}, 8, 192)] * 2
    finally:
        close_pools()  # their memory is limited
