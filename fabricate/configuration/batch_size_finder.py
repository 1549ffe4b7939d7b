"""The search for the largest batch size that fits into memory. Pure; must not know: how a size is tried."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fabricate.errors import ConfigurationError


@dataclass
class BatchSizeFinder:
    """A search for the largest batch size that fits into memory, before the fit. Pass it in place of a batch size.

        Trainer(global_batch_size=512, max_epochs=3).fit(module, train, batch_size=BatchSizeFinder())

    Each size is tried on every rank in a forked process, in `steps_per_trial` updates of the fit with its optimizer, strategy and plugins,
    so that a size that does not fit does no harm: module, data and random generators do not change. A size fits if it fits on every rank.
    With a `global_batch_size`, only sizes that divide it are tried, and the update does not change; otherwise the global batch follows from
    the size. The plan has the size and how it was found; a resumed run takes the size from there.

    mode: "power": double the size until a size does not fit; "binsearch": then search between this size and the last that fitted. init_val:
    the first size; if it does not fit, smaller ones are tried. max_val: the largest size. max_trials: the maximum number of trials. margin:
    the share by which "binsearch" stays below the largest size that fitted, because a fit also validates and saves.

    It works with a data set or a stream of rows, on Linux, if nothing in the process has used a device or a process group: a fork could use
    neither.
    """

    mode: str = "power"
    steps_per_trial: int = 3
    init_val: int = 2
    max_trials: int = 25
    margin: float = 0.05
    max_val: int | None = None
    results: dict[int, bool] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By size, in the order of the trials: whether it fitted into memory in the last search."""

    def __post_init__(self) -> None:
        if self.mode not in ("power", "binsearch"):
            raise ConfigurationError(f"BatchSizeFinder(mode={self.mode!r}): give 'power' or 'binsearch'")
        for name in ("steps_per_trial", "init_val", "max_trials", "max_val"):
            value: Any = getattr(self, name)
            if (value is not None or name != "max_val") and (type(value) is not int or value < 1):
                raise ConfigurationError(f"BatchSizeFinder({name}={value!r}): give a whole number of at least 1")
        if isinstance(self.margin, bool) or not isinstance(self.margin, int | float) or not 0 <= self.margin < 1:
            raise ConfigurationError(
                f"BatchSizeFinder(margin={self.margin!r}): give a share from 0 up to, not including, 1"
            )
        if self.max_val is not None and self.max_val < self.init_val:
            raise ConfigurationError(
                f"BatchSizeFinder(init_val={self.init_val}, max_val={self.max_val}): give init_val <= max_val"
            )

    def search(self, allowed: Sequence[int], fits: Callable[[int], bool]) -> int:
        """The size found among `allowed`, which are ascending. `fits` tries a size. Raises `ConfigurationError` if no size fits."""
        self.results = {}
        sizes = allowed if self.max_val is None else allowed[: _number_up_to(allowed, self.max_val)]
        if not sizes:
            raise ConfigurationError(
                f"BatchSizeFinder(max_val={self.max_val}): the smallest possible size is {allowed[0]}. Raise max_val to at "
                f"least {allowed[0]}"
            )

        def tried(place: int) -> bool:
            size = sizes[place]
            self.results[size] = fits(size)
            return self.results[size]

        good, bad = self._grow(sizes, tried)
        if self.mode == "binsearch" and bad is not None:
            while bad - good > 1 and len(self.results) < self.max_trials:
                middle = (good + bad) // 2
                good, bad = (middle, bad) if tried(middle) else (good, middle)
            good = max(_number_up_to(sizes, int(sizes[good] * (1 - self.margin))) - 1, 0)
        return sizes[good]

    def _grow(self, sizes: Sequence[int], tried: Callable[[int], bool]) -> tuple[int, int | None]:
        """The index of a size that fits, and the index of a larger size that does not fit (at most about twice as large; None if none was
        found)."""
        place, bad = max(_number_up_to(sizes, self.init_val) - 1, 0), None
        while not tried(place):  # sizes can be too large only here, before one fitted
            if place == 0 or len(self.results) >= self.max_trials:
                raise ConfigurationError(
                    f"BatchSizeFinder: batch_size={sizes[place]} does not fit into memory. What helps: strategy='fsdp' "
                    "over more ranks, activation_checkpointing=True, precision='bf16', or a smaller model"
                )
            place, bad = max(_number_up_to(sizes, sizes[place] // 2) - 1, 0), place
        while bad is None and place < len(sizes) - 1 and len(self.results) < self.max_trials:
            following = min(_number_up_to(sizes, 2 * sizes[place] - 1), len(sizes) - 1)
            place, bad = (following, None) if tried(following) else (place, following)
        return place, bad

    def described(self) -> str:
        """The result of the last search, for the plan."""
        too_large = min((size for size, fitted in self.results.items() if not fitted), default=None)
        reason = "no larger one was tried" if too_large is None else f"{too_large} ran out of memory"
        return f"{FOUND}(mode={self.mode!r}): {reason}"


FOUND = "found by BatchSizeFinder"
"""The beginning of texts about a size that was found."""


def sizes(readers: int, rows: int | None, global_batch_size: int | None) -> Sequence[int]:
    """The possible batch sizes, ascending: those that divide a reader's share of the global batch; without one, all up to a reader's number
    of rows."""
    if global_batch_size is not None:
        each = global_batch_size // readers
        return [size for size in range(1, each + 1) if each % size == 0]
    return range(1, 2**31 if rows is None else max(rows // readers, 1) + 1)


def _number_up_to(sizes: Sequence[int], most: int) -> int:
    """The number of elements of `sizes` that are at most `most`."""
    return bisect.bisect_right(sizes, most)
