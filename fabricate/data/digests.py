"""Digests of rows, by which ranks see whether they read the same data. Must not know: ranks, sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash


def digest(rows: Any) -> str:
    """Equal for equal rows. Of objects other than tensors, arrays, text, bytes, numbers and collections of them only the class counts."""
    found = xxhash.xxh3_64()
    _add(found, rows)
    return found.hexdigest()


def _add(found: Any, value: Any) -> None:
    found.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu()
        dense = dense.to_dense() if dense.layout is not torch.strided else dense
        found.update(str(tuple(dense.shape)).encode())
        found.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray | np.generic):
        found.update(str(value.shape).encode())
        if value.dtype == object:
            _add(found, value.tolist())
        else:
            found.update(np.ascontiguousarray(value))
    elif isinstance(value, str | int | float | complex | None):
        found.update(repr(value).encode())
    elif isinstance(value, bytes | bytearray):
        found.update(value)
    elif isinstance(value, Mapping):
        for key, below in value.items():
            _add(found, key)
            _add(found, below)
    elif isinstance(value, list | tuple):
        for below in value:
            _add(found, below)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _add(found, getattr(value, field.name))
