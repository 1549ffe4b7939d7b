"""A model and the adapters of a checkpoint as one plain model, that transformers reads without peft and without the quantising library.

The base is loaded as it was in the run, so that what is merged is what the adapters were trained over. Must not know: runs, ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fabricate.checkpoint.convert.exporting import new_path
from fabricate.checkpoint.format import codec
from fabricate.checkpoint.format.directory import Reader, find
from fabricate.checkpoint.format.schema import shared_state
from fabricate.checkpoint.state.logical import compare_frozen, digest, named_tensors, read_whole
from fabricate.errors import CheckpointError, ConfigurationError, few
from fabricate.strategies.quantised import dequantised, quantised_weights
from fabricate.strategies.single import Single

__all__ = ["merge"]


def merge(checkpoint: Path, out: Path, base: str | None = None) -> list[str]:
    """Write the base model of a checkpoint (or of a run directory's newest) with its adapters merged, dequantised, as the new folder
    `out`, in the layout of transformers; returns remarks for the user. On the CPU, where the whole model has to fit.

    base: where the base is now, a folder or a name of the hub; default: from where the run loaded it.

    Raises ConfigurationError where there is nothing to merge or no base, CheckpointError for a damaged checkpoint, for another base
    than it was trained over, and where `out` exists or cannot be written.
    """
    with new_path(out) as staging, Reader(find(checkpoint)) as reader:
        reader.verify()
        record = _record(reader)
        place = base or record["base"]
        model = _load(record, place)
        label, config = _adapter(reader, record, place)
        _compare(reader, record, _adapted(model, config, label))
        _dequantise(model)
        adapted = _adapted(model, config, label)
        outside = _fill(reader, record, adapted)
        adapted.merge_and_unload().to(getattr(torch, record["dtype"])).save_pretrained(staging)
        remarks = [f"left out, because they are not part of the transformers model: {few(outside)}"] if outside else []
        return remarks + _save_tokenizer(place, staging)


def _record(reader: Reader) -> Any:
    tree = shared_state(reader)["module"].get("adapted")
    record = codec.decode(tree, lambda name: None)
    if not isinstance(record, dict) or not {"prefix", "adapters", "base", "class", "dtype"} <= record.keys():
        raise ConfigurationError(
            f"checkpoint {reader.path} does not hold the adapters of exactly one peft model over a transformers model, so nothing can "
            "be merged. To write the weights of another model, use `fabricate ckpt export`"
        )
    return record


def _load(record: Any, place: str) -> Any:
    """The base model, on the CPU, quantised as it was in the run."""
    import transformers
    from transformers.quantizers.auto import AutoQuantizationConfig

    kind = getattr(transformers, record["class"], None)
    if kind is None:
        raise ConfigurationError(
            f"the base model is a {record['class']}, a class that transformers does not have. Merge in a script, with peft's "
            "merge_and_unload()"
        )
    options: dict[str, Any] = {"dtype": getattr(torch, record["dtype"])}
    try:
        quantised = getattr(transformers.AutoConfig.from_pretrained(place), "quantization_config", None)
        if record["quantization"] is not None and quantised is None:
            config = AutoQuantizationConfig.from_dict(record["quantization"])
            options |= {"quantization_config": config, "device_map": {"": "cpu"}}
        return kind.from_pretrained(place, **options)
    except (OSError, ValueError) as exc:
        reason = str(exc).partition("\n")[0]
        raise ConfigurationError(
            f"the base model {place!r} cannot be loaded ({reason}). Give its present place with --base"
        ) from exc


def _adapter(reader: Reader, record: Any, place: str) -> tuple[str, Any]:
    """The one adapter, with its name."""
    import peft

    if len(record["adapters"]) != 1:
        raise ConfigurationError(
            f"checkpoint {reader.path} has the adapters {', '.join(sorted(record['adapters']))}, but only one can be merged. "
            "Merge several in a script, with peft's add_weighted_adapter and merge_and_unload()"
        )
    ((label, options),) = record["adapters"].items()
    config: Any = peft.PeftConfig.from_peft_type(**options | {"base_model_name_or_path": place})  # type: ignore[no-untyped-call]
    if config.is_prompt_learning:
        raise ConfigurationError(
            f"checkpoint {reader.path}: a {config.peft_type} adapter puts tokens before the input, so it cannot be merged into "
            "the weights. Use it unmerged: RUN_DIR/model/ has it in the format of peft"
        )
    return label, config


def _adapted(model: Any, config: Any, label: str) -> Any:
    """`model` with new adapters."""
    import peft

    return peft.get_peft_model(model, config, adapter_name=label)


def _inside(record: Any, adapted: torch.nn.Module) -> torch.nn.Module:
    """A module in which `adapted` has the name that it had in the run."""
    module: torch.nn.Module = adapted
    for name in reversed(record["prefix"].split(".")[:-1]):
        outer = torch.nn.Module()
        outer.add_module(name, module)
        module = outer
    return module


def _compare(reader: Reader, record: Any, adapted: Any) -> None:
    """Raise CheckpointError unless the base is the one that the adapters were trained over; take them out again."""
    module = _inside(record, adapted)
    quantised, left_out = quantised_weights(module), shared_state(reader)["module"].get("frozen", {})
    for name, parameter in module.named_parameters():
        if name in left_out and name not in quantised and digest(parameter.detach()) != left_out[name]:
            parameter.data = parameter.data.float()  # as peft's prepare_model_for_kbit_training does
    compare_frozen(reader, module, Single())
    adapted.unload()


def _dequantise(model: Any) -> None:
    """Plain layers in the place of quantised ones, and a configuration without any quantisation."""
    for name, weight in quantised_weights(model).items():
        path, _, _ = name.rpartition(".")
        parent, _, attribute = path.rpartition(".")
        old = model.get_submodule(path)
        values = dequantised(weight).float()
        plain: torch.nn.Module
        if isinstance(old, torch.nn.Embedding):
            plain = torch.nn.Embedding.from_pretrained(values, padding_idx=old.padding_idx)  # type: ignore[no-untyped-call]
        else:
            plain = torch.nn.Linear(values.shape[1], values.shape[0], device="meta")
            plain.weight, plain.bias = torch.nn.Parameter(values, requires_grad=False), old.bias
        setattr(model.get_submodule(parent), attribute, plain)
    for holder, attribute in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(holder, attribute):
            delattr(holder, attribute)
    for attribute in ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method"):
        vars(model).pop(attribute, None)


def _fill(reader: Reader, record: Any, adapted: Any) -> list[str]:
    """Copy what the checkpoint holds into the model; the names of what is not in it."""
    saved = {name.removeprefix("model/") for name in reader.manifest.tensors if name.startswith("model/")}
    module = _inside(record, adapted)
    parameters, buffers, _ = named_tensors(module)
    with torch.no_grad():
        for name, tensor in (*parameters.items(), *buffers.items()):
            if name in saved:
                tensor.copy_(read_whole(reader, f"model/{name}"))
    left_out = shared_state(reader)["module"].get("frozen", {})
    if missing := [name for name in parameters if name not in saved and name not in left_out]:
        raise CheckpointError(
            f"checkpoint {reader.path} lacks {few(missing)}. If it was saved with another version of peft, install that version"
        )
    return sorted(name for name in saved if name not in parameters and name not in buffers)


def _save_tokenizer(place: str, folder: Path) -> list[str]:
    import transformers

    try:
        transformers.AutoTokenizer.from_pretrained(place).save_pretrained(folder)
    except (OSError, ValueError, KeyError):
        return ["the base model has no tokenizer. Add its files if the model needs one"]
    return []
