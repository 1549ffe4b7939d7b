"""Data and losses for language models: functions over `datasets`, a sampler, a mixture of sources, callbacks."""

from __future__ import annotations

from fabricate_text.losses import next_token_loss, next_tokens, use_liger
from fabricate_text.masks import tokenize_chats, tokenize_completion, tokenize_completions
from fabricate_text.neftune import NEFTune
from fabricate_text.order import ByLength, Mixture
from fabricate_text.packing import Pad, check_packing, pack

__all__ = [
    "ByLength",
    "Mixture",
    "NEFTune",
    "Pad",
    "check_packing",
    "next_token_loss",
    "next_tokens",
    "pack",
    "tokenize_chats",
    "tokenize_completion",
    "tokenize_completions",
    "use_liger",
]
