"""The keys of a DeepSpeed configuration that are passed on, that have no effect, and that are refused, with the reasons."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from fabricate import ConfigurationError

PASSED = (
    "aio",
    "bf16",
    "bfloat16",
    "communication_data_type",
    "data_types",
    "disable_python_gc",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_predivide_factor",
    "log_level",
    "optimizer",
    "prescale_gradients",
    "scheduler",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
)
WITHOUT_EFFECT = {
    "dump_state": "the plan shows what runs",
    "memory_breakdown": "DeepSpeed's log stays at warnings",
    "steps_per_print": "log_every= sets when metrics are logged",
    "wall_clock_breakdown": "DeepSpeed's log stays at warnings",
    "zero_allow_untested_optimizer": "fabricate checks the optimizer; see the option allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "the optimizer of configure_optimizers is used, wherever its state lies",
    "zero_optimization.gather_16bit_weights_on_model_save": "exports are gathered anyway, in full precision",
    "zero_optimization.load_from_fp32_weights": "checkpoints are fabricate's",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "exports are gathered anyway, in full precision",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "exports are gathered anyway, in full precision",
}
_TOOLS = "use trackers= and plugins= of the Trainer"
_REFUSED = {
    "activation_checkpointing": "by itself it configures nothing; use torch.utils.checkpoint, or "
    "gradient_checkpointing_enable() of a transformers model, in the module",
    "amp": "use precision=",
    "autotuning": "it runs trainings of its own",
    "checkpoint": "checkpoints are fabricate's: run_dir=, save_every=, keep=",
    "comms_logger": _TOOLS,
    "compile": "use torch.compile in the module",
    "compression_training": "it changes the module while it trains",
    "csv_monitor": _TOOLS,
    "curriculum_learning": "data is fabricate's: order it in the data set",
    "data_efficiency": "data is fabricate's: order it in the data set",
    "dataloader_drop_last": "data is fabricate's: set drop_last in a DataLoader",
    "elasticity": "start the ranks you want; a run resumes on another number of them",
    "flops_profiler": _TOOLS,
    "gradient_allreduce_op": "gradients are averaged, so that an update means the same on any number of ranks",
    "hybrid_engine": "it is for inference within training",
    "managed_gradient_accumulation": "gradient_accumulation_steps= of the Trainer sets when an update is due",
    "pipeline": "the module is run as it is",
    "progressive_layer_drop": "it changes the module while it trains",
    "sparse_attention": "choose the attention in the module",
    "sparse_gradients": "gradients are dense under ZeRO",
    "tensor_parallel": "not offered by this strategy",
    "tensorboard": _TOOLS,
    "torch_autocast": "use precision=",
    "wandb": _TOOLS,
    "zero_optimization.compute_grad_norm": "fabricate needs the norm to see updates that are not finite",
    "zero_optimization.cpu_offload": "write offload_optimizer: {device: cpu}",
    "zero_optimization.cpu_offload_param": "write offload_param: {device: cpu}",
    "zero_optimization.cpu_offload_use_pin_memory": "write pin_memory inside offload_optimizer and offload_param",
    "zero_optimization.elastic_checkpoint": "checkpoints are fabricate's and fit any number of ranks",
    "zero_optimization.zenflow": "it applies gradients of an earlier update, which changes the result",
}
OPTIMIZER_SWITCHES = ("adam_w_mode", "bias_correction", "torch_adam")


def check(content: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigurationError` for unknown keys, which DeepSpeed would ignore, and for refused keys."""
    zero = content.get("zero_optimization")
    inner = zero if isinstance(zero, Mapping) else {}
    for path, value in [*content.items(), *((f"zero_optimization.{key}", value) for key, value in inner.items())]:
        off = value in (False, None) or (isinstance(value, Mapping) and value.get("enabled") is False)
        if path in _REFUSED and off is path.endswith("compute_grad_norm"):
            raise ConfigurationError(f"{where}: {path} is refused: {_REFUSED[path]}; remove it")
    allowed = [*PASSED, *WITHOUT_EFFECT, *_REFUSED]
    for key in content:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(f"{where}: {key!r} is not a key of a DeepSpeed configuration{meant}")


def without_effect(content: Mapping[str, Any]) -> dict[str, str]:
    """The keys in `content` that have no effect, with the reason."""
    zero = content.get("zero_optimization")
    present = [*content, *(f"zero_optimization.{key}" for key in (zero if isinstance(zero, Mapping) else {}))]
    return {key: WITHOUT_EFFECT[key] for key in present if key in WITHOUT_EFFECT}


def same_optimizer(kind: str, parameters: Mapping[str, Any]) -> set[str]:
    """Lower-case names of classes that compute the same as DeepSpeed's optimizer for `optimizer.type`, whose Adam decouples weight decay
    unless `adam_w_mode` is false."""
    name = str(kind).lower()
    if name in ("adam", "adamw"):
        decoupled = name == "adamw" or parameters.get("adam_w_mode", True)
        return {"adamw", "deepspeedcpuadam", "fusedadam"} if decoupled else {"adam", "deepspeedcpuadam", "fusedadam"}
    return {name}
