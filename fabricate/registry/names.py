"""Names with options ("ema:decay=0.99"), and the objects that are made from them.

Must not know: what is registered under a name (fabricate.registry.registry), hooks, torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from fabricate.errors import ConfigurationError, did_you_mean
from fabricate.launch.unsupported import instead

_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_name(argument: str, text: str) -> tuple[str, dict[str, str]]:
    """Split "name:option=value,other=value" into the name and its options as text."""
    name, _, tail = text.partition(":")
    options: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in tail.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            other = " (in FABRICATE_PLUGINS another plugin comes after a ;)" if argument == "plugins" else ""
            raise ConfigurationError(
                f"{argument}={text!r}: option {item!r} has no value; write {name}:{key}=VALUE{other}"
            )
        option = key.strip().replace("-", "_")
        if option in options:
            raise ConfigurationError(f"{argument}={text!r}: option {option!r} is given twice; remove one")
        options[option] = value.strip()
    if not name.strip():
        raise ConfigurationError(f"{argument}={text!r}: the name is empty")
    return name.strip(), options


def build(factory: Callable[..., Any], kind: str, name: str, options: dict[str, str], **given: Any) -> Any:
    """Call `factory` with `given` and `options`. Each option is converted to the type that the factory declares for it; if none is
    declared, to the type of the default."""
    try:
        hints = typing.get_type_hints(
            factory if not inspect.isclass(factory) or dataclasses.is_dataclass(factory) else factory.__init__
        )
        parameters = dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError, NameError):
        hints, parameters = {}, {}
    arguments = {}
    for key, text in options.items():
        if parameters and key not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            allowed = ", ".join(parameters) or "none"
            raise ConfigurationError(
                f"{kind}={name!r} has no option {key!r}{instead(key) or did_you_mean(key, parameters)}; options: {allowed}"
            )
        default = parameters[key].default if key in parameters else None
        hint = hints.get(key, type(default) if isinstance(default, bool | int | float) else str)
        arguments[key] = _convert(text, hint, f"{kind}={name!r}: option {key}={text!r}")
    return factory(**given, **arguments)


def _convert(text: str, hint: Any, where: str) -> Any:
    """`text` as a value of the type `hint`: the first that fits of None, a literal, a bool, a number, text."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(None) in kinds and text.lower() == "none":
        return None
    literals = [value for kind in kinds for value in _literals(kind)]
    for literal in literals:
        if text.lower() == str(literal).lower():
            return literal
    if bool in kinds and text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    for number in (int, float):
        if number in kinds:
            with contextlib.suppress(ValueError):
                return number(text)
    if str in kinds or hint is Any:
        return text
    raise ConfigurationError(f"{where} is not {_described(kinds, literals)}")


def _described(kinds: tuple[Any, ...], literals: list[Any]) -> str:
    names = [
        str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))
        for kind in kinds
        if kind is not type(None)
    ]
    return ", ".join(map(str, literals)) or " or ".join(names)


def _literals(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
