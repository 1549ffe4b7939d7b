"""Folders made by an attacker: each is refused with an error that names it, and no code in it runs. An attacker who can write files can
also write matching digests, so most cases here have right ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from click.testing import CliRunner
from torch.utils.data import TensorDataset

from fabricate import Callback, CheckpointError, Trainer, TrainModule
from fabricate.cli.main import main

DATA = "data-00000-of-00001.safetensors"


class Payload:
    """Runs a command when it is unpickled, the way every attack on torch's files does."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


class Net(TrainModule):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, width)
        self.norm = torch.nn.BatchNorm1d(width)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.norm(self.layer(batch[0])).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Counter(Callback):
    name = "counter"

    def on_save(self, state: dict[str, Any]) -> None:
        state["seen"] = 1

    def on_load(self, state: dict[str, Any]) -> None:
        assert state["seen"] == 1


def fit(run_dir: Path | None = None, resume: Any = "auto", steps: int = 4) -> None:
    data = TensorDataset(torch.arange(32.0).reshape(8, 4))
    trainer = Trainer(max_steps=steps, seed=1, run_dir=run_dir, progress=False, plugins=[Counter()])
    trainer.fit(Net(), data, batch_size=4, resume=resume)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    fit(root, steps=2)
    return root / "checkpoints/step-00000002"


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "folder")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that exists once a payload ran."""
    return tmp_path / "mark"


# -- a forger's tools: what is changed gets digests that fit


def body_of(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    return body


def canonical(tree: object) -> str:
    return json.dumps(tree, sort_keys=True, separators=(",", ":"))


def seal(folder: Path, body: object) -> None:
    text = body if isinstance(body, str) else canonical(body)
    sealed = '{"manifest":' + text + ',"sha256":"' + hashlib.sha256(text.encode()).hexdigest() + '"}'
    (folder / "manifest.json").write_text(sealed)


def put(folder: Path, name: str, data: bytes) -> None:
    """Replace a file, and its record in the manifest."""
    (folder / name).write_bytes(data)
    body = body_of(folder)
    record = next(file for file in body["files"] if file["name"] == name)
    size = record["block_size"]
    record["size"] = len(data)
    record["block_xxh3_128"] = [xxhash.xxh3_128_hexdigest(data[at : at + size]) for at in range(0, len(data), size)]
    seal(folder, body)


def edit(folder: Path, name: str, *path: Any, value: Any) -> None:
    """Change one value of a JSON file, or of the manifest."""
    manifest = name == "manifest.json"
    tree = body_of(folder) if manifest else json.loads((folder / name).read_bytes())
    if not path:
        tree = value
    else:
        inner = tree
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
    if manifest:
        seal(folder, tree)
    else:
        put(folder, name, canonical(tree).encode())


def header(folder: Path, change: Callable[[dict[str, Any]], None] | None = None, length: int | None = None) -> None:
    """Change the header of the tensor file, which keeps its length."""
    data = (folder / DATA).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    tree = json.loads(data[8 : 8 + size])
    if change is not None:
        change(tree)
    text = json.dumps(tree, separators=(",", ":")).encode().ljust(size)
    assert len(text) == size
    put(folder, DATA, struct.pack("<Q", size if length is None else length) + text + data[8 + size :])


def retype(folder: Path, tensor: str, code: str) -> None:
    """Say everywhere that a tensor's bytes are numbers of another type of the same width."""
    body = body_of(folder)
    body["tensors"][tensor]["dtype"] = code
    for file in body["files"]:
        for chunk in file["chunks"]:
            chunk[3] = code if chunk[0] == tensor else chunk[3]
    seal(folder, body)
    header(folder, lambda tree: tree[f"{tensor}|0"].update(dtype=code))


def enlarge(folder: Path, tensor: str, shape: list[int]) -> None:
    body = body_of(folder)
    body["tensors"][tensor]["shape"] = shape
    for file in body["files"]:
        for chunk in file["chunks"]:
            chunk[4] = shape if chunk[0] == tensor else chunk[4]
    seal(folder, body)


Spoil = Callable[[Path, Path], object]
"""Makes a folder hostile: gets the folder, and the file that a payload would leave behind."""


def planted(name: str) -> Spoil:
    return lambda folder, mark: (folder / name).write_bytes(pickle.dumps(Payload(mark)))


def pickled(name: str) -> Spoil:
    return lambda folder, mark: put(folder, name, pickle.dumps(Payload(mark)))


def zipped(folder: Path, mark: Path) -> None:
    torch.save({"weights": Payload(mark)}, folder / "whole.pt")
    put(folder, DATA, (folder / "whole.pt").read_bytes())
    (folder / "whole.pt").unlink()


def value(name: str, *path: Any, to: Any) -> Spoil:
    return lambda folder, mark: edit(folder, name, *path, value=to)


def content(name: str, data: bytes) -> Spoil:
    return lambda folder, mark: put(folder, name, data)


def claimed(change: Callable[[dict[str, Any]], None] | None = None, length: int | None = None) -> Spoil:
    return lambda folder, mark: header(folder, change, length)


def instead(name: str, make: Callable[[Path], object]) -> Spoil:
    """Something that is no regular file, where `name` was; that is moved to "outside", which links lead to."""

    def spoil(folder: Path, mark: Path) -> None:
        (folder / name).rename(folder.parent / "outside")
        make(folder / name)

    return spoil


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "outside")


def shaped(*shape: int) -> Spoil:
    return lambda folder, mark: enlarge(folder, "model/layer.bias", list(shape))


def typed(code: str) -> Spoil:
    return lambda folder, mark: retype(folder, "model/layer.bias", code)


def twice(find: str) -> Spoil:
    """The manifest's text, one entry of which is there again."""
    return lambda folder, mark: seal(folder, canonical(body_of(folder)).replace(find, f"{find},{find}"))


def repeated(*path: Any) -> Spoil:
    """A list of the manifest, followed by itself."""

    def spoil(folder: Path, mark: Path) -> None:
        value: Any = body_of(folder)
        for key in path:
            value = value[key]
        edit(folder, "manifest.json", *path, value=value * 2)

    return spoil


BIAS = "model/layer.bias|0"
NAME = ("manifest.json", "files", 0, "name")
RNG = ("rank-00000.json", "rng")

PICKLES: list[tuple[str, Spoil, str]] = [
    ("a pickle beside the files", planted("model.pt"), "model.pt is not listed"),
    ("a pickle as torch.distributed has it", planted(".metadata"), ".metadata is not listed"),
    ("a pickle as accelerate has it", planted("random_states_0.pkl"), "random_states_0.pkl is not listed"),
    ("a pickle for the manifest", planted("manifest.json"), "manifest.json: not valid JSON"),
    ("a pickle for the state", pickled("state.json"), "state.json: not valid JSON"),
    ("a pickle for a rank's state", pickled("rank-00000.json"), "rank-00000.json: not valid JSON"),
    ("a pickle for the weights", pickled(DATA), "the last chunk"),
    ("a file of torch.save for the weights", zipped, "the last chunk"),
    ("a pickle in the list", value(*NAME, to="data.pkl"), "a file name is 'data.pkl'"),
    ("a value of a kind", value(*RNG, to={"$": "pickle", "base64": "gASV"}), "unknown or malformed kind 'pickle'"),
    (
        "an array of objects",
        value(*RNG, to={"$": "numpy.array", "dtype": "|O8", "shape": [1], "base64": "AAAAAAAAAAA="}),
        "not a plain array type",
    ),
    ("a type that is a function", value(*RNG, to={"$": "torch.dtype", "value": "load"}), "torch.load"),
]
HEADERS: list[tuple[str, Spoil, str]] = [
    ("a header of 2^60 bytes", claimed(length=2**60), "its header claims 1152921504606846976 bytes"),
    ("a header of no bytes", claimed(length=0), "its header claims 0 bytes"),
    ("other offsets", claimed(lambda tree: tree[BIAS].update(data_offsets=[0, 12])), "do not say the same"),
    ("another type", claimed(lambda tree: tree[BIAS].update(dtype="I32")), "do not say the same"),
]
NAMES: list[tuple[str, Spoil, str]] = [
    ("a file above the folder", value(*NAME, to="../../x.json"), "a file name is '../../x.json'"),
    ("a file by its whole path", value(*NAME, to="/etc/x.json"), "a file name is '/etc/x.json'"),
    ("a file in a folder", value(*NAME, to="a/b.json"), "a file name is 'a/b.json'"),
    ("a name with a null byte", value(*NAME, to="a\x00.json"), "a file name is"),
    ("the manifest itself", value(*NAME, to="manifest.json"), "the manifest does not list itself"),
    (
        "no tensor of that name",
        value(*RNG, to={"$": "tensor", "ref": "../w"}),
        "refers to the tensor '../w', which the checkpoint does not hold",
    ),
]
FILES: list[tuple[str, Spoil, str]] = [
    ("a link to weights", instead(DATA, link), f"{DATA}: not a regular file"),
    ("a link to a state", instead("state.json", link), "state.json: not a regular file"),
    ("a link to a manifest", instead("manifest.json", link), "manifest.json: cannot be read"),
    ("a link besides", lambda f, mark: (f / "more.json").symlink_to("/dev/zero"), "more.json is not listed"),
    ("a pipe that nobody writes to", instead("state.json", os.mkfifo), "state.json: not a regular file"),
    ("a folder for a file", instead("state.json", Path.mkdir), "state.json: not a regular file"),
]
SIZES: list[tuple[str, Spoil, str]] = [
    ("2^62 elements", shaped(2**31, 2**31), "nothing covers elements"),
    ("2^122 elements", shaped(2**61, 2**61), "the number of elements"),
    ("a negative size", shaped(-3), "a dimension of shape"),
    ("too many dimensions", shaped(*[1] * 64, 3), "the number of dimensions"),
    ("another shape", shaped(3, 1), "model/layer.bias has shape (3, 1), but (3,) in this module"),
    ("a type that does not exist", typed("F31"), "dtype is 'F31'"),
    ("whole numbers", typed("I32"), "model/layer.bias has dtype torch.int32, but torch.float32 in this module"),
    ("2^40 ranks", value("manifest.json", "topology", "world_size", to=2**40), "holds no JSON file 'rank-00001.json'"),
    ("no number of ranks", value("manifest.json", "topology", to={}), "world_size in its manifest is None, not int"),
]
TWICE: list[tuple[str, Spoil, str]] = [
    ("a file", repeated("files"), "the file name"),
    ("a chunk", repeated("files", 0, "chunks"), "offset of"),
    ("a key of the manifest", twice('"step":2'), "the JSON key 'step' occurs twice"),
    ("a key of the state", content("state.json", b'{"seed":1,"seed":2}'), "the JSON key 'seed' occurs twice"),
]
JSON: list[tuple[str, Spoil, str]] = [
    ("deep nesting", content("state.json", b'{"a":' * 5000 + b"1" + b"}" * 5000), "JSON nested deeper"),
    ("a million digits", content("state.json", b'{"a":' + b"9" * 10**6 + b"}"), "state.json: not valid JSON"),
    ("a number that is none", content("state.json", b'{"a":NaN}'), "NaN is not JSON"),
]
TABLE = {
    "pickles": PICKLES, "headers": HEADERS, "names": NAMES, "files": FILES, "sizes": SIZES, "twice": TWICE, "json": JSON
}  # fmt: skip
CASES = {f"{topic}: {name}": (spoil, complaint) for topic, rows in TABLE.items() for name, spoil, complaint in rows}


@pytest.fixture(autouse=True)
def _heard(mark: Path) -> Iterator[None]:
    """No case may run a payload, whatever else is asked of it."""
    yield
    assert not mark.exists()


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_folder_is_refused_by_name(name: str, folder: Path, mark: Path) -> None:
    spoil, complaint = CASES[name]
    spoil(folder, mark)
    with pytest.raises(CheckpointError) as raised:
        fit(resume=folder)
    assert complaint in str(raised.value)
    assert str(folder) in str(raised.value)


def test_a_checkpoint_that_the_tools_of_these_tests_rewrite_unchanged_is_accepted(folder: Path) -> None:
    seal(folder, body_of(folder))
    put(folder, "state.json", (folder / "state.json").read_bytes())
    header(folder)
    edit(folder, "state.json", "metrics_bytes", value=0)
    fit(resume=folder)
    assert len(CASES) == sum(map(len, TABLE.values())) > 40


@pytest.mark.parametrize("order", [[0, 0], [0], [2, 1], [1, 0, 2], [-1, 0]])
def test_an_order_in_memory_that_is_none_of_the_dimensions_is_refused(order: list[int], folder: Path) -> None:
    name = "optimizer/main/layer.weight/exp_avg"
    edit(folder, "state.json", "optimizers", "main", "memory_order", value={name: order})
    with pytest.raises(CheckpointError, match=f"order in memory of {name} is .* not an order of its dim"):
        fit(resume=folder)


@pytest.mark.parametrize("name", ["state.json", "rank-00000.json"])
def test_state_of_any_other_shape_is_refused_by_name(name: str, folder: Path) -> None:
    tree = json.loads((folder / name).read_bytes())
    tried = 0
    for path in [
        (),
        *((key,) for key in tree),
        *((key, inner) for key in tree if isinstance(tree[key], dict) for inner in tree[key]),
    ]:
        for value in (None, "text", [["a"]], {"$": "tuple", "items": []}):
            inner = tree
            for key in path:
                inner = inner[key]
            if type(inner) is type(value) or (path[:1] in (("latest",), ("plugins",)) and len(path) > 1):
                continue  # another value, which only the user's code could find wrong
            forged = json.loads(json.dumps(tree))
            if path:
                target = forged
                for key in path[:-1]:
                    target = target[key]
                target[path[-1]] = value
            edit(folder, name, value=forged if path else value)
            try:
                fit(resume=folder)
            except CheckpointError:
                tried += 1
            except Exception as exc:
                pytest.fail(f"{name}: {path} = {value!r}: {type(exc).__name__}: {exc}")
    assert tried > 20


def test_weights_are_refused_as_the_state_is(pristine: Path, tmp_path: Path, mark: Path) -> None:
    of_the_state = [
        spoil for _, spoil, complaint in PICKLES + NAMES + SIZES if "rank" in complaint or "kind" in complaint
    ]
    of_the_state += [
        PICKLES[-2][1],
        PICKLES[-1][1],
        NAMES[-1][1],
        SIZES[-1][1],
    ]  # generators, which weights have none of
    for number, (name, (spoil, complaint)) in enumerate(CASES.items()):
        if spoil in of_the_state or name.startswith("headers"):
            continue
        folder = shutil.copytree(pristine, tmp_path / str(number) / "folder")
        spoil(folder, mark)
        with pytest.raises(CheckpointError) as raised:
            Net.load_from_checkpoint(folder)
        assert complaint in str(raised.value), name


# -- names that lead out of an export


def test_a_parameter_name_cannot_lead_an_export_out_of_its_folder(folder: Path, tmp_path: Path) -> None:
    text = (folder / "manifest.json").read_text()
    seal(
        folder,
        json.dumps(json.loads(text)["manifest"], sort_keys=True, separators=(",", ":")).replace(
            "layer.bias", "../../../x"
        ),
    )
    edit(
        folder, "state.json", value=json.loads((folder / "state.json").read_text().replace("layer.bias", "../../../x"))
    )
    shown = CliRunner().invoke(main, ["ckpt", "export", str(folder), str(tmp_path / "out"), "--format", "deepspeed"])
    assert shown.exit_code == 2
    assert "the parameter name '../../../x' cannot be the name of a folder" in shown.stderr
    assert sorted(os.listdir(tmp_path)) == ["folder"]


# -- and what Python itself saw


def test_python_saw_no_unpickling_and_no_command_while_a_folder_full_of_pickles_was_opened(
    folder: Path, mark: Path
) -> None:
    for name in ("model.pt", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", ".metadata"):
        (folder / name).write_bytes(pickle.dumps(Payload(mark)))
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_hostile_checkpoints import Net, fit
from fabricate import CheckpointError
folder = Path(sys.argv[2])
fit()  # what is imported late is imported now
events = []
dangerous = ("pickle.find_class", "marshal.loads", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")
sys.addaudithook(lambda event, arguments: events.append((event, arguments)) if event in dangerous else None)
for attempt in (lambda: fit(resume=folder), lambda: Net.load_from_checkpoint(folder)):
    try:
        attempt()
    except CheckpointError as exc:
        assert "is not listed in the manifest" in str(exc), exc
    else:
        raise SystemExit("it was read")
for file in folder.iterdir():
    if file.suffix not in (".json", ".safetensors"):
        file.unlink()
fit(resume=folder)
Net.load_from_checkpoint(folder)
assert events == [], events
"""
    process = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
