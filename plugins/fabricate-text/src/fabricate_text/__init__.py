"""Data and losses for language models: functions over `datasets`, a sampler, a mixture of sources, callbacks."""

from __future__ import annotations

from fabricate_text.masks import tokenize_chats, tokenize_completion, tokenize_completions
from fabricate_text.packing import Pad, check_packing, pack

__all__ = ["Pad", "check_packing", "pack", "tokenize_chats", "tokenize_completion", "tokenize_completions"]
