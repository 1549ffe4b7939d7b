"""The arithmetic of the data order: in which order rows are read, and by which rank in which micro-step.

Owns the permutation of an epoch, and the division of this order into windows (one optimizer update each), of windows into micro-steps, and
of micro-steps into the ranks' shares. Must not know torch, data sets, loading, or which process it runs in.

    order      0 1 2 3 4 5 6 7 | 8 9 ...          a pure function of (seed, epoch, number of rows)
    window     [-------G-------]                  G = world size x accumulation x batch size
    micro-step [--B*W--][--B*W--]
    rank       [-0-][-1-][-0-][-1-]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Share", "batch_seed", "epoch_order", "num_windows", "plan_window", "split"]


class Share(NamedTuple):
    """The units that one rank fetches for one micro-step: ``start:stop`` of the window, of which `rows` count.

    `rows` is 0 for a rank without rows. It fetches one unit of this micro-step, to take part in the collectives.
    """

    start: int
    stop: int
    rows: int


def split(rows: int, world_size: int, rank: int) -> slice:
    """The consecutive part of `rows` rows that `rank` reads. Parts are as equal as possible; lower ranks have the larger ones.

    >>> [split(5, 3, rank) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    base, extra = divmod(rows, world_size)
    start = rank * base + min(rank, extra)
    return slice(start, start + base + (rank < extra))


def plan_window(rows: int, batch_size: int, world_size: int, rank: int) -> list[Share]:
    """The shares of `rank` in a window of `rows` rows, one per micro-step. Only the last micro-step may have fewer rows.

    >>> plan_window(5, batch_size=2, world_size=2, rank=1)
    [Share(start=2, stop=4, rows=2), Share(start=4, stop=5, rows=0)]
    """
    step = batch_size * world_size
    shares = []
    for begin in range(0, rows, step):
        part = split(min(step, rows - begin), world_size, rank)
        own = part.stop - part.start
        shares.append(Share(begin + part.start, begin + part.stop, own) if own else Share(begin, begin + 1, 0))
    return shares


def num_windows(rows: int, global_batch: int, drop_last: bool) -> int:
    """The number of windows in `rows` rows; `drop_last` leaves out an incomplete global batch at the end."""
    return rows // global_batch if drop_last else -(-rows // global_batch)


def epoch_order(rows: int, *, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """The order of an epoch, shape ``(rows,)``, int64: a permutation determined by (seed, epoch) if `shuffle`, else ``arange``."""
    if not shuffle:
        return np.arange(rows, dtype=np.int64)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch))))
    return generator.permutation(rows).astype(np.int64, copy=False)


def batch_seed(seed: int, epoch: int, position: int = 0) -> int:
    """A 63-bit seed for random numbers drawn at `position` of an epoch. Neighbouring arguments give unrelated streams."""
    return int(np.random.SeedSequence((seed, epoch, position)).generate_state(1, np.uint64)[0] >> np.uint64(1))
