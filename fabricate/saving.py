"""Saving, resuming and exporting a run. Every rank writes its part; rank 0 commits; nothing is read before it is verified.

Owns: what belongs into a checkpoint and when it is durable, retention, the choice of the checkpoint to resume from,
RUN_DIR/model/. Must not know: the loop's order; the format's bytes (fabricate.checkpoint).
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabricate import checkpoint as format
from fabricate.checkpoint import FileRecord, Manifest, Reader
from fabricate.construct import pretrained_models
from fabricate.errors import CheckpointError
from fabricate.metrics import load_torchmetrics_state, torchmetrics_state
from fabricate.module import overrides, recorded
from fabricate.randomness import derive_seed, rng_state, seed_everything, set_rng_state
from fabricate.state import (
    Saver,
    chunk,
    compare_model,
    compare_optimizer,
    decode_with,
    export_tensors,
    find_checkpoint,
    gather,
    load_model,
    load_optimizer,
    parameter_names,
)

if TYPE_CHECKING:
    from fabricate.run import Run


def checkpoints(run: Run) -> Path:
    """The directory of a run's checkpoints."""
    assert run.run_dir is not None
    return run.run_dir / "checkpoints"


def save(run: Run) -> Path | None:
    """Save now, at an update boundary. Returns the checkpoint's path, None without a run directory. All ranks.

    A failure while listeners fill their state, or while files are written, aborts the commit on every rank; the previous
    checkpoint stays the newest.
    """
    if run.run_dir is None or run.saved_step == run.progress.step:
        return run.checkpoint
    path = checkpoints(run) / f"step-{run.progress.step:08d}"
    if run.calls.write_checkpoint is None:
        write(run, path)
    else:
        run.calls.write_checkpoint(run.trainer, path)
    run.checkpoint, run.saved_step = path, run.progress.step
    run.event("saved", path=path.name)
    if run.calls.on_saved is not None:
        run.calls.on_saved(run.trainer, run.module, path, run.progress.step)
    if run.engine.rank == 0:
        _prune(run, path.parent)
    return path


def save_requested(run: Run) -> None:
    """Save into the run directory if any rank's request or a due moment says so, and wherever hooks asked for. All ranks."""
    requests = run.requests
    asked = run.engine.gather_json([requests.save, requests.paths])
    requests.save, requests.paths = False, []
    if any(wanted for wanted, _ in asked):
        save(run)
    for path in dict.fromkeys(path for _, paths in asked for path in paths):
        write(run, Path(path))


def write(run: Run, path: Path) -> Path:
    """Stage, write this rank's part, agree, commit; returns `path`. All ranks."""
    engine = run.engine
    run.progress.tokens += float(run.unread_tokens)  # a save waits for the device anyway
    run.unread_tokens = 0
    nonce = engine.broadcast_json(secrets.token_hex(4))
    records: list[FileRecord] = []
    staging: Path | None = None
    aliases: dict[str, str] = {}
    failure: BaseException | None = None
    try:
        saver = Saver(engine.strategy, engine.rank, engine.world_size)
        aliases = saver.model(run.module)
        shared = _shared_state(run, saver)
        own = _own_state(run, saver)
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = format.stage(path.parent, run.progress.step, nonce)
        records.append(
            format.write_tensors(
                staging / f"data-{engine.rank:05d}-of-{engine.world_size:05d}.safetensors", saver.chunks
            )
        )
        records.append(format.write_json(staging / f"rank-{engine.rank:05d}.json", own))
        if engine.rank == 0:
            records.append(format.write_json(staging / "state.json", shared))
    except Exception as exc:
        failure = exc
    answers = engine.gather_json([repr(failure) if failure else None, [r.to_json() for r in records]])
    failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error]
    if not failed and engine.rank == 0:
        try:
            files = [FileRecord.from_json(r) for _, group in answers for r in group]
            assert staging is not None
            format.commit(staging, _manifest(run, nonce, files, aliases), name=path.name)
        except Exception as exc:
            failure = exc
    failed += [str(e) for e in engine.gather_json(repr(failure) if failure and not failed else None) if e]
    if failed:
        if engine.rank == 0 and staging is not None:
            format.discard(staging)
        if failure is not None and not isinstance(failure, OSError | CheckpointError):
            raise failure
        raise CheckpointError(
            f"the checkpoint {path} was not written ({'; '.join(failed)}); the previous one is intact"
        ) from failure
    return path


def _manifest(run: Run, nonce: str, files: list[FileRecord], aliases: dict[str, str]) -> Manifest:
    versions: dict[str, Any] = {n: importlib.metadata.version(n) for n in ("torch", "accelerate", "numpy")}
    return Manifest(
        step=run.progress.step,
        run_id=run.run_id,
        nonce=nonce,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tensors=format.tensors_of(files),
        files=tuple(files),
        aliases=aliases,
        topology={
            "world_size": run.engine.world_size,
            "strategy": run.engine.strategy.name,
            "precision": run.engine.precision.name,
            "device": run.engine.device.type,
        },
        versions=versions,
        progress=run.progress.state(),
        metrics={n: v for n, v in run.latest.items() if math.isfinite(v)},
    )


def _shared_state(run: Run, saver: Saver) -> dict[str, Any]:
    """What is one value for all ranks. Called on every rank: sharded tensors inside are contributed by each."""
    names = parameter_names(run.module, run.optimizers)
    held, lost = recorded(run.module)
    metrics_file = run.run_dir / "metrics.jsonl" if run.run_dir is not None else None
    plugins = {}
    for name, call in run.calls.listeners("on_save"):
        state: dict[str, Any] = {}
        call(trainer=run.trainer, module=run.module, state=state)
        plugins[name] = saver.encode(state, f"plugin/{name}", saver.whole)
    return {
        "module": {
            "class": f"{type(run.module).__module__}.{type(run.module).__qualname__}",
            "arguments": held,
            "unrecorded": lost,
        },
        "optimizers": {label: saver.optimizer(label, o, names) for label, o in run.optimizers.items()},
        "schedulers": {
            label: {"kind": type(s).__name__, "state": saver.encode(s.state_dict(), f"scheduler/{label}", saver.whole)}
            for label, s in run.schedulers.items()
        },
        "scaler": run.engine.scaler.state_dict() if run.engine.scaler is not None else None,
        "seed": run.seed,
        "data": _data_identity(run),
        "progress": run.progress.state(),
        "latest": saver.encode(run.latest, "latest", saver.whole),
        "plugins": plugins,
        "metrics_bytes": metrics_file.stat().st_size if metrics_file is not None and metrics_file.exists() else 0,
    }


def _own_state(run: Run, saver: Saver) -> dict[str, Any]:
    rank = f"rank/{run.engine.rank:05d}"
    return {
        "rng": saver.encode(rng_state(), f"{rank}/rng", saver.own),
        "metrics": saver.encode(run.metrics.state(), f"{rank}/metrics", saver.own),
        "torchmetrics": saver.encode(torchmetrics_state(run.module), f"{rank}/torchmetrics", saver.own),
    }


def _data_identity(run: Run) -> dict[str, Any]:
    assert run.source is not None
    return {
        "num_samples": run.source.num_samples,
        "global_batch_size": run.source.global_batch,
        "kind": run.source.kind,
        "shuffle": run.source.shuffle,
    }


def _prune(run: Run, root: Path) -> None:
    """Delete what `keep` does not hold. The newest is durable by now, so nothing older is needed for safety."""
    last = run.settings.keep.get("last")
    if last is None:
        return
    found = format.committed(root)
    kept = set(found[-last:])
    if best := run.settings.keep.get("best"):
        kept |= set(best_checkpoints(found, run.settings.keep["metric"], run.settings.keep["mode"])[:best])
    if gone := [p for p in found if p not in kept]:
        format.prune(gone)


def best_checkpoints(found: list[Path], metric: str, mode: str) -> list[Path]:
    """Checkpoints that recorded `metric`, best first ("min" or "max"); of equals the older first, since a checkpoint between
    two evaluations repeats the value of the one before it."""
    scored = []
    for path in found:
        with Reader(path) as reader:
            if metric in reader.manifest.metrics:
                value = float(reader.manifest.metrics[metric])
                scored.append((value if mode == "min" else -value, reader.manifest.step, path))
    return [path for _, _, path in sorted(scored)]


def choose(run: Run, resume: str | Path, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume from, verified in full, the same on every rank; None to start anew. All ranks.

    "auto": the newest good one of the run directory; damaged ones are named and set aside. A path: that one, or an error.
    """
    answer: list[Any] = [None, None]
    if run.engine.rank == 0:
        try:
            answer[0] = _choose(run, resume, warn)
        except (CheckpointError, OSError) as exc:
            answer[1] = str(exc)
    path, error = run.engine.broadcast_json([str(answer[0]) if answer[0] else None, answer[1]])
    if error:
        raise CheckpointError(error)
    return Path(path) if path else None


def _choose(run: Run, resume: str | Path, warn: Callable[[str], None]) -> Path | None:
    if str(resume) not in ("auto", "never"):
        path = Path(resume)
        if not path.exists():
            raise CheckpointError(
                f"resume={str(resume)!r} does not exist; give 'auto', 'never' or the path of a checkpoint"
            )
        if not (path / "manifest.json").exists():
            raise CheckpointError(
                f"resume={str(resume)!r} is not a checkpoint (it has no manifest.json); give RUN_DIR/checkpoints/step-..."
            )
        _verify(path)
        if run.run_dir is not None:
            _make_room(run.run_dir, path, warn)
        return path
    if run.run_dir is None:
        return None
    if resume == "never":
        _move_aside(run.run_dir, _EVERYTHING, "resume='never'", warn)
        return None
    root = checkpoints(run)
    format.clean(root)
    found = format.committed(root)
    for path in reversed(found):
        try:
            _verify(path)
            return path
        except format.NewerFormatError:
            raise  # intact, only not for this version: nothing to set aside
        except CheckpointError as exc:
            aside = format.set_aside(path, str(exc))
            run.event("rejected", path=path.name, reason=str(exc), moved_to=aside.name)
            warn(f"{exc}\n  set aside as {aside.name}; trying the one before")
    if found or any(root.glob(".bad-*")):  # also the next time: starting over has to be somebody's decision
        raise CheckpointError(
            f"no checkpoint in {root} is good (they were set aside there); start over with resume='never', or restore one"
        )
    _cut_metrics(run, 0)  # of a run that ended before its first checkpoint
    return None


def _verify(path: Path) -> None:
    with Reader(path) as reader:
        reader.verify()


_EVERYTHING = ("checkpoints", "metrics.jsonl", "events.jsonl", "model", "plan.json")


def _make_room(run_dir: Path, path: Path, warn: Callable[[str], None]) -> None:
    """A run that starts from `path` is going to write checkpoints that must not meet those of another run."""
    root = run_dir / "checkpoints"
    if path.resolve().parent != root.resolve():
        _move_aside(run_dir, _EVERYTHING, f"resume={str(path)!r} is of another run", warn)
        return
    found = [p.name for p in format.committed(root)]
    newer = [f"checkpoints/{name}" for name in found[found.index(path.name) + 1 :]] if path.name in found else []
    _move_aside(run_dir, newer, f"resume={str(path)!r} goes back", warn)


def _move_aside(run_dir: Path, names: Iterable[str], why: str, warn: Callable[[str], None]) -> None:
    """What is in the way of a new run is kept under another name, so that nothing is lost or mixed."""
    present = [name for name in names if (run_dir / name).exists()]
    if not present or present == ["plan.json"]:  # of a run that never began
        return
    number = next(n for n in range(1, 10_000) if not (run_dir / f"before-{n}").exists())
    target = run_dir / f"before-{number}"
    for name in present:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).rename(target / name)
    warn(f"{why}: {', '.join(present)} moved to {target}")


def restore(run: Run, path: Path) -> None:
    """Put everything back as it was when `path` was saved. All ranks. Compared first, so that an error changes nothing."""
    engine = run.engine
    with Reader(path) as reader:
        tree: Any = reader.json("state.json")
        world_size = int(reader.manifest.topology["world_size"])  # type: ignore[arg-type]
        _compare(run, path, tree, run.settings.accept_changes)
        compare_model(reader, run.module)
        names = parameter_names(run.module, run.optimizers)
        for label, optimizer in run.optimizers.items():
            compare_optimizer(path, label, optimizer, tree["optimizers"][label], names)
        load_model(reader, run.module, engine.strategy)
        for label, optimizer in run.optimizers.items():
            load_optimizer(reader, label, optimizer, tree["optimizers"][label], names, engine.strategy)
        for label, scheduler in run.schedulers.items():
            scheduler.load_state_dict(decode_with(reader, tree["schedulers"][label]["state"]))
        if engine.scaler is not None and tree["scaler"]:
            engine.scaler.load_state_dict(tree["scaler"])
        run.progress.load(tree["progress"])
        run.latest = dict(decode_with(reader, tree["latest"]))
        if run.settings.seed is None:  # nobody asked for one: the order goes on as it began
            run.seed = tree["seed"]
            for source in (run.source, *run.validation.values()):
                assert source is not None
                source.reseed(run.seed)
        for name, call in run.calls.listeners("on_load"):
            if name in tree["plugins"]:
                call(trainer=run.trainer, module=run.module, state=decode_with(reader, tree["plugins"][name]))
        same = world_size == engine.world_size
        # On another number of ranks, rank 0 goes on with what all of them had collected since the last log boundary.
        ranks = [engine.rank] if same else range(world_size if engine.rank == 0 else 1)
        own: list[Any] = [reader.json(f"rank-{rank:05d}.json") for rank in ranks]
        collected = [decode_with(reader, each["metrics"]) for each in own]
        pending = [entry for each in collected for entry in each["pending"]]
        run.metrics.load({**collected[0], "pending": pending}, same_rank=same or engine.rank == 0)
        if same:
            load_torchmetrics_state(run.module, decode_with(reader, own[0]["torchmetrics"]))
            set_rng_state(decode_with(reader, own[0]["rng"]))
        else:
            seed_everything(derive_seed(run.seed, "rank", engine.rank, engine.world_size, run.progress.step))
    if run.run_dir is not None and path.resolve().parent == checkpoints(run).resolve():
        run.checkpoint, run.saved_step = path, run.progress.step
        _cut_metrics(run, tree["metrics_bytes"])
    run.restored = True
    run.event("resumed", path=path.name, world_size=engine.world_size, saved_world_size=world_size)


def _compare(run: Run, path: Path, tree: Any, accept_changes: tuple[str, ...]) -> None:
    now, then = _data_identity(run), tree["data"]
    for key, argument in (("global_batch_size", "global_batch_size"), ("num_samples", "train"), ("shuffle", "train")):
        if now[key] != then[key] and argument not in accept_changes:
            raise CheckpointError(
                f"{path} was saved with {key}={then[key]}, this run has {now[key]}: samples would be lost or repeated. "
                f"Use the same {argument}, or say that it is meant: Trainer(accept_changes=({argument!r},))"
            )
    if run.settings.seed is not None and run.settings.seed != tree["seed"] and "seed" not in accept_changes:
        raise CheckpointError(
            f"{path} was saved with seed={tree['seed']}, this run has seed={run.settings.seed}; use the same, "
            "or Trainer(accept_changes=('seed',))"
        )
    if set(run.optimizers) != set(tree["optimizers"]):
        raise CheckpointError(
            f"{path} has the optimizers {sorted(tree['optimizers'])}, this run has {sorted(run.optimizers)}; they have to be the same"
        )
    schedulers = {label: type(s).__name__ for label, s in run.schedulers.items()}
    saved_schedulers = {label: s["kind"] for label, s in tree["schedulers"].items()}
    if schedulers != saved_schedulers:
        raise CheckpointError(
            f"{path} has the schedulers {saved_schedulers}, this run has {schedulers}; they have to be the same"
        )
    listening = {name for name, _ in run.calls.listeners("on_save")}
    missing = sorted(n for n in tree["plugins"] if n not in listening)
    surplus = sorted(n for n in listening if n not in tree["plugins"])
    for names, text in ((missing, "holds the state of"), (surplus, "has no state for")):
        if names and "plugins" not in accept_changes:
            raise CheckpointError(
                f"{path} {text} the plugin {', '.join(names)}; use the same plugins, or Trainer(accept_changes=('plugins',))"
            )


def _cut_metrics(run: Run, size: int) -> None:
    """metrics.jsonl as it was at the checkpoint: what came after will be written again."""
    file = run.run_dir / "metrics.jsonl" if run.run_dir is not None else None
    if run.engine.rank == 0 and file is not None and file.exists() and file.stat().st_size > size:
        with file.open("r+b") as handle:
            handle.truncate(size)


def export(run: Run) -> Path | None:
    """Write RUN_DIR/model/: the weights as plain safetensors, one tensor in memory at a time. All ranks."""
    if run.run_dir is None:
        return None
    final, staging = run.run_dir / "model", run.run_dir / ".model-new"
    if run.engine.rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    run.engine.barrier()
    if overrides(run.module, "export"):
        run.module.export(staging)
    else:
        _export(run, staging)
    run.engine.barrier()
    if run.engine.rank == 0:
        old = run.run_dir / ".model-old"
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        staging.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    run.engine.barrier()
    if run.calls.on_export is not None:
        run.calls.on_export(run.trainer, run.module, final)
    return final


def _export(run: Run, path: Path) -> None:
    models = pretrained_models(run.module)
    model: Any = models[0] if len(models) == 1 else run.module
    main = run.engine.rank == 0
    if model is not run.module and not run.engine.strategy.shards_parameters:
        if main:
            model.save_pretrained(path)
    else:
        tensors = export_tensors(model)
        if not main:
            for _, tensor in tensors:
                gather(tensor)  # in the order in which rank 0 writes: one whole tensor exists at a time
        else:
            chunks = [chunk(name, tensor) for name, tensor in tensors]
            format.write_plain_safetensors(path / "model.safetensors", chunks, metadata={"format": "pt"})
            if model is not run.module:
                model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
                model.config.save_pretrained(path)
                if getattr(model, "generation_config", None) is not None:
                    model.generation_config.save_pretrained(path)
    if main:
        for attribute in vars(run.module).values():
            if (
                type(attribute).__module__.startswith("transformers")
                and hasattr(attribute, "save_pretrained")
                and not isinstance(attribute, torch.nn.Module)
            ):
                attribute.save_pretrained(path)


def load_weights_only(run: Run, path: Path) -> None:
    """Load a checkpoint's weights into the prepared module, for evaluation. All ranks."""
    with Reader(find_checkpoint(path)) as reader:
        reader.verify()
        load_model(reader, run.module, run.engine.strategy)


def find(run_dir: Path, which: str, keep: dict[str, Any]) -> Path:
    """The "last" or the "best" checkpoint of a run directory; best by `keep`'s metric."""
    found = format.committed(run_dir / "checkpoints") if (run_dir / "checkpoints").is_dir() else []
    chosen = found[::-1] if which == "last" else best_checkpoints(found, keep["metric"], keep["mode"])
    if not chosen and which == "best" and found:
        with Reader(found[-1]) as reader:
            known = ", ".join(sorted(reader.manifest.metrics)) or "none"
        raise CheckpointError(
            f"checkpoint='best': no checkpoint in {run_dir} recorded {keep['metric']!r}; recorded are {known}: name one with "
            "Trainer(keep={'last': 2, 'best': 1, 'metric': ..., 'mode': 'min'})"
        )
    if not chosen:
        raise CheckpointError(
            f"checkpoint={which!r}: {run_dir} has no checkpoint; fit with this run_dir first, or give a path"
        )
    return chosen[0]
