"""What every source of data has and knows: how rows become batches, whose rank reads, the position in an epoch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fabricate.data.batches import EvalBatch, Window
from fabricate.data.identity import fingerprint, indices
from fabricate.data.order import num_windows
from fabricate.errors import ConfigurationError

Watch = Callable[[Iterable[Any]], Iterator[Any]]
"""Gives the items that it gets; it may measure how long each takes."""


@dataclass(frozen=True)
class Loading:
    """How rows become batches, for data that does not say so itself (data sets and streams).

    `batch_size` counts rows per rank and micro-batch; `found`: where it comes from, if it was searched for.
    `shuffle=None` shuffles training data sets only. `drop_last` leaves out the last incomplete *global* batch of a training epoch.
    `pin_memory` puts batches where a device can copy them from by itself; a DataLoader that asks for it anyway keeps it, iterables of
    batches come as they are.
    """

    batch_size: int | None = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    pin_memory: bool = False
    found: str = ""


@dataclass(frozen=True)
class Setup:
    """What every kind of source needs to know, and the sentences they share."""

    argument: str
    training: bool
    rank: int
    world_size: int
    accumulation: int
    seed: int
    limit: int | float | None
    drop_last: bool
    notes: list[str]

    def error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self.argument} {problem}.")

    def empty(self) -> ConfigurationError:
        return self.error("has no rows. Check the path, the split, and any filter that was applied")

    def note_drop_last(self) -> None:
        if not self.training:
            self.notes.append(
                f"{self.argument}: drop_last=True is not applied, because an evaluation reads every row once"
            )

    def check(self, loading: Loading) -> None:
        for name, value, least in (
            ("batch_size", loading.batch_size, 1),
            ("num_workers", loading.num_workers, 0),
            ("seed", self.seed, 0),
        ):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ConfigurationError(
                    f"{name}={value!r} (for {self.argument}) must be a whole number, {least} or more."
                )
        limit = self.limit
        whole = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1
        share = isinstance(limit, float) and 0 < limit <= 1
        if limit is not None and not whole and not share:
            raise ConfigurationError(
                f"limit={limit!r} (for {self.argument}) must be a number of micro-batches (int, 1 or more) or a share "
                "of the data (float above 0, up to 1.0)."
            )

    def limited(self, units: int | None, step: int) -> int | None:
        """The most units (rows, or the user's batches) of an epoch that the limit allows; None: all there are."""
        if self.limit is None:
            return None
        if isinstance(self.limit, int):
            return self.limit * step
        if units is None:
            raise self.error(
                f"has no length, so limit={self.limit} (a share of the length) cannot be computed. Pass a number of micro-batches"
            )
        return min(units, max(1, int(units * self.limit + 1e-9)))  # 0.29 * 100 is 28.999... in binary

    def refuse(self, loading: Loading, names: Sequence[str], remedy: str) -> None:
        """Raise for every setting among `names` that was asked for: it would have no effect."""
        default = Loading()
        for name in names:
            if getattr(loading, name) != getattr(default, name):
                raise ConfigurationError(f"{name}={getattr(loading, name)!r} has no effect: {self.argument} {remedy}.")


def first_other(everyone: Sequence[Any]) -> int | None:
    """The first rank whose value, of those in rank order, is not that of rank 0."""
    return next((rank for rank, value in enumerate(everyone) if value != everyone[0]), None)


class Source(ABC):
    """Data opened for one rank: what the plan prints about it, and its windows.

    `kind` is "dataloader", "dataset", "stream" or "iterable". Counts that need a length nobody gave are None:
    `batch_size` (rows per rank and micro-batch), `num_samples` (global rows per epoch after limit and drop_last),
    `global_batch` (rows per update), `batches_per_update` (of all ranks, where the batches are the user's),
    `updates_per_epoch`. `shuffle`: whether the order is a permutation or that of the data, None where a sampler or the data
    itself decides. `resumes` is "exactly, by position", "by its own state" or "by replay". `data` is what is read. `state`: of data
    that resumes by its own, where it was after the window yielded last; a checkpoint takes it, and a run that continues sets it
    before its first window. `first`: a digest of what every rank reads alike in the pass in progress, the first rows, or the order
    that a sampler of the user's gives. Empty until then, on one rank, and where the order is fabricate's.
    """

    data: Any
    samplers: tuple[Any, ...] = ()
    """What gives the order of the rows, where these are objects of the user's."""
    state: Any = None
    first: str = ""
    in_workers: bool = False
    """Whether worker processes read the data."""
    order_digest: str = ""
    """Of the order of the epoch in progress, where a sampler draws it; a checkpoint takes it, and a run that continues sets it."""
    drawn_by: str = ""
    """See `order`; of data whose `shuffle` is None."""
    exact_rows: bool = True
    """Whether batches have the rows that were planned for them; a collate_fn of the user's may leave some out."""

    def __init__(
        self, setup: Setup, kind: str, *, batch_size: int | None, units: int | None, resumes: str, shuffle: bool | None
    ) -> None:
        """`units` is the epoch's length before the limit: rows, or batches when the batches are the user's."""
        step = (batch_size or 1) * setup.world_size
        self._setup = setup
        self._cap = setup.limited(units, step)
        self._units_per_window = step * setup.accumulation
        self.kind = kind
        self.batch_size = batch_size
        self.resumes = resumes
        self.shuffle = shuffle
        self.notes: tuple[str, ...] = tuple(setup.notes)
        self.global_batch = self._units_per_window if batch_size else None
        self.batches_per_update = None if batch_size else self._units_per_window
        self.num_units = units
        """The epoch's length before the limit, in rows, or in batches where these are the user's."""
        usable = units if units is None or self._cap is None else min(units, self._cap)
        if usable == 0:
            raise setup.empty()
        self.updates_per_epoch: int | None = None
        self.num_samples: int | None = None
        if usable is not None:
            self.updates_per_epoch = num_windows(usable, self._units_per_window, setup.drop_last)
            if not self.updates_per_epoch:
                raise setup.error(
                    f"has fewer rows than one global batch ({usable} of {self._units_per_window}), and drop_last=True "
                    "leaves out incomplete global batches, so no update remains. Lower the batch size, or pass drop_last=False"
                )
            if batch_size:
                self.num_samples = min(usable, self.updates_per_epoch * self._units_per_window)

    def grown(self) -> str:
        """What is to be said of data that has another number of rows than when it was opened, or nothing."""
        return ""

    @property
    def rows_differ(self) -> bool:
        """Whether the last window of an epoch is known to be shorter than the others."""
        return bool(self.num_samples and self.global_batch and self.num_samples % self.global_batch)

    @property
    def sampler_names(self) -> list[str]:
        """The classes of the samplers, where these decide the order."""
        return [type(sampler).__qualname__ for sampler in self.samplers if sampler is not None and self.shuffle is None]

    def order(self) -> dict[str, Any]:
        """What makes the order of the rows, as JSON values, for `fabricate rows`. "drawn": "permutation" or "sequence" of `units` rows,
        "sampler" where only the data says, or "" where the order is not a function of seed and position."""
        return {
            "kind": self.kind,
            "drawn": {True: "permutation", False: "sequence", None: self.drawn_by}[self.shuffle],
            "seed": self.seed,
            "units": self.num_units,
            "limit": self._cap,
            "drop_last": self._setup.drop_last,
            "batch_size": self.batch_size,
            "accumulation": self._setup.accumulation,
        }

    @cached_property
    def identity(self) -> dict[str, str | None]:
        """What tells the rows from others of the same number, as it was when it was first asked for: see `fabricate.data.identity`."""
        return {"fingerprint": fingerprint(self.data), "indices": indices(self.data, self.samplers)}

    @property
    def seed(self) -> int:
        """What the order and the random state of reading are derived from."""
        return self._setup.seed

    def reseed(self, seed: int) -> None:
        """Go on with another seed: that of the run which is resumed. Before any reading."""
        self._setup = replace(self._setup, seed=seed)

    def different(self, everyone: Sequence[Any], what: str) -> ConfigurationError | None:
        """The error about a value of this data that is not the same on every rank, in rank order; None where it is."""
        rank = first_other(everyone)
        if rank is None:
            return None
        shown = f" ({everyone[0]} on rank 0, {everyone[rank]} on rank {rank})" if isinstance(everyone[0], int) else ""
        return self._setup.error(
            f"has {what} on rank {rank} than on rank 0{shown}. Every rank has to pass the same, whole data, because fabricate "
            "divides it. Data "
            "that is already divided (split_dataset_by_node, shard(), a file for each rank) would be divided again, and rows would be left "
            "out. If the script draws rows at random, call fabricate.seed_everything(0) first, so that every rank draws the same"
        )

    def unlike(self, everyone: Sequence[str]) -> ConfigurationError | None:
        """The error about `first`, of every rank in order, where it is not the same on every rank."""
        return self.different(everyone, "other first rows")

    def probe(self) -> str:
        """A digest of some rows, read for it alone; empty where that could do harm. Leaves random generators as they are."""
        return ""

    @abstractmethod
    def windows(self, epoch: int, start: int = 0, watch: Watch = iter) -> Generator[Window, None, None]:
        """The windows of `epoch` from position `start` (rows consumed); every rank calls it, none waits for another. Batches are read
        through `watch`.

        Advancing drops what was left of the previous window, closing ends worker processes. Raises ConfigurationError
        for a position that this data cannot be at.

        >>> source = open_source(dataset, argument="train", loading=Loading(8), training=True, rank=0, world_size=1)
        >>> for window in source.windows(epoch=0):
        ...     for batch, rows in window.micro_batches: ...
        """

    @abstractmethod
    def batches(self, *, stand_ins: bool) -> Generator[EvalBatch, None, None]:
        """Every row exactly once over all ranks. With `stand_ins` every rank gets the same number of batches."""
