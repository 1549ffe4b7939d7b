"""Failures in the middle of a fit: the message, the saved state, and a process that is as before."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader, TensorDataset, default_collate

import fabricate
from fabricate import Callback, PluginError, Trainer, TrainModule, hookimpl
from fabricate.checkpoint.format.directory import Reader
from tests.support.workers import own_children

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.frames: list[traceback.FrameSummary] = []
        self.autocast: bool | None = None

    def training_step(self, batch: Any) -> torch.Tensor:
        self.frames = list(traceback.extract_stack())
        self.autocast = torch.is_autocast_enabled("cpu")
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(number: int = 12) -> TensorDataset:
    return TensorDataset(torch.randn(number, 4, generator=torch.Generator().manual_seed(0)))


def fit(module: TrainModule | None = None, *plugins: object, data: Any = None, **options: Any) -> TrainModule:
    module = module or Net()
    trainer = Trainer(**{"max_steps": 6, "seed": 1, "progress": False, **options}, plugins=plugins)
    trainer.fit(module, rows() if data is None else data, **({"batch_size": 2} if data is None else {}))
    return module


def process_state() -> dict[str, Any]:
    """What a fit may change while it runs, and has to put back."""
    return {
        "environment": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "threads": {thread.name for thread in threading.enumerate() if not thread.daemon},
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "accelerate": [dict(kind._shared_state) for kind in (PartialState, AcceleratorState, GradientState)],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch threads": torch.get_num_threads(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
        "working directory": os.getcwd(),
    }


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Every test of this file, with fits that end well and badly, leaves the process as it found it."""
    before = process_state()
    assert before["accelerate"] == [{}, {}, {}]
    yield
    assert process_state() == before


def broken(batch: list[Any]) -> Any:
    if any(float(row[0][0]) == 7.0 for row in batch):
        raise ValueError("row 8 is broken")
    return default_collate(batch)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_broken_batch_is_told_with_the_place(num_workers: int) -> None:
    data = rows()
    data.tensors[0][8] = 7.0
    loader = DataLoader(data, batch_size=2, collate_fn=broken, num_workers=num_workers)
    with pytest.raises(ValueError, match="row 8 is broken") as caught:
        fit(data=loader)
    assert "while training: rank 0, epoch 0, step 5, micro-batch 4" in caught.value.__notes__
    assert own_children() == [], "no worker lives as long as the traceback"


HOOKS = ("on_fit_start", "on_epoch_start", "train_step", "on_accumulate", "on_before_step", "optimizer_step", "on_step")


@pytest.mark.parametrize("hook", [*HOOKS, "on_log", "on_epoch_end", "on_save", "on_saved", "on_fit_end", "on_export"])
def test_an_exception_in_a_hook_names_plugin_hook_and_step(hook: str, tmp_path: Path) -> None:
    def fall(self: Any, trainer: Trainer) -> None:
        if trainer.step >= 2 or hook in ("on_fit_start", "on_epoch_start"):
            raise KeyError("gone")

    acts = hook in (
        "train_step",
        "optimizer_step",
    )  # whose listeners may take the place of the work itself, and say that they do
    falls = type("Falls", (Callback,), {hook: hookimpl(fall) if acts else fall})()
    with pytest.raises(KeyError, match="gone") as caught:
        fit(None, falls, run_dir=tmp_path, log_every=1)
    (note,) = [note for note in caught.value.__notes__ if note.startswith("raised in hook")]
    at = {"on_fit_start": 0, "on_epoch_start": 0, "on_epoch_end": 6, "on_save": 6, "on_saved": 6, "on_fit_end": 6}
    at |= {"on_export": 6, "on_step": 2, "on_log": 2}
    assert note == f"raised in hook {hook} of plugin 'Falls' (this script) at step {at.get(hook, 3)}"


def test_a_hook_that_returns_something_is_an_error_that_names_it() -> None:
    class Answers(Callback):
        def on_step(self, step: int) -> int:
            return step

    with pytest.raises(PluginError, match=r"hook on_step of plugin 'Answers' returned int"):
        fit(None, Answers())


def test_a_second_exception_does_not_hide_the_first() -> None:
    class Clumsy(Callback):
        def on_step(self) -> None:
            raise KeyError("the first")

        def on_exception(self) -> None:
            raise ValueError("the second")

        def on_teardown(self) -> None:
            raise ValueError("the third")

    with pytest.raises(KeyError, match="the first") as caught:
        fit(None, Clumsy())
    notes = "\n".join(caught.value.__notes__)
    assert "on_exception raised ValueError: the second" in notes
    assert "on_teardown raised ValueError: the third" in notes


@pytest.mark.parametrize("raises", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_fit_works_after_one_that_failed(raises: type[BaseException]) -> None:
    class Falls(Callback):
        def on_step(self, step: int) -> None:
            if step == 2:
                raise raises

    trainer = Trainer(max_steps=6, seed=1, progress=False, deterministic=True, precision="bf16", plugins=[Falls()])
    module = Net()
    for _ in range(2):
        with pytest.raises(raises):
            trainer.fit(module, rows(), batch_size=2)
        assert not trainer.running
    assert Trainer(max_steps=6, progress=False).fit(module, rows(), batch_size=2).steps == 6


def test_gradients_of_a_window_that_failed_are_not_in_the_next_fit() -> None:
    class Falls(Callback):
        def on_accumulate(self) -> None:
            raise ValueError

    again, once = Net(), Net()
    once.load_state_dict(again.state_dict())
    with pytest.raises(ValueError, match="on_accumulate"):
        fit(again, Falls(), gradient_accumulation_steps=2)
    for module in (again, once):
        fit(module, gradient_accumulation_steps=2, max_steps=1)
    assert torch.equal(again.layer.weight, once.layer.weight)


def test_two_fits_of_one_process_have_their_own_precision() -> None:
    module = Net()
    for precision, autocast in (("fp32", False), ("bf16", True), ("fp32", False)):
        fit(module, precision=precision)
        assert module.autocast is autocast


def test_the_module_is_in_the_mode_it_was_in() -> None:
    module = Net().eval()
    fit(module)
    assert not module.training


@pytest.mark.parametrize(("precision", "wrapped", "most"), [("fp32", False, 5), ("bf16", False, 6), ("fp32", True, 7)])
def test_few_of_our_frames_lie_above_training_step(precision: str, wrapped: bool, most: int) -> None:
    """Five in a plain fit; autocast has one more, a plugin that wraps the forward two."""

    class Times(Callback):
        @hookimpl
        def train_step(self) -> None:
            """Anything that makes the loop call the hook; pluggy goes on to the default."""

    module = fit(None, *([Times()] if wrapped else []), precision=precision)
    assert isinstance(module, Net)
    package = Path(fabricate.__file__).parent
    ours = [Path(frame.filename).name for frame in module.frames if package in Path(frame.filename).parents]
    assert "trainer.py" in ours
    assert len(ours) <= most, ours


# ------------------------------------------------------------------------------------------------- signals


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def content(run_dir: Path, step: int) -> dict[str, Any]:
    with Reader(run_dir / "checkpoints" / f"step-{step:08d}") as reader:
        contents: dict[str, Any] = {name: bytes(reader.read(name)) for name in reader.manifest.tensors}
        state: Any = reader.json("state.json")
    return contents | {"optimizers": state["optimizers"], "latest": state["latest"]}


def metrics(run_dir: Path) -> list[Any]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["stage"], line["metrics"]) for line in lines]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the script did not get so far"
        time.sleep(0.02)


def test_an_interrupt_saves_the_state_and_the_same_command_goes_on(tmp_path: Path, script: ModuleType) -> None:
    run_dir = tmp_path / "interrupted"
    command = [sys.executable, str(SCRIPT), str(run_dir), "--steps", "400", "--dropout", "0.3", "--slow"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        file = run_dir / "metrics.jsonl"
        wait_for(lambda: file.exists() and len(file.read_text().splitlines()) >= 6, process)
        process.send_signal(signal.SIGINT)
        (run_dir / "told").touch()
        output, errors = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert errors == "Ctrl-C: the fit ends after the update or the evaluation in progress; once more to end now\n"
    assert "interrupted by SIGINT at step " in output
    assert "the same call continues from there" in output
    stopped_at = max(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))
    assert 5 <= stopped_at < 400
    assert not (run_dir / "model").exists(), "not finished"
    steps = stopped_at + 4
    assert script.fit(run_dir, steps, dropout=0.3).stop_reason == "max_steps"
    script.fit(tmp_path / "straight", steps, dropout=0.3)
    assert content(run_dir, steps) == content(tmp_path / "straight", steps)
    assert metrics(run_dir) == metrics(tmp_path / "straight")


def test_a_second_interrupt_ends_the_fit_at_once() -> None:
    class Impatient(Callback):
        def __init__(self) -> None:
            self.steps = 0
            self.times = 1

        def on_step(self, step: int) -> None:
            self.steps = step
            if step == 3:
                for _ in range(self.times):
                    signal.raise_signal(signal.SIGINT)

    once, twice = Impatient(), Impatient()
    twice.times = 2
    result = Trainer(max_steps=6, progress=False, plugins=[once]).fit(Net(), rows(), batch_size=2)
    assert (result.stop_reason, result.steps, once.steps) == ("interrupted", 3, 3)
    with pytest.raises(KeyboardInterrupt):
        fit(None, twice)
