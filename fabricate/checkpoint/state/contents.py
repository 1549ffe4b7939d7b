"""The content of one checkpoint before it is written. Must not know: runs, files, commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fabricate.checkpoint.format.directory import Chunk, TensorRecord
from fabricate.strategies.base import Strategy


@dataclass
class Content:
    """This rank's contribution to one checkpoint.

    chunks: its parts of tensors, read when they are written. shared: the content of state.json, used on rank 0. own: the content of
    rank-00000.json. tensors: every logical tensor that this rank knows of; the checkpoint must hold all of them, whichever rank writes
    them. manifest: the other fields of the manifest. exchanged: the parts whose values ranks must exchange before chunks are read.
    """

    chunks: list[Chunk]
    shared: dict[str, Any]
    own: dict[str, Any]
    tensors: dict[str, TensorRecord]
    manifest: dict[str, Any]
    exchanged: list[Strategy.Part]

    def exchange(self) -> None:
        """Exchange the values of tensors that ranks hold by columns. All ranks, after every rank has collected its content."""
        for part in self.exchanged:
            part.values  # noqa: B018  the exchange
        self.exchanged = []  # frees parts that no chunk needs
