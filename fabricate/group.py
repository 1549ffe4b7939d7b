"""The ranks of a run as one group: small agreements, JSON and rows between them, failures told, leaving together.

Owns: the control group (gloo, so that agreeing never waits for the device) and how a process leaves its group. Must not
know: strategies, hooks, the loop. No pickle travels between ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import json
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_control_groups: dict[int, Any] = {}
_exit_handlers: list[object] = []
_failures: list[str] = []
_opened = itertools.count()


def leave_at_exit() -> None:
    """Close the process group when the interpreter ends, once: left open, a rank may be torn down in the midst of it."""
    if dist.is_initialized() and not _exit_handlers:
        _exit_handlers.append(atexit.register(_leave))


def _leave() -> None:
    if not dist.is_initialized() or _failures:  # after a failure others may be gone, and closing could wait for them
        return
    gloo = dist.get_backend() == "gloo"
    if gloo:
        with contextlib.suppress(RuntimeError):  # a rank that is gone breaks the connection: nothing to wait for
            dist.barrier()  # a rank that closes while another still talks to it aborts
    dist.destroy_process_group()
    if gloo:  # its threads may still have to let go of tensors, for which they need an interpreter that is not ending
        time.sleep(0.1)


class Group:
    """This rank among `world_size`; one process is a group too. Every method is called by all ranks, unless it says otherwise."""

    rank: int
    world_size: int

    def join(self) -> None:
        """Begin a piece of work that ranks do together; failures told from here on are its own."""
        self._failure = f"fabricate/failure/{next(_opened)}"
        _failures.clear()
        leave_at_exit()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; `tensor` is on the device. All ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def _control_group(self) -> Any:
        """The gloo group for control data, so that agreeing never waits for the device. Kept as long as the process group."""
        default = dist.group.WORLD
        if dist.get_backend() == "gloo":
            return default
        if id(default) not in _control_groups:
            _control_groups.clear()
            _control_groups[id(default)] = dist.new_group(backend="gloo")
        return _control_groups[id(default)]

    def agree(self, flags: list[int]) -> list[int]:
        """Element-wise maximum of small integers over all ranks. All ranks; one message, no wait for the device."""
        if self.world_size == 1:
            return flags
        tensor = torch.tensor(flags, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control_group())
        result: list[int] = tensor.tolist()
        return result

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank. All ranks. No pickle."""
        if self.world_size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode() or b" "), dtype=torch.uint8)
        group = self._control_group()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
        longest = max(int(s) for s in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(parts, padded, group=group)
        return [json.loads(bytes(p[: int(s)].tolist())) for p, s in zip(parts, sizes, strict=True)]

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank. All ranks."""
        return self.gather_json(value if self.rank == 0 else None)[0]

    def share_buffers(self, module: torch.nn.Module) -> Callable[[], None]:
        """Give every rank rank 0's buffers (running statistics differ between ranks); the returned function puts this
        rank's own back, so that evaluating changes nothing. All ranks."""
        if self.world_size == 1:
            return lambda: None
        buffers = list(module.buffers())
        own = [buffer.clone() for buffer in buffers]
        for buffer in buffers:
            dist.broadcast(buffer, src=0)

        def restore() -> None:
            for buffer, value in zip(buffers, own, strict=True):
                buffer.copy_(value)

        return restore

    def send_rows(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's tensor (same dtype and trailing shape, any number of rows) on rank 0, on the CPU; None elsewhere.
        All ranks, one message per rank: nothing is padded and nothing invented."""
        tensor = tensor.detach().cpu().contiguous()
        if self.world_size == 1:
            return [tensor]
        group = self._control_group()
        shapes = self.gather_json(list(tensor.shape))
        raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        if self.rank:
            if raw.numel():
                dist.send(raw, dst=0, group=group)
            return None
        parts = [tensor]
        for source in range(1, self.world_size):
            part = torch.empty(shapes[source], dtype=tensor.dtype)
            if part.numel():
                dist.recv(part.reshape(-1).view(torch.uint8), src=source, group=group)
            parts.append(part)
        return parts

    def report_failure(self, exc: BaseException) -> str:
        """Leave this rank's failure where the others find it. Returns another rank's message when that one came first and
        `exc` is only its echo (a broken connection), waiting up to 5 s for it; empty otherwise. One rank, never raises."""
        if self.world_size == 1 or not dist.is_initialized():
            return ""
        _failures.append(type(exc).__name__)
        echo = isinstance(exc, RuntimeError) and any(
            word in str(exc)
            for word in ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "Socket")
        )
        try:
            store = dist.distributed_c10d._get_default_store()
            if echo:
                store.wait([self._failure], datetime.timedelta(seconds=5))
                found: dict[str, Any] = json.loads(store.get(self._failure))
                return (
                    f"rank {found['rank']} failed first, this rank {self.rank} stopped with it (the traceback is in the "
                    f"output of rank {found['rank']}):\n{found['error']}"
                )
            if not store.check([self._failure]):
                text = "".join(traceback.format_exception_only(exc))
                store.set(self._failure, json.dumps({"rank": self.rank, "error": text[-8000:]}))
        except (RuntimeError, OSError, ValueError):
            return ""  # the store is gone with its owner: the original exception is all there is to tell
        return ""

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.agree([0])
