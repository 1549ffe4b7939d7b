"""One checkpoint before it is written. Must not know: runs, files, commits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fabricate.checkpoint.format.directory import Chunk, TensorRecord
from fabricate.strategies.base import Strategy


@dataclass
class Content:
    """One checkpoint, as far as this rank contributes to it.

    chunks: its parts of tensors, read when they are written. shared: state.json, used on rank 0. own: rank-00000.json.
    tensors: every logical tensor that this rank knows of, whoever writes it: what has to be there. manifest: the other
    fields of the manifest. exchanged: the parts that ranks have to exchange before chunks are read.
    """

    chunks: list[Chunk]
    shared: dict[str, Any]
    own: dict[str, Any]
    tensors: dict[str, TensorRecord]
    manifest: dict[str, Any]
    exchanged: list[Strategy.Part]

    def exchange(self) -> None:
        """Bring together what ranks hold by columns. All ranks, once all of them have assembled theirs."""
        for part in self.exchanged:
            part.values  # noqa: B018  the exchange
        self.exchanged = []  # what chunks do not need any more may go
