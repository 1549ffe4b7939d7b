"""Reads a run directory: plan.json, metrics.jsonl, events.jsonl, samples and the manifests of the checkpoints.

Owns what is a damaged file, and what is only one that was being written. Must not know what is made of it; imports no torch.
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
"""What every line of a file has."""


class Checkpoint(NamedTuple):
    """What the manifest of a checkpoint says; `size` in bytes."""

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
    """A run directory, read. What was not recorded is empty."""

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
    """Good ones, by rising step."""
    damaged: list[str] = field(default_factory=list)
    """Names of checkpoints whose manifest or files are not whole."""
    set_aside: int = 0

    @property
    def name(self) -> str:
        """Of the run: that of its directory."""
        return self.run_dir.resolve().name

    @property
    def last_step(self) -> int:
        """The last update that anything was recorded of. Events of fits before the last do not count: it may have gone back."""
        begun = max((place for place, event in enumerate(self.events) if event["event"] == "started"), default=0)
        steps = [event.get("step") or 0 for event in self.events[begun:]]
        return max(
            [line["step"] for line in self.lines[-1:]] + [each.step for each in self.checkpoints] + steps, default=0
        )

    def train(self) -> list[dict[str, Any]]:
        """The lines of log boundaries."""
        return [line for line in self.lines if line["stage"] == "train"]

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of some kinds."""
        return [event for event in self.events if event["event"] in kinds]

    def keep(self) -> dict[str, Any]:
        """By what checkpoints are the best: "metric" and "mode", of the last fit."""
        settings: list[dict[str, Any]] = [event["keep"] for event in self.of_kind("started") if "keep" in event]
        return settings[-1] if settings else {"metric": "val_loss", "mode": "min"}

    def best(self) -> Checkpoint | None:
        """The best checkpoint by `keep`; of equals the oldest. None where none recorded the metric."""
        keep = self.keep()
        scored = [each for each in self.checkpoints if keep["metric"] in each.metrics]
        sign = 1 if keep["mode"] == "min" else -1
        return min(scored, key=lambda each: sign * each.metrics[keep["metric"]], default=None)


def read_run(run_dir: Path) -> RunFiles:
    """All of `run_dir`. Raises FabricateError where it is not a run, or a file is damaged."""
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
    """What plan.json holds; only empty "settings" where there is none. Raises FabricateError where it is not a plan."""
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
    """The lines of a .jsonl, or of `text` from it; one without an end was being written when the run was killed, or is just now."""
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
    """The good ones and the names of others. Only manifests are read."""
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
