"""Opening and closing a run: sets up the process and the engine, prepares the module, and undoes all of it, also after an error.

Owns the order in which a run is opened (environment, engine, hook calls, model, comparison of ranks) and closed. Must not know: what
happens in between (`preparation`, `loop`, `finish`, `evaluation`), nor the methods of a trainer.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fabricate.checkpoint.state.constants import constants
from fabricate.checkpoint.state.logical import SAVED_DTYPES
from fabricate.configuration.arguments import Settings
from fabricate.configuration.opened_data import Data, settle
from fabricate.configuration.resolve import Resolved
from fabricate.distributed.engine import Engine
from fabricate.distributed.stacks import here
from fabricate.distributed.trackers import check_trackers, finish_trackers, needs_directory
from fabricate.errors import ConfigurationError, FabricateError, few
from fabricate.hooks import HOOKS, PROJECT, hookimpl
from fabricate.launch.ranks import Launch
from fabricate.metrics.counters import Progress
from fabricate.metrics.reduction import Metrics
from fabricate.metrics.torchmetrics_objects import allow_uneven_rows, synchronise_torchmetrics
from fabricate.model.building import (
    build_model,
    check_clipped,
    check_dtypes,
    check_has_values,
    check_parameters,
    check_sparse_buffers,
    expand_buffers,
)
from fabricate.module import NOT_RUNNING, TrainModule, attach, overrides
from fabricate.registry.hook_calls import Calls, Manager, Origin
from fabricate.registry.registry import progress_bar
from fabricate.training.alike import check_ranks, note_copied_generators
from fabricate.training.interruptions.overdue import overdue_waits_end
from fabricate.training.interruptions.preemption import Watch, signals_heard
from fabricate.training.interruptions.requests import Requests
from fabricate.training.process import hold_process, set_process_up
from fabricate.training.reports.failure import report
from fabricate.training.saves import saving
from fabricate.training.state.journal import Journal
from fabricate.training.state.run_state import Optimization, Owner, Run

_OVER = "the run is over, so the value would not be recorded; log it before the fit ends"


class Defaults:
    """The default implementations of the hooks that plugins can wrap or replace. The plugin named "fabricate"."""

    @hookimpl(trylast=True)
    def train_step(self, trainer: Any, batch: Any) -> Any:
        """Forward through the prepared model."""
        run = trainer._live()
        return run.engine.forward(batch, run.progress.micro_step)

    @hookimpl(trylast=True)
    def optimizer_step(self, trainer: Any, optimizer: torch.optim.Optimizer) -> bool:
        """Apply the update."""
        applied: bool = trainer._live().engine.scaling.step(optimizer)
        return applied

    @hookimpl(trylast=True)
    def eval_step(self, trainer: Any, batch: Any, stage: str) -> Any:
        """Forward of one evaluation batch."""
        run = trainer._live()
        return run.engine.evaluate(stage, batch, run.now.batch_idx)

    @hookimpl(trylast=True)
    def write_checkpoint(self, trainer: Any, path: Path) -> bool:
        """Write and commit."""
        saving.write(trainer._live(), path)
        return True

    @hookimpl
    def on_eval_end(self, trainer: Any) -> None:
        """Add what the module's own `on_eval_end` logged to the metrics that plugins get."""
        run = trainer._live()
        if run.now.evaluated is not None and overrides(run.module, "on_eval_end"):
            run.now.evaluated.join()


class LateDefaults:
    """What fabricate does after the listeners of all plugins, and before those that are called last."""

    @hookimpl(trylast=True)
    def on_eval_end(self, trainer: Any) -> None:
        """Add what plugins logged to the metrics, if a listener that is called last gets them."""
        run = trainer._live()
        late = [each for each in run.calls.manager.listeners("on_eval_end") if each.trylast]
        if run.now.evaluated is not None and len(late) > 1:
            run.now.evaluated.join()


def register(resolved: Resolved, module: TrainModule, *, bar: bool | Sequence[str]) -> Manager:
    """Activate the plugins of this run, in the order in which their hooks are called."""
    manager = resolved.registry.manager
    manager.add(LateDefaults(), "logged_metrics")
    if bar is not False:  # on every rank, so that all ranks have the same listeners; only rank 0 displays it
        manager.add(progress_bar(() if bar is True else bar), "progress_bar")
    parts = [
        (f"{kind}/{choice.chosen.name}", choice.chosen, choice.origin) for kind, choice in resolved.choices.items()
    ]
    return resolved.registry.activate([*parts, ("module", module, Origin()), (PROJECT, Defaults(), Origin())])


@contextlib.contextmanager
def opened(
    trainer: Owner,
    resolved: Resolved,
    module: TrainModule,
    stages: Sequence[str],
    data: Data,
    began: float = 0.0,
    make_engine: Callable[..., Engine] = Engine,
) -> Iterator[Run]:
    """A run with the prepared module; afterwards everything is as before, also after an error. All ranks.

    began: the monotonic time at which the user called, from which `max_time` counts. make_engine: called as `Engine` is."""
    if trainer._run is not None:
        raise FabricateError(
            "this Trainer is running already; one fit at a time. A hook asks for an evaluation with trainer.request_eval(); for "
            "anything else create another Trainer"
        )
    if module._trainer is not None:
        raise FabricateError(
            f"{type(module).__name__} is in use by the running fit or evaluation of another Trainer: pass copy.deepcopy(module). "
            "To evaluate further data sets during a fit, pass them to that fit as val={'name': data, ...} and call "
            "trainer.request_eval()"
        )
    settle(trainer.settings, resolved, data)
    with contextlib.ExitStack() as stack:
        hold_process(stack)
        run_dir, engine = _open_engine(stack, trainer.settings, resolved, data, make_engine)
        seed = _agree_on_seed(engine, resolved, data)
        run = _assemble(trainer, resolved, module, data, engine, run_dir, stack, began)
        trainer._run = run
        attach(module, trainer)
        module._no_log = ""
        modes = [(m, m.training) for m in module.modules()]
        here().begun()
        pending: BaseException | None = None
        try:
            _prepare(run, stages, seed)
            yield run
        except BaseException as exc:
            pending = exc
            module._no_log = _OVER
            report(run, exc)
            raise
        finally:
            saving.drain(run)
            for child, mode in modes:
                child.training = mode
            _close(run, pending)
            pending = None  # it refers to this frame


def _open_engine(
    stack: contextlib.ExitStack,
    settings: Settings,
    resolved: Resolved,
    data: Data,
    make_engine: Callable[..., Engine],
) -> tuple[Path | None, Engine]:
    """Set up the process and open the engine; `stack` undoes both. Returns the run directory and the engine. All ranks."""
    training = data.train is not None
    notes = set_process_up(stack, settings, resolved, training=training)
    run_dir = settings.run_dir if training else None
    if settings.fast_dev_run and training:
        run_dir = Path(stack.enter_context(_trial_directory(settings.run_dir, resolved.launch)))
    trackers = check_trackers(settings.trackers, resolved.registry.tracker) if training else []
    if run_dir is None and any(map(needs_directory, trackers)):
        raise ConfigurationError(f"trackers={list(settings.trackers)} need a place to write; set run_dir=")
    engine = make_engine(
        resolved.launch,
        resolved.strategy,
        resolved.precision,
        resolved.device,
        log_with=trackers,
        logging_dir=str(run_dir / "trackers") if trackers and run_dir is not None else None,
        timeout=datetime.timedelta(seconds=settings.timeout.seconds),
        compile=data.compilation(settings),
        accumulation=data.accumulation[0],
        recompute=settings.activation_checkpointing and training,
    )
    engine.notes += notes
    stack.enter_context(engine)
    if settings.fast_dev_run and run_dir is not None:
        run_dir = Path(engine.broadcast_json(str(run_dir)))
    return run_dir, engine


def _trial_directory(run_dir: Path | None, launch: Launch) -> tempfile.TemporaryDirectory[str]:
    """The temporary directory of `fast_dev_run`. Several nodes need a shared directory, so it is next to `run_dir`, if that is set."""
    beside = None
    if run_dir is not None and launch.world_size > launch.local_world_size:
        beside = run_dir.absolute().parent
        beside.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="fabricate-dev-", dir=beside)


def _agree_on_seed(engine: Engine, resolved: Resolved, data: Data) -> int:
    """The seed of this run. If the user has set none, every rank uses the one that rank 0 has drawn. All ranks."""
    seed = int(engine.broadcast_json(resolved.seed[0]))
    for source in (data.train, *data.validation.values()):
        if source is not None and seed != resolved.seed[0]:
            source.reseed(seed)
    return seed


def _assemble(
    trainer: Owner,
    resolved: Resolved,
    module: TrainModule,
    data: Data,
    engine: Engine,
    run_dir: Path | None,
    stack: contextlib.ExitStack,
    began: float,
) -> Run:
    settings, training = trainer.settings, data.train is not None
    bar = settings.progress if training else False
    calls = Calls(register(resolved, module, bar=bar), resolved.strategy.during_hook)
    if not resolved.strategy.exposes_gradients and calls.on_before_step is not None:
        listeners = ", ".join(calls.manager.order("on_before_step"))
        raise ConfigurationError(
            f"strategy={resolved.strategy.name!r} hides gradients from on_before_step, which {listeners} implements; "
            "remove it or choose another strategy"
        )
    progress, requests = Progress(), Requests()
    watches = training and engine.rank == 0 and (settings.max_time is not None or run_dir is not None)
    return Run(
        trainer=trainer,
        module=module,
        engine=engine,
        calls=calls,
        settings=settings,
        source=data.train,
        validation=data.validation,
        max_grad_norm=resolved.max_grad_norm[0] if resolved.max_grad_norm else None,
        validates=data.validates(settings),
        run_dir=run_dir,
        run_id=engine.broadcast_json(secrets.token_hex(8)),
        closing=stack,
        progress=progress,
        metrics=Metrics(engine, engine.device, engine.ranks_per_row, ignored=("loss",)),
        optim=Optimization(total_steps=data.total_steps(settings)),
        journal=Journal(engine, progress, run_dir, trackers=training and bool(settings.trackers)),
        reached=here().reached,
        requests=requests,
        watch=Watch(requests, began, settings.max_time, run_dir) if watches else None,
    )


def _prepare(run: Run, stages: Sequence[str], seed: int) -> None:
    """Build the module, compare the ranks, and let the strategy take over. All ranks."""
    module, engine, training = run.module, run.engine, run.source is not None
    if training:
        run.notes.extend(run.closing.enter_context(signals_heard(run.requests)))
        if engine.world_size > 1:
            run.closing.enter_context(overdue_waits_end(run.requests, engine, run.run_id))
    check_parameters(module)
    run.notes.extend([note] if (note := build_model(module, seed)) else [])
    attach(module, run.trainer)  # with the layers that configure_model has built
    check_has_values(module)
    if engine.world_size > 1 or run.run_dir is not None:
        check_sparse_buffers(module, "a checkpoint" if engine.world_size == 1 else "messages between ranks")
        expand_buffers(module)
    if training:
        _check_trained(run)
    run.checkpoints.constants = engine.broadcast_json(constants(module))
    run.notes.extend([*_wrapped(module), *_not_called(module)] if training else ())
    if run.source is not None:
        for source in (run.source, *run.validation.values()):
            source.recognise()
    check_ranks(run, seed)  # before the strategy broadcasts weights
    note_copied_generators(run)
    engine.prepare(module, stages, seed)
    if engine.world_size > 1:
        run.closing.callback(allow_uneven_rows())
    if engine.ranks_per_row > 1:
        run.closing.callback(synchronise_torchmetrics(module, engine.counterparts(engine.ranks_per_row)))
    run.notes.extend(engine.notes)


def _check_trained(run: Run) -> None:
    """Raise `ConfigurationError` if the module cannot be trained, clipped or saved as the arguments of the Trainer ask."""
    module, settings = run.module, run.settings
    if run.run_dir is not None:
        check_dtypes(module, SAVED_DTYPES)
    for name in ("max_grad_norm", "max_grad_value"):
        if getattr(settings, name) is not None:
            check_clipped(module, f"{name}={getattr(settings, name)}")
    if not any(p.requires_grad for p in module.parameters()):
        raise ConfigurationError(
            f"{type(module).__name__} has no trainable parameter; build layers in __init__ or configure_model"
        )


def _not_called(module: TrainModule) -> Iterator[str]:
    """A note for each TrainModule inside the module that is trained and has hooks, which nobody calls."""
    for name, part in module.named_modules():
        if not name or not isinstance(part, TrainModule) or not any(p.requires_grad for p in part.parameters()):
            continue
        if hooks := [hook for hook in HOOKS if hook in vars(type(part))]:
            yield (
                f"hooks of a TrainModule inside another are not called: {few(hooks)} of {type(module).__name__}.{name}. If they are "
                f"needed, call them in the same methods of {type(module).__name__}"
            )


def _wrapped(module: TrainModule) -> Iterator[str]:
    """A note for each layer that is wrapped for several devices already."""
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            yield (
                f"{type(module).__name__}.{name} is a {type(layer).__name__}, but fabricate itself divides the work over the ranks. Use "
                "the layer without this wrapper (its attribute module); the number of ranks is that of the launcher"
            )


def _close(run: Run, pending: BaseException | None) -> None:
    """End `run`. pending: the exception with which it ends, if there is one."""
    run.module._no_log = _OVER
    try:
        if run.calls.on_teardown is not None:
            run.calls.on_teardown(run.trainer, run.module)
        if run.source is not None and run.settings.trackers:
            finish_trackers(run.engine.accelerator, failed=pending is not None)
    except Exception as exc:
        if pending is None:
            raise
        pending.add_note(f"on_teardown raised {type(exc).__name__}: {exc}")
    finally:
        attach(run.module, None)
        run.module._no_log = NOT_RUNNING
        with contextlib.suppress(torch.AcceleratorError):
            for metric in run.metrics.objects.values():  # they may hold counts of an unfinished epoch
                metric.reset()
        run.module._logged.clear()
        run.journal.close()
        run.trainer._run = None
        run.reached(run.progress.step, run.progress.micro_step, -1)
        here().ended()
