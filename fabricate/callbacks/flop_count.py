"""The counter of FLOPs that `ModelSummary` and `Throughput` use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    """A counter that leaves the results of a fit as they are.

    torch's FlopCounterMode decomposes every operation that has a decomposition, which changes the rounding. The operations below run in one
    kernel and contain no matrix product. Giving each a count of 0 keeps torch from decomposing it."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    ops = torch.ops.aten
    whole = (ops.silu_backward, ops.mish_backward, ops.native_channel_shuffle, ops._fused_rms_norm)
    return FlopCounterMode(display=False, custom_mapping={op.default: lambda *_, **__: 0 for op in whole})
