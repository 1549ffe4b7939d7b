"""What a launcher was told about the settings, and what a DeepSpeed file among it comes to.

Owns Accelerate's variables and fabricate's own, and which of their values nobody asked for. Must not know places or plugins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabricate.errors import ConfigurationError, did_you_mean
from fabricate.launch import fsdp_keys, mesh_keys

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class Request:
    """A setting that the launcher was told: its value as text, and the variable that it came in."""

    value: str
    source: str


def requests(environ: Mapping[str, str]) -> dict[str, Request]:
    """What the launcher was told about the settings that it knows.

    Keys, those that were set: strategy, precision, gradient_accumulation_steps, max_grad_norm, cpu, plugins, plan_only.
    Values are text, written as for `fabricate run`: a name with options, a number, names joined by commas, "true". What
    `accelerate launch` exports without being asked (precision "no", one accumulation step) is not a request.

    Raises ConfigurationError for a value that cannot be read, and for two that differ.

        requests({"ACCELERATE_MIXED_PRECISION": "BF16"}) == {"precision": Request("bf16", "ACCELERATE_MIXED_PRECISION")}
    """
    accelerate = {
        "strategy": _accelerate_strategy(environ),
        "precision": _accelerate_precision(environ),
        "gradient_accumulation_steps": _accelerate_number(environ, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", int, "1"),
        "max_grad_norm": _accelerate_number(environ, "ACCELERATE_GRADIENT_CLIPPING", float, "none"),
        "cpu": _flag(environ, "ACCELERATE_USE_CPU"),
    }
    backend = _text(environ, "ACCELERATE_DYNAMO_BACKEND")
    if backend and backend.value.lower() != "no":
        raise ConfigurationError(
            f"{backend.source}={backend.value!r}: what is compiled is the script's to say, with Trainer(compile=True) or "
            "compile={'backend': ...}; leave --dynamo_backend out"
        )
    fabricate = {
        "strategy": _text(environ, "FABRICATE_STRATEGY"),
        "precision": _text(environ, "FABRICATE_PRECISION"),
        "plugins": _text(environ, "FABRICATE_PLUGINS"),
        "plan_only": _flag(environ, "FABRICATE_PLAN_ONLY"),
    }
    told = {name: request for name, request in accelerate.items() if request}
    for name, ours in fabricate.items():
        if not ours:
            continue
        theirs = told.setdefault(name, ours)
        if ours.value != theirs.value:
            raise ConfigurationError(
                f"{name}: {ours.source} says {ours.value!r} and {theirs.source} says {theirs.value!r}; set one of them"
            )
        told[name] = ours
    return told


def _text(environ: Mapping[str, str], name: str) -> Request | None:
    value = environ.get(name, "").strip()
    return Request(value, name) if value else None


def _flag(environ: Mapping[str, str], name: str) -> Request | None:
    value = environ.get(name, "").strip().lower()
    if value not in _TRUE + _FALSE:
        raise ConfigurationError(f"{name}={environ[name]!r} is neither true nor false; set it to true or unset it")
    return Request("true", name) if value in _TRUE else None


def from_notebook(environ: Mapping[str, str]) -> bool:
    """Whether Accelerate's `notebook_launcher` started this process; its variables have names of their own."""
    return "NPROC" in environ and "MIXED_PRECISION" in environ


def _accelerate_precision(environ: Mapping[str, str]) -> Request | None:
    name = "MIXED_PRECISION" if from_notebook(environ) else "ACCELERATE_MIXED_PRECISION"
    value = environ.get(name, "no").strip().lower()
    if value not in _PRECISIONS:
        known = f"{', '.join(_PRECISIONS)}{did_you_mean(value, _PRECISIONS)}"
        raise ConfigurationError(f"{name}={environ[name]!r} is not one of {known}")
    return Request(value, name) if value != "no" else None


def _accelerate_number(
    environ: Mapping[str, str], name: str, kind: type[int] | type[float], default: str
) -> Request | None:
    value = environ.get(name, "").strip().lower()
    if value in ("", "auto", default):
        return None
    try:
        valid = kind(value) > 0
    except ValueError:
        valid = False
    if not valid:
        wanted = "positive whole number" if kind is int else "positive number"
        raise ConfigurationError(f"{name}={environ[name]!r} is not a {wanted}; correct it or unset it")
    return Request(value, name)


def _accelerate_strategy(environ: Mapping[str, str]) -> Request | None:
    fsdp, deepspeed = _flag(environ, "ACCELERATE_USE_FSDP"), _flag(environ, "ACCELERATE_USE_DEEPSPEED")
    if fsdp and deepspeed:
        raise ConfigurationError("ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED are both true; unset one of them")
    if megatron := _flag(environ, "ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigurationError(
            f"{megatron.source} is true, and no strategy here is Megatron-LM's; use 'fsdp' or 'zero3'"
        )
    mesh = mesh_keys.mesh(environ) if _flag(environ, "ACCELERATE_USE_PARALLELISM_CONFIG") else None
    if mesh is not None and (deepspeed or not fsdp):
        if mesh.shard > 1:
            raise ConfigurationError(
                f"{mesh_keys.SHARD}={mesh.shard} divides a model, and ACCELERATE_USE_FSDP is not true; use strategy='fsdp', or for "
                "DeepSpeed's zero3 leave it out"
            )
        if mesh.tp > 1:
            # Accelerate allows no copies beside it; where its ranks are all there are, there are none.
            if deepspeed or environ.get("WORLD_SIZE", str(mesh.tp)) != str(mesh.tp) or mesh.replicate > 1:
                raise ConfigurationError(
                    f"{mesh_keys.TENSOR}={mesh.tp} divides layers, which is done beside shards only: use "
                    f"strategy='fsdp:tp={mesh.tp}', or set ACCELERATE_USE_FSDP to true"
                )
            return Request(f"fsdp:tp={mesh.tp}", mesh_keys.TENSOR)
        if mesh.replicate > 1 and not deepspeed:
            return Request("ddp", mesh_keys.REPLICATE)
    if fsdp:
        options = fsdp_keys.fsdp_options(environ)
        if mesh is not None:
            options |= mesh.options(options.get("shard"))
        return Request(_with_options("fsdp", options), fsdp.source)
    if not deepspeed:
        return None
    file = _text(environ, "ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if file:  # Accelerate reads every option from the file then, and none from its own variables
        return Request(deepspeed_strategy(file.value, read_file(file.value)), file.source)
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")  # Accelerate's own default
    options = {}
    for option in ("offload_optimizer", "offload_param"):
        device = _text(environ, f"ACCELERATE_DEEPSPEED_{option.upper()}_DEVICE")
        if device and device.value != "none":
            options[option] = device.value
    return Request(_with_options(_zero("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage), options), deepspeed.source)


def _zero(source: str, stage: object) -> str:
    if str(stage) not in ("0", "1", "2", "3"):
        raise ConfigurationError(f"{source}: stage {stage!r} is not one of 0, 1, 2, 3")
    return f"zero{stage}"


def _with_options(name: str, options: Mapping[str, str]) -> str:
    for option, value in options.items():
        if "," in value:
            raise ConfigurationError(
                f"{name}: {option}={value!r} holds a comma, which separates options; rename the file"
            )
    return name + (":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "")


def read_file(path: str) -> dict[str, Any]:
    """The settings in a YAML or JSON file."""
    import yaml  # type: ignore[import-untyped]

    try:
        text = Path(path).read_text(encoding="utf-8")
        # YAML reads 1e8 as text, so what looks like JSON is read as JSON.
        content = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except OSError as exc:
        raise ConfigurationError(
            f"config file {path!r} cannot be read: {exc.strerror}; give the path of a file"
        ) from exc
    except (ValueError, yaml.YAMLError) as exc:
        raise ConfigurationError(f"config file {path!r} is neither YAML nor JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigurationError(f"config file {path!r} holds no settings; give an Accelerate YAML or a DeepSpeed JSON")
    return content


def deepspeed_strategy(path: str, content: Mapping[str, Any]) -> str:
    """The strategy that a DeepSpeed JSON stands for."""
    zero = content.get("zero_optimization")
    if not isinstance(zero, dict) or "stage" not in zero:
        raise ConfigurationError(
            f"config file {path!r} is not understood: an Accelerate YAML sets distributed_type, a DeepSpeed JSON sets "
            f"zero_optimization.stage; it sets {', '.join(map(str, content)) or 'nothing'}"
        )
    return _with_options(_zero(f"config file {path!r}: zero_optimization", zero["stage"]), {"config": path})
