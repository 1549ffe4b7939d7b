"""Which checkpoints of a run directory are kept: the last ones, and the best ones by a recorded metric.

Reads manifests only, without torch; deletes nothing (fabricate.checkpoint.format.directory does). Must not know: when a run saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fabricate.checkpoint.format.directory import Reader
from fabricate.errors import CheckpointError

__all__ = ["best_checkpoints", "kept"]


def kept(checkpoints: Sequence[Path], keep: Mapping[str, Any]) -> set[Path]:
    """Those of `checkpoints` (by rising step) that `keep` holds: `Trainer(keep=)` as `arguments.parse_keep` returns it."""
    last, best = keep["last"], keep.get("best")
    if last is None:
        return set(checkpoints)
    chosen = set(checkpoints[-last:])
    if best:
        unreadable: list[Path] = []
        chosen |= set(best_checkpoints(checkpoints, keep["metric"], keep["mode"], unreadable)[:best])
        chosen |= set(unreadable)  # it may be the best one: a resume from it reports what is wrong
    return chosen


def best_checkpoints(
    checkpoints: Sequence[Path], metric: str, mode: str, unreadable: list[Path] | None = None
) -> list[Path]:
    """Checkpoints that recorded `metric`, best first ("min" or "max"); of equals the older first, since a checkpoint between
    two evaluations repeats the value of the one before it. A damaged one goes to `unreadable`; without it, it is an error."""
    scored = []
    for path in checkpoints:
        try:
            with Reader(path) as reader:
                metrics, step = reader.manifest.metrics, reader.manifest.step
        except CheckpointError:
            if unreadable is None:
                raise
            unreadable.append(path)
            continue
        if metric in metrics:
            value = float(metrics[metric])
            scored.append((value if mode == "min" else -value, step, path))
    return [path for _, _, path in sorted(scored)]
