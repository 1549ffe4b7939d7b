"""The settings that a launcher passes on, as text: from Accelerate's variables and fabricate's own.

Owns fabricate's variables, and the rule for a setting that both set. Must not know ranks or plugins.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from fabricate.errors import ConfigurationError
from fabricate.launch import accelerate_variables
from fabricate.launch.variables import Request, flag, text

_PREFIX = "FABRICATE"
_NAMES = ("STRATEGY", "PRECISION", "PLUGINS", "PLAN_ONLY", "SETTINGS", "LAUNCHED", "PREEMPTED_FILE")


def requests(environ: Mapping[str, str]) -> dict[str, Request]:
    """The settings that a launcher passes on in `environ`.

    Keys, if they are set: strategy, precision, gradient_accumulation_steps, max_grad_norm, cpu, device, plugins, plan_only. Values are
    text, written as for `fabricate run`: a name with options, a number, names joined by commas, "true". Values that `accelerate launch`
    exports by default (precision "no", one accumulation step) are not requests.

    Raises ConfigurationError for an invalid value, for two different values of one setting, and for a misspelt variable.

        requests({"ACCELERATE_MIXED_PRECISION": "BF16"}) == {"precision": Request("bf16", "ACCELERATE_MIXED_PRECISION")}
    """
    _refuse_near_misses(environ)
    accelerate = {
        "strategy": accelerate_variables.strategy(environ),
        "precision": accelerate_variables.precision(environ),
        "gradient_accumulation_steps": accelerate_variables.number(
            environ, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", int, "1"
        ),
        "max_grad_norm": accelerate_variables.number(environ, "ACCELERATE_GRADIENT_CLIPPING", float, "none"),
        "cpu": flag(environ, "ACCELERATE_USE_CPU"),
        "device": text(environ, "ACCELERATE_TORCH_DEVICE"),
    }
    backend = text(environ, "ACCELERATE_DYNAMO_BACKEND")
    if backend and backend.value.lower() != "no":
        raise ConfigurationError(
            f"{backend.source}={backend.value!r}: the script decides about torch.compile, with "
            "Trainer(compile=True) or compile={'backend': ...}; leave --dynamo_backend out"
        )
    fabricate = {
        "strategy": text(environ, "FABRICATE_STRATEGY"),
        "precision": text(environ, "FABRICATE_PRECISION"),
        "plugins": text(environ, "FABRICATE_PLUGINS"),
        "plan_only": flag(environ, "FABRICATE_PLAN_ONLY"),
    }
    requested = {name: request for name, request in accelerate.items() if request}
    for name, ours in fabricate.items():
        if not ours:
            continue
        theirs = requested.setdefault(name, ours)
        if ours.value != theirs.value:
            raise ConfigurationError(
                f"{name}: {ours.source} says {ours.value!r} and {theirs.source} says {theirs.value!r}; set one of them"
            )
        requested[name] = ours
    return requested


def _refuse_near_misses(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a variable whose name is almost one of fabricate's: it would change nothing."""
    for variable in environ:
        prefix, _, name = variable.partition("_")
        if (
            prefix == _PREFIX
            and name not in _NAMES
            and (near := difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.75))
        ):
            raise ConfigurationError(
                f"{variable}={environ[variable]!r}: fabricate reads no such environment variable; did you mean {prefix}_{near[0]}? "
                "Rename or unset it"
            )
