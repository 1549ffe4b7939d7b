"""Digests of rows, with which ranks check that they read the same data. Must not know: ranks, sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from fabricate.data.flat_bytes import flat_bytes


def digest(rows: Any) -> str:
    """A digest of `rows`, equal for equal rows. It covers tensors, arrays, text, bytes, numbers and collections of them; of any other
    object it covers only the class."""
    hasher = xxhash.xxh3_64()
    _add(hasher, rows)
    return hasher.hexdigest()


def _add(hasher: Any, value: Any) -> None:
    hasher.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu()
        dense = dense.to_dense() if dense.layout is not torch.strided else dense
        hasher.update(str(tuple(dense.shape)).encode())
        hasher.update(flat_bytes(dense).numpy())
    elif isinstance(value, np.ndarray | np.generic):
        hasher.update(str(value.shape).encode())
        if value.dtype == object:
            _add(hasher, value.tolist())
        else:
            hasher.update(np.ascontiguousarray(value))
    elif isinstance(value, str | int | float | complex | None):
        hasher.update(repr(value).encode())
    elif isinstance(value, bytes | bytearray):
        hasher.update(value)
    elif isinstance(value, Mapping):
        for key, below in value.items():
            _add(hasher, key)
            _add(hasher, below)
    elif isinstance(value, list | tuple):
        for below in value:
            _add(hasher, below)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _add(hasher, getattr(value, field.name))
