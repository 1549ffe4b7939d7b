"""How the ranks make one checkpoint durable together: each writes its files, rank 0 proves that all is there and commits.

Owns: the order of writing, agreeing and committing, the same in the loop and beside it, and what a failure on any rank
means for all. Must not know: runs, hooks, retention (`fabricate.training.saves.saving`), what the state consists of (`contents`).
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from fabricate.checkpoint.format import directory as format
from fabricate.checkpoint.format import files
from fabricate.checkpoint.format.directory import ITEM_SIZES, FileRecord, Manifest
from fabricate.checkpoint.format.files import LOCAL, StorageError
from fabricate.checkpoint.state.contents import Content
from fabricate.checkpoint.state.finite import not_finite, refusal
from fabricate.checkpoint.state.staging import Staging
from fabricate.errors import CheckpointError


class Ranks(Protocol):
    """What committing needs of the ranks; `fabricate.distributed.group.Group` has it. Every method is called by all ranks."""

    rank: int
    world_size: int

    def agree(self, flags: list[int]) -> list[int]:
        """Element-wise maximum over all ranks."""

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank."""

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on every rank."""

    def send_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order, on rank 0; nothing elsewhere."""


_MARGIN = 2**20  # for what a file system needs besides the data, and for the JSON files


def agree(group: Ranks, path: Path, failure: BaseException | None) -> None:
    """Return if no rank failed; reasons travel only where one did. All ranks.

    Raises, on every rank, that the checkpoint `path` was not written and why: a rank's own failure on that rank where it
    is not about the checkpoint, else `StorageError` where nothing but the file system refused, else `CheckpointError`.
    """
    if not group.agree([int(failure is not None)])[0]:
        return
    mine = None if failure is None else [isinstance(failure, OSError | StorageError), _text(failure)]
    failed = [(rank, *reason) for rank, reason in enumerate(group.gather_json(mine)) if reason]
    if failure is not None and not isinstance(failure, OSError | CheckpointError):
        raise failure
    kind = StorageError if all(storage for _, storage, _ in failed) else CheckpointError
    reasons = "; ".join(f"rank {rank}: {text}" if group.world_size > 1 else text for rank, _, text in failed)
    raise kind(f"the checkpoint {path} was not written: {reasons}. The previous checkpoint is intact") from failure


def write(
    group: Ranks, content: Content, path: Path, logs: list[Path], before: Callable[[], None] = lambda: None
) -> None:
    """Write this rank's part of the checkpoint `path` and commit it. All ranks.

    logs: files that the checkpoint refers to by their size; made durable before it. before: called on this rank
    before it writes, and what it raises fails the save. Raises as `agree`; nothing is left.
    """
    size = sum(each.count * ITEM_SIZES[each.dtype] for each in content.chunks)
    nonce, needed = group.broadcast_json([secrets.token_hex(4), sum(group.send_json(size))])
    failure: BaseException | None = None
    staging: Path | None = None
    records: list[FileRecord] = []
    try:
        staging = format.stage(path.parent, content.manifest["step"], nonce)
        before()  # with the directory known, which rank 0 takes away: other ranks may be writing there
        _check_space(staging, needed + _MARGIN)
        records = _write_part(group, content, staging, logs)
    except Exception as exc:
        failure = exc
    try:
        agree(group, path, failure)
        parts = group.send_json([record.to_json() for record in records])
        if group.rank == 0:
            try:
                assert staging is not None
                _commit(content, staging, path.name, nonce, parts)
            except Exception as exc:
                failure = exc
        agree(group, path, failure)
    except Exception:
        if group.rank == 0 and staging is not None:  # no rank writes there any more
            with contextlib.suppress(CheckpointError):  # the next fit here cleans up; reported is why the save failed
                format.discard(staging)
        raise


def _write_part(group: Ranks, content: Content, staging: Path, logs: list[Path]) -> list[FileRecord]:
    """This rank's files, and on rank 0 what is one for all ranks."""
    name = f"data-{group.rank:05d}-of-{group.world_size:05d}.safetensors"
    records = [
        format.write_tensors(staging / name, content.chunks),
        format.write_json(staging / f"rank-{group.rank:05d}.json", content.own),
    ]
    if group.rank == 0:
        records.append(format.write_json(staging / "state.json", content.shared))
        for log in logs:
            with files.explained("write", log):
                LOCAL.fsync_path(log)
    return records


def _commit(content: Content, staging: Path, name: str, nonce: str, parts: list[list[dict[str, Any]]]) -> None:
    """Rank 0, once every rank has written. parts: the records of each rank's files."""
    every = tuple(FileRecord.from_json(record) for part in parts for record in part)
    tensors = content.tensors | format.tensors_of(every)
    manifest = Manifest(**content.manifest, nonce=nonce, tensors=tensors, files=every)
    format.commit(staging, manifest, name=name)


def _check_space(staging: Path, needed: int) -> None:
    with files.explained("ask for the free space of", staging):
        free = LOCAL.free_bytes(staging)
    if free < needed:
        raise StorageError(
            f"{staging.parent} has {free:,} bytes free, the checkpoint takes {needed:,}: free space there, keep fewer "
            "checkpoints, or point run_dir at another disk"
        )


def _text(failure: BaseException) -> str:
    return str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"


class Background:
    """Writes one checkpoint at a time in a thread of every rank, while they train. The same calls on every rank."""

    def __init__(self, group: Ranks, staging: Staging) -> None:
        self._group = group
        self._staging = staging
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.path: Path | None = None
        """The checkpoint that is being written, or was last."""
        self.step = -1
        self.seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint was started and `finish` has not been called since."""
        return self._thread is not None

    @property
    def running(self) -> bool:
        """Whether this rank is still writing."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, content: Content, path: Path, logs: list[Path], trained: Mapping[str, str]) -> None:
        """Copy what is to be written and begin to write it. Nothing may be in progress. trained: the names of parameters by
        those of their chunks; a value among them that is not finite is a failure."""
        assert self._thread is None
        weights = lambda name: name in trained or name.startswith("optimizer/")  # noqa: E731
        content.chunks, ready = self._staging.copy(content.chunks, weights)

        def check() -> None:
            ready()
            copies = self._staging.copies()
            if wrong := not_finite(((trained[n], c) for n, c in copies if n in trained), torch.device("cpu")):
                raise refusal(content.manifest["step"], wrong)

        def work() -> None:
            began = time.monotonic()
            try:
                write(self._group, content, path, logs, before=check)
            except BaseException as exc:
                self._failure = exc
            self.seconds = time.monotonic() - began

        self.path, self.step, self._failure = path, content.manifest["step"], None
        self._thread = threading.Thread(target=work, name="fabricate-save", daemon=True)
        self._thread.start()

    def before_step(self) -> None:
        """Called before an optimizer changes weights: on a device the change waits for their copy, not the host."""
        self._staging.before_step()

    def finish(self, timeout: float | None = None) -> BaseException | None:
        """Wait for what is in progress, at most `timeout` seconds; returns why it failed. Afterwards another may start."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return TimeoutError(f"{self.path} was still being written after {timeout} seconds")
            self._thread = None
        return self._failure
