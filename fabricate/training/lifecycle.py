"""From a resolved plan to a live run and back: what happens before the first step and after the last.

Owns the order in which a run is opened (environment, engine, call lists, model, checks over the ranks), prepared (optimizers,
plan, checkpoint), finished, and closed, whatever happened. Must not know the steps in between (fabricate.training.loop) nor what a user
may ask of a trainer (fabricate.trainer).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabricate.checkpoint.state.commit import Background
from fabricate.checkpoint.state.logical import frozen_digests, optimizer_groups
from fabricate.configuration.resolve import Data, Resolved, make_plan, settle
from fabricate.distributed.consistency import check_alike
from fabricate.distributed.engine import Engine, check_trackers
from fabricate.errors import ConfigurationError, FabricateError, RankError
from fabricate.hooks import PROJECT, hookimpl
from fabricate.launch.commands import tell_preempted
from fabricate.metrics.counters import Progress
from fabricate.metrics.reduction import Metrics, synchronise_torchmetrics
from fabricate.model import export as exporting
from fabricate.model.building import build_model, check_has_values
from fabricate.model.memory import need, outline
from fabricate.module import TrainModule
from fabricate.optim.optimizers import configured_optimizers, leave_out_frozen, notes_of_length, read_optimizers
from fabricate.registry.hook_calls import Calls, Manager, Origin
from fabricate.registry.registry import progress_bar
from fabricate.registry.validation import reasons
from fabricate.seeding import derive_seed, seed_everything
from fabricate.training import resuming, saving
from fabricate.training.error_hints import explain
from fabricate.training.loop import log_rest
from fabricate.training.preemption import signals_heard
from fabricate.training.run_state import Run

if TYPE_CHECKING:
    from fabricate.trainer import Trainer


class Defaults:
    """What the loop does where hooks can be wrapped and nobody replaces it. The plugin named "fabricate"."""

    @hookimpl(trylast=True)
    def train_step(self, trainer: Trainer, batch: Any) -> Any:
        """Forward through the prepared model."""
        run = trainer._live()
        return run.engine.forward(batch, run.progress.micro_step)

    @hookimpl(trylast=True)
    def optimizer_step(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> bool:
        """Apply the update."""
        return trainer._live().engine.step(optimizer)

    @hookimpl(trylast=True)
    def eval_step(self, trainer: Trainer, batch: Any, stage: str) -> Any:
        """Forward of one evaluation batch."""
        run = trainer._live()
        engine = run.engine
        return (engine.model if engine.strategy.lockstep else engine.root)(stage, batch, run.batch_idx)

    @hookimpl(trylast=True)
    def write_checkpoint(self, trainer: Trainer, path: Path) -> bool:
        """Write and commit."""
        saving.write(trainer._live(), path)
        return True


def register(found: Resolved, module: TrainModule, *, bar: bool) -> Manager:
    """The plugins of this run, in the order in which they are heard."""
    manager = found.registry.manager
    manager.add(Defaults(), PROJECT)
    if bar:  # on every rank, so that all hear the same hooks; it shows on rank 0
        manager.add(progress_bar(), "progress_bar")
    parts = [(f"{kind}/{choice.made.name}", choice.made, choice.origin) for kind, choice in found.choices.items()]
    return found.registry.activate([*parts, ("module", module, Origin())])


@contextlib.contextmanager
def opened(trainer: Trainer, found: Resolved, module: TrainModule, stages: Sequence[str], data: Data) -> Iterator[Run]:
    """An engine with the module prepared in it; afterwards everything is as before, whatever happened."""
    if trainer._run is not None:
        raise FabricateError("this Trainer is running already; one fit at a time")
    settings, training = trainer.settings, "train" in stages
    settle(settings, found, data)
    with contextlib.ExitStack() as stack:
        stack.enter_context(environment_restored())
        run_dir = settings.run_dir if training else None
        if settings.fast_dev_run and training:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fabricate-dev-")))
        trackers = check_trackers(settings.trackers, found.registry.tracker) if training else []
        if trackers and run_dir is None:
            raise ConfigurationError(f"trackers={list(settings.trackers)} need a place to write; set run_dir=")
        if settings.seed is not None:
            seed_everything(settings.seed)
        stack.enter_context(_determinism(settings.deterministic))
        engine = stack.enter_context(
            Engine(
                found.launch,
                found.strategy,
                found.precision,
                found.device,
                log_with=trackers,
                logging_dir=str(run_dir / "trackers") if trackers and run_dir is not None else None,
                timeout=datetime.timedelta(seconds=settings.timeout.seconds),
                compile=settings.compile,
            )
        )
        # A seed that nobody set is each process's own: rank 0's counts.
        seed = int(engine.broadcast_json(found.seed[0]))
        for source in (data.train, *data.validation.values()):
            if source is not None and seed != found.seed[0]:
                source.reseed(seed)
        if settings.fast_dev_run and run_dir is not None:
            run_dir = Path(engine.broadcast_json(str(run_dir)))
        run = Run(
            trainer=trainer,
            module=module,
            engine=engine,
            calls=Calls(register(found, module, bar=settings.progress and training)),
            progress=Progress(),
            metrics=Metrics(engine, engine.device, engine.ranks_per_row),
            settings=settings,
            max_grad_norm=found.max_grad_norm[0] if found.max_grad_norm else None,
            seed=seed,
            source=data.train,
            validation=data.validation,
            total_steps=data.total_steps(settings),
            run_dir=run_dir,
            run_id=engine.broadcast_json(secrets.token_hex(8)),
            trackers=bool(trackers),
            closing=stack,
        )
        if not found.strategy.exposes_gradients and run.calls.on_before_step is not None:
            heard = ", ".join(run.calls.manager.order("on_before_step"))
            raise ConfigurationError(
                f"strategy={found.strategy.name!r} hides gradients from on_before_step, which {heard} hears; remove "
                "it or choose another strategy"
            )
        trainer._run = run
        object.__setattr__(module, "_trainer", trainer)
        modes = [(m, m.training) for m in module.modules()]
        try:
            if training:
                run.notes += stack.enter_context(signals_heard(run.requests))
            run.notes += [note] if (note := build_model(module, run.seed)) else []
            check_has_values(module)
            if training and not any(p.requires_grad for p in module.parameters()):
                raise ConfigurationError(
                    f"{type(module).__name__} has no trainable parameter; build layers in __init__ or configure_model"
                )
            check_alike(run)  # before anything is broadcast
            engine.prepare(module, stages, run.seed)
            if engine.ranks_per_row > 1:
                stack.callback(synchronise_torchmetrics(module, engine.counterparts(engine.ranks_per_row)))
            run.notes += engine.notes
            yield run
        except BaseException as exc:
            _report(run, exc)
            raise
        finally:
            saving.drain(run)
            for child, mode in modes:
                child.training = mode
            _close(run)


def _report(run: Run, exc: BaseException) -> None:
    """Tell listeners and the other ranks; never hides `exc`."""
    if isinstance(exc, SystemExit | GeneratorExit):
        return
    try:
        note = explain(run, exc)
    except Exception as second:  # with memory full, anything may fail
        note = f"what could be changed is not known: {type(second).__name__}: {second}"
    if note:
        exc.add_note(note)
    if run.calls.on_exception is not None:
        try:
            run.calls.on_exception(run.trainer, run.module, exc)
        except Exception as second:
            exc.add_note(f"on_exception raised {type(second).__name__}: {second}")
    first = run.engine.report_failure(exc)
    if first:
        raise RankError(first) from None  # `exc` is the broken connection, an echo of what is told here


def _close(run: Run) -> None:
    pending = sys.exc_info()[1]
    try:
        if run.calls.on_teardown is not None:
            run.calls.on_teardown(run.trainer, run.module)
        if run.trackers:
            run.engine.accelerator.end_training()
    except Exception as exc:
        if pending is None:
            raise
        pending.add_note(f"on_teardown raised {type(exc).__name__}: {exc}")
    finally:
        object.__setattr__(run.module, "_trainer", None)
        run.module._logged.clear()
        run.close()
        run.trainer._run = None


def prepare_fit(run: Run, found: Resolved, data: Data, resume: str | os.PathLike[str]) -> None:
    """Everything between an open engine and the first step: optimizers, the plan, a checkpoint."""
    module, engine, settings = run.module, run.engine, run.settings
    where = f"{type(module).__name__}.configure_optimizers"
    configured = configured_optimizers(where, module)
    run.optimizers, run.schedulers = read_optimizers(where, configured, run.total_steps)
    if problems := [
        text for o in run.optimizers.values() for text in reasons(engine.precision, engine.precision.check_optimizer(o))
    ]:
        raise ConfigurationError("; ".join(dict.fromkeys(problems)))
    run.notes += leave_out_frozen(run.optimizers)
    run.frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    if not settings.fast_dev_run:
        run.notes += notes_of_length(run.schedulers, run.total_steps, settings.max_epochs)
    for schedule in run.schedulers.values():
        if schedule.metric is not None and not run.validation:
            raise ConfigurationError(
                f"{where}: {schedule.text}, and nothing is validated; pass val= to fit, or take another scheduler"
            )
    for parameter in module.parameters():
        parameter.grad = None  # of a window that failed, say: the first update would take it in
    optimizer_groups(module, run.optimizers, engine.strategy)
    run.parameters = {
        name: [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for name, optimizer in run.optimizers.items()
    }
    needed = need(module, run.optimizers, lambda tensor: engine.strategy.local_part(tensor).shape)
    needed = dataclasses.replace(needed, module=outline(module))  # an engine may hide shapes from now on
    engine.prepare_optimizers(run.optimizers)
    found = dataclasses.replace(found, seed=(run.seed, found.seed[1]))
    plan = make_plan(settings, found, module, data, run.optimizers, run.schedulers, run.notes, needed)
    if engine.rank == 0:
        print(plan, flush=True)
    resuming.occupy(run, _warn)
    path = resuming.choose(run, os.fspath(resume), _warn)
    if run.run_dir is not None and settings.save == "async":
        run.background = Background(engine.beside())
    if run.run_dir is not None and engine.rank == 0:
        temporary = run.run_dir / ".plan.json"
        temporary.write_text(json.dumps(plan.to_json(), indent=1))
        temporary.replace(run.run_dir / "plan.json")
    engine.barrier()
    if settings.seed is not None or engine.world_size > 1:
        seed_everything(derive_seed(run.seed, "rank", engine.data_rank))
    if run.trackers:
        engine.start_trackers(plan.to_json()["settings"])
    if run.calls.on_fit_start is not None:
        run.calls.on_fit_start(run.trainer, module)
    if path is not None:
        resuming.restore(run, path)
    if run.run_dir is not None and not settings.save_frozen:
        run.frozen_digests = frozen_digests(run.frozen, engine.strategy)
    run.start_clock()


def finish_fit(run: Run, reason: str) -> None:
    """The last checkpoint and the export, or word of why the fit ended early. All ranks call it."""
    saving.save(run, last=True)
    preempted = reason == "preempted"
    if run.engine.launch.local_rank == 0:
        tell_preempted(os.environ, run.requests.signal if preempted else "")
    if preempted and run.watch is not None:
        run.watch.heard(run.requests.signal)
    if reason in ("interrupted", "preempted"):
        if run.calls.on_preempt is not None:
            run.calls.on_preempt(run.trainer, run.module, run.requests.signal)
        saved = f"the state is saved in {run.checkpoint}; the same call goes on from there"
        run.module.print(
            f"{reason} by {run.requests.signal} at step {run.progress.step}: "
            + (saved if run.checkpoint else "without a run_dir nothing is saved")
        )
    else:
        log_rest(run)
        exporting.export(run)
    if run.calls.on_fit_end is not None:
        run.calls.on_fit_end(run.trainer, run.module)


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def environment_restored() -> Iterator[None]:
    """torch sets variables of its compiler when the first optimizer is built; they go again with the fit."""
    before = set(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            if name.startswith(("TORCHINDUCTOR_", "TRITON_")):
                del os.environ[name]


@contextlib.contextmanager
def _determinism(on: bool) -> Iterator[None]:
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
