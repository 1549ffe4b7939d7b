"""The reader of run directories: plan.json, metrics.jsonl, events.jsonl, samples and the manifests of checkpoints.

Owns the distinction between a damaged file and one that is being written. Must not know: the use of the contents. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fabricate.errors import CheckpointError, FabricateError

__all__ = ["Checkpoint", "RunFiles", "read_lines", "read_plan", "read_run"]

_NEEDED: dict[str, Callable[[Any], object]] = {
    "metrics.jsonl": lambda line: (line["step"], line["stage"], line["metrics"], line["clock"]["time"]),
    "events.jsonl": lambda line: (line["event"], line["time"]),
    "samples.jsonl": lambda line: line["step"],
}
"""By file: a function that raises an exception if a line lacks a required value."""


class Checkpoint(NamedTuple):
    """The manifest of a checkpoint; `size` in bytes."""

    path: Path
    step: int
    size: int
    created: str
    metrics: Mapping[str, float]
    progress: Mapping[str, Any]
    versions: Mapping[str, Any]
    topology: Mapping[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run directory. Parts that were not recorded are empty."""

    run_dir: Path
    plan: dict[str, dict[str, Any]]
    """Settings by name, each with "value" and "source"."""
    plugins: list[dict[str, str]]
    notes: list[str]
    lines: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """The good checkpoints, by ascending step."""
    damaged: list[str] = field(default_factory=list)
    """The names of checkpoints with a damaged manifest or incomplete files."""
    set_aside: int = 0

    @property
    def name(self) -> str:
        """The name of the run: that of its directory."""
        return self.run_dir.resolve().name

    @property
    def last_step(self) -> int:
        """The last update with a record. Events of earlier fits do not count, because the last fit may have resumed from an earlier
        step."""
        begun = max((place for place, event in enumerate(self.events) if event["event"] == "started"), default=0)
        steps = [event.get("step") or 0 for event in self.events[begun:]]
        return max(
            [line["step"] for line in self.lines[-1:]] + [each.step for each in self.checkpoints] + steps, default=0
        )

    def train(self) -> list[dict[str, Any]]:
        """The lines that log boundaries wrote."""
        return [line for line in self.lines if line["stage"] == "train"]

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of these kinds."""
        return [event for event in self.events if event["event"] in kinds]

    def keep(self) -> dict[str, Any]:
        """The setting `keep` of the last fit; "metric" and "mode" decide which checkpoint is the best."""
        settings: list[dict[str, Any]] = [event["keep"] for event in self.of_kind("started") if "keep" in event]
        return settings[-1] if settings else {"metric": "val_loss", "mode": "min"}

    def best(self) -> Checkpoint | None:
        """The best checkpoint by `keep`; if several are equal, the oldest. None if no checkpoint recorded the metric."""
        keep = self.keep()
        scored = [each for each in self.checkpoints if keep["metric"] in each.metrics]
        sign = 1 if keep["mode"] == "min" else -1
        return min(scored, key=lambda each: sign * each.metrics[keep["metric"]], default=None)


def read_run(run_dir: Path) -> RunFiles:
    """The contents of `run_dir`. Raises FabricateError if it is not a run directory, or a file is damaged."""
    plan = read_plan(run_dir / "plan.json")
    lines, events, samples = (read_lines(run_dir / name) for name in _NEEDED)
    good, damaged = _checkpoints(run_dir / "checkpoints")
    aside = len(list((run_dir / "checkpoints").glob(".bad-*")))
    if not (plan["settings"] or lines or events or good or damaged or aside):
        raise FabricateError(
            f"{str(run_dir)!r} holds no run: no plan.json, metrics.jsonl, events.jsonl or checkpoints. Give a run directory"
        )
    plugins, notes = plan.get("plugins", []), plan.get("notes", [])
    return RunFiles(run_dir, plan["settings"], plugins, notes, lines, events, samples, good, damaged, aside)


def read_plan(file: Path) -> dict[str, Any]:
    """The contents of plan.json, with empty "settings" if there is none. Raises FabricateError if it is not a plan."""
    if not file.exists():
        return {"settings": {}}
    try:
        plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for setting in plan["settings"].values():
            setting["value"], setting["source"]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise FabricateError(f"{file} is not a plan that fabricate wrote ({type(exc).__name__}: {exc})") from exc
    return plan


def read_lines(file: Path, text: str | None = None) -> list[dict[str, Any]]:
    """The lines of a .jsonl file, or of `text` from it. A last line without an end is left out: it is incomplete."""
    if text is None:
        if not file.exists():
            return []
        text = file.read_text(encoding="utf-8")
    needed, lines = _NEEDED[file.name], []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            value = json.loads(line)
            needed(value)
        except (ValueError, KeyError, TypeError) as exc:
            raise FabricateError(f"{file}, line {number} is not what fabricate writes: {line.strip()[:80]!r}") from exc
        lines.append(value)
    return lines


def _checkpoints(root: Path) -> tuple[list[Checkpoint], list[str]]:
    """The good checkpoints, and the names of the others. Only manifests and file sizes are read."""
    from fabricate.checkpoint.format.directory import Reader, committed

    good, damaged = [], []
    for path in committed(root):
        try:
            with Reader(path) as reader:
                of = reader.manifest
        except CheckpointError:
            damaged.append(path.name)
            continue
        size = sum(file.size for file in of.files)
        good.append(
            Checkpoint(path, of.step, size, of.created, of.metrics, dict(of.progress), of.versions, of.topology)
        )
    return good, damaged
