"""Write a checkpoint in torch's own file format, which is a pickle: as a state dict, an Accelerate folder or a DeepSpeed folder.

Tensors pass through a memory-mapped file, so that they need not be in memory while torch writes them. No pickle is read here. Must not know
how an export is made durable (`exporting`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fabricate.checkpoint.convert.export_source import ExportSource
from fabricate.checkpoint.format.comparing import rank_files
from fabricate.checkpoint.format.directory import write_plain_safetensors
from fabricate.checkpoint.state.logical import decode_with, read_whole
from fabricate.errors import ConfigurationError

__all__ = ["write_accelerate", "write_deepspeed", "write_state_dict"]


@contextmanager
def _mapped(source: ExportSource, logical: Mapping[str, str], folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """A context that yields tensors by name, mapped from a temporary file in `folder`. `logical`: maps each name to its logical name."""
    path = folder / "mapped.safetensors"
    write_plain_safetensors(path, [source.chunk(name, there) for name, there in logical.items()])
    try:
        yield load_file(path)
    finally:
        path.unlink()


def write_state_dict(source: ExportSource, path: Path) -> None:
    """Write the state dict with `torch.save`; shared tensors stay shared."""
    with _mapped(source, source.weights, path.parent) as tensors:
        torch.save(tensors | {alias: tensors[name] for alias, name in source.aliases.items()}, path)


def _optimizer_tensors(source: ExportSource, label: str) -> dict[str, str]:
    """A mapping from "PARAMETER/KEY" to the logical name, for every tensor in the state of an optimizer."""
    prefix = f"optimizer/{label}/"
    return {n.removeprefix(prefix): n for n in source.reader.manifest.tensors if n.startswith(prefix)}


def _groups(source: ExportSource, label: str) -> list[tuple[list[str], dict[str, Any]]]:
    """The parameter names and the options of each parameter group of an optimizer."""
    optimizer = source.state["optimizers"][label]
    return [(list(g["names"]), dict(decode_with(source.reader, g["options"]))) for g in optimizer["groups"]]


def write_accelerate(source: ExportSource, folder: Path) -> list[str]:
    """Write the files of `Accelerator.save_state`: the weights, one file per optimizer and scheduler, and the random states of each rank.
    The files of several optimizers or schedulers are numbered in the alphabetical order of their names. Returns remarks for the user."""
    chunks = [source.chunk(name, logical) for name, logical in source.weights.items()]
    write_plain_safetensors(folder / "model.safetensors", chunks)
    state, reader = source.state, source.reader
    if "optimizers" not in state:
        raise ConfigurationError(
            f"--format accelerate: {reader.path} holds weights only, and no optimizer. Use --format safetensors"
        )
    for number, label in enumerate(state["optimizers"]):
        with _mapped(source, _optimizer_tensors(source, label), folder) as tensors:
            torch.save(_state_dict(source, label, tensors), folder / _numbered("optimizer", number))
    for number, scheduler in enumerate(state["schedulers"].values()):
        torch.save(decode_with(reader, scheduler["state"]), folder / _numbered("scheduler", number))
    if state["scaler"]:
        torch.save(state["scaler"], folder / "scaler.pt")
    for number, name in enumerate(rank_files(reader)):
        tree: Any = reader.json(name)
        rng = decode_with(reader, tree["rng"])
        states = {
            "step": source.step,
            "random_state": rng["python"],
            "numpy_random_seed": rng["numpy"],
            "torch_manual_seed": rng["torch"],
        }
        if "cuda" in rng:
            states["torch_cuda_manual_seed"] = [rng["cuda"]]
        torch.save(states, folder / f"random_states_{number}.pkl")
    several = [f"{_numbered('optimizer', number)} is {label}" for number, label in enumerate(state["optimizers"])]
    order = (
        [f"{', '.join(several)}: give them, and their schedulers, to prepare() in this order"] if several[1:] else []
    )
    return ["the position in the data is not exported", *order]


def _numbered(name: str, number: int) -> str:
    return f"{name}_{number}.bin" if number else f"{name}.bin"


def _state_dict(source: ExportSource, label: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The state dict of an optimizer. Parameters are numbered consecutively over all groups."""
    values = source.state["optimizers"][label]["values"]
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    for names, options in _groups(source, label):
        start = len(numbers)
        numbers |= {name: start + offset for offset, name in enumerate(names)}
        groups.append(options | {"params": [numbers[name] for name in names]})
    for key, tensor in tensors.items():
        name, _, slot = key.rpartition("/")
        state.setdefault(numbers[name], {})[slot] = tensor
    for name, slots in values.items():
        for slot, tree in slots.items():
            state.setdefault(numbers[name], {})[slot] = decode_with(source.reader, tree)
    return {"state": state, "param_groups": groups}


_DEEPSPEED_VERSION = "0.19.8"
"""The version of DeepSpeed whose layout `write_deepspeed` writes. DeepSpeed's engine checks it."""


def write_deepspeed(source: ExportSource, folder: Path) -> list[str]:
    """Write DeepSpeed's universal layout, which its engine loads at any ZeRO stage and with any number of ranks. Returns remarks for the
    user.

    It has ``zero/NAME/{fp32,exp_avg,...}.pt`` for each trained parameter, one tensor per file, and files of totals.
    """
    optimizers = source.state.get("optimizers", ())
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"--format deepspeed: DeepSpeed's engine has exactly one optimizer, but {source.reader.path} has {len(optimizers)}. "
            "Use --format accelerate, or --format safetensors for the weights"
        )
    (label,) = optimizers
    tag = f"global_step{source.step}_universal"
    groups = _groups(source, label)
    step = _write_parameters(source, label, [name for names, _ in groups for name in names], folder / tag / "zero")
    _write_optimizer_totals([options for _, options in groups], step, folder / tag / "zero" / "optimizer_state.pt")
    _write_engine_totals(source, folder / tag)
    (folder / "latest_universal").write_text(tag, encoding="utf-8")
    return [
        'the export has DeepSpeed\'s universal layout. Load it with {"checkpoint": {"load_universal": true}}',
        "DeepSpeed restores the trained parameters and the optimizer from this export, but no buffers and no frozen "
        "parameters. At stage 3 DeepSpeed gives every group the options of the first",
    ]


def _write_parameters(source: ExportSource, label: str, names: list[str], zero: Path) -> Any:
    """Write a folder in `zero` for each parameter, with its values and its optimizer state. Returns the optimizer's step."""
    tensors, slots = source.reader.manifest.tensors, _optimizer_tensors(source, label)
    step: Any = None
    for name in names:
        if "/" in name or name in (".", ".."):  # the name is untrusted and must not lead out of the folder
            raise ConfigurationError(
                f"--format deepspeed: the parameter name {name!r} cannot be the name of a folder. Use --format accelerate"
            )
        (zero / name).mkdir(parents=True)
        _save_tensor(source, f"model/{name}", zero / name / "fp32.pt")
        for key in [key for key in slots if key.rpartition("/")[0] == name]:
            slot, logical = key.rpartition("/")[2], slots[key]
            if slot == "step":
                step = read_whole(source.reader, logical)
                torch.save(step, zero / name / "step.pt")
            elif tensors[logical].shape == tensors[f"model/{name}"].shape:
                _save_tensor(source, logical, zero / name / f"{slot}.pt")
            else:
                raise ConfigurationError(
                    f"--format deepspeed: {slot} of {name} does not have the shape of its parameter, and DeepSpeed "
                    "holds only states that do, such as those of AdamW. Use --format accelerate"
                )
    return step


def _save_tensor(source: ExportSource, logical: str, path: Path) -> None:
    torch.save({"param": read_whole(source.reader, logical).float()}, path)


def _write_optimizer_totals(options: list[dict[str, Any]], step: Any, path: Path) -> None:
    """Write the options of each group, and the step, which stage 3 reads from this file."""
    param_groups = [group | {"params": [number]} for number, group in enumerate(options)]
    totals = {
        "ds_version": _DEEPSPEED_VERSION,
        "param_groups": param_groups,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": param_groups},
    }
    torch.save(totals, path)


def _write_engine_totals(source: ExportSource, folder: Path) -> None:
    """Write the counters, the scheduler and the module's weights, under the file names of stages 1 and 2 and of stage 3."""
    state, reader = source.state, source.reader
    schedulers = list(state["schedulers"].values())
    engine = {
        "ds_version": _DEEPSPEED_VERSION,
        "global_steps": source.step,
        "global_samples": state["progress"]["samples"],
        "skipped_steps": state["progress"]["skipped"],
        "dp_world_size": int(reader.manifest.topology["world_size"]),  # type: ignore[arg-type]
        "mp_world_size": 1,
        "lr_scheduler": decode_with(reader, schedulers[0]["state"]) if schedulers else None,
        "optimizer": None,
    }
    with _mapped(source, source.weights, folder.parent) as tensors:
        module = tensors | {alias: tensors[name] for alias, name in source.aliases.items()}
        torch.save(engine | {"module": module}, folder / "mp_rank_00_model_states.pt")
    # Stage 3 reads the totals from this file. The trained weights come from zero/ at every stage.
    torch.save(engine | {"module": {}}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
