"""The constants of a module: buffers and frozen weights, such as class weights or a teacher, which the script sets and training does not
change. A checkpoint holds their values, and a digest of those that the script set, so that a later script that sets others is noticed.

Must not know: runs, what a resume does about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fabricate.checkpoint.format.directory import Reader, find
from fabricate.checkpoint.format.schema import shared_state
from fabricate.checkpoint.state.logical import digest, read
from fabricate.errors import few

_SAMPLED = 1024
"""The number of elements at the beginning of a tensor, and at its end, that a digest covers."""


def constants(module: torch.nn.Module) -> dict[str, str]:
    """A digest of some values of each buffer and frozen parameter of an unprepared module, by name. Without tensors on the meta device and
    quantised ones. Waits for the device."""
    frozen = ((name, p) for name, p in module.named_parameters() if not p.requires_grad)
    return {
        name: _digest(tensor)
        for name, tensor in (*module.named_buffers(), *frozen)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    }


def set_otherwise(reader: Reader, then: Any, now: Mapping[str, str]) -> Iterator[str]:
    """The names of the constants that a script now sets to other values than those that the checkpoint has from an earlier one. `then`,
    `now`: the `constants` when they were set; `then` is as the checkpoint holds it."""
    for name in then if isinstance(then, dict) else ():
        record = reader.manifest.tensors.get(f"model/{name}")
        if record is None or name not in now or then[name] == now[name]:
            continue
        ends = [
            read(reader, f"model/{name}", start, min(_SAMPLED, record.num_elements))
            for start in (0, max(0, record.num_elements - _SAMPLED))
        ]
        if (
            digest(torch.cat(ends)) in then[name].split()
        ):  # otherwise training changed it, as it does the mean of a batch norm
            yield name


def about_constants(names: list[str]) -> str:
    """A text for a note about constants that a script sets otherwise than the checkpoint from which they were loaded has them."""
    return (
        f"{few(names)}: the script sets other values than when the checkpoint was saved, and those of the checkpoint are used, as for "
        "every buffer and frozen weight (values that are drawn at random may differ so)"
    )


def kept_constants(path: Path, module: torch.nn.Module) -> list[str]:
    """The names of the constants that an unprepared `module` sets otherwise than the checkpoint (or the newest one of the run) at `path`
    has them: after loading they are those of the checkpoint."""
    with Reader(find(path)) as reader:
        return list(set_otherwise(reader, shared_state(reader)["module"].get("constants"), constants(module)))


def _digest(tensor: torch.Tensor) -> str:
    """A digest, and for a float tensor one of its values in bfloat16, to which a precision may convert the module."""
    flat = tensor.detach().reshape(-1)
    ends = torch.cat([flat[:_SAMPLED], flat[-_SAMPLED:]]).cpu()
    return f"{digest(ends)} {digest(ends.bfloat16())}" if ends.dtype in (torch.float32, torch.float64) else digest(ends)
