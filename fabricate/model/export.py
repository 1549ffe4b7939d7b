"""RUN_DIR/model/: the weights as plain safetensors, or as the model inside writes them. Must not know: checkpoints, the loop."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fabricate.checkpoint.format import directory as format
from fabricate.checkpoint.state.logical import export_tensors, whole_chunk
from fabricate.model.building import adapted_models, pretrained_models
from fabricate.module import overrides

if TYPE_CHECKING:
    from fabricate.strategies.base import Strategy
    from fabricate.training.run_state import Run


def export(run: Run) -> Path | None:
    """Write RUN_DIR/model/: the weights as plain safetensors, one tensor in memory at a time. All ranks."""
    if run.run_dir is None:
        return None
    final, staging = run.run_dir / "model", run.run_dir / ".model-new"
    if run.engine.rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    run.engine.barrier()
    if overrides(run.module, "export"):
        run.module.export(staging)
    else:
        _export(run, staging)
    run.engine.barrier()
    if run.engine.rank == 0:
        old = run.run_dir / ".model-old"
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        staging.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    run.engine.barrier()
    if run.calls.on_export is not None:
        run.calls.on_export(run.trainer, run.module, final)
    return final


def _export(run: Run, path: Path) -> None:
    models, adapted = pretrained_models(run.module), adapted_models(run.module)
    model: Any = models[0] if len(models) == 1 and not adapted else run.module
    main = run.engine.rank == 0
    strategy = run.engine.strategy
    # Of a prompt peft saves what its encoder answers, which with shards would take a forward of the whole model.
    prompted = any(each.active_peft_config.is_prompt_learning for each in adapted)
    if len(adapted) == 1 and not (prompted and strategy.shards_parameters):
        _export_adapter(adapted[0], strategy, path if main else None)
    elif model is not run.module and not strategy.shards_parameters:
        if main:
            model.save_pretrained(path)
    else:
        tensors = export_tensors(model, strategy)
        if not main:
            for _, tensor in tensors:
                strategy.gather(tensor)  # in the order in which rank 0 writes: one whole tensor exists at a time
        else:
            chunks = [whole_chunk(name, tensor, strategy) for name, tensor in tensors]
            format.write_plain_safetensors(path / "model.safetensors", chunks, metadata={"format": "pt"})
            if model is not run.module:
                model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
                model.config.save_pretrained(path)
                if getattr(model, "generation_config", None) is not None:
                    model.generation_config.save_pretrained(path)
    if main:
        for attribute in vars(run.module).values():
            if (
                type(attribute).__module__.startswith("transformers")
                and hasattr(attribute, "save_pretrained")
                and not isinstance(attribute, torch.nn.Module)
            ):
                attribute.save_pretrained(path)


def _export_adapter(model: Any, strategy: Strategy, path: Path | None) -> None:
    """What peft saves of its model, in its own layout: the adapter and its configuration. All ranks; `path` on rank 0."""
    from peft import get_peft_model_state_dict

    live = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    saved = {id(tensor) for tensor in get_peft_model_state_dict(model, state_dict=live).values()}
    whole = {name: strategy.gather(tensor).cpu() for name, tensor in live.items() if id(tensor) in saved}
    if path is not None:
        model.save_pretrained(path, state_dict=whole)
