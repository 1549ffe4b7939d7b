"""Names with options, as users write them, and the objects that are made of them: "ema:decay=0.99".

Must not know: what is registered under a name (fabricate.registry.registry), hooks, torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any

from fabricate.errors import ConfigurationError, did_you_mean
from fabricate.launch.unsupported import instead


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
    """Call `factory` with `given` and `options`, each option converted by the type that the factory declares for it."""
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
            known = ", ".join(parameters) or "none"
            raise ConfigurationError(
                f"{kind}={name!r} has no option {key!r}{instead(key) or did_you_mean(key, parameters)}; options: {known}"
            )
        arguments[key] = _convert(text, hints.get(key, str), f"{kind}={name!r}: option {key}={text!r}")
    return factory(**given, **arguments)


def _convert(text: str, hint: Any, where: str) -> Any:
    kinds = typing.get_args(hint) or (hint,)
    lowered = text.lower()
    if type(None) in kinds and lowered == "none":
        return None
    literals = [v for kind in kinds for v in typing.get_args(kind) or () if typing.get_origin(kind) is typing.Literal]
    if typing.get_origin(hint) is typing.Literal:
        literals = list(typing.get_args(hint))
    for literal in literals:
        if lowered == str(literal).lower():
            return literal
    if bool in kinds and lowered in ("true", "false", "yes", "no", "on", "off"):
        return lowered in ("true", "yes", "on")
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                continue
    if str in kinds or hint is Any:
        return text
    wanted = ", ".join(map(str, literals)) or " or ".join(
        getattr(k, "__name__", str(k)) for k in kinds if k is not type(None)
    )
    raise ConfigurationError(f"{where} is not {wanted}")
