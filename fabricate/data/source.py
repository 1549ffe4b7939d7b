"""The base class of all sources of data, and the settings for making batches of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from fabricate.data.batches import EvalBatch, Window
from fabricate.data.identity import attributes, fingerprint, indices
from fabricate.data.order import num_windows
from fabricate.errors import ConfigurationError
from fabricate.seeding import derive_seed

Watch = Callable[[Iterable[Any]], Iterator[Any]]
"""A function that yields the items of its argument, and may measure how long each takes to arrive."""


@dataclass(frozen=True)
class Loading:
    """The settings for making batches of rows, for data without such settings (data sets and streams).

    `batch_size` counts rows per rank and micro-batch; `found` describes how it was found, if it was searched for. `shuffle=None` shuffles
    training data sets only. `drop_last` leaves out the last incomplete *global* batch of a training epoch. `pin_memory` puts batches into
    pinned memory, from which a device can copy them without the host. It does not change iterables of batches, nor a DataLoader that
    already pins memory.
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
    """The settings that every kind of source needs, and the errors that all kinds share."""

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
        whole = (
            f" on rank {self.rank}. Every rank passes all rows and reads its share of them"
            if self.world_size > 1
            else ""
        )
        return self.error(f"has no rows{whole}. Check the path, the split, and any filter that was applied")

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
            if name == "batch_size" and value is None:
                continue  # not every kind of data needs one
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(
                    f"{name}={value!r} (for {self.argument}) must be a whole number, {least} or more."
                )
        if loading.shuffle not in (None, True, False):
            raise ConfigurationError(f"shuffle={loading.shuffle!r} (for {self.argument}) must be True, False or None.")
        if loading.collate_fn is not None and not callable(loading.collate_fn):
            raise ConfigurationError(
                f"collate_fn={loading.collate_fn!r} (for {self.argument}) must be a function that makes a batch of a list of rows."
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
        """The largest number of units (rows, or the user's batches) per epoch that the limit allows; None: no limit."""
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
        """Raise ConfigurationError if one of the settings `names` was set, because it would have no effect."""
        default = Loading()
        for name in names:
            if getattr(loading, name) != getattr(default, name):
                raise ConfigurationError(f"{name}={getattr(loading, name)!r} has no effect: {self.argument} {remedy}.")


def _settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings of a DataLoader that can be assigned, and those of torch's batch sampler."""
    sampler = loader.batch_sampler
    own = ("batch_size", "drop_last", "sampler") if type(sampler) is BatchSampler else ()
    return {"collate_fn": loader.collate_fn} | {name: getattr(sampler, name) for name in own}


def first_other(everyone: Sequence[Any]) -> int | None:
    """The first rank whose value differs from that of rank 0, or None. `everyone`: the values in rank order."""
    return next((rank for rank, value in enumerate(everyone) if value != everyone[0]), None)


class Source(ABC):
    """Data opened for one rank: its windows, and the properties that the plan prints.

    `kind` is "dataloader", "dataset", "stream" or "iterable". Counts are None if the data does not determine them: `batch_size` (rows
    per rank and micro-batch), `num_samples` (global rows per epoch after limit and drop_last), `global_batch` (rows per update); if the
    batches are the user's, `num_batches` (per epoch, likewise) and `batches_per_update` (of all ranks); `updates_per_epoch`. `shuffle`:
    True for a permutation, False for the order of the data, None if a sampler or the data itself determines the order. `resumes` is
    "exactly, by position", "by its own state" or "by replay". `data` is the object that is read. `state`: for data that resumes by its
    own state, this state after the last yielded window; a checkpoint stores it, and a resumed run sets it before its first window.
    `first`: a digest of the first rows of the current pass, or of the order that a user's sampler draws, which must be equal on all
    ranks. It is "" before they are read, with one rank, and if fabricate makes the order.
    """

    _loader: DataLoader[Any] | None = None
    _settings: Mapping[str, Any] = MappingProxyType({})
    data: Any
    samplers: tuple[Any, ...] = ()
    """The user's objects that determine the order of the rows, if there are any."""
    state: Any = None
    first: str = ""
    stream_readers: int | None = None
    """The number of processes that divide a stream among them, if a DataLoader reads it; the order depends on this number."""
    in_workers: bool = False
    """Whether worker processes read the data."""
    several_workers: bool = False
    """Whether more than one of them does."""
    collate_fn: Any = None
    """The function that makes batches of rows, if it is known."""
    order_digest: str = ""
    """A digest of the order of the current epoch, if a sampler draws it; a checkpoint stores it, and a resumed run sets it."""
    drawn_by: str = ""
    """The value of "drawn" in `order` if `shuffle` is None."""
    rows_per_batch: int | None = None
    """The rows of a batch of the user's, if its loader or sampler has a `batch_size`."""
    exact_rows: bool = True
    """Whether every batch has the planned number of rows; a user's collate_fn may leave rows out."""

    def __init__(
        self, setup: Setup, kind: str, *, batch_size: int | None, units: int | None, resumes: str, shuffle: bool | None
    ) -> None:
        """`units` is the epoch's length before the limit, in rows, or in batches if these are the user's."""
        step = (batch_size or 1) * setup.world_size
        self._setup = setup
        self._cap = setup.limited(units, step)
        self._units_per_window = step * setup.accumulation
        self._evaluation: int | None = None
        self.repeats_training = False
        """Whether an evaluation reads the training batches (`overfit_batches`), with their random numbers."""
        self.kind = kind
        self.batch_size = batch_size
        self.resumes = resumes
        self.shuffle = shuffle
        self.notes: tuple[str, ...] = tuple(setup.notes)
        self.global_batch = self._units_per_window if batch_size else None
        self.batches_per_update = None if batch_size else self._units_per_window
        self.num_units = units
        """The epoch's length before the limit, in rows, or in batches if these are the user's."""
        self._usable = usable = units if units is None or self._cap is None else min(units, self._cap)
        if usable == 0:
            raise setup.empty()
        self.updates_per_epoch: int | None = None
        self.num_samples: int | None = None
        self.num_batches: int | None = None
        if usable is not None:
            self.updates_per_epoch = num_windows(usable, self._units_per_window, setup.drop_last)
            if not self.updates_per_epoch:
                raise setup.error(
                    f"has fewer rows than one global batch ({usable} of {self._units_per_window}), and drop_last=True "
                    "leaves out incomplete global batches, so no update remains. Lower the batch size, or pass drop_last=False"
                )
            read = min(usable, self.updates_per_epoch * self._units_per_window)
            if not batch_size:
                self.num_batches = read
            else:
                self.num_samples = read
                if setup.training and usable - self.num_samples >= step:
                    left = f"the last {usable - self.num_samples} of {usable} rows of each epoch"
                    self.notes += (
                        f"{setup.argument}: drop_last=True leaves out {left}, because they do not fill a global batch of "
                        f"{self._units_per_window}; with drop_last=False, they are a smaller update",
                    )

    def remember(self, loader: DataLoader[Any]) -> None:
        """Remember the settings of a DataLoader of the user's, which are not read again."""
        self._loader, self._settings = loader, _settings_of(loader)

    def changed(self) -> str:
        """A note if the number of rows, or a setting of the user's DataLoader, has changed since the data was opened, else ""."""
        if self._loader is None:
            return ""
        now = _settings_of(self._loader)
        names = [name for name, value in self._settings.items() if now.get(name) != value]
        if not names:
            return ""
        return (
            f"{self._setup.argument}: {' and '.join(names)} of the DataLoader changed after the fit began, which has no effect: its "
            "settings are read once. Let the function or the data set decide by an attribute that a hook sets, or call fit again"
        )

    @property
    def rows_differ(self) -> bool:
        """Whether the last window of an epoch is known to be shorter than the others."""
        return bool(self.num_samples and self.global_batch and self.num_samples % self.global_batch)

    @property
    def sampler_names(self) -> list[str]:
        """The class names of the samplers, if these determine the order."""
        return [type(sampler).__qualname__ for sampler in self.samplers if sampler is not None and self.shuffle is None]

    def order(self) -> dict[str, Any]:
        """The values that determine the order of the rows, as JSON, for `fabricate rows`. "drawn": "permutation" or "sequence" of `units`
        rows, "sampler" if a sampler draws the order, or "" if the order is not a function of seed and position."""
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
    def identity(self) -> dict[str, Any]:
        """Digests that distinguish the rows from others of the same number, computed at the first access: see `fabricate.data.identity`."""
        return {
            "fingerprint": fingerprint(self.data),
            "attributes": attributes(self.data),
            "indices": indices(self.data, self.samplers),
        }

    def recognise(self) -> None:
        """Compute `identity` now: while rows are read, data may open files and fill caches, which are no rows."""
        _ = self.identity

    @property
    def seed(self) -> int:
        """The seed of the order and, in training data, of the random state during reading."""
        return self._setup.seed

    @property
    def reading_seed(self) -> int:
        """The seed of the random state during reading. Training data and each set of an evaluation have their own, because rows may be
        drawn at random while they are read: with equal seeds a validation would get rows that were trained on."""
        if self._setup.training or self.repeats_training:
            return self.seed
        return derive_seed(self.seed, self._setup.argument, self._evaluation)

    def draw_anew(self, evaluation: int) -> None:
        """Give reading the random numbers of the evaluation with this number; the order of a data set that has a length stays the same.
        Call it before anything is read."""
        self._evaluation = evaluation

    def reseed(self, seed: int) -> None:
        """Set another seed, that of the resumed run. Call it before anything is read."""
        self._setup = replace(self._setup, seed=seed)

    def different(self, everyone: Sequence[Any], what: str) -> ConfigurationError | None:
        """The error to raise if a value of this data differs between ranks, else None. `everyone`: the values in rank order; `what`: the
        difference, for the message."""
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
        """The error to raise if `first` differs between ranks, else None. `everyone`: its values in rank order."""
        return self.different(everyone, "other first rows")

    def held(self) -> str:
        """A digest of what determines the rows and is known without reading one; see `fabricate.data.identity.held`."""
        return ""

    def own_generators(self) -> dict[str, str]:
        """The random generators from which the data itself draws and of which every reader has a copy, by name, with a digest of the
        state of each."""
        return {}

    @property
    def copies_generators(self) -> bool:
        """Whether every reader has a copy of the random generators of the data, and none seeds its own."""
        return False

    def probe(self) -> str:
        """A digest of some rows, which are read only for this; "" if reading them could do harm. Random generators are left unchanged."""
        return ""

    @abstractmethod
    def windows(self, epoch: int, start: int = 0, watch: Watch = iter) -> Generator[Window, None, None]:
        """The windows of `epoch` from position `start` (rows consumed). Every rank calls it, and no rank waits for another. Batches are
        read through `watch`.

        The next window begins after all batches of the previous one, read or not. Closing the generator ends worker processes. Raises
        ConfigurationError if the data cannot start at `start`.

        >>> source = open_source(dataset, argument="train", loading=Loading(8), training=True, rank=0, world_size=1)
        >>> for window in source.windows(epoch=0):
        ...     for batch, rows in window.micro_batches: ...
        """

    def windows_until(self, epoch: int, position: int, micro_step: int) -> int:
        """The number of windows up to this place of the data, if earlier epochs had as many as it gives now. See `Progress`. Counts back
        from the end of the epoch, because after a change of the global batch the place may be within one of the present windows."""
        assert self.updates_per_epoch is not None
        assert self._usable is not None
        read = position
        if self.global_batch is None:  # the user's batches, of any number of rows
            read = micro_step * (self._units_per_window // self._setup.accumulation)
        left = num_windows(max(0, self._usable - read), self._units_per_window, self._setup.drop_last)
        return epoch * self.updates_per_epoch + (self.updates_per_epoch - left if position else 0)

    @abstractmethod
    def batches(self, *, stand_ins: bool) -> Generator[EvalBatch, None, None]:
        """The batches of an evaluation: every row occurs exactly once over all ranks. With `stand_ins`, every rank yields the same number
        of batches."""
