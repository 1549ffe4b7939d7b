"""Training state to and from a checkpoint: which tensors and values there are, what they are called, where they go back.

Logical names: "model/NAME", "optimizer/OPTIMIZER/NAME/KEY", "plugin/PLUGIN/...", "rank/00001/rng/...". Names of parameters
are those of `module.named_parameters()`, under every strategy. state.json holds what is one value for all ranks,
rank-00000.json what each rank has for itself.

Must not know: the loop, when to save, directories and commits (fabricate.checkpoint).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor

from fabricate.checkpoint import Chunk, Reader, find
from fabricate.codec import decode, encode
from fabricate.errors import CheckpointError, ConfigurationError
from fabricate.strategy import Strategy

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
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def chunk(name: str, tensor: torch.Tensor, start: int = 0, shape: tuple[int, ...] | None = None) -> Chunk:
    """A piece of the logical tensor `name`: the elements of `tensor`, from `start` on, of a whole of `shape` (default: all)."""
    if tensor.dtype not in _CODES:
        raise CheckpointError(
            f"{name} has the dtype {tensor.dtype}, which a checkpoint cannot hold; use one of {', '.join(map(str, _CODES))}"
        )

    def data() -> Any:
        flat = gather(tensor.detach()).reshape(-1).contiguous().cpu()
        array: Any = flat.view(torch.uint8).numpy()
        return memoryview(array) if flat.numel() else b""

    whole = tuple(tensor.shape) if shape is None else shape
    return Chunk(name, start, tensor.numel(), _CODES[tensor.dtype], whole, data)


def read(reader: Reader, name: str, start: int = 0, count: int | None = None) -> torch.Tensor:
    """Elements `start` to `start + count` of a logical tensor, 1-D on the CPU; every block read is verified."""
    data = reader.read(name, start, count)
    dtype = _DTYPES[reader.manifest.tensors[name].dtype]
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def read_whole(reader: Reader, name: str) -> torch.Tensor:
    """A logical tensor in its own shape, on the CPU."""
    return read(reader, name).reshape(reader.manifest.tensors[name].shape)


def named_tensors(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, str]]:
    """Parameters and buffers by name, each once, and the other names of shared ones."""
    parameters: dict[str, torch.Tensor] = dict(module.named_parameters())
    buffers: dict[str, torch.Tensor] = dict(module.named_buffers())
    first = {id(t): n for n, t in (*parameters.items(), *buffers.items())}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return parameters, buffers, {n: first[id(t)] for n, t in every if first[id(t)] != n}


class Saver:
    """Collects this rank's chunks for one checkpoint."""

    def __init__(self, strategy: Strategy, rank: int, world_size: int) -> None:
        self.strategy = strategy
        self.rank = rank
        self.world_size = world_size
        self.chunks: list[Chunk] = []

    def shared(self, name: str, tensor: torch.Tensor) -> None:
        """A parameter, or a state shaped like one: each rank contributes its part, so nothing is gathered."""
        part, start = self.strategy.local_part(tensor)
        if isinstance(tensor, torch.distributed.tensor.DTensor):
            if part.numel():
                self.chunks.append(chunk(name, part, start, tuple(tensor.shape)))
            return
        flat = part.reshape(-1)
        begin, end = (flat.numel() * r // self.world_size for r in (self.rank, self.rank + 1))
        if end > begin or (self.rank == 0 and not flat.numel()):
            self.chunks.append(chunk(name, flat[begin:end], begin, tuple(tensor.shape)))

    def whole(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor that is the same on every rank: rank 0 writes it."""
        if self.rank == 0:
            self.chunks.append(chunk(name, tensor))

    def own(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor of this rank alone; `name` has the rank in it."""
        self.chunks.append(chunk(name, tensor))

    def model(self, module: torch.nn.Module) -> dict[str, str]:
        """All parameters and buffers; returns the aliases of shared ones."""
        parameters, buffers, aliases = named_tensors(module)
        for name, tensor in parameters.items():
            self.shared(f"model/{name}", tensor)
        for name, tensor in buffers.items():
            self.whole(f"model/{name}", tensor)
        return {f"model/{alias}": f"model/{name}" for alias, name in aliases.items()}

    def optimizer(self, label: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
        """State and groups of one optimizer; `names`: parameter names by id. Returns the JSON part."""
        values: dict[str, dict[str, Any]] = {}
        for parameter, state in optimizer.state.items():
            name = names[id(parameter)]
            for key, value in state.items():
                logical = f"optimizer/{label}/{name}/{key}"
                if not isinstance(value, torch.Tensor):
                    values.setdefault(name, {})[key] = self.encode(value, logical, self.whole)
                elif value.shape == parameter.shape or isinstance(value, torch.distributed.tensor.DTensor):
                    self.shared(logical, value)
                else:
                    self.whole(logical, value)
        groups = [
            {"options": self.encode({k: v for k, v in g.items() if k != "params"}, f"optimizer/{label}/group", self.whole),
             "names": [names[id(p)] for p in g["params"]]}
            for g in optimizer.param_groups
        ]  # fmt: skip
        return {"kind": type(optimizer).__name__, "groups": groups, "values": values}

    def encode(self, value: object, path: str, put: Callable[[str, torch.Tensor], None]) -> Any:
        """`value` as tagged JSON; tensors inside go to `put` under names that begin with `path`."""

        def tensor(where: str, found: object) -> str | None:
            if type(found).__module__ == "numpy" and hasattr(found, "tobytes"):
                return None  # small arrays stay in the JSON
            if not isinstance(found, torch.Tensor):
                return None
            if isinstance(found, torch.distributed.tensor.DTensor):
                self.shared(where, found)
            else:
                put(where, found.detach())
            return where

        return encode(value, tensor, path)


def decode_with(reader: Reader, tree: object) -> Any:
    """The inverse of `Saver.encode`: tensors are read whole, onto the CPU."""
    return decode(tree, lambda name: read_whole(reader, name))


def parameter_names(module: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[int, str]:
    """Names by id of every parameter that an optimizer holds. Raises `ConfigurationError` for one that is not the module's."""
    names = {id(p): n for n, p in module.named_parameters()}
    for label, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ConfigurationError(
                        f"optimizer {label!r} holds a parameter of shape {tuple(parameter.shape)} that is not a parameter of the module; "
                        "make it an attribute of the module, and take self.parameters() inside configure_optimizers"
                    )
    return names


def compare_model(reader: Reader, module: torch.nn.Module) -> dict[str, str]:
    """The name in the checkpoint of every parameter and buffer of `module`; `CheckpointError` names what does not fit."""
    parameters, buffers, _ = named_tensors(module)
    live = {f"model/{n}": t for n, t in (*parameters.items(), *buffers.items())}
    saved = {n: r for n, r in reader.manifest.tensors.items() if n.startswith("model/")}
    where = f"checkpoint {reader.path}"
    aliases = dict(reader.manifest.aliases)
    source = {name: name if name in saved else aliases.get(name, name) for name in live}
    missing = [n for n in live if source[n] not in saved]
    surplus = [n for n in saved if n not in set(source.values())]
    if missing or surplus:
        raise CheckpointError(
            f"{where} does not fit this module: it lacks {_some(missing)}; it has besides {_some(surplus)}; build the "
            "module with the same arguments"
        )
    for name, tensor in live.items():
        if tuple(saved[source[name]].shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"{where}: {name} has shape {tuple(saved[source[name]].shape)}, the module's has {tuple(tensor.shape)}"
            )
    return source


def load_model(reader: Reader, module: torch.nn.Module, strategy: Strategy | None = None) -> None:
    """Copy the checkpoint's weights into `module`'s memory, only this rank's part. Compared first, see `compare_model`."""
    strategy = strategy or Strategy()
    source = compare_model(reader, module)
    parameters, buffers, _ = named_tensors(module)
    with torch.no_grad():
        for name, tensor in (*parameters.items(), *buffers.items()):
            part, start = strategy.local_part(tensor)
            part.copy_(read(reader, source[f"model/{name}"], start, part.numel()).reshape(part.shape))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"


def compare_optimizer(
    path: Path, label: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]
) -> None:
    """`CheckpointError` unless `optimizer` is of the kind that was saved, over the same parameters in the same groups."""
    where = f"checkpoint {path}, optimizer {label!r}"
    if saved["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{where} is a {saved['kind']}, this run has a {type(optimizer).__name__}; use the same, or resume='never'"
        )
    live = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
    if [g["names"] for g in saved["groups"]] != live:
        raise CheckpointError(
            f"{where} has {len(saved['groups'])} groups over {sum(len(g['names']) for g in saved['groups'])} parameters, this run "
            f"{len(live)} over {sum(map(len, live))}, or in another order; build the optimizer as before, or resume='never'"
        )


def load_optimizer(
    reader: Reader,
    label: str,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    names: Mapping[int, str],
    strategy: Strategy,
) -> None:
    """Restore one optimizer, which `compare_optimizer` found to fit: options of each group and this rank's part of the
    state, matched by parameter name."""
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(decode_with(reader, stored["options"]))
    prefix = f"optimizer/{label}/"
    keys: dict[str, list[str]] = {}
    for logical in reader.manifest.tensors:
        if logical.startswith(prefix):
            name, _, key = logical.removeprefix(prefix).rpartition("/")
            keys.setdefault(name, []).append(key)
    optimizer.state.clear()
    with torch.no_grad():
        for group in optimizer.param_groups:
            on_device = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                name = names[id(parameter)]
                state: dict[str, Any] = {}
                for key in keys.get(name, []):
                    logical = f"{prefix}{name}/{key}"
                    record = reader.manifest.tensors[logical]
                    if tuple(record.shape) == tuple(parameter.shape) and parameter.ndim:
                        value = torch.empty_like(parameter, dtype=_DTYPES[record.dtype], requires_grad=False)
                        part, start = strategy.local_part(value)
                        part.copy_(read(reader, logical, start, part.numel()).reshape(part.shape))
                    else:
                        value = read_whole(reader, logical)
                        if key != "step" or on_device:
                            value = value.to(parameter.device)
                    state[key] = value
                for key, tree in saved["values"].get(name, {}).items():
                    state[key] = decode_with(reader, tree)
                if state:
                    optimizer.state[parameter] = state


def recorded_arguments(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The module's constructor arguments as recorded, and the names of those that could not be."""
    with Reader(find(path)) as reader:
        tree: Any = reader.json("state.json")
        return dict(tree["module"]["arguments"]), list(tree["module"]["unrecorded"])


def load_weights(path: Path, module: torch.nn.Module) -> None:
    """Read the weights of a checkpoint (or of a run's newest) into an unsharded module, every block verified."""
    with Reader(find(path)) as reader:
        from_meta = [n for n, p in module.named_parameters() if p.is_meta]
        if from_meta:
            raise CheckpointError(f"{from_meta[0]} is on the meta device; build it in configure_model or on the CPU")
        load_model(reader, module)


def export_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by `state_dict` name, shared ones once, as they lie (sharded ones too), in the order
    in which a safetensors file holds them: wide elements first. Ranks that gather in this order meet the one that writes."""
    kept = set(module.state_dict(keep_vars=True))
    parameters, buffers, _ = named_tensors(module)
    found = [(n, t.detach()) for n, t in (*parameters.items(), *buffers.items()) if n in kept]
    return sorted(found, key=lambda pair: -pair[1].element_size())


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded. All ranks then."""
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
