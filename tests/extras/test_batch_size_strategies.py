"""The batch size is found on two ranks of replicas and of DeepSpeed; tests/training/test_batch_size.py has shards."""

from __future__ import annotations

import pytest

from fabricate.testing import close_pools, run_ranks
from tests.training.test_batch_size import searched_on_ranks


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_ranks_find_the_size_that_fits_on_all_of_them(strategy: str) -> None:
    close_pools()  # a process that had a process group cannot search
    try:
        assert run_ranks(searched_on_ranks, 2, strategy) == [({8: True, 16: False, 12: True}, 8, 192)] * 2
    finally:
        close_pools()  # their memory is limited
