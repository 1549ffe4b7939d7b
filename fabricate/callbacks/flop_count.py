"""The counter of FLOPs that `ModelSummary` and `Throughput` use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    """A counter that changes no result.

    Torch's counter replaces an operation by the operations that it is defined by, if there are any, and their results are rounded
    differently. These operations have a kernel of their own and no matrix product, so it is told to count 0 for them and leave them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    ops = torch.ops.aten
    whole = (ops.silu_backward, ops.mish_backward, ops.native_channel_shuffle, ops._fused_rms_norm)
    return FlopCounterMode(display=False, custom_mapping={op.default: lambda *_, **__: 0 for op in whole})
