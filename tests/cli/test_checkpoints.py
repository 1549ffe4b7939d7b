"""The output of the `fabricate ckpt` commands for checkpoints of real runs; none of them imports torch for it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch.utils.data import TensorDataset

from fabricate import Callback, Trainer, TrainModule
from fabricate.checkpoint.format import lock
from fabricate.checkpoint.format.comparing import compare, numbers
from fabricate.checkpoint.format.directory import (
    Chunk,
    Manifest,
    Reader,
    commit,
    committed,
    stage,
    tensors_of,
    write_json,
    write_tensors,
)
from fabricate.cli.main import main

STEPS = 6


class Net(TrainModule):
    """Dropout, running statistics, tied weights, a buffer outside the state dict, two parameter groups, a schedule."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.drop = torch.nn.Dropout(0.2)
        self.last = torch.nn.Linear(width, 4)
        self.tied = torch.nn.Linear(4, width)
        self.tied.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def training_step(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        y = self.last(self.drop(self.norm(torch.tanh(self.first(x))))) + self.tied(x).mean()
        return torch.nn.functional.mse_loss(y, x * self.scale)

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"val_loss": self.training_step(batch)}

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim == 1]
        groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


class Counter(Callback):
    """Keeps a number and a tensor in every checkpoint."""

    name = "counter"

    def __init__(self) -> None:
        self.seen = 0

    def on_step(self) -> None:
        self.seen += 1

    def on_save(self, state: dict[str, Any]) -> None:
        state["seen"] = self.seen
        state["history"] = torch.arange(self.seen)

    def on_load(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def fit(run_dir: Path, seed: int = 1, **options: Any) -> Path:
    """The checkpoints of a run of `STEPS` updates, one kept for every second."""
    settings: dict[str, Any] = {"keep": "all", "plugins": [Counter()]} | options
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(24, 4))
    trainer = Trainer(
        max_steps=STEPS,
        seed=seed,
        run_dir=run_dir,
        save_every=2,
        validate_every=2,
        log_every=2,
        progress=False,
        **settings,
    )
    trainer.fit(Net(), data, data, batch_size=6)
    return run_dir / "checkpoints"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directories that nobody changes: "one" and "same" are equal, "other" has another seed."""
    root = tmp_path_factory.mktemp("runs")
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        fit(root / name, seed)
    return root


@pytest.fixture
def run_dir(runs: Path, tmp_path: Path) -> Path:
    """A copy of run "one" to change."""
    return shutil.copytree(runs / "one", tmp_path / "run")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["ckpt", *map(str, arguments)])


def alter(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# -- inspect


def test_inspect_shows_step_topology_versions_optimizer_groups_and_every_tensor(runs: Path) -> None:
    shown = invoke("inspect", runs / "one")
    assert shown.exit_code == 0
    for line in (
        r"  step +6",
        r"  topology +device cpu, precision fp32, strategy single, world size 1",
        rf"  versions .*torch {re.escape(torch.__version__)}",
        r"  optimizer +main: AdamW",
        r"    group 1: 5 parameters, weight decay 0.0, lr 0\.0\d+",
        r"  plugin counter +1 +6 +48 B",
        r"  model/first\.weight +F32 +\[6, 4\] +96 B",
        r"  model/norm\.num_batches_tracked +I64 +\[\] +8 B",
        r"  model/tied\.weight +shared with model/first\.weight",
    ):
        assert re.search(rf"^{line}", shown.output, re.MULTILINE), line


def test_inspect_as_json_agrees_with_the_files(runs: Path) -> None:
    path = runs / "one/checkpoints/step-00000004"
    report = json.loads(invoke("inspect", path, "--json").output)
    assert (report["step"], report["topology"]["world_size"]) == (4, 1)
    assert "lr" in report["metrics"]
    assert report["size"] == sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
    assert report["tensors"]["model/last.bias"] == {"dtype": "F32", "shape": [4], "bytes": 16}
    assert report["groups"]["weights"]["bytes"] == sum(
        tensor["bytes"] for name, tensor in report["tensors"].items() if name.startswith("model/")
    )
    assert [group["parameters"] for group in report["optimizers"]["main"]["groups"]] == [2, 5]


# -- diff


def test_runs_with_the_same_seed_do_not_differ(runs: Path) -> None:
    shown = invoke("diff", runs / "one", runs / "same")
    assert (shown.exit_code, shown.output[:13]) == (0, "no difference")


def test_a_difference_is_told_by_component_with_the_first_and_the_largest(runs: Path) -> None:
    shown = invoke("diff", runs / "one", runs / "other", "--json")
    assert shown.exit_code == 1
    differences = json.loads(shown.output)["differences"]
    components = list(dict.fromkeys(d["component"] for d in differences))
    assert components == ["weights", "optimizer main", "rng", "metrics"]
    weight = next(d for d in differences if d["name"] == "model/first.weight")
    with Reader(committed(runs / "one/checkpoints")[-1]) as a, Reader(committed(runs / "other/checkpoints")[-1]) as b:
        x, y = (numbers(r.read("model/first.weight"), "F32") for r in (a, b))
    assert weight["count"] == np.count_nonzero(x != y) == weight["elements"] == 24
    assert weight["first"] == [0, 0]
    assert weight["largest"] == np.abs(x - y).max()
    assert weight["relative"] == np.abs(x - y).max() / np.abs(y).max()
    assert f"{x[0].item()!r} against {y[0].item()!r}" in weight["text"]


def test_two_steps_of_one_run_differ_in_position_schedule_and_plugin_state_too(runs: Path) -> None:
    shown = invoke("diff", runs / "one/checkpoints/step-00000004", runs / "one")
    assert shown.exit_code == 1
    assert re.search(r"  optimizer main +and \d+ more +--json lists all", shown.output)
    for line in (
        r"  scheduler main +schedulers\.main\.state\.last_epoch +4 against 6",
        r"  data position +progress\.samples +24 against 36",
        r"  plugin counter +plugin/counter\.history +I64 \[4\] against I64 \[6\]",
        r"  plugin counter +plugins\.counter\.seen +4 against 6",
    ):
        assert re.search(line, shown.output), line


def test_only_one_component_is_compared_on_request(runs: Path) -> None:
    one, other = runs / "one", runs / "other"
    assert invoke("diff", one, other, "--only", "plugin", "--only", "data").exit_code == 0
    assert invoke("diff", one, other, "--only", "rng").exit_code == 1
    shown = invoke("diff", one, other, "--only", "wieghts")
    assert shown.exit_code == 2
    assert "Give one of weights, optimizer" in shown.stderr


def test_a_damaged_checkpoint_is_not_compared(run_dir: Path, runs: Path) -> None:
    alter(run_dir / "checkpoints/step-00000006/data-00000-of-00001.safetensors")
    shown = invoke("diff", run_dir, runs / "one")
    assert shown.exit_code == 2
    assert "data-00000-of-00001.safetensors: block 0" in shown.stderr


DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16, "I32": torch.int32,
    "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}  # fmt: skip


@pytest.mark.parametrize("code", DTYPES)
def test_numbers_are_read_as_torch_reads_them(code: str) -> None:
    generator = np.random.default_rng(5)
    data = bytearray(range(256)) * 8 if code.startswith("F8") else bytearray(generator.bytes(4096))
    if code == "BOOL":
        data = bytearray(byte & 1 for byte in data)
    tensor = torch.frombuffer(data, dtype=DTYPES[code])
    wide = torch.complex128 if code == "C64" else torch.float64
    np.testing.assert_array_equal(numbers(data, code), tensor.to(wide).numpy())


def write(root: Path, tensors: dict[str, tuple[str, list[int], bytes]], state: dict[str, Any] | None = None) -> Path:
    staging = stage(root, 1, "a")
    chunks = [
        Chunk(name, 0, int(np.prod(shape)), dtype, tuple(shape), lambda data=data: data)  # type: ignore[misc]
        for name, (dtype, shape, data) in tensors.items()
    ]
    files = (write_tensors(staging / "data.safetensors", chunks), write_json(staging / "state.json", state or {}))
    return commit(
        staging,
        Manifest(step=1, run_id="r", nonce="a", created="2031-05-01T12:00:00Z", tensors=tensors_of(files), files=files),
    )


def test_equality_is_bitwise_and_a_nan_on_one_side_is_an_infinite_difference(tmp_path: Path) -> None:
    values = np.array([0.0, np.nan, 1.0, 2.0], "<f4")
    changes: dict[str, Callable[[Any], None]] = {
        "nothing": lambda x: None,
        "sign of zero": lambda x: x.__setitem__(0, -0.0),
        "nan": lambda x: x.__setitem__(3, np.nan),
        "one": lambda x: x.__setitem__(2, 1.5),
    }
    differences = {}
    base = write(tmp_path / "base", {"model/w": ("F32", [2, 2], values.tobytes())})
    for name, change in changes.items():
        other = values.copy()
        change(other)
        path = write(tmp_path / name, {"model/w": ("F32", [2, 2], other.tobytes())})
        with Reader(base) as a, Reader(path) as b:
            differences[name] = [(d.count, d.first, d.largest) for d in compare(a, b)]
    assert differences == {
        "nothing": [],
        "sign of zero": [(1, (0, 0), 0.0)],
        "nan": [(1, (1, 1), np.inf)],
        "one": [(1, (1, 0), 0.5)],
    }


def test_a_difference_beyond_the_first_slice_is_found_at_its_index(tmp_path: Path) -> None:
    values = np.zeros((1024, 700), "<i4")
    one = write(tmp_path / "one", {"model/w": ("I32", [1024, 700], values.tobytes())})
    values[1000, 699], values[1023, 0] = 7, -9
    other = write(tmp_path / "other", {"model/w": ("I32", [1024, 700], values.tobytes())})
    with Reader(one) as a, Reader(other) as b:
        (difference,) = compare(a, b)
    assert (difference.count, difference.first, difference.largest, difference.relative) == (2, (1000, 699), 9.0, 1.0)
    assert "first at [1000, 699]: 0 against 7" in difference.text


def test_what_only_one_has_and_kinds_of_values_are_differences(tmp_path: Path) -> None:
    byte = ("U8", [1], b"x")
    pair = {"$": "tuple", "items": [1, 2]}
    one = write(tmp_path / "one", {"model/a": byte, "extra": byte}, {"plugins": {"p": {"x": [1, 2], "y": 1}}})
    two = write(
        tmp_path / "two", {"model/a": byte, "model/b": byte}, {"plugins": {"p": {"x": pair, "y": 1.0}, "q": {}}}
    )
    with Reader(one) as a, Reader(two) as b:
        differences = [(d.component, d.name, d.text) for d in compare(a, b)]
    assert differences == [
        ("weights", "model/b", "only in the second"),
        ("plugin p", "plugins.p.x", "[1, 2] against (1, 2)"),
        ("plugin p", "plugins.p.y", "1 against 1.0"),
        ("plugin q", "plugins.q", "only in the second"),
        ("extra", "extra", "only in the first"),
    ]


# -- prune


def steps(run_dir: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in committed(run_dir / "checkpoints")]


def test_prune_only_tells_what_it_would_delete_until_yes_is_given(run_dir: Path) -> None:
    shown = invoke("prune", run_dir, "--keep", "last=1")
    lines = "step-00000002: would be deleted\nstep-00000004: would be deleted\nstep-00000006: kept\n"
    assert (shown.exit_code, shown.output) == (0, lines + "nothing is deleted without --yes\n")
    assert steps(run_dir) == [2, 4, 6]
    shown = invoke("prune", run_dir, "--keep", "last=1", "--yes")
    assert (shown.exit_code, shown.output) == (0, lines.replace("would be deleted", "deleted"))
    assert steps(run_dir) == [6]


def test_prune_keeps_the_best_by_a_metric_and_the_newest(run_dir: Path) -> None:
    losses = {}
    for path in committed(run_dir / "checkpoints"):
        with Reader(path) as reader:
            losses[reader.manifest.step] = reader.manifest.metrics["val_loss"]
    worst = max(losses, key=lambda step: losses[step])
    assert worst != STEPS  # or the test would prove nothing
    assert invoke("prune", run_dir, "--keep", "best=1,mode=max", "--yes").exit_code == 0
    assert steps(run_dir) == [worst, STEPS]


def test_prune_chooses_the_best_by_the_metric_and_mode_of_the_run(tmp_path: Path) -> None:
    root = fit(tmp_path, keep={"last": 3, "best": 1, "metric": "val_loss", "mode": "max"})
    best = steps(tmp_path)[0]  # the loss falls
    shown = invoke("prune", tmp_path, "--keep", "last=1,best=1", "--yes")
    assert shown.output.startswith("best by val_loss (max)\n")
    assert [path.name for path in committed(root)] == [f"step-{best:08d}", f"step-{STEPS:08d}"]


def test_prune_never_counts_a_damaged_checkpoint_and_never_deletes_the_newest_good_one(run_dir: Path) -> None:
    alter(run_dir / "checkpoints/step-00000006/data-00000-of-00001.safetensors")
    shown = invoke("prune", run_dir, "--keep", "last=1", "--yes")
    assert shown.output == "step-00000002: deleted\nstep-00000004: kept\nstep-00000006: damaged, left as it is\n"
    assert steps(run_dir) == [4, 6]
    alter(run_dir / "checkpoints/step-00000004/manifest.json")
    shown = invoke("prune", run_dir, "--keep", "last=1", "--yes")
    assert shown.exit_code == 2
    assert "no good checkpoint to keep; nothing is deleted" in shown.stderr
    assert steps(run_dir) == [4, 6]


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("last", "'last' is not understood"),
        ("last=0", "give a number of at least 1"),
        (
            "best=1,metric=accuracy,mode=max",
            "no checkpoint recorded the metric 'accuracy'. Add metric=NAME with one of epoch_loss, loss",
        ),
        ("metric=loss", "keeps nothing"),
        ("last=1,last=2", "'last=2' is not understood"),
        ("best=1,mode=most", "'mode': 'most'"),
    ],
)
def test_a_rule_that_is_not_understood_deletes_nothing(run_dir: Path, rule: str, complaint: str) -> None:
    shown = invoke("prune", run_dir, "--keep", rule, "--yes")
    assert shown.exit_code == 2
    assert complaint in shown.stderr
    assert steps(run_dir) == [2, 4, 6]


def test_prune_deletes_nothing_while_a_run_is_at_work(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.1)
    code = f"""
from pathlib import Path
from fabricate.checkpoint.format.lock import locked
with locked(Path({str(run_dir)!r})):
    print("held", flush=True)
    input()
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "held\n"
    assert invoke("prune", run_dir, "--keep", "last=1").exit_code == 0
    shown = invoke("prune", run_dir, "--keep", "last=1", "--yes")
    assert (shown.exit_code, steps(run_dir)) == (2, [2, 4, 6])
    assert 'in use by another run ({"host": ' in shown.stderr
    run.communicate("\n")
    assert invoke("prune", run_dir, "--keep", "last=1", "--yes").exit_code == 0
    assert steps(run_dir) == [6]


# -- all of them


def test_no_command_that_only_reads_needs_torch(run_dir: Path, runs: Path) -> None:
    commands = [
        ["ls", run_dir],
        ["verify", run_dir],
        ["inspect", run_dir],
        ["diff", run_dir, runs / "one"],
        ["prune", run_dir, "--keep", "last=1", "--yes"],
    ]
    code = f"""
import sys
sys.modules["torch"] = sys.modules["accelerate"] = None  # importing them is an error now
from fabricate.cli.main import main
for command in {[list(map(str, command)) for command in commands]}:
    main(["ckpt", *command], standalone_mode=False)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert steps(run_dir) == [6]


def test_errors_are_one_line_and_the_exit_code_is_2(tmp_path: Path) -> None:
    for command in (["inspect", tmp_path], ["diff", tmp_path, tmp_path], ["prune", tmp_path, "--keep", "last=1"]):
        shown = invoke(*command)
        assert shown.exit_code == 2
        assert shown.stderr.startswith("error: ")
        assert str(tmp_path) in shown.stderr
        assert len(shown.stderr.splitlines()) == 1
