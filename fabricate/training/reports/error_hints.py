"""Hints for users on errors of torch (out of memory, tensors on different devices, a parameter without gradient) and of Python (a plugin
that calls self.log).

The exception keeps its type; `explain` returns a note for it. Must not know: the loop.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from fabricate.distributed.trials import out_of_memory
from fabricate.errors import few, size_text
from fabricate.hooks import Listener
from fabricate.model.memory import available, need, total
from fabricate.strategies.ddp import UNUSED
from fabricate.training.state.run_state import Run

_APART = ("on the same device", "is not on the expected device", "same device type", "device of")
_LATE = (
    "a device runs asynchronously and reports its errors some calls later, so the fault may lie before the traceback, the step "
    "and the batch named here. To see the line, run once with CUDA_LAUNCH_BLOCKING=1 in the environment, or a few steps on a "
    "CPU. The usual cause is an index out of range (a label outside of the classes, a token outside of the vocabulary)"
)
_COMPILED_TOO_OFTEN = (
    "compile=: a block was compiled for more kinds of input than its limit, which rows of changing length, a mask that is sometimes None "
    "or a number that changes from batch to batch can cause. Pad all rows to one length, set use_cache=False for a model of transformers, "
    "or leave compile= out"
)
_MISSED = "Expected to have finished reduction in the prior iteration"


def explain(run: Run, exc: BaseException) -> str:
    """A note for an exception that a user can resolve; "" for others. One rank, no collectives."""
    text = str(exc)
    if out_of_memory(exc):
        return _no_room(run)
    if isinstance(exc, torch.AcceleratorError):
        return _LATE
    if type(exc).__name__ == "FailOnRecompileLimitHit":
        return _COMPILED_TOO_OFTEN
    if isinstance(exc, AttributeError) and exc.name in ("log", "log_dict") and isinstance(exc.obj, Listener):
        return (
            "a plugin logs through the module: take module as an argument of the hook, and call module.log(name, value)"
        )
    if "Expected more than 1 value per channel" in text:
        return (
            "a batch norm needs several rows, but the last micro-batch of an epoch has one row. Pass train as a DataLoader with "
            "drop_last=True, which leaves out the last, incomplete update, or choose another batch size"
        )
    return _of_torch(run, exc, text) if isinstance(exc, RuntimeError) else ""


def _of_torch(run: Run, exc: RuntimeError, text: str) -> str:
    if _MISSED in text:
        return _missed(run, text)
    if "device" in text and any(word in text for word in _APART):
        return _apart(run, exc)
    if "backward through the graph a second time" in text:
        return (
            "the loop calls backward on the loss that training_step returns; leave out a backward of your own, and detach() what is "
            "kept from one batch to the next"
        )
    if "does not require grad" in text and run.now.stage != "train":
        return (
            "evaluations run without gradients. A step that needs derivatives of its outputs, as of a differential equation, computes them "
            "under `with torch.enable_grad():`, from inputs with requires_grad_()"
        )
    if isinstance(exc, NotImplementedError) and "Sparse" in text:
        return (
            "sparse gradients, those of an Embedding(sparse=True), have no norm that fabricate can compute; leave out "
            "max_grad_norm= and hooks that take grad_norm, or use sparse=False"
        )
    mixed = "mixed torch.Tensor and DTensor" in text
    if "Sharding propagation failed" in text or (mixed and _in_optimizer(exc)):
        return (
            f"torch does not support this operation on sharded weights (strategy={run.engine.strategy.name!r}): use another "
            "optimizer or operation, or strategy='ddp'"
        )
    if mixed:
        return (
            f"a parameter was used outside of the unit that holds it{_where(run, exc)}: strategy={run.engine.strategy.name!r} gathers "
            "a unit's parameters while its forward runs; call that layer (in a hook: inside trainer.in_forward), or choose strategy='ddp'"
        )
    return ""


def _no_room(run: Run) -> str:
    engine, settings = run.engine, run.settings
    strategy, on_device = engine.strategy, engine.device.type != "cpu"
    room, where = available(engine.device, engine.launch.local_world_size)
    optimizers = run.optim.optimizers or (ValueError("not made yet") if run.source is not None else None)
    needed = need(run.module, optimizers, lambda tensor: strategy.local_part(tensor).shape)
    per_rank = needed.per_rank(strategy, engine.world_size)
    takes = ", ".join(f"{kind} {size_text(count)}" for kind, count in per_rank.items())
    held = f"about {size_text(total(per_rank, on_device))} on each rank ({takes}), activations not counted"
    text = f"out of memory on rank {engine.rank}: strategy={strategy.name!r} keeps {held}; a rank has {size_text(room)} ({where})."
    ways = []
    if not strategy.shards_parameters:
        ways.append(
            "divide them over more ranks with strategy='fsdp'"
            if engine.world_size > 1
            else "start several ranks with strategy='fsdp'"
        )
    elif strategy.name == "fsdp":
        besides = "'fsdp:offload=cpu'" if on_device else "MALLOC_MMAP_THRESHOLD_=1048576 in the environment"
        ways.append(f"start more ranks, strategy='fsdp:activation_checkpointing=true' or {besides}")
    if run.source is not None:
        ways.append(
            f"halve batch_size and double gradient_accumulation_steps ({settings.gradient_accumulation_steps or 1}): the update "
            "stays the same; fit(..., batch_size=BatchSizeFinder()) finds the largest that fits"
        )
    if engine.precision.compute_dtype == "float32":
        ways.append("precision='bf16' halves activations")
    return f"{text} What helps: {'; '.join(ways)}"


def _missed(run: Run, text: str) -> str:
    names = [name for name, parameter in run.module.named_parameters() if parameter.requires_grad]
    indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    missed = [names[int(index)] for index in indices[1].split() if int(index) < len(names)] if indices else []
    return f"no gradient reached {few(missed) or 'some parameters'} in an update, and {UNUSED}"


def _apart(run: Run, exc: BaseException) -> str:
    device = run.engine.device
    elsewhere = [f"{name} ({other})" for name, other in _tensors_of(run.module) if other.type != device.type]
    frame = _frame(run, exc)
    if frame is not None:
        elsewhere += [
            f"{name} ({tensor.device})" for name, tensor in _locals(frame) if tensor.device.type != device.type
        ]
    return (
        f"rank {run.engine.rank} computes on {device}{_where(run, exc)}, but these are on another device: "
        f"{few(elsewhere) or 'tensors made there'}. Make tensors in a step with device=self.device (or like another: torch.zeros_like, "
        "x.new_zeros), keep lasting ones with register_buffer, so that they move along with the module"
    )


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.device]]:
    """All tensors that `module` holds, registered or not."""
    for name, child in module.named_modules():
        for key, value in {**child._parameters, **child._buffers, **vars(child)}.items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}".lstrip("."), value.device


def _frame(run: Run, exc: BaseException) -> FrameType | None:
    """The innermost frame of the traceback in a method of the module or of a layer inside it."""
    inside = {id(child) for child in run.module.modules()}
    innermost, step = None, exc.__traceback__
    while step is not None:
        if id(step.tb_frame.f_locals.get("self")) in inside:
            innermost = step.tb_frame
        step = step.tb_next
    return innermost


def _in_optimizer(exc: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(exc.__traceback__))
    return any(isinstance(frame.f_locals.get("self"), torch.optim.Optimizer) for frame in frames)


def _where(run: Run, exc: BaseException) -> str:
    frame = _frame(run, exc)
    if frame is None:
        return ""
    layer = frame.f_locals["self"]
    name = next((n for n, child in run.module.named_modules() if child is layer), "")
    return f", in {frame.f_code.co_name} of {name or type(layer).__name__}"


def _locals(frame: FrameType) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in frame.f_locals.items():
        values: Any = {name: value}
        if isinstance(value, Mapping):
            values = {f"{name}[{key!r}]": each for key, each in value.items()}
        elif isinstance(value, tuple | list):
            values = {f"{name}[{number}]": each for number, each in enumerate(value)}
        for where, each in values.items():
            if isinstance(each, torch.Tensor):
                yield where, each
