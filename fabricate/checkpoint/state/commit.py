"""Write one checkpoint on all ranks: each rank writes its files, and rank 0 checks that all exist and commits them.

Owns: the order of writing, agreeing and committing, which is the same in the loop and in a background thread, and the effect of one rank's
failure on all ranks. Must not know: runs, hooks, retention (`fabricate.training.saves.saving`), what the state consists of (`contents`).
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
from fabricate.checkpoint.state.contents import Content, not_finite, refusal
from fabricate.checkpoint.state.staging import Staging
from fabricate.errors import CheckpointError


class Ranks(Protocol):
    """The communication between ranks that a commit needs; `fabricate.distributed.group.Group` implements it. All ranks call every
    method."""

    rank: int
    world_size: int

    def agree(self, flags: list[int]) -> list[int]:
        """The element-wise maximum of `flags` over all ranks."""

    def broadcast_json(self, value: Any) -> Any:
        """The JSON value of rank 0, on every rank."""

    def gather_json(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in rank order, on every rank."""

    def send_json(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in rank order, on rank 0; an empty list on other ranks."""


_MARGIN = 2**20  # space for the file system's own data and for the JSON files


def agree(group: Ranks, path: Path, failure: BaseException | None) -> None:
    """Raise an error on every rank if any rank failed. Reasons are sent only after a failure. All ranks.

    Raises the rank's own failure if it is neither an `OSError` nor a `CheckpointError`. Otherwise raises `StorageError` if all failures
    come from the file system, else `CheckpointError`; both name the checkpoint `path` and the reasons of all ranks.
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

    logs: files whose sizes the checkpoint records; they are made durable before it. before: called on this rank before it writes; an
    exception from it fails the save. Raises the errors of `agree`; then no file of the checkpoint is left.
    """
    size = sum(each.count * ITEM_SIZES[each.dtype] for each in content.chunks)
    nonce, needed = group.broadcast_json([secrets.token_hex(4), sum(group.send_json(size))])
    failure: BaseException | None = None
    staging: Path | None = None
    records: list[FileRecord] = []
    try:
        staging = format.stage(path.parent, content.manifest["step"], nonce)
        before()  # after `stage`, so that rank 0 knows the directory to remove if this fails
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
        if group.rank == 0 and staging is not None:  # no rank writes into it any more
            # The next fit removes what is left; the failure of the save is raised.
            with contextlib.suppress(CheckpointError):
                format.discard(staging)
        raise


def _write_part(group: Ranks, content: Content, staging: Path, logs: list[Path]) -> list[FileRecord]:
    """Write the files of this rank, and on rank 0 also state.json. Returns their records."""
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
    """Commit the staging directory. Called on rank 0, after every rank has written. parts: for each rank, the records of its files."""
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
    """Writes one checkpoint at a time, in a thread on every rank, while training continues. All ranks make the same calls."""

    def __init__(self, group: Ranks, staging: Staging) -> None:
        self._group = group
        self._staging = staging
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.path: Path | None = None
        """The checkpoint that is being written, or the last one."""
        self.step = -1
        self.seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a checkpoint was started that `finish` has not waited for yet."""
        return self._thread is not None

    @property
    def running(self) -> bool:
        """Whether this rank is still writing."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, content: Content, path: Path, logs: list[Path], trained: Mapping[str, str]) -> None:
        """Copy the content and begin to write it. No other checkpoint may be in progress. trained: maps the logical names of trained
        parameters to their names in the module; the save fails if one of them is not finite."""
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
        """Called before an optimizer changes weights. On a device, the change waits until they are copied; the host does not wait."""
        self._staging.before_step()

    def finish(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the checkpoint in progress, at most `timeout` seconds. Returns its failure, or None. Afterwards another checkpoint may
        start, unless the wait timed out."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                return TimeoutError(f"{self.path} was still being written after {timeout} seconds")
            self._thread = None
        return self._failure
