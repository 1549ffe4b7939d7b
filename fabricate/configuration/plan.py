"""The plan: what will run, every value with where it came from. Printed before the first step and stored as plan.json.

Pure data and its text; must not decide anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fabricate.errors import size_text


@dataclass(frozen=True)
class Setting:
    """One line of the plan. `value` is JSON; `source`: "argument", "default", "launcher (...)", "auto: why", or a plugin."""

    name: str
    value: Any
    source: str = ""


@dataclass(frozen=True)
class Plan:
    """The resolved plan of a fit: `plan["strategy"]` is a value, `str(plan)` the text, `plan.to_json()` what plan.json holds."""

    settings: tuple[Setting, ...]
    plugins: tuple[dict[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        for setting in self.settings:
            if setting.name == name:
                return setting.value
        raise KeyError(f"the plan has no {name!r}; it has {', '.join(s.name for s in self.settings)}")

    def source(self, name: str) -> str:
        """Where the value of `name` came from."""
        self[name]
        return next(s.source for s in self.settings if s.name == name)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "settings": {s.name: {"value": s.value, "source": s.source} for s in self.settings},
            "plugins": list(self.plugins),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        width = max(len(s.name) for s in self.settings)
        lines = ["fabricate plan"]
        for setting in self.settings:
            value = setting.value
            if isinstance(value, dict):  # of sizes in bytes
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
