
from __future__ import annotations

from fabricate_text.masks import tokenize_chats, tokenize_completion, tokenize_completions
from fabricate_text.order import ByLength, Mixture
from fabricate_text.packing import Pad, check_packing, pack

__all__ = [
    "ByLength",
    "Mixture",
    "Pad",
    "check_packing",
    "pack",
    "tokenize_chats",
    "tokenize_completion",
    "tokenize_completions",
]
