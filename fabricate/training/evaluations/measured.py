"""The steps of an evaluation on one data set: their metrics, the weights of these, and notes about metrics that are no means over rows.

Must not know: which batches there are (`evaluation`).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fabricate.data.batches import EvalBatch, rows_at, rows_of, rows_that_came, several_labels, visible_rows
from fabricate.data.digests import digest
from fabricate.distributed.group import remembered_buffers
from fabricate.errors import ConfigurationError, few
from fabricate.metrics.torchmetrics_objects import snapshot_torchmetrics
from fabricate.model.compiling import is_compiled
from fabricate.module import STEPS, TrainModule
from fabricate.seeding import is_generator, rng_state, state_of
from fabricate.training.evaluations.evaluated import prefix_of
from fabricate.training.saves.attributes import remembered
from fabricate.training.state.run_state import Run
from fabricate.training.updates.step_output import one_weight

if TYPE_CHECKING:
    from fabricate.metrics.step_watch import StepWatch

_NUMBER = re.compile(r"(?<![\w'@.])-?\d[\d.]*(?![\w'])")
"""A number in a note, such as the count by which a step divides. It may differ between epochs, and the note is the same. The number in the
name of a metric, which is in quotes, is none."""
_SIZE = "a metric depends on the batch size"
"""The topic of two notes, of which one is enough."""
_CLOSE = 1e-2
"""The relative difference between a metric and the mean over halves of its batch that gets a note. Kernels in low precision give other
roundings for another batch size."""


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
        self._noted = False
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
        came = _rows_seen(item)
        self._note(_about_sums(self._stage, watch.summed(logged, came, self._other_sizes)))
        if came is not None and came > 1 and came != self._whole:
            self._note_function(watch.function_of_a_mean(logged, came, self._other_sizes))
            if self._run.source is None:  # a fit compares halves of a batch instead
                self._note(_about_numbers(self._stage, watch.of_unknown_origin(logged, came)))
        weight = watch.weigh(logged, came) if self._by_labels else None
        if weight is None and not any(own is None and reduce == "mean" for _, _, own, reduce in logged):
            return rows_in(item)  # no metric has the weight of its batch
        if weight is None:
            computed = watch.of_other_than_rows(logged, came, self._whole, self._other_sizes)
            one_per_row = came is not None and watch.gives_losses_over_rows(logged, came)
            text = _about_rows(self._run, self._stage, item.batch, computed, one_per_row)
            self._by_labels, self._watch = False, None if text else watch.another_look()
        else:
            text = _about_beside(self._stage, watch.beside(logged, came, self._other_sizes))
        self._note(text)
        return rows_in(item) if weight is None else weight

    def _note(self, text: str) -> None:
        if text:
            self._noted = True
            self._run.journal.note(text, topic=_NUMBER.sub("#", text))

    def _note_function(self, metric: str) -> None:
        """Note a `metric` that is a function of a mean over a batch. The check before training compares halves instead."""
        if metric and not self._run.engine.moment.trial:
            self._run.journal.note(
                f"{STEPS[self._stage]} gives {metric}, so its mean over batches depends on the batch size and the number of ranks. Log the "
                "mean itself, or compute the metric once from all rows: return 'outputs' and define compute_metrics, or log a torchmetrics "
                "object",
                topic=_SIZE,
            )

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
        if self._noted:  # about the weight of its losses
            whole = {name: mean for name, mean in whole.items() if not name.endswith("loss")}
        text = "" if draws else _about_halves(self._stage, kept.rows, whole, one, other, turned)
        if text:
            run.journal.note(text, topic=_SIZE)

    def _measure(self, kept: _Kept, order: list[int]) -> dict[str, _Mean]:
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
            name: _Mean(float(value), float(weight if own is None else own))
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


class _Mean(NamedTuple):
    value: float
    weight: float


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


def _about_rows(run: Run, stage: str, batch: Any, computed: str, one_per_row: bool) -> str:
    """A note about metrics that are weighted by rows but are probably means over something else; "" if there are none. `computed`: the
    operation from which the step seems to get them; `one_per_row`: whether the losses are means over one value per row."""
    shape = None if one_per_row else several_labels(batch)
    why = f"a batch holds whole numbers of the shape {shape}, several per row," if shape is not None else ""
    if computed:
        why = f"{STEPS[stage]} computes {computed},"
    elif not why and run.optim.gives_weights and any(name.endswith("loss") for name, *_ in run.module._logged):
        why = "training_step returns a weight with its loss,"
    if not why:
        return ""
    return (
        f"{why} and {STEPS[stage]} does not return a plain cross-entropy, so its metrics are weighted by rows. Where rows have "
        "unequal numbers of labels, return a weight too: {..., 'weight': what the means were taken over}"
    )


def _about_beside(stage: str, metric: str) -> str:
    """A note about a `metric` that has the weight of a cross-entropy in the same step; "" if there is none."""
    if not metric:
        return ""
    return (
        f"{STEPS[stage]} gives {metric}, but its weight in the mean over the data set is that of the cross-entropy in the same step, the "
        "number of its labels. Give it a weight of its own: self.log(name, value, weight=what its mean was taken over)"
    )


def _about_sums(stage: str, names: list[str]) -> str:
    """A note about metrics, with these `names`, that are sums over the rows of a batch; "" if there are none."""
    if not names:
        return ""
    return (
        f"{STEPS[stage]} gives {few(names)} as a sum over the rows of a batch, and metrics are averaged: the result is the mean of the "
        f"sums. Log the mean instead, or add the sums up: self.log({names[0]!r}, value, reduce='sum')"
    )


def _about_numbers(stage: str, names: list[str]) -> str:
    """A note about metrics that were computed outside of torch; "" if there are none."""
    if not names:
        return ""
    return (
        f"{STEPS[stage]} gives {few(names)} as a number that torch did not compute, so it is not known whether the mean over batches is "
        "that of all rows. If it is a mean over rows, say so: self.log(name, value, weight=the number of rows). Otherwise compute it "
        "once from all rows: return 'outputs' and define compute_metrics, or log a torchmetrics object"
    )


def _about_halves(
    stage: str,
    rows: int,
    whole: dict[str, _Mean],
    one: dict[str, _Mean],
    other: dict[str, _Mean],
    turned: dict[str, _Mean],
) -> str:
    """A note about metrics of a batch of `rows` rows that are not the weighted means over its halves, `one` and `other`; "" if there are
    none. A metric that differs in `turned`, where the rows have another order, has random numbers in it and is not compared."""
    differing = {}
    for name in whole.keys() & turned.keys() & one.keys() & other.keys():
        halves, value = (one[name], other[name]), whole[name].value
        weight = sum(half.weight for half in halves)
        mean = sum(half.value * half.weight for half in halves) / weight if weight else value
        noise = abs(turned[name].value - value)
        if abs(mean - value) > max(_CLOSE * max(abs(value), *(abs(half.value) for half in halves)), 20 * noise):
            differing[name] = (value, mean)
    if not differing:
        return ""
    names = sorted(differing)
    value, mean = differing[names[0]]
    return (
        f"{STEPS[stage]} gives {few(names)}, which averaged over batches depends on the batch size and the number of ranks: "
        f"{names[0]!r} of {rows} rows is {value:.6g}, and the mean over two halves of them is {mean:.6g}. To compute it once from all "
        "rows, return 'outputs' and define compute_metrics, or log a torchmetrics object. If it is a mean over something other than "
        "rows, log it with weight=what the mean was taken over"
    )
