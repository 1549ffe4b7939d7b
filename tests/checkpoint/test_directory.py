"""Data written to a checkpoint can be read, data that cannot be written is refused; the directory of checkpoints."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors import safe_open
from safetensors.numpy import load_file

from fabricate.checkpoint.format import directory as checkpoint
from fabricate.checkpoint.format.directory import (
    Chunk,
    Manifest,
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
from fabricate.checkpoint.format.files import Files, Source, Writer
from fabricate.errors import CheckpointError
from tests.support.checkpoints import CODES, chunk, content, example, expected, manifest, save, slices


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "run" / "checkpoints")


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


def test_any_range_is_read_across_files_and_blocks(saved: Path) -> None:
    whole = example()["model/a.weight"].reshape(-1)
    rng = random.Random(1)
    with Reader(saved) as reader:
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
    record = write_tensors(staging / "data.safetensors", [chunk("w", np.zeros(20 * 2**20, dtype=np.uint8))])
    with Reader(commit(staging, manifest([record], aliases={})), Counting()) as reader:
        counted.clear()
        whole = reader.read("w")
        assert counted == list(range(21))
        reader.close()
        counted.clear()
        for _ in range(2):
            for block in range(19):
                assert reader.read("w", block * 2**20, 9) == whole[:9]
            assert counted == list(range(19)), "sixteen of nineteen are kept, so going round finds none of them"
            counted.clear()
        assert reader.read("w", 18 * 2**20, 9) == whole[:9]
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


def test_a_range_is_read_into_memory_that_the_caller_has(saved: Path) -> None:
    whole = example()["model/a.weight"].reshape(-1)
    mine = np.zeros(whole.size - 100, dtype=np.float32)
    with Reader(saved) as reader:
        reader.read_into("model/head", memoryview(mine).cast("B"), 7)
        assert (mine == whole[7:-93]).all()
        with pytest.raises(CheckpointError, match="a multiple of 4"):
            reader.read_into("model/head", memoryview(bytearray(5)))
        with pytest.raises(CheckpointError, match="were asked for"):
            reader.read_into("model/head", memoryview(bytearray(8)), whole.size - 1)


def test_every_tensor_file_is_plain_safetensors(saved: Path) -> None:
    tensors = example()
    for rank in range(2):
        with safe_open(saved / f"data-{rank:05d}.safetensors", framework="np") as file:
            keys = sorted(file.keys())
            assert keys == sorted(f"{c.tensor}|{c.start}" for c in slices(tensors, rank, 2))
            for key in keys:
                name, start = key.rsplit("|", 1)
                part = file.get_tensor(key)
                assert (part == tensors[name].reshape(-1)[int(start) :][: part.size]).all()


def test_a_reader_written_from_the_documentation_agrees(saved: Path) -> None:
    document = json.loads((saved / "manifest.json").read_bytes())
    body = json.dumps(document["manifest"], sort_keys=True, separators=(",", ":")).encode("ascii")
    assert hashlib.sha256(body).hexdigest() == document["sha256"]
    types = {code: name for name, code in CODES.items()}
    arrays = {
        name: np.zeros(np.prod(record["shape"], dtype=int), types[record["dtype"]])
        for name, record in document["manifest"]["tensors"].items()
    }
    for record in document["manifest"]["files"]:
        data = (saved / record["name"]).read_bytes()
        size = record["block_size"]
        blocks = [data[start : start + size] for start in range(0, len(data), size)]
        assert [xxhash.xxh3_128_hexdigest(block) for block in blocks] == record["block_xxh3_128"]
        for tensor, start, count, dtype, _, offset in record["chunks"]:
            arrays[tensor][start : start + count] = np.frombuffer(data, types[dtype], count, offset)
    assert {name: tensor.tobytes() for name, tensor in arrays.items()} == {
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
    assert {name: (array.shape, array.tobytes()) for name, array in loaded.items()} == {
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
def test_a_manifest_value_out_of_range_is_named(saved: Path, changes: dict[str, Any], complaint: str) -> None:
    with Reader(saved) as reader:
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
    operations: list[str] = []

    class Recording(Files):
        def rename(self, source: Path, target: Path) -> None:
            operations.append(f"rename {source.name} {target.name}")
            super().rename(source, target)

        def fsync_directory(self, path: Path) -> None:
            operations.append("fsync")
            super().fsync_directory(path)

        def unlink(self, path: Path) -> None:
            operations.append("unlink")
            super().unlink(path)

    old, new = save(tmp_path, 1), save(tmp_path, 2)
    (tmp_path / ".trash-step-00000001").mkdir()
    (tmp_path / ".trash-step-00000001" / "leftover.json").touch()
    prune([old], Recording())
    assert operations == ["unlink", "rename step-00000001 .trash-step-00000001", "fsync", *["unlink"] * 4]
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
