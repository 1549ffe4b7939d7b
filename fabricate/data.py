"""The data room: turns whatever the user passed as data into windows of micro-batches with one global order.

Owns the reading of data sets, loaders, streams and iterables, the position in an epoch (one integer: rows of the
global order consumed), each rank's share of every micro-step, and the random state that reading happens under. The
arithmetic is `fabricate.order`'s. Must not know devices, collectives, models, checkpoints or the loop: ranks agree
because every one of them computes the same order, not because they talk.

Two kinds of source. *Indexed* data (a data set, a DataLoader over one) has random access: any position is reached at
once, and reading is left to a torch DataLoader that is handed this rank's index lists. *Sequential* data (streams of
rows, iterables of batches) is read whole by every rank, under a random state of its own that depends on (seed, epoch)
only, so that all ranks see the same order and a resumed run replays it.
"""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)

from fabricate.errors import ConfigurationError
from fabricate.order import Share, batch_seed, epoch_order, num_windows, plan_window

__all__ = ["EvalBatch", "Loading", "Source", "Window", "open_source", "rows_of"]


@dataclass(frozen=True)
class Loading:
    """How rows become batches, for data that does not say so itself (data sets and streams).

    `batch_size` counts rows per rank and micro-batch. `shuffle=None` shuffles training data sets only. `drop_last`
    leaves out the last incomplete *global* batch of a training epoch. `pin_memory` has no effect on iterables of
    batches and on a DataLoader, which has its own.
    """

    batch_size: int | None = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    pin_memory: bool = False


@dataclass(slots=True)
class Window:
    """One optimizer update's worth of data, as one rank sees it.

    `micro_batches` yields `num_micro_steps` pairs ``(batch, rows)``. `rows` of a pair is 0 when the batch is a stand-in
    that must not count, and None when the batch of an iterable does not show its rows (then `rows_of` raises, and the
    step has to return its weight). The window's own `rows` is over all ranks; batches that do not show theirs count
    as one.
    """

    num_micro_steps: int
    rows: int
    end: int  # rows of the epoch's global order consumed after this window: the position to resume at
    last: bool  # of the epoch
    micro_batches: Iterator[tuple[Any, int | None]]


@dataclass(slots=True)
class EvalBatch:
    """One rank's evaluation batch. `indices` are its rows' places in the data set, or in order of arrival."""

    batch: Any
    rows: int | None  # 0 for a stand-in, None when the batch of an iterable does not show them
    indices: Sequence[int]


class Source(ABC):
    """Data opened for one rank: what the plan prints about it, and its windows.

    `kind` is "dataloader", "dataset", "stream" or "iterable". Counts that need a length nobody gave are None:
    `batch_size` (rows per rank and micro-batch), `num_samples` (global rows per epoch after limit and drop_last),
    `global_batch` (rows per update), `updates_per_epoch`. `shuffle`: whether the order is a permutation or that of the
    data, None where a sampler or the data itself decides. `resumes` is "exactly, by position" or "by replay".
    """

    def __init__(
        self, setup: _Setup, kind: str, *, batch_size: int | None, units: int | None, resumes: str, shuffle: bool | None
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
        usable = units if units is None or self._cap is None else min(units, self._cap)
        if usable == 0:
            raise setup.empty()
        self.updates_per_epoch: int | None = None
        self.num_samples: int | None = None
        if usable is not None:
            self.updates_per_epoch = num_windows(usable, self._units_per_window, setup.drop_last)
            if not self.updates_per_epoch:
                raise setup.error(
                    f"has fewer rows than one global batch ({usable} of {self._units_per_window}) and drop_last=True "
                    "leaves out incomplete ones: nothing remains. Lower the batch size or pass drop_last=False"
                )
            if batch_size:
                self.num_samples = min(usable, self.updates_per_epoch * self._units_per_window)

    def reseed(self, seed: int) -> None:
        """Go on with another seed: that of the run which is resumed. Before any reading."""
        self._setup = replace(self._setup, seed=seed)

    @abstractmethod
    def windows(self, epoch: int, start: int = 0) -> Generator[Window, None, None]:
        """The windows of `epoch` from position `start` (rows consumed); every rank calls it, none waits for another.

        Advancing drops what was left of the previous window, closing ends worker processes. Raises ConfigurationError
        for a position that this data cannot be at.

        >>> source = open_source(dataset, argument="train", loading=Loading(8), training=True, rank=0, world_size=1)
        >>> for window in source.windows(epoch=0):
        ...     for batch, rows in window.micro_batches: ...
        """

    @abstractmethod
    def batches(self, *, stand_ins: bool) -> Generator[EvalBatch, None, None]:
        """Every row exactly once over all ranks. With `stand_ins` every rank gets the same number of batches."""


def open_source(
    data: Any,
    *,
    argument: str,
    loading: Loading,
    training: bool,
    rank: int,
    world_size: int,
    accumulation: int = 1,
    seed: int = 0,
    limit: int | float | None = None,
) -> Source:
    """Open `data` for `rank`: a DataLoader, a data set, a stream of rows or an iterable of batches.

    `argument` is the name errors use ("train", "val"). `limit` caps an epoch: micro-steps (int) or a share of it (float
    in (0, 1]). Evaluation (`training=False`) ignores accumulation and drop_last: every row counts. Reads nothing yet,
    apart from lengths. Raises ConfigurationError for data or settings that cannot be honoured.

    >>> open_source(dataset, argument="train", loading=Loading(8), training=True, rank=0, world_size=2).global_batch
    16
    """
    setup = _Setup(
        argument=argument,
        training=training,
        rank=rank,
        world_size=world_size,
        accumulation=accumulation if training else 1,
        seed=seed,
        limit=limit,
        drop_last=loading.drop_last and training,
        notes=[],
    )
    setup.check(loading)
    if loading.drop_last:
        setup.note_drop_last()
    if type(data).__module__.partition(".")[0] == "accelerate":
        raise setup.error(
            f"is a {type(data).__name__} that accelerate has already split over the ranks; pass the DataLoader that "
            "was given to prepare()"
        )
    if isinstance(data, DataLoader):
        return _open_loader(data, setup, loading)
    if isinstance(data, Mapping | str | bytes) or data is None:
        raise setup.error(
            f"is a {type(data).__name__}, which holds no rows to read; pass a data set, a DataLoader or an iterable"
        )
    if isinstance(data, IterableDataset) or _is_hugging_face(data, "IterableDataset"):
        return _open_stream(data, setup, loading)
    if isinstance(data, list | tuple) and loading.batch_size is None:
        return _open_iterable(data, setup, loading)
    if isinstance(data, Dataset) or (isinstance(data, Sized) and hasattr(type(data), "__getitem__")):
        return _open_dataset(data, setup, loading)
    if isinstance(data, Iterable):
        return _open_iterable(data, setup, loading)
    raise setup.error(
        f"is a {type(data).__name__}, neither a data set (__len__ and __getitem__) nor iterable; pass a DataLoader, "
        "a data set or an iterable of batches"
    )


def rows_of(batch: Any) -> int:
    """The rows of a batch: the leading dimension of its first tensor or array, else the length of its list of samples.

    >>> rows_of({"image": torch.zeros(8, 3), "label": torch.zeros(8)}), rows_of([{"x": 1}, {"x": 2}])
    (8, 2)

    Raises ConfigurationError when nothing in the batch says so.
    """
    rows = _visible_rows(batch)
    if rows is None:
        raise ConfigurationError(
            f"cannot tell how many rows a batch of type {type(batch).__name__} has: it holds no tensor or array with "
            'a leading dimension and no list of samples. Return {"loss": loss, "weight": weight} from the step (for '
            'metrics: "weight"), where weight is what the mean was taken over.'
        )
    return rows


def _visible_rows(batch: Any) -> int | None:
    rows = _leading_dimension(batch)
    return _num_listed(batch) if rows is None else rows


def _leading_dimension(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor | np.ndarray):
        return int(batch.shape[0]) if batch.ndim else None
    # A list of mappings is a list of samples: a dimension found inside one of them is not the batch's.
    if isinstance(batch, list | tuple) and batch and all(isinstance(part, Mapping) for part in batch):
        return len(batch)
    return next((rows for part in _parts(batch) if (rows := _leading_dimension(part)) is not None), None)


def _num_listed(batch: Any) -> int | None:
    if isinstance(batch, list):
        return len(batch)
    return next((rows for part in _parts(batch) if (rows := _num_listed(part)) is not None), None)


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in fields(batch)]
    return ()


# ------------------------------------------------------------------------------------------------ opening, kind by kind


@dataclass(frozen=True)
class _Setup:
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
        return self.error("has no rows: check the path, the split and any filter that made it")

    def note_drop_last(self) -> None:
        if not self.training:
            self.notes.append(f"{self.argument}: drop_last=True is not applied, evaluation reads every row once")

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
                f"limit={limit!r} (for {self.argument}) must be a number of micro-steps (int, 1 or more) or a share "
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
                f"has no length, so limit={self.limit} (a share of it) is unknown: pass a number of micro-steps"
            )
        return min(units, max(1, int(units * self.limit + 1e-9)))  # 0.29 * 100 is 28.999... in binary

    def refuse(self, loading: Loading, names: Sequence[str], remedy: str) -> None:
        """Raise for every setting among `names` that was asked for: it would have no effect."""
        default = Loading()
        for name in names:
            if getattr(loading, name) != getattr(default, name):
                raise ConfigurationError(f"{name}={getattr(loading, name)!r} has no effect: {self.argument} {remedy}.")


def _open_dataset(data: Any, setup: _Setup, loading: Loading) -> Source:
    rows = _length(data)
    if rows is None:
        raise setup.error(
            f"is a {type(data).__name__} without a length: give it __len__, or make it a torch IterableDataset if it "
            "can only be read in order"
        )
    if loading.batch_size is None:
        raise setup.error("is a dataset: pass batch_size=... (rows per rank and micro-batch)")
    if loading.collate_fn is None and _is_hugging_face(data, "Dataset") and data.format["type"] is None:
        data = data.with_format("torch")
        setup.notes.append(
            f'{setup.argument}: rows are read as tensors (with_format("torch")), the data set had no format'
        )
    shuffle = setup.training if loading.shuffle is None else loading.shuffle
    return _Indexed(
        setup,
        "dataset",
        data,
        lambda seed, epoch: _Rows(epoch_order(rows, seed=seed, epoch=epoch, shuffle=shuffle)),
        batch_size=loading.batch_size,
        units=rows,
        shuffle=shuffle,
        options={
            "collate_fn": loading.collate_fn,
            "num_workers": loading.num_workers,
            "pin_memory": loading.pin_memory,
        },
    )


def _open_loader(loader: DataLoader[Any], setup: _Setup, loading: Loading) -> Source:
    setup.refuse(
        loading,
        ("batch_size", "num_workers", "collate_fn", "shuffle", "drop_last"),
        "is a DataLoader, which has its own; set it there, or pass the loader's data set instead",
    )
    batch_sampler = loader.batch_sampler
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise setup.error(
                "has a DistributedSampler, but fabricate splits the data over the ranks itself: drop the sampler and "
                "pass shuffle= to the DataLoader"
            )
    if _has_own_loop(loader):
        return _open_batches(loader, setup, f"{type(loader).__name__} has an iterator of its own")
    if isinstance(loader.dataset, IterableDataset):
        return _open_batches(loader, setup, "its data set is a stream")
    if batch_sampler is None:
        return _open_batches(loader, setup, "batch_size=None turns batching off")

    batch_size: int | None
    draw: _Draw
    if type(batch_sampler) is BatchSampler:
        batch_size, sampler = batch_sampler.batch_size, batch_sampler.sampler
        if batch_sampler.drop_last:
            setup.note_drop_last()
            setup = replace(setup, drop_last=setup.training)
        draw, units, order, shuffle = _sampler_order(loader.dataset, sampler)
    else:
        batch_size, sampler, shuffle = None, batch_sampler, None
        draw, units = lambda seed, epoch: _Batches(_drawn(sampler, seed, epoch)), _length(sampler)
        order = f"the batches of {type(sampler).__name__}, drawn per epoch from the seed, dealt to the ranks in turn"
    if units is None:
        return _open_batches(loader, setup, f"{type(sampler).__name__} has no length")
    setup.notes.append(f"{setup.argument}: the DataLoader is rebuilt around a global order; {order}")
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    }
    options["prefetch_factor"] = loader.prefetch_factor
    if loader.pin_memory_device:  # naming it at all is deprecated in torch
        options["pin_memory_device"] = loader.pin_memory_device
    return _Indexed(
        setup, "dataloader", loader.dataset, draw, batch_size=batch_size, units=units, shuffle=shuffle, options=options
    )


def _has_own_loop(loader: DataLoader[Any]) -> bool:
    kind = type(loader)
    return kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator


def _sampler_order(dataset: Any, sampler: Any) -> tuple[_Draw, int | None, str, bool | None]:
    """How to draw an epoch's rows as `sampler` would, how many there are, a phrase for the note, and `Source.shuffle`."""
    rows = _length(sampler)
    # Exactly torch's own classes over the whole data set; a subclass may order as it likes and is asked instead.
    whole = type(sampler) in (SequentialSampler, RandomSampler) and rows == _length(dataset) == len(sampler.data_source)
    shuffle = type(sampler) is RandomSampler
    if whole and rows is not None and not (shuffle and sampler.replacement):
        phrase = "shuffled, the permutation comes from the seed and the epoch" if shuffle else "not shuffled"
        return (
            lambda seed, epoch: _Rows(epoch_order(rows, seed=seed, epoch=epoch, shuffle=shuffle)),
            rows,
            phrase,
            shuffle,
        )
    phrase = f"the rows of {type(sampler).__name__}, drawn per epoch from the seed, the same on all ranks"
    return lambda seed, epoch: _Rows(_as_indices(_drawn(sampler, seed, epoch))), rows, phrase, None


def _open_stream(data: Any, setup: _Setup, loading: Loading) -> Source:
    name = type(data).__name__
    if loading.batch_size is None:
        raise setup.error(f"is a stream of rows ({name}): pass batch_size=... (rows per rank and micro-batch)")
    if loading.shuffle:
        raise setup.error(
            f"is a stream ({name}), which shuffle=True cannot reorder: shuffle in the data set itself "
            "(datasets: .shuffle(seed=..., buffer_size=...)) and leave shuffle unset"
        )
    if loading.num_workers > 1:
        raise setup.error(
            f"is a stream ({name}) and num_workers={loading.num_workers}: each worker process would read the whole "
            "stream, and every row would come once per worker. Pass num_workers=1 (or 0)"
        )
    if _is_hugging_face(data, "IterableDataset"):
        if _shuffled_without_seed(data):
            raise setup.error(
                "is a stream shuffled without a seed: every rank and every resumed run would read another order. "
                "Call .shuffle(seed=...)"
            )
        if loading.collate_fn is None and data._formatting is None:
            data = data.with_format("torch")
            setup.notes.append(
                f'{setup.argument}: rows are read as tensors (with_format("torch")), the stream had no format'
            )
    _note_sequential(setup, "rows")
    return _Sequential(
        setup,
        "stream",
        data,
        batch_size=loading.batch_size,
        units=_length(data),
        collate=loading.collate_fn or default_collate,
        in_worker=loading.num_workers == 1,
        pin_memory=loading.pin_memory,
    )


def _open_iterable(data: Iterable[Any], setup: _Setup, loading: Loading) -> Source:
    setup.refuse(
        loading,
        # shuffle=False is what happens anyway.
        ("batch_size", "num_workers", "collate_fn", *(["shuffle"] if loading.shuffle else [])),
        f"is an iterable of batches ({type(data).__name__}), taken as they come; for rows pass a data set or a torch "
        "IterableDataset",
    )
    return _open_batches(data, setup, None)


def _open_batches(data: Iterable[Any], setup: _Setup, reason: str | None) -> Source:
    if reason:
        setup.notes.append(f"{setup.argument}: the DataLoader is read as an iterable of batches, because {reason}")
    _note_sequential(setup, "batches")
    return _Sequential(setup, "iterable", data, batch_size=None, units=_length(data), collate=None)


def _note_sequential(setup: _Setup, what: str) -> None:
    if setup.world_size > 1:
        setup.notes.append(f"{setup.argument}: every rank reads all {what} and keeps its own")
    if setup.training:
        setup.notes.append(f"{setup.argument}: resuming reads the epoch again up to the position, which takes its time")


def _is_hugging_face(data: Any, name: str) -> bool:
    datasets = sys.modules.get("datasets")  # its objects cannot exist before it is imported
    return datasets is not None and isinstance(data, getattr(datasets, name))


def _shuffled_without_seed(data: Any) -> bool:
    """Whether a `datasets` stream's shuffle was seeded by the operating system: such a seed has 128 bits."""
    node = getattr(data, "_ex_iterable", None)
    while node is not None:
        generator = getattr(node, "generator", None)
        if isinstance(generator, np.random.Generator):
            entropy = getattr(generator.bit_generator.seed_seq, "entropy", 0)
            if isinstance(entropy, int) and entropy >= 2**64:
                return True
        node = getattr(node, "ex_iterable", None)
    return False


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:  # no __len__, or one that says that there is no length (a DataLoader over a stream)
        return None


# ----------------------------------------------------------------------------------- indexed data: any position at once


class _Rows:
    """An epoch's order, row by row; a unit is a row. `indices`: shape (rows,), int64, or object for other keys."""

    def __init__(self, indices: npt.NDArray[Any]) -> None:
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def fetch(self, start: int, stop: int) -> list[Any]:
        return self._indices[start:stop].tolist()  # type: ignore[no-any-return]

    def position(self, unit: int) -> int:
        return unit

    def unit(self, position: int) -> int | None:
        return position

    def sizes(self, begin: int, shares: list[Share]) -> list[int]:
        return [share.rows for share in shares]


class _Batches:
    """An epoch's order in the batches of the user's own batch sampler; a unit is a batch."""

    def __init__(self, batches: Iterable[Iterable[Any]]) -> None:
        self._batches = [list(batch) for batch in batches]
        self._ends = np.cumsum([0, *map(len, self._batches)])  # rows before each batch, and all of them

    def __len__(self) -> int:
        return len(self._batches)

    def fetch(self, start: int, stop: int) -> list[Any]:
        return self._batches[start]

    def position(self, unit: int) -> int:
        return int(self._ends[unit])

    def unit(self, position: int) -> int | None:
        unit = int(np.searchsorted(self._ends, position))
        return unit if unit < len(self._ends) and self._ends[unit] == position else None

    def sizes(self, begin: int, shares: list[Share]) -> list[int]:
        return [len(self._batches[begin + share.start]) if share.rows else 0 for share in shares]


_Draw = Callable[[int, int], _Rows | _Batches]  # an epoch's order, from (seed, epoch)
_Place = tuple[int, int, int]  # what to fetch of the order, start:stop, and how many rows of it count


class _Indexed(Source):
    """Random access: a torch DataLoader per epoch, fed with this rank's index lists from the position on."""

    def __init__(
        self,
        setup: _Setup,
        kind: str,
        dataset: Any,
        draw: _Draw,
        *,
        batch_size: int | None,
        units: int,
        shuffle: bool | None,
        options: dict[str, Any],
    ) -> None:
        resumes = "exactly, by position"
        super().__init__(setup, kind, batch_size=batch_size, units=units, resumes=resumes, shuffle=shuffle)
        self._dataset = dataset
        self._draw = draw
        self._options = options

    def windows(self, epoch: int, start: int = 0) -> Generator[Window, None, None]:
        order, stop = self._order(epoch)
        first = order.unit(start)
        if first is None or first > stop:
            raise self._setup.error(
                f"cannot resume at row {start}: an epoch has {order.position(stop)} rows and no batch begins there. "
                "The data, its sampler or the limit changed since the checkpoint was written"
            )
        size = self._units_per_window
        if self._setup.drop_last:
            stop -= (stop - first) % size
        full = self._plan(size)
        batches = self._load(epoch, order, lambda: self._places(first, stop))
        with closing(_Workers(batches)):
            for begin in range(first, stop, size):
                end = min(begin + size, stop)
                shares = full if end - begin == size else self._plan(end - begin)
                position, sizes = order.position(end), order.sizes(begin, shares)
                micro_batches = zip(islice(batches, len(sizes)), sizes, strict=True)
                window = Window(len(sizes), position - order.position(begin), position, end == stop, micro_batches)
                yield window
                for _ in window.micro_batches:  # left behind by a loop that stopped early; usually none
                    pass

    def batches(self, *, stand_ins: bool) -> Generator[EvalBatch, None, None]:
        order, stop = self._order(epoch=0)

        def wanted() -> Iterator[_Place]:
            return (place for place in self._places(0, stop) if place[2] or stand_ins)

        batches = self._load(0, order, wanted)
        with closing(_Workers(batches)):
            for batch, (start, end, rows) in zip(batches, wanted(), strict=True):
                indices = order.fetch(start, end) if rows else []
                yield EvalBatch(batch, len(indices), indices)

    def _order(self, epoch: int) -> tuple[_Rows | _Batches, int]:
        """The epoch's order and the units of it that the limit leaves."""
        order = self._draw(self._setup.seed, epoch)
        if not len(order):
            raise self._setup.empty()
        return order, len(order) if self._cap is None else min(self._cap, len(order))

    def _plan(self, units: int) -> list[Share]:
        return plan_window(units, self.batch_size or 1, self._setup.world_size, self._setup.rank)

    def _places(self, first: int, stop: int) -> Iterator[_Place]:
        """This rank's share of every micro-step in units ``first:stop`` of the order."""
        size = self._units_per_window
        full = self._plan(size)
        for begin in range(first, stop, size):
            for share in full if begin + size <= stop else self._plan(stop - begin):
                yield begin + share.start, begin + share.stop, share.rows

    def _load(self, epoch: int, order: _Rows | _Batches, places: Callable[[], Iterator[_Place]]) -> Iterator[Any]:
        seed, dataset, options = self._setup.seed, self._dataset, self._options
        seeded = options["num_workers"] > 0
        if seeded:
            dataset = _SeededDataset(dataset, seed, epoch)
            options = {**options, "worker_init_fn": _WorkerStart(options.get("worker_init_fn"))}

        def requests() -> Iterator[Any]:
            for start, stop, _ in places():
                indices = order.fetch(start, stop)
                yield (start, indices) if seeded else indices

        # Its own generator: iter() draws the workers' base seed, which must not come out of the model's random numbers.
        generator = torch.Generator()
        generator.manual_seed(batch_seed(seed, epoch))
        return iter(DataLoader(dataset, batch_sampler=_Requests(requests), generator=generator, **options))


class _Workers:
    """The worker processes that may be behind a DataLoader's iterator."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def close(self) -> None:
        """End them now. Left to itself torch waits for the garbage collector, and a traceback keeps iterators for long."""
        shutdown = getattr(self._batches, "_shutdown_workers", None)  # torch has no public way
        if shutdown is not None:
            shutdown()


class _Requests:
    """A batch sampler: a fresh iterator over what to fetch, every time it is asked."""

    def __init__(self, start: Callable[[], Iterator[Any]]) -> None:
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._start()


class _SeededDataset(Dataset[Any]):
    """Seeds its worker process for each batch, so that augmentation depends on the position and not on the worker."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self.dataset = dataset
        self._seed = seed
        self._epoch = epoch

    def __getitems__(self, request: tuple[int, list[Any]]) -> Any:
        position, indices = request
        _seed_generators(batch_seed(self._seed, self._epoch, position))
        fetch = getattr(self.dataset, "__getitems__", None)
        return fetch(indices) if fetch else [self.dataset[index] for index in indices]


class _WorkerStart:
    """Puts the user's data set, not our wrapper, into `get_worker_info()`, then calls the user's `worker_init_fn`."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the info refuses plain assignment
        if self._then is not None:
            self._then(worker)


def _as_indices(drawn: list[Any]) -> npt.NDArray[Any]:
    if all(isinstance(index, int | np.integer) for index in drawn):
        return np.asarray(drawn, dtype=np.int64)
    keys = np.empty(len(drawn), dtype=object)
    for place, key in enumerate(drawn):  # one by one: numpy would spread tuples over a second dimension
        keys[place] = key
    return keys


def _drawn(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """What `sampler` yields in `epoch`: a function of (seed, epoch), so the same on every rank and after a resume."""
    with _Sandbox(batch_seed(seed, epoch)):
        _begin_epoch((sampler, getattr(sampler, "sampler", None)), seed, epoch)
        return list(sampler)


# -------------------------------------------------------------------- sequential data: streams and iterables of batches


class _Plan(NamedTuple):
    """A window as the reader announces it: for each batch that follows, where this rank's rows begin and how many."""

    rows: int
    end: int
    last: bool
    first: list[int]
    sizes: list[int | None]


class _Sequential(Source):
    """No random access: a window is read into host memory before it starts, so that its length and `last` are exact."""

    def __init__(
        self,
        setup: _Setup,
        kind: str,
        data: Iterable[Any],
        *,
        batch_size: int | None,
        units: int | None,
        collate: Callable[[list[Any]], Any] | None,
        in_worker: bool = False,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(setup, kind, batch_size=batch_size, units=units, resumes="by replay", shuffle=None)
        self._data = data
        self._collate = collate
        self._in_worker = in_worker
        self._pin_memory = pin_memory
        self._spent = False

    def windows(self, epoch: int, start: int = 0) -> Generator[Window, None, None]:
        items = self._read(epoch, start)
        plan = None
        with closing(_Workers(items)):
            for plan in items:
                micro_batches = zip(islice(items, len(plan.sizes)), plan.sizes, strict=True)
                window = Window(len(plan.sizes), plan.rows, plan.end, plan.last, micro_batches)
                yield window
                for _ in window.micro_batches:  # left behind by a loop that stopped early; usually none
                    pass
        if plan is None and start == 0:
            raise self._setup.empty()

    def batches(self, *, stand_ins: bool) -> Generator[EvalBatch, None, None]:
        items = self._read(epoch=0, start=0)
        plan = None
        with closing(_Workers(items)):
            for plan in items:
                for batch, first, rows in zip(islice(items, len(plan.sizes)), plan.first, plan.sizes, strict=True):
                    if rows != 0 or stand_ins:
                        yield EvalBatch(batch, rows, range(first, first + (1 if rows is None else rows)))
        if plan is None:
            raise self._setup.empty()

    def _read(self, epoch: int, start: int) -> Iterator[Any]:
        """A `_Plan`, then as many batches as it says, again and again."""
        if isinstance(self._data, Iterator):
            if self._spent or epoch > 0:
                raise self._setup.error(
                    f"is a one-shot iterator ({type(self._data).__name__}), which its first pass uses up; for more "
                    "than one give an object whose __iter__ starts anew (a list, a DataLoader, a class with __iter__)"
                )
            self._spent = True
        reader = _Reader(self, epoch, start)
        if not self._in_worker and not self._pin_memory:
            return iter(reader)
        generator = torch.Generator()
        generator.manual_seed(batch_seed(self._setup.seed, epoch))
        return iter(
            DataLoader(
                reader,
                batch_size=None,
                num_workers=int(self._in_worker),
                collate_fn=_unchanged,
                pin_memory=self._pin_memory,
                generator=generator,
                worker_init_fn=_WorkerStart(None) if self._in_worker else None,
            )
        )


class _Reader(IterableDataset[Any]):
    """Reads sequential data, here or in one worker process: a `_Plan`, then the batches it announces, and so on."""

    def __init__(self, source: _Sequential, epoch: int, start: int) -> None:
        self.dataset = source._data
        self._setup = source._setup
        self._batch_size = source.batch_size
        self._window = source._units_per_window
        self._cap = sys.maxsize if source._cap is None else source._cap
        self._collate = source._collate
        self._epoch = epoch
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        setup = self._setup
        # Foreign code draws from a random state of its own: equal on all ranks, replayed by a resume, and apart from
        # what collating and the model draw, which differs between ranks.
        sandbox = _Sandbox(batch_seed(setup.seed, self._epoch))
        with sandbox:
            data = self.dataset
            _begin_epoch((data, *(getattr(data, name, None) for name in _NESTED)), setup.seed, self._epoch)
            units = islice(iter(data), self._cap)
        # Changing states takes some 0.1 to 0.2 ms a window: not where reading on runs nobody's code in this process.
        guard = nullcontext() if _runs_no_code_here(data) else sandbox

        def take(count: int) -> list[Any]:
            if not count:
                return []
            with guard:
                return list(islice(units, count))

        position = self._replay(take)
        for chunk, last in _chunks(take, self._window, setup.drop_last):
            sizes = [1] * len(chunk) if self._batch_size else [_visible_rows(batch) for batch in chunk]
            if 0 in sizes:
                raise setup.error(f"yielded a batch without rows after row {position}: leave empty batches out")
            ends = list(accumulate((rows or 1 for rows in sizes), initial=position))
            shares = plan_window(len(chunk), self._batch_size or 1, setup.world_size, setup.rank)
            own = [(share.rows if self._batch_size else sizes[share.start]) if share.rows else 0 for share in shares]
            yield _Plan(ends[-1] - position, ends[-1], last, [ends[share.start] for share in shares], own)
            position = ends[-1]
            for share in shares:
                if self._collate is None:
                    yield chunk[share.start]
                    continue
                if get_worker_info() is not None:
                    _seed_generators(batch_seed(setup.seed, self._epoch, ends[share.start]))
                yield self._collate(chunk[share.start : share.stop])

    def _replay(self, take: Callable[[int], list[Any]]) -> int:
        """Read and drop what comes before the start; the position reached, which is the start or an error."""
        position = 0
        while position < self._start:
            dropped = take(min(self._start - position, self._window) if self._batch_size else 1)
            position += len(dropped) if self._batch_size else sum(_visible_rows(batch) or 1 for batch in dropped)
            if not dropped or position > self._start:
                raise self._setup.error(
                    f"cannot resume at row {self._start}: reading it again reached row {position}. The data, its order "
                    "or the limit changed since the checkpoint was written"
                )
        return position


_NESTED = ("dataset", "sampler", "batch_sampler")  # parts of a loader that may hold an epoch or a generator


def _chunks(take: Callable[[int], list[Any]], size: int, drop_last: bool) -> Iterator[tuple[list[Any], bool]]:
    """Cut into chunks of `size`; looks ahead just far enough to know which is the last one."""
    ahead = size if drop_last else 1
    chunk = take(size)
    while len(chunk) >= ahead:
        following = take(ahead) if len(chunk) == size else []
        last = len(following) < ahead
        yield chunk, last
        if last:
            return
        chunk = following + take(size - len(following))


def _runs_no_code_here(data: Any) -> bool:
    if isinstance(data, DataLoader):  # with workers, one over a stream only collects what they made
        return isinstance(data.dataset, IterableDataset) and data.num_workers > 0 and not _has_own_loop(data)
    return type(data) in (list, tuple)


def _unchanged(item: Any) -> Any:
    return item


# --------------------------------------------------------------------------------------------------------- random state


class _Sandbox:
    """While entered, the global generators of python, numpy and torch (CPU) are in a state of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: tuple[Any, Any, torch.Tensor] | None = None
        self._outside: tuple[Any, Any, torch.Tensor] | None = None

    def __enter__(self) -> None:
        self._outside = _random_state()
        if self._inside is None:
            _seed_generators(self._seed)
        else:
            _set_random_state(self._inside)

    def __exit__(self, *exception: object) -> None:
        assert self._outside is not None
        self._inside = _random_state()
        _set_random_state(self._outside)


def _random_state() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def _set_random_state(state: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed((seed & 0xFFFFFFFF, seed >> 32))
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would touch the accelerators as well


def _begin_epoch(parts: Iterable[Any], seed: int, epoch: int) -> None:
    """Tell foreign samplers, loaders and data sets which epoch it is, and seed their own generators for it."""
    for part in parts:
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.manual_seed(batch_seed(seed, epoch))


def describe(batch: object, depth: int = 0) -> str:
    """One line about a batch: the keys, types and shapes in it, for error messages."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping) and depth < 3:
        inside = ", ".join(f"{key!r}: {describe(value, depth + 1)}" for key, value in list(batch.items())[:20])
        return "{" + inside + "}"
    if isinstance(batch, tuple | list) and depth < 3:
        inside = ", ".join(describe(value, depth + 1) for value in batch[:8]) + (", ..." if len(batch) > 8 else "")
        return f"({inside})" if isinstance(batch, tuple) else f"[{inside}]"
    return type(batch).__name__
