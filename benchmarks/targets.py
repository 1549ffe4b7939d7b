"""The targets: each promise, the measured figure, and whether it is kept."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.tables import table

Measurements = dict[str, Any]
"""The figures of every measured part, by its name."""


class Target(NamedTuple):
    """A promise about the figures of `part`. measure: returns the figure as text, and whether it keeps the promise."""

    name: str
    promise: str
    part: str
    measure: Callable[[Any], tuple[str, bool]]


def _over_bare(case: str, most: float, ratio: float | None = None) -> Callable[[Measurements], tuple[str, bool]]:
    def measure(measurements: Measurements) -> tuple[str, bool]:
        own = measurements[case]["loops"]["fabricate"]
        text = f"{own['overhead']:+.1f} us, {own['ratio']:.3f}"
        return text, own["overhead"] <= most and (ratio is None or own["ratio"] <= ratio)

    return measure


def _of_accelerate(measurements: Measurements) -> tuple[str, bool]:
    loops = measurements["quiet"]["loops"]
    share = loops["fabricate"]["overhead"] / loops["Accelerate"]["overhead"]
    return f"{share:.2f}", share < 0.1


def _language(measurements: Measurements) -> tuple[str, bool]:
    own = measurements["gpt"]["loops"]["fabricate"]
    return f"{own['ratio']:.3f}", own["ratio"] <= 1.01 or own["quartiles"][0] <= 0


def _import(statement: str, beside: str | None) -> Callable[[Measurements], tuple[str, bool]]:
    def measure(measurements: Measurements) -> tuple[str, bool]:
        seconds = measurements["imports"][statement]["cpu_seconds"]
        base = measurements["imports"][beside]["cpu_seconds"] if beside is not None else 0.0
        return f"{seconds - base:+.2f} s" if beside else f"{seconds:.2f} s", seconds - base <= 0.1

    return measure


def _first_step(measurements: Measurements) -> tuple[str, bool]:
    loops = measurements["first_step"]
    over = loops["fabricate"]["cpu_seconds"] - loops["bare PyTorch"]["cpu_seconds"]
    return f"{over:+.2f} s", over <= 0.3


def _frames(measurements: Measurements) -> tuple[str, bool]:
    frames = measurements["first_step"]["fabricate"]["frames"]
    return f"{frames:.0f}", frames <= 5


def _resume(measurements: Measurements) -> tuple[str, bool]:
    slowest = max(measurements["resume"]["fabricate"].values())
    return f"{slowest:.3f} s", slowest < 0.05


def _written(ours: str, theirs: str, most: float) -> Callable[[Measurements], tuple[str, bool]]:
    def measure(measurements: Measurements) -> tuple[str, bool]:
        seconds = measurements["writing"]
        ratio = statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=False))
        return f"{ratio:.2f}", ratio <= most

    return measure


TARGETS = (
    Target("quiet case, over bare PyTorch, per micro-batch", "+10 us and 1.05", "overhead", _over_bare("quiet", 10, 1.05)),
    Target("quiet case with rows read one by one, over bare PyTorch", "+20 us", "overhead", _over_bare("rows", 20)),
    Target("quiet case, share of Accelerate's overhead", "under a tenth", "overhead", _of_accelerate),
    Target("quiet case with two listeners, over bare PyTorch", "+10 us and 1.05", "overhead", _over_bare("listeners", 10, 1.05)),
    Target("case with a run directory, over bare PyTorch", "+40 us", "overhead", _over_bare("output", 40)),
    Target("case with accumulation, clipping and schedule, over bare PyTorch", "+10 us", "overhead", _over_bare("accumulation", 10)),
    Target("small language model, ratio to bare PyTorch", "1.00 within noise", "overhead", _language),
    Target("`import fabricate`", "0.1 s", "startup", _import("import fabricate", None)),
    Target(
        "`from fabricate import Trainer, TrainModule`, over `import accelerate`", "+0.1 s", "startup",
        _import("from fabricate import Trainer, TrainModule", "import accelerate"),
    ),
    Target("first step, over bare PyTorch", "+0.3 s", "startup", _first_step),
    Target("frames above `training_step`", "5", "startup", _frames),
    Target("first batch of a resumed epoch of 1M rows", "under 0.05 s anywhere", "startup", _resume),
    Target(
        "`save=\"async\"`: time that the loop stops, ratio to a copy of the state", "1.25", "checkpoint",
        _written("async: the loop stops", "copy", 1.25),
    ),
    Target(
        "a checkpoint until durable, ratio to durable safetensors", "1.1", "checkpoint",
        _written("checkpoint", "safetensors, durable", 1.1),
    ),
)  # fmt: skip


def targets_table(results: dict[str, Any]) -> str:
    """A Markdown table with a row for every target; targets whose part was not measured are marked."""
    rows = []
    for name, promise, part, measure in TARGETS:
        if part in results:
            text, kept = measure(results[part]["found"])
            rows.append([name, promise, text, "yes" if kept else "no"])
        else:
            rows.append([name, promise, "not measured", ""])
    return table(["figure", "target", "measured", "met"], rows)
