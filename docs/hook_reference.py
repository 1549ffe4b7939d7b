"""Writes docs/hooks.md from the specifications in fabricate.hooks: `python docs/hook_reference.py`."""

from __future__ import annotations

import inspect
from pathlib import Path

from fabricate import hooks

PAGE = Path(__file__).with_name("hooks.md")
_INTRODUCTION = """\
# Hooks

Written by `docs/hook_reference.py` from `fabricate/hooks.py`; change the text there.

A module or a plugin hears a hook by defining a method of its name, and takes any of the arguments below, by name. Objects
that do not inherit from `Callback`, `Strategy`, `Precision` or `TrainModule` mark their functions with `@fabricate.hookimpl`.
[Plugins](plugins.md) has the order of listeners; [Write a plugin](write-a-plugin.md) is the place to start.
"""
_SECTIONS = {
    "Wrappable work": (
        hooks.ACTIONS,
        "The first answer counts. Wrap it with `@hookimpl(wrapper=True)`: a generator that yields once, receives the answer and "
        "returns it.",
    ),
    "A listener's own state": (
        hooks.PER_LISTENER,
        "Called for each listener by itself, so they cannot be wrapped. A checkpoint that holds the state of a plugin which is "
        "not active, or has none for one that is, is an error; `Trainer(accept_changes=('plugins',))` accepts it.",
    ),
    "Events": (
        tuple(n for n in hooks.EVENTS if n not in hooks.ACTIONS + hooks.PER_LISTENER),
        "They return nothing; a returned value is an error. To ask for something there is `trainer.request_save()`, "
        "`trainer.request_eval()` and `trainer.stop(reason)`, which act at the next update boundary.",
    ),
    "Registrations": (
        hooks.REGISTRATIONS,
        "What an installed distribution offers. Nothing here runs in a training loop.",
    ),
}


def render() -> str:
    """The page, ending in a newline."""
    loop = (hooks.__doc__ or "").partition("as the hooks see it:\n")[2].partition("\nEvery hook runs")[0]
    parts = [_INTRODUCTION, "## The loop\n", "```text\n" + inspect.cleandoc(loop) + "\n```\n"]
    parts.append("Every hook runs on every rank, in the same order on each, unless its text says otherwise.\n")
    for title, (names, text) in _SECTIONS.items():
        parts += [f"## {title}\n", text + "\n", *map(_entry, names)]
    return "\n".join(parts)


def _entry(name: str) -> str:
    function = getattr(hooks.Registrations if name in hooks.REGISTRATIONS else hooks.Events, name)
    arguments = ", ".join(p for p in inspect.signature(function).parameters if p != "self")
    return f"### `{name}({arguments})`\n\n{inspect.getdoc(function)}\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
