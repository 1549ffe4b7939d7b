"""save="async": the state written during training is that of the step at which the save was due, and it is as safe."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from fabricate import Callback, CheckpointError, FabricateError, FitResult, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.format.files import Files, Writer
from fabricate.checkpoint.state.logical import chunk
from fabricate.checkpoint.state.staging import Staging
from fabricate.testing import run_ranks

STEPS = 10


class Net(TrainModule):
    """Weights, running statistics and an integer change in place with every step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)])
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        x = batch[0]
        for block in self.blocks:
            x = self.drop(torch.tanh(block(x)))
        return self.head(self.norm(x)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Keeps(Callback):
    """State that changes in place after it was handed over."""

    def __init__(self) -> None:
        self.tensor, self.steps = torch.zeros(3), [0]
        self.saved: list[tuple[int, int, bool]] = []

    def on_step(self, step: int) -> None:
        self.tensor += step
        self.steps.append(step)

    def on_save(self, state: dict[str, Any]) -> None:
        state.update(tensor=self.tensor, steps=self.steps)

    def on_load(self, state: dict[str, Any]) -> None:
        self.tensor.copy_(state["tensor"])
        self.steps = state["steps"]

    def on_saved(self, trainer: Trainer, path: Path, step: int) -> None:
        self.saved.append((step, trainer.step, (path / "manifest.json").exists()))


class Stops(Callback):
    def on_step(self, step: int) -> None:
        if step == 7:
            raise KeyError("power cut")


class Breaks(Callback):
    """A weight stops being a number right before a save: on every rank that has it whole, in shards on rank 0 alone."""

    def on_step(self, module: Net, step: int) -> None:
        weight: Any = module.blocks[0].weight.detach()
        if step == 4 and not hasattr(weight, "to_local"):
            weight[0, 0] = math.nan
        elif step == 4 and os.environ["RANK"] == "0":
            weight.to_local()[0, 0] = math.nan


def fit(run_dir: Path, *plugins: object, steps: int = STEPS, **options: Any) -> FitResult:
    settings = {"save": "async", "save_every": 2, "log_every": 3, "seed": 1, "keep": "all"}
    torch.manual_seed(11)
    trainer = Trainer(max_steps=steps, run_dir=run_dir, progress=False, plugins=plugins, **{**settings, **options})
    rows = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))
    return trainer.fit(Net(), rows, batch_size=4 // trainer_ranks())


def trainer_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def content(path: Path) -> dict[str, Any]:
    with Reader(path) as reader:
        reader.verify()
        contents: dict[str, Any] = {name: bytes(reader.read(name)) for name in reader.manifest.tensors}
        for file in reader.manifest.files:
            if file.name.endswith(".json"):
                contents[file.name] = reader.json(file.name)
    contents["state.json"]["progress"].pop("seconds")
    contents["state.json"].pop("metrics_bytes")
    return contents


def committed(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {int(path.name[5:]): content(path) for path in sorted((run_dir / "checkpoints").glob("step-*"))}


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Files.fsync

    def fsync(self: Files, writer: Writer) -> None:
        time.sleep(0.05)
        real(self, writer)

    monkeypatch.setattr(Files, "fsync", fsync)


def test_a_background_save_writes_the_same_checkpoint_as_a_save_that_stops_training(
    tmp_path: Path, slow_disk: None
) -> None:
    fit(tmp_path / "sync", Keeps(), save="sync")
    fit(tmp_path / "async", Keeps())
    first, second = committed(tmp_path / "sync"), committed(tmp_path / "async")
    assert list(second) == list(first) == [2, 4, 6, 8, 10]
    for step in first:
        assert second[step] == first[step], step


class Scored(Net):
    """Its validations give the scores of `SCORES`, one for each update."""

    def validation_step(self, batch: Any) -> dict[str, float]:
        return {"score": SCORES[self.trainer.step]}


SCORES = [9.0, 5.0, 7.0, 8.0, 4.0, 6.0, 6.5, 3.0, 9.0]


def test_a_validation_is_compared_with_the_best_checkpoint_that_is_still_being_written(
    tmp_path: Path, slow_disk: None
) -> None:
    rows = TensorDataset(torch.randn(40, 4))
    kept = {"last": 1, "best": 1, "metric": "val_score", "mode": "min"}
    for save in ("sync", "async"):
        settings = {"validate_every": "1 step", "save_every": "100 steps", "keep": kept, "save": save}
        Trainer(max_steps=8, run_dir=tmp_path / save, progress=False, **settings).fit(
            Scored(), rows, rows, batch_size=4
        )
    saved = [[event["step"] for event in events(tmp_path / save, "saved")] for save in ("sync", "async")]
    assert saved == [[1, 4, 7, 8]] * 2


def test_training_goes_on_during_a_save_and_the_end_of_the_fit_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing: list[tuple[int, bool]] = []
    spins_until = {"step-00000004": threading.Event(), "step-00000008": threading.Event()}
    real = Files.fsync

    def fsync(self: Files, writer: Writer) -> None:
        for name, event in spins_until.items():
            if name in writer.path.parent.name:
                assert event.wait(600)
        real(self, writer)

    class Looks(Callback):
        def on_step(self, step: int) -> None:
            writing.append((step, any(t.name == "fabricate-save" for t in threading.enumerate())))
            if step in (6, 9):
                spins_until[f"step-{step // 4 * 4:08d}"].set()

    monkeypatch.setattr(Files, "fsync", fsync)

    keeps = Keeps()
    result = fit(tmp_path, keeps, Looks(), save_every=4, steps=9)
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000009"
    assert [step for step, busy in writing if busy][:2] == [5, 6]
    assert [step for step, _, _ in keeps.saved] == [4, 8, 9]
    assert all(there for _, _, there in keeps.saved)
    assert all(step > saved for saved, step, _ in keeps.saved[:2]), "told some steps later, when it was durable"
    saved = [(event["step"], event["path"]) for event in events(tmp_path, "saved")]
    assert saved == [(4, "step-00000004"), (8, "step-00000008"), (9, "step-00000009")]


def test_one_save_at_a_time_the_next_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_now: set[str] = set()
    most = []
    create, close = Files.create, Files.close_writer

    def slow_create(self: Files, path: Path) -> Writer:
        open_now.add(path.parent.name)
        most.append(len(open_now))
        time.sleep(0.03)
        return create(self, path)

    def closing(self: Files, writer: Writer) -> None:
        close(self, writer)
        if writer.path.name == "manifest.json":
            open_now.discard(writer.path.parent.name)

    monkeypatch.setattr(Files, "create", slow_create)
    monkeypatch.setattr(Files, "close_writer", closing)
    fit(tmp_path, save_every=1)
    assert set(most) == {1}
    assert list(committed(tmp_path)) == list(range(1, STEPS + 1))


def test_a_run_that_fails_keeps_the_save_that_was_under_way_and_resumes_bit_by_bit(
    tmp_path: Path, slow_disk: None
) -> None:
    fit(tmp_path / "straight", Keeps())
    with pytest.raises(KeyError, match="power cut"):
        fit(tmp_path / "run", Keeps(), Stops())
    assert list(committed(tmp_path / "run")) == [2, 4, 6]
    fit(tmp_path / "run", Keeps())
    assert committed(tmp_path / "run") == committed(tmp_path / "straight")


def test_what_the_disk_refuses_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Files.write

    def full(self: Files, writer: Writer, data: Any) -> None:
        if "step-00000004" in str(writer.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, writer, data)

    monkeypatch.setattr(Files, "write", full)
    fit(tmp_path)
    assert list(committed(tmp_path)) == [2, 6, 8, 10]
    (failed,) = events(tmp_path, "save_failed")
    assert failed["path"] == "step-00000004"
    assert "No space left" in failed["reason"]
    assert "Training goes on; the next save that is due tries again" in capsys.readouterr().err
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [f"step-{n:08d}" for n in (2, 6, 8, 10)]


def test_the_state_at_the_end_is_saved_though_the_save_of_that_step_had_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = Files.write, []

    def full(self: Files, writer: Writer, data: Any) -> None:
        if f"step-{STEPS:08d}" in str(writer.path) and not refused:
            refused.append(writer.path.name)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, writer, data)

    monkeypatch.setattr(Files, "write", full)
    fit(tmp_path)
    assert refused
    assert list(committed(tmp_path))[-1] == STEPS


def test_an_error_beside_the_training_is_raised_at_a_following_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fabricate.checkpoint.state import commit as committing

    def broken(*args: object) -> None:
        raise ZeroDivisionError("in the thread")

    real = committing.format.commit
    monkeypatch.setattr(
        committing.format, "commit", lambda s, m, name: broken() if m.step == 4 else real(s, m, name=name)
    )
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        fit(tmp_path, save_every=4, steps=1000)
    assert list(committed(tmp_path)) == []


def test_a_state_that_cannot_be_saved_is_raised_at_once(tmp_path: Path) -> None:
    class Holds(Callback):
        def on_save(self, trainer: Trainer, state: dict[str, Any]) -> None:
            if trainer.step == 4:
                state["net"] = torch.nn.Linear(1, 1)

    with pytest.raises(CheckpointError, match=r"plugin/Holds\.net is a torch"):
        fit(tmp_path, Holds())
    assert list(committed(tmp_path)) == [2]


def on_two_ranks(root: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        fit(root / strategy / "sync", Keeps(), save="sync", strategy=strategy)
        with pytest.raises(KeyError, match="power cut"):
            fit(root / strategy / "async", Keeps(), Stops(), strategy=strategy)
        fit(root / strategy / "async", Keeps(), strategy=strategy)
        with pytest.raises(
            FabricateError, match=r"weights are not finite after step 4 \(blocks.0.weight|the loss became nan"
        ):
            fit(root / strategy / "refused", Keeps(), Breaks(), strategy=strategy)
        if int(os.environ["RANK"]) == 0:  # which clears away
            assert os.listdir(root / strategy / "refused" / "checkpoints") == ["step-00000002"]
        fit(root / strategy / "refused", Keeps(), strategy=strategy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_large_copies_are_what_was_there_and_their_memory_is_used_again(dtype: torch.dtype) -> None:
    staging, places = Staging(), []
    for seed in (1, 2):
        values = torch.randint(2, (5, 2**20 + 3), generator=torch.Generator().manual_seed(seed)).to(dtype)
        wanted = values.view(torch.uint8).clone()
        (copied,), ready = staging.copy([chunk("large", values)])
        values.zero_()
        ready()
        assert bytes(copied.data()) == wanted.numpy().tobytes()
        ((name, memory),) = staging.copies()
        assert name == "large"
        places.append(memory.data_ptr())
    assert places[0] == places[1]


def test_two_ranks_write_beside_their_training_what_they_would_write_in_it(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)
    for strategy in ("ddp", "fsdp"):
        first = committed(tmp_path / strategy / "sync")
        assert list(first) == [2, 4, 6, 8, 10]
        assert committed(tmp_path / strategy / "async") == first
        assert committed(tmp_path / strategy / "refused") == first


def test_a_host_without_room_for_the_copies_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fabricate.training import preparation

    monkeypatch.setattr(preparation, "host_memory", lambda ranks: (2000, "the limit of the control group"))
    with pytest.raises(FabricateError, match=r"save='async' copies the state to host memory .* Use save='sync'"):
        fit(tmp_path)
    assert fit(tmp_path, save="sync").steps == STEPS


def test_weights_change_only_after_their_copy_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Steps(Callback):
        def on_before_step(self) -> None:
            order.append("gradients")

        def on_step(self) -> None:
            order.append("weights")

    monkeypatch.setattr(Staging, "before_step", lambda staging: order.append("copies"))
    fit(tmp_path, Steps(), steps=3)
    assert order == ["gradients", "copies", "weights"] * 3
