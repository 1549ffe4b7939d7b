"""The engines of a rehearsal: in a real group, or as rank 0 of a group whose other ranks are taken to do the same.

Must not know: the loop, the measurements.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fabricate.distributed.engine import Engine
from fabricate.distributed.group import Group
from fabricate.module import TrainModule
from fabricate.selfcheck.dry_run.recorder import Recorder


class RecordedEngine(Engine):
    """An engine that prepares the module under a recorder, which records the tensors that the strategy keeps."""

    def __init__(self, recorder: Recorder, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._recorder = recorder

    def prepare(self, module: TrainModule, stages: Iterable[str], seed: int) -> torch.nn.Module:
        with self._recorder:
            return super().prepare(module, stages, seed)


class FakeEngine(RecordedEngine):
    """An engine in torch's fake process group: messages from other ranks are copies of this rank's."""

    _fake_group = False

    def prepare(self, module: TrainModule, stages: Iterable[str], seed: int) -> torch.nn.Module:
        # Everything is on the CPU, and torch cannot move fake parameters in place.
        self.accelerator.device_placement = False
        return super().prepare(module, stages, seed)

    def _open_group(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=self.world_size)
        self._fake_group = True

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self._fake_group:
            dist.destroy_process_group()
            self._fake_group = False

    def join(self, timeout: object) -> None:
        """Do nothing: no messages are sent, so no connection is needed."""

    def leave(self, exc: BaseException | None = None) -> None:
        """Do nothing: no other rank waits for this one."""

    def agree(self, flags: list[int]) -> list[int]:
        return flags

    def barrier(self) -> None:
        """Do nothing: there is no other rank to wait for."""

    def gather_json(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def send_json(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def broadcast_json(self, value: Any) -> Any:
        return value

    def send(self, data: bytes | memoryview) -> list[memoryview]:
        return [memoryview(data).cast("B")] * self.world_size

    @contextlib.contextmanager
    def opening_groups(self) -> Iterator[None]:
        yield  # groups open at once, so there are no time-outs

    def counterparts(self, number: int) -> Any:
        return dist.group.WORLD

    def beside(self) -> Group:
        return self
