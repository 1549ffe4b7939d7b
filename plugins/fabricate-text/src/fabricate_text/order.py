"""In which order rows come: those of about one length together, and rows of several sources by weights.

fabricate asks for an order per epoch, with random generators that are seeded for it, and goes on in it by position: so an order that is a
function of the epoch resumes exactly and is the same on every rank. Must not know: tokens, batches.
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
    """A sampler for a `DataLoader`: random groups of rows of about one length, so that `Pad` adds little.

    lengths: of every row, in their order. group: rows that come together: those of a micro-batch on all ranks, batch_size x ranks, or a
    multiple of it. spread: so many groups are drawn at random, sorted by length, cut into groups and these shuffled; the more, the
    more alike the lengths and the less random the groups. The group with the longest row comes first: what does not fit into memory
    fails at once.

    Draws from torch's generator, which fabricate seeds for each epoch: the same order on every rank and after a resume, and on
    another number of ranks too where `group` stays.

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
        # A group with fewer rows stays the last one: those after it would not begin where micro-batches do.
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
    weights: how often a row comes from each source, by name; they need not add up to 1. Left out: the lengths of the sources.
    rows: those of an epoch; left out: as many as the sources have together. seed: of the drawing.

    An epoch has its share of each source, to the row, in random order; the rows of one source come in a random order, each once before
    any comes again, over epochs that are read to their ends (drop_last and limit_train_batches leave rows out; set rows= instead). All of
    it is a function of seed and epoch: equal on every rank, and a resumed run goes on in it.

    Give `loader(...)` to `fit`, and the mixture itself as a plugin for the record: the rows drawn from each source since the last line are
    the metrics "drawn_NAME", and checkpoints hold the numbers since the beginning, also over a change of the weights, of
    which a resume warns. `drawn` has them.

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
        none = np.zeros(len(sources), dtype=np.int64)
        self._before = none
        """What was drawn before the checkpoint from which this fit continues."""
        self._logged = self._total = none
        self._counted = (0, 0, none)

    @property
    def drawn(self) -> dict[str, int]:
        """The rows that were trained on since the beginning of the run, over all ranks, by source."""
        return dict(zip(self._names, self._total.tolist(), strict=True))

    def loader(
        self,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> DataLoader[Any]:
        """What `fit` takes as `train`. batch_size: rows per rank and micro-batch; options: others of torch's DataLoader."""
        if options.keys() & {"shuffle", "sampler", "batch_sampler"}:
            raise ConfigurationError(
                "Mixture.loader: the mixture orders its rows itself; leave out shuffle and samplers"
            )
        return DataLoader(self._rows, batch_size=batch_size, collate_fn=collate_fn, num_workers=num_workers, **options)

    def on_step(self, trainer: Any, module: Any) -> None:
        self._total = self._before + self._until(trainer.progress)
        for name, total, before in zip(self._names, self._total, self._logged, strict=True):
            # Progress is that of all ranks, so one of them counts.
            module.log(f"drawn_{name}", int(total - before) if trainer.is_main else 0, reduce="sum")
        self._logged = self._total

    def _until(self, progress: Any) -> Counts:
        """What was drawn until now by this object: only what came since the last question is counted. An epoch may end before its last
        row, by drop_last or limit_train_batches."""
        epoch, position, counts = self._counted
        if (progress.epoch, progress.position) < (epoch, position):  # another fit
            epoch, position, counts = progress.epoch, 0, np.zeros_like(counts)
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
    """Which rows of which sources the epochs have: a function of seed and epoch."""

    chances: tuple[float, ...]
    lengths: tuple[int, ...]
    rows: int
    seed: int

    @functools.lru_cache(maxsize=2)  # noqa: B019  one object for each run
    def places(self, epoch: int) -> tuple[Counts, Counts]:
        """Of each row of an epoch the source, and its number there."""
        sources = self.sources(epoch)
        numbers = np.empty(self.rows, dtype=np.int64)
        for source, before in enumerate(self.before(epoch)):
            own = sources == source
            numbers[own] = self._next(source, int(before), int(own.sum()))
        return sources, numbers

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def sources(self, epoch: int) -> Counts:
        """Of each row of an epoch the source. Each has its share, to the row; which of them have one more is drawn."""
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
        """How many rows of each source come before an epoch."""
        if not epoch:
            return np.zeros(len(self.chances), dtype=np.int64)
        for earlier in range(epoch):  # the deepest call is of one more level
            self.before(earlier)
        return self.before(epoch - 1) + np.bincount(self.sources(epoch - 1), minlength=len(self.chances))

    def _next(self, source: int, before: int, count: int) -> Counts:
        """The next `count` rows of a source of which `before` were drawn: pass after pass, each in an order of its own."""
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
