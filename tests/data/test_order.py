"""The order arithmetic, on small numbers and without torch."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from fabricate.data.order import Share, batch_seed, epoch_order, num_windows, plan_window, split


def test_split_is_consecutive_and_even_with_lower_ranks_first() -> None:
    for rows, world_size in itertools.product(range(12), range(1, 6)):
        parts = [split(rows, world_size, rank) for rank in range(world_size)]
        sizes = [part.stop - part.start for part in parts]
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(rows))
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


def test_a_full_micro_step_gives_each_rank_its_consecutive_slice() -> None:
    assert plan_window(12, batch_size=2, world_size=3, rank=1) == [Share(2, 4, 2), Share(8, 10, 2)]


def test_a_ragged_window_covers_every_row_once_in_the_fewest_micro_steps() -> None:
    for rows, batch_size, world_size in itertools.product(range(1, 14), range(1, 4), range(1, 5)):
        plans = [plan_window(rows, batch_size, world_size, rank) for rank in range(world_size)]
        assert {len(plan) for plan in plans} == {-(-rows // (batch_size * world_size))}
        indices = [row for plan in plans for share in plan if share.rows for row in range(share.start, share.stop)]
        assert sorted(indices) == list(range(rows))


def test_a_rank_without_rows_stands_in_with_one_row_of_that_micro_step() -> None:
    assert plan_window(7, batch_size=2, world_size=3, rank=2) == [Share(4, 6, 2), Share(6, 7, 0)]


@pytest.mark.parametrize(
    ("rows", "drop_last", "expected"), [(12, False, 3), (13, False, 4), (13, True, 3), (3, True, 0)]
)
def test_num_windows_counts_the_incomplete_one_unless_it_is_dropped(rows: int, drop_last: bool, expected: int) -> None:
    assert num_windows(rows, 4, drop_last) == expected


def test_the_order_is_a_permutation_that_depends_on_seed_and_epoch_only() -> None:
    order = epoch_order(50, seed=3, epoch=2, shuffle=True)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(50))
    assert order.tolist() == epoch_order(50, seed=3, epoch=2, shuffle=True).tolist()
    assert order.tolist() != epoch_order(50, seed=3, epoch=1, shuffle=True).tolist()
    assert order.tolist() != epoch_order(50, seed=2, epoch=2, shuffle=True).tolist()
    assert epoch_order(4, seed=3, epoch=2, shuffle=False).tolist() == [0, 1, 2, 3]


def test_the_shuffled_order_is_pinned_because_checkpoints_rely_on_it() -> None:
    assert epoch_order(10, seed=0, epoch=1, shuffle=True).tolist() == [9, 1, 3, 8, 7, 6, 0, 4, 2, 5]


def test_batch_seeds_differ_between_neighbours_and_fit_63_bits() -> None:
    seeds = {batch_seed(seed, epoch, place) for seed in range(5) for epoch in range(5) for place in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_module_does_not_import_torch() -> None:
    code = "import sys, fabricate.data.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
