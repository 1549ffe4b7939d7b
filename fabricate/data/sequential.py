"""Streams of rows and iterables of batches: read whole by every rank, in a random state of their own.

On resume they go on from their own `state_dict`, where they have one, and are read again up to the position else.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, nullcontext
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    get_worker_info,
)

from fabricate.data.batches import EvalBatch, Window, visible_rows
from fabricate.data.order import batch_seed, plan_window
from fabricate.data.sandbox import Sandbox, begin_epoch, seed_generators
from fabricate.data.source import Setup, Source
from fabricate.data.workers import Workers, WorkerStart, has_own_loop, iterate
from fabricate.errors import ConfigurationError


class _Plan(NamedTuple):
    """A window as the reader announces it: for each batch that follows, where this rank's rows begin and how many."""

    rows: int
    end: int
    last: bool
    first: list[int]
    sizes: list[int | None]
    state: Any


class Sequential(Source):
    """No random access: a window is read into host memory before it starts, so that its length and `last` are exact."""

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
        """`has_state`: its `state_dict` and `load_state_dict` are to be trusted."""
        resumes = "by its own state" if has_state else "by replay"
        super().__init__(setup, kind, batch_size=batch_size, units=units, resumes=resumes, shuffle=None)
        self.has_state = has_state
        self.data = data
        self._collate = collate
        self._in_worker = in_worker
        self._pin_memory = pin_memory
        self._spent = False
        self._begun = False

    def windows(self, epoch: int, start: int = 0) -> Generator[Window, None, None]:
        items = self._read(epoch, start, self.state)
        plan = None
        with closing(Workers(items)):
            for plan in items:
                self.state = plan.state
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
        with closing(Workers(items)):
            for plan in items:
                for batch, first, rows in zip(islice(items, len(plan.sizes)), plan.first, plan.sizes, strict=True):
                    if rows != 0 or stand_ins:
                        yield EvalBatch(batch, rows, range(first, first + (1 if rows is None else rows)))
        if plan is None:
            raise self._setup.empty()

    def _read(self, epoch: int, start: int, state: Any = None) -> Iterator[Any]:
        """A `_Plan`, then as many batches as it says, again and again. `state`: where the data was when it was saved."""
        if isinstance(self.data, Iterator):
            if self._spent or epoch > 0:
                raise self._setup.error(
                    f"is a one-shot iterator ({type(self.data).__name__}), which its first pass uses up; for more "
                    "than one give an object whose __iter__ starts anew (a list, a DataLoader, a class with __iter__)"
                )
            self._spent = True
        # A worker process begins each epoch with the data as it was made; here it is where the epoch before left it.
        known = self.has_state and not self._begun and (start > 0 or not self._in_worker)
        reader = _Reader(self, epoch, start, state if known else None)
        self._begun = True
        if not self._in_worker and not self._pin_memory:
            return iter(reader)
        generator = torch.Generator()
        generator.manual_seed(batch_seed(self._setup.seed, epoch))
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
    """Reads sequential data, here or in one worker process: a `_Plan`, then the batches it announces, and so on."""

    def __init__(self, source: Sequential, epoch: int, start: int, state: Any) -> None:
        self.dataset = source.data
        self._setup = source._setup
        self._batch_size = source.batch_size
        self._window = source._units_per_window
        self._cap = sys.maxsize if source._cap is None else source._cap
        self._collate = source._collate
        self._epoch = epoch
        self._start = start
        self._state = state
        self._has_state = source.has_state and source._setup.training
        self._taken = 0

    def __iter__(self) -> Iterator[Any]:
        setup = self._setup
        # Foreign code draws from a random state of its own: equal on all ranks, replayed by a resume, and apart from
        # what collating and the model draw, which differs between ranks.
        sandbox = Sandbox(batch_seed(setup.seed, self._epoch))
        data, state = self.dataset, self._state
        parts = [data, *(getattr(data, name, None) for name in _NESTED)]
        if state is not None and not self._start:
            with Sandbox(batch_seed(setup.seed, self._epoch - 1)):
                # It was left at the end of an epoch, and has to find that out before it begins another.
                begin_epoch(parts, setup.seed, self._epoch - 1)
                data.load_state_dict(state["data"])
                before = iter(data)
                deque(islice(before, max(0, self._cap - state["taken"])), maxlen=0)
                next(before, None)  # as below
            state = None
        with sandbox:
            generators = begin_epoch(parts, setup.seed, self._epoch)
            if state is not None:
                data.load_state_dict(state["data"])
                self._taken = state["taken"]
            if self._taken > self._cap:
                raise self._cannot_resume(self._taken)
            stream = iter(data)
            units = islice(stream, self._cap - self._taken)
            for generator, there in zip(generators, state["generators"] if state is not None else (), strict=False):
                generator.set_state(there)
        if state is not None:
            sandbox.state = state["random"]
        # Changing states takes some 0.1 to 0.2 ms a window: not where reading on runs nobody's code in this process.
        guard = nullcontext() if _runs_no_code_here(data) else sandbox

        def take(count: int) -> list[Any]:
            if not count:
                return []
            with guard:
                taken = list(islice(units, count))
            self._taken += len(taken)
            return taken

        def mark() -> Any:
            if not self._has_state:
                return None
            with guard:  # a copy, for what it returns may change as it is read on
                found = copy.deepcopy(data.state_dict())
            told = [generator.get_state() for generator in generators]
            return {"data": found, "taken": self._taken, "random": sandbox.state, "generators": told}

        position = self._start if state is not None else self._replay(take)
        for chunk, last, there in _chunks(take, mark, self._window, setup.drop_last):
            sizes = [1] * len(chunk) if self._batch_size else [visible_rows(batch) for batch in chunk]
            if 0 in sizes:
                raise setup.error(f"yielded a batch without rows after row {position}: leave empty batches out")
            ends = list(accumulate((rows or 1 for rows in sizes), initial=position))
            shares = plan_window(len(chunk), self._batch_size or 1, setup.world_size, setup.rank)
            own = [(share.rows if self._batch_size else sizes[share.start]) if share.rows else 0 for share in shares]
            first = [ends[share.start] for share in shares]
            yield _Plan(ends[-1] - position, ends[-1], last, first, own, there)
            position = ends[-1]
            for share in shares:
                if self._collate is None:
                    yield chunk[share.start]
                    continue
                if get_worker_info() is not None:
                    seed_generators(batch_seed(setup.seed, self._epoch, ends[share.start]))
                yield self._collate(chunk[share.start : share.stop])
        if self._has_state:
            with guard:  # past a limit too: what was never asked for an item has not left its saved state
                next(stream, None)

    def _replay(self, take: Callable[[int], list[Any]]) -> int:
        """Read and drop what comes before the start; the position reached, which is the start or an error."""
        position = 0
        while position < self._start:
            dropped = take(min(self._start - position, self._window) if self._batch_size else 1)
            position += len(dropped) if self._batch_size else sum(visible_rows(batch) or 1 for batch in dropped)
            if not dropped or position > self._start:
                raise self._cannot_resume(position)
        return position

    def _cannot_resume(self, position: int) -> ConfigurationError:
        return self._setup.error(
            f"cannot resume at row {self._start}: reading it again reached row {position}. The data, its order "
            "or the limit changed since the checkpoint was written"
        )


_NESTED = ("dataset", "sampler", "batch_sampler")  # parts of a loader that may hold an epoch or a generator


def _chunks(
    take: Callable[[int], list[Any]], mark: Callable[[], Any], size: int, drop_last: bool
) -> Iterator[tuple[list[Any], bool, Any]]:
    """Cut into chunks of `size`; looks ahead just far enough to know which is the last one, after what `mark` returns."""
    ahead = size if drop_last else 1
    chunk = take(size)
    while len(chunk) >= ahead:
        there = mark()
        following = take(ahead) if len(chunk) == size else []
        last = len(following) < ahead
        yield chunk, last, there
        if last:
            return
        chunk = following + take(size - len(following))


def _runs_no_code_here(data: Any) -> bool:
    if isinstance(data, DataLoader):  # with workers, one over a stream only collects what they made
        return isinstance(data.dataset, IterableDataset) and data.num_workers > 0 and not has_own_loop(data)
    return type(data) in (list, tuple)


def _unchanged(item: Any) -> Any:
    return item
