"""Save training state to a checkpoint and load it: which tensors and values exist, their names, and where they are restored.

Logical names: "model/NAME", "optimizer/OPTIMIZER/NAME/KEY", "plugin/PLUGIN/...", "rank/00001/rng/...". Names of parameters are those of
`module.named_parameters()`, under every strategy. state.json holds the values that all ranks share, and files like rank-00000.json those of
one rank.

Must not know: the loop, when to save, directories and commits (fabricate.checkpoint.format.directory).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import xxhash

from fabricate.checkpoint.format.codec import decode, encode
from fabricate.checkpoint.format.directory import Chunk, Reader, TensorRecord, find
from fabricate.checkpoint.format.schema import shared_state
from fabricate.checkpoint.state.staging import Values, bytes_of, held
from fabricate.errors import CheckpointError, ConfigurationError
from fabricate.strategies.base import Strategy
from fabricate.strategies.quantised import Quantised, quantised_weights
from fabricate.strategies.sharding import inner_tensors, is_sharded, is_wrapper
from fabricate.strategies.single import Single

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
SAVED_DTYPES = tuple(_CODES)
DTYPES = {code: dtype for dtype, code in _CODES.items()}
Groups = list[dict[str, torch.nn.Parameter]]
"""The parameters of an optimizer by name, one mapping per parameter group."""
Orders = Mapping[str, Sequence[int]]
"""By logical name, what `memory_order` returned, of tensors where that is not empty."""
_ROW_MAJOR: Orders = MappingProxyType({})
_WRITERS = 8
"""The largest number of ranks that share the writing of a range that they all hold. It is limited because a rank that resumes opens the
files of all these ranks, and the manifest has a record for each slice. A reader can keep more files and blocks than this."""


def chunk(name: str, tensor: torch.Tensor, start: int = 0, shape: tuple[int, ...] | None = None) -> Chunk:
    """A chunk of the logical tensor `name`, which has the shape `shape` (default: that of `tensor`). `tensor`: the elements of the chunk;
    `start`: the index of the first."""
    whole = tuple(tensor.shape) if shape is None else shape
    return Chunk(name, start, tensor.numel(), _code(name, tensor.dtype), whole, held(tensor))


def _code(name: str, dtype: torch.dtype) -> str:
    if dtype not in _CODES:
        raise CheckpointError(
            f"{name} has the dtype {dtype}, which a checkpoint cannot hold; use one of {', '.join(map(str, _CODES))}"
        )
    return _CODES[dtype]


def digest(tensor: torch.Tensor) -> str:
    """A digest of the values of `tensor`, equal for equal bits. Waits for the device."""
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor))


def read(reader: Reader, name: str, start: int = 0, count: int | None = None) -> torch.Tensor:
    """Elements ``[start, start + count)`` of a logical tensor, 1-D on the CPU. Every block read is verified."""
    record = reader.manifest.tensors[reader.manifest.aliases.get(name, name)]
    values = torch.empty(record.num_elements - start if count is None else count, dtype=DTYPES[record.dtype])
    reader.read_into(name, bytes_of(values), start)
    return values


def read_whole(reader: Reader, name: str, orders: Orders = _ROW_MAJOR) -> torch.Tensor:
    """A logical tensor in its own shape and order in memory, on the CPU."""
    tensor = read(reader, name).reshape(reader.manifest.tensors[name].shape)
    return in_order(tensor, orders[name]) if name in orders else tensor


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of `tensor` from the largest stride to the smallest; empty if that is their own order, or if the tensor has gaps or
    overlaps. Matrix products and sums of another order are rounded differently."""
    order = sorted(range(tensor.ndim), key=lambda dimension: -tensor.stride()[dimension])
    return order if not tensor.is_contiguous() and tensor.permute(order).is_contiguous() else []


def in_order(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """`tensor` with the order in memory that `memory_order` returned."""
    back = sorted(range(tensor.ndim), key=order.__getitem__)
    return tensor.permute(*order).contiguous().permute(*back)


def named_tensors(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, str]]:
    """Parameters by name, buffers by name, and the first name of each shared tensor by its other names."""
    parameters: dict[str, torch.Tensor] = dict(module.named_parameters())
    buffers: dict[str, torch.Tensor] = dict(module.named_buffers())
    first = {id(t): n for n, t in (*parameters.items(), *buffers.items())}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return parameters, buffers, {n: first[id(t)] for n, t in every if first[id(t)] != n}


def transient_names(module: torch.nn.Module) -> set[str]:
    """The names of the buffers that `state_dict()` leaves out. A checkpoint holds these buffers too."""
    names: set[str] = set()
    for prefix, child in module.named_modules():
        names |= {f"{prefix}.{name}" if prefix else name for name in child._non_persistent_buffers_set}
    return names


class Saver:
    """Collects this rank's chunks for one checkpoint."""

    def __init__(self, strategy: Strategy, rank: int, world_size: int) -> None:
        self.strategy = strategy
        self.rank = rank
        self.world_size = world_size
        self.chunks: list[Chunk] = []
        self.tensors: dict[str, TensorRecord] = {}
        """The tensors that the checkpoint must hold, also those that other ranks write."""
        self.exchanged: list[Strategy.Part] = []
        """The parts whose values ranks must exchange before the chunks are written. All ranks exchange them in this order."""

    def shared(self, name: str, tensor: torch.Tensor) -> None:
        """Add a parameter, or a tensor sharded like one. Each rank adds its part, so nothing is gathered."""
        self.part(name, self.strategy.local_part(tensor))

    def part(self, name: str, part: Strategy.Part) -> None:
        """Add this rank's part of a logical tensor. If several ranks hold the same range, at most `_WRITERS` of them, evenly spaced, each
        add a slice of it."""
        self._know(name, part.dtype, part.shape)
        copy, copies = (self.rank, self.world_size) if part.replicated else (part.copy, part.copies)
        writers = min(copies, _WRITERS)
        begin, end = (part.count * -(-number * writers // copies) // writers for number in (copy, copy + 1))
        if not part.in_place:
            self.exchanged.append(part)
        if begin < end or (self.rank == 0 and 0 in part.shape):
            values = Values(lambda: part.values.reshape(-1)[begin:end])
            self.chunks.append(
                Chunk(name, part.start + begin, end - begin, _code(name, part.dtype), part.shape, values)
            )

    def whole(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that is the same on every rank; rank 0 writes it."""
        self._know(name, tensor.dtype, tuple(tensor.shape))
        if self.rank == 0:
            self.chunks.append(chunk(name, tensor))

    def own(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor of this rank alone; `name` contains the rank."""
        self.chunks.append(chunk(name, tensor))

    def _know(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if dtype in _CODES:  # other dtypes are an error when the chunk is made
            self.tensors[name] = TensorRecord(_CODES[dtype], shape)

    def model(self, module: torch.nn.Module, without: Container[str] = ()) -> dict[str, str]:
        """Add all parameters and buffers, except the parameters `without`. Returns the aliases of shared tensors."""
        parameters, buffers, aliases = named_tensors(module)
        for name, tensor in parameters.items():
            if name not in without:
                self.shared(f"model/{name}", tensor)
        for name, tensor in buffers.items():
            self.whole(f"model/{name}", tensor)
        return {f"model/{alias}": f"model/{name}" for alias, name in aliases.items() if name not in without}

    def optimizer(self, label: str, optimizer: torch.optim.Optimizer, groups: Groups) -> dict[str, Any]:
        """Add the state and the groups of one optimizer. Returns the part of them that is JSON."""
        values: dict[str, dict[str, Any]] = {}
        orders: dict[str, list[int]] = {}

        def whole(logical: str, tensor: torch.Tensor) -> None:
            if order := memory_order(tensor):
                orders[logical] = order
            self.whole(logical, tensor)

        for name, parameter in (pair for group in groups for pair in group.items()):
            for key, value in self.strategy.optimizer_state(optimizer, parameter).items():
                logical = f"optimizer/{label}/{name}/{key}"
                if isinstance(value, Strategy.Part):
                    _check_plain(logical, value, self.strategy)
                    if value.replicated and (order := memory_order(value.memory)):
                        orders[logical] = order
                    self.part(logical, value)
                elif is_wrapper(value):
                    inner = {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
                    values.setdefault(name, {})[key] = self.encode(inner, logical, whole)
                elif isinstance(value, torch.Tensor):
                    whole(logical, value)
                else:
                    values.setdefault(name, {})[key] = self.encode(value, logical, whole)
        saved_groups = [
            {"options": self.encode({k: v for k, v in g.items() if k != "params"}, f"optimizer/{label}/group[{n}]", self.whole),
             "names": list(names)}
            for n, (g, names) in enumerate(zip(optimizer.param_groups, groups, strict=True))
        ]  # fmt: skip
        kind = type(optimizer).__name__
        return {"kind": kind, "groups": saved_groups, "values": values, "memory_order": orders}

    def encode(self, value: object, path: str, put: Callable[[str, torch.Tensor], None]) -> Any:
        """Return `value` as tagged JSON. Tensors inside are passed to `put` with names that begin with `path`."""

        def tensor(where: str, leaf: object) -> str | None:
            if type(leaf).__module__ == "numpy" and hasattr(leaf, "tobytes"):
                return None  # small arrays stay in the JSON
            if isinstance(leaf, Strategy.Part):
                self.part(where, leaf)
                return where
            if not isinstance(leaf, torch.Tensor):
                return None
            if is_sharded(leaf):
                self.shared(where, leaf)
            else:
                put(where, leaf.detach())
            return where

        return encode(value, tensor, path)


def _check_plain(name: str, part: Strategy.Part, strategy: Strategy) -> None:
    """Raise `CheckpointError` for a shard that consists of other tensors. With a run_dir, this is found before the first step."""
    if is_wrapper(part.memory):
        raise CheckpointError(
            f"{name} is {type(part.memory).__name__}, which strategy={strategy.name!r} cannot save in parts. Use strategy='ddp' or another "
            "optimizer"
        )


def decode_with(reader: Reader, tree: object, device: torch.device | None = None, orders: Orders = _ROW_MAJOR) -> Any:
    """Return the value that `Saver.encode` encoded. Tensors are read whole, onto the CPU; those with dimensions then move to `device`."""

    def tensor(name: str) -> torch.Tensor:
        if name not in reader.manifest.tensors:
            raise CheckpointError(f"the saved state refers to the tensor {name!r}, which the checkpoint does not hold")
        value = read_whole(reader, name, orders)
        return value.to(device) if device and value.ndim else value  # optimizers keep counters on the CPU

    try:
        return decode(tree, tensor)
    except CheckpointError as exc:
        if str(reader.path) in str(exc):
            raise
        raise CheckpointError(f"checkpoint {reader.path}: {exc}") from exc


def decode_mapping(reader: Reader, tree: object, what: str) -> dict[str, Any]:
    """Like `decode_with`, but raises `CheckpointError` unless the value is a mapping. `what`: its name in the message."""
    value = decode_with(reader, tree)
    if not isinstance(value, dict):
        raise CheckpointError(
            f"checkpoint {reader.path}: {what} is not a mapping: the file is damaged or was not written by fabricate"
        )
    return value


def optimizer_groups(
    module: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], strategy: Strategy
) -> dict[str, Groups]:
    """The parameter groups of each optimizer. Raises `ConfigurationError` for a parameter that the module does not have."""
    names = {id(p): n for n, p in module.named_parameters()}
    groups: dict[str, Groups] = {}
    for label, optimizer in optimizers.items():
        groups[label] = []
        for group in strategy.optimizer_groups(optimizer):
            for parameter in group:
                if id(parameter) not in names:
                    raise ConfigurationError(
                        f"optimizer {label!r} holds a parameter of shape {tuple(parameter.shape)} that the module does not have. "
                        "Make it (or its layer) an attribute of the module, and take the parameters from self.parameters() in "
                        "configure_optimizers"
                    )
            groups[label].append({names[id(p)]: p for p in group})
    return groups


def frozen_digests(module: torch.nn.Module, frozen: Mapping[str, torch.Tensor], strategy: Strategy) -> dict[str, str]:
    """A digest of each frozen parameter by name, over all its values, or, for quantised weights, over codes and scales. All ranks; one
    whole tensor is gathered at a time."""
    quantised = quantised_weights(module)
    return {
        name: _quantised_digest(quantised[name], strategy) if name in quantised else digest(strategy.gather(parameter))
        for name, parameter in frozen.items()
    }


def _quantised_digest(weight: Quantised, strategy: Strategy) -> str:
    values = [digest(tensor) for tensor in inner_tensors(strategy.gather(weight.weight))]
    return xxhash.xxh3_128_hexdigest(" ".join([weight.form, *values, *map(digest, weight.scales)]).encode())


def compare_frozen(reader: Reader, module: torch.nn.Module, strategy: Strategy) -> None:
    """Raise `CheckpointError` unless the frozen weights that the checkpoint leaves out are bit-identical in `module`. All ranks, which
    gather as in `frozen_digests`. Call `compare_model` first."""
    parameters, _, others = named_tensors(module)
    left_out = _left_out(reader)
    names = {others.get(name, name): name for name in left_out}
    digests = frozen_digests(module, {name: parameters[name] for name in names if name in parameters}, strategy)
    wrong = [name for name, value in digests.items() if value != left_out[names[name]]]
    if wrong:
        adapted = shared_state(reader)["module"].get("adapted")
        base = f" (then loaded from {adapted['base']!r})" if isinstance(adapted, dict) and "base" in adapted else ""
        raise CheckpointError(
            f"checkpoint {reader.path} was saved without its frozen weights (save_frozen=False), and those of this module are not "
            f"the ones it was trained with: {_some(wrong)}. Load the same pretrained weights, in the same precision{base}"
        )


def _left_out(reader: Reader) -> dict[str, str]:
    """The digests of the frozen parameters that the checkpoint leaves out, by name."""
    digests = shared_state(reader)["module"].get("frozen", {})
    if not isinstance(digests, dict):
        raise CheckpointError(
            f"checkpoint {reader.path}: in state.json, module.frozen is not a mapping: the file is damaged or was not written by fabricate"
        )
    return digests


def compare_model(reader: Reader, module: torch.nn.Module, strategy: Strategy) -> dict[str, str]:
    """Map the logical name of every parameter and buffer of `module` to its name in the checkpoint. Raises `CheckpointError` if they do not
    match.

    A tensor with several names may be saved under any of them. A buffer outside the state dict may be missing on one side, or have another
    shape. Imported checkpoints have no such buffers, and a forward may make or resize a cache. The buffer then keeps the module's value,
    and is not in the result. A buffer of the state dict may have another shape if `load_state_dict` of its layer takes it.
    """
    parameters, buffers, others = named_tensors(module)
    live = {f"model/{n}": strategy.local_part(t) for n, t in (*parameters.items(), *buffers.items())}
    names = _possible_names(reader, live, others)
    saved = {name for name in reader.manifest.tensors if name.startswith("model/")}
    source = {name: there for name in live if (there := next((n for n in names[name] if n in saved), ""))}
    for name in transient_names(module):
        held = source.get(f"model/{name}")
        if held and tuple(reader.manifest.tensors[held].shape) != live[f"model/{name}"].shape:
            del source[f"model/{name}"]
    _check_complete(reader, module, names, source, saved)
    resized = {f"model/{prefix}{name}" for prefix, _, values in _resizing(reader, module, source) for name in values}
    for name, there in source.items():
        if name not in resized:
            _check_fits(reader, name, there, live[name])
    return source


def _resizing(
    reader: Reader, module: torch.nn.Module, source: Mapping[str, str]
) -> Iterator[tuple[str, torch.nn.Module, dict[str, torch.Tensor]]]:
    """The layers that have a buffer of another shape in the checkpoint, if their `load_state_dict` resizes it, as observers of torch.ao
    do: the prefix of the layer's names, the layer, and the saved values of its buffers."""
    for path, layer in module.named_modules():
        prefix = f"{path}." if path else ""
        buffers = {name: buffer for name, buffer in layer._buffers.items() if buffer is not None}
        there = {name: held for name in buffers if (held := source.get(f"model/{prefix}{name}"))}
        if any(tuple(reader.manifest.tensors[held].shape) != buffers[name].shape for name, held in there.items()):
            values = {name: read_whole(reader, held) for name, held in there.items()}
            if _takes(layer, values):
                yield prefix, layer, values


def _takes(layer: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> bool:
    """Whether `load_state_dict` of `layer` gives its buffers the shapes of `values`. Tried with copies of the buffers."""
    trial = object.__new__(type(layer))
    trial.__dict__.update(layer.__dict__)
    trial._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in layer._buffers.items()}
    trial._parameters, trial._modules = {}, {}
    try:
        trial.load_state_dict(values, strict=False)
    except Exception:  # torch's error about the shape, or one of a user's layer
        return False
    return all(trial.get_buffer(name).shape == value.shape for name, value in values.items())


def _possible_names(reader: Reader, live: Iterable[str], others: Mapping[str, str]) -> dict[str, list[str]]:
    """The names that each tensor of the module may have in the checkpoint. `others`: the further names of shared tensors."""
    names = {name: [name, reader.manifest.aliases.get(name, name)] for name in live}
    for other, name in others.items():
        names[f"model/{name}"].append(f"model/{other}")
    return names


def _check_complete(
    reader: Reader, module: torch.nn.Module, names: Mapping[str, list[str]], source: Mapping[str, str], saved: set[str]
) -> None:
    """Raise `CheckpointError` unless every tensor of the module has a source and each saved tensor is used, except transient buffers and
    parameters left out on purpose."""
    transient = {f"model/{n}" for n in transient_names(module)}
    left_out = {f"model/{n}" for n in _left_out(reader)}
    missing = [n for n in names if n not in source and n not in transient and not left_out.intersection(names[n])]
    used = set(source.values())
    recorded_transient = {f"model/{n}" for n in shared_state(reader)["module"]["transient"]}
    surplus = [n for n in reader.manifest.tensors if n in saved and n not in used and n not in recorded_transient]
    surplus += sorted(left_out.difference(*names.values()))
    if missing or surplus:
        raise CheckpointError(
            f"checkpoint {reader.path} does not fit this module: the checkpoint lacks {_some(missing)}, and the module lacks "
            f"{_some(surplus)}. Build the module with the same arguments. What a step or hook makes later is not there when a run resumes: "
            "make it in __init__, with its shape (torch.empty)"
        )


def _check_fits(reader: Reader, name: str, there: str, live: Strategy.Part) -> None:
    """Raise `CheckpointError` unless the saved tensor `there` has the shape and the kind of dtype (float, complex, ...) of the module's.
    The width of a float may differ."""
    record, where = reader.manifest.tensors[there], f"checkpoint {reader.path}"
    shape, dtype = tuple(record.shape), DTYPES[record.dtype]
    if shape != live.shape:
        raise CheckpointError(
            f"{where}: {name} has shape {shape}, but {live.shape} in this module. Build the module with the same arguments, or "
            "start over in another run_dir. If its shape changes during training, create it with its final shape, or keep it out of the "
            "buffers and save it in on_save"
        )
    if _kind(dtype) != _kind(live.dtype):
        raise CheckpointError(
            f"{where}: {name} has dtype {dtype}, but {live.dtype} in this module. Build the module with the same "
            "arguments"
        )


def _kind(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else str(dtype)


def load_model(reader: Reader, module: torch.nn.Module, strategy: Strategy | None = None) -> None:
    """Copy this rank's part of the checkpoint's weights into the memory of `module`, after `compare_model`."""
    strategy = strategy or Single()
    source = compare_model(reader, module, strategy)
    for _, layer, values in _resizing(reader, module, source):
        layer.load_state_dict(values, strict=False)
    parameters, buffers, _ = named_tensors(module)
    for name, tensor in (*parameters.items(), *buffers.items()):
        if name_there := source.get(f"model/{name}"):
            fill(reader, name_there, strategy.local_part(tensor))
    strategy.after_load()


def fill(reader: Reader, name: str, part: Strategy.Part) -> None:
    """Copy this rank's part of a logical tensor into its memory."""
    memory, record = part.memory, reader.manifest.tensors[name]
    if (
        part.in_place
        and memory.device.type == "cpu"
        and memory.is_contiguous()
        and memory.dtype is DTYPES[record.dtype]
    ):
        reader.read_into(name, bytes_of(memory), part.start)  # directly into the module's memory
        return
    part.write(read(reader, name, part.start, part.count))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"


def recorded_arguments(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The recorded constructor arguments of the module, and the names of the arguments that could not be recorded."""
    from fabricate.checkpoint.format import arguments

    with Reader(find(path)) as reader:
        return arguments.read(shared_state(reader)["module"])


def load_weights(path: Path, module: torch.nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Load the weights of a checkpoint (or of the newest one of a run) into an unsharded module. Every block is verified. Returns what the
    module's `on_save` stored, and the names of the plugins that stored state belonging to the weights."""
    with Reader(find(path)) as reader:
        from_meta = [n for n, p in module.named_parameters() if p.is_meta]
        if from_meta:
            raise CheckpointError(
                f"{from_meta[0]} is on the meta device, so nothing can be loaded into it. Build it in "
                "configure_model, or on the CPU"
            )
        compare_model(reader, module, Single())
        compare_frozen(reader, module, Single())
        load_model(reader, module)
        tree = shared_state(reader)
        beside = [name for name in tree.get("beside_weights", ()) if name != "module"]
        return decode_mapping(reader, tree.get("plugins", {}).get("module", {}), "module"), beside


def export_tensors(module: torch.nn.Module, strategy: Strategy) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by `state_dict` name; shared tensors once, and sharded ones not gathered. They are in the order in
    which a safetensors file holds them, wide elements first. All ranks must gather in this order, because the writing rank does."""
    kept = set(module.state_dict(keep_vars=True))
    parameters, buffers, _ = named_tensors(module)
    exported = [(n, t) for n, t in (*parameters.items(), *buffers.items()) if n in kept]
    return sorted(exported, key=lambda pair: -strategy.local_part(pair[1]).dtype.itemsize)


def whole_chunk(name: str, tensor: torch.Tensor, strategy: Strategy) -> Chunk:
    """The logical tensor `name` as one chunk, which is gathered when it is written. All ranks must gather then."""
    part = strategy.local_part(tensor)
    return Chunk(
        name, 0, math.prod(part.shape), _CODES[part.dtype], part.shape, lambda: bytes_of(strategy.gather(tensor))
    )
