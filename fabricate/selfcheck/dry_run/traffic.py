"""The collectives of one rank: their number, their bytes, and the links that they use.

Calls and bytes are counted. The bytes per link are computed from these for rings, in which each rank sends to the next, as in NCCL and gloo
for large tensors. Must not know: memory, strategies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops

_NAMES = {
    "all-reduce": ("allreduce_", "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
    "all-gather": (
        *("_allgather_base_", "allgather_", "all_gather_into_tensor", "all_gather_into_tensor_out"),
        "all_gather_into_tensor_coalesced",
    ),
    "reduce-scatter": (
        "_reduce_scatter_base_",
        "reduce_scatter_",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_out",
    ),
    "broadcast": ("broadcast_", "broadcast"),
    "all-to-all": ("alltoall_", "alltoall_base_", "all_to_all_single", "shard_dim_alltoall"),
}
_OPERATIONS = {name: operation for operation, names in _NAMES.items() for name in names}
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


@dataclass(frozen=True)
class Sent:
    """The sum over the calls of one collective in one group, as the average per rank of the group."""

    operation: str
    ranks: int
    calls: int
    bytes: int
    """Bytes of the tensors: of a gather the whole result, of a reduce-scatter the whole input."""
    within: int
    """Bytes that a rank sends within its node. `between`: bytes to other nodes. `messages`: the number of messages."""
    between: int
    messages: int


class Traffic:
    """A counter of collectives."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Restart the count."""
        self._calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def see(self, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        """Count `func`, an operation of the dispatcher that ran on `args`, if it is a collective."""
        if func.namespace not in _NAMESPACES or func not in collective_ops or func in sync_ops:
            return
        name = func.overloadpacket.__name__
        ranks = tuple(dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args)))
        key = _OPERATIONS.get(name, name), ranks
        self._calls[key] += 1
        self._bytes[key] += CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)

    def sent(self, ranks_per_node: int) -> tuple[Sent, ...]:
        """The counted collectives, those with the most bytes first."""
        matching = [
            Sent(operation, len(ranks), calls, size, *_ring(operation, size, calls, ranks, ranks_per_node))
            for (operation, ranks), calls in self._calls.items()
            for size in [self._bytes[operation, ranks]]
        ]
        return tuple(sorted(matching, key=lambda each: -each.bytes))


def _ring(operation: str, size: int, calls: int, ranks: Sequence[int], ranks_per_node: int) -> tuple[int, int, int]:
    """(bytes within the node, bytes to other nodes, number of messages) that a rank sends."""
    number = len(ranks)
    rounds = {"all-reduce": 2 * (number - 1), "broadcast": 1}.get(operation, number - 1)
    sent = size * (rounds if operation != "broadcast" else number - 1) / number
    nodes = [rank // ranks_per_node for rank in ranks]
    apart = sum(a != b for a, b in _neighbours(nodes, operation)) / max(
        1, sum(1 for _ in _neighbours(nodes, operation))
    )
    return round(sent * (1 - apart)), round(sent * apart), calls * rounds


def _neighbours(nodes: Sequence[int], operation: str) -> Iterator[tuple[int, int]]:
    """(sender's node, receiver's node) of each link between two ranks; -1 for another node."""
    if operation == "all-to-all":
        counts: Mapping[int, int] = Counter(nodes)
        for node, number in counts.items():
            yield from [(node, node)] * (number - 1)
            yield from [(node, -1)] * (len(nodes) - number)
    else:
        yield from zip(nodes, [*nodes[1:], nodes[0]], strict=True)
