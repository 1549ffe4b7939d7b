"""The choice of the checkpoints that a run directory keeps: the last ones, and the best ones by a recorded metric.

Reads manifests and events only, without torch. Deletes nothing; `fabricate.checkpoint.format.directory` does that. Must not know: when a
run saves.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fabricate.checkpoint.format.directory import Reader
from fabricate.errors import CheckpointError

__all__ = ["among_best", "best_checkpoints", "keep_of", "kept"]


def kept(checkpoints: Sequence[Path], keep: Mapping[str, Any]) -> set[Path]:
    """The subset of `checkpoints` (by rising step) that `keep` selects. `keep`: `Trainer(keep=)` as returned by `arguments.parse_keep`."""
    last, best = keep["last"], keep.get("best")
    if last is None:
        return set(checkpoints)
    chosen = set(checkpoints[-last:])
    if best:
        unreadable: list[Path] = []
        chosen |= set(best_checkpoints(checkpoints, keep["metric"], keep["mode"], unreadable)[:best])
        # An unreadable checkpoint may be the best one; a resume from it reports what is wrong.
        chosen |= set(unreadable)
    return chosen


def best_checkpoints(
    checkpoints: Sequence[Path], metric: str, mode: str, unreadable: list[Path] | None = None
) -> list[Path]:
    """The checkpoints that recorded `metric`, best first (`mode`: "min" or "max"), of equal ones (`_rounded`) the older first. A damaged
    checkpoint is added to the list `unreadable`; without this list it is an error."""
    return [path for _, _, path in _scored(checkpoints, metric, mode, unreadable)]


def keep_of(run_dir: Path) -> dict[str, Any] | None:
    """The `keep` of the last fit in a run directory, if it has "best"."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()]
        keep = [event["keep"] for event in events if event["event"] == "started" and "keep" in event][-1]
        return keep if {"last", "best", "metric", "mode"} <= keep.keys() else None
    return None


def among_best(checkpoints: Sequence[Path], keep: Mapping[str, Any], value: float) -> bool:
    """Whether a checkpoint that records `value`, added to `checkpoints`, would be one of the best that `keep` selects."""
    scored = _scored(checkpoints, keep["metric"], keep["mode"], unreadable=[])[: keep["best"]]
    return len(scored) < keep["best"] or _rounded(value if keep["mode"] == "min" else -value) < scored[-1][0]


def _rounded(value: float) -> float:
    """`value` with six significant digits. Further digits depend on how rows were split into batches and over ranks, because a metric is a
    mean of float32 numbers. Rounded values can be sorted, which a comparison with a tolerance would not allow."""
    return float(f"{value:.6g}")


def _scored(
    checkpoints: Sequence[Path], metric: str, mode: str, unreadable: list[Path] | None
) -> list[tuple[float, int, Path]]:
    """Score (lower is better), step and path of the checkpoints that recorded `metric`, sorted."""
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
            value = _rounded(float(metrics[metric]))
            scored.append((value if mode == "min" else -value, step, path))
    return sorted(scored)
