"""A damaged or forged checkpoint is refused by name: every altered byte, missing file and hostile manifest is found."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fabricate.checkpoint.format import writing
from fabricate.checkpoint.format.directory import NewerFormatError, Reader, commit, stage, write_json
from fabricate.checkpoint.format.files import LOCAL
from fabricate.errors import CheckpointError
from tests.support.checkpoints import content, example, expected, manifest, refused, save


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "run" / "checkpoints")


# -- damage


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


def test_unknown_names_are_errors_with_a_suggestion(saved: Path) -> None:
    with Reader(saved) as reader:
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
    yield changed("unknown fields ['more']", "tensors", "model/a.weight", "more", value=1)
    yield changed("unknown fields ['more']", *data, "more", value=1)
    yield changed("unknown fields ['more']", "more", value=1)
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
