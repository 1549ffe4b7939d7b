"""One run of a tracker over all resumes of a fit: it is named after RUN_DIR, and RUN_DIR/trackers/runs.json records how to continue it.

Accelerate starts the trackers and logs; this module chooses the names. Must not know: the loop, what is logged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fabricate.checkpoint.format.directory import Reader
from fabricate.module import recorded
from fabricate.seeding import unchanged_generators
from fabricate.training.state.run_state import Run

_NAMES = {"wandb": "name", "mlflow": "run_name", "trackio": "name"}
"""The option that names a run, by tracker. (For TensorBoard it is a directory.)"""
_SAME_RUN: dict[str, Callable[[Any], dict[str, str]]] = {
    "wandb": lambda own: {"id": own.id, "resume": "allow"},
    "mlflow": lambda own: {"run_id": own.info.run_id},
    "trackio": lambda own: {"name": own.name, "resume": "allow"},
}
"""Functions, by tracker, from a run (the object of the tracker's library) to the options that continue it."""
_CONFIGURED_ONCE = {"tensorboard", "mlflow"}
"""Trackers that refuse new hyper-parameters for an existing run, or show them as another run."""


def start_trackers(run: Run, plan: Mapping[str, Any], path: Path | None) -> None:
    """Start the trackers of a fit. Their hyper-parameters are the values of the plan and the module's recorded constructor arguments.
    `path`: the checkpoint from which the fit continues, or None. All ranks."""
    engine, root = run.engine, run.run_dir.resolve() if run.run_dir is not None else None
    own = path if path is not None and path.resolve().parent.parent == root else None
    recorded_runs = _read(root) if own is not None and root is not None else {}
    options = {} if root is None else _options(root, own, main=engine.rank == 0)
    for tracker, same in recorded_runs.items():
        options[tracker] = options.get(tracker, {}) | same
    configured = _CONFIGURED_ONCE & set(recorded_runs)
    config = {**plan, **recorded(run.module)[0]}
    with unchanged_generators():  # a tracker may draw the name of its run
        started = engine.trackers.start(engine.accelerator, config, run.settings.trackers, options, configured)
    if root is not None and engine.rank == 0:
        _write(root, {t.name: _SAME_RUN[t.name](t.tracker) if t.name in _SAME_RUN else {} for t in started})


def _options(root: Path, path: Path | None, *, main: bool) -> dict[str, dict[str, Any]]:
    """The options of the trackers of the run directory `root`, by tracker. `path`: its checkpoint from which the fit continues, or None.
    `main`: whether this is rank 0, which alone reads it."""
    options: dict[str, dict[str, Any]] = {tracker: {option: root.name} for tracker, option in _NAMES.items()}
    options["wandb"]["dir"] = str(root / "trackers")
    first = 0  # hides what a fit logged that was killed before its first checkpoint
    if main and path is not None:
        with Reader(path) as reader:
            first = reader.manifest.step + 1  # later values are logged again
    return options | {"tensorboard": {"purge_step": first}}


def _read(root: Path) -> dict[str, dict[str, str]]:
    file = root / "trackers" / "runs.json"
    recorded: dict[str, dict[str, str]] = json.loads(file.read_text()) if file.is_file() else {}
    return recorded


def _write(root: Path, started: dict[str, dict[str, str]]) -> None:
    file = root / "trackers" / "runs.json"
    temporary = file.with_name(".runs.json")
    temporary.write_text(json.dumps(started, indent=1))
    temporary.replace(file)
