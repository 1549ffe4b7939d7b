"""Resuming a run: compare the chosen checkpoint with the running fit, and restore it; or load its weights alone.

Owns: the order in which state is compared and restored. Must not know: which checkpoint is chosen (`choosing`), the loop; how a save works
(`saving`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fabricate.checkpoint.format import directory as format
from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.format.schema import saved_world_size, shared_state
from fabricate.checkpoint.state.constants import about_constants, set_otherwise
from fabricate.checkpoint.state.logical import (
    compare_frozen,
    compare_model,
    decode_mapping,
    load_model,
    optimizer_groups,
)
from fabricate.errors import CheckpointError
from fabricate.metrics.counters import Progress
from fabricate.module import beside_weights, not_taken, overrides
from fabricate.training.saves.changes import check_changes, take_over
from fabricate.training.saves.choosing import cut_metrics
from fabricate.training.saves.compared import compare_data, compare_parts, constants_of
from fabricate.training.saves.saved_state import restore
from fabricate.training.saves.saving import checkpoints, prune
from fabricate.training.state.run_state import Run

LINES = 2
"""The largest number of lines that `resume` prints."""


@contextlib.contextmanager
def _saying_how_to_start_over() -> Iterator[None]:
    try:
        yield
    except CheckpointError as exc:
        if "resume='never'" not in str(exc):
            exc.add_note("to start over instead of resuming: fit(..., resume='never'), or another run_dir")
        raise


@_saying_how_to_start_over()
def resume(run: Run, path: Path) -> None:
    """Restore the checkpoint `path`. All ranks. Everything is compared before anything changes, so that an error has no effect."""
    from fabricate.checkpoint.state.optimizers import compare_optimizer

    with Reader(path, part=(run.engine.rank, run.engine.world_size)) as reader:
        tree = shared_state(reader)
        if "optimizers" not in tree:
            raise CheckpointError(
                f"{path} holds weights only, so a fit cannot resume from it. Start a new fit from these weights, with "
                f"{type(run.module).__name__}.load_from_checkpoint({str(path)!r}), or start over with resume='never'"
            )
        saved_world_size(reader)  # raises an error before anything changes if the manifest has none
        of_data = list(compare_data(run, path, tree))
        compare_parts(run, path, tree)
        compare_model(reader, run.module, run.engine.strategy)
        compare_frozen(reader, run.module, run.engine.strategy)
        groups = optimizer_groups(run.module, run.optim.optimizers, run.engine.strategy)
        for label, optimizer in run.optim.optimizers.items():
            compare_optimizer(path, label, optimizer, tree["optimizers"][label], groups[label])
        changes = [*of_data, *check_changes(run, path, tree)]
        take_constants = constants_of(run, reader, tree)
        restore(run, reader, tree)
        take_over(run, changes)
        changes += take_constants()
        saved = reader.manifest.topology
    if run.run_dir is not None and path.resolve().parent == checkpoints(run).resolve():
        run.checkpoints.newest, run.checkpoints.saved_step = path, run.progress.step
        prune(run)  # a kill may have come after the last save and before the deletion of old checkpoints
        cut_metrics(run, tree["metrics_bytes"])
    now = run.engine.topology()
    run.journal.event("resumed", path=path.name, saved=saved, now=now, changed=[str(change) for change in changes])
    changed = [f"{name} {value} -> {now.get(name, 1)}" for name, value in saved.items() if value != now.get(name)]
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    run.module.print("; ".join([f"resumed from {shown} (step {run.progress.step})", *changed]))
    if changes:
        run.module.print(f"changed since it was saved: {'; '.join(map(str, changes))}")


def load_weights_only(run: Run, path: Path) -> dict[str, Any]:
    """Load the weights of a checkpoint, and the state that listeners save with the weights, into the prepared module. Return its
    counters, in the form of `Progress.state()`. All ranks."""
    with Reader(format.find(path)) as reader:
        reader.verify()
        compare_model(reader, run.module, run.engine.strategy)
        compare_frozen(reader, run.module, run.engine.strategy)
        load_model(reader, run.module, run.engine.strategy)
        tree = shared_state(reader)
        if names := list(set_otherwise(reader, tree["module"].get("constants"), run.checkpoints.constants)):
            run.journal.note(about_constants(names))
        saved = tree.get("plugins", {})  # an imported checkpoint has none
        listeners = dict(run.calls.listeners("on_load_weights"))
        for name, call in listeners.items():
            if name in saved:
                call(trainer=run.trainer, module=run.module, state=decode_mapping(reader, saved[name], name))
        if absent := [name for name in tree.get("beside_weights", ()) if name not in {*listeners, "module"}]:
            run.journal.note(beside_weights(absent, path))
        if saved.get("module") and not overrides(run.module, "on_load_weights"):
            run.journal.note(not_taken(run.module, path))
        return {
            **Progress().state(),
            "step": reader.manifest.step,
            **tree.get("progress", {}),
        }  # an imported one has a step only
