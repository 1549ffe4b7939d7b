"""The check that weights are finite. It is made before a checkpoint is written, because a gradient may be infinite although the loss is
finite. Must not know who calls it, or when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fabricate.errors import FabricateError


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> list[str]:
    """The names of this rank's `tensors` that have an infinite value or NaN. The flags of all tensors are collected on `device`, so there
    is only one wait."""
    names, flags = [], []
    for name, tensor in tensors:
        if tensor.numel():
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
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
