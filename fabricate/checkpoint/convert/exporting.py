"""Write a checkpoint, or only its weights, in the format of another tool. Everything read is verified, and `out` is written completely or
not at all.

Owns the list of formats, `FORMATS`, and the formats that need no torch; `pickled` writes the others. One tensor at a time is in memory.
Must not know: runs, ranks, how a checkpoint was made.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from fabricate.checkpoint.convert.export_source import ExportSource
from fabricate.checkpoint.format.directory import Reader, find, write_plain_safetensors
from fabricate.errors import CheckpointError, ConfigurationError, did_you_mean

__all__ = ["FORMATS", "export", "new_path"]

_PICKLE = "this format is a pickle, which can run code when it is opened: open it only where its source is trusted"


def export(checkpoint: Path, out: Path, kind: str | None) -> list[str]:
    """Write a checkpoint (or the newest of a run directory) as the new file or folder `out`; returns remarks for the user.

    kind: one of `FORMATS`; None: safetensors, unless the name of `out` ends as files of torch do. `out` appears in one
    step, when everything in it is written and flushed to disk.

    Raises ConfigurationError if the format is unknown, does not fit `out` or cannot hold this checkpoint, and CheckpointError if the
    checkpoint is damaged, or if `out` exists or cannot be written.
    """
    if kind is None and out.suffix in _OF_TORCH:  # readers would take it for pickle, which is only written on request
        raise ConfigurationError(
            f"{str(out)!r}: {out.suffix} is the ending of torch's format, but without --format the file is safetensors. Pass --format "
            f"torch, which is a pickle, or call it {out.with_suffix('.safetensors').name}"
        )
    kind = kind or "safetensors"
    if kind not in FORMATS:
        raise ConfigurationError(f"--format {kind!r}{did_you_mean(kind, FORMATS)}; known: {', '.join(FORMATS)}")
    with new_path(out, _SINGLE.get(kind)) as staging, Reader(find(checkpoint)) as reader:
        source = ExportSource(reader)
        remarks = FORMATS[kind](source, staging)
        if plugins := [name for name in source.state.get("beside_weights", ()) if name != "module"]:
            remarks.append(
                f"the export holds the weights that were trained, without what the plugin {', '.join(plugins)} keeps beside them. "
                "RUN_DIR/model/ of a complete run holds both"
            )
    return remarks


@contextlib.contextmanager
def new_path(out: Path, single: str | None = None) -> Iterator[Path]:
    """A context that yields a temporary folder to write into. At its end, this folder or its file `single` is flushed to disk and renamed
    to `out`. After a failure nothing is left.

    Raises CheckpointError if `out` exists or cannot be written.
    """
    if os.path.lexists(out):
        raise CheckpointError(f"{str(out)!r} exists already, and an export never overwrites. Give a new path")
    staging = out.absolute().parent / f".export-{secrets.token_hex(4)}"
    try:
        staging.mkdir(parents=True)
        yield staging
        for path in (*staging.rglob("*"), staging):
            _make_durable(path)
        (staging / single if single else staging).rename(out)
        _make_durable(out.absolute().parent)
    except OSError as exc:
        raise CheckpointError(
            f"cannot write {str(out)!r}: {exc.strerror or exc}. The incomplete output was removed"
        ) from exc
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _safetensors(source: ExportSource, folder: Path) -> list[str]:
    chunks = [source.chunk(name, logical) for name, logical in source.weights.items()]
    write_plain_safetensors(folder / "model.safetensors", chunks)
    shared = [f"{alias} is stored once, as {name}" for alias, name in source.aliases.items()]
    return [f"shared tensors: {', '.join(shared)}"] if shared else []


def _transformers(source: ExportSource, folder: Path) -> list[str]:
    """Write the files of `save_pretrained`, except the tokenizer, which is not part of a checkpoint."""
    pretrained = source.pretrained
    if pretrained is None:
        raise ConfigurationError(
            f"--format transformers: the module of {source.reader.path} does not hold exactly one transformers model, so no "
            "configuration can be written. Use --format safetensors"
        )
    prefix = pretrained["prefix"]
    inside = {name: logical for name, logical in source.weights.items() if name.startswith(prefix)}
    for alias, name in source.aliases.items():
        if alias.startswith(prefix) and name not in inside:  # shared with a part of the module outside of the model
            inside[alias] = source.weights[name]
    chunks = [source.chunk(name.removeprefix(prefix), logical) for name, logical in inside.items()]
    write_plain_safetensors(folder / "model.safetensors", chunks)
    for name in ("config", "generation_config"):
        if pretrained[name] is not None:
            text = json.dumps(pretrained[name], indent=2, sort_keys=True)
            (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    written = set(inside.values())
    outside = [name for name, logical in source.weights.items() if logical not in written]
    remarks = ["the export has no tokenizer, because a checkpoint holds none. Add its files if the model needs one"]
    if outside:
        remarks.append(
            f"left out, because they are not part of the transformers model: {', '.join(outside[:5])}{' ...' if outside[5:] else ''}"
        )
    return remarks


def _torch(source: ExportSource, folder: Path) -> list[str]:
    from fabricate.checkpoint.convert import pickled

    pickled.write_state_dict(source, folder / _SINGLE["torch"])
    return [f"{_PICKLE}. To read it, torch.load(weights_only=True) is enough, and runs no code"]


def _accelerate(source: ExportSource, folder: Path) -> list[str]:
    from fabricate.checkpoint.convert import pickled

    return [f"{_PICKLE}, except model.safetensors", *pickled.write_accelerate(source, folder)]


def _deepspeed(source: ExportSource, folder: Path) -> list[str]:
    from fabricate.checkpoint.convert import pickled

    return [_PICKLE, *pickled.write_deepspeed(source, folder)]


_SINGLE = {"safetensors": "model.safetensors", "torch": "model.pt"}
"""The file name of each format that consists of one file."""
_OF_TORCH = (".pt", ".pth", ".bin")
FORMATS: dict[str, Callable[[ExportSource, Path], list[str]]] = {
    "safetensors": _safetensors,
    "transformers": _transformers,
    "torch": _torch,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}
