"""Accelerate's settings for FSDP (most are for its version 1) as options of strategy="fsdp".

`docs/strategies/fsdp.md` shows the same as a table. Must not know launchers, files, or how the strategy works.
"""

from __future__ import annotations

from collections.abc import Mapping

from fabricate.errors import ConfigurationError, did_you_mean
from fabricate.launch.variables import flag

_SPELLED = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
_HONOURED = (
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params",
    "fsdp_sharding_strategy",
    "fsdp_reshard_after_forward",
    "fsdp_offload_params",
    "fsdp_activation_checkpointing",
    "fsdp_activation_checkpointing_offload",
    "fsdp_ignored_modules",
)
VARIABLES = {f"fsdp_config.{key}": _SPELLED.get(key, key.upper()) for key in _HONOURED}
"""Keys of an Accelerate YAML, each with the variable that `accelerate launch` sets for it."""

MEANINGLESS = tuple(
    f"fsdp_config.{key}"
    for key in (
        "fsdp_version",
        "fsdp_backward_prefetch",
        "fsdp_backward_prefetch_policy",
        "fsdp_forward_prefetch",
        "fsdp_state_dict_type",
        "fsdp_use_orig_params",
        "fsdp_cpu_ram_efficient_loading",
        "fsdp_sync_module_states",
    )
)
"""Keys that changed how version 1 worked, and that have no effect here."""

_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


def fsdp_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Options of the strategy, as text, from the variables of `accelerate launch`. Values that it exports by default have no effect.

    Raises ConfigurationError for a setting that the strategy does not support, with what to use instead.

        fsdp_options({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}) == {"shard": "node"}
    """
    options = {}
    if flag(environ, "FSDP_OFFLOAD_PARAMS"):
        options["offload"] = "cpu"
    sharding = _choice(environ, "FSDP_SHARDING_STRATEGY", _SHARDING)
    reshard = environ.get("FSDP_RESHARD_AFTER_FORWARD", "").strip().upper()
    if reshard not in ("", "TRUE", "FALSE"):  # version 1 wrote the sharding strategy here
        sharding = _choice(environ, "FSDP_RESHARD_AFTER_FORWARD", (*_SHARDING, "NO_RESHARD")).replace(
            "NO_RESHARD", "SHARD_GRAD_OP"
        )
    if sharding == "NO_SHARD":
        raise ConfigurationError(
            "FSDP_SHARDING_STRATEGY (fsdp_sharding_strategy) NO_SHARD keeps a whole replica on every rank: use strategy='ddp'"
        )
    if reshard == "FALSE" or sharding in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
        options["reshard_after_forward"] = "false"
    if sharding.startswith("HYBRID_SHARD"):
        options["shard"] = "node"
    if flag(environ, "FSDP_ACTIVATION_CHECKPOINTING"):
        options["activation_checkpointing"] = "true"
    for name, instead in (
        (
            "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
            "set it to false; only the input of each unit is kept, and it stays on the device",
        ),
        ("FSDP_IGNORED_MODULES", "remove it; freeze parameters with requires_grad_(False), or choose units with wrap="),
    ):
        if environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off", "none"):
            raise ConfigurationError(
                f"{name} ({name.lower()}) is {environ[name]!r}, but strategy='fsdp' does not do this: {instead}"
            )
    if wrap := _wrap(environ):
        options["wrap"] = wrap
    return options


def _wrap(environ: Mapping[str, str]) -> str:
    policy = _choice(environ, "FSDP_AUTO_WRAP_POLICY", _POLICIES)
    if policy == "NO_WRAP":
        return "none"
    if policy == "SIZE_BASED_WRAP":
        number = environ.get("FSDP_MIN_NUM_PARAMS", "").strip() or "100000000"  # Accelerate's own default
        if not number.isdecimal() or int(number) < 1:
            raise ConfigurationError(
                f"FSDP_MIN_NUM_PARAMS (fsdp_min_num_params) is {number!r}; give a whole number from 1 up"
            )
        return f"size:{number}"
    layers = [layer.strip() for layer in environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(",")]
    return "+".join(filter(None, layers))


def _choice(environ: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """One of `choices` by name, or by number from 1; empty when unset."""
    value = environ.get(name, "").strip().upper()
    if value.isdecimal() and 1 <= int(value) <= len(choices):
        return choices[int(value) - 1]
    if value not in ("", *choices):
        raise ConfigurationError(
            f"{name}={environ[name]!r} is not one of {', '.join(choices)}{did_you_mean(value, choices)}"
        )
    return value
