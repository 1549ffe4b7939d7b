"""The state of a run: collecting it for a checkpoint, and restoring it. Called on every rank; nothing is written here.

Owns: which tensors and values belong to the state of a run, and their names. To save another value, add it to `_shared_state` (one value
for all ranks) or `_own_state` (one per rank), and restore it in `restore`; older checkpoints lack it. Values that only people read go into
the manifest, in `assemble`. `checkpoint/format/schema.py` checks for required values. Must not know: files, commits, when to save
(`saving`), which checkpoint to resume from (`choosing`).
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import math
from collections.abc import Sequence
from typing import Any

import torch

from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.format.schema import own_state, saved_world_size
from fabricate.checkpoint.state.contents import Content
from fabricate.checkpoint.state.logical import (
    Saver,
    decode_mapping,
    digest,
    frozen_digests,
    load_model,
    named_tensors,
    optimizer_groups,
    read_whole,
    transient_names,
)
from fabricate.errors import CheckpointError, ConfigurationError, few
from fabricate.metrics.torchmetrics_objects import (
    load_torchmetrics_state,
    path_inside,
    take_over_torchmetrics_state,
    torchmetrics_state,
)
from fabricate.model.building import adapter_record, eval_modes, pretrained_record
from fabricate.module import recorded
from fabricate.seeding import derive_seed, rng_state, seed_everything, set_rng_state
from fabricate.strategies.quantised import quantised_weights
from fabricate.training.saves.changes import configuration
from fabricate.training.saves.replicas import bits, digest_of
from fabricate.training.state.run_state import Run
from fabricate.training.updates import freezing


def assemble(run: Run, buffers: dict[str, torch.Tensor], *, replaced: bool = False) -> Content:
    """The state of `run` between two updates; `buffers` are from `own_buffers`. `replaced`: the module holds other weights than those of
    the last update, so only weights are saved, without metrics. All ranks, no collectives, because a listener may fail on one of them."""
    _check_frozen(run)
    saver = Saver(run.engine.strategy, run.engine.rank, run.engine.world_size)
    aliases = saver.model(run.module, without=run.checkpoints.frozen_digests)
    if run.settings.save_weights_only or replaced:
        shared, own = {"module": _module_state(run, saver), "weights_only": True} | _beside_weights(run, saver), {}
    else:
        shared, own = _shared_state(run, saver), _own_state(run, saver, buffers)
    manifest = {
        "step": run.progress.step,
        "run_id": run.run_id,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "aliases": aliases,
        "topology": run.engine.topology(),
        "versions": versions(),
        "progress": run.progress.state(),
        "metrics": {} if replaced else {n: v for n, v in run.journal.current().items() if math.isfinite(v)},
    }
    return Content(saver.chunks, shared, own, saver.tensors, manifest, saver.exchanged)


def sums_of_bits(run: Run) -> list[int]:
    """For each weight and buffer, the sum of the bits of this rank's part. Without quantised weights, which nothing replaces in a fit."""
    quantised, local_part = quantised_weights(run.module), run.engine.strategy.local_part
    parameters, buffers, _ = named_tensors(run.module)
    held = (t for name, t in (*parameters.items(), *buffers.items()) if name not in quantised and not t.is_meta)
    return [int(bits(local_part(tensor).memory).sum(dtype=torch.int64)) for tensor in held]


def leave_out_frozen_weights(run: Run) -> None:
    """Record digests of the frozen weights that checkpoints leave out, for the comparison on resume and to detect changes. They are left
    out with save_frozen=False, and if weights are quantised or offloaded. All ranks."""
    quantised, save_frozen = quantised_weights(run.module), run.settings.save_frozen
    if quantised and save_frozen:
        raise ConfigurationError(
            f"save_frozen=True, but {few(list(quantised))} are quantised, and checkpoints do not hold quantised weights; leave save_frozen "
            "out: checkpoints then hold a digest of all frozen weights"
        )
    offloaded = save_frozen is None and any(p.is_meta for p in run.optim.frozen.values())
    if quantised or ((offloaded or save_frozen is False) and run.run_dir is not None):
        # An original module of which peft trains a copy is not used, and its values may be random.
        left_out = {n: p for n, p in run.optim.frozen.items() if save_frozen is False or ".original_module." not in n}
        run.checkpoints.frozen_digests = frozen_digests(run.module, left_out, run.engine.strategy)
        run.checkpoints.frozen_sums = _frozen_sums(run)


def _frozen_sums(run: Run) -> dict[str, list[int]]:
    """Sums of the bits of the left-out weights that code could change, by name."""
    quantised, frozen, strategy = quantised_weights(run.module), run.optim.frozen, run.engine.strategy
    held = {
        name: quantised[name].tensors() if name in quantised else [strategy.local_part(frozen[name]).memory]
        for name in run.checkpoints.frozen_digests
        if not frozen[name].is_meta
    }
    return {name: [int(bits(tensor).sum(dtype=torch.int64)) for tensor in tensors] for name, tensors in held.items()}


def _check_frozen(run: Run) -> None:
    """Raise `ConfigurationError` if a frozen parameter that checkpoints leave out has changed (the parameters of a teacher, for example).
    This rank only."""
    if not run.checkpoints.frozen_sums:
        return
    now = _frozen_sums(run)
    if changed := [name for name, value in run.checkpoints.frozen_sums.items() if now[name] != value]:
        why = "save_frozen=False" if run.settings.save_frozen is False else "frozen weights are not saved"
        raise ConfigurationError(
            f"{few(changed)} changed since the fit began, but {why}, so a resumed run would begin with the old values. Use "
            "save_frozen=True; if the parameters are quantised, do not change them"
        )


@functools.cache
def versions() -> dict[str, str]:
    """The versions of the packages that affect the results."""
    return {name: importlib.metadata.version(name) for name in ("torch", "accelerate", "numpy")}


def own_buffers(run: Run) -> dict[str, torch.Tensor]:
    """This rank's buffers whose values differ from those of rank 0, running statistics for example. The checkpoint holds those of rank 0 as
    the module's. All ranks; one message."""
    if run.engine.world_size == 1:
        return {}
    buffers = named_tensors(run.module)[1]
    mine = {name: digest(buffer) for name, buffer in buffers.items()}
    first = run.engine.broadcast_json(mine)
    return {name: buffer for name, buffer in buffers.items() if mine[name] != first[name]}


def _shared_state(run: Run, saver: Saver) -> dict[str, Any]:
    """The values that are the same for all ranks. Called on every rank, because each contributes its part of sharded tensors."""
    assert run.source is not None
    groups = optimizer_groups(run.module, run.optim.optimizers, saver.strategy)
    metrics_file = run.run_dir / "metrics.jsonl" if run.run_dir is not None else None
    return {
        "module": _module_state(run, saver),
        "optimizers": {label: saver.optimizer(label, o, groups[label]) for label, o in run.optim.optimizers.items()},
        "schedulers": {
            label: {"kind": s.kind, "state": saver.encode(s.state_dict(), f"scheduler/{label}", saver.whole)}
            for label, s in run.optim.schedules.items()
        },
        "configuration": configuration(run),
        "scaler": run.engine.scaler_state(),
        "weight_per_row": run.optim.weight_per_row,
        "weighed_by": run.optim.weighed_by,
        "seed": run.source.seed,
        "data": data_identity(run)
        | {"state": saver.encode(run.source.state, "data", saver.whole), "batches_taken": _batches_taken(run)},
        "progress": run.progress.state(),
        "surplus_updates": run.optim.surplus_updates,
        "owed": run.now.owed,
        "paused": freezing.paused(run),
        "latest": saver.encode(run.journal.latest, "latest", saver.whole),
        "last_norm": saver.encode(_last_norm(run), "last_norm", saver.whole),
        "plugins": _plugins(run, saver, [name for name, _ in run.calls.listeners("on_save")]),
        "beside_weights": _with_weights(run),
        "metrics_bytes": metrics_file.stat().st_size if metrics_file is not None and metrics_file.exists() else 0,
    }


def _last_norm(run: Run) -> dict[str, float]:
    """The norm of the last gradients, unless a log line has it already."""
    return {} if run.journal.last_norm is None else {"grad_norm": float(run.journal.last_norm)}


def _plugins(run: Run, saver: Saver, names: Sequence[str]) -> dict[str, Any]:
    """The state that the listeners `names` store in `on_save`."""
    plugins = {}
    for name, call in run.calls.listeners("on_save"):
        if name in names:
            state: dict[str, Any] = {}
            call(trainer=run.trainer, module=run.module, state=state)
            if run.engine.world_size > 1:
                run.checkpoints.listener_states[name] = {str(key): digest_of(value) for key, value in state.items()}
            plugins[name] = saver.encode(state, f"plugin/{name}", saver.whole)
    return plugins


def _with_weights(run: Run) -> list[str]:
    """The listeners whose state belongs to the weights, for example an average of them."""
    saving = {name for name, _ in run.calls.listeners("on_save")}
    return [name for name, _ in run.calls.listeners("on_load_weights") if name in saving]


def _beside_weights(run: Run, saver: Saver) -> dict[str, Any]:
    """The state of these listeners, for a checkpoint with weights only."""
    names = _with_weights(run)
    return {"plugins": _plugins(run, saver, names), "beside_weights": names} if names else {}


def _module_state(run: Run, saver: Saver) -> dict[str, Any]:
    """The state of the module that is not in tensors."""
    from fabricate.checkpoint.format import arguments

    return {
        "class": f"{type(run.module).__module__}.{type(run.module).__qualname__}",
        **arguments.written(*recorded(run.module)),
        "transient": sorted(transient_names(run.module)),
        "frozen": run.checkpoints.frozen_digests,
        "constants": run.checkpoints.constants,
        "modes": [run.optim.modes, eval_modes(run.module)],
        "pretrained": saver.encode(pretrained_record(run.module), "module.pretrained", saver.whole),
        "adapted": saver.encode(adapter_record(run.module), "module.adapted", saver.whole),
    }


def _own_state(run: Run, saver: Saver, buffers: dict[str, torch.Tensor]) -> dict[str, Any]:
    rank = f"rank/{run.engine.rank:05d}"
    for name, buffer in buffers.items():
        saver.own(f"{rank}/buffers/{name}", buffer)
    return {
        "rng": saver.encode(rng_state(), f"{rank}/rng", saver.own),
        "metrics": saver.encode({"objects": _logged_objects(run), **run.metrics.state()}, f"{rank}/metrics", saver.own),
        "buffers": sorted(buffers),
        "torchmetrics": saver.encode(torchmetrics_state(run.module), f"{rank}/torchmetrics", saver.own),
        "stop": "" if run.is_long_enough() else run.requests.stop,
    }


def _logged_objects(run: Run) -> dict[str, str]:
    """The paths in the module of the torchmetrics objects that were logged in this epoch, by the name in the log."""
    paths = {name: path_inside(run.module, metric) for name, metric in run.metrics.objects.items()}
    return {name: path for name, path in paths.items() if path is not None}


def _objects_named(run: Run, metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The torchmetrics objects whose paths the saved `metrics` have, by the name in the log."""
    parts = dict(run.module.named_modules())
    logged = [item for each in metrics for item in each.get("objects", {}).items()]
    return {name: parts[path] for name, path in logged if path in parts}


def data_identity(run: Run) -> dict[str, Any]:
    assert run.source is not None
    return {
        "num_samples": run.source.num_samples,
        "global_batch_size": run.source.global_batch,
        "batches_per_update": run.source.batches_per_update,
        "num_batches": run.source.num_batches,
        "rows_per_batch": run.source.rows_per_batch,
        "kind": run.source.kind,
        "shuffle": run.source.shuffle,
        "samplers": run.source.sampler_names,
        "order": run.source.order_digest,
        "stream_readers": run.source.stream_readers,
        "in_workers": run.source.in_workers,
        "validation": {name: {"rows": val.num_units, **val.identity} for name, val in run.validation.items()},
        **run.source.identity,
    }


def _batches_taken(run: Run) -> int | None:
    """The batches of the pass in progress that all ranks have read, if these are the user's."""
    assert run.source is not None
    if run.source.batches_per_update is None:
        return None
    return run.progress.micro_step * run.engine.data_world_size if run.progress.position else 0


# -- restoring
# ---------------------------------------------------------------------------------------------------------


def restore(run: Run, reader: Reader, tree: Any) -> None:
    """Restore the state of the checkpoint. `tree`: its `shared_state`. All ranks."""
    from fabricate.checkpoint.state.optimizers import load_optimizer

    engine, optim = run.engine, run.optim
    groups = optimizer_groups(run.module, optim.optimizers, engine.strategy)
    load_model(reader, run.module, engine.strategy)
    _restore_modes(run, reader, tree["module"].get("modes", [[], []]))
    if "paused" in tree:
        freezing.restore(run, tree["paused"])
    for label, optimizer in optim.optimizers.items():
        load_optimizer(reader, label, optimizer, tree["optimizers"][label], groups[label], engine.strategy)
    for label, schedule in optim.schedules.items():
        schedule.load_state_dict(decode_mapping(reader, tree["schedulers"][label]["state"], f"scheduler {label!r}"))
    if tree["scaler"]:
        engine.load_scaler_state(tree["scaler"])
    optim.weight_per_row.update(tree.get("weight_per_row", {}))
    optim.weighed_by.update(tree.get("weighed_by", {}))
    run.progress.load(tree["progress"])
    if run.progress.position and isinstance(taken := tree["data"].get("batches_taken"), int):
        run.progress.micro_step = taken // engine.data_world_size
    run.now.owed = list(tree.get("owed", []))
    _restore_data(run, reader, tree)
    run.journal.latest = decode_mapping(reader, tree["latest"], "latest")
    run.journal.last_norm = decode_mapping(reader, tree.get("last_norm", {}), "last_norm").get("grad_norm")
    for name, call in run.calls.listeners("on_load"):
        if name in tree["plugins"]:
            call(trainer=run.trainer, module=run.module, state=decode_mapping(reader, tree["plugins"][name], name))
    _restore_own(run, reader)
    run.checkpoints.restored = True


def _restore_modes(run: Run, reader: Reader, saved: Any) -> None:
    """Restore the modes of submodules if hooks had changed them during the fit, unless the script now begins with other modes."""
    names = isinstance(saved, list) and len(saved) == 2 and all(isinstance(each, list) for each in saved)
    if not names or not all(type(name) is str for each in saved for name in each):
        raise CheckpointError(f"checkpoint {reader.path}: state.json: module: modes: not as fabricate writes it")
    began, then = saved
    if began != then and began == run.optim.modes:
        for name, child in run.module.named_modules():
            child.training = name not in then


def _restore_own(run: Run, reader: Reader) -> None:
    """Restore the values that each rank has for itself. If the number of ranks, or of ranks per row, has changed: the readers of the first
    rows get the metrics that the first reader of each row had collected since the last log boundary, and the states of its torchmetrics
    objects; generators are seeded from the seed and the step."""
    engine = run.engine
    world_size = saved_world_size(reader)
    per_row = reader.manifest.topology.get("ranks_per_row", 1)
    first_readers = range(0, world_size, per_row if isinstance(per_row, int) and per_row > 0 else 1)
    same = world_size == engine.world_size and first_readers.step == engine.ranks_per_row
    ranks: Sequence[int] = [engine.rank] if same else first_readers if engine.data_rank == 0 else [0]
    own = [own_state(reader, rank) for rank in ranks]
    run.requests.stop = next(filter(None, (each.get("stop", "") for each in own)), run.requests.stop)
    metrics, torchmetrics, rng = (
        [decode_mapping(reader, each[name], name) for each in own] for name in ("metrics", "torchmetrics", "rng")
    )
    try:
        pending = [entry for each in metrics for entry in each["pending"]]
        run.metrics.load({**metrics[0], "pending": pending}, same_rank=same or engine.data_rank == 0)
        run.metrics.objects = _objects_named(run, metrics)
        if same:
            for name in own[0]["buffers"]:
                run.module.get_buffer(name).copy_(read_whole(reader, f"rank/{engine.rank:05d}/buffers/{name}"))
            load_torchmetrics_state(run.module, torchmetrics[0])
            set_rng_state(rng[0])
        else:
            assert run.source is not None
            _join_torchmetrics(run, torchmetrics, world_size)
            seed_everything(
                derive_seed(run.source.seed, "rank", engine.data_rank, engine.world_size, run.progress.step)
            )
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as exc:
        raise CheckpointError(
            f"checkpoint {reader.path}: the state of a single rank is not as fabricate writes it ({type(exc).__name__}: {exc})"
        ) from exc


def _join_torchmetrics(run: Run, states: Sequence[dict[str, Any]], world_size: int) -> None:
    """Load the states that torchmetrics objects had on `world_size` ranks; the first rank gets the joined state."""
    if lost := take_over_torchmetrics_state(run.module, states, counts=run.engine.data_rank == 0):
        run.journal.note(
            f"the state of {few(lost)} was counted on {world_size} ranks, and torchmetrics cannot convert it to another number of "
            "ranks. The values of this epoch therefore count only the rows from here on"
        )


def _restore_data(run: Run, reader: Reader, tree: Any) -> None:
    """Continue in the order of the checkpoint. Data that saves its own position continues from it; other data is read again up to the
    position."""
    assert run.source is not None
    if run.settings.seed is None:  # no seed was set: continue with the seed of the checkpoint
        for source in (run.source, *run.validation.values()):
            source.reseed(tree["seed"])
    saved = tree["data"]
    if "train" not in run.settings.accept_changes:
        run.source.order_digest = str(saved.get("order", ""))
    if run.source.resumes != "by its own state" or saved.get("state") is None:
        return
    state = decode_mapping(reader, saved["state"], "the state of train")
    kinds = {"data": object, "taken": int, "left": int, "random": tuple, "generators": list}
    state.setdefault("left", 0)  # version 0.1.0 did not write it
    if state.keys() != kinds.keys() or not all(isinstance(state[name], kind) for name, kind in kinds.items()):
        raise CheckpointError(f"checkpoint {reader.path}: the state of train is not as fabricate writes it")
    run.source.state = state
