"""Evaluation: metrics over each row exactly once, and predictions in the order of the data. Training continues as if no evaluation had run.
Outside of a fit, each evaluation draws other random numbers.

Must not know: when it is due (`boundary`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from fabricate.checkpoint.format.codec import decode, encode
from fabricate.data.batches import EvalBatch
from fabricate.data.flat_bytes import flat_bytes
from fabricate.data.source import Source
from fabricate.distributed.group import looking_alone
from fabricate.errors import ConfigurationError, RankError, few
from fabricate.metrics.reduction import one_number
from fabricate.metrics.torchmetrics_objects import SetApart, is_torchmetric, snapshot_torchmetrics, updated
from fabricate.module import STEPS, overrides, refusing_logs
from fabricate.seeding import derive_seed, rng_state, seed_everything, set_rng_state
from fabricate.training.evaluations.evaluated import Evaluated, new_metrics, prefix_of
from fabricate.training.evaluations.measured import MeasuredSteps, restorable, rows_in, run_step
from fabricate.training.interruptions.overdue import waiting
from fabricate.training.saves.attributes import OURS
from fabricate.training.saves.marks import mark_of
from fabricate.training.state.run_state import Run
from fabricate.training.updates.optimizer_modes import meant_weights

NOT_PREDICTED = "a prediction has no metrics; return what you want from predict_step, or call validate or test"


def validate(run: Run, epoch: int) -> dict[str, float]:
    """Evaluate on the validation sets of the fit, log the result, and step the schedules that depend on a metric. All ranks."""
    metrics = evaluate(run, run.validation, "validate")
    run.journal.validated, run.journal.validated_at = frozenset(metrics), run.progress.step
    check_keep(run, metrics)
    run.journal.write_metrics("validate", metrics, epoch)
    if run.progress.step:  # a validation before the first update is a measurement only
        for scheduler in run.optim.schedules.values():
            scheduler.measured(metrics)
    return metrics


def check_keep(run: Run, metrics: Mapping[str, float]) -> None:
    """Raise `ConfigurationError` if the metric of `keep` is named like a validation metric, but validation does not give it."""
    keep = run.settings.keep
    if run.run_dir is None or "best" not in keep or keep["metric"] in metrics:
        return
    wanted = keep["metric"]
    recorded = ", ".join(metrics) or "nothing"
    if wanted.startswith("val"):
        raise ConfigurationError(
            f"keep: validation gives {recorded}, but not {wanted!r}, the metric that chooses the best checkpoints; name one of these"
        )
    if f"val_{wanted}" in metrics and wanted not in run.journal.latest and wanted not in ("loss", "lr", "grad_norm"):
        raise ConfigurationError(
            f"keep: the best checkpoints are chosen by {wanted!r}, but validation gives val_{wanted}; use this name"
        )


def draw_anew(run: Run, number: int) -> None:
    """Before an evaluation outside of a fit: let every rank draw other random numbers than the other ranks, and than evaluations with
    another number. If the user has set no seed, the generators of a single process go on from where they are. All ranks."""
    engine = run.engine
    number = int(engine.broadcast_json(number))
    for source in run.validation.values():
        source.draw_anew(number)
    if run.settings.seed is not None or engine.world_size > 1:
        seed = next(iter(run.validation.values())).seed
        seed_everything(derive_seed(seed, "evaluation", number, "rank", engine.data_rank))


@contextlib.contextmanager
def _evaluating(run: Run, stage: str) -> Iterator[SetApart]:
    """Run the body, which gets the torchmetrics objects that training logs, in eval mode without gradients. Afterwards the modes of all
    submodules and these objects are as before, and in a fit the random generators."""
    generators = rng_state() if run.source is not None else None
    restore_buffers = run.engine.share_buffers(run.module)
    training = SetApart(run.metrics.objects.values())
    before, run.now.stage, run.now.batch, run.now.batch_idx = run.now.batch, stage, None, 0
    pending, run.module._logged[:] = list(run.module._logged), []
    counted = snapshot_torchmetrics(run.module)
    device_works = True
    try:
        with meant_weights(run), evaluation_mode(run), _without_training(run, stage), torch.no_grad():
            yield training
        # after an exception they stay, because the error note describes them
        run.now.stage, run.now.batch = "train", before
    except BaseException as exc:
        if isinstance(exc, torch.AcceleratorError):
            device_works = False  # each further use of the device would raise the same error and hide the first
        else:
            counted()  # so that the next evaluation does not add to the counts of this one
        raise
    finally:
        if device_works:
            if generators is not None:
                set_rng_state(generators)
            restore_buffers()
            training.put_back()
        run.module._logged[:] = pending


@contextlib.contextmanager
def evaluation_mode(run: Run) -> Iterator[None]:
    """Run the body with all submodules in eval mode. Afterwards each has its mode from before."""
    module, modes = run.module, {m: m.training for m in run.module.modules()}
    module.eval()
    try:
        yield
        _switch_back(module, modes)
        if decided := [name for name, m in module.named_modules() if modes.get(m) and not m.training]:
            run.journal.note(
                f"train() of {type(module).__name__} or of one of its parts puts {few(decided)} into eval mode, but they were in train "
                "mode before an evaluation and stay in it. To freeze them from now on, call eval() on them in on_epoch_start or on_step"
            )
    except BaseException:
        with contextlib.suppress(Exception):  # it would hide the error
            _switch_back(module, modes)
        raise
    finally:
        for each, mode in modes.items():
            each.training = mode


def _switch_back(module: torch.nn.Module, modes: Mapping[torch.nn.Module, bool], parent_trains: bool = False) -> None:
    """Call `train` and `eval`, because a module may do more than to set its mode: merge weights, drop a cache."""
    mode = modes.get(module, module.training)
    if module.training != mode and not (mode and parent_trains):
        module.train(mode)
    for child in module.children():
        _switch_back(child, modes, mode)


@contextlib.contextmanager
def _without_training(run: Run, stage: str) -> Iterator[None]:
    """Raise an error if the body steps an optimizer. Note if it leaves a submodule in training mode that was in eval mode before."""
    name = type(run.module).__name__

    def refuse(*_: object) -> None:
        raise ConfigurationError(
            f"{name} steps an optimizer in an evaluation ({stage}), so it would train on data that is held out. Remove the call of step"
        )

    hooks = [optimizer.register_step_pre_hook(refuse) for optimizer in run.optim.optimizers.values()]
    in_eval_mode = [module for module in run.module.modules() if not module.training]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if any(module.training for module in in_eval_mode):
        run.journal.note(
            f"{name} is in training mode at the end of an evaluation ({stage}), because a step or a hook of the evaluation called train(). "
            "Dropout was active, and batch normalisation learned from these rows; remove the call, or keep it if that is meant"
        )


def evaluate(run: Run, sources: Mapping[str, Source], stage: str, most: int | None = None) -> dict[str, float]:
    """Metrics over the data of `sources`, each sample once over all ranks, as floats, the same on every rank. All ranks. Afterwards the
    module's modes and, in a fit, the random generators are as before. `most`: the number of batches of each source in a trial run, of which
    plugins get no events; None: all."""
    trainer, module = run.trainer, run.module
    calls = run.calls if most is None else run.calls.of_module()
    evaluated = Evaluated(run, stage)
    with _evaluating(run, stage) as training:
        if calls.on_eval_start is not None:
            calls.on_eval_start(trainer, module, stage)
            evaluated.take()
        training.reset()
        for name, source in sources.items():
            evaluated.set_apart()
            run.now.data_set = name
            evaluated.add(_evaluate_source(run, source, stage, most, evaluated), name)
        run.now.data_set = ""
        _after_forwards(run, stage)
        run.journal.latest |= evaluated.metrics
        if calls.on_eval_end is not None:
            used = set(itertools.chain.from_iterable(run.engine.gather_json(updated(module))))
            training.put_back_unused(used, module)
            evaluated.put_back_unused(used)
            run.now.evaluated = evaluated
            calls.on_eval_end(trainer, module, stage, evaluated.metrics)
            run.now.evaluated = None
            evaluated.join()
            evaluated.check()
        evaluated.release()
    if not evaluated.metrics and not overrides(module, "on_eval_end"):
        run.journal.note(
            f"{type(module).__name__}.{STEPS[stage]} returned no metrics and logged none, so this evaluation has no result. Return a "
            "mapping such as {'loss': loss}, or call self.log"
        )
    run.journal.latest |= evaluated.metrics
    return evaluated.metrics


def _after_forwards(run: Run, stage: str) -> None:
    """Let the strategy put parameters back into shards. Raises `RankError` if the ranks gathered those of different layers. All ranks."""
    engine = run.engine
    engine.strategy.after_evaluation(engine.model)
    if engine.strategy.lockstep and engine.world_size > 1:
        route = engine.strategy.route()
        most, minus_least = engine.agree([route, -route])
        if most != -minus_least:
            raise RankError(
                f"ranks ran different layers in this evaluation ({stage}), which gives wrong results under "
                f"strategy={engine.strategy.name!r}; run every layer on every rank (add 0 * output of a layer that is not needed), or use "
                "strategy='ddp'"
            )


def _evaluate_source(run: Run, source: Source, stage: str, most: int | None, evaluated: Evaluated) -> dict[str, float]:
    """Metrics over one data set, under the names that steps use."""
    module, prefix = run.module, prefix_of(stage)
    note_changes(run, source)
    metrics = new_metrics(run)
    rows = Rows(run) if overrides(module, "compute_metrics") else None
    steps = MeasuredSteps(run, stage, source.num_samples)
    for item, batch in _batches(run, source, most):
        restore = restorable(module) if item.rows == 0 else None
        output = steps.run(batch)
        if restore is not None:  # a stand-in ran only because collectives need every rank: discard its results
            restore()
            module._logged.clear()
            continue
        weight = steps.weigh(output, item)
        _keep_outputs(rows, output, item, f"{type(module).__name__}.{STEPS[stage]}")
        metrics.take(module._logged, weight)
        if most is not None:
            steps.keep(batch, item)
    if most is not None:
        steps.compare_halves()
    steps.join_notes()
    check_first(run, source)
    return _joined(evaluated.finish(metrics), _of_whole_set(run, rows) if rows is not None else {}, prefix)


def _joined(metrics: dict[str, float], more: dict[str, float], prefix: str) -> dict[str, float]:
    """The `metrics` of the steps together with `more`, those of `compute_metrics`."""
    names = {name.removeprefix(prefix) for name in metrics}
    if twice := [name for name in more if name.removeprefix(prefix) in names]:
        raise ConfigurationError(
            f"compute_metrics returns {twice[0]!r}, which the evaluation steps return too; return it from one of them"
        )
    return metrics | more


def _keep_outputs(rows: Rows | None, output: Any, item: EvalBatch, step: str) -> None:
    """Keep the "outputs" that a step returned, for `compute_metrics`."""
    if not isinstance(output, Mapping) or "outputs" not in output:
        return
    if rows is None:
        raise ConfigurationError(
            f"{step} returns 'outputs', which are for compute_metrics: define compute_metrics(self, outputs), or use another name"
        )
    rows.add(output["outputs"], item, f"{step} returned the outputs")


@contextlib.contextmanager
def _noting_what_is_set(run: Run, where: str) -> Iterator[None]:
    """Note which attributes and buffers of the module and its parts the body changes, on one rank of several. A list that only grew is a
    record."""
    if run.engine.world_size == 1:
        yield
        return
    before = _marks(run.module)
    yield
    if changed := [name for name, mark in _marks(run.module).items() if not _only_grew(before.get(name), mark)]:
        run.journal.note(
            f"{where} set {', '.join(f'self.{name}' for name in changed)} on rank 0 only, because it runs there. If other ranks use "
            "it, return it as a metric and set it in on_eval_end(self, metrics), which every rank calls. What is only a record needs "
            "nothing"
        )


def _marks(module: torch.nn.Module) -> dict[str, Any]:
    """Fingerprints of the buffers and of the attributes of a module and its submodules, by name. Without torchmetrics objects, which begin
    anew with each evaluation."""
    marks = {name: mark_of(buffer, set()) for name, buffer in module.named_buffers()}
    for prefix, each in module.named_modules():
        if is_torchmetric(each):
            continue
        own = {name: value for name, value in vars(each).items() if name not in OURS}
        marks |= {f"{prefix}.{name}".lstrip("."): mark_of(value, set()) for name, value in own.items()}
    return marks


def _only_grew(before: Any, mark: Any) -> bool:
    grew = isinstance(before, list) and isinstance(mark, list) and mark[: len(before)] == before
    return grew or before == mark


def _of_whole_set(run: Run, rows: Rows) -> dict[str, float]:
    """The metrics that `compute_metrics` computes on rank 0, on every rank. All ranks."""
    outputs = rows.gather()
    computed: dict[str, float] = {}
    if outputs:
        where = f"{type(run.module).__name__}.compute_metrics"
        reason = "compute_metrics runs on rank 0 only; return the metric from it"
        with refusing_logs(run.module, reason), looking_alone(), _noting_what_is_set(run, where):
            try:
                returned = run.module.compute_metrics(outputs)
            except Exception as exc:
                exc.add_note(
                    f"in {where}(outputs): a list with one item per row, of what the step returned under 'outputs'"
                )
                raise
        if not isinstance(returned, Mapping):
            raise ConfigurationError(f"{where} returned {type(returned).__name__}; return a mapping of metrics")
        for name, value in returned.items():
            computed[str(name)] = float(one_number(name, value))
    elif outputs is not None:
        step = STEPS[run.now.stage]
        run.journal.note(
            f"compute_metrics is not called in this evaluation ({run.now.stage}), because {step} returned no 'outputs'. If it should give "
            "metrics here, return {..., 'outputs': what compute_metrics needs of each row} from " + step
        )
    result: dict[str, float] = run.engine.broadcast_json(computed)
    return result


def note_changes(run: Run, source: Source) -> None:
    """Note what was changed after the run began and has no effect: the data of `source`, its loader, the steps of the module."""
    if text := source.changed():
        run.journal.note(text)
    if replaced := run.engine.replaced_steps():
        run.journal.note(
            f"{few(replaced)} of {type(run.module).__name__} was assigned after the fit began, which has no effect: the steps are looked "
            "up once. Decide inside of the step, by an attribute that a hook sets, or assign it before the fit"
        )


def check_first(run: Run, source: Source) -> None:
    """Raise `ConfigurationError` on every rank if ranks read different rows, or another order. Call it after reading; all ranks."""
    if run.engine.world_size == 1 or not source.first:
        return
    if error := source.unlike(run.engine.gather_json(source.first)):
        raise error


def _batches(run: Run, source: Source, most: int | None = None) -> Iterator[tuple[EvalBatch, Any]]:
    """The batches of this rank (the first `most`), each together with its copy on the device."""
    moment = run.engine.moment
    moment.uneven = True  # ranks have unequal numbers of batches
    try:
        with contextlib.closing(source.batches(stand_ins=run.engine.strategy.lockstep)) as batches:
            for batch_idx, item in enumerate(waiting(run.requests, itertools.islice(batches, most))):
                run.now.batch_idx, run.now.batch_indices = batch_idx, item.indices
                run.reached(run.progress.step, run.progress.micro_step, batch_idx)
                run.now.batch = batch = run.engine.to_device(item.batch)
                if batch is item.batch and isinstance(batch, MutableMapping | list):
                    # A step may take parts out of it, and rows are counted afterwards.
                    item = dataclasses.replace(item, batch=copy.copy(batch))
                yield item, batch
                run.now.batch = None  # no batch while the next one is read, and afterwards
        run.now.batch_indices = ()
    finally:
        moment.uneven = False
        run.reached(run.progress.step, run.progress.micro_step, -1)


def predict(run: Run, sources: Mapping[str, Source]) -> list[Any] | dict[str, list[Any] | None] | None:
    """One prediction per sample in the order of the data on rank 0, None on other ranks; for named data sets a mapping of these. Batches
    for which `eval_step` returns () are left out: a listener keeps their predictions. All ranks."""
    trainer, module, engine, calls = run.trainer, run.module, run.engine, run.calls
    predicted = {name: Rows(run) for name in sources}
    with _evaluating(run, "predict"), refusing_logs(module, NOT_PREDICTED):
        if calls.on_eval_start is not None:
            calls.on_eval_start(trainer, module, "predict")
        for name, source in sources.items():
            run.now.data_set = name
            if source.samplers and source.shuffle is None:
                run.journal.note(
                    "the sampler of the DataLoader chooses the rows; their predictions come in the order of the data set, not the sampler's"
                )
            for item, batch in _batches(run, source):
                restore = restorable(module) if item.rows == 0 else None
                output = run_step(run, batch, "predict")
                kept_elsewhere = isinstance(output, tuple) and not output
                if restore is not None:
                    restore()
                elif not kept_elsewhere:
                    predicted[name].add(output, item, "predict_step returned")
            check_first(run, source)
        run.now.data_set = ""
        _after_forwards(run, "predict")
        if calls.on_eval_end is not None:
            with refusing_logs(module, ""):  # written for validations; an error here would lose all predictions
                calls.on_eval_end(trainer, module, "predict", {})
            if module._logged:
                run.journal.note("what on_eval_end logged is not used, because a prediction has no metrics")
    outputs = {name: rows.gather() for name, rows in predicted.items()}
    return outputs[""] if list(outputs) == [""] else None if engine.rank else outputs


class Rows:
    """The outputs of steps, one per row of a data set."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._indices: list[int] = []
        self._outputs: list[Any] = []

    def add(self, output: Any, item: EvalBatch, what: str) -> None:
        """Keep the `output` of one batch on the CPU. `what`: the step, for error messages."""
        if (came := rows_in(item)) != len(item.indices):
            raise ConfigurationError(
                f"{what} a result for a batch of {came} rows, but {len(item.indices)} rows were read for this batch. The "
                "collate_fn left out rows, and it is not known which, so the results cannot be put in the order of the data. "
                "Leave these rows out of the data set instead"
            )
        self._outputs += _rows(output, came, what)
        self._indices += [int(i) for i in item.indices]

    def gather(self) -> list[Any] | None:
        """One output per sample in the order of the data on rank 0, None on other ranks. All ranks."""
        engine = self._run.engine
        if engine.rank % engine.ranks_per_row:  # another rank reads the same rows and sends them
            return _gather_rows(self._run, [], [])
        return _gather_rows(self._run, self._indices, self._outputs)


def _rows(output: Any, rows: int, what: str) -> list[Any]:
    """Split the output of a step for a batch into one output per row."""
    if isinstance(output, torch.Tensor | np.ndarray | list):
        shape = (len(output),) if isinstance(output, list) else tuple(output.shape)
        if shape[:1] != (rows,):
            raise ConfigurationError(
                f"{what} {len(output) if isinstance(output, list) else shape} for a batch of {rows} rows; the leading "
                "dimension has to be the rows"
            )
        if isinstance(output, list):
            return [_on_host(row) for row in output]
        return list(_on_host(output))  # one copy of the whole batch
    if isinstance(output, Mapping):
        columns = {k: _rows(v, rows, what) for k, v in output.items()}
        return [{k: column[i] for k, column in columns.items()} for i in range(rows)]
    if isinstance(output, tuple):
        parts = [_rows(v, rows, what) for v in output]
        return [tuple(part[i] for part in parts) for i in range(rows)]
    raise ConfigurationError(
        f"{what} {type(output).__name__}; return a tensor, an array, a list, or a mapping or tuple of them"
    )


def _on_host(value: Any) -> Any:
    """A copy of a tensor or an array in host memory, because a step may write its results into the same memory again. Other values as they
    are."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value.copy() if isinstance(value, np.ndarray) else value


def _gather_rows(run: Run, indices: list[int], outputs: list[Any]) -> list[Any] | None:
    if run.engine.world_size == 1:
        return [o for _, o in sorted(zip(indices, outputs, strict=True), key=lambda pair: pair[0])]
    # Tensors travel as raw rows, everything else as tagged JSON: no pickle between ranks.
    tensors: list[torch.Tensor] = []

    def put(path: str, value: object) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        tensors.append(value)
        return str(len(tensors) - 1)

    trees = run.engine.send_json(
        [indices, encode(outputs, put, "predictions"), [[str(t.dtype), list(t.shape)] for t in tensors]]
    )
    flat = torch.cat(
        [
            torch.empty(0, dtype=torch.uint8),
            *(flat_bytes(t.cpu()) for t in tensors),
        ]
    )
    parts = run.engine.send(flat.numpy().data)
    if not parts:
        return None
    gathered: list[tuple[int, Any]] = []
    for (where, tree, shapes), part in zip(trees, parts, strict=True):
        views, offset = [], 0
        for dtype_name, shape in shapes:
            dtype = getattr(torch, dtype_name.removeprefix("torch."))
            size = math.prod(shape) * dtype.itemsize
            own = bytearray(part[offset : offset + size])  # a copy, because its memory is aligned
            views.append((torch.frombuffer(own, dtype=dtype) if size else torch.empty(0, dtype=dtype)).reshape(shape))
            offset += size
        rows: Any = decode(tree, lambda ref, views=views: views[int(ref)])  # type: ignore[misc]
        gathered += zip(where, rows, strict=True)
    return [value for _, value in sorted(gathered, key=lambda pair: pair[0])]
