"""Orders of rows: rows of similar length together, and rows of several sources by weights.

fabricate seeds the random generators, reads one order per epoch, and resumes at a position in it. An order that is a function of the epoch
therefore resumes exactly and is the same on every rank. Must not know: tokens, batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from fabricate import Callback, ConfigurationError

Counts = np.ndarray[Any, np.dtype[np.int64]]


class ByLength(Sampler[int]):
    """A sampler for a `DataLoader`: random groups of rows of similar length, so that `Pad` adds little padding.

    lengths: the length of every row, in order. group: rows per group: those of a micro-batch on all ranks, batch_size x ranks, or a
    multiple of it. spread: the rows of this many groups are drawn at random, sorted by length and cut into groups; then all groups are
    shuffled. A larger value makes the lengths in a group more similar and the groups less random. The group with the longest row is first,
    so that a lack of memory shows at once.

    Draws from torch's generator, which fabricate seeds for each epoch: the order is the same on every rank, after a resume, and, if `group`
    stays the same, on another number of ranks.

    >>> DataLoader(rows, batch_size=8, sampler=ByLength([len(row["input_ids"]) for row in rows], group=8), collate_fn=Pad(0))
    """

    def __init__(self, lengths: Sequence[int], group: int, spread: int = 50) -> None:
        if group < 1 or spread < 1:
            raise ConfigurationError(f"ByLength: group={group!r}, spread={spread!r}: give at least 1 for both")
        self.lengths = np.asarray(lengths)
        if self.lengths.ndim != 1 or not len(self.lengths):
            raise ConfigurationError(
                f"ByLength: lengths has the shape {self.lengths.shape}: give one number for each row"
            )
        self.group, self.spread = group, spread

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        drawn = torch.randperm(len(self)).numpy()
        step = self.group * self.spread
        groups: list[np.ndarray[Any, Any]] = []
        for start in range(0, len(drawn), step):
            part = drawn[start : start + step]
            part = part[np.argsort(-self.lengths[part], kind="stable")]
            groups += [part[at : at + self.group] for at in range(0, len(part), self.group)]
        # A smaller group stays last: groups after it would not begin where micro-batches begin.
        last = [groups.pop()] if len(groups[-1]) < self.group else []
        order = torch.randperm(len(groups)).tolist()
        if groups:
            longest = max(order, key=lambda place: self.lengths[groups[place]].max())
            order.remove(longest)
            order.insert(0, longest)
        for group in [*(groups[place] for place in order), *last]:
            yield from group.tolist()


class Mixture(Callback):
    """Training rows of several sources by weights, and a record of how many of each were drawn.

    sources: data sets with a length (`datasets.Dataset`, or any with `__len__` and `__getitem__`), by name, with the same columns.
    weights: the relative frequency of each source, by name; they need not add up to 1. Default: the lengths of the sources. rows: the rows
    of an epoch; by default as many as the sources have together. seed: of the random draws.

    An epoch has the share of each source exact to the row, in random order. The rows of one source are drawn in random order, each once
    before any is drawn again, also across epochs if these are read to their ends (drop_last and limit_train_batches leave rows out; set
    rows= instead). The order is a function of seed and epoch: it is the same on every rank, and a resumed run continues in it.

    Give `loader(...)` to `fit`, and the mixture itself as a plugin for the record: the metrics "drawn_NAME" are the numbers of rows drawn
    from each source since the last log boundary. `drawn` and checkpoints have the numbers since the beginning of the run, also if the
    weights were changed, of which a resume warns.

    >>> mixture = Mixture({"web": web, "code": code}, {"web": 0.7, "code": 0.3})
    >>> Trainer(plugins=[mixture], max_epochs=1).fit(module, mixture.loader(batch_size=8, collate_fn=Pad(0)))
    >>> mixture.drawn
    {'web': 6990, 'code': 3010}
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        rows: int | None = None,
        seed: int = 0,
    ) -> None:
        weights = {name: len(source) for name, source in sources.items()} if weights is None else weights
        _check(sources, weights)
        self._names = list(sources)
        rows = sum(len(source) for source in sources.values()) if rows is None else rows
        if rows < 1:
            raise ConfigurationError(f"Mixture: rows={rows!r}: give at least 1")
        self._rows = _Rows(list(sources.values()), [float(weights[name]) for name in self._names], rows, seed)
        self.on_fit_start()

    @property
    def drawn(self) -> dict[str, int]:
        """The rows that were drawn since the beginning of the run, over all ranks, by source. The rows of a skipped update count, unless
        it ends an epoch."""
        return dict(zip(self._names, self._total.tolist(), strict=True))

    def loader(
        self,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> DataLoader[Any]:
        """The loader for `fit(train=...)`. batch_size: rows per rank and micro-batch; options: further arguments of torch's DataLoader."""
        if options.keys() & {"shuffle", "sampler", "batch_sampler"}:
            raise ConfigurationError(
                "Mixture.loader: the mixture orders its rows itself; leave out shuffle and samplers"
            )
        return DataLoader(self._rows, batch_size=batch_size, collate_fn=collate_fn, num_workers=num_workers, **options)

    def on_fit_start(self) -> None:
        none = np.zeros(len(self._names), dtype=np.int64)
        self._before = none
        """The rows drawn before the checkpoint from which this fit continues, by source."""
        self._logged = self._total = none
        self._counted = (0, 0, none)

    def on_step(self, trainer: Any, module: Any) -> None:
        self._total = self._before + self._until(trainer.progress)
        for name, total, before in zip(self._names, self._total, self._logged, strict=True):
            # The progress is that of all ranks, so only rank 0 logs the number.
            module.log(f"drawn_{name}", int(total - before) if trainer.is_main else 0, reduce="sum")
        self._logged = self._total

    def _until(self, progress: Any) -> Counts:
        """The rows drawn in this fit until `progress`, by source. Counts only the rows since the last call. An epoch may end before its
        last row (drop_last, limit_train_batches)."""
        epoch, position, counts = self._counted
        if progress.epoch != epoch:
            position = 0
        if progress.position > position:
            counts = counts + np.bincount(
                self._rows.draw.sources(progress.epoch)[position : progress.position], minlength=len(counts)
            )
        self._counted = (progress.epoch, progress.position, counts)
        return counts

    def on_save(self, state: MutableMapping[str, Any]) -> None:
        state["drawn"] = self.drawn

    def on_load(self, trainer: Any, state: MutableMapping[str, Any]) -> None:
        stored = state["drawn"]
        missing = sorted(stored.keys() - set(self._names))
        if missing:
            raise ConfigurationError(
                f"Mixture: the checkpoint has counts for the sources {missing}, which the mixture no longer has; keep these "
                "sources, with the weight 0"
            )
        self._total = self._logged = np.array([stored.get(name, 0) for name in self._names], dtype=np.int64)
        self._before, progress = self._total, trainer.progress
        self._counted = (progress.epoch, progress.position, np.zeros_like(self._total))


class _Rows(Dataset[Any]):
    """The rows of an epoch by their places in it."""

    def __init__(self, sources: list[Any], weights: Sequence[float], rows: int, seed: int) -> None:
        lengths = [len(source) for source in sources]
        self.shares = np.array([weights, lengths])  # fabricate compares the arrays of a data set when a run is resumed
        self._sources = sources
        total = sum(weights)
        self.draw = _Draw(tuple(weight / total for weight in weights), tuple(lengths), rows, seed)
        self.set_epoch(0)

    def __len__(self) -> int:
        return self.draw.rows

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __getitem__(self, place: int) -> Any:
        sources, rows = self.draw.places(self._epoch)
        return self._sources[sources[place]][int(rows[place])]


@dataclass(frozen=True)
class _Draw:
    """The rows and sources of each epoch, as a function of seed and epoch."""

    chances: tuple[float, ...]
    lengths: tuple[int, ...]
    rows: int
    seed: int

    @functools.lru_cache(maxsize=2)  # noqa: B019  one object for each run
    def places(self, epoch: int) -> tuple[Counts, Counts]:
        """The source of each row of an epoch, and the number of the row in that source."""
        sources = self.sources(epoch)
        numbers = np.empty(self.rows, dtype=np.int64)
        for source, before in enumerate(self.before(epoch)):
            own = sources == source
            numbers[own] = self._next(source, int(before), int(own.sum()))
        return sources, numbers

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def sources(self, epoch: int) -> Counts:
        """The source of each row of an epoch. Each source has its share, rounded down; the remaining rows are assigned to sources at
        random."""
        generator = np.random.default_rng((self.seed, 1, epoch))
        shares = np.array(self.chances) * self.rows
        counts = np.floor(shares + 1e-9).astype(np.int64)
        if missing := self.rows - int(counts.sum()):
            parts = np.clip(shares - counts, 0, None)
            counts[generator.choice(len(counts), size=missing, replace=False, p=parts / parts.sum())] += 1
        drawn: Counts = generator.permutation(np.repeat(np.arange(len(counts)), counts))
        return drawn

    @functools.cache  # noqa: B019
    def before(self, epoch: int) -> Counts:
        """The number of rows of each source in the epochs before `epoch`."""
        if not epoch:
            return np.zeros(len(self.chances), dtype=np.int64)
        for earlier in range(epoch):  # fills the cache, so that the recursion is one level deep
            self.before(earlier)
        return self.before(epoch - 1) + np.bincount(self.sources(epoch - 1), minlength=len(self.chances))

    def _next(self, source: int, before: int, count: int) -> Counts:
        """The next `count` rows of a source of which `before` rows were drawn; every pass over the source has another random order."""
        length = self.lengths[source]
        drawn: list[Counts] = [np.empty(0, dtype=np.int64)]
        while count:
            number, start = divmod(before, length)
            order = np.random.default_rng((self.seed, 2, source, number)).permutation(length)[start : start + count]
            drawn.append(order)
            before, count = before + len(order), count - len(order)
        return np.concatenate(drawn)


def _check(sources: Mapping[str, Any], weights: Mapping[str, float]) -> None:
    if not sources:
        raise ConfigurationError("Mixture: there are no sources: give data sets by name")
    if sources.keys() != weights.keys():
        raise ConfigurationError(
            f"Mixture: weights are given for {sorted(weights)}, but the sources are {sorted(sources)}; give one weight for each "
            "source"
        )
    for name, source in sources.items():
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise ConfigurationError(
                f"Mixture: the source {name!r} is a {type(source).__name__} without a length: give data sets whose rows are read by "
                "number; datasets.interleave_datasets(..., probabilities=..., seed=...) mixes streams"
            )
        if not 0 <= weights[name] < float("inf") or (weights[name] and not len(source)):
            raise ConfigurationError(
                f"Mixture: the source {name!r} has {len(source)} rows and the weight {weights[name]!r}; give a weight of at least "
                "0, and 0 for a source without rows"
            )
    if not any(weights.values()):
        raise ConfigurationError("Mixture: all weights are 0; give at least one source a weight above 0")
