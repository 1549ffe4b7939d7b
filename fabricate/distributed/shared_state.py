"""The state that Accelerate shares within a process: set aside during a run, which has its own, and restored afterwards.

Accelerate keeps its facts about the process in the class dictionaries of `PartialState`, `AcceleratorState` and `GradientState`. User code
or a library (`TrainingArguments`, `accelerate.logging`) may have filled them before a fit. Owns: the check that this state agrees with the
fit. Must not know: how the Accelerator of a run is built.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

from fabricate.errors import ConfigurationError
from fabricate.launch.ranks import Launch

_KINDS = (PartialState, AcceleratorState, GradientState)
_FORGET = "or forget that Accelerator with accelerate.state.AcceleratorState._reset_state(True)"
_ON_A_CPU = "PartialState(cpu=True), Accelerator(cpu=True) or TrainingArguments(use_cpu=True)"


class SharedState:
    """Accelerate's shared state as it was before a run. Nothing is changed until `set_aside`."""

    def __init__(self) -> None:
        self._before = [dict(kind._shared_state) for kind in _KINDS]

    def check(self, launch: Launch, device: torch.device, mixed_precision: str, accumulation: int) -> None:
        """Raise `ConfigurationError` if the state that existed before the run contradicts the fit. All ranks, no messages."""
        process, accelerator, gradients = self._before
        if process:
            _check_process(process, launch, device)
        if accelerator:
            _check_accelerator(accelerator, mixed_precision)
            steps = gradients.get("plugin_kwargs", {}).get("num_steps", 1)
            if steps not in (1, accumulation):
                raise ConfigurationError(
                    f"Accelerator(gradient_accumulation_steps={steps}) was built before the fit, which accumulates {accumulation} "
                    f"micro-batches: use Trainer(gradient_accumulation_steps={steps}), {_FORGET}"
                )

    def set_aside(self, distributed_type: str) -> None:
        """Keep the state of the process, which a new Accelerator uses, and clear the rest until `restore`. `distributed_type`: Accelerate's
        name for the process in this run."""
        AcceleratorState._shared_state.clear()
        GradientState._shared_state.clear()
        if PartialState._shared_state:  # with one process, some strategies have a process group and some have none
            PartialState._shared_state["distributed_type"] = DistributedType(distributed_type)

    def restore(self) -> None:
        """Restore the state from before the run."""
        for kind, before in zip(_KINDS, self._before, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(before)


def _check_process(process: dict[str, Any], launch: Launch, device: torch.device) -> None:
    place, number = process.get("process_index"), process.get("num_processes")
    if (place, number) != (launch.rank, launch.world_size):
        raise ConfigurationError(
            f"the PartialState (or Accelerator) that was made before the fit says process {place} of {number}, but this is rank "
            f"{launch.rank} of {launch.world_size}. Create it after the ranks are started"
            + (f" (on a CPU: with {_ON_A_CPU})" if device.type == "cpu" else "")
            + ", or create it only while the fit runs"
        )
    known = process["device"]
    if known.type != device.type or (None not in (known.index, device.index) and known.index != device.index):
        raise ConfigurationError(
            f"the PartialState (or Accelerator) that was made before the fit is on {known}, but the fit runs on {device}: to use "
            f"the CPU, set ACCELERATE_USE_CPU=true and make it with {_ON_A_CPU}; otherwise leave out both the variable and the "
            "argument"
        )


def _check_accelerator(accelerator: dict[str, Any], mixed_precision: str) -> None:
    asked = accelerator.get("_mixed_precision", "no")
    if asked not in ("no", mixed_precision):
        raise ConfigurationError(
            f"Accelerator(mixed_precision={asked!r}) was built before the fit, which computes in {mixed_precision!r}: use "
            f"Trainer(precision={asked!r}), {_FORGET}"
        )
    plugins = [
        name
        for name in ("fsdp_plugin", "deepspeed_plugins", "megatron_lm_plugin", "parallelism_config")
        if accelerator.get(name)
    ]
    dynamo = accelerator.get("dynamo_plugin")
    if dynamo is not None and str(getattr(dynamo.backend, "value", dynamo.backend)) != "NO":
        plugins.append("dynamo_plugin")
    if plugins:
        raise ConfigurationError(
            f"Accelerator({plugins[0]}=...) was built before the fit, which would ignore it: pass its options to the Trainer "
            f"(strategy='fsdp:offload=cpu', strategy='zero3:config=FILE' or compile=) and remove it from that Accelerator, {_FORGET}"
        )
