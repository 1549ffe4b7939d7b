"""The exceptions a user of fabricate can meet. Every message names what was asked, what is wrong and what to change.

    Exception
    +-- FabricateError            anything fabricate itself refuses or reports
        +-- ConfigurationError    a setting, an argument or a combination of them; raised before the first step
        +-- PluginError           a plugin that is unknown, broken, ambiguous or breaks a hook's rules
        +-- CheckpointError       a checkpoint that is missing, torn, altered or does not fit this run
        +-- RankError             ranks that are missing, disagree, or failed elsewhere

An exception raised by user code (a hook, a training step, a data set) keeps its own type; fabricate adds a note that says
where it was raised.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class FabricateError(Exception):
    """Base of every exception that fabricate raises on purpose."""


class ConfigurationError(FabricateError):
    """A setting, an argument or a combination of settings that cannot run."""


class PluginError(FabricateError):
    """A plugin that cannot be found, loaded or called as the hook specification says."""


class CheckpointError(FabricateError):
    """A checkpoint that cannot be written, is damaged, or does not belong to this run."""


class RankError(FabricateError):
    """Ranks that were asked for and are missing, that disagree, or one that failed elsewhere."""

    first: tuple[str, ...] = ()
    """Where another rank failed and this error only follows: what happened there, where in the user's files, what to do."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest of `known`, or the empty string."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1) or difflib.get_close_matches(word.lower(), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def first_line(exc: BaseException) -> str:
    """What `exc` says in its first line, for a message of ours; the name of its type where it says nothing."""
    return (str(exc).splitlines() or [type(exc).__name__])[0]


def size_text(count: float) -> str:
    """Bytes for a reader: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def few(names: Sequence[str]) -> str:
    """Many names for a reader: the first four, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
