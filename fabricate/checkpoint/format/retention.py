"""Which checkpoints of a run directory are kept: the last ones, and the best ones by a recorded metric.

Reads manifests only, without torch; deletes nothing (fabricate.checkpoint.format.directory does). Must not know: when a run saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fabricate.checkpoint.format.directory import Reader
from fabricate.errors import CheckpointError

__all__ = ["among_best", "best_checkpoints", "kept"]


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
    """Checkpoints that recorded `metric`, best first ("min" or "max"); of equals the older first. A damaged one goes to `unreadable`;
    without it, it is an error."""
    return [path for _, _, path in _scored(checkpoints, metric, mode, unreadable)]


def among_best(checkpoints: Sequence[Path], keep: Mapping[str, Any], value: float) -> bool:
    """Whether a checkpoint that records `value` would be one of the best that `keep` holds, beside `checkpoints`."""
    scored = _scored(checkpoints, keep["metric"], keep["mode"], unreadable=[])[: keep["best"]]
    return len(scored) < keep["best"] or (value if keep["mode"] == "min" else -value) < scored[-1][0]


def _scored(
    checkpoints: Sequence[Path], metric: str, mode: str, unreadable: list[Path] | None
) -> list[tuple[float, int, Path]]:
    """Score (the lower the better), step and path of the checkpoints that recorded `metric`, in order."""
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
    return sorted(scored)
