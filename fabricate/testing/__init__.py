"""Test helpers for modules, plugins and fabricate itself.

Names are resolved on first use, so that importing this does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabricate.testing.checks import check_plugin, check_precision, check_strategy
    from fabricate.testing.invariance import check_invariance
    from fabricate.testing.judge import KitFailure
    from fabricate.testing.ranks import close_pools, run_ranks

__all__ = [
    "KitFailure",
    "check_invariance",
    "check_plugin",
    "check_precision",
    "check_strategy",
    "close_pools",
    "run_ranks",
]

_MODULE_OF = {
    "KitFailure": "fabricate.testing.judge",
    "check_invariance": "fabricate.testing.invariance",
    "check_plugin": "fabricate.testing.checks",
    "check_precision": "fabricate.testing.checks",
    "check_strategy": "fabricate.testing.checks",
    "close_pools": "fabricate.testing.ranks",
    "run_ranks": "fabricate.testing.ranks",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
