"""Settings of a script that differ from those with which a checkpoint was saved: a resume reports them, and applies the new ones if they
are accepted.

Must not know: which checkpoint is chosen (`choosing`), how state is restored (`saved_state`).
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fabricate.errors import CheckpointError
from fabricate.module import TrainModule, recorded
from fabricate.optim.configured import renew_rates
from fabricate.training.state.run_state import Run

_ELSEWHERE = (
    *("strategy", "precision", "seed", "global_batch_size", "accept_changes", "run_dir"),
    *("given", "plugins", "trackers", "progress", "fast_dev_run", "max_grad_norm", "max_time", "timeout", "save"),
)
"""Arguments of the Trainer that are not compared here: their effects are compared elsewhere, or they do not affect how training
continues."""
_DECIDE = ("max_grad_norm", "max_grad_value")
"""Arguments of the Trainer that change the updates."""


class Change(NamedTuple):
    """A value that differs from the checkpoint's. override: the name that `accept_changes` has to contain; "" if none is needed."""

    override: str
    name: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.name} {self.then} -> {self.now}"


def configuration(run: Run) -> dict[str, dict[str, str]]:
    """The values that `check_changes` compares, as text by name: options that `configure_optimizers` set, arguments of the Trainer, and
    options of plugins."""
    settings = {name: str(value) for name, value in vars(run.settings).items() if name not in _ELSEWHERE}
    return {
        "optimizers": {each.name: each.text for each in run.optim.configured},
        "trainer": settings | {"max_grad_norm": str(run.max_grad_norm)},
        "plugins": run.optim.plugin_options,
    }


def plugin_options(run: Run) -> Iterator[tuple[str, str]]:
    """The constructor arguments of the plugins that are numbers or texts, as far as a plugin keeps each under its name. Call it before a
    hook or a resume changes them."""
    for name, plugin in run.calls.manager.list_name_plugin():
        if plugin is not run.module and not isinstance(plugin, type | ModuleType):
            for argument in inspect.signature(type(plugin).__init__).parameters:
                value = vars(plugin).get(argument)
                if isinstance(value, int | float | str):
                    yield f"{argument} of plugin {name!r}", str(value)


def check_changes(run: Run, path: Path, tree: Any) -> list[Change]:
    """The changes since the checkpoint `path`, whose shared state is `tree`. `CheckpointError` for changes that affect how training
    continues and are not in `accept_changes`. Has no side effects; the same result on every rank."""
    now, then = configuration(run), _saved(path, tree)
    topics = {each.name: each.topic for each in run.optim.configured}
    changes = [
        *_apart(now["optimizers"], then["optimizers"], topics),
        *_apart(now["trainer"], then["trainer"], {name: name for name in _DECIDE}),
        *_apart(now["plugins"], then.get("plugins", {}), {}),
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
    """Apply the new options of optimizers and schedules, after those of the checkpoint were restored."""
    before = {change.name: change.then for change in changes}
    changed = [each for each in run.optim.configured if each.name in before]
    for each in changed:
        each.put(before[each.name])
    if changed:
        for label, schedule in run.optim.schedules.items():
            own = [each.name for each in changed if each.name.endswith(f"of scheduler {label!r}")]
            renew_rates(run.optim.optimizers[label], schedule, own)


def _saved(path: Path, tree: Any) -> dict[str, dict[str, str]]:
    """The `configuration` in the checkpoint; empty in checkpoints of earlier versions."""
    then = tree.get("configuration", {"optimizers": {}, "trainer": {}})
    topics = (
        [then.get("optimizers"), then.get("trainer"), then.get("plugins", {})] if isinstance(then, dict) else [None]
    )
    if not all(isinstance(topic, dict) and all(type(text) is str for text in topic.values()) for topic in topics):
        raise CheckpointError(f"checkpoint {path}: state.json: configuration: not as fabricate writes it")
    return dict(then)


def _apart(now: Mapping[str, str], then: Mapping[str, str], accept: Mapping[str, str]) -> Iterator[Change]:
    """Values that are in both and differ. An option in only one of them belongs to another version of a library and has its default."""
    for name in (name for name in then if name in now and not _same(then[name], now[name])):
        yield Change(accept.get(name, ""), name, then[name], now[name])


def _same(then: str, now: str) -> bool:
    """Whether two texts stand for equal values, such as 1 and 1.0."""
    with contextlib.suppress(ValueError, SyntaxError):
        return bool(ast.literal_eval(then) == ast.literal_eval(now))
    return then == now


def _listed(value: Any) -> Any:
    """A tuple as the list that a checkpoint holds for it."""
    return list(value) if type(value) is tuple else value


def _arguments(module: TrainModule, then: Mapping[str, Any]) -> Iterator[Change]:
    """Constructor arguments that differ; an omitted argument has its default."""
    from fabricate.checkpoint.format import arguments

    held, lost = recorded(module)
    parameters = inspect.signature(type(module).__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    now, saved = defaults | held, defaults | arguments.read(then)[0]
    for name in dict.fromkeys((*saved, *now)):
        values = saved.get(name, "not given"), now.get(name, "not given")
        values = _listed(values[0]), _listed(values[1])
        same = values[0] is values[1] or values[0] == values[1]
        if name not in lost and name not in then["unrecorded"] and not same:
            yield Change("module", f"argument {name} of {type(module).__name__}", *map(repr, values))
