"""What tells a training set from another one of the same length, without running code of the user's. Must not know: sources, ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from fabricate.data.digests import digest

_SAMPLED = 8
"""How many rows of what lies in memory a digest is made of."""


def is_hugging_face(data: Any, name: str) -> bool:
    """Whether `data` is an object of this class of `datasets`."""
    datasets = sys.modules.get("datasets")  # its objects cannot exist before it is imported
    return datasets is not None and isinstance(data, getattr(datasets, name))


def fingerprint(data: Any) -> str | None:
    """What the rows of `data` are known by: of a `datasets.Dataset` its own fingerprint, of tensors, arrays and lists a digest of some
    rows, also where they are attributes of a data set. None where there is nothing of the kind."""
    if is_hugging_face(data, "Dataset"):
        return str(data._fingerprint)
    if isinstance(data, Subset):
        return fingerprint(data.dataset)  # which of its rows: `indices`
    if isinstance(data, ConcatDataset | StackDataset):
        parts = data.datasets
        prints = [fingerprint(part) for part in (parts.values() if isinstance(parts, dict) else parts)]
        return None if None in prints else digest(prints)
    held = data.tensors if isinstance(data, TensorDataset) else [data] if _is_table(data) else _attributes(data)
    return digest([_sample(each) for each in held]) if held else None


def indices(data: Any, samplers: Iterable[Any]) -> str | None:
    """A digest of the rows that `Subset`s and samplers pick, where they are listed in advance (`random_split`, a fold)."""
    listed: list[Any] = []
    while isinstance(data, Subset):
        listed.append(data.indices)
        data = data.dataset
    own = [getattr(sampler, "indices", None) for sampler in samplers]
    listed += [each for each in own if isinstance(each, Sequence | np.ndarray | torch.Tensor)]
    return digest([np.asarray(each) for each in listed]) if listed else None


def _is_table(data: Any) -> bool:
    return isinstance(data, list | tuple | torch.Tensor | np.ndarray)


def _attributes(data: Any) -> list[Any]:
    """The tensors and arrays that a data set holds."""
    held = (value for _, value in sorted(getattr(data, "__dict__", {}).items()))
    return [
        value for value in held if isinstance(value, np.ndarray | torch.Tensor) and value.ndim and _is_readable(value)
    ]


def _is_readable(held: np.ndarray[Any, Any] | torch.Tensor) -> bool:
    return isinstance(held, np.ndarray) or (held.layout is torch.strided and not held.is_meta)


def _sample(rows: Any) -> list[Any]:
    """How many rows there are, and some of them."""
    return [len(rows), list(rows[:: max(1, len(rows) // _SAMPLED)])]
