"""The measurements of a rehearsal, and their text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fabricate.errors import size_text
from fabricate.selfcheck.dry_run.ledger import ACTIVATIONS, GATHERED, GRADIENTS
from fabricate.selfcheck.dry_run.traffic import Sent

NOT_COUNTED = (
    "memory of a GPU's driver, of its allocator (rounding, fragments) and of NCCL's buffers: leave a few GB for these",
    "temporaries inside kernels; kernels and autocast's conversions are those of the CPU",
    "on a GPU: the next unit, which FSDP gathers while the present one computes; AdamW's copies of a whole shard (foreach)",
    "changes by torch.compile, validation, checkpoints, and other engines such as DeepSpeed",
)


@dataclass(frozen=True)
class Measured:
    """The measurements of an update on one rank: bytes, memory by kind."""

    module: str
    strategy: str
    precision: str
    world_size: int
    ranks_per_node: int
    rows: int | None
    micro_steps: int
    at_peak: dict[str, int]
    """Memory by kind at the peak of the total."""
    in_forward: dict[str, int]
    """Memory by kind at the peak of activations during a forward."""
    gradients: int
    """Bytes of gradients after the last backward."""
    hosted: tuple[str, ...]
    """The kinds that are in host memory if there is a device."""
    sent: tuple[Sent, ...]
    operations: int
    room: int | None = None
    largest_rows: int | None = None
    largest_bytes: int = 0

    @property
    def total(self) -> int:
        """The peak of the total memory."""
        return sum(self.at_peak.values())

    @property
    def activations(self) -> int:
        """The larger of the activations in a forward and at the peak of the total."""
        return max(kinds.get(ACTIVATIONS, 0) for kinds in (self.at_peak, self.in_forward))

    @property
    def gathered(self) -> int:
        """The same for gathered units."""
        return max(kinds.get(GATHERED, 0) for kinds in (self.at_peak, self.in_forward))

    def to_json(self) -> dict[str, Any]:
        """All values, as JSON."""
        return {**dataclasses.asdict(self), "total": self.total, "activations": self.activations}

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        nodes = -(-self.world_size // self.ranks_per_node)
        ranks = f"{self.world_size:,} rank{'s' * (self.world_size > 1)}"
        places = f" on {nodes:,} nodes of {self.ranks_per_node}" if nodes > 1 else ""
        many = "es" * (self.micro_steps > 1)
        rows = (
            f"batch{many} as they come"
            if self.rows is None
            else f"micro-batch{many} of {self.rows:,} row{'s' * (self.rows != 1)}"
        )
        yield f"dry run: {self.module} under {self.strategy}, {self.precision}, on {ranks}{places}; {self.micro_steps} {rows} per update"
        yield "per rank, as rank 0 has it:"
        own = {GRADIENTS: self.gradients, ACTIVATIONS: self.activations, GATHERED: self.gathered}
        kinds = dict.fromkeys([*self.at_peak, *(kind for kind, count in own.items() if count)])
        lines = [("memory", "at most", "at the peak")]
        for kind in kinds:
            count = self.at_peak.get(kind, 0)
            place = " (host)" if kind in self.hosted else ""
            lines.append((f"{kind}{place}", size_text(max(own.get(kind, 0), count)), size_text(count)))
        lines.append(("in all", "", size_text(self.total)))
        yield from _table(lines)
        yield from _table(self._traffic())
        if self.room is not None:
            yield self._largest()
        yield "not counted:"
        yield from (f"  {line}" for line in NOT_COUNTED)

    def _traffic(self) -> list[tuple[str, ...]]:
        if not self.sent:
            return [("communication", "none")]
        head = (
            "communication per update",
            "ranks",
            "calls",
            "tensors",
            "sent within the node",
            "between nodes",
            "messages",
        )
        return [
            head,
            *(
                (
                    each.operation,
                    f"{each.ranks:,}",
                    f"{each.calls:,}",
                    size_text(each.bytes),
                    size_text(each.within),
                    size_text(each.between),
                    f"{each.messages:,}",
                )
                for each in self.sent
            ),
        ]

    def _largest(self) -> str:
        assert self.room is not None
        room = size_text(self.room)
        if self.largest_rows is None:
            return f"largest micro-batch within {room}: memory does not grow with the rows of the batch ({size_text(self.largest_bytes)})"
        if not self.largest_rows:
            return f"largest micro-batch within {room}: none; one row takes {size_text(self.largest_bytes)}"
        return (
            f"largest micro-batch within {room}: {self.largest_rows:,} rows, which take {size_text(self.largest_bytes)}"
        )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table in columns; all but the first are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *rest = row
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join(["", first.ljust(widths[0]), *cells]).rstrip()
