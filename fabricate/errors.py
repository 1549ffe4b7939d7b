"""The exceptions that fabricate raises. Every message names what was requested, what is wrong and what to change.

    Exception
    +-- FabricateError            base class of all errors of fabricate
        +-- ConfigurationError    a setting, an argument or a combination of them; raised before the first step
        +-- PluginError           a plugin that is unknown, broken, ambiguous or breaks a hook's rules
        +-- CheckpointError       a checkpoint that is missing, torn, altered or does not fit this run
        +-- RankError             ranks that are missing or disagree, or a rank that failed

An exception raised by user code (a hook, a training step, a data set) keeps its own type; fabricate adds a note that says
where it was raised.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class FabricateError(Exception):
    """Base class of all exceptions that fabricate raises on purpose."""


class ConfigurationError(FabricateError):
    """A setting, an argument or a combination of settings that cannot run."""


class PluginError(FabricateError):
    """A plugin that cannot be found, loaded or called as the hook specification says."""


class CheckpointError(FabricateError):
    """A checkpoint that cannot be written, is damaged, or does not belong to this run."""


class RankError(FabricateError):
    """Ranks that are missing, ranks that disagree, or a rank that failed."""

    first: tuple[str, ...] = ()
    """Set if this error only follows from the failure of another rank: what happened there, where in the user's files, what to do."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest of `known`, or the empty string."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1) or difflib.get_close_matches(word.lower(), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def first_line(exc: BaseException) -> str:
    """The first line of the message of `exc`, or the name of its type if the message is empty."""
    return (str(exc).splitlines() or [type(exc).__name__])[0]


def size_text(count: float) -> str:
    """A number of bytes as text: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def few(names: Sequence[str]) -> str:
    """The first four names as text, and the number of the others."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
