"""The built-in callbacks, one per file. They use only public names, like callbacks of users."""

from __future__ import annotations

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    if name in sys.modules["fabricate"].__all__:
        raise ImportError(f"write: from fabricate import {name}")
    raise AttributeError(f"module 'fabricate.callbacks' has no attribute {name!r}")
