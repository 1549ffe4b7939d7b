"""Make a checkpoint of weights that another tool saved: folders of Accelerate, .ckpt files of Lightning, plain state dicts.

Owns: which file of a source is read, how names are changed, which files are refused. Nothing here runs code from a file: safetensors files
are read without a library, and torch's files always with `torch.load(weights_only=True)`. Saving and resuming never load this module.
"""

from __future__ import annotations

import datetime
import math
import re
import secrets
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fabricate.checkpoint.format import arguments, canonical_json
from fabricate.checkpoint.format import directory as format
from fabricate.checkpoint.format.directory import ITEM_SIZES, Chunk, Manifest, TensorRecord
from fabricate.checkpoint.format.files import LOCAL
from fabricate.checkpoint.format.writing import HEADER_LIMIT
from fabricate.errors import CheckpointError, ConfigurationError, did_you_mean

if TYPE_CHECKING:
    import torch

__all__ = ["import_checkpoint"]

_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.(safetensors|bin)")
_WHOLE: Final = ("model.safetensors", "pytorch_model.bin")
_SHARDED: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_ELSEWHERE: Final = {
    "pytorch_model_fsdp_0": "shards of FSDP. Merge them into one file and import that: accelerate merge-weights "
    "SOURCE/pytorch_model_fsdp_0 OUT",
    "latest": "shards of DeepSpeed. Merge them into one file and import that: python SOURCE/zero_to_fp32.py SOURCE OUT",
}


@dataclass
class _Weights:
    """The content of a source. chunks: whole tensors by their names in the source. aliases: maps further names of shared tensors to these
    names."""

    chunks: dict[str, Chunk] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    kind: str = ""


def import_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    key: str | None = None,
    step: int | None = None,
) -> Path:
    """Make a checkpoint of the weights in `source`, and return its path, `out`. One process calls it.

    The checkpoint holds weights only: `TrainModule.load_from_checkpoint(out)` and `Trainer.validate(checkpoint=out)` can read it, but no
    run can resume from it. Nothing in `source` is executed.

    Args:
        source: a folder of `Accelerator.save_state` or `save_pretrained`; a `.safetensors` file; a Lightning `.ckpt`, whose
            hyper_parameters become the recorded constructor arguments (those that JSON cannot hold are passed to
            `load_from_checkpoint`); any file that `torch.save` made of a state dict.
        out: the new checkpoint, which must not exist.
        rename: maps the beginning of a name to its replacement; the first match counts: ``{"module.": "", "": "model."}``.
        key: the key of the state dict in the file, such as "ema"; not needed if it is "state_dict", or if the file is the state dict.
        step: the step of the checkpoint; default: the step that the source has recorded, else 0.

    Raises:
        CheckpointError: the source is damaged, hostile or holds more than tensors and plain values; `out` exists.
        ConfigurationError: the source is of no known kind, or an argument does not match the source.

    Example::

        path = fabricate.import_checkpoint("lightning.ckpt", "imported", rename={"net.": "model."})
        module = Net.load_from_checkpoint(path)
    """
    source, out = Path(source), Path(out)
    if not source.exists():
        raise ConfigurationError(f"source {str(source)!r} does not exist. Give a file or a folder of weights")
    try:
        weights = _folder(source, key) if source.is_dir() else _file(source, key)
    except OSError as exc:
        raise CheckpointError(
            f"source {str(source)!r} cannot be read: {exc.strerror or exc}. Give a readable file or folder of weights"
        ) from exc
    if not weights.chunks:
        raise ConfigurationError(f"source {str(source)!r} holds no tensor. Give a file or a folder of weights")
    names = _renamed([*weights.chunks, *weights.aliases], rename or {})
    return _write(source, out, weights, names, weights.step if step is None else step)


def _renamed(names: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Map each name to its new name. Raises ConfigurationError if two names become the same, or if a rule matches no name."""
    used: set[str] = set()
    new: dict[str, str] = {}
    for name in names:
        rule = next((start for start in rename if name.startswith(start)), None)
        new[name] = name if rule is None else rename[rule] + name.removeprefix(rule)
        used |= set() if rule is None else {rule}
    if idle := [start for start in rename if start not in used]:
        some = ", ".join(list(new)[:3])
        raise ConfigurationError(
            f"rename {idle[0]!r}: no tensor name begins with {idle[0]!r}. Give the beginning of a name; "
            f"the names are {some}, ..."
        )
    taken: dict[str, str] = {}
    for name, becomes in new.items():
        if becomes in taken:
            raise ConfigurationError(
                f"rename: {taken[becomes]!r} and {name!r} would both become {becomes!r}. Change one of the rules"
            )
        taken[becomes] = name
    return new


def _write(source: Path, out: Path, weights: _Weights, names: Mapping[str, str], step: int) -> Path:
    nonce = secrets.token_hex(4)
    staging = format.stage(out.absolute().parent, step, nonce)
    try:
        chunks = [
            Chunk(f"model/{names[name]}", 0, c.count, c.dtype, c.shape, c.data) for name, c in weights.chunks.items()
        ]
        state = {
            "module": {
                "class": "",
                **arguments.written(*arguments.recordable(weights.arguments)),
                "transient": [],
                "pretrained": None,
            },
            "imported": {"kind": weights.kind, "from": source.name},
        }
        files = (
            format.write_tensors(staging / "data-00000-of-00001.safetensors", chunks),
            format.write_json(staging / "state.json", state),
        )
        manifest = Manifest(
            step=step,
            run_id=f"imported-{nonce}",
            nonce=nonce,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            tensors=format.tensors_of(files),
            files=files,
            aliases={f"model/{names[alias]}": f"model/{names[name]}" for alias, name in weights.aliases.items()},
        )
        return format.commit(staging, manifest, name=out.name)
    except BaseException:
        format.discard(staging)
        raise


# -- choosing the file


def _folder(folder: Path, key: str | None) -> _Weights:
    present = set(LOCAL.listdir(folder))
    if several := sorted(
        name for name in present if re.fullmatch(r"(model|pytorch_model)_\d+\.(safetensors|bin)", name)
    ):
        raise ConfigurationError(
            f"source {str(folder)!r} holds several models ({', '.join(several)} beside the first). Give the file of one of them"
        )
    for name in _WHOLE:
        if name in present:
            return _file(folder / name, key)
    for name in _SHARDED:
        if name in present:
            return _sharded(folder, name)
    hint = next((hint for name, hint in _ELSEWHERE.items() if name in present), None)
    raise ConfigurationError(
        f"source {str(folder)!r} holds {hint}"
        if hint
        else f"source {str(folder)!r} holds none of {', '.join((*_WHOLE, *_SHARDED))}. Give the file of the weights itself"
    )


def _sharded(folder: Path, index: str) -> _Weights:
    """The weights in the files that an index lists. Raises CheckpointError unless each file holds exactly the names that the index lists
    for it."""
    where = folder / index
    with LOCAL.open(where) as opened:
        tree: Any = canonical_json.loads(opened.read(0, canonical_json.MAXIMUM_BYTES + 1))
    table = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(table, dict) or not all(isinstance(part, str) for part in table.values()):
        raise CheckpointError(
            f"{where}: weight_map is not a mapping from tensor names to file names. Save the weights again"
        )
    weights = _Weights(kind="sharded weights")
    for part in sorted(set(table.values())):
        if not _PART.fullmatch(part):
            raise CheckpointError(
                f"{where}: weight_map names {part!r}, but only .safetensors and .bin files in the "
                "same folder are read. Save the weights again"
            )
        piece = _file(folder / part, None)
        promised = {name for name, file in table.items() if file == part}
        if piece.chunks.keys() | piece.aliases.keys() != promised:
            odd = sorted((piece.chunks.keys() | piece.aliases.keys()) ^ promised)
            raise CheckpointError(
                f"{where} does not match {part}: {odd[0]!r} is listed in one of them only. Save the weights again"
            )
        weights.chunks |= piece.chunks
        weights.aliases |= piece.aliases
    return weights


def _file(path: Path, key: str | None) -> _Weights:
    LOCAL.size(path)  # raises OSError for links, pipes and devices
    if path.suffix == ".safetensors":
        if key is not None:
            raise ConfigurationError(
                f"key={key!r}: {path} is a safetensors file, which has no nested keys. Leave key= out"
            )
        return _Weights(_safetensors(path), kind="safetensors")
    return _torch(path, key)


# -- safetensors


def _safetensors(path: Path) -> dict[str, Chunk]:
    """The tensors of a safetensors file. The header is checked against the size of the file."""
    with LOCAL.open(path) as opened:
        size = LOCAL.size(path)
        length = struct.unpack("<Q", opened.read(0, 8))[0] if size >= 8 else 0
        if not 0 < length <= min(size - 8, HEADER_LIMIT):
            raise CheckpointError(
                f"{path}: the file is damaged: by its first bytes the header has {length} bytes, but the "
                f"file has {size}. Copy or save it again"
            )
        try:
            header: Any = canonical_json.loads(opened.read(8, length))
        except CheckpointError as exc:
            raise CheckpointError(f"{path}: header: {exc}") from exc
    entries = (
        {name: entry for name, entry in header.items() if name != "__metadata__"} if isinstance(header, dict) else None
    )
    if entries is None:
        raise CheckpointError(f"{path}: the file is damaged: its header is not a JSON object. Copy or save it again")
    chunks, ranges = {}, []
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]} if len(entry) == 3:
                try:
                    record = TensorRecord(dtype, tuple(shape))
                except CheckpointError as exc:
                    raise CheckpointError(f"{path}: {name!r}: {exc}") from exc
            case _:
                raise CheckpointError(
                    f"{path}: the header entry of {name!r} does not consist of dtype, shape and "
                    "data_offsets. Save the file again"
                )
        if end - start != record.num_elements * ITEM_SIZES[dtype]:
            raise CheckpointError(
                f"{path}: {name!r} has dtype {dtype} and shape {shape}, but {end - start} bytes. Save the file again"
            )
        ranges.append((start, end, name))
        chunks[name] = Chunk(
            name, 0, record.num_elements, dtype, record.shape, _bytes_at(path, 8 + length + start, end - start)
        )
    position = 0
    for start, end, name in sorted(ranges):
        if start != position:
            raise CheckpointError(
                f"{path}: {name!r} begins at byte {start} of the data and not at {position}, where the "
                "tensor before it ends. Save the file again"
            )
        position = end
    if 8 + length + position != size:
        raise CheckpointError(
            f"{path}: the tensors end at byte {8 + length + position}, but the file has {size} bytes. Copy "
            "or save it again"
        )
    return chunks


def _bytes_at(path: Path, start: int, count: int) -> Callable[[], bytes]:
    def read() -> bytes:
        with LOCAL.open(path) as opened:
            data = opened.read(start, count)
        if len(data) != count:
            raise CheckpointError(f"{path} became shorter while it was read. Import it again when nothing writes to it")
        return data

    return read


# -- files of torch.save


def _torch(path: Path, key: str | None) -> _Weights:
    tree = _load(path)
    if not isinstance(tree, Mapping):
        raise ConfigurationError(
            f"{path} holds a {type(tree).__name__}, not a state dict. Save module.state_dict() instead"
        )
    weights = _Weights(kind="state dict")
    if "pytorch-lightning_version" in tree:
        weights.kind = "Lightning"
        weights.step = int(tree.get("global_step", 0))
        given = tree.get("hyper_parameters")
        weights.arguments = {str(name): value for name, value in given.items()} if isinstance(given, Mapping) else {}
    _fill(weights, path, _state_dict(path, tree, key))
    return weights


def _state_dict(path: Path, tree: Mapping[Any, Any], key: str | None) -> Mapping[str, torch.Tensor]:
    """The state dict in `tree`, the content of a file: the entry `key` if it is given, else the entry "state_dict" if there is one, else
    `tree`."""
    if key is None and isinstance(tree.get("state_dict"), Mapping):
        key = "state_dict"
    tensors = tree if key is None else tree.get(key)
    if not isinstance(tensors, Mapping):
        nested = _nested(tree)
        raise ConfigurationError(
            f"key={key!r}: {path} has no state dict under this key{did_you_mean(str(key), map(str, nested))}. Its keys with "
            f"mappings: {nested}"
        )
    others = [name for name, value in tensors.items() if not isinstance(name, str) or not _is_tensor(value)]
    if others:
        parts = list(map(str, _nested(tensors)))
        remedy = (
            f"If the state dict is nested, give its key: key={parts[0]!r}"
            if parts
            else "Remove this entry and save the file again"
        )
        raise ConfigurationError(f"{path}: {others[0]!r} is not a tensor. {remedy}")
    return tensors


def _nested(tree: Mapping[Any, Any]) -> list[Any]:
    """The keys of `tree` whose values are mappings."""
    return [name for name, value in tree.items() if isinstance(value, Mapping)]


def _load(path: Path) -> Any:
    """The content of a file of `torch.save`, memory-mapped if the format of the file allows it."""
    import torch

    mapped = zipfile.is_zipfile(path)
    if mapped:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        if packed:  # torch.save never compresses, and a few compressed bytes could unpack to more than the memory holds
            raise CheckpointError(
                f"{path}: the entry {packed[0]!r} is compressed, which torch.save never does. Save the "
                "weights with torch.save again"
            )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as exc:  # torch.load raises exceptions of many kinds for a malformed file
        raise CheckpointError(
            f"{path} cannot be read as tensors and plain values ({type(exc).__name__}: {str(exc).splitlines()[0][:200]}). An "
            "import reads no other "
            "objects, because that could run code. If you trust the file, load it yourself and save its state dict alone"
        ) from exc


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _fill(weights: _Weights, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from fabricate.checkpoint.state.logical import chunk

    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        if tensor.is_sparse or tensor.is_quantized or tensor.device.type != "cpu":
            raise CheckpointError(
                f"{path}: {name!r} is sparse, quantised or on the meta device. Make it a dense tensor and "
                "save the file again"
            )
        if math.prod(tensor.shape) * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: {name!r} claims the shape {tuple(tensor.shape)}, but only {tensor.untyped_storage().nbytes()} bytes are stored. "
                "Save the file again"
            )
        place = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if tensor.numel() and place in seen:
            weights.aliases[name] = seen[place]
        else:
            seen[place] = name
            weights.chunks[name] = chunk(name, tensor)
