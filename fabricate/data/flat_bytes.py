"""The memory of a tensor as bytes. Must not know: what the tensor is for."""

from __future__ import annotations

import torch


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as a flat tensor of bytes on the same device, which shares memory with a contiguous `tensor`."""
    flat = tensor.detach().contiguous().reshape(-1)
    if (
        flat.numel() == 1
    ):  # the stride of one element is arbitrary, 0 after `array[:, None]` of numpy, but `view` needs 1
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
