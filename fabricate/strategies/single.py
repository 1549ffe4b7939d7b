"""One process. Must not know: other strategies."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from fabricate.strategies.base import Strategy
from fabricate.strategies.quantised import EVERY_KIND


@dataclasses.dataclass(eq=False)
class Single(Strategy):
    """One process on one device, without a wrapper around the step."""

    name: ClassVar[str] = "single"
    max_world_size: ClassVar[int | None] = 1
    distributed_types: ClassVar[tuple[str, ...]] = ("NO",)
    quantised: ClassVar[tuple[str, ...]] = EVERY_KIND
