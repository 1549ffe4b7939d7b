"""Streams of rows and iterables of batches: every rank reads all of them, under a separate random state.

On resume, data with a `state_dict` continues from it; other data is read again up to the position. Must not know what kinds
of data users pass (`user_data`), devices, or the loop.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    default_collate,
    get_worker_info,
)

from fabricate.data.batches import Collating, EvalBatch, Window, visible_rows
from fabricate.data.digests import digest
from fabricate.data.order import Share, batch_seed, plan_window
from fabricate.data.random_scope import RandomScope, begin_epoch, seed_generators
from fabricate.data.source import Setup, Source, Watch
from fabricate.data.workers import Workers, WorkerStart, has_own_loop, iterate
from fabricate.errors import ConfigurationError


class _Plan(NamedTuple):
    """The description of a window, which the reader yields before its batches. first, sizes: for each batch, the position of this rank's
    first row and the number of this rank's rows."""

    rows: int
    end: int
    last: bool
    first: list[int]
    sizes: list[int | None]
    state: Any
    digest: str
    """A digest of the first and the last unit; "" after the reader's first window, and if there is only one rank."""


class Sequential(Source):
    """A source without random access. A window is read into host memory before it starts, so that its length and `last` are exact."""

    def __init__(
        self,
        setup: Setup,
        kind: str,
        data: Iterable[Any],
        *,
        batch_size: int | None,
        units: int | None,
        collate: Callable[[list[Any]], Any] | None,
        in_worker: bool = False,
        pin_memory: bool = False,
        has_state: bool = False,
    ) -> None:
        """`has_state`: whether `data` resumes by its `state_dict` and `load_state_dict`."""
        resumes = "by its own state" if has_state else "by replay"
        super().__init__(setup, kind, batch_size=batch_size, units=units, resumes=resumes, shuffle=None)
        self.has_state = has_state
        self.data = data
        self.stream_readers = (
            max(1, data.num_workers) if isinstance(data, DataLoader) and _is_loaded_stream(data) else None
        )
        self.collate_fn = collate or getattr(data, "collate_fn", None)
        self._collate = None if collate is None else Collating(collate, setup.argument)
        self.exact_rows = collate in (None, default_collate)
        self._in_worker = self.in_workers = in_worker
        self._pin_memory = pin_memory
        self._spent = False
        self._begun = False

    def windows(self, epoch: int, start: int = 0, watch: Watch = iter) -> Generator[Window, None, None]:
        read = self._read(epoch, start, self.state)
        items = watch(read)
        plan = None
        with closing(Workers(read)):
            for plan in items:
                self.state, self.first = plan.state, plan.digest or self.first
                micro_batches = zip(islice(items, len(plan.sizes)), plan.sizes, strict=True)
                window = Window(len(plan.sizes), plan.rows, plan.end, plan.last, micro_batches)
                yield window
                for _ in window.micro_batches:  # skips the batches that a loop left when it stopped early; usually none
                    pass
        if plan is None and start == 0:
            raise self._setup.empty()

    def batches(self, *, stand_ins: bool) -> Generator[EvalBatch, None, None]:
        items = self._read(epoch=0, start=0)
        plan = None
        with closing(Workers(items)):
            for plan in items:
                self.first = plan.digest or self.first
                for batch, first, rows in zip(islice(items, len(plan.sizes)), plan.first, plan.sizes, strict=True):
                    if rows != 0 or stand_ins:
                        yield EvalBatch(batch, rows, range(first, first + (1 if rows is None else rows)))
        if plan is None:
            raise self._setup.empty()

    def _read(self, epoch: int, start: int, state: Any = None) -> Iterator[Any]:
        """An iterator over an epoch: for each window, a `_Plan` and then its batches. `state`: the saved state of the data."""
        if isinstance(self.data, Iterator):
            if self._spent or epoch > 0:
                raise self._setup.error(
                    f"is a one-shot iterator ({type(self.data).__name__}), which its first pass uses up; for more "
                    "than one give an object whose __iter__ starts over (a list, a DataLoader, a class with __iter__)"
                )
            self._spent = True
        # Data in this process is where the previous epoch left it; a worker process begins each epoch with a new copy.
        goes_on = self.has_state and not self._begun and (start > 0 or not self._in_worker)
        reader = _Reader(self, epoch, start, state if goes_on else None)
        self._begun = True
        if not self._in_worker and not self._pin_memory:
            return iter(reader)
        generator = torch.Generator()
        generator.manual_seed(batch_seed(self.reading_seed, epoch))
        return iterate(
            DataLoader(
                reader,
                batch_size=None,
                num_workers=int(self._in_worker),
                collate_fn=_unchanged,
                pin_memory=self._pin_memory,
                generator=generator,
                worker_init_fn=WorkerStart(None) if self._in_worker else None,
            )
        )


class _Reader(IterableDataset[Any]):
    """Reads sequential data, in this process or in one worker process. Yields for each window a `_Plan` and then its batches."""

    def __init__(self, source: Sequential, epoch: int, start: int, state: Any) -> None:
        self.dataset = source.data
        self._setup = replace(source._setup, seed=source.reading_seed)
        self._batch_size = source.batch_size
        self._window = source._units_per_window
        self._cap = sys.maxsize if source._cap is None else source._cap
        self._collate = source._collate
        self._epoch = epoch
        self._start = start
        self._state = state
        self._keeps_state = source.has_state and source._setup.training

    def __iter__(self) -> Iterator[Any]:
        setup = self._setup
        cursor, position = self._open()
        begin = position
        workers = _Workers(self.dataset if begin == 0 else None)
        for chunk, last, state in _chunks(cursor, self._window, setup.drop_last):
            if workers.read_the_same(chunk):
                raise setup.error(
                    f"is a stream that each of its {workers.number} worker processes reads as a whole, so every row comes "
                    f"{workers.number} times. Let __iter__ of the data set yield only the part of its worker "
                    "(torch.utils.data.get_worker_info()), or use num_workers=1"
                )
            shares = plan_window(len(chunk), self._batch_size or 1, setup.world_size, setup.rank)
            beginning = digest([chunk[0], chunk[-1]]) if setup.world_size > 1 and position == begin else ""
            plan = self._plan(chunk, shares, position, last, state)._replace(digest=beginning)
            yield plan
            for share, first in zip(shares, plan.first, strict=True):
                yield chunk[share.start] if self._collate is None else self._collated(chunk, share, first)
            position = plan.end
        if self._keeps_state:
            cursor.finish()

    def _open(self) -> tuple[_Cursor, int]:
        """A cursor where this reader starts, and its position. The data is restored from its saved state, or read up to this position."""
        seed, epoch, state = self._setup.seed, self._epoch, self._state
        if state is not None and self._start:
            if state["taken"] > self._cap:
                raise self._cannot_resume(state["taken"])
            return _Cursor(self.dataset, seed, epoch, self._cap, self._keeps_state, state), self._start
        if state is not None:
            _finish_epoch(self.dataset, seed, max(epoch - 1, 0), self._cap, state)  # overfit_batches repeats epoch 0
        cursor = _Cursor(self.dataset, seed, epoch, self._cap, self._keeps_state)
        return cursor, self._replay(cursor)

    def _plan(self, chunk: list[Any], shares: list[Share], position: int, last: bool, state: Any) -> _Plan:
        """The plan of the window that begins at `position` and consists of `chunk`: rows of a stream, or the user's batches."""
        sizes = [1] * len(chunk) if self._batch_size else [visible_rows(batch) for batch in chunk]
        if 0 in sizes:
            raise self._setup.error(f"yielded a batch without rows after row {position}. Leave empty batches out")
        ends = list(accumulate((rows or 1 for rows in sizes), initial=position))
        own = [(share.rows if self._batch_size else sizes[share.start]) if share.rows else 0 for share in shares]
        return _Plan(ends[-1] - position, ends[-1], last, [ends[share.start] for share in shares], own, state, "")

    def _collated(self, chunk: list[Any], share: Share, first: int) -> Any:
        assert self._collate is not None
        if get_worker_info() is not None:
            seed_generators(batch_seed(self._setup.seed, self._epoch, first))
        return self._collate(chunk[share.start : share.stop])

    def _replay(self, cursor: _Cursor) -> int:
        """Read and drop everything before the start, and return the start. Raises ConfigurationError if the data does not reach exactly
        this position."""
        position = 0
        while position < self._start:
            dropped = cursor.take(min(self._start - position, self._window) if self._batch_size else 1)
            position += len(dropped) if self._batch_size else sum(visible_rows(batch) or 1 for batch in dropped)
            if not dropped or position > self._start:
                raise self._cannot_resume(position)
        return position

    def _cannot_resume(self, position: int) -> ConfigurationError:
        return self._setup.error(
            f"cannot resume at row {self._start}: reading the data again reached row {position}. The data, its order "
            "or the limit changed since the checkpoint was written: restore them, or use resume='never'. If the data depends on what "
            "training changes (a policy that plays, a buffer), give it state_dict() and load_state_dict(state)"
        )


class _Workers:
    """Detects whether all worker processes of a DataLoader over a stream read the same rows. torch takes a batch from each in turn. If
    these batches are equal but the following one differs, the workers read the same rows; if it is equal too, all rows may be equal."""

    def __init__(self, data: Any) -> None:
        self.number = data.num_workers if _is_loaded_stream(data) and data.num_workers > 1 else 0
        self._missing = self.number + 1 if self.number else 0
        self._first: list[str] = []

    def read_the_same(self, batches: list[Any]) -> bool:
        """Whether the workers read the same rows. `batches`: the batches after those of the previous call. True at most once."""
        if not self._missing:
            return False
        self._first += map(digest, batches[: self._missing])
        self._missing = self.number + 1 - len(self._first)
        *first, following = self._first
        return not self._missing and len(set(first)) == 1 and following != first[0]


class _Cursor:
    """A position in an epoch of sequential data: the open iterator, and the random state for its code.

    This random state is equal on all ranks, and a resume replays it. It is separate from that of collating and of the model, which differs
    between ranks. `taken`: the number of units (rows, or the user's batches) read so far; `cap`: the most units that an epoch reads.
    """

    def __init__(self, data: Any, seed: int, epoch: int, cap: int, keeps_state: bool, state: Any = None) -> None:
        """Open `data` at the beginning of `epoch`, or at the position of the saved `state`."""
        self._data = data
        self._keeps_state = keeps_state
        self._scope = RandomScope(batch_seed(seed, epoch))
        self.taken = 0 if state is None else state["taken"]
        with self._scope:
            self._generators = begin_epoch(_parts(data), seed, epoch)
            if state is not None:
                data.load_state_dict(state["data"])
            self._stream = iter(data)
            for generator, saved in zip(self._generators, () if state is None else state["generators"], strict=False):
                generator.set_state(saved)
        if state is not None:
            self._scope.state = state["random"]
        # Exchanging random states takes 0.1 to 0.2 ms per window; it is left out if reading on runs no user code in this process.
        self._guard = nullcontext() if _runs_no_code_here(data) else self._scope
        units = self._stream if _runs_no_code_here(data) else _with_own_memory(self._stream)
        self._units = islice(units, cap - self.taken)

    def take(self, count: int) -> list[Any]:
        """The next `count` units; fewer at the end of the epoch."""
        if not count:
            return []
        with self._guard:
            units = list(islice(self._units, count))
        self.taken += len(units)
        return units

    def state(self) -> Any:
        """The state from which a new cursor continues here; None if the data does not keep its state."""
        if not self._keeps_state:
            return None
        with self._guard:  # a copy, because the data may change the returned object later
            data = copy.deepcopy(self._data.state_dict())
        generators = [generator.get_state() for generator in self._generators]
        return {"data": data, "taken": self.taken, "left": 0, "random": self._scope.state, "generators": generators}

    def finish(self) -> None:
        """Request one more item, even beyond a limit, so that the data reaches its end: until then its state is that of its last item."""
        with self._guard:
            next(self._stream, None)


def _with_own_memory(units: Iterator[Any]) -> Iterator[Any]:
    """The `units`, copied if the iterable fills the same memory again, because a unit is used after later ones were read. The first ones
    are copied in any case, and show whether it does: a few, because an iterable may fill two buffers in turn."""
    first = []
    for unit in islice(units, _FEW_UNITS):
        first.append((unit, _copied(unit)))
        yield first[-1][1]
    refilled = not all(_equal(unit, copied) for unit, copied in first)
    first.clear()
    for unit in units:  # `yield from` would close the units with this generator, and `finish` reads on
        yield _copied(unit) if refilled else unit


_FEW_UNITS = 4


def _copied(unit: Any) -> Any:
    """A unit with copies of its tensors and arrays, as far as it consists of built-in collections."""
    if type(unit) is dict:
        return {key: _copied(each) for key, each in unit.items()}
    if type(unit) in (list, tuple):
        return type(unit)(map(_copied, unit))
    if not _is_plain(unit):
        return unit
    return unit.copy() if isinstance(unit, np.ndarray) else unit.clone()


def _equal(unit: Any, copied: Any) -> bool:
    """Whether a unit is as it was when it was `copied`."""
    if type(unit) is dict:
        return unit.keys() == copied.keys() and all(_equal(unit[key], copied[key]) for key in copied)
    if type(unit) in (list, tuple):
        return len(unit) == len(copied) and all(map(_equal, unit, copied))
    if not _is_plain(unit):
        return True
    return np.array_equal(unit, copied) if isinstance(unit, np.ndarray) else torch.equal(unit, copied)


def _is_plain(value: Any) -> bool:
    """Whether `value` is a tensor or an array whose elements can be copied and compared."""
    if type(value) is np.ndarray:
        return bool(value.dtype != object)
    unusual = type(value) is not torch.Tensor or value.is_nested or value.is_meta or value.requires_grad
    return not unusual and value.layout is torch.strided


def _finish_epoch(data: Any, seed: int, epoch: int, cap: int, state: Any) -> None:
    """Read `data`, whose `state` was saved near the end of `epoch`, to the end of that epoch, as it must reach it before it begins another.
    If it begins another at once, it is put back to its beginning, unless it has iterators of its own, each of which begins there."""
    left = state["left"]
    with RandomScope(batch_seed(seed, epoch)):
        begin_epoch(_parts(data), seed, epoch)
        data.load_state_dict(state["data"])
        stream = iter(data)
        deque(islice(stream, left), maxlen=0)
        goes_on = bool(list(islice(stream, 1)))  # see `_Cursor.finish`
        if goes_on and not left and state["taken"] < cap and (isinstance(stream, Generator) or stream is data):
            data.load_state_dict(state["data"])


def _parts(data: Any) -> list[Any]:
    """`data` and, if it is a loader, its parts that may have an epoch or a generator."""
    return [data, *(getattr(data, name, None) for name in ("dataset", "sampler", "batch_sampler"))]


def _chunks(cursor: _Cursor, size: int, drop_last: bool) -> Iterator[tuple[list[Any], bool, Any]]:
    """Yield each chunk of `size` units with two values: whether it is the last one, and the state of the data after it. Reads ahead only as
    far as needed to know the last one. With the last one comes a state before the end of the data, and in it the number of units that are
    "left" from there on: those of the chunk itself if it is short, because reading it reached the end, or those that `drop_last` leaves
    out."""
    ahead = size if drop_last else 1
    before: Any = None
    chunk = cursor.take(size)
    while len(chunk) >= ahead:
        state = cursor.state()
        following = cursor.take(ahead) if len(chunk) == size else []
        last = len(following) < ahead
        if state and last:
            reached_end = len(chunk) < size
            state = before | {"left": len(chunk)} if before and reached_end else state | {"left": len(following)}
        yield chunk, last, state
        if last:
            return
        chunk, before = following + cursor.take(size - len(following)), state


def _runs_no_code_here(data: Any) -> bool:
    """Whether no user code runs in this process while `data` is read."""
    if isinstance(data, DataLoader):  # a loader over a stream only collects the batches of its workers
        return _is_loaded_stream(data) and data.num_workers > 0
    return type(data) in (list, tuple)


def _is_loaded_stream(data: Any) -> bool:
    """Whether `data` is torch's DataLoader over a stream."""
    return isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset) and not has_own_loop(data)


def _unchanged(item: Any) -> Any:
    return item
