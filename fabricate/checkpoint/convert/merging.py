"""Merge the adapters of a checkpoint into their base model. transformers reads the result without peft and without the quantising library.

The base is loaded as in the run, quantised too, so that the adapters are merged into the weights that they were trained with. Must not
know: runs, ranks.
"""

from __future__ import annotations

import warnings
from collections import Counter
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
    """Write the base model of a checkpoint (or of the newest one of a run directory), dequantised and with the adapters merged, as the new
    folder `out`, in the layout of transformers; returns remarks for the user. Works on the CPU, whose memory must hold the whole model.

    base: the folder of the base model or its name on the hub; default: the place from which the run loaded it.

    Raises ConfigurationError if there is nothing to merge or no base, and CheckpointError if the checkpoint is damaged, if the base is not
    the one that it was trained with, or if `out` exists or cannot be written.
    """
    with new_path(out) as staging, Reader(find(checkpoint)) as reader:
        reader.verify()
        record = _record(reader)
        place = base or record["base"]
        model = _load(record, place)
        label, config = _adapter(reader, record, place)
        adapted = _adapted(model, config, label)
        _check_shapes(reader, record, adapted, place)
        _compare(reader, record, adapted)
        if getattr(model.config, "quantization_config", None) is not None:
            _forget_quantisation(model)  # before unload(), which IA3 refuses for a quantised model
            _dequantise(adapted.unload())
            model.tie_weights()  # unload() has replaced layers of modules_to_save by copies
            config.init_lora_weights = True  # "olora" has changed the weights already, and must not do it again
            with warnings.catch_warnings():  # peft chooses fan_in_fan_out by the class of each layer, and warns
                warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
                adapted = _adapted(model, config, label)
        outside = _fill(reader, record, adapted)
        _untie(adapted)
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
    """The base model, on the CPU, quantised as in the run."""
    import transformers
    from transformers.quantizers.auto import AutoQuantizationConfig

    if not place:
        raise ConfigurationError(
            "the checkpoint names no place of its base model, because the script built it from a configuration. In the script, write "
            "the base model into a folder with save_pretrained, before peft adapts it, and give this folder with --base"
        )
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
    """The name and the peft configuration of the checkpoint's only adapter."""
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
    """`model` with a new adapter `label`, whose weights are not loaded yet."""
    import peft

    return peft.get_peft_model(model, config, adapter_name=label)


def _inside(record: Any, adapted: torch.nn.Module) -> torch.nn.Module:
    """A module that contains `adapted` under the name that it had in the run."""
    module: torch.nn.Module = adapted
    for name in reversed(record["prefix"].split(".")[:-1]):
        outer = torch.nn.Module()
        outer.add_module(name, module)
        module = outer
    return module


def _check_shapes(reader: Reader, record: Any, adapted: Any, place: str) -> None:
    """Raise CheckpointError if a saved weight has another shape than in the base, as after resize_token_embeddings."""
    for name, parameter in _inside(record, adapted).named_parameters():
        saved = reader.manifest.tensors.get(f"model/{name}")
        if saved is not None and tuple(saved.shape) != tuple(parameter.shape):
            raise CheckpointError(
                f"checkpoint {reader.path}: {name} has the shape {tuple(saved.shape)}, but {tuple(parameter.shape)} with the base model "
                f"{place!r}. If the script changed the base (resize_token_embeddings), do the same in a script, write the base into a "
                "folder with save_pretrained, and give this folder with --base"
            )


def _compare(reader: Reader, record: Any, adapted: Any) -> None:
    """Raise CheckpointError unless the base is the one that the adapters were trained with."""
    module = _inside(record, adapted)
    quantised, left_out = quantised_weights(module), shared_state(reader)["module"].get("frozen", {})
    for name, parameter in module.named_parameters():
        if name in left_out and name not in quantised and digest(parameter.detach()) != left_out[name]:
            parameter.data = parameter.data.float()  # peft's prepare_model_for_kbit_training does the same
    compare_frozen(reader, module, Single())


def _forget_quantisation(model: Any) -> None:
    """Remove what transformers noted about the quantisation from `model` and its configuration."""
    for holder, attribute in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(holder, attribute):
            delattr(holder, attribute)
    for attribute in ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method"):
        vars(model).pop(attribute, None)


def _dequantise(model: Any) -> None:
    """Replace quantised layers of `model` by plain layers."""
    for name, weight in quantised_weights(model).items():
        path, _, _ = name.rpartition(".")
        parent, _, attribute = path.rpartition(".")
        old = model.get_submodule(path)
        values = dequantised(weight).float()
        setattr(model.get_submodule(parent), attribute, _plain_layer(old, values))


def _plain_layer(old: Any, values: torch.Tensor) -> torch.nn.Module:
    """The layer that the quantised layer `old` was made from, with the weight `values`."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(old, torch.nn.Embedding):
        return torch.nn.Embedding.from_pretrained(values, padding_idx=old.padding_idx)  # type: ignore[no-untyped-call,no-any-return]
    outputs, inputs = values.shape
    plain: Any = torch.nn.Linear(inputs, outputs, device="meta")
    if getattr(old, "source_cls", None) is Conv1D:  # whose weight transformers transposed before it quantised it
        plain, values = Conv1D(outputs, inputs), values.T.contiguous()  # type: ignore[no-untyped-call]
    plain.weight, plain.bias = torch.nn.Parameter(values, requires_grad=False), old.bias
    return plain  # type: ignore[no-any-return]


def _fill(reader: Reader, record: Any, adapted: Any) -> list[str]:
    """Copy the weights of the checkpoint into the model. Returns the names of those that the model does not have."""
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


def _untie(adapted: Any) -> None:
    """Give each layer with an adapter a weight of its own: a merge into a weight that another layer shares would change both."""
    holders = Counter(id(weight) for _, weight in adapted.named_parameters(remove_duplicate=False))
    for layer in adapted.modules():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        if weight is not None and holders[id(weight)] > 1:
            layer.base_layer.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)


def _save_tokenizer(place: str, folder: Path) -> list[str]:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    # transformers makes one from config.json alone, which knows special tokens and at most one other
    if tokenizer is None or len(tokenizer) <= len(tokenizer.added_tokens_encoder) + 1:
        return ["the base model has no tokenizer. Add its files if the model needs one"]
    tokenizer.save_pretrained(folder)
    return []
