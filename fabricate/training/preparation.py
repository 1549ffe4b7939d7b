"""From an open run to its first step: optimizers, the plan, a checkpoint to resume from.

Must not know: how a run is opened (`opening`), the loop.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fabricate.checkpoint.format.codec import encode
from fabricate.checkpoint.state.commit import Background
from fabricate.checkpoint.state.logical import optimizer_groups
from fabricate.checkpoint.state.staging import DeviceStaging, Staging
from fabricate.configuration.opened_data import Data
from fabricate.configuration.plan import SUMMARY_LINES, Plan
from fabricate.configuration.plan_sections import make_plan
from fabricate.configuration.resolve import Resolved
from fabricate.distributed.engine import Engine
from fabricate.distributed.ranks_file import is_written_by, write_ranks
from fabricate.errors import CheckpointError, ConfigurationError, few, size_text
from fabricate.model.building import eval_modes
from fabricate.model.export import notes_of_export
from fabricate.model.host_memory import host_memory
from fabricate.model.memory import Need, need, outline
from fabricate.module import TrainModule, overrides, takes_turns, writes_itself
from fabricate.optim.configured import configured
from fabricate.optim.optimizers import (
    configured_optimizers,
    leave_out_frozen,
    notes_of_length,
    notes_of_untrained,
    read_optimizers,
)
from fabricate.optim.pace import notes_of_pace
from fabricate.optim.schedules import notes_of_mode
from fabricate.optim.trial import State
from fabricate.precisions.base import compensates
from fabricate.registry.registry import own_version
from fabricate.registry.validation import reasons
from fabricate.seeding import derive_seed, seed_everything
from fabricate.strategies.base import Strategy
from fabricate.training.alike import agree_on_order
from fabricate.training.reports.tracking import start_trackers
from fabricate.training.saves import choosing, resuming
from fabricate.training.saves.changes import plugin_options
from fabricate.training.saves.compared import surplus_updates
from fabricate.training.saves.replicas import compare
from fabricate.training.saves.saved_state import leave_out_frozen_weights, versions
from fabricate.training.saves.unsaved import remember, unsaved_notes
from fabricate.training.state.run_state import Run
from fabricate.training.updates.optimizer_modes import train_mode
from fabricate.training.updates.step_output import check_scaling, notes_of_clipping
from fabricate.training.updates.stepping import prepare_updates
from fabricate.training.written import refuse_max_norm
from fabricate.values import Every

_SHOWN_SECONDS = 10.0
"""How long a network file system may take to show a file that another host wrote."""


def prepare_fit(run: Run, resolved: Resolved, data: Data, resume: str | os.PathLike[str], began: float) -> None:
    """Do everything between the opening of a run and its first step. All ranks. began: the monotonic time at which the user called
    `fit`."""
    assert run.source is not None
    settings, engine = run.settings, run.engine
    run.optim.surplus_updates = surplus_updates(run, os.fspath(resume))
    data = dataclasses.replace(data, surplus_updates=run.optim.surplus_updates)
    run.optim.total_steps = data.total_steps(settings)
    _check_validation(run)
    _note_few_rows(run)
    refuse_max_norm(run.module, engine.strategy, engine.world_size)
    _configure_optimizers(run)
    plan = _plan(run, resolved, data)
    run.journal.planned_bytes = plan["memory_per_rank"]["total"]
    choosing.occupy(run, _warn)
    path = choosing.choose(run, os.fspath(resume), _warn)
    _print(plan, run, others=bool(data.found) + (resuming.LINES if path is not None else 0))
    if run.run_dir is not None and settings.save == "async":
        staging = Staging() if engine.device.type == "cpu" else DeviceStaging(engine.device)
        run.checkpoints.background = Background(engine.beside(), staging)
    if run.run_dir is not None and engine.rank == 0:
        if path is None:
            _write_plan(run.run_dir, plan)
        write_ranks(run.run_dir, run.run_id, engine.addresses(), run.calls.places())
    engine.barrier()
    _check_shared(run)
    if settings.seed is not None or engine.world_size > 1:
        seed_everything(derive_seed(run.source.seed, "rank", engine.data_rank))
    if settings.trackers:
        settled = {name: value["value"] for name, value in plan.to_json()["settings"].items()}
        start_trackers(run, settled, path)
    _check_averages(run)
    if run.calls.on_fit_start is not None:
        run.calls.on_fit_start(run.trainer, run.module)
        # raises an error if a hook replaced a parameter
        optimizer_groups(run.module, run.optim.optimizers, engine.strategy)
    run.optim.modes = eval_modes(run.module)
    if path is not None:
        resuming.resume(run, path)
        if run.run_dir is not None and engine.rank == 0:
            _write_plan(run.run_dir, plan)  # not before: a fit that is refused leaves the plan of the run as it is
    train_mode(run)
    compare(run)  # `on_fit_start` or `on_load` may have changed weights on one rank only
    leave_out_frozen_weights(run)
    remember(run)
    run.journal.start()
    run.journal.event("started", seconds=round(time.monotonic() - began, 3), **_beginning(run))


def _beginning(run: Run) -> dict[str, Any]:
    """Where the fit continues, and what determines the order of its data; `fabricate rows` reads this."""
    assert run.source is not None
    progress, engine = run.progress, run.engine
    ranks = {"ranks": engine.data_world_size, "ranks_per_row": engine.ranks_per_row}
    return {
        "epoch": progress.epoch,
        "position": progress.position,
        "keep": run.settings.keep,
        "data": {**run.source.order(), **ranks, **run.source.identity},
        "versions": {"python": platform.python_version(), "fabricate": own_version(), **versions()},
    }


def _print(plan: Plan, run: Run, others: int) -> None:
    """Print the plan or its summary on rank 0, as `print_plan` says. others: the number of other lines that are printed before the first
    step."""
    wanted = run.settings.print_plan
    if run.engine.rank == 0 and wanted != "none":
        print(plan if wanted == "full" else plan.summary(SUMMARY_LINES - others), flush=True)


def _check_averages(run: Run) -> None:
    """Refuse plugins that average the weights if there are several, or if replicas differ between ranks."""
    plugins = run.calls.manager.list_name_plugin()
    names = [name for name, plugin in plugins if getattr(plugin, "averages_weights", False)]
    if len(names) > 1:
        raise ConfigurationError(
            f"plugins {few(names)}: each of them averages the weights, but a fit ends with one average. Leave out all but one"
        )
    if names and run.engine.strategy.replicas_drift:
        raise ConfigurationError(
            f"plugin {names[0]}: weights differ between ranks under strategy={run.engine.strategy.name!r}, so they cannot be averaged. "
            "Use strategy='ddp'"
        )


def _check_validation(run: Run) -> None:
    """Refuse or note a validation that never takes place, and refuse settings that depend on it."""
    settings = run.settings
    assert run.source is not None
    for name in ("save_every", "validate_every", "log_every"):
        share: Every | None = getattr(settings, name)
        if share is not None and share.unit == "epochs" and share.amount < 1 and run.source.updates_per_epoch is None:
            raise ConfigurationError(
                f"{name}={str(share)!r}: train has no length, so a share of an epoch is not known; give steps"
            )
    every, keep = settings.validate_every, settings.keep
    if run.validation and every is not None and not run.validates and run.optim.total_steps:
        never = f"validate_every={str(every)!r} is longer than this fit of {run.optim.total_steps} updates, so val is never evaluated"
        if every != Every(epochs=1):  # the default is no error, because short trials leave it unchanged
            raise ConfigurationError(f"{never}: give a shorter interval, or leave out val=")
        run.notes.append(f"{never}; set validate_every, or train for a whole epoch")
    if run.run_dir is not None and "best" in keep and keep["metric"].startswith("val") and not run.validates:
        raise ConfigurationError(
            f"keep: the best checkpoints are chosen by {keep['metric']!r}, but this fit has no validation; pass "
            "val= to fit and set validate_every so that at least one validation takes place, or name another metric"
        )


def _note_few_rows(run: Run) -> None:
    """Note training data that is smaller than the batch of one update."""
    assert run.source is not None
    rows, batch = run.source.num_samples, run.source.global_batch
    if rows is not None and batch is not None and rows < batch:
        run.notes.append(f"train has {rows} rows, fewer than the {batch} rows of an update, so each update has {rows}")


def _configure_optimizers(run: Run) -> None:
    """Check what the module's `configure_optimizers` returns, and fill `run.optim` with it. All ranks."""
    module, engine, optim = run.module, run.engine, run.optim
    where = f"{type(module).__name__}.configure_optimizers"
    own_optimizers = configured_optimizers(where, module)
    in_turn = takes_turns(module)
    optim.optimizers, optim.schedules, optim.named = read_optimizers(
        where, own_optimizers, run.optim.total_steps, in_turn=in_turn
    )
    optim.turns = tuple(optim.named) if in_turn else ()
    checks = (reasons(engine.precision, engine.precision.check_optimizer(o)) for o in optim.optimizers.values())
    if problems := [text for texts in checks for text in texts]:
        raise ConfigurationError("; ".join(dict.fromkeys(problems)))
    optim.configured, optim.plugin_options = configured(optim.optimizers, optim.schedules), dict(plugin_options(run))
    run.notes.extend(leave_out_frozen(optim.optimizers))
    agree_on_order(run, where)
    run.notes.extend(notes_of_untrained(module, optim.optimizers))
    run.notes.extend(_notes_of_rounding(run))
    if run.calls.train_step is None:  # a plugin that takes the place of training_step may run backward in it
        check_scaling(module)
        run.notes.extend(notes_of_clipping(module))
    optim.frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    optim.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    _check_schedules(run, where)
    for parameter in module.parameters():
        parameter.grad = None  # a gradient may be left from a window that failed
    take_groups(run)
    _note_several(run)


def _notes_of_rounding(run: Run) -> Iterator[str]:
    """Notes about optimizers whose updates are rounded to 16 bits, because the script loaded the weights so."""
    precision = run.engine.precision.name
    if run.engine.strategy.scales_loss:  # DeepSpeed keeps float32 weights of its own beside those of the module
        return
    for optimizer in run.optim.optimizers.values():
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        rounded = [p for p in trained if p.dtype in (torch.bfloat16, torch.float16)]
        if rounded and precision != "bf16-true" and not compensates(optimizer):
            dtype = str(rounded[0].dtype).removeprefix("torch.")
            yield (
                f"{len(rounded)} of {len(trained)} trained parameters are {dtype}, as the script made or loaded them, and precision="
                f"{precision!r} leaves them so: small updates by {type(optimizer).__name__} are lost when a weight is rounded. "
                "Load them in float32 (from_pretrained(..., dtype=torch.float32)); or use precision='bf16-true' and an optimizer for it"
            )


def _note_several(run: Run) -> None:
    """Note how several optimizers share the updates; refuse turns of optimizers that step together."""
    optim = run.optim
    if optim.turns and len(optim.optimizers) > len(optim.named) == 1:
        raise ConfigurationError(
            f"{type(run.module).__name__}.training_step has the argument optimizer, but the optimizers in a list step together, so it "
            f"would always be {optim.turns[0]!r}. Let configure_optimizers return a mapping: {{'generator': ..., 'discriminator': ...}}"
        )
    if optim.turns:
        run.notes.append(f"each step is an update of {', then one of '.join(optim.turns)}, on the same rows")
    elif len(optim.named) > 1 and optim.default is not None and run.calls.optimizer_step is None:
        run.notes.append(
            f"the optimizers {', '.join(optim.named)} step together in each update, unless training_step names one of them"
        )


def _check_schedules(run: Run, where: str) -> None:
    """Note schedules that were made for another number of updates; refuse a schedule by a metric in a fit without validation."""
    settings, optim = run.settings, run.optim
    assert run.source is not None
    if not settings.fast_dev_run:
        # how many updates each optimizer makes is not known
        of_each = run.optim.total_steps if len(optim.named) == 1 or optim.turns else None
        run.notes.extend(notes_of_length(optim.schedules, of_each, settings.max_epochs))
        run.notes.extend(notes_of_pace(optim.schedules, run.optim.total_steps, run.source.updates_per_epoch))
    run.notes.extend(notes_of_mode(optim.schedules.values()))
    for schedule in optim.schedules.values():
        if schedule.metric is not None and not run.validates:
            raise ConfigurationError(
                f"{where}: {schedule.text}, and this fit has no validation; pass val= to fit and set validate_every "
                "so that at least one validation takes place, or use another scheduler"
            )


def take_groups(run: Run) -> int:
    """Take in parameter groups that a hook may have added; return the number of all groups."""
    optim, strategy = run.optim, run.engine.strategy
    if optim.updates and not strategy.exposes_gradients:
        raise ConfigurationError(
            f"a parameter group was added during the fit, and strategy={strategy.name!r} trains those that configure_optimizers returned; "
            "put all parameters into groups there, or use strategy='ddp' or 'fsdp'"
        )
    optimizer_groups(run.module, optim.optimizers, strategy)
    prepare_updates(run)
    return optim.number_of_groups()


def _plan(run: Run, resolved: Resolved, data: Data) -> Plan:
    """Make the plan of the fit. Afterwards the strategy has prepared the optimizers. All ranks."""
    assert run.source is not None
    module, engine, optim = run.module, run.engine, run.optim
    needed = need(module, optim.optimizers, lambda tensor: engine.strategy.local_part(tensor).shape)
    # after `prepare_optimizers`, an engine may hide the shapes
    needed = dataclasses.replace(needed, module=outline(module))
    if run.run_dir is not None and (problems := list(unsaved_state(needed, engine.strategy))):
        raise ConfigurationError("; ".join(problems))
    if run.run_dir is not None and run.settings.save == "async":
        check_room_for_copies(needed, engine)
    engine.prepare_optimizers(optim.optimizers)
    resolved = dataclasses.replace(resolved, seed=(run.source.seed, resolved.seed[1]))
    run.notes.extend([*unsaved_notes(run), *_repeated(run)])
    if run.run_dir is not None and not writes_itself(module):
        run.notes.extend([*_unused_export(module), *notes_of_export(module, engine.strategy)])
    return make_plan(run.settings, resolved, module, data, optim.optimizers, optim.schedules, run.notes, needed)


def _unused_export(module: TrainModule) -> Iterator[str]:
    """A note if the module has a helper called `export`."""
    if overrides(module, "export"):
        yield (
            f"{type(module).__name__}.export takes other arguments than (path), so RUN_DIR/model/ is written as without it. To write "
            "these files yourself, define export(self, path)"
        )


def _repeated(run: Run) -> Iterator[str]:
    """A note if the module is fitted for the third time on data of one length, as in a loop over `fit`."""
    assert run.source is not None
    if run.run_dir is None:
        length = run.source.num_units
        earlier = vars(run.module).setdefault("_fabricate_fits", [])
        earlier.append(length)
        if earlier.count(length) == 3:
            same = ", and with rows in the same order" if run.source.shuffle else ""
            same += ", and with the same random numbers in worker processes" if run.source.in_workers else ""
            yield (
                "this module is fitted for the third time on data of this length. Each fit begins with new optimizers and schedules"
                f"{same}. To train for several epochs, call fit once with max_epochs; for folds that is as it should be; "
                "rounds may need a seed each: Trainer(seed=...)"
            )


def unsaved_state(needed: Need, strategy: Strategy) -> Iterator[str]:
    """The reasons why the state of the optimizers cannot be saved, each with its remedy. `needed` has this state before the first step, if
    a trial step of the optimizer was possible."""
    own_form = type(strategy).optimizer_state is not Strategy.optimizer_state
    in_parts = strategy.shards_parameters or own_form
    for label, state in needed.states.items():
        if not own_form:
            yield from _objects(needed.optimizers[label], state)
        kinds = {type(value) for of_parameter in state.values() for value in of_parameter.values()}
        for kind in kinds - {torch.Tensor, torch.nn.Parameter}:
            if not issubclass(kind, torch.Tensor):
                continue
            what = f"{type(needed.optimizers[label]).__name__} keeps {kind.__name__} tensors, which"
            if not hasattr(kind, "__tensor_flatten__"):
                yield f"{what} no checkpoint can hold; use another optimizer, or leave out run_dir, so that nothing is saved"
            elif in_parts:
                yield (
                    f"{what} strategy={strategy.name!r} cannot save in parts; use strategy='ddp', another optimizer, or leave out "
                    "run_dir, so that nothing is saved"
                )


def _objects(optimizer: torch.optim.Optimizer, state: State) -> Iterator[str]:
    """The first object of an optimizer, in its state or the options of its groups, that no checkpoint can hold."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    named = [("a group", group) for group in options] + [("state", of_parameter) for of_parameter in state.values()]
    for name, values in named:
        try:
            encode(values, lambda path, value: path if isinstance(value, torch.Tensor) else None, name)
        except CheckpointError as exc:
            yield f"{type(optimizer).__name__}: {exc}. Use another optimizer, or leave out run_dir, so that nothing is saved"
            return


def check_room_for_copies(needed: Need, engine: Engine) -> None:
    """Raise `ConfigurationError` unless the host has room for the copies that a background save makes: this rank's share of the state."""
    state = needed.whole["parameters"] + needed.whole["optimizer state"]
    copies = math.ceil(state / engine.world_size)
    per_rank = needed.per_rank(engine.strategy, engine.world_size)
    on_device = engine.device.type != "cpu"
    there = sum(size for kind, size in per_rank.items() if not on_device or kind.startswith("host "))
    room, where = host_memory(engine.launch.local_world_size)
    if copies + there > room:
        beside = f" in addition to the {size_text(there)} that strategy and state already keep there" if there else ""
        raise ConfigurationError(
            f"save='async' copies the state to host memory before it is written: {size_text(copies)} on each rank{beside}. But a "
            f"rank has only {size_text(room)} ({where}). Use save='sync', or start more ranks on more hosts"
        )


def _write_plan(run_dir: Path, plan: Plan) -> None:
    temporary = run_dir / ".plan.json"
    temporary.write_text(json.dumps(plan.to_json(), indent=1))
    temporary.replace(run_dir / "plan.json")


def _check_shared(run: Run) -> None:
    """Raise an error if this rank's run directory is not the one in which rank 0 has just written: every rank writes its part of a
    checkpoint there. No communication; the other ranks notice the failure."""
    if run.run_dir is None:
        return
    deadline = time.monotonic() + _SHOWN_SECONDS
    while not is_written_by(run.run_dir, run.run_id):
        if time.monotonic() > deadline:
            if run.settings.fast_dev_run and run.settings.run_dir is None:
                raise ConfigurationError(
                    "fast_dev_run on several nodes needs a directory that all nodes see, because it also tries a save. Set "
                    "run_dir= to a path on a shared file system; fast_dev_run then writes to a temporary directory next to it"
                )
            raise ConfigurationError(
                f"run_dir={str(run.run_dir)!r} on {socket.gethostname()} is not the directory in which rank 0 writes, but every "
                "rank has to write its part of a checkpoint there; give every rank the same path, on a file system that all "
                "nodes share"
            )
        time.sleep(0.1)


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
