"""The windows and batches that a source yields, how rows are read and become a batch, and functions that inspect a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from fabricate.errors import ConfigurationError, few


@dataclass(slots=True)
class Window:
    """The data of one update, as one rank reads it.

    `micro_batches` yields `num_micro_steps` pairs ``(batch, rows)``. `rows` of a pair is 0 when the batch is a stand-in that must not
    count, and None when the batch of an iterable does not show its rows (then `rows_of` raises, and the step has to return its weight). The
    field `rows` counts the rows of all ranks; a batch that does not show its rows counts as one.

    If optimizers take turns on the same rows, there is one Window for each turn.
    """

    num_micro_steps: int
    rows: int
    end: int  # rows of the epoch's global order consumed after this window: the position to resume at
    last: bool  # whether this is the last window of the epoch
    micro_batches: Iterator[tuple[Any, int | None]]
    turn: str | None = None  # the optimizer whose turn it is, if optimizers take turns
    first_turn: bool = True
    last_turn: bool = True  # whether no further turn uses these rows


@dataclass(slots=True)
class EvalBatch:
    """One rank's evaluation batch. `indices` are the positions of its rows in the data set or, in sequential data, in the order of
    reading."""

    batch: Any
    rows: int | None  # 0 for a stand-in, None when the batch of an iterable does not show them
    indices: Sequence[int]


_NO_BATCH = (
    "torch's default_collate makes batches of tensors or arrays of equal shapes, numbers, texts, and mappings or tuples of these, not of "
    "None. Give all rows such values of one length, or pass a collate_fn that pads them, for instance with "
    "torch.nn.utils.rnn.pad_sequence (for tokens, fabricate_text.Pad)"
)


class RowReader(Dataset[Any]):
    """Reads the rows of `dataset` at a list of indices, in one call if the data set supports this. `argument`: the name of the data."""

    def __init__(self, dataset: Any, argument: str) -> None:
        self.dataset = dataset
        self._argument = argument
        self._indices: list[Any] = []

    def __getitems__(self, indices: list[Any]) -> Any:
        self._indices = indices
        at_once: Callable[[list[Any]], Any] | None = getattr(self.dataset, "__getitems__", None)
        rows: list[Any] = []
        try:
            if at_once is not None:
                return at_once(indices)
            for index in indices:
                rows.append(self.dataset[index])
        except Exception as exc:
            reading = indices if at_once is not None else [indices[len(rows)]]
            if isinstance(exc, StopIteration):  # it would end the epoch
                problem = "raised StopIteration. Let it return the row, or raise another error"
                raise self._error(reading, problem) from exc
            exc.add_note(f"while reading {self._named(reading)}")
            raise
        return rows

    def check_none(self, rows: list[Any], cause: Exception) -> None:
        """Raise `ConfigurationError` if some of `rows`, those read last, are None."""
        if empty := [index for index, row in zip(self._indices, rows, strict=False) if row is None]:
            problem = "returned None. Leave it out of the data set, or pass a collate_fn that leaves out None"
            raise self._error(empty, problem) from cause

    def _error(self, indices: list[Any], problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self._named(indices)}: {type(self.dataset).__name__} {problem}.")

    def _named(self, indices: list[Any]) -> str:
        return f"row{'s' * (len(indices) > 1)} {few(list(map(str, indices)))} of {self._argument}"


class Collating:
    """Makes a batch of rows by `collate_fn`, or by torch's default_collate if it is None. `argument`: the name of the data. `reader`: what
    reads the rows, if they have indices."""

    def __init__(
        self, collate_fn: Callable[[list[Any]], Any] | None, argument: str, reader: RowReader | None = None
    ) -> None:
        self._collate = collate_fn or default_collate
        self._argument = argument
        self._reader = reader

    def __call__(self, rows: list[Any]) -> Any:
        try:
            return self._collate(rows)
        except StopIteration as exc:  # it would end the epoch
            raise ConfigurationError(
                f"{self._argument}: the collate_fn raised StopIteration. Let it return a batch, or raise another error."
            ) from exc
        except Exception as exc:
            if self._collate is default_collate and self._reader is not None:
                self._reader.check_none(rows, exc)
            how = _NO_BATCH if self._collate is default_collate else f"the collate_fn got {len(rows)} rows"
            exc.add_note(f"{self._argument}: {how}")
            raise


def rows_of(batch: Any) -> int:
    """The number of rows of a batch: the leading dimension of its first tensor or array, else the length of its list of samples.

    >>> rows_of({"image": torch.zeros(8, 3), "label": torch.zeros(8)}), rows_of([{"x": 1}, {"x": 2}])
    (8, 2)

    Raises ConfigurationError if the batch does not show its number of rows.
    """
    rows = visible_rows(batch)
    if rows is None:
        raise ConfigurationError(
            f"cannot tell how many rows a batch of type {type(batch).__name__} has: the batch holds no tensor or array with "
            'a leading dimension and no list of samples. Return {"loss": loss, "weight": weight} from the step (for '
            'metrics: "weight"), where weight is what the mean was taken over.'
        )
    return rows


def rows_that_came(batch: Any, planned: int) -> int:
    """The number of rows of a batch that was planned with `planned` rows. A collate_fn may leave rows out; it may also put time first, pack
    rows, make graphs of them or leave samples in lists. So the result is the largest leading dimension that is not above `planned`, and a
    tensor is ignored if only its second dimension is `planned`.

    >>> rows_that_came((torch.zeros(7, 3), torch.zeros(7)), 8), rows_that_came((torch.zeros(5, 8), torch.zeros(8)), 8)
    (7, 8)
    """
    if isinstance(batch, list | tuple):
        if len(batch) == planned and (_holds_lists(batch) or _one_per_row(batch)):
            return planned
        if _holds_lists(batch) and all(len(part) == planned for part in batch):
            return planned
    shapes = list(_shapes(batch))
    if not shapes:
        return min(_num_listed(batch) or planned, planned)
    leading = [shape[0] for shape in shapes if shape[0] == planned or shape[1:2] != (planned,)]
    return max((rows for rows in leading if rows <= planned), default=planned)


def _one_per_row(batch: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a batch with as many parts as planned rows is a list of samples. Up to three tensors are probably fields; but three that all
    begin with a dimension of 1, as grey images and mono audio do, are probably samples."""
    if _holds_tensors(batch) and len(batch) > 3:
        return True
    if not isinstance(batch, list):
        return False
    if _holds_tensors(batch):
        of_one_kind = len({_kind(part) for part in batch}) == 1 and all(part.shape[:1] == (1,) for part in batch)
        return of_one_kind and len(batch) != 2  # two are an input and its target, of which a row was left out
    return all(map(_is_record, batch))


_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask"})
"""Names of integer inputs of transformers' models that are not labels."""


def several_labels(batch: Any) -> tuple[int, ...] | None:
    """The shape of the first tensor in a batch that has several integers or booleans per row: labels of tokens or pixels, or a mask. None
    if there is no such tensor. In a batch with the key "labels", its value is examined first, and the inputs of transformers' models are
    ignored."""
    if isinstance(batch, torch.Tensor):
        several = not batch.is_floating_point() and batch.ndim >= 2 and batch.shape[1] >= 2
        return tuple(batch.shape) if several and not _are_images(batch) else None
    if isinstance(batch, Mapping) and "labels" in batch:
        batch = {name: value for name, value in batch.items() if name not in _INPUTS}
        shape = several_labels(batch.pop("labels"))
        if shape is not None:
            return shape
    return next((shape for part in _parts(batch) if (shape := several_labels(part)) is not None), None)


def _are_images(tensor: torch.Tensor) -> bool:
    """Whether a tensor probably holds images, with three or four channels first or last."""
    return tensor.dtype == torch.uint8 and tensor.ndim >= 4 and bool({3, 4} & {tensor.shape[-3], tensor.shape[-1]})


def visible_rows(batch: Any) -> int | None:
    rows = _leading_dimension(batch)
    return _num_listed(batch) if rows is None else rows


def rows_at(batch: Any, indices: list[int], rows: int) -> Any:
    """A copy of a batch of `rows` rows with the rows at `indices`. `ValueError` if a part of the batch has no dimension of rows.

    >>> rows_at({"image": torch.arange(3), "names": ["a", "b", "c"]}, [2, 0], 3)
    {'image': tensor([2, 0]), 'names': ['c', 'a']}
    """
    if _are_rows(batch, rows):
        return [batch[index] for index in indices] if isinstance(batch, list) else batch[indices]
    if isinstance(batch, Mapping):
        return type(batch)({name: rows_at(each, indices, rows) for name, each in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple | list):
        parts = [rows_at(each, indices, rows) for each in batch]
        return type(batch)(parts) if type(batch) in (tuple, list) else type(batch)(*parts)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: rows_at(getattr(batch, f.name), indices, rows) for f in fields(batch)})
    raise ValueError(f"{type(batch).__name__} has no dimension of {rows} rows")


def _are_rows(part: Any, rows: int) -> bool:
    """Whether a part of a batch of `rows` rows has one item per row. A list of tensors that each have `rows` items is a list of fields."""
    if isinstance(part, torch.Tensor | np.ndarray):
        return part.ndim > 0 and len(part) == rows
    fields = _holds_tensors(part) and all(each.ndim and len(each) == rows for each in part)
    return isinstance(part, list) and len(part) == rows and not fields


def _leading_dimension(batch: Any) -> int | None:
    return next((shape[0] for shape in _shapes(batch)), None)


def leading_dimensions(batch: Any) -> list[int]:
    """The leading dimensions of the tensors and arrays in a batch, without repetitions."""
    return list(dict.fromkeys(shape[0] for shape in _shapes(batch)))


def _shapes(batch: Any, inside: bool = False) -> Iterator[tuple[int, ...]]:
    """The shapes of the tensors and arrays in a batch that have a leading dimension. `inside`: whether `batch` is only a part of the
    batch."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        if batch.ndim:
            yield (len(batch),) if getattr(batch, "is_nested", False) else tuple(map(int, batch.shape))
    # The dimensions inside a sample are not those of the batch.
    elif _holds_samples(batch):
        yield (len(batch),)
    else:
        parts = list(_parts(batch))
        samples = {len(part) for part in parts if _holds_samples(part)}
        # A list as long as a list of samples belongs to the same samples: images and their metadata, for example.
        for part in parts:
            yield from (
                [(len(part),)] if isinstance(part, list | tuple) and len(part) in samples else _shapes(part, True)
            )
        if inside and _holds_tensors(batch):  # the tensors may be samples, or views of the whole batch
            yield (len(parts),)


def _holds_samples(batch: Any) -> bool:
    """Whether `batch` is a list of records, or of tuples of values of different kinds, such as (image, label)."""
    if not isinstance(batch, list | tuple) or not batch:
        return False
    if not all(map(_is_record, batch)):
        if not _holds_lists(batch):
            return False
        kinds = [[_kind(value) for value in part] for part in batch]
        if len(set(kinds[0])) < 2 or any(each != kinds[0] for each in kinds):
            return False
    return len(batch) > 3 or not _are_batches(batch)


def _are_batches(records: Sequence[Any]) -> bool:
    """Whether each of a few records holds a whole batch, because all tensors in them have one length. default_collate makes such records of
    a data set of pairs."""
    values = [value for record in records for value in _parts(record)]
    if not values or not all(isinstance(value, torch.Tensor | np.ndarray) and value.ndim for value in values):
        return False
    return len({len(value) for value in values}) == 1 and any(value.ndim > 1 for value in values)


def _is_record(part: Any) -> bool:
    named_tuple = isinstance(part, tuple) and type(part) is not tuple
    return named_tuple or isinstance(part, Mapping) or (is_dataclass(part) and not isinstance(part, type))


def _kind(value: Any) -> tuple[Any, ...]:
    """The properties that values of one field share; images of one field may differ in size."""
    return (value.dtype, value.ndim) if isinstance(value, torch.Tensor | np.ndarray) else (type(value),)


def _holds_lists(batch: list[Any] | tuple[Any, ...]) -> bool:
    return bool(batch) and all(isinstance(part, list | tuple) for part in batch)


def _holds_tensors(batch: Any) -> bool:
    return (
        isinstance(batch, list | tuple) and bool(batch) and all(isinstance(p, torch.Tensor | np.ndarray) for p in batch)
    )


def _num_listed(batch: Any) -> int | None:
    if isinstance(batch, list):
        return len(batch)
    return next((rows for part in _parts(batch) if (rows := _num_listed(part)) is not None), None)


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in fields(batch)]
    return ()


def describe(batch: object, depth: int = 0) -> str:
    """One line about a batch: the keys, types and shapes in it, for error messages."""
    if isinstance(batch, torch.Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping) and depth < 3:
        inside = ", ".join(f"{key!r}: {describe(value, depth + 1)}" for key, value in list(batch.items())[:20])
        return "{" + inside + "}"
    if isinstance(batch, tuple | list) and depth < 3:
        inside = ", ".join(describe(value, depth + 1) for value in batch[:8]) + (", ..." if len(batch) > 8 else "")
        return f"({inside})" if isinstance(batch, tuple) else f"[{inside}]"
    return type(batch).__name__
