"""Data and losses for language models: functions over `datasets`, a sampler, a mixture of sources, callbacks."""

from __future__ import annotations

from fabricate_text.packing import Pad, check_packing, pack

__all__ = ["Pad", "check_packing", "pack"]
