"""What a script sets otherwise than when a checkpoint was saved: named when a run resumes, and put into effect where that is accepted.

Must not know: which checkpoint is chosen (`resuming`), how state is restored (`saved_state`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fabricate.errors import CheckpointError
from fabricate.module import TrainModule, recorded
from fabricate.optim.configured import renew_rates
from fabricate.training.state.run_state import Run

_ELSEWHERE = (
    *("strategy", "precision", "seed", "global_batch_size", "gradient_accumulation_steps", "accept_changes", "run_dir"),
    *("plugins", "trackers", "progress", "fast_dev_run", "max_grad_norm", "max_time", "timeout", "save"),
)
"""Arguments of the Trainer that are compared by what came of them, or change nothing of how training continues."""
_DECIDE = ("max_grad_norm", "max_grad_value")
"""Arguments of the Trainer that make other updates."""


class Change(NamedTuple):
    """A value that is another than in the checkpoint. override: what `accept_changes` has to name; empty where nothing has to be."""

    override: str
    name: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.name} {self.then} -> {self.now}"


def configuration(run: Run) -> dict[str, dict[str, str]]:
    """What a checkpoint holds for `check_changes`: values as text by name, those that `configure_optimizers` set and the Trainer's."""
    settings = {name: str(value) for name, value in vars(run.settings).items() if name not in _ELSEWHERE}
    return {
        "optimizers": {each.name: each.text for each in run.optim.configured},
        "trainer": settings | {"max_grad_norm": str(run.max_grad_norm)},
    }


def check_changes(run: Run, path: Path, tree: Any) -> list[Change]:
    """What changed since the checkpoint `path`, whose shared state is `tree`. `CheckpointError` for what changes how training continues
    and is not in `accept_changes`. Changes nothing, the same on every rank."""
    now, then = configuration(run), _saved(path, tree)
    topics = {each.name: each.topic for each in run.optim.configured}
    changes = [
        *_apart(now["optimizers"], then["optimizers"], topics),
        *_apart(now["trainer"], then["trainer"], {name: name for name in _DECIDE}),
        *_arguments(run.module, tree["module"]),
    ]
    refused = [change for change in changes if change.override and change.override not in run.settings.accept_changes]
    if refused:
        needed = tuple(dict.fromkeys([*run.settings.accept_changes, *(change.override for change in refused)]))
        raise CheckpointError(
            f"{path} was saved with other values than those of this run: {'; '.join(map(str, refused))}. To continue with the new "
            f"values: Trainer(accept_changes={needed!r}); to go on as before, set the old ones; to start over, fit(..., "
            "resume='never') or another run_dir"
        )
    return changes


def take_over(run: Run, changes: list[Change]) -> None:
    """Put the new options of optimizers and settings of schedules into effect, after the checkpoint's were restored."""
    before = {change.name: change.then for change in changes}
    changed = [each for each in run.optim.configured if each.name in before]
    for each in changed:
        each.put(before[each.name])
    if changed:
        for label, schedule in run.optim.schedules.items():
            own = [each.name for each in changed if each.name.endswith(f"of scheduler {label!r}")]
            renew_rates(run.optim.optimizers[label], schedule, own)


def _saved(path: Path, tree: Any) -> dict[str, dict[str, str]]:
    """What `configuration` gave for the checkpoint; checkpoints of earlier versions hold nothing to compare with."""
    then = tree.get("configuration", {"optimizers": {}, "trainer": {}})
    topics = [then.get(topic) for topic in ("optimizers", "trainer")] if isinstance(then, dict) else [None]
    if not all(isinstance(topic, dict) and all(type(text) is str for text in topic.values()) for topic in topics):
        raise CheckpointError(f"checkpoint {path}: state.json: configuration: not as fabricate writes it")
    return dict(then)


def _apart(now: Mapping[str, str], then: Mapping[str, str], accept: Mapping[str, str]) -> Iterator[Change]:
    """What is in both and differs: options that come with another version of a library have their defaults."""
    for name in (name for name in then if name in now and then[name] != now[name]):
        yield Change(accept.get(name, ""), name, then[name], now[name])


def _arguments(module: TrainModule, then: Mapping[str, Any]) -> Iterator[Change]:
    """Constructor arguments; one that was left out has its default."""
    held, lost = recorded(module)
    parameters = inspect.signature(type(module).__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    now, saved = defaults | held, defaults | then["arguments"]
    for name in dict.fromkeys((*saved, *now)):
        values = saved.get(name, "not given"), now.get(name, "not given")
        same = values[0] is values[1] or values[0] == values[1]
        if name not in lost and name not in then["unrecorded"] and not same:
            yield Change("module", f"argument {name} of {type(module).__name__}", *map(repr, values))
