"""A few updates of the real loop under a recorder, and the memory and communication that they need.

The module is prepared, its optimizers are made and its data is opened as for a fit. The first update allocates lasting tensors (optimizer
state, DDP's buckets). The second finds the operations with the most memory, and the third sorts the memory after these by kind. Sorting
after each operation would take too long.

Must not know: how operations run (`fakes`), how it is shown (`report`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from fabricate.configuration.opened_data import Data
from fabricate.configuration.resolve import Resolved
from fabricate.data.batches import Window, visible_rows
from fabricate.distributed.engine import Engine
from fabricate.errors import ConfigurationError
from fabricate.module import TrainModule
from fabricate.selfcheck.dry_run import ledger
from fabricate.selfcheck.dry_run.fakes import Fakes
from fabricate.selfcheck.dry_run.largest import largest
from fabricate.selfcheck.dry_run.recorder import Recorder
from fabricate.selfcheck.dry_run.report import Measured
from fabricate.strategies.ddp import DDP
from fabricate.strategies.sharding import is_sharded
from fabricate.training.loop import LoopState, account, accumulation, update, windows
from fabricate.training.opening import opened
from fabricate.training.preparation import prepare_fit
from fabricate.training.state.run_state import Owner, Run

Rows = int | None


def rehearse(
    trainer: Owner,
    resolved: Resolved,
    module: TrainModule,
    data: Data,
    recorder: Recorder,
    make_engine: Callable[..., Engine],
    fakes: Fakes | None,
    room: int | None = None,
) -> Measured:
    """The measurements of an update of the fit on this rank. All ranks. fakes: makes batches fake; None: batches stay real. room: the bytes
    for which the largest micro-batch is searched."""
    began = time.monotonic()
    with opened(trainer, resolved, module, ["train"], data, began, make_engine=make_engine) as run:
        recorder.ledger.watching = False  # memory for reading the data does not count
        with recorder:
            prepare_fit(run, resolved, data, "never", began)
        recorder.ledger.watching = True
        rehearsal = _Rehearsal(run, recorder, fakes)
        measured = rehearsal.measure(resolved)
        if room is not None:
            rows, full = rehearsal.largest(room, resolved)
            measured = replace(measured, room=room, largest_rows=rows, largest_bytes=full)
    return measured


class _Rehearsal:
    """The updates of one run, with the rows of its first window."""

    def __init__(self, run: Run, recorder: Recorder, fakes: Fakes | None) -> None:
        self.run, self.recorder, self.ledger, self.fakes = run, recorder, recorder.ledger, fakes
        self.state = LoopState(run)
        self.first = list(_first_windows(run))
        self.ledger.gradients = self._gradients
        micro_batches = self.first[0][1]
        self.rows: Rows = visible_rows(micro_batches[0][0])
        hosted = run.engine.strategy.memory_per_rank(run.module, dict.fromkeys(_STATES, 1), run.engine.world_size)
        self.hosted = [kind for kind in _STATES if f"host {kind}" in hosted]
        self.kept = "gradient buckets" if isinstance(run.engine.strategy, DDP) else ledger.KEPT

    def measure(self, resolved: Resolved) -> Measured:
        """Run three updates; return the measurements of the last."""
        work = self._work(self.rows)
        self._update(work)
        self._update(work)
        marks = [self.ledger.peak[1], self.ledger.most_activations[1]]
        self.recorder.traffic.begin()
        self._update(work, marks)
        at_peak, in_forward = (self.ledger.looks[mark] or {} for mark in marks)
        launch = resolved.launch
        return Measured(
            module=type(self.run.module).__name__,
            strategy=resolved.strategy.name,
            precision=resolved.precision.name,
            world_size=launch.world_size,
            ranks_per_node=launch.local_world_size,
            rows=self.rows,
            micro_steps=self.first[0][0].num_micro_steps,
            at_peak=self._named(at_peak),
            in_forward=self._named(in_forward),
            gradients=self.gradient_bytes,
            hosted=tuple(self.hosted),
            sent=self.recorder.traffic.sent(launch.local_world_size),
            operations=self.ledger.operations,
        )

    def largest(self, room: int, resolved: Resolved) -> tuple[int | None, int]:
        """The largest number of rows per micro-batch with which this rank's memory stays within `room` bytes, and the memory for it."""
        if self.rows is None or self.fakes is None:
            raise ConfigurationError(
                "--memory: the number of rows of a batch cannot be told from it, so no largest micro-batch can be found. Leave --memory out"
            )

        def peak(rows: int) -> int:
            self._update(self._work(rows))
            return self.ledger.peak[0] - sum(self.known_bytes[kind] for kind in self.hosted)

        return largest(peak, self.rows, room)

    def _work(self, rows: Rows) -> list[tuple[Window, list[tuple[Any, Rows]]]]:
        """The first windows, with batches of `rows` rows; unchanged if batches are real."""
        if self.fakes is None:
            return self.first
        work = []
        readers = self.run.engine.data_world_size
        for window, micro_batches in self.first:
            before = len(micro_batches) * (self.rows or 1) * readers
            batches = [(_resized(batch, self.rows, rows, self.fakes), n and (rows or n)) for batch, n in micro_batches]
            scaled = window.rows if rows == self.rows else before * (rows or 1) // (self.rows or 1)
            work.append((replace(window, rows=scaled), batches))
        return work

    def _update(self, work: list[tuple[Window, list[tuple[Any, Rows]]]], looks: Iterable[int] = ()) -> None:
        accumulate_window = accumulation(self.run)
        gc.collect()
        self._sort(work)
        self.ledger.begin(looks)
        with _without_collector(), self.recorder:
            for window, micro_batches in work:
                self.state.begin_update()
                self.ledger.in_forward = True
                losses = accumulate_window(self.state, replace(window, micro_batches=iter(micro_batches)))
                self.ledger.in_forward = False
                self.gradient_bytes = self.ledger.bytes_of(self._gradients())
                result = update(self.state, losses)
                account(self.state, window, losses, result)

    def _sort(self, work: list[tuple[Window, list[tuple[Any, Rows]]]]) -> None:
        """Sort the tensors that are alive between two updates by kind."""
        run = self.run
        states = (each for o in run.optim.optimizers.values() for each in o.state.values() if isinstance(each, Mapping))
        state = (value for each in states for value in each.values())
        by_kind = {
            ledger.PARAMETERS: list(map(_local, self.state.parameters)),
            ledger.STATE: [_local(value) for value in state if isinstance(value, torch.Tensor)],
            ledger.BUFFERS: list(run.module.buffers()),
            ledger.BATCH: [tensor for _, batches in work for batch, _ in batches for tensor in _tensors(batch)],
        }
        self.ledger.sort(by_kind)
        self.known_bytes: Mapping[str, int] = dict.fromkeys(_STATES, 0) | self.ledger.by_kind

    def _gradients(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return [_local(p.grad) for p in self.state.parameters if p.grad is not None]

    def _named(self, kinds: Mapping[str, int]) -> dict[str, int]:
        return {self.kept if kind == ledger.KEPT else kind: count for kind, count in kinds.items()}


_STATES = (ledger.PARAMETERS, ledger.GRADIENTS, ledger.STATE)


def _first_windows(run: Run) -> Iterator[tuple[Window, list[tuple[Any, Rows]]]]:
    """The first window; if optimizers take turns, one window per turn."""
    for window in windows(run):
        yield window, list(window.micro_batches)
        if window.last_turn:
            return


@contextmanager
def _without_collector() -> Iterator[None]:
    """A context without the garbage collector, so that memory is freed only where the last reference ends."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`."""
    with torch.no_grad():
        return tensor.to_local() if is_sharded(tensor) else tensor


def _resized(batch: Any, before: Rows, rows: Rows, fakes: Fakes) -> Any:
    """`batch` with fake tensors. Tensors with `before` rows become tensors with `rows` rows."""

    def resize(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            first = rows if part.ndim and len(part) == before and rows is not None else None
            return fakes.empty(part.shape if first is None else (first, *part.shape[1:]), part.dtype)
        if isinstance(part, Mapping):
            parts = {key: resize(value) for key, value in part.items()}
            return parts if type(part) is dict else type(part)(parts)  # type: ignore[call-arg]
        if isinstance(part, tuple) and type(part) is not tuple:  # a named tuple
            return type(part)(*map(resize, part))
        if isinstance(part, list | tuple):
            return type(part)(map(resize, part))
        if is_dataclass(part) and not isinstance(part, type):
            return replace(part, **{field.name: resize(getattr(part, field.name)) for field in fields(part)})
        return part

    return resize(batch)


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _tensors(getattr(batch, field.name))
