"""Master weights and optimizer state that DeepSpeed keeps in files (offload to NVMe), read and written in place.

DeepSpeed swaps whole flat tensors: between updates they are empty and their content is a file. Owns: the access to that content, and the
check that the machine has asynchronous input and output. Must not know: strategies, checkpoints.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from fabricate import ConfigurationError


def check_machine(option: str) -> None:
    """Raise `ConfigurationError` unless DeepSpeed's asynchronous input and output is available. The first call compiles it, for minutes, on
    one rank of a host while the others wait. option: named in the message."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise ConfigurationError(
            f"{option}: DeepSpeed's asynchronous input and output needs libaio with its headers: apt install libaio-dev (dnf install "
            "libaio-devel), or offload to 'cpu'"
        )
    builder.load(verbose=False)


def make_folder(option: str, path: str) -> str:
    """Make a folder for this rank alone below `path`, which has to exist and support unbuffered writes. Returns its path."""
    try:
        folder = tempfile.mkdtemp(prefix="fabricate-", dir=path)
    except OSError as exc:
        raise ConfigurationError(
            f"{option}: nvme_path={path!r} cannot be written to: {exc.strerror}; give a folder on a local disk"
        ) from exc
    probe = Path(folder, "probe")
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as exc:
        raise ConfigurationError(
            f"{option}: the file system of nvme_path={path!r} does not support unbuffered writes (O_DIRECT: {exc.strerror}); give "
            "a folder on a local disk"
        ) from exc
    finally:
        probe.unlink(missing_ok=True)
    return folder


class Files:
    """The files of DeepSpeed's stage 3 optimizer `zero`, which swaps groups of a mebibyte or more and keeps smaller ones in memory."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        self._swapper = zero.optimizer_swapper
        self._groups = {
            flat.ds_id: number
            for number, flat in enumerate(zero.fp32_partitioned_groups_flat)
            if zero._swappable_optimizer_subgroup(number)
        }

    def has(self, flat: torch.Tensor) -> bool:
        """Whether the group of the master weights `flat` is swapped."""
        return getattr(flat, "ds_id", None) in self._groups

    def content(self, flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """The memory-mapped content of `flat`, or of a `tensor` of its state: writing to it changes the file."""
        count = self._zero.fp16_partitioned_groups_flat_numel[self._groups[flat.ds_id]]  # type: ignore[attr-defined]
        path = next(
            swapped.swap_path
            for swapped in self._swapper.swap_params_info[flat.ds_id].tensors  # type: ignore[attr-defined]
            if swapped.compute_tensor is tensor
        )
        return torch.from_file(path, shared=True, size=count, dtype=tensor.dtype)

    def add_state(self, flat: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros for the state of `flat`, in a file and not in memory."""
        from deepspeed.runtime.swap_tensor.optimizer_utils import SwapTensorContext

        swap_info = self._swapper.swap_params_info[flat.ds_id]  # type: ignore[attr-defined]
        placeholder = torch.empty(0, dtype=dtype)
        placeholder.ds_id = f"{key}-{flat.ds_id}"  # type: ignore[attr-defined]
        context = SwapTensorContext(placeholder, swap_info.swap_folder)
        with open(context.swap_path, "wb") as file:
            file.truncate(self._swapper._io_aligned_numel(swap_info.numel()) * placeholder.element_size())
        swap_info.tensors.append(context)
        swap_info.has_state_tensors = True
        return placeholder

    def renew(self, number: int) -> None:
        """Bring the parameters of group `number` up to date with its master weights."""
        flat = self._zero.fp32_partitioned_groups_flat[number]
        if self.has(flat):
            self._zero._optimizer_states_and_gradient_swap_in(number)
        self._zero._reassign_or_swap_out_partitioned_parameters(number)
        if self.has(flat):
            self._zero._optimizer_states_and_gradient_swap_out(number)

    def keep_gradients(self) -> None:
        """Leave gradients in memory. Where parts have odd sizes DeepSpeed 0.19 reads gradients back from files to addresses that
        are not aligned, and trains with wrong values, without an error."""

        def keep(parameter: Any, gradient_offsets: list[int], gradient_tensors: list[torch.Tensor]) -> None:
            swap_info = self._swapper.swap_params_info[parameter.ds_id]
            swap_info.unswapped_gradients.update(zip(gradient_offsets, gradient_tensors, strict=True))

        self._swapper.swap_out_gradients = keep

    def clear_gradient(self, flat: torch.Tensor, offset: int, count: int) -> None:
        """Set a zero gradient for a parameter that a window did not use, because nothing else writes its place in the buffer."""
        self._swapper.swap_out_gradients(flat, [offset], [torch.zeros(count)])
