"""The comparison of two runs: plan, versions, data, configuration, the first metric and the first tensor that differ.

Must not know: the output. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fabricate.cli.recorded.files import Checkpoint, RunFiles

if TYPE_CHECKING:
    from fabricate.checkpoint.format.comparing import Difference

__all__ = ["Different", "differences"]

_PLACES = ("run_dir",)
"""Settings that do not count as differences: the place of a run."""
_OF_RANKS = ("ranks", "ranks_per_row", "batch_size", "accumulation")
"""Keys of the data's description that do not count as differences: its division over ranks, which the plan shows."""


class Different(NamedTuple):
    """A difference between two runs. topic: "plan", "versions", "data", "configuration", "metrics", "checkpoints"."""

    topic: str
    name: str
    first: str
    second: str


def differences(first: RunFiles, second: RunFiles) -> list[Different]:
    """All differences, by topic; only the first for metrics and for the tensors of checkpoints. Reads whole checkpoints of common steps,
    until a pair differs. Raises CheckpointError if one is damaged."""
    sides = (first, second)
    return [
        *_apart("plan", *({n: s["value"] for n, s in run.plan.items() if n not in _PLACES} for run in sides)),
        *_apart("versions", *map(_versions, sides)),
        *_apart("data", *map(_data, sides)),
        *_apart("configuration", *map(_configuration, sides)),
        *_metrics(first, second),
        *_checkpoints(first, second),
    ]


def _apart(topic: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Different]:
    """The names whose values differ, or that only one of the mappings has."""
    missing = object()
    for name in dict.fromkeys((*first, *second)):
        values = first.get(name, missing), second.get(name, missing)
        if values[0] != values[1]:
            yield Different(topic, name, *("" if value is missing else _text(value) for value in values))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _last_start(run: RunFiles) -> dict[str, Any]:
    """The event "started" of the last fit; empty if there is none."""
    started = run.of_kind("started")
    return started[-1] if started else {}


def _versions(run: RunFiles) -> dict[str, Any]:
    """The versions of packages in the last fit, or else in the newest checkpoint."""
    versions: dict[str, Any] = _last_start(run).get("versions", {})
    return versions or (dict(run.checkpoints[-1].versions) if run.checkpoints else {})


def _data(run: RunFiles) -> dict[str, Any]:
    """The description of the data that determines the order of the rows, without what the plan shows."""
    return {name: value for name, value in _last_start(run).get("data", {}).items() if name not in _OF_RANKS}


def _configuration(run: RunFiles) -> dict[str, Any]:
    """The arguments of the Trainer and the module, and the options of optimizers and plugins, in the newest checkpoint."""
    from fabricate.checkpoint.format import arguments
    from fabricate.checkpoint.format.directory import Reader

    if not run.checkpoints:
        return {}
    with Reader(run.checkpoints[-1].path) as reader:
        state: Any = reader.json("state.json")
    configured = state.get("configuration", {})
    module = state["module"]
    values = {f"Trainer({name})": value for name, value in configured.get("trainer", {}).items()}
    values |= configured.get("optimizers", {}) | configured.get("plugins", {})
    values |= {f"{module['class']}({name})": value for name, value in arguments.read(module)[0].items()}
    return {"module": module["class"], **values}


def _metrics(first: RunFiles, second: RunFiles) -> Iterator[Different]:
    """The first metric that differs, in the logging order of the first run. If none differs: the lengths of the logs, if these differ."""
    ours, others, apart = _by_place(first), _by_place(second), _means_apart(first, second)
    if apart:
        since = (f"steps {_begins(run)[apart[0]] + 1} to {apart[0]}" for run in (first, second))
        yield Different("metrics", "not compared, because they are means over other steps", *since)
    for place in [place for place in ours if place in others and (place[1] != "train" or place[0] not in apart)]:
        for different in _apart("metrics", ours[place], others[place]):
            yield different._replace(name=f"{different.name} at step {place[0]} ({place[1]})")
            return
    if ours.keys() != others.keys() and not apart:
        ends = (
            f"{run.lines[-1]['step'] if run.lines else 0:,} steps, {len(run.lines):,} lines" for run in (first, second)
        )
        yield Different("metrics", "length of the log", *ends)


def _begins(run: RunFiles) -> dict[int, int]:
    """By step at which training metrics were logged: the step at which they were logged before, or 0. A metric is a mean since then."""
    steps = sorted({line["step"] for line in run.train()})
    return dict(zip(steps, [0, *steps], strict=False))


def _means_apart(first: RunFiles, second: RunFiles) -> list[int]:
    """The steps at which both runs logged training metrics, but as means over other steps."""
    ours, others = _begins(first), _begins(second)
    return [step for step in ours if step in others and ours[step] != others[step]]


def _by_place(run: RunFiles) -> dict[tuple[int, str], dict[str, Any]]:
    """The metrics of each step and stage; hooks may have logged some on a line of their own."""
    places: dict[tuple[int, str], dict[str, Any]] = {}
    for line in run.lines:
        places.setdefault((line["step"], line["stage"]), {}).update(line["metrics"])
    return places


def _compared(first: Path, second: Path, *, means: bool) -> list[Difference]:
    """The differences of two checkpoints. means: with the values of the last log line, and of those measured since then."""
    from fabricate.checkpoint.format.comparing import compare
    from fabricate.checkpoint.format.directory import Reader

    with Reader(first) as a, Reader(second) as b:
        every = compare(a, b)
    return [each for each in every if means or not (each.name.startswith("latest") or "metrics.since" in each.name)]


def _checkpoints(first: RunFiles, second: RunFiles) -> Iterator[Different]:
    """The first difference (tensors before values) in the first pair of checkpoints of the same step that differ. What was measured since a
    log line does not count if these lines are at other steps."""
    apart = bool(_means_apart(first, second))
    by_step: dict[int, Path] = {each.step: each.path for each in second.checkpoints}
    shared: list[Checkpoint] = [each for each in first.checkpoints if each.step in by_step]
    for each in shared:
        comparison = _compared(each.path, by_step[each.step], means=not apart)
        tensors = [difference for difference in comparison if difference.elements is not None]
        for difference in [*tensors, *comparison][:1]:
            name = f"{difference.name} at step {each.step} ({difference.component})"
            yield Different(
                "checkpoints", name, difference.text, f"and {len(comparison) - 1} more: fabricate ckpt diff"
            )
            return
    if not shared and (first.checkpoints or second.checkpoints):
        steps = (", ".join(str(each.step) for each in run.checkpoints) or "none" for run in (first, second))
        yield Different("checkpoints", "no step in common", *steps)
