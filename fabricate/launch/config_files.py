"""Configuration files: Accelerate's YAML, DeepSpeed's JSON and a YAML of a Trainer's arguments, distinguished by their content.

Owns which of their keys fabricate uses, which have no meaning here and which are errors. Must not know ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fabricate.errors import ConfigurationError
from fabricate.launch import accelerate_fsdp, accelerate_mesh
from fabricate.launch.deepspeed_file import deepspeed_strategy, read_file
from fabricate.launch.settings import requests

# Keys of an Accelerate YAML that have no effect here: torchrun's rendezvous replaces them.
_NEUTRAL_KEYS = ("main_training_function", "rdzv_backend", "same_network")
# Keys that are passed on as the variable that `accelerate launch` sets for them.
_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "use_cpu": "ACCELERATE_USE_CPU",
    "debug": "ACCELERATE_DEBUG_MODE",
    "gpu_ids": "CUDA_VISIBLE_DEVICES",
    "deepspeed_config.deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_config.gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "deepspeed_config.gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "deepspeed_config.offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "deepspeed_config.offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "deepspeed_config.zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    **accelerate_fsdp.VARIABLES,
    **accelerate_mesh.VARIABLES,
}
# Keys whose value false or 0 means something other than no value.
_MAY_BE_ZERO = ("gpu_ids", "fsdp_config.fsdp_reshard_after_forward", "deepspeed_config.zero_stage")
# Variables that are passed to the ranks unchanged; the others become the strategy and the precision.
_PASSED_ON = (
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "ACCELERATE_GRADIENT_CLIPPING",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_DEBUG_MODE",
    "CUDA_VISIBLE_DEVICES",
)
_TYPES: dict[str, dict[str, str]] = {
    "NO": {},
    "MULTI_CPU": {"ACCELERATE_USE_CPU": "true"},
    "MULTI_GPU": {},
    "FSDP": {"ACCELERATE_USE_FSDP": "true"},
    "DEEPSPEED": {"ACCELERATE_USE_DEEPSPEED": "true"},
}


_DEEPSPEED_KEYS = {
    *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "optimizer", "scheduler"),
    *("fp16", "bf16", "gradient_clipping", "zero_allow_untested_optimizer", "steps_per_print"),
}
"""Keys that distinguish a DeepSpeed file in YAML from arguments of a Trainer: no argument has one of these names."""


@dataclass(frozen=True)
class ConfigFile:
    """The settings in an Accelerate YAML, a DeepSpeed JSON or a YAML of a Trainer's arguments; None: unset.

    `num_processes` counts the ranks of all nodes. `variables` are for the script's environment. `unused` names settings for Accelerate's
    own wrappers, which have no meaning here.
    """

    path: str
    strategy: str | None = None
    precision: str | None = None
    num_processes: int | None = None
    num_nodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    variables: dict[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer, not checked."""

    def says(self, key: str, value: Any) -> tuple[str, Any]:
        """The text that names this file and `key` in messages, and the value."""
        return f"config file {self.path!r} ({key}: {value})", value


def read_config(path: str) -> ConfigFile:
    """Read an Accelerate YAML, a DeepSpeed JSON, or another YAML, which holds arguments of a Trainer.

    Raises ConfigurationError for any other file, and for a setting that fabricate does not support.

        read_config("zero3.json").strategy == "zero3:config=zero3.json"
    """
    content = read_file(path)
    if "distributed_type" in content or "compute_environment" in content:
        return _accelerate_file(path, content)
    if path.endswith((".yaml", ".yml")) and not _DEEPSPEED_KEYS & content.keys():
        return ConfigFile(path, arguments=content)
    return ConfigFile(path, strategy=deepspeed_strategy(path, content))


def _accelerate_file(path: str, content: dict[str, Any]) -> ConfigFile:
    """The settings in an Accelerate YAML, read through the variables that `accelerate launch` would export."""
    where = f"config file {path!r}"
    kind = _distributed_type(where, content)
    num_processes = _count(where, content, "num_processes")
    num_nodes = _count(where, content, "num_machines")
    node_rank = _count(where, content, "machine_rank")
    master_port = _count(where, content, "main_process_port")
    master_addr = content.pop("main_process_ip", None)
    if kind == "NO" and (num_processes or 1) > 1:
        raise ConfigurationError(
            f"{where}: num_processes is {num_processes}, but distributed_type NO starts one process; use distributed_type "
            "MULTI_GPU or MULTI_CPU"
        )
    variables, unused = _variables(where, kind, _flat(content))
    requested = requests(variables)
    return ConfigFile(
        path,
        strategy=requested["strategy"].value if "strategy" in requested else None,
        precision=requested["precision"].value if "precision" in requested else None,
        num_processes=num_processes,
        # One machine and rank 0 are what `accelerate config` writes by default.
        num_nodes=None if num_nodes == 1 else num_nodes,
        node_rank=node_rank or None,
        master_addr=str(master_addr) if master_addr else None,
        master_port=master_port,
        variables={name: variables[name] for name in _PASSED_ON if name in variables},
        unused=unused,
    )


def _distributed_type(where: str, content: dict[str, Any]) -> str:
    """Remove the type of the run from `content`, and return it. Raises ConfigurationError for a type that `fabricate run` cannot start."""
    kind = str(content.pop("distributed_type", None) or "NO").upper()  # in YAML, an unquoted NO is false
    if kind not in _TYPES:
        raise ConfigurationError(f"{where}: distributed_type {kind} is not one of {', '.join(_TYPES)}")
    place = content.pop("compute_environment", "LOCAL_MACHINE")
    if place != "LOCAL_MACHINE":
        raise ConfigurationError(
            f"{where}: compute_environment {place}: `fabricate run` supports LOCAL_MACHINE only; use that value"
        )
    return kind


def _variables(where: str, kind: str, settings: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables for `settings`, and the names of settings that have no meaning here."""
    variables, unused = dict(_TYPES[kind]), []
    for key, value in settings.items():
        section = key.partition(".")[0]
        if section in ("fsdp_config", "deepspeed_config") and section != f"{kind.lower()}_config":
            raise ConfigurationError(f"{where}: {key} is set, but distributed_type is {kind}; remove one of them")
        if key in _VARIABLES:
            variables[_VARIABLES[key]] = str(value)
        elif section in ("deepspeed_config", "parallelism_config") or key in accelerate_fsdp.MEANINGLESS:
            unused.append(key)
        elif key not in _NEUTRAL_KEYS:
            raise ConfigurationError(f"{where}: {key} ({value!r}) cannot be passed on by `fabricate run`; remove it")
    if any(name.startswith("PARALLELISM_CONFIG_") for name in variables):
        variables["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    if variables.get("CUDA_VISIBLE_DEVICES") == "all":
        del variables["CUDA_VISIBLE_DEVICES"]
    return variables, tuple(unused)


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not empty or off, and those for which 0 means something; those of a section are named "section.key"."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= (
            {f"{key}.{name}": setting for name, setting in value.items()} if isinstance(value, dict) else {key: value}
        )
    return {
        key: value
        for key, value in flat.items()
        if (key in _MAY_BE_ZERO and value is not None) or (value and str(value).lower() not in ("no", "none", "false"))
    }


def _count(where: str, content: dict[str, Any], key: str) -> int | None:
    value = content.pop(key, None)
    if value is None or value == -1:  # for Accelerate, -1 means "given on the command line"
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(f"{where}: {key} {value!r} is not a whole number")
    return value
