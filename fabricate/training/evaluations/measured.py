"""The steps of an evaluation on one data set: their metrics, the weights of these, and notes about metrics that are no means over rows.

Must not know: which batches there are (`evaluation`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from fabricate.data.batches import EvalBatch, rows_at, rows_of, rows_that_came, visible_rows
from fabricate.data.digests import digest
from fabricate.distributed.group import remembered_buffers
from fabricate.errors import ConfigurationError
from fabricate.metrics.torchmetrics_objects import snapshot_torchmetrics
from fabricate.model.compiling import is_compiled
from fabricate.module import STEPS, TrainModule
from fabricate.seeding import is_generator, rng_state, state_of
from fabricate.training.evaluations.evaluated import prefix_of
from fabricate.training.evaluations.metric_notes import (
    SIZE,
    Held,
    Mean,
    MetricNotes,
    Note,
    about_beside,
    about_function,
    about_halves,
    about_rows,
    about_sums,
    shown_by_halves,
)
from fabricate.training.saves.attributes import remembered
from fabricate.training.state.run_state import Run
from fabricate.training.updates.step_output import one_weight

if TYPE_CHECKING:
    from fabricate.metrics.step_watch import StepWatch

_WITH_FAST_PATHS = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
"""Layers that compute in another way while no gradients are needed, with other values at padded positions, but not while functions of torch
are watched."""


def _has_fast_paths(module: TrainModule) -> bool:
    """Whether `module` has layers with a fast path. Not if a layer is compiled: hooks would cause another compilation."""
    layers = list(module.modules())
    return any(isinstance(layer, _WITH_FAST_PATHS) for layer in layers) and not any(map(is_compiled, layers))


@contextlib.contextmanager
def _outside_of_fast_paths(watch: StepWatch) -> Iterator[None]:
    """Enter `watch`, but pause it inside of layers with a fast path, so that they compute as without it. Hooks for all modules pause it in
    a layer whose `forward` was replaced, as for a device map; the wrapped `forward` in one that is called without hooks."""
    paused: list[torch.nn.Module] = []

    def before(layer: torch.nn.Module, inputs: object) -> None:
        if isinstance(layer, _WITH_FAST_PATHS) and watch.pause():
            paused.append(layer)

    def after(layer: torch.nn.Module, inputs: object, output: object) -> None:
        if paused == [layer]:
            paused.clear()
            watch.resume()

    hooks = torch.nn.modules.module  # a hook of a layer itself would prevent its fast path
    originals: dict[Any, Any] = {kind: kind.forward for kind in _WITH_FAST_PATHS}
    with watch, contextlib.ExitStack() as undo:
        undo.callback(hooks.register_module_forward_pre_hook(before).remove)
        undo.callback(hooks.register_module_forward_hook(after, always_call=True).remove)
        for kind, forward in originals.items():
            kind.forward = _paused(forward, watch)
            undo.callback(setattr, kind, "forward", forward)
        yield


def _new_watch() -> StepWatch:
    from fabricate.metrics.step_watch import StepWatch  # only fits that evaluate need it

    return StepWatch()


def _paused(forward: Callable[..., Any], watch: StepWatch) -> Callable[..., Any]:
    """`forward`, during which `watch` is paused."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        pauses = watch.pause()
        try:
            return forward(*args, **kwargs)
        finally:
            if pauses:
                watch.resume()

    return run


class MeasuredSteps:
    """Runs the steps of an evaluation on one data set, and finds the weights of their metrics."""

    def __init__(self, run: Run, stage: str, whole: int | None) -> None:
        """`whole`: the rows of the data set, if they are known."""
        self._run, self._stage, self._whole = run, stage, whole
        self._watch: StepWatch | None = _new_watch()
        self._has_fast_paths = _has_fast_paths(run.module)
        self._by_labels = True
        self._other_sizes = {tensor.numel() for tensor in (*run.module.parameters(), *run.module.buffers())}
        self._notes = MetricNotes(run, stage)
        self._noted = False
        """Whether there was a note about something else than the batch size."""
        self._kept: _Kept | None = None

    def _watched(self, watch: StepWatch | None) -> contextlib.AbstractContextManager[object]:
        """A context in which `watch` records what a step computes."""
        if watch is None:
            return contextlib.nullcontext()
        return _outside_of_fast_paths(watch) if self._has_fast_paths else watch

    def run(self, batch: Any) -> Any:
        """The output of the step for one batch on the device."""
        with self._watched(self._watch):
            return run_step(self._run, batch, self._stage)

    def weigh(self, output: Any, item: EvalBatch) -> Any:
        """Log the metrics in the `output` of the step that was run last. Returns the weight of the logged metrics that have none of their
        own."""
        logged, watch = self._run.module._logged, self._watch
        weight = log_output(self._run.module, output, self._stage)
        if weight is not None:
            self._watch = None
            return weight
        if watch is None:
            return rows_in(item)
        came, unweighed = _rows_seen(item), list(logged)
        self._say(*self._notes_of_values(watch, logged, came))
        self._notes.say_unknown(self._unknown(watch, logged, came))
        weight = watch.weigh(logged, came) if self._by_labels else None
        if weight is None and not any(own is None and reduce == "mean" for _, _, own, reduce in logged):
            return rows_in(item)  # no metric has the weight of its batch
        self._by_labels = weight is not None
        one_per_row = weight is None and came is not None and watch.gives_losses_over_rows(logged, came)
        is_noted = self._say(self._note_of_weight(watch, logged, came, item, one_per_row))
        if self._run.engine.world_size > 1:
            self._hold(watch, unweighed, logged, came, item)
        if weight is not None:
            return weight
        self._watch = None if is_noted else watch.another_look()
        return rows_in(item)

    def _say(self, *notes: Note) -> bool:
        """Print `notes`. Returns whether there are any."""
        said = [note for note in notes if self._notes.say(note)]
        self._noted = self._noted or any(note.topic != SIZE for note in said)
        return bool(said)

    def _notes_of_values(self, watch: StepWatch, logged: list[Any], came: int | None) -> Iterator[Note]:
        """Notes about metrics that are sums, or functions of what torch computed; the latter not in the check before training, which
        compares halves of a batch. `came`: the rows of the batch."""
        yield Note(about_sums(self._stage, watch.summed(logged, came, self._other_sizes)))
        if self._is_part(came) and not self._run.engine.moment.trial:
            yield Note(about_function(self._stage, watch.function_of_a_mean(logged, came, self._other_sizes)), SIZE)

    def _unknown(self, watch: StepWatch, logged: list[Any], came: int | None) -> list[str]:
        """The names of metrics that are not known as means over rows, neither from the record nor from the check before training."""
        run = self._run
        if not self._is_part(came) or run.engine.moment.trial or (run.source is not None and run.checkpoints.restored):
            return []
        return watch.unknown(logged, came, run.halved)

    def _is_part(self, came: int | None) -> TypeGuard[int]:
        """Whether a batch of `came` rows has several rows, but not all."""
        return came is not None and came > 1 and came != self._whole

    def _note_of_weight(
        self, watch: StepWatch, logged: list[Any], came: int | None, item: EvalBatch, one_per_row: bool
    ) -> Note:
        """A note about a metric whose weight may not be what it is a mean over. `one_per_row`: whether the losses are means over one value
        per row."""
        if self._by_labels:
            return Note(about_beside(self._stage, watch.beside(logged, came, self._other_sizes)))
        computed = watch.of_other_than_rows(logged, came, self._whole, self._other_sizes)
        return Note(about_rows(self._run, self._stage, item.batch, computed, one_per_row))

    def _hold(
        self, watch: StepWatch, unweighed: list[Any], logged: list[Any], came: int | None, item: EvalBatch
    ) -> None:
        """Keep what there is to say about the first value of each metric on this rank, in case that other ranks have other values. Waits
        for the device."""
        for before, after in zip(unweighed, logged, strict=True):
            name, value, weight, reduce = before
            if weight is None and reduce == "mean" and self._notes.has_no(name):
                supposing = watch.supposing_another_value(name)
                notes = [*self._notes_of_values(supposing, [before], came)]
                notes.append(self._note_of_weight(supposing, [after], came, item, one_per_row=True))
                is_unknown = bool(self._unknown(supposing, [before], came))
                self._notes.hold(name, Held(float(value), [note for note in notes if note.text], is_unknown))

    def keep(self, batch: Any, item: EvalBatch) -> None:
        """Keep `batch`, the copy of `item` on the device, for `compare_halves`, if it is the first with several rows."""
        rows = _rows_seen(item)
        if self._kept is None and rows is not None and rows > 1:
            self._kept = _Kept(batch, rows, item.indices, self._run.now.batch_idx)

    def compare_halves(self) -> None:
        """Note metrics of the kept batch that are not the weighted means of the metrics of its halves. Afterwards the module is as before.
        All ranks; each compares its own batch, or none does, because a step may call collectives."""
        run = self._run
        # A sharded model runs on all ranks together; a plugin that wraps steps would count further ones.
        if run.engine.strategy.name not in ("single", "ddp") or run.calls.eval_step is not None:
            return
        kept, unable = self._kept, self._kept is None
        if run.engine.agree([int(unable)])[0] or kept is None:
            return
        order, restore, before = list(range(kept.rows)), restorable(run.module), _random_state(run.module)
        orders = (order, order[: kept.rows // 2], order[kept.rows // 2 :], order[::-1])
        run.now.batch_idx = kept.batch_idx
        try:
            with torch.compiler.set_stance("force_eager"):
                whole, one, other, turned = (self._measure(kept, each) for each in orders)
        except Exception:  # this batch cannot be halved, or the step fails with a half
            return
        finally:
            draws = _random_state(run.module) != before
            restore()
            run.module._logged.clear()
            run.now.batch, run.now.batch_indices = None, ()
        if self._noted:  # perhaps about the weight of its losses
            whole = {name: mean for name, mean in whole.items() if not name.endswith("loss")}
        if not draws:
            self._say(Note(about_halves(self._stage, kept.rows, whole, one, other, turned), SIZE))
            run.halved.update(shown_by_halves(whole, one, other))

    def join_notes(self) -> None:
        """Print what other ranks saw of the metrics. All ranks, after the last batch."""
        self._notes.join()

    def _measure(self, kept: _Kept, order: list[int]) -> dict[str, Mean]:
        """The metrics that are averaged, of the rows of a batch at the places in `order`."""
        now, logged, watch, rows = self._run.now, self._run.module._logged, _new_watch(), len(order)
        logged.clear()
        now.batch = batch = rows_at(kept.batch, order, kept.rows)
        if len(kept.indices) == kept.rows:
            now.batch_indices = [kept.indices[place] for place in order]
        with self._watched(watch):
            output = self._run.engine.evaluate(self._stage, batch, now.batch_idx)
        weight: Any = log_output(self._run.module, output, self._stage)
        if weight is None:
            weight = watch.weigh(logged, rows)
            weight = rows if weight is None else weight
        return {
            name: Mean(float(value), float(weight if own is None else own))
            for name, value, own, reduce in logged
            if reduce == "mean"
        }


def _random_state(module: TrainModule) -> str:
    """A digest of the states of the global generators and of those that `module` or a layer holds."""
    values = (value for child in module.modules() for value in vars(child).values())
    return digest([rng_state(), *(state_of(value) for value in values if is_generator(value))])


class _Kept(NamedTuple):
    """A batch on the device."""

    batch: Any
    rows: int
    indices: Sequence[int]
    """The positions of its rows in the data set."""
    batch_idx: int


def restorable(module: TrainModule) -> Callable[[], None]:
    """Record what a step may change in `module`: torchmetrics objects, buffers, and attributes such as a list of outputs. The returned
    function restores it after a step that must not count."""
    restores = (remembered(module), snapshot_torchmetrics(module), remembered_buffers(module))

    def restore() -> None:
        for each in restores:
            each()

    return restore


def run_step(run: Run, batch: Any, stage: str) -> Any:
    """The output of the module's step for one batch on the device."""
    with _in_evaluation_step(run.module):
        if run.calls.eval_step is None:  # no plugin wraps the step
            return run.engine.evaluate(stage, batch, run.now.batch_idx)
        return run.calls.eval_step(run.trainer, run.module, batch, stage)


@contextlib.contextmanager
def _in_evaluation_step(module: TrainModule) -> Iterator[None]:
    object.__setattr__(module, "_in_evaluation_step", True)
    try:
        yield
    finally:
        object.__setattr__(module, "_in_evaluation_step", False)


def rows_in(item: EvalBatch) -> int:
    return rows_of(item.batch) if item.rows is None else rows_that_came(item.batch, item.rows)


def _rows_seen(item: EvalBatch) -> int | None:
    return visible_rows(item.batch) if item.rows is None else rows_that_came(item.batch, item.rows)


def log_output(module: TrainModule, output: Any, stage: str) -> Any:
    """Log the metrics that a step returned, in addition to those it logged itself. One number alone is the loss, unless the step logged
    one. Returns the weight that the step returned, or None."""
    if output is None:
        return None
    step, prefix = f"{type(module).__name__}.{STEPS[stage]}", prefix_of(stage)
    logged = {name.removeprefix(prefix): value for name, value, *_ in module._logged}
    if isinstance(output, float) or (isinstance(output, torch.Tensor) and not output.ndim):
        output = {} if "loss" in logged else {"loss": output}
    if not isinstance(output, Mapping):
        raise ConfigurationError(
            f"{step} returned {type(output).__name__}; return a mapping of metrics, the loss as one number, or nothing"
        )
    returned: dict[str, str] = {}
    with _in_evaluation_step(module):
        for key, value in output.items():
            name = key.removeprefix(prefix)
            if name in returned:
                raise ConfigurationError(
                    f"{step} returns {key!r} and {returned[name]!r}, which is the same name; use one of the two"
                )
            if name in logged and not _is_same(logged[name], value):
                raise ConfigurationError(f"{step} returns {key!r} and logs it too; use one of the two")
            if key not in ("weight", "outputs"):
                returned[name] = key
                if name not in logged:
                    module.log(key, value)
    weight = output.get("weight")
    return None if weight is None else one_weight(weight)


def _is_same(logged: Any, returned: Any) -> bool:
    """Whether a step logged what it returned: the same tensor or object, or the same number on the host."""
    if isinstance(logged, torch.Tensor) and isinstance(returned, torch.Tensor):
        return logged.data_ptr() == returned.data_ptr()
    return logged is returned or (type(logged) is type(returned) is float and logged == returned)
