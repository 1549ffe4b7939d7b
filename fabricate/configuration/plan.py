"""The plan of a fit: every setting with its source. Its summary is printed before the first step; plan.json contains all settings.

Pure data and its text. It must not decide anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fabricate.errors import size_text

SUMMARY_LINES = 8
"""The maximum number of lines that a fit prints before its first step, including those about a resume and a search for a batch size."""


@dataclass(frozen=True)
class Setting:
    """One line of the plan. `value` is JSON; `source`: "argument", "default", "launcher (...)", "auto: why", or a plugin."""

    name: str
    value: Any
    source: str = ""


@dataclass(frozen=True)
class Plan:
    """The resolved plan of a fit: `plan["strategy"]` is a value, `str(plan)` the text, `plan.summary()` a summary of at most eight lines,
    `plan.to_json()` the content of plan.json."""

    settings: tuple[Setting, ...]
    plugins: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    adopted: tuple[str, ...] = ()
    """Settings whose values come from a launcher or a file of the strategy, with the source."""

    def __getitem__(self, name: str) -> Any:
        for setting in self.settings:
            if setting.name == name:
                return setting.value
        raise KeyError(f"the plan has no {name!r}; it has {', '.join(s.name for s in self.settings)}")

    def source(self, name: str) -> str:
        """The source of the value of `name`."""
        self[name]
        return next(s.source for s in self.settings if s.name == name)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "settings": {s.name: {"value": s.value, "source": s.source} for s in self.settings},
            "plugins": list(self.plugins),
            "notes": list(self.notes),
        }

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the text of the plan in a notebook."""
        printer.text(str(self))

    def __str__(self) -> str:
        width = max(len(s.name) for s in self.settings)
        lines = ["fabricate plan"]
        for setting in self.settings:
            value = setting.value
            if isinstance(value, dict):  # sizes in bytes, by kind
                value = ", ".join(f"{kind} {size_text(count)}" for kind, count in value.items())
            elif isinstance(value, list):
                value = ", ".join(map(str, value))
            if isinstance(value, int) and not isinstance(value, bool):
                value = f"{value:,}"
            source = f"  [{setting.source}]" if setting.source else ""
            lines.append(f"  {setting.name.replace('_', ' '):<{width}}  {'none' if value is None else value}{source}")
        for plugin in self.plugins:
            lines.append(f"  {'plugin':<{width}}  {plugin['name']}  [{plugin['origin']}]")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def summary(self, lines_left: int = SUMMARY_LINES) -> str:
        """At most `lines_left` lines: the module, the devices, the global batch and the length, the output, and unusual settings. Four or
        five lines are always present. The last line says where all settings are."""
        values = {setting.name: setting.value for setting in self.settings}
        place = _place(values, self.source("strategy"))
        lines = [f"fabricate: {values['module']}, {_model(values)}", f"  runs on  {place}"]
        if "total_steps" in values:
            lines.append(f"  updates  {_updates(values, self.source('global_batch_size'))}")
        lines.append(f"  writes   {_written(values)}")
        unusual = [f"  adopted  {', '.join(self.adopted)}"] if self.adopted else []
        unusual += [f"  note: {note}" for note in self.notes]
        room = lines_left - len(lines) - 1
        hidden = len(unusual) - room
        more = f"{hidden} more note{'s' if hidden > 1 else ''} and " if hidden > 0 else ""
        file = f"{values['run_dir']}/plan.json or " if values["run_dir"] else ""
        return "\n".join([*lines, *unusual[:room], f"  plan     {more}all settings: {file}Trainer(print_plan='full')"])


def _model(values: Mapping[str, Any]) -> str:
    frozen = values["parameters_frozen"]
    parameters = f"{values['parameters_trainable'] + frozen:,} parameters{f' ({frozen:,} frozen)' if frozen else ''}"
    if "memory_per_rank" not in values:
        return parameters
    return f"{parameters}; about {size_text(values['memory_per_rank']['total'])} per rank, without activations"


def _place(values: Mapping[str, Any], chosen: str) -> str:
    """The text of the line "runs on". `chosen`: the source of the strategy, with the reason if it was chosen automatically."""
    ranks, compiled = values["world_size"], ", compiled" if values["compile"] else ""
    automatic, _, why = chosen.partition("; ")
    reason = f" ({why})" if automatic.startswith("auto: ") and values["strategy"] == "fsdp" else ""
    return f"{ranks} rank{'s' if ranks > 1 else ''} ({values['device']}), {values['strategy']}{reason}, {values['precision']}{compiled}"


def _updates(values: Mapping[str, Any], how: str) -> str:
    number, rows, in_epoch = values["total_steps"], values["global_batch_size"], values["updates_per_epoch"]
    batch = f" of {rows:,} rows ({how})" if rows is not None else ", batches as they come"
    epoch = f"; {in_epoch:,} per epoch" if in_epoch is not None else ""
    epochs = values["max_epochs"]
    until = (
        "until it is stopped" if epochs is None else f"as many as {epochs} epoch{'s have' if epochs > 1 else ' has'}"
    )
    return f"{until if number is None else format(number, ',')}{batch}{epoch}"


def _written(values: Mapping[str, Any]) -> str:
    saves = "saves weights" if values.get("save_weights_only") else "saves"
    moments = (("validates", "validate_every"), (saves, "save_every"), ("logs", "log_every"))
    often = ", ".join(f"{verb} every {_singular(values[name])}" for verb, name in moments if values[name] is not None)
    return f"{values['run_dir'] or 'nothing, as no run_dir is set'}; {often}"


def _singular(every: str) -> str:
    """ "epoch" for "1 epoch"; other durations unchanged."""
    return every.removeprefix("1 ")
