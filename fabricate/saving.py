"""Saving a run. Every rank writes its part, rank 0 commits.

Owns: what belongs into a checkpoint, when it is durable, retention. Must not know: the loop's order; how a checkpoint is
read back (fabricate.resuming); the format's bytes (fabricate.checkpoint).
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricate import checkpoint as format
from fabricate.checkpoint import FileRecord, Manifest
from fabricate.construct import pretrained_record
from fabricate.errors import CheckpointError
from fabricate.metrics import torchmetrics_state
from fabricate.module import recorded
from fabricate.randomness import rng_state
from fabricate.retention import kept
from fabricate.state import Saver, optimizer_groups, transient_names

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
        run.tick()
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
        topology=run.engine.topology(),
        versions=versions,
        progress=run.progress.state(),
        metrics={n: v for n, v in run.latest.items() if math.isfinite(v)},
    )


def _shared_state(run: Run, saver: Saver) -> dict[str, Any]:
    """What is one value for all ranks. Called on every rank: sharded tensors inside are contributed by each."""
    groups = optimizer_groups(run.module, run.optimizers, saver.strategy)
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
            "transient": sorted(transient_names(run.module)),
            "pretrained": saver.encode(pretrained_record(run.module), "module.pretrained", saver.whole),
        },
        "optimizers": {label: saver.optimizer(label, o, groups[label]) for label, o in run.optimizers.items()},
        "schedulers": {
            label: {"kind": type(s).__name__, "state": saver.encode(s.state_dict(), f"scheduler/{label}", saver.whole)}
            for label, s in run.schedulers.items()
        },
        "scaler": run.engine.scaler_state(),
        "seed": run.seed,
        "data": data_identity(run),
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


def data_identity(run: Run) -> dict[str, Any]:
    assert run.source is not None
    return {
        "num_samples": run.source.num_samples,
        "global_batch_size": run.source.global_batch,
        "kind": run.source.kind,
        "shuffle": run.source.shuffle,
    }


def _prune(run: Run, root: Path) -> None:
    """Delete what `keep` does not hold. The newest is durable by now, so nothing older is needed for safety."""
    if run.settings.keep["last"] is None:
        return
    found = format.committed(root)
    held = kept(found, run.settings.keep)
    if gone := [p for p in found if p not in held]:
        format.prune(gone)
