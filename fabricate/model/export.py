"""Export of a trained module's weights: as plain safetensors, or in the format of the transformers or peft model inside. Must not know:
checkpoints, the loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fabricate.checkpoint.format import directory as format
from fabricate.checkpoint.state.logical import export_tensors, whole_chunk
from fabricate.errors import few
from fabricate.model.building import adapted_models, pretrained_models
from fabricate.strategies.base import Strategy
from fabricate.strategies.quantised import quantised_weights


def notes_of_export(module: torch.nn.Module, strategy: Strategy) -> Iterator[str]:
    """Notes if `export_model` leaves out parameters: those outside of a transformers model or an adapter in `module`, or quantised ones."""
    models, adapters = pretrained_models(module), adapted_models(module)
    written = adapters if len(adapters) == 1 else models if len(models) == 1 and not adapters else [module]
    inside = {id(parameter) for model in written for parameter in model.parameters()}
    if outside := [name for name, parameter in module.named_parameters() if id(parameter) not in inside]:
        what = "peft adapter" if adapters else f"transformers model {type(written[0]).__name__}"
        yield (
            f"RUN_DIR/model/ will hold the {what} alone, without {few(outside)}, which are in checkpoints only. To write them too, define "
            "export(self, path); `fabricate ckpt export` writes all weights of a checkpoint"
        )
    model_writes_itself = written != [module] and not (strategy.shards_parameters and not adapters)
    if not model_writes_itself and (quantised := list(quantised_weights(module))):
        yield (
            f"RUN_DIR/model/ will hold the weights without {few(quantised)}: as in checkpoints, quantised weights are left out, which the "
            "script loads. To write them too, define export(self, path)"
        )


def export_model(module: torch.nn.Module, strategy: Strategy, path: Path, *, main: bool) -> None:
    """Write the weights of `module` into the folder `path`, one whole tensor in memory at a time: in the format of the only transformers
    model or peft adapter inside, else as `model.safetensors`. All ranks; the rank with `main` writes."""
    models, adapters = pretrained_models(module), adapted_models(module)
    # For a prompt, peft saves the output of its encoder. With sharded parameters, that would need a forward of the
    # whole model.
    prompted = any(adapter.active_peft_config.is_prompt_learning for adapter in adapters)
    model: Any = models[0] if len(models) == 1 and not adapters else None
    if len(adapters) == 1 and not (prompted and strategy.shards_parameters):
        _export_adapter(adapters[0], strategy, path if main else None)
    elif model is None:
        _export_tensors(module, strategy, path if main else None)
    elif not strategy.shards_parameters:
        if main:
            model.save_pretrained(path)
    else:
        _export_tensors(model, strategy, path if main else None)
        if main:
            _save_configuration(model, path)
    if main:
        _save_processors(module, path)


def _export_tensors(module: torch.nn.Module, strategy: Strategy, path: Path | None) -> None:
    """Write model.safetensors, without quantised weights. `path` is None on the ranks that do not write."""
    quantised = quantised_weights(module)
    tensors = [(name, tensor) for name, tensor in export_tensors(module, strategy) if name not in quantised]
    chunks = [whole_chunk(name, tensor, strategy) for name, tensor in tensors]
    if path is None:
        for (_, tensor), chunk in zip(tensors, chunks, strict=True):
            if chunk.count:  # as on the writing rank, in the same order, one whole tensor at a time
                _wait(strategy.gather(tensor))
        return
    format.write_plain_safetensors(path / "model.safetensors", chunks, metadata={"format": "pt"})


def _wait(tensor: torch.Tensor) -> None:
    """Wait until the device has computed `tensor`. Otherwise this rank would queue all gathers at once, and the last one could time out
    while the other rank writes the tensors before it."""
    if tensor.device.type != "cpu":
        torch.accelerator.current_stream(tensor.device).synchronize()


def _save_configuration(model: Any, path: Path) -> None:
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # sharding renames the class
    model.config.save_pretrained(path)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(path)


def _save_processors(module: torch.nn.Module, path: Path) -> None:
    """The tokenizers and processors of transformers that `module` holds as attributes."""
    for attribute in vars(module).values():
        from_transformers = type(attribute).__module__.startswith("transformers")
        if from_transformers and hasattr(attribute, "save_pretrained") and not isinstance(attribute, torch.nn.Module):
            attribute.save_pretrained(path)


def _export_adapter(model: Any, strategy: Strategy, path: Path | None) -> None:
    """Write the adapter and its configuration in the format of peft. All ranks; `path` is None on the ranks that do not write."""
    from peft import get_peft_model_state_dict

    live = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    saved = {id(tensor) for tensor in get_peft_model_state_dict(model, state_dict=live).values()}
    whole = {name: strategy.gather(tensor).cpu() for name, tensor in live.items() if id(tensor) in saved}
    if path is not None:
        model.save_pretrained(path, state_dict=whole)
