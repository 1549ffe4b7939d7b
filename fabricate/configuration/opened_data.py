"""The data of a fit or an evaluation, opened for this rank, with the batch size and the number of micro-batches per update.

Owns how a global batch, a strategy's file and the loading arguments become batches per rank. Must not know: how data is read
(`fabricate.data`), models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from fabricate.configuration.arguments import Settings
from fabricate.configuration.resolve import Resolved
from fabricate.data.source import Loading, Source
from fabricate.data.user_data import open_source
from fabricate.errors import ConfigurationError
from fabricate.model.compiling import Compilation
from fabricate.registry.validation import ranks_per_row
from fabricate.strategies.base import Strategy
from fabricate.values import Every


@dataclass(frozen=True)
class Data:
    """The opened data of a fit or an evaluation, and the number of micro-batches per update."""

    train: Source | None = None
    validation: dict[str, Source] = field(default_factory=dict)
    accumulation: tuple[int, str] = (1, "default")
    found: str = ""
    """The source of the batch size, if it was found by a search; else empty."""
    surplus_updates: int = 0
    """The updates that earlier epochs of a resumed fit had in addition to those that they would have now, negative if they had fewer."""

    def total_steps(self, settings: Settings) -> int | None:
        """The number of updates of the whole fit; None if it is not known."""
        per_epoch = self.train.updates_per_epoch if self.train is not None else None
        epochs = settings.max_epochs
        by_epochs = per_epoch * epochs + self.surplus_updates if per_epoch is not None and epochs is not None else None
        return min((limit for limit in (settings.max_steps, by_epochs) if limit is not None), default=None)

    def compilation(self, settings: Settings) -> Compilation | None:
        """The compilation for this data; None if nothing is compiled."""
        if settings.compile is None:
            return None
        in_training = self.train is not None and self.train.rows_differ
        return Compilation(settings.compile, in_training, any(s.rows_differ for s in self.validation.values()))

    def first_validation(self, settings: Settings) -> float | None:
        """The update after which the fit validates first; infinite if it never does, None if it is not known."""
        every = settings.validate_every
        if not self.validation or every is None:
            return math.inf
        per_epoch = self.train.updates_per_epoch if self.train is not None else None
        if every.unit == "steps":
            return every.amount
        if every.unit == "epochs" and settings.max_epochs is not None and every.amount > settings.max_epochs:
            return math.inf
        return per_epoch * every.amount if every.unit == "epochs" and per_epoch is not None else None

    def validates(self, settings: Settings) -> bool:
        """Whether the fit can reach a validation without a hook's request."""
        first, total = self.first_validation(settings), self.total_steps(settings)
        if first is None or (settings.validate_first and self.validation):
            return True
        return first <= (math.inf if total is None else total) and first < math.inf


def open_data(
    settings: Settings, resolved: Resolved, train: object, val: object, loading: Loading, stage: str = "validate"
) -> Data:
    """Open the training data and the data of the evaluation `stage` (`val`) for this rank. A global batch size is turned into accumulation
    steps."""
    accumulation = resolved.accumulation or (1, "default")
    source = None
    few = settings.overfit_batches if train is not None else None
    if few is not None:
        train, loading = _in_order(train, loading, few)
    sets = val if isinstance(val, Mapping) else {"": val} if val is not None else {}
    if train is not None:
        for_train = _for_training(train, sets.values(), loading)
        source = _training_source(settings, resolved, train, for_train, accumulation[0])
        _check_batch_size(source, resolved)
        if resolved.global_batch_size is not None:
            accumulation = _accumulation(source, resolved)
            source = _training_source(settings, resolved, train, for_train, accumulation[0])
    limit = {
        "validate": settings.limit_val_batches,
        "test": settings.limit_test_batches,
        "predict": settings.limit_predict_batches,
    }[stage]
    if train is not None and limit == 0:
        sets = {}  # limit_val_batches=0 turns the validation of a fit off
    elif few is not None:
        sets, limit = dict.fromkeys(sets, train), few
    validation = {
        str(name): _validation_source(resolved, data, _called(name, train), loading, limit)
        for name, data in sets.items()
    }
    if few is not None and validation:
        assert source is not None
        for each in validation.values():
            each.repeats_training = True
        source.notes += (f"overfit_batches={few}: validation reads the training batches instead of val",)
    if train is not None:
        _refuse_one_pass(settings, train, sets)
    return Data(source, validation, accumulation, loading.found)


def _called(name: object, train: object) -> str:
    """The name of a data set in errors: the argument of `fit` or of an evaluation, with the set's own name if it has one."""
    argument = "data" if train is None else "val"
    return f"{argument}[{name!r}]" if name else argument


def _refuse_one_pass(settings: Settings, train: object, val: Mapping[Any, object]) -> None:
    """Raise ConfigurationError for a one-shot iterator, if the fit is known to read the data more than once."""
    again = "Give an object whose __iter__ starts again (a list, a DataLoader, a class with __iter__)"
    if settings.max_steps is not None or (settings.max_epochs or 0) <= 1:
        return
    every_epoch = settings.validate_every == Every(epochs=1)
    named = {f"val[{str(name)!r}]" if name else "val": data for name, data in val.items() if every_epoch}
    for where, data in {"train": train, **named}.items():
        if isinstance(data, Iterator):
            raise ConfigurationError(
                f"{where} is a one-shot iterator ({type(data).__name__}), and max_epochs={settings.max_epochs} reads it more "
                f"than once. {again}"
            )


def _in_order(train: object, loading: Loading, few: int | float) -> tuple[Any, Loading]:
    """`train` and `loading`, changed so that every epoch begins with the same batches."""
    given = f"overfit_batches={few} needs the same batches in every epoch"
    if loading.shuffle:
        raise ConfigurationError(f"{given}, but shuffle=True is set. Remove one of the two")
    if not isinstance(train, DataLoader):
        return train, replace(loading, shuffle=False) if _rows(train) and not _stream(train) else loading
    if isinstance(train.dataset, IterableDataset) or train.batch_sampler is None:
        return train, loading
    sampler = train.sampler
    if type(train.batch_sampler) is not BatchSampler or type(sampler) not in (SequentialSampler, RandomSampler):
        raise ConfigurationError(
            f"{given}, but train has its own sampler. Pass the data set of the loader, or a DataLoader without a sampler"
        )
    if type(sampler) is SequentialSampler:
        return train, loading
    names = ("batch_size", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
    options: dict[str, Any] = {name: getattr(train, name) for name in (*names, "multiprocessing_context", "drop_last")}
    return DataLoader(train.dataset, shuffle=False, **options), loading


def _training_source(
    settings: Settings, resolved: Resolved, data: object, loading: Loading, accumulation: int
) -> Source:
    loading = _with_size(data, loading, resolved)
    rank, world_size = reader(resolved)
    return open_source(
        data,
        argument="train",
        loading=replace(loading, pin_memory=resolved.device.type == "cuda"),
        training=True,
        rank=rank,
        world_size=world_size,
        accumulation=accumulation,
        seed=resolved.seed[0],
        limit=settings.limit_train_batches if settings.overfit_batches is None else settings.overfit_batches,
    )


def _validation_source(
    resolved: Resolved, data: object, argument: str, loading: Loading, limit: int | float | None
) -> Source:
    loading = _for_evaluation(data, _with_size(data, loading, resolved))
    rank, world_size = reader(resolved)
    return open_source(
        data,
        argument=argument,
        loading=replace(loading, pin_memory=resolved.device.type == "cuda"),
        training=False,
        rank=rank,
        world_size=world_size,
        seed=resolved.seed[0],
        limit=limit,
    )


def reader(resolved: Resolved) -> tuple[int, int]:
    """The number of this rank's reader, and the number of readers. Ranks that divide a layer read the same rows, and are one reader."""
    per_row = ranks_per_row(resolved.strategy, resolved.launch.world_size)
    return resolved.launch.rank // per_row, resolved.launch.world_size // per_row


def _check_batch_size(source: Source, resolved: Resolved) -> None:
    """Raise `ConfigurationError` if the strategy's file sets another batch size than that of the training data."""
    if resolved.batch_size is not None and source.batch_size not in (None, resolved.batch_size[0]):
        size, set_by = resolved.batch_size
        raise ConfigurationError(
            f"train has batches of {source.batch_size} rows per rank, but {set_by} sets {size}. Remove one, or make them equal"
        )


def _accumulation(source: Source, resolved: Resolved) -> tuple[int, str]:
    """The number of micro-batches in the requested global batch, and its source."""
    assert resolved.global_batch_size is not None
    size, set_by = resolved.global_batch_size
    setting = f"global_batch_size={size}" + ("" if set_by == "argument" else f" ({set_by})")
    if source.batch_size is None:
        raise ConfigurationError(
            f"{setting} needs data whose rows can be counted in advance. Pass a data set with batch_size=..., or set "
            "gradient_accumulation_steps"
        )
    _, readers = reader(resolved)
    per_step = source.batch_size * readers
    number, rest = divmod(size, per_step)
    if rest or not number:
        raise ConfigurationError(
            f"{setting} is not a multiple of batch_size ({source.batch_size}) x ranks ({readers}) = {per_step}. "
            "Give a multiple, or change batch_size"
        )
    if resolved.accumulation is not None and resolved.accumulation[0] != number:
        raise ConfigurationError(
            f"{setting} means gradient_accumulation_steps={number}, but {resolved.accumulation[0]} is set "
            f"({resolved.accumulation[1]}). Remove one of them"
        )
    return number, "from global_batch_size" if set_by == "argument" else f"from {set_by}"


def _with_size(data: object, loading: Loading, resolved: Resolved) -> Loading:
    """`loading` with the batch size of the strategy's file, for data sets without a batch size of their own."""
    if loading.batch_size is not None or resolved.batch_size is None or isinstance(data, DataLoader | list | tuple):
        return loading
    return replace(loading, batch_size=resolved.batch_size[0]) if _rows(data) else loading


def _rows(data: object) -> bool:
    """Whether `data` consists of rows, which `batch_size` groups into batches."""
    return _stream(data) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def _stream(data: object) -> bool:
    """Whether `data` can only be read from its beginning: torch's or Hugging Face's iterable data set."""
    return isinstance(data, IterableDataset) or type(data).__name__ == "IterableDataset"


def refuse_search(train: object) -> None:
    """Raise `ConfigurationError` for training data whose batch size a `BatchSizeFinder` cannot set."""
    if isinstance(train, DataLoader):
        raise ConfigurationError(
            "batch_size=BatchSizeFinder() has no effect: train is a DataLoader, which has this setting itself. Set it there, or pass the "
            "data set of the loader instead."
        )


def _for_training(train: object, validation: Iterable[object], loading: Loading) -> Loading:
    """The part of `loading` that applies to `train`: for loaders and iterables of batches not what a data set in `validation` needs."""
    if _rows(train) or not any(map(_rows, validation)):
        return loading
    return replace(loading, batch_size=None, num_workers=0, collate_fn=None)


def _for_evaluation(data: object, loading: Loading) -> Loading:
    """The part of `loading` that applies to a validation set: nothing for loaders and iterables of batches."""
    if isinstance(data, DataLoader) or not _rows(data):
        return Loading()
    workers = min(loading.num_workers, 1) if _stream(data) else loading.num_workers
    return Loading(loading.batch_size, workers, loading.collate_fn, None if _stream(data) else False)


def settle(settings: Settings, resolved: Resolved, data: Data) -> None:
    """Pass the result of all settings to the strategy and the precision. No collectives, nothing on a device."""
    result = settled(settings, resolved, data)
    resolved.strategy.settle(result)
    resolved.precision.settle(result)


def settled(settings: Settings, resolved: Resolved, data: Data) -> Strategy.Settled:
    """The result of all settings, in the form for strategies and precisions."""
    return Strategy.Settled(
        world_size=resolved.launch.world_size,
        local_world_size=resolved.launch.local_world_size,
        device=resolved.device,
        precision=resolved.precision,
        micro_batch_size=data.train.batch_size if data.train is not None else None,
        gradient_accumulation_steps=data.accumulation[0],
        max_grad_norm=resolved.max_grad_norm[0] if resolved.max_grad_norm else None,
        nonfinite=settings.nonfinite,
        compiles=settings.compile is not None,
    )
