"""The memory of a tensor as bytes. Must not know: what the tensor is for."""

from __future__ import annotations

import torch


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as a flat tensor of bytes on the same device, which shares memory with a contiguous `tensor`."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.numel() <= 1:
        # `view` needs the stride 1, but NumPy gives an empty array and one of one element any, such as 0.
        flat = flat.as_strided((flat.numel(),), (1,))
    return flat.view(torch.uint8)
