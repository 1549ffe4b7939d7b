"""The strategy, precision and numbers that Accelerate's environment variables request.

Owns which of their values are defaults that `accelerate launch` always exports. Must not know fabricate's own variables, ranks
or plugins; `accelerate_fsdp` and `accelerate_mesh` read the variables of FSDP and of the device mesh.
"""

from __future__ import annotations

from collections.abc import Mapping

from fabricate.errors import ConfigurationError, did_you_mean
from fabricate.launch import accelerate_fsdp, accelerate_mesh
from fabricate.launch.deepspeed_file import deepspeed_strategy, read_file, with_options, zero_strategy
from fabricate.launch.variables import Request, flag, text

_PRECISIONS = ("no", "fp16", "bf16", "fp8")


def from_notebook(environ: Mapping[str, str]) -> bool:
    """Whether Accelerate's `notebook_launcher`, which uses other names of variables, started this process."""
    return "NPROC" in environ and "MIXED_PRECISION" in environ


def precision(environ: Mapping[str, str]) -> Request | None:
    """The mixed precision; None for "no", which is exported by default."""
    name = "MIXED_PRECISION" if from_notebook(environ) else "ACCELERATE_MIXED_PRECISION"
    value = environ.get(name, "no").strip().lower()
    if value not in _PRECISIONS:
        choices = f"{', '.join(_PRECISIONS)}{did_you_mean(value, _PRECISIONS)}"
        raise ConfigurationError(f"{name}={environ[name]!r} is not one of {choices}")
    return Request(value, name) if value != "no" else None


def number(environ: Mapping[str, str], name: str, kind: type[int] | type[float], default: str) -> Request | None:
    """The positive number in a variable; None if it is `default`, "auto" or unset."""
    value = environ.get(name, "").strip().lower()
    if value in ("", "auto", default):
        return None
    try:
        valid = kind(value) > 0
    except ValueError:
        valid = False
    if not valid:
        expected = "positive whole number" if kind is int else "positive number"
        raise ConfigurationError(f"{name}={environ[name]!r} is not a {expected}; correct it or unset it")
    return Request(value, name)


def strategy(environ: Mapping[str, str]) -> Request | None:
    """The strategy, with options; None if the variables leave Accelerate the choice between one process and replicas."""
    fsdp, deepspeed = flag(environ, "ACCELERATE_USE_FSDP"), flag(environ, "ACCELERATE_USE_DEEPSPEED")
    if fsdp and deepspeed:
        raise ConfigurationError("ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED are both true; unset one of them")
    if megatron := flag(environ, "ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigurationError(
            f"{megatron.source} is true, but fabricate has no strategy for Megatron-LM; use 'fsdp' or 'zero3'"
        )
    mesh = accelerate_mesh.mesh(environ) if flag(environ, "ACCELERATE_USE_PARALLELISM_CONFIG") else None
    if fsdp:
        return _fsdp(environ, mesh, fsdp.source)
    from_mesh = _mesh_without_fsdp(environ, mesh, deepspeed is not None) if mesh is not None else None
    return from_mesh or (_deepspeed(environ, deepspeed.source) if deepspeed else None)


def _fsdp(environ: Mapping[str, str], mesh: accelerate_mesh.Mesh | None, source: str) -> Request:
    options = accelerate_fsdp.fsdp_options(environ)
    if mesh is not None:
        options |= mesh.options(options.get("shard"))
    return Request(with_options("fsdp", options), source)


def _mesh_without_fsdp(environ: Mapping[str, str], mesh: accelerate_mesh.Mesh, deepspeed: bool) -> Request | None:
    """The strategy for a mesh of copies, or of ranks that divide layers. Raises ConfigurationError for a mesh that needs FSDP."""
    if mesh.shard > 1:
        raise ConfigurationError(
            f"{accelerate_mesh.SHARD}={mesh.shard} shards a model, but ACCELERATE_USE_FSDP is not true; use strategy='fsdp', or "
            "unset this variable if you use DeepSpeed's zero3"
        )
    if mesh.tp > 1:
        # Accelerate allows no copies together with tp. If all ranks are in tp, there are none.
        if deepspeed or environ.get("WORLD_SIZE", str(mesh.tp)) != str(mesh.tp) or mesh.replicate > 1:
            raise ConfigurationError(
                f"{accelerate_mesh.TENSOR}={mesh.tp} divides layers, which works only together with FSDP: use "
                f"strategy='fsdp:tp={mesh.tp}', or set ACCELERATE_USE_FSDP to true"
            )
        return Request(f"fsdp:tp={mesh.tp}", accelerate_mesh.TENSOR)
    if mesh.replicate > 1 and not deepspeed:
        return Request("ddp", accelerate_mesh.REPLICATE)
    return None


def _deepspeed(environ: Mapping[str, str], source: str) -> Request:
    file = text(environ, "ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if file:  # Accelerate then reads all options from the file, and none from its variables
        return Request(deepspeed_strategy(file.value, read_file(file.value)), file.source)
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")  # Accelerate's own default
    options = {}
    for option in ("offload_optimizer", "offload_param"):
        device = text(environ, f"ACCELERATE_DEEPSPEED_{option.upper()}_DEVICE")
        if device and device.value != "none":
            options[option] = device.value
    return Request(with_options(zero_strategy("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage), options), source)
