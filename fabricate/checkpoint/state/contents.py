"""The content of one checkpoint before it is written, and the check that its weights are finite. Must not know: runs, files, commits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fabricate.checkpoint.format.directory import Chunk, TensorRecord
from fabricate.errors import FabricateError
from fabricate.strategies.base import Strategy


@dataclass
class Content:
    """This rank's contribution to one checkpoint.

    chunks: its parts of tensors, read when they are written. shared: the content of state.json, used on rank 0. own: the content of
    rank-00000.json. tensors: every logical tensor that this rank knows of; the checkpoint must hold all of them, whichever rank writes
    them. manifest: the other fields of the manifest. exchanged: the parts whose values ranks must exchange before chunks are read.
    """

    chunks: list[Chunk]
    shared: dict[str, Any]
    own: dict[str, Any]
    tensors: dict[str, TensorRecord]
    manifest: dict[str, Any]
    exchanged: list[Strategy.Part]

    def exchange(self) -> None:
        """Exchange the values of tensors that ranks hold by columns. All ranks, after every rank has collected its content."""
        for part in self.exchanged:
            part.values  # noqa: B018  the exchange
        self.exchanged = []  # frees parts that no chunk needs


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> list[str]:
    """The names of this rank's `tensors` that have an infinite value or NaN. The flags of all tensors are collected on `device`, so there
    is only one wait."""
    names, flags = [], []
    for name, tensor in tensors:
        if tensor.numel():
            real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            names.append(name)
            # One pass: minimum and maximum propagate NaN. isfinite and a norm take ten times as long on a CPU.
            flags.append(torch.stack(real.aminmax()).isfinite().all().to(device))
    good = torch.stack(flags).tolist() if flags else []
    return [name for name, fine in zip(names, good, strict=True) if not fine]


def refusal(step: int, names: Sequence[str]) -> FabricateError:
    """The error to raise if the weights `names` are not finite after the update `step`."""
    return FabricateError(
        f"weights are not finite after step {step} ({', '.join(names[:5])}), so no checkpoint of them is saved. Checkpoints "
        "of earlier steps are kept. Lower the learning rate, clip with max_grad_norm=, or skip such updates with nonfinite='skip'"
    )
