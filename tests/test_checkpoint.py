"""A checkpoint is there or not, whole or named as damaged; no kill, altered byte or hostile file changes that."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors import safe_open
from safetensors.numpy import load_file

from fabricate.checkpoint import directory as checkpoint
from fabricate.checkpoint import writing
from fabricate.checkpoint.directory import (
    Chunk,
    FileRecord,
    Manifest,
    NewerFormatError,
    Reader,
    TensorRecord,
    clean,
    commit,
    committed,
    discard,
    prune,
    set_aside,
    stage,
    tensors_of,
    write_json,
    write_plain_safetensors,
    write_tensors,
)
from fabricate.checkpoint.files import LOCAL, Files, Source, Writer
from fabricate.errors import CheckpointError

CODES = {"float32": "F32", "float64": "F64", "int64": "I64", "uint8": "U8", "bool": "BOOL", "float16": "F16"}
SAVED = Path("step-00000500")


def example(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Several blocks, several dtypes, odd sizes, a scalar and an empty tensor."""
    rng = np.random.default_rng(seed)
    return {
        "model/a.weight": rng.standard_normal((601, 701)).astype(np.float32),
        "model/a.bias": rng.standard_normal(601).astype(np.float16),
        "model/empty": np.zeros((0, 5), dtype=np.float32),
        "optimizer/main/a.weight/exp_avg": rng.standard_normal((601, 701)).astype(np.float32),
        "optimizer/main/a.weight/step": np.array(7.0, dtype=np.float32),
        "rank/00000/rng": rng.integers(0, 255, 5056).astype(np.uint8),
        "model/steps": rng.integers(0, 2**60, 3),
    }


def chunk(name: str, tensor: np.ndarray[Any, Any], start: int = 0, end: int | None = None) -> Chunk:
    part = tensor.reshape(-1)[start:end]
    return Chunk(name, start, part.size, CODES[str(tensor.dtype)], tensor.shape, lambda: part)


def slices(tensors: dict[str, np.ndarray[Any, Any]], rank: int, world_size: int) -> list[Chunk]:
    """What one of several ranks with replicated tensors writes."""
    chunks = []
    for name, tensor in tensors.items():
        start, end = (tensor.size * r // world_size for r in (rank, rank + 1))
        if end > start or (rank == 0 and not tensor.size):
            chunks.append(chunk(name, tensor, start, end))
    return chunks


def manifest(files: list[FileRecord], step: int = 500, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "step": step,
        "run_id": "run",
        "nonce": "9f3a",
        "created": "2031-05-01T12:00:00Z",
        "topology": {"world_size": 2, "strategy": "ddp"},
        "versions": {"fabricate": "0.1.0"},
        "progress": {"epoch": 1},
        "metrics": {"loss": 0.5, "worst": float("inf")},
        "aliases": {"model/head": "model/a.weight"},
        "files": tuple(files),
    } | changes
    if "tensors" not in fields:
        fields["tensors"] = tensors_of(files)
    return Manifest(**fields)


def save(root: Path, step: int = 500, seed: int = 0, world_size: int = 2, files: Files = LOCAL) -> Path:
    staging = stage(root, step, "9f3a", files)
    tensors = example(seed)
    records = [
        write_tensors(staging / f"data-{rank:05d}.safetensors", slices(tensors, rank, world_size), files)
        for rank in range(world_size)
    ]
    records.append(write_json(staging / "state.json", {"scheduler": {"last_epoch": seed}}, files))
    sent = [FileRecord.from_json(json.loads(json.dumps(record.to_json()))) for record in records]
    return commit(staging, manifest(sent, step), files)


def content(path: Path) -> dict[str, bytes]:
    """Everything in a checkpoint, through a verifying reader."""
    with Reader(path) as reader:
        reader.verify()
        found = {name: bytes(reader.read(name)) for name in reader.manifest.tensors}
        return found | {"state.json": json.dumps(reader.json("state.json")).encode()}


def expected(seed: int = 0) -> dict[str, bytes]:
    found = {name: tensor.tobytes() for name, tensor in example(seed).items()}
    return found | {"state.json": json.dumps({"scheduler": {"last_epoch": seed}}).encode()}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def saved(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / SAVED))


# -- what is written can be read


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_checkpoint_comes_back_exactly(tmp_path: Path, world_size: int) -> None:
    path = save(tmp_path / "run" / "checkpoints", world_size=world_size)
    assert path.name == "step-00000500"
    assert content(path) == expected()
    with Reader(path) as reader:
        assert reader.manifest.step == 500
        assert reader.manifest.metrics == {"loss": 0.5, "worst": float("inf")}
        assert reader.manifest.topology == {"world_size": 2, "strategy": "ddp"}
        assert reader.manifest.tensors["model/empty"] == TensorRecord("F32", (0, 5))
        assert reader.read("model/head", 3, 2) == reader.read("model/a.weight", 3, 2)


def test_any_range_is_read_across_files_and_blocks(pristine: Path) -> None:
    whole = example()["model/a.weight"].reshape(-1)
    rng = random.Random(1)
    with Reader(pristine) as reader:
        for _ in range(60):
            start = rng.randrange(whole.size + 1)
            count = rng.randrange(whole.size - start + 1)
            assert reader.read("model/a.weight", start, count) == whole[start : start + count].tobytes()
        assert reader.read("model/a.weight", whole.size) == b""


def test_only_the_overlapping_blocks_are_read(saved: Path) -> None:
    counted: list[tuple[str, int, int]] = []

    class Counting(Files):
        def read_into(self, source: Source, start: int, buffer: memoryview) -> int:
            counted.append((source.path.name, start, len(buffer)))
            return super().read_into(source, start, buffer)

    with Reader(saved, Counting()) as reader:
        counted.clear()
        reader.read("model/steps", 0, 1)
        reader.read("model/steps", 0, 1)
        assert counted == [("data-00000.safetensors", 0, 2**20)]


def test_the_cache_of_blocks_is_bounded(tmp_path: Path) -> None:
    counted: list[int] = []

    class Counting(Files):
        def read_into(self, source: Source, start: int, buffer: memoryview) -> int:
            counted.append(start // 2**20)
            return super().read_into(source, start, buffer)

    staging = stage(tmp_path, 500, "9f3a")
    record = write_tensors(staging / "data.safetensors", [chunk("w", np.zeros(12 * 2**20, dtype=np.uint8))])
    with Reader(commit(staging, manifest([record], aliases={})), Counting()) as reader:
        counted.clear()
        whole = reader.read("w")
        assert counted == list(range(13))
        reader.close()
        counted.clear()
        for _ in range(2):
            for block in range(11):
                assert reader.read("w", block * 2**20, 9) == whole[:9]
            assert counted == list(range(11)), "eight of eleven are kept, so going round finds none of them"
            counted.clear()
        assert reader.read("w", 10 * 2**20, 9) == whole[:9]
        assert counted == []


def test_shares_of_a_verification_read_each_block_once(saved: Path) -> None:
    counted: list[tuple[str, int]] = []

    class Counting(Files):
        def read_into(self, source: Source, start: int, buffer: memoryview) -> int:
            counted.append((source.path.name, start // 2**20))
            return super().read_into(source, start, buffer)

    with Reader(saved, Counting()) as reader:
        blocks = [(f.name, index) for f in reader.manifest.files for index in range(len(f.block_digests))]
        for shares in (1, 2, 3, 100):
            counted.clear()
            for share in range(shares):
                reader.verify(share, shares)
            assert counted == blocks


def test_a_range_is_read_into_memory_that_the_caller_has(pristine: Path) -> None:
    whole = example()["model/a.weight"].reshape(-1)
    mine = np.zeros(whole.size - 100, dtype=np.float32)
    with Reader(pristine) as reader:
        reader.read_into("model/head", memoryview(mine).cast("B"), 7)
        assert (mine == whole[7:-93]).all()
        with pytest.raises(CheckpointError, match="a multiple of 4"):
            reader.read_into("model/head", memoryview(bytearray(5)))
        with pytest.raises(CheckpointError, match="were asked for"):
            reader.read_into("model/head", memoryview(bytearray(8)), whole.size - 1)


def test_every_tensor_file_is_plain_safetensors(pristine: Path) -> None:
    tensors = example()
    for rank in range(2):
        with safe_open(pristine / f"data-{rank:05d}.safetensors", framework="np") as file:
            keys = sorted(file.keys())
            assert keys == sorted(f"{c.tensor}|{c.start}" for c in slices(tensors, rank, 2))
            for key in keys:
                name, start = key.rsplit("|", 1)
                part = file.get_tensor(key)
                assert (part == tensors[name].reshape(-1)[int(start) :][: part.size]).all()


def test_a_reader_written_from_the_documentation_agrees(pristine: Path) -> None:
    document = json.loads((pristine / "manifest.json").read_bytes())
    body = json.dumps(document["manifest"], sort_keys=True, separators=(",", ":")).encode("ascii")
    assert hashlib.sha256(body).hexdigest() == document["sha256"]
    types = {code: name for name, code in CODES.items()}
    found = {
        name: np.zeros(np.prod(record["shape"], dtype=int), types[record["dtype"]])
        for name, record in document["manifest"]["tensors"].items()
    }
    for record in document["manifest"]["files"]:
        data = (pristine / record["name"]).read_bytes()
        size = record["block_size"]
        blocks = [data[start : start + size] for start in range(0, len(data), size)]
        assert [xxhash.xxh3_128_hexdigest(block) for block in blocks] == record["block_xxh3_128"]
        for tensor, start, count, dtype, _, offset in record["chunks"]:
            found[tensor][start : start + count] = np.frombuffer(data, types[dtype], count, offset)
    assert {name: tensor.tobytes() for name, tensor in found.items()} == {
        name: tensor.tobytes() for name, tensor in example().items()
    }


def test_every_chunk_is_aligned_to_its_item_size(tmp_path: Path) -> None:
    odd = [chunk("b", np.ones(3, dtype=np.uint8)), chunk("f", np.ones(3, dtype=np.float16)), chunk("i", np.arange(3))]
    record = write_tensors(tmp_path / "odd.safetensors", odd)
    assert [c.tensor for c in record.chunks] == ["i", "f", "b"]
    assert all(c.offset % checkpoint.ITEM_SIZES[c.dtype] == 0 for c in record.chunks)


def test_an_export_has_names_shapes_and_metadata(tmp_path: Path) -> None:
    tensors = example()
    path = tmp_path / "model.safetensors"
    write_plain_safetensors(path, [chunk(name, tensor) for name, tensor in tensors.items()])
    loaded = load_file(path)
    assert {name: (found.shape, found.tobytes()) for name, found in loaded.items()} == {
        name: (tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()
    }
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    with pytest.raises(CheckpointError, match="exports hold whole tensors"):
        write_plain_safetensors(tmp_path / "part.safetensors", [chunk("w", np.ones(4), 1)])


def test_one_chunk_at_a_time_is_in_memory(tmp_path: Path) -> None:
    alive: list[int] = []

    class Buffered(bytearray):
        def __del__(self) -> None:
            alive.remove(len(self))

    def data() -> Buffered:
        alive.append(300_000)
        assert len(alive) <= 2  # the one being handed over and the one being made
        return Buffered(300_000)

    write_tensors(tmp_path / "x.safetensors", [Chunk(f"t{i}", 0, 300_000, "U8", (300_000,), data) for i in range(9)])
    assert alive == []


# -- what cannot be written is refused


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (Chunk("w", 0, 4, "F32", (4,), lambda: b"123"), "number of bytes"),
        (Chunk("w", 2, 4, "F32", (4,), lambda: b"1" * 16), "count of 'w'"),
        (Chunk("w", -1, 4, "F32", (4,), lambda: b"1" * 16), "start of 'w'"),
        (Chunk("w", 0, 4, "F4", (4,), lambda: b"1" * 16), "dtype is 'F4'"),
        (Chunk("", 0, 4, "F32", (4,), lambda: b"1" * 16), "a tensor name"),
        (Chunk("a\nb", 0, 4, "F32", (4,), lambda: b"1" * 16), "a tensor name"),
        (Chunk("w", 0, 4, "F32", (4,), lambda: [1.0, 2.0, 3.0, 4.0]), "view it as uint8"),
        (Chunk("w", 0, 4, "F32", (4,), lambda: np.ones(8, dtype=np.float32)[::2]), "contiguous"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_chunk_that_does_not_fit_is_refused(tmp_path: Path, bad: Chunk, complaint: str) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        write_tensors(tmp_path / "x.safetensors", [bad])


def test_a_chunk_given_twice_is_refused(tmp_path: Path) -> None:
    twice = [chunk("w", np.ones(3)), chunk("w", np.ones(3))]
    with pytest.raises(CheckpointError, match="written once"):
        write_tensors(tmp_path / "x.safetensors", twice)


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("precious")
    with pytest.raises(CheckpointError, match="File exists"):
        write_json(tmp_path / "state.json", {})
    assert (tmp_path / "state.json").read_text() == "precious"


@pytest.mark.parametrize("name", ["manifest.json", "state.pkl", ".hidden.json", "a b.json", "weights.bin"])
def test_no_other_kind_of_file_is_written_into_a_checkpoint(tmp_path: Path, name: str) -> None:
    if name == "manifest.json":
        with pytest.raises(CheckpointError, match="does not list itself"):
            write_json(tmp_path / name, {})
    else:
        with pytest.raises(CheckpointError, match="a file name"):
            write_json(tmp_path / name, {})


def test_commit_proves_that_every_element_is_there_once(tmp_path: Path) -> None:
    whole = np.arange(10, dtype=np.float32)
    tensors = {"w": TensorRecord("F32", (10,))}

    def manifest_of(*parts: tuple[int, int]) -> Manifest:
        staging = tmp_path / str(parts)
        staging.mkdir()
        files = [
            write_tensors(staging / f"data-{i}.safetensors", [chunk("w", whole, *part)]) for i, part in enumerate(parts)
        ]
        return manifest(files, tensors=tensors, aliases={})

    assert manifest_of((5, 10), (0, 5)).tensors == tensors
    with pytest.raises(CheckpointError, match="nothing covers elements 4 to 5 of 'w'"):
        manifest_of((0, 4), (5, 10))
    with pytest.raises(CheckpointError, match="two chunks cover elements 4 to 5 of 'w'"):
        manifest_of((0, 5), (4, 10))
    with pytest.raises(CheckpointError, match="two chunks cover"):
        manifest_of((0, 10), (0, 9))
    with pytest.raises(CheckpointError, match="nothing covers elements 9 to 10"):
        manifest_of((0, 9))
    with pytest.raises(CheckpointError, match="nothing covers elements 0 to 10"):
        manifest_of()


def test_ranks_that_disagree_about_a_tensor_are_named(tmp_path: Path) -> None:
    records = [
        write_tensors(tmp_path / "data-0.safetensors", [chunk("w", np.ones(4, dtype=np.float32), 0, 2)]),
        write_tensors(tmp_path / "data-1.safetensors", [chunk("w", np.ones(4), 2, 4)]),
    ]
    with pytest.raises(CheckpointError, match=r"data-1\.safetensors: 'w'"):
        tensors_of(records)
    with pytest.raises(CheckpointError, match=r"data-1\.safetensors holds 'w' as .*F64"):
        manifest(records, tensors={"w": TensorRecord("F32", (4,))}, aliases={})
    with pytest.raises(CheckpointError, match="does not list"):
        manifest(records, tensors={}, aliases={})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"nonce": "../x"}, "nonce"),
        ({"created": "yesterday"}, "created"),
        ({"created": "2031-13-01T12:00:00Z"}, "not a time"),
        ({"run_id": ""}, "run_id"),
        ({"metrics": {"loss": np.float64(1.0)}}, "metric 'loss'"),
        ({"aliases": {"x": "nowhere"}}, "alias 'x'"),
        ({"aliases": {"model/a.bias": "model/a.weight"}}, "alias"),
    ],
)
def test_a_manifest_value_out_of_range_is_named(pristine: Path, changes: dict[str, Any], complaint: str) -> None:
    with Reader(pristine) as reader:
        files = list(reader.manifest.files)
    with pytest.raises(CheckpointError, match=complaint):
        manifest(files, **changes)


def test_commit_refuses_missing_extra_and_short_files_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    def attempt(spoil: Callable[[Path], object]) -> str:
        staging = stage(tmp_path, 500, "9f3a")
        record = write_tensors(staging / "data.safetensors", [chunk("model/a.weight", example()["model/a.weight"])])
        spoil(staging)
        with pytest.raises(CheckpointError) as raised:
            commit(staging, manifest([record]))
        discard(staging)
        assert list(tmp_path.iterdir()) == []
        return str(raised.value)

    assert "data.safetensors is missing" in attempt(lambda path: (path / "data.safetensors").unlink())
    assert "extra.json is not listed" in attempt(lambda path: write_json(path / "extra.json", {}))
    assert "has 9 bytes" in attempt(lambda path: os.truncate(path / "data.safetensors", 9))


def test_commit_never_replaces_a_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path)
    with pytest.raises(CheckpointError, match="exists already"):
        save(tmp_path, seed=1)
    assert content(path) == expected()
    assert [p.name for p in clean(tmp_path)] == [".tmp-step-00000500-9f3a"]


def test_commit_takes_only_its_own_staging_directory_and_plain_names(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="staging directory"):
        commit(stage(tmp_path, 400, "9f3a"), manifest([], tensors={}, aliases={}))
    staging = stage(tmp_path, 500, "9f3a")
    with pytest.raises(CheckpointError, match="name"):
        commit(staging, manifest([], tensors={}, aliases={}), name="../elsewhere")
    assert commit(staging, manifest([], tensors={}, aliases={}), name="before-surgery") == tmp_path / "before-surgery"
    assert Reader(tmp_path / "before-surgery").manifest.step == 500


def test_a_full_disk_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    class Full(Files):
        def write(self, writer: Writer, data: bytes | bytearray | memoryview) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"cannot write .*data-00000.*No space left.*point run_dir"):
        save(tmp_path, files=Full())
    assert committed(tmp_path) == []


def test_a_rename_that_succeeds_but_reports_an_error_is_a_commit(tmp_path: Path) -> None:
    class Repeating(Files):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            super().rename(source, target)

    path = save(tmp_path, files=Repeating())
    assert content(path) == expected()


def test_a_rename_that_fails_is_not_a_commit(tmp_path: Path) -> None:
    class Refusing(Files):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(CheckpointError, match="cannot commit"):
        save(tmp_path, files=Refusing())
    assert committed(tmp_path) == []


# -- the directory of checkpoints


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path: Path) -> None:
    names = ["step-00000020", "step-00000003", "step-123456789", ".tmp-step-00000004-a", ".bad-step-00000005",
             "step-000000006", "step-7", "step-00000008x", "best"]  # fmt: skip
    for name in names:
        (tmp_path / name).mkdir()
    assert [path.name for path in committed(tmp_path)] == ["step-00000003", "step-00000020", "step-123456789"]
    assert committed(tmp_path / "nowhere") == []


def test_clean_removes_leftovers_and_does_not_follow_links(tmp_path: Path) -> None:
    precious = tmp_path / "elsewhere"
    precious.mkdir()
    (precious / "file").write_text("kept")
    root = tmp_path / "checkpoints"
    path = save(root)
    staging = stage(root, 501, "dead")
    (staging / "link").symlink_to(precious)
    (root / ".trash-step-00000001").symlink_to(precious)
    (root / ".bad-step-00000002").mkdir()
    assert [p.name for p in clean(root)] == [".tmp-step-00000501-dead", ".trash-step-00000001"]
    assert sorted(p.name for p in root.iterdir()) == [".bad-step-00000002", path.name]
    assert (precious / "file").read_text() == "kept"
    assert clean(tmp_path / "nowhere") == []


def test_prune_takes_the_name_away_before_it_deletes(tmp_path: Path) -> None:
    done: list[str] = []

    class Recording(Files):
        def rename(self, source: Path, target: Path) -> None:
            done.append(f"rename {source.name} {target.name}")
            super().rename(source, target)

        def fsync_directory(self, path: Path) -> None:
            done.append("fsync")
            super().fsync_directory(path)

        def unlink(self, path: Path) -> None:
            done.append("unlink")
            super().unlink(path)

    old, new = save(tmp_path, 1), save(tmp_path, 2)
    (tmp_path / ".trash-step-00000001").mkdir()
    (tmp_path / ".trash-step-00000001" / "leftover.json").touch()
    prune([old], Recording())
    assert done == ["unlink", "rename step-00000001 .trash-step-00000001", "fsync", *["unlink"] * 4]
    assert list(tmp_path.iterdir()) == [new]


def test_a_damaged_checkpoint_is_set_aside_with_its_reason(tmp_path: Path) -> None:
    first = set_aside(save(tmp_path), "block 3 of data-00000.safetensors is damaged")
    second = set_aside(save(tmp_path), "again")
    assert [first.name, second.name] == [".bad-step-00000500", ".bad-step-00000500-2"]
    assert json.loads((first / "reason.json").read_text()) == {"reason": "block 3 of data-00000.safetensors is damaged"}
    assert committed(tmp_path) == []
    assert clean(tmp_path) == []


def test_setting_aside_is_durable(tmp_path: Path) -> None:
    synced: list[Path] = []

    class Recording(Files):
        def fsync_directory(self, path: Path) -> None:
            synced.append(path)
            super().fsync_directory(path)

    path = save(tmp_path)
    set_aside(path, "torn", Recording())
    assert synced == [tmp_path]


def test_a_full_disk_does_not_stop_setting_aside(tmp_path: Path) -> None:
    class Full(Files):
        def create(self, path: Path) -> Writer:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert set_aside(save(tmp_path), "torn", Full()).name == ".bad-step-00000500"


# -- a kill at any instant


class Killed(BaseException):
    """Stands for the end of the process."""


class Mortal(Files):
    """Dies at operation `fatal`; a write is torn. What was done before stays."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.done = 0

    def _live(self) -> None:
        self.done += 1
        if self.done >= self.fatal:
            raise Killed

    def create(self, path: Path) -> Writer:
        self._live()
        return super().create(path)

    def write(self, writer: Writer, data: bytes | bytearray | memoryview) -> None:
        if self.done + 1 == self.fatal:
            os.write(writer.descriptor, memoryview(data)[: len(data) // 2])
        self._live()
        super().write(writer, data)

    def fsync(self, writer: Writer) -> None:
        self._live()
        super().fsync(writer)

    def close_writer(self, writer: Writer) -> None:
        super().close_writer(writer)  # a dead process has no open files
        self._live()

    def make_directory(self, path: Path) -> None:
        self._live()
        super().make_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._live()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._live()
        super().unlink(path)

    def remove_directory(self, path: Path) -> None:
        self._live()
        super().remove_directory(path)

    def fsync_directory(self, path: Path) -> None:
        self._live()
        super().fsync_directory(path)


def test_after_a_kill_at_any_operation_the_newest_checkpoint_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    """A save of step 2 that prunes step 1, killed at operation 1, 2, 3, ... until it gets through; then once more."""
    old = save(tmp_path / "old", 1)
    before, after = expected(0), expected(1)
    outcomes = []
    for fatal in range(1, 1000):
        root = tmp_path / f"killed-{fatal}"
        shutil.copytree(old, root / old.name)
        files = Mortal(fatal)
        try:
            save(root, 2, seed=1, files=files)
            prune([root / old.name], files)
            finished = True
        except Killed:
            finished = False
        found = committed(root)
        for path in found:
            assert content(path) == (before if path.name == old.name else after)
        outcomes.append([path.name for path in found])
        assert found, f"nothing is left after a kill at operation {fatal}"
        clean(root)
        assert sorted(path.name for path in root.iterdir()) == outcomes[-1]
        if outcomes[-1] == [old.name]:
            assert content(save(root, 2, seed=1)) == after
        shutil.rmtree(root)
        if finished:
            break
    assert finished
    assert len(outcomes) > 25
    assert [outcomes[0], outcomes[-1]] == [["step-00000001"], ["step-00000002"]]
    assert ["step-00000001", "step-00000002"] in outcomes


def test_every_file_is_durable_before_the_manifest_and_the_manifest_before_the_name(tmp_path: Path) -> None:
    done: list[str] = []

    class Recording(Files):
        def create(self, path: Path) -> Writer:
            done.append(f"create {path.name}")
            return super().create(path)

        def fsync(self, writer: Writer) -> None:
            done.append(f"fsync {writer.path.name}")
            super().fsync(writer)

        def rename(self, source: Path, target: Path) -> None:
            done.append("rename")
            super().rename(source, target)

        def fsync_directory(self, path: Path) -> None:
            done.append(f"fsync {path.name}")
            super().fsync_directory(path)

    save(tmp_path / "run" / "checkpoints", files=Recording())
    assert done == [
        f"fsync {tmp_path.name}",
        "fsync run",
        "create data-00000.safetensors",
        "fsync data-00000.safetensors",
        "create data-00001.safetensors",
        "fsync data-00001.safetensors",
        "create state.json",
        "fsync state.json",
        "create manifest.json",
        "fsync manifest.json",
        "fsync .tmp-step-00000500-9f3a",
        "rename",
        "fsync checkpoints",
    ]


# -- damage


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        content(path)
    message = str(raised.value)
    assert str(path) in message
    return message


def test_damage_is_named_with_directory_file_block_and_remedy(saved: Path) -> None:
    with (saved / "data-00001.safetensors").open("r+b") as file:
        file.seek(2**20 + 5)
        byte = file.read(1)[0]
        file.seek(2**20 + 5)
        file.write(bytes([byte ^ 4]))
    message = refused(saved)
    assert "data-00001.safetensors: block 1 (bytes 1048576 to" in message
    assert "resume from an older checkpoint" in message
    with Reader(saved) as reader:
        assert reader.read("model/steps") == example()["model/steps"].tobytes()  # its block is intact


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert "manifest.json: missing" in refused(tmp_path / "step-00000001")
    (tmp_path / "step-00000002").write_text("a file")
    assert "Not a directory" in refused(tmp_path / "step-00000002")


def test_a_renamed_checkpoint_is_refused_under_another_step(saved: Path) -> None:
    assert "belongs to step 500" in refused(saved.rename(saved.with_name("step-00000600")))


def test_special_files_are_refused_without_waiting(saved: Path, tmp_path: Path) -> None:
    for name in ("manifest.json", "data-00000.safetensors", "state.json"):
        file, real = saved / name, tmp_path / "real"
        file.rename(real)
        for make in (lambda: file.symlink_to(real), lambda: os.mkfifo(file), file.mkdir):  # noqa: B023
            make()
            assert name in refused(saved)
            file.rmdir() if file.is_dir() else file.unlink()
        real.rename(file)
    assert content(saved) == expected()


def test_a_file_that_turns_into_a_link_or_pipe_after_the_checks_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    for refuses in (LOCAL.open, LOCAL.size):
        for name in ("link", "pipe", "."):
            with pytest.raises(OSError, match=r"not a regular file|symbolic links"):
                refuses(tmp_path / name)


def test_unknown_names_are_errors_with_a_suggestion(pristine: Path) -> None:
    with Reader(pristine) as reader:
        with pytest.raises(CheckpointError, match=r"no tensor 'model/a.wieght'; did you mean 'model/a.weight'"):
            reader.read("model/a.wieght")
        with pytest.raises(CheckpointError, match=r"did you mean 'state.json'"):
            reader.json("stat.json")
        with pytest.raises(CheckpointError, match="no JSON file"):
            reader.json("../../secret.json")
        for start, count in ((-1, 2), (0, 10**18), (700_000, 1)):
            with pytest.raises(CheckpointError, match="were asked for"):
                reader.read("model/a.weight", start, count)


Spoil = Callable[[random.Random, bytes, bytes], bytes]


def _bit_flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data))
    return _put(data, at, bytes([data[at] ^ 1 << rng.randrange(8)]))


def _splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data))
    return _put(data, at, other[at : at + rng.randrange(1, 5000)])


def _removed_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, 9) :]


def _put(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new[: len(data) - at] + data[at + len(new) :]


SPOILERS: dict[str, Spoil] = {
    "bit flip": _bit_flip,
    "truncation": lambda rng, data, other: data[: rng.randrange(len(data))],
    "zeroed bytes": lambda rng, data, other: _put(data, rng.randrange(len(data)), bytes(rng.choice([1, 512, 4096]))),
    "append": lambda rng, data, other: data + rng.choice([b"\0", b"\n", b" ", b"}", data[:100]]),
    "splice": _splice,
    "removed bytes": _removed_bytes,
    "huge header": lambda rng, data, other: _put(data, 0, struct.pack("<Q", rng.choice([0, 2**40, 2**64 - 1]))),
    "swapped file": lambda rng, data, other: other,
}


@pytest.mark.parametrize("kind", SPOILERS)
def test_no_altered_byte_goes_unnoticed(kind: str, saved: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", seed=1)
    good = expected()
    rng = random.Random(kind)
    caught = 0
    for round_number in range(160):
        name = sorted(os.listdir(saved))[round_number % 4]
        original = (saved / name).read_bytes()
        spoiled = SPOILERS[kind](rng, original, (other / name).read_bytes())
        (saved / name).write_bytes(spoiled)
        if spoiled == original:
            assert content(saved) == good
        else:
            message = refused(saved)
            # An intact manifest of another checkpoint blames the first file that is not its own.
            assert name in message or (name == "manifest.json" and spoiled == (other / name).read_bytes())
            caught += 1
        (saved / name).write_bytes(original)
    assert caught >= 110
    assert content(saved) == good


def test_missing_and_extra_files_are_named(saved: Path) -> None:
    for name in sorted(os.listdir(saved)):
        data = (saved / name).read_bytes()
        (saved / name).unlink()
        assert f"{name}: missing" in (message := refused(saved)) or f"{name} is missing" in message
        (saved / name).write_bytes(data)
    for name in ("extra.json", "model.pt", "data.pkl", ".hidden", "state.json~"):
        (saved / name).write_bytes(b"x")
        assert f"{name} is not listed" in refused(saved)
        (saved / name).unlink()
    assert content(saved) == expected()


# -- forged manifests: the digest is right, the content is not


def forge(path: Path, body: object) -> None:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    sealed = '{"manifest":' + text + ',"sha256":"' + hashlib.sha256(text.encode()).hexdigest() + '"}'
    (path / "manifest.json").write_text(sealed)


def forgeries(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Bodies that differ from `body` in one place, with what the message must contain."""

    def changed(complaint: str, *steps: Any, value: Any) -> tuple[str, Any]:
        copy = json.loads(json.dumps(body))
        target = copy
        for step in steps[:-1]:
            target = target[step]
        target[steps[-1]] = value
        return complaint, copy

    index = [file["name"] for file in body["files"]].index("data-00000.safetensors")
    data = ("files", index)
    for name in ("../x.json", "/etc/passwd.json", "a/b.json", "..json", "", ".x.json", "state.pkl", "manifest.json", 3):
        yield changed("a file name", *data, "name", value=name)
    yield changed("used once", *data, "name", value="DATA-00001.safetensors")
    for size in (-1, 2**63, 2**62 + 1, True, 1.0, "9", None):
        yield changed("size of", *data, "size", value=size)
    yield changed("number of block digests", *data, "size", value=2**62)
    yield changed("number of block digests", *data, "size", value=0)
    yield changed("number of block digests", *data, "block_xxh3_128", value=[])
    yield changed("block_xxh3_128", *data, "block_xxh3_128", value="abc")
    yield changed("a block digest", *data, "block_xxh3_128", 0, value="A" * 32)
    for block_size in (0, -1, 1, 2**40, 2**20 + 0.5):
        yield changed("block_size", *data, "block_size", value=block_size)
    for offset in (0, -8, 2**63, 9):
        yield changed("offset", *data, "chunks", 1, 5, value=offset)
    for start in (-1, 2**63, 1, "0"):
        yield changed("", *data, "chunks", 1, 1, value=start)
    for count in (-1, 2**61, 0, None):
        yield changed("", *data, "chunks", 1, 2, value=count)
    for dtype in ("F64", "F4", "", None, ["F32"], {}):
        yield changed("", *data, "chunks", 1, 3, value=dtype)
    for shape in ([2**61, 2**61], [-1], [], [1.5], "ab", None, [1] * 65, [2**62]):
        yield changed("", *data, "chunks", 1, 4, value=shape)
        yield changed("", "tensors", "model/a.weight", "shape", value=shape)
    yield changed("a chunk", *data, "chunks", 1, value=[1, 2])
    yield changed("end of the last chunk", *data, "chunks", value=body["files"][index]["chunks"][:-1])
    yield changed("nothing covers", "tensors", "model/new", value={"dtype": "F32", "shape": [2**61]})
    yield changed("the tensor of alias", "aliases", "x", value="nowhere")
    yield changed("a tensor name", "aliases", "x", value=["model/a.weight"])
    yield changed("version", "version", value=True)
    for name in ("", "a\0b", "__metadata__", "x" * 1001):
        yield changed("a tensor name", "tensors", name, value={"dtype": "F32", "shape": [0]})
    (empty,) = [chunk for chunk in body["files"][index]["chunks"] if chunk[0] == "model/empty"]
    place = body["files"][index]["chunks"].index(empty)
    twice = [*body["files"][index]["chunks"][: place + 1], *body["files"][index]["chunks"][place:]]
    yield changed("the number of empty chunks", *data, "chunks", value=twice)
    yield changed("unknown ['more']", "tensors", "model/a.weight", "more", value=1)
    yield changed("unknown ['more']", *data, "more", value=1)
    yield changed("unknown ['more']", "more", value=1)
    for key in body:
        for value in (None, 3.5, [[]], "\u0000"):
            yield changed("", key, value=value)
        yield "lacks", {name: value for name, value in body.items() if name != key}
    yield changed("metric", "metrics", "loss", value="low")
    yield changed("number", "metrics", "loss", value={"$": "tensor", "ref": "model/a.weight"})
    for other in (None, [], 3, "text", {}):
        yield "", other


def test_a_forged_manifest_is_refused_before_anything_is_allocated(saved: Path) -> None:
    body = json.loads((saved / "manifest.json").read_bytes())["manifest"]
    forge(saved, body)
    assert content(saved) == expected()  # the forger's tool itself is sound
    count = 0
    for complaint, forged in forgeries(body):
        forge(saved, forged)
        message = refused(saved)
        assert "manifest.json" in message
        assert complaint in message, (complaint, message)
        count += 1
    assert count > 100


def test_a_forged_chunk_list_cannot_read_a_byte_twice_or_move_a_tensor(saved: Path) -> None:
    body = json.loads((saved / "manifest.json").read_bytes())["manifest"]
    chunks = next(file["chunks"] for file in body["files"] if file["name"] == "data-00000.safetensors")
    chunks[1], chunks[2] = chunks[2], chunks[1]
    forge(saved, body)
    assert "offset of" in refused(saved)
    chunks[1][5], chunks[2][5] = chunks[2][5], chunks[1][5]
    chunks.append(chunks[0])
    forge(saved, body)
    assert "must be" in refused(saved)


def test_a_newer_format_is_told_apart_from_damage(saved: Path) -> None:
    body = json.loads((saved / "manifest.json").read_bytes())["manifest"]
    forge(saved, {"format": body["format"], "version": 2, "something": "else"})
    with pytest.raises(NewerFormatError, match=r"written by a newer fabricate \(format version 2, not 1\): upgrade"):
        Reader(saved)


def test_manifest_text_that_is_not_canonical_is_refused(saved: Path) -> None:
    good = (saved / "manifest.json").read_bytes()
    document = json.loads(good)
    for text in (
        json.dumps(document).encode(),
        good + b"\n",
        good.replace(b'"step":500', b'"step":500,"step":500'),
        good.replace(b'"loss":0.5', b'"loss":NaN'),
        good.replace(b'"loss":0.5', b'"loss":0.50'),
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b"\xff\xfe",
        b"",
    ):
        assert text != good
        (saved / "manifest.json").write_bytes(text)
        assert "manifest.json" in refused(saved)


def test_a_json_file_with_duplicate_keys_is_refused_though_its_digest_is_right(tmp_path: Path) -> None:
    staging = stage(tmp_path, 500, "9f3a")
    record = write_json(staging / "state.json", {"a": 1, "b": 2})
    original = (staging / "state.json").read_bytes()
    (staging / "state.json").unlink()
    forged = writing._write(staging / "state.json", [original.replace(b'"b"', b'"a"')], LOCAL)
    assert forged.size == record.size
    with Reader(commit(staging, manifest([forged], tensors={}, aliases={}))) as reader:
        reader.verify()
        with pytest.raises(CheckpointError, match=r"state\.json: the JSON key 'a' occurs twice"):
            reader.json("state.json")
