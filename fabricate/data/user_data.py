"""Make a `Source` of the user's data, or raise an error that names the kind of data.

Owns the kinds of data, their requirements, and the notes about settings that have another effect than the user may expect. Must not know
how a source reads (`indexed`, `sequential`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from fabricate.data.identity import is_hugging_face
from fabricate.data.indexed import BatchOrder, Draw, DrawnOrder, Indexed, RowOrder, as_indices, drawn
from fabricate.data.order import epoch_order
from fabricate.data.sequential import Sequential
from fabricate.data.source import Loading, Setup, Source
from fabricate.data.workers import has_own_loop

_LEAST_IN_A_COLUMN = 8
"""Images of several sizes may have the same few channels as the first dimension."""


def open_source(
    data: Any,
    *,
    argument: str,
    loading: Loading,
    training: bool,
    rank: int,
    world_size: int,
    accumulation: int = 1,
    seed: int = 0,
    limit: int | float | None = None,
) -> Source:
    """Open `data` for `rank`: a DataLoader, a data set, a stream of rows or an iterable of batches.

    `argument` is the name of the data in errors ("train", "val"). `limit` caps an epoch: a number of micro-batches (int) or a share of the
    epoch (float, at most 1.0). Evaluation (`training=False`) ignores accumulation and drop_last, because every row counts. Nothing is read
    yet, apart from lengths. Raises ConfigurationError for data or settings that are not supported.

    >>> open_source(dataset, argument="train", loading=Loading(8), training=True, rank=0, world_size=2).global_batch
    16
    """
    setup = Setup(
        argument=argument,
        training=training,
        rank=rank,
        world_size=world_size,
        accumulation=accumulation if training else 1,
        seed=seed,
        limit=limit,
        drop_last=loading.drop_last and training,
        notes=[],
    )
    setup.check(loading)
    if loading.drop_last:
        setup.note_drop_last()
    _refuse_other_kinds(data, setup)
    _refuse_tables(data, setup, loading)
    if isinstance(data, DataLoader):
        return _open_loader(data, setup, loading)
    _refuse_several(data, setup)
    if isinstance(data, IterableDataset) or is_hugging_face(data, "IterableDataset"):
        return _open_stream(data, setup, loading)
    if isinstance(data, list | tuple) and loading.batch_size is None:
        return _open_iterable(data, setup, loading)
    if isinstance(data, Dataset) or (isinstance(data, Sized) and hasattr(type(data), "__getitem__")):
        return _open_dataset(data, setup, loading)
    if isinstance(data, Iterable):
        return _open_iterable(data, setup, loading)
    raise setup.error(
        f"is a {type(data).__name__}, neither a data set (__len__ and __getitem__) nor iterable. Pass a DataLoader, "
        "a data set or an iterable of batches"
    )


def _refuse_several(data: Any, setup: Setup) -> None:
    """Raise ConfigurationError for a list of loaders or data sets, which would be read as rows."""
    if isinstance(data, list | tuple) and data and all(isinstance(each, DataLoader | Dataset) for each in data):
        remedy = (
            "Pass one that gives the rows or batches of all (torch's ConcatDataset, for example, or an iterable)"
            if setup.training
            else "Name them in a mapping, {'first': ..., 'second': ...}"
        )
        raise setup.error(f"is a {type(data).__name__} of {len(data)} {type(data[0]).__name__} objects. {remedy}")


def _refuse_other_kinds(data: Any, setup: Setup) -> None:
    """Raise ConfigurationError for objects that look like data but cannot be read as it."""
    if type(data).__module__.partition(".")[0] == "accelerate":
        raise setup.error(
            f"is a {type(data).__name__} that accelerate has already split over the ranks. Pass the DataLoader that "
            "was given to prepare()"
        )
    if callable(getattr(data, "train_dataloader", None)):
        raise setup.error(
            f"is a {type(data).__name__} (a DataModule). Call its prepare_data() and setup('fit'), and pass the loaders that "
            "its methods return: fit(module, data.train_dataloader(), data.val_dataloader())"
        )
    if type(data).__name__ == "CombinedLoader" or (
        setup.training and isinstance(data, Mapping) and any(isinstance(part, DataLoader) for part in data.values())
    ):
        raise setup.error(
            f"is a {type(data).__name__}, which joins several loaders. Pass one data set: torch.utils.data.StackDataset(a=..., b=...) "
            "reads a row of each at a time, ConcatDataset reads them one after the other. For any other combination pass an "
            "iterable of batches"
        )
    if isinstance(data, Mapping | str | bytes) or data is None:
        raise setup.error(
            f"is a {type(data).__name__}, which holds no rows to read. Pass a data set, a DataLoader or an iterable"
        )


def _refuse_tables(data: Any, setup: Setup, loading: Loading) -> None:
    """Raise ConfigurationError for columns, which would be read as rows, and for tables that are not indexed by row. Columns of equal
    shapes may be rows or batches, so they get a note."""
    if isinstance(data, list | tuple) and data and all(isinstance(part, torch.Tensor | np.ndarray) for part in data):
        are = f"is a {type(data).__name__} of {len(data)} tensors or arrays, and each of them"
        remedy = "torch.utils.data.TensorDataset(*tensors); torch.as_tensor(array) makes a tensor of an array"
        if len({tuple(part.shape[1:]) for part in data}) > 1 and (isinstance(data, tuple) or _like_columns(data)):
            raise setup.error(f"{are} would be read as one row. Pass {remedy}")
        if loading.batch_size is not None and _like_columns(data):
            setup.notes.append(f"{setup.argument}: {are} is read as one row. If they are columns, pass {remedy}")
    if type(data).__module__.partition(".")[0] in ("pandas", "polars"):
        raise setup.error(
            f"is a {type(data).__name__}, whose rows cannot be read by index. Pass datasets.Dataset.from_pandas(frame) "
            "(from_polars), or a TensorDataset of its columns"
        )


def _like_columns(parts: Sequence[Any]) -> bool:
    """Whether a few tensors or arrays have the same number of elements in their first dimension, as columns of a table have."""
    sizes = {len(part) if part.ndim else 0 for part in parts}
    return 2 <= len(parts) <= 4 and len(sizes) == 1 and min(sizes) >= _LEAST_IN_A_COLUMN


def _open_dataset(data: Any, setup: Setup, loading: Loading) -> Source:
    rows = _length(data)
    if rows is None:
        raise setup.error(
            f"is a {type(data).__name__} without a length. Give it __len__, or make it a torch IterableDataset if it "
            "can only be read in order"
        )
    if loading.batch_size is None:
        raise setup.error(
            "is a data set, so a batch size is needed. Pass batch_size=... (rows per rank and micro-batch)"
        )
    if loading.collate_fn is None and is_hugging_face(data, "Dataset") and data.format["type"] is None:
        data = data.with_format("torch")
        setup.notes.append(
            f'{setup.argument}: rows are read as tensors (with_format("torch")), the data set had no format'
        )
    shuffle = setup.training if loading.shuffle is None else loading.shuffle
    return Indexed(
        setup,
        "dataset",
        data,
        lambda seed, epoch: RowOrder(epoch_order(rows, seed=seed, epoch=epoch, shuffle=shuffle)),
        batch_size=loading.batch_size,
        units=rows,
        shuffle=shuffle,
        options={
            "collate_fn": loading.collate_fn,
            "num_workers": loading.num_workers,
            "pin_memory": loading.pin_memory,
        },
    )


def _open_loader(loader: DataLoader[Any], setup: Setup, loading: Loading) -> Source:
    setup.refuse(
        loading,
        ("batch_size", "num_workers", "collate_fn", "shuffle", "drop_last"),
        "is a DataLoader, which has this setting itself. Set it there, or pass the data set of the loader instead",
    )
    batch_sampler = loader.batch_sampler
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise setup.error(
                "has a DistributedSampler, but fabricate splits the data over the ranks itself. Remove the sampler and "
                "pass shuffle= to the DataLoader"
            )
    if has_own_loop(loader):
        return _open_batches(loader, setup, f"{type(loader).__name__} has an iterator of its own")
    if isinstance(loader.dataset, IterableDataset):
        return _open_batches(loader, setup, "its data set is a stream")
    if batch_sampler is None:
        return _open_batches(loader, setup, "batch_size=None turns batching off")

    batch_size: int | None
    draw: Draw
    if type(batch_sampler) is BatchSampler:
        batch_size, sampler = batch_sampler.batch_size, batch_sampler.sampler
        if batch_sampler.drop_last:
            setup.note_drop_last()
            setup = replace(setup, drop_last=setup.training)
        draw, units, order, shuffle = _sampler_order(loader.dataset, sampler)
    else:
        batch_size, sampler, shuffle = None, batch_sampler, None
        draw, units = lambda seed, epoch: BatchOrder(drawn(sampler, seed, epoch)), _length(sampler)
        order = f"the batches of {type(sampler).__name__}, drawn for each epoch from the seed, and given to the ranks in turn"
    if units is None:
        return _open_batches(loader, setup, f"{type(sampler).__name__} has no length")
    if order:
        setup.notes.append(f"{setup.argument}: the DataLoader is rebuilt around a global order; {order}")
    elif setup.training and shuffle and getattr(sampler, "generator", None) is not None:
        setup.notes.append(
            f"{setup.argument}: the generator of the DataLoader is not applied to the order of the rows, which follows from the seed and "
            "the epoch; Trainer(seed=...) gives another order"
        )
    options = _options_of(loader, setup, loading)
    source = Indexed(
        setup, "dataloader", loader.dataset, draw, batch_size=batch_size, units=units, shuffle=shuffle, options=options
    )
    source.samplers = (sampler, getattr(sampler, "sampler", None))
    source.rows_per_batch = None if batch_size else _batch_size_of(sampler)
    source.remember(loader)
    return source


def _batch_size_of(made: Any) -> int | None:
    """The `batch_size` of a loader or a batch sampler of the user, if it is a number."""
    size = getattr(made, "batch_size", None)
    return size if isinstance(size, int) else None


def _options_of(loader: DataLoader[Any], setup: Setup, loading: Loading) -> dict[str, Any]:
    """The options of the user's DataLoader for the rebuilt one. Adds notes about options that are not applied."""
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("collate_fn", "num_workers", "timeout", "worker_init_fn", "multiprocessing_context")
    }
    options["pin_memory"] = loader.pin_memory or loading.pin_memory
    options["prefetch_factor"] = loader.prefetch_factor
    _note_persistent_workers(loader, setup)
    if not loader.in_order:
        setup.notes.append(
            f"{setup.argument}: in_order=False of the DataLoader is not applied, because batches are read in order"
        )
    if loader.pin_memory_device:  # deprecated in torch, so passed only if it is set
        options["pin_memory_device"] = loader.pin_memory_device
    return options


def _note_persistent_workers(loader: DataLoader[Any], setup: Setup) -> None:
    if loader.persistent_workers:
        setup.notes.append(
            f"{setup.argument}: persistent_workers=True of the DataLoader is not applied, because worker processes are "
            "started again for each epoch"
        )


def _without_persistent_workers(loader: DataLoader[Any], setup: Setup) -> DataLoader[Any]:
    """`loader`, or a copy of it that starts its workers anew in each epoch: persistent ones would never see a `set_epoch` of their copy of
    the data set, and after a resume they would begin with another state than in the first run."""
    _note_persistent_workers(loader, setup)
    if loader.persistent_workers:
        loader = copy.copy(loader)
        vars(loader).update(persistent_workers=False, _iterator=None)  # torch refuses to assign the first
    return loader


_MOST_DRAWN = 2**24
"""A sampler of more rows is not asked for all rows of an epoch before the epoch, if they can be drawn otherwise."""


def _sampler_order(dataset: Any, sampler: Any) -> tuple[Draw, int | None, str, bool | None]:
    """A function that draws the rows of an epoch for `sampler`, their number, the phrase of a note about a sampler of the user's, and the
    value of `Source.shuffle`."""
    rows = _length(sampler)
    # Only torch's own classes over the whole data set are replaced. A subclass may use any order, so it is iterated.
    whole = type(sampler) in (SequentialSampler, RandomSampler) and rows == _length(dataset) == len(sampler.data_source)
    shuffle = type(sampler) is RandomSampler
    if whole and rows is not None and not (shuffle and sampler.replacement):
        return (
            lambda seed, epoch: RowOrder(epoch_order(rows, seed=seed, epoch=epoch, shuffle=shuffle)),
            rows,
            "",
            shuffle,
        )
    if type(sampler) is RandomSampler and sampler.replacement and rows is not None and rows > _MOST_DRAWN:
        number = len(sampler.data_source)
        phrase = f"the {rows} rows of RandomSampler, drawn with replacement from the seed, the same on all ranks"
        return lambda seed, epoch: DrawnOrder(number, rows, seed, epoch), rows, phrase, None
    phrase = f"the rows of {type(sampler).__name__}, drawn for each epoch from the seed, the same on all ranks"
    return lambda seed, epoch: RowOrder(as_indices(drawn(sampler, seed, epoch))), rows, phrase, None


def _open_stream(data: Any, setup: Setup, loading: Loading) -> Source:
    name = type(data).__name__
    if loading.batch_size is None:
        raise setup.error(
            f"is a stream of rows ({name}), so a batch size is needed. Pass batch_size=... (rows per rank and micro-batch), or "
            "DataLoader(train, batch_size=None) if it yields batches"
        )
    if loading.shuffle:
        raise setup.error(
            f"is a stream ({name}), which shuffle=True cannot reorder. Shuffle in the data set itself "
            "(datasets: .shuffle(seed=..., buffer_size=...)) and leave shuffle unset"
        )
    if loading.num_workers > 1:
        raise setup.error(
            f"is a stream ({name}), and with num_workers={loading.num_workers} each worker process would read the whole "
            "stream, unless its __iter__ divides the rows: every row would come once per worker. Pass num_workers=1 (or 0); if the stream "
            "divides its rows by get_worker_info(), or is one of datasets with several shards, pass DataLoader(train, batch_size=..., "
            "num_workers=...)"
        )
    if is_hugging_face(data, "IterableDataset"):
        if setup.world_size > 1 and data._distributed is not None:
            raise setup.error(
                "is a stream that split_dataset_by_node has already divided over the ranks. Pass the whole stream; fabricate divides it"
            )
        if _shuffled_without_seed(data):
            raise setup.error(
                "is a stream that is shuffled without a seed, so every rank and every resumed run would read another order. "
                "Call .shuffle(seed=...)"
            )
        if loading.collate_fn is None and data._formatting is None:
            data = data.with_format("torch")
            setup.notes.append(
                f'{setup.argument}: rows are read as tensors (with_format("torch")), the stream had no format'
            )
    has_state = _has_state(data) and not is_hugging_face(data, "IterableDataset")  # its state lacks the shuffle buffer
    _note_sequential(setup, "rows", has_state)
    return Sequential(
        setup,
        "stream",
        data,
        batch_size=loading.batch_size,
        units=_length(data),
        collate=loading.collate_fn or default_collate,
        in_worker=loading.num_workers == 1,
        pin_memory=loading.pin_memory,
        has_state=has_state,
    )


def _open_iterable(data: Iterable[Any], setup: Setup, loading: Loading) -> Source:
    setup.refuse(
        loading,
        # shuffle=False is allowed: iterables are never shuffled.
        ("batch_size", "num_workers", "collate_fn", *(["shuffle"] if loading.shuffle else [])),
        f"is an iterable of batches ({type(data).__name__}), which are used as they are. For rows pass a data set or a torch "
        "IterableDataset",
    )
    if isinstance(data, list | tuple) and data and _looks_like_a_row(data[0]):
        setup.notes.append(
            f"{setup.argument}: each of the {len(data)} items of the {type(data).__name__} is taken as one batch, but the first looks "
            "like one row. For rows, pass batch_size="
        )
    return _open_batches(data, setup, None)


def _looks_like_a_row(item: Any) -> bool:
    """Whether the parts of a tuple or list are numbers, or tensors without a common number of rows, as a label beside an image is."""
    if not isinstance(item, list | tuple) or len(item) < 2:
        return False
    sizes = {len(part) if isinstance(part, torch.Tensor | np.ndarray) and part.ndim else 0 for part in item}
    numbers = all(isinstance(part, torch.Tensor | np.ndarray | np.generic | int | float) for part in item)
    return numbers and (0 in sizes or len(sizes) > 1)


def _open_batches(data: Iterable[Any], setup: Setup, reason: str | None) -> Source:
    if reason:
        setup.notes.append(f"{setup.argument}: the DataLoader is read as an iterable of batches, because {reason}")
    if isinstance(data, DataLoader) and not has_own_loop(data):
        data = _without_persistent_workers(data, setup)
    has_state = _has_state(data)
    _note_sequential(setup, "batches", has_state, data.dataset if isinstance(data, DataLoader) else None)
    source = Sequential(
        setup, "iterable", data, batch_size=None, units=_length(data), collate=None, has_state=has_state
    )
    source.rows_per_batch = _batch_size_of(data)
    return source


def _has_state(data: Any) -> bool:
    """Whether `data` can save its position and continue from it."""
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def _note_sequential(setup: Setup, what: str, has_state: bool, inside: Any = None) -> None:
    """Note how data is read that only has an order. `inside`: the data set inside a DataLoader."""
    if setup.world_size > 1:
        setup.notes.append(f"{setup.argument}: every rank reads all {what} and keeps its own part")
    if setup.training and not has_state:
        # `datasets` has a state_dict that omits the content of a shuffle buffer.
        unused = _has_state(inside) and not is_hugging_face(inside, "IterableDataset")
        setup.notes.append(
            f"{setup.argument}: to resume, the epoch is read again up to the position of the checkpoint, which takes time"
            + f". A DataLoader does not use the state_dict of {type(inside).__name__}; torchdata's StatefulDataLoader does"
            * unused
        )


def _shuffled_without_seed(data: Any) -> bool:
    """Whether a `datasets` stream's shuffle was seeded by the operating system: such a seed has 128 bits."""
    nodes = [getattr(data, "_ex_iterable", None)]
    while nodes:
        node = nodes.pop()
        generator = getattr(node, "generator", None)
        if isinstance(generator, np.random.Generator):
            entropy = getattr(generator.bit_generator.seed_seq, "entropy", 0)
            if isinstance(entropy, int) and entropy >= 2**64:
                return True
        if node is not None:
            nodes += [getattr(node, "ex_iterable", None), *getattr(node, "ex_iterables", ())]
    return False


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:  # no __len__, or one that raises (a DataLoader over a stream)
        return None
