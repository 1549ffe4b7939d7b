"""Saving, resuming and exporting whole runs: bit by bit, on one process and on two ranks."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, TensorDataset

from fabricate import Callback, CheckpointError, Trainer, TrainModule
from fabricate.checkpoint.directory import Reader
from fabricate.checkpoint.files import Files
from fabricate.testing import run_ranks

STEPS, SAVED, CRASH = 8, 4, 6
ROWS, GLOBAL_BATCH = 22, 8  # three updates per epoch, the last of six rows: step 4 is in the middle of the second


# ------------------------------------------------------------------------------------------------- what is trained


class Noisy(Dataset[Any]):
    """Rows with their number in front, changed a little by every random generator there is."""

    def __init__(self, rows: int = ROWS) -> None:
        self.x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor]:
        noise = torch.randn(4) + random.random() + np.random.rand()
        return row, self.x[row] + 0.1 * noise


class Net(TrainModule):
    def __init__(self, optimizer: str = "adamw", dropout: float = 0.3, schedule: str = "") -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)])
        self.drop = torch.nn.Dropout(dropout)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 1)
        self.optimizer, self.schedule = optimizer, schedule
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.drop(torch.tanh(block(x)))
        return self.head(self.norm(x) if len(x) > 1 else x)

    def training_step(self, batch: Any) -> torch.Tensor:
        _, x = batch
        loss = mse_loss(self(x), x.sum(1, keepdim=True))
        self.log("rows", float(len(x)), reduce="sum")
        return loss

    def on_accumulate(self, batch: Any, weight: Any) -> None:
        self.seen.append(batch[0].tolist() if weight else [])

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": mse_loss(self(batch[1]), batch[1].sum(1, keepdim=True))}

    def configure_optimizers(self) -> Any:
        made: torch.optim.Optimizer
        if self.optimizer == "adamw":
            made = torch.optim.AdamW(self.parameters(), lr=0.02)
        else:
            made = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        if self.schedule == "cosine":
            return made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 20)
        if self.schedule == "chain":
            warmup = torch.optim.lr_scheduler.LinearLR(made, total_iters=3)
            after = torch.optim.lr_scheduler.MultiStepLR(made, [2, 3])
            return made, torch.optim.lr_scheduler.SequentialLR(made, [warmup, after], [3])
        if self.schedule == "plateau":
            return made, torch.optim.lr_scheduler.ReduceLROnPlateau(made, factor=0.5, patience=0)
        return made


class Average(Callback):
    """A plugin with state of all kinds, sharded as the weights are."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.history: list[tuple[int, float]] = []

    def on_fit_start(self, module: TrainModule) -> None:
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}

    def on_step(self, module: TrainModule, step: int, loss: torch.Tensor) -> None:
        self.history.append((step, float(loss)))
        for name, parameter in module.named_parameters():
            self.shadow[name].lerp_(parameter.detach(), 0.1)

    def on_save(self, state: dict[str, Any]) -> None:
        state.update(shadow=self.shadow, history=self.history, noise=np.arange(3.0), nothing=float("nan"))

    def on_load(self, module: TrainModule, state: dict[str, Any]) -> None:
        assert np.array_equal(state["noise"], np.arange(3.0))
        assert state["nothing"] != state["nothing"]
        self.history = state["history"]
        for name, whole in state["shadow"].items():
            mine = self.shadow[name]
            if hasattr(mine, "full_tensor"):
                from torch.distributed.tensor import distribute_tensor

                whole = distribute_tensor(whole, mine.device_mesh, mine.placements)
            mine.copy_(whole)


class Crash(Callback):
    def on_step(self, step: int) -> None:
        if step == CRASH:
            raise RuntimeError("power cut")


class Bounded(Callback):
    """Ends what would go round for ever."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_epoch_start(self) -> None:
        self.epochs += 1
        assert self.epochs < 20, "the epochs go by without a step"


def fit(run_dir: Path | None, steps: int = STEPS, module: TrainModule | None = None, **options: Any) -> Any:
    """One run of the script that all tests share; `options` are the Trainer's, and fit's by their names."""
    inner = {"batch_size": 4, "num_workers": 0, "resume": "auto", "val": None, "shuffle": None}
    inner = {name: options.pop(name, default) for name, default in inner.items()}
    data = options.pop("train", Noisy())
    torch.manual_seed(11)
    module = Net() if module is None else module
    defaults = {
        "keep": "all",
        "seed": 5,
        "save_every": "4 steps",
        "log_every": "3 steps",
        "global_batch_size": GLOBAL_BATCH,
    }
    trainer = Trainer(max_steps=steps, run_dir=run_dir, progress=False, **{**defaults, **options})
    trainer.fit(module, data, **inner)
    return module


def fit_until_the_crash(run_dir: Path, **options: Any) -> None:
    plugins = [*options.pop("plugins", []), Crash()]
    with pytest.raises(RuntimeError, match="power cut"):
        fit(run_dir, plugins=plugins, **options)


# ------------------------------------------------------------------------------------------------- what is compared


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "clock"} for line in lines]


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def step(run_dir: Path, number: int = STEPS) -> Path:
    return run_dir / "checkpoints" / f"step-{number:08d}"


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def content(path: Path) -> dict[str, Any]:
    """All of a checkpoint that a clock has no part in: every tensor's bytes, every value, every rank's generators."""
    with Reader(path) as reader:
        found: dict[str, Any] = {name: bytes(reader.read(name)) for name in reader.manifest.tensors}
        ranks = int(str(reader.manifest.topology["world_size"]))
        for file in ("state.json", *(f"rank-{rank:05d}.json" for rank in range(ranks))):
            found[file] = reader.json(file)
    found["state.json"]["progress"].pop("seconds")
    found["state.json"].pop("metrics_bytes")  # the clock's digits are counted too
    return found


def assert_same_run(first: Path, second: Path, number: int = STEPS) -> None:
    wanted, found = content(step(first, number)), content(step(second, number))
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []
    assert metrics(second) == metrics(first)


def weights(run_dir: Path, number: int = STEPS) -> dict[str, bytes]:
    return {name: value for name, value in content(step(run_dir, number)).items() if name.startswith("model/")}


# ------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="adamw"),
        pytest.param({"module": ("sgd", "chain")}, id="momentum and chained schedulers"),
        pytest.param({"num_workers": 2, "module": ("sgd", "")}, id="two workers"),
        pytest.param({"precision": "fp16:init_scale=1e9,growth_interval=3", "module": ("adamw", "cosine")}, id="fp16"),
        pytest.param({"plugins": True, "log_every": "5 steps"}, id="plugin state"),
        pytest.param({"val": True, "module": ("adamw", "plateau"), "validate_every": "2 steps"}, id="validation"),
    ],
)
def test_a_crashed_run_ends_as_one_that_never_stopped(tmp_path: Path, options: dict[str, Any]) -> None:
    def arguments() -> dict[str, Any]:
        made = dict(options)
        if "module" in made:
            made["module"] = Net(made["module"][0], schedule=made["module"][1])
        made["plugins"] = [Average()] if "plugins" in made else []
        made["val"] = Noisy(7) if "val" in made else None
        return made

    def seeded() -> dict[str, Any]:
        torch.manual_seed(11)
        return arguments()

    fit(tmp_path / "straight", **seeded())
    fit_until_the_crash(tmp_path / "crashed", **seeded())
    assert steps(tmp_path / "crashed") == [SAVED]
    assert len(metrics(tmp_path / "crashed")) > 1, "written after the checkpoint too, to be cut back"
    fit(tmp_path / "crashed", **seeded())
    assert_same_run(tmp_path / "straight", tmp_path / "crashed")
    if "precision" in options:
        skipped = [e for e in events(tmp_path / "straight") if e["event"] == "skipped"]
        assert skipped, "the loss scale was too large on purpose"
        scaler = content(step(tmp_path / "straight"))["state.json"]["scaler"]
        assert scaler["scale"] < 1e9


def test_a_run_that_is_prolonged_ends_as_one_that_never_stopped(tmp_path: Path) -> None:
    fit(tmp_path / "straight")
    fit(tmp_path / "prolonged", SAVED)
    assert (tmp_path / "prolonged" / "model" / "model.safetensors").exists()
    fit(tmp_path / "prolonged")
    assert_same_run(tmp_path / "straight", tmp_path / "prolonged")


def test_a_run_without_a_seed_goes_on_in_its_own_order(tmp_path: Path) -> None:
    whole = fit(tmp_path / "straight", seed=None).seen
    begun = fit(tmp_path / "resumed", SAVED, seed=None).seen
    torch.manual_seed(12345)
    module = Net()
    trainer = Trainer(max_steps=STEPS, run_dir=tmp_path / "resumed", progress=False, global_batch_size=GLOBAL_BATCH)
    trainer.fit(module, Noisy(), batch_size=4)
    assert begun + module.seen == whole


def test_a_checkpoint_that_a_hook_saves_is_resumed_wherever_it_was_taken(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            if step in (2, 3):  # 3: the last of the epoch
                trainer.save(tmp_path / f"mine-{step}")

    fit(tmp_path / "straight", plugins=[Saves()])
    for number in (2, 3):
        run_dir = tmp_path / f"from-{number}"
        fit(run_dir, resume=tmp_path / f"mine-{number}", plugins=[Bounded()])
        assert weights(run_dir) == weights(tmp_path / "straight")
        later = [line for line in metrics(tmp_path / "straight") if line["step"] > 3]
        assert [line for line in metrics(run_dir) if line["step"] > 3] == later


def test_a_run_that_goes_on_in_another_precision_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, SAVED)
    capsys.readouterr()
    fit(tmp_path, precision="bf16")
    assert f"(step {SAVED}); precision fp32 -> bf16\n" in capsys.readouterr().out
    (resumed,) = [event for event in events(tmp_path) if event["event"] == "resumed"]
    assert (resumed["saved"]["precision"], resumed["now"]["precision"]) == ("fp32", "bf16")


def test_a_torn_checkpoint_is_set_aside_and_the_one_before_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "torn")
    (victim,) = step(tmp_path / "torn").glob("*.safetensors")
    victim.write_bytes(victim.read_bytes()[:-100])
    capsys.readouterr()
    fit(tmp_path / "torn")
    (rejected,) = [event for event in events(tmp_path / "torn") if event["event"] == "rejected"]
    assert rejected["path"] == "step-00000008"
    assert victim.name in rejected["reason"]
    assert "set aside as .bad-step-00000008" in capsys.readouterr().err
    assert (tmp_path / "torn" / "checkpoints" / ".bad-step-00000008").is_dir()
    assert [e["path"] for e in events(tmp_path / "torn") if e["event"] == "resumed"] == ["step-00000004"]
    assert_same_run(tmp_path / "straight", tmp_path / "torn")


def test_an_altered_byte_is_found_wherever_it_is(tmp_path: Path) -> None:
    fit(tmp_path / "run", SAVED)
    for file in sorted(step(tmp_path / "run", SAVED).iterdir()):
        run_dir = tmp_path / file.name
        shutil.copytree(tmp_path / "run", run_dir)
        victim = step(run_dir, SAVED) / file.name
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
        for _ in range(2):  # the second time nothing is left to set aside: that is no reason to start over
            with pytest.raises(CheckpointError, match=r"no checkpoint in .* is good.*resume='never'"):
                fit(run_dir)
        with pytest.raises(CheckpointError, match=r"step-00000004"):
            fit(None, resume=run_dir / "checkpoints" / ".bad-step-00000004")


def test_a_checkpoint_of_a_newer_version_is_left_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fabricate.checkpoint.manifest.VERSION", 2)
    fit(tmp_path, SAVED)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="upgrade fabricate"):
        fit(tmp_path)
    assert step(tmp_path, SAVED).is_dir()


def test_never_keeps_the_earlier_run_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, SAVED)
    before = metrics(tmp_path)
    fit(tmp_path, resume="never")
    assert steps(tmp_path) == [4, 8]
    assert steps(tmp_path / "before-1") == [4]
    assert metrics(tmp_path / "before-1") == before
    assert [line["step"] for line in metrics(tmp_path)] == [3, 3, 6, 6, 8]
    assert f"moved to {tmp_path / 'before-1'}" in capsys.readouterr().err


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_what_a_run_wrote_before_its_first_checkpoint_is_not_mixed_in(tmp_path: Path, resume: str) -> None:
    fit(tmp_path / "straight", save_every=None)
    fit_until_the_crash(tmp_path / "crashed", save_every=None)
    assert metrics(tmp_path / "crashed")
    fit(tmp_path / "crashed", save_every=None, resume=resume)
    assert metrics(tmp_path / "crashed") == metrics(tmp_path / "straight")


def test_going_back_in_a_run_keeps_what_came_after_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path / "straight")
    shutil.copytree(tmp_path / "straight", tmp_path / "back")
    monkeypatch.chdir(tmp_path)
    fit(tmp_path / "back", resume=Path("back/checkpoints/step-00000004"))  # relative, the run directory is not
    assert_same_run(tmp_path / "straight", tmp_path / "back")
    assert steps(tmp_path / "back" / "before-1") == [8]


def test_a_run_from_another_ones_checkpoint_does_not_meet_old_files(tmp_path: Path) -> None:
    fit(tmp_path / "straight")
    fit(tmp_path / "other", SAVED, seed=77)
    fit(tmp_path / "other", resume=step(tmp_path / "straight", SAVED))
    assert weights(tmp_path / "other") == weights(tmp_path / "straight")
    assert steps(tmp_path / "other") == [8]
    assert steps(tmp_path / "other" / "before-1") == [4]


def test_a_path_that_is_no_checkpoint_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    fit(tmp_path, SAVED)
    with pytest.raises(CheckpointError, match=r"not a checkpoint.*RUN_DIR/checkpoints/step"):
        fit(None, resume=tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        fit(None, resume=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": 4}, r"global_batch_size=8, this run has 4.*accept_changes=\('global_batch_size',\)"),
        ({"train": Noisy(23)}, r"num_samples=22, this run has 23.*accept_changes=\('train',\)"),
        ({"shuffle": False}, r"shuffle=True, this run has False.*accept_changes=\('train',\)"),
        ({"seed": 6}, r"seed=5, this run has seed=6.*accept_changes=\('seed',\)"),
        ({"plugins": [Average()]}, r"has no state for the plugin Average.*accept_changes=\('plugins',\)"),
        ({"module": Net("sgd")}, r"optimizer 'main' is a AdamW, this run has a SGD.*resume='never'"),
        ({"module": Net(schedule="cosine")}, r"schedulers \{\}, this run has \{'main': 'CosineAnnealingLR'\}"),
    ],
    ids=["global batch", "rows", "shuffle", "seed", "plugin", "optimizer", "scheduler"],
)
def test_what_changed_since_the_checkpoint_is_named_with_its_override(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    fit(tmp_path, SAVED)
    before = content(step(tmp_path, SAVED))
    module = change.get("module") or Net()
    initial = [p.clone() for p in module.parameters()]
    with pytest.raises(CheckpointError, match=message):
        fit(tmp_path, **{**change, "module": module})
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), initial, strict=True)), "nothing is changed"
    assert content(step(tmp_path, SAVED)) == before
    override = {"global_batch_size": "global_batch_size", "seed": "seed", "plugins": "plugins"}
    (name,) = change
    if name != "module":
        fit(tmp_path, **change, accept_changes=(override.get(name, "train"),))
        assert steps(tmp_path) == [4, 8]


def test_a_plugin_whose_state_the_checkpoint_holds_may_not_be_missing(tmp_path: Path) -> None:
    fit(tmp_path, SAVED, plugins=[Average()])
    with pytest.raises(CheckpointError, match=r"holds the state of the plugin Average"):
        fit(tmp_path)
    fit(tmp_path, accept_changes=("plugins",))


def test_another_module_is_named_by_what_differs(tmp_path: Path) -> None:
    fit(tmp_path, SAVED)
    module = Net()
    module.head = torch.nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"model/head\.weight has shape \(1, 3\), the module's has \(2, 3\)"):
        fit(tmp_path, module=module)
    del module.norm
    with pytest.raises(CheckpointError, match=r"it has besides model/norm\.bias"):
        fit(tmp_path, module=module, plugins=[])


@pytest.mark.parametrize("what", ["raises", "holds a module"])
def test_a_plugin_that_cannot_be_saved_aborts_the_commit_and_keeps_the_previous_one(tmp_path: Path, what: str) -> None:
    class Broken(Callback):
        def on_save(self, trainer: Trainer, state: dict[str, Any]) -> None:
            if trainer.step == STEPS:
                if what == "raises":
                    raise ValueError("no state today")
                state["net"] = torch.nn.Linear(1, 1)

    wanted = (ValueError, "no state today") if what == "raises" else (CheckpointError, r"plugin/Broken.net is a torch")
    with pytest.raises(wanted[0], match=wanted[1]) as caught:
        fit(tmp_path, plugins=[Broken()])
    if what == "raises":
        assert "raised in hook on_save of plugin 'Broken'" in "".join(caught.value.__notes__)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_nothing_is_pickled_when_saving_and_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a checkpoint is data, not a program")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    fit_until_the_crash(tmp_path, plugins=[Average()], module=Net("adamw", schedule="cosine"))
    fit(tmp_path, plugins=[Average()], module=Net("adamw", schedule="cosine"))
    Net.load_from_checkpoint(tmp_path)
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds == {".json", ".jsonl", ".safetensors"}


class Measured(Net):
    """Its validation loss is what the table says."""

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": (9.0, 5.0, 1.0, 2.0, 4.0)[self.trainer.step]}


@pytest.mark.parametrize(
    ("keep", "validate_every", "kept"),
    [
        (2, 1, [3, 4]),
        ("all", 1, [1, 2, 3, 4]),
        ({"last": 1, "best": 1}, 1, [2, 4]),
        ({"last": 1, "best": 2}, 1, [2, 3, 4]),
        ({"last": 1, "best": 1, "mode": "max"}, 1, [1, 4]),
        ({"last": 1, "best": 1}, 2, [2, 4]),  # step 3 carries the value of step 2, where it was measured
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path: Path, keep: Any, validate_every: int, kept: list[int]) -> None:
    often = {"save_every": 1, "validate_every": validate_every}
    trainer = Trainer(max_steps=4, run_dir=tmp_path, keep=keep, seed=1, progress=False, **often)
    trainer.fit(Measured(), Noisy(), Noisy(4), batch_size=4)
    assert steps(tmp_path) == kept
    for which, number in [("last", 4), *([("best", kept[0])] if keep == {"last": 1, "best": 1} else [])]:
        module = Net()
        trainer.validate(module, Noisy(4), which, batch_size=4)
        saved = Net.load_from_checkpoint(step(tmp_path, number))
        assert torch.equal(module.head.weight, saved.head.weight)


def test_what_a_kill_left_undeleted_goes_when_the_run_is_resumed(tmp_path: Path) -> None:
    fit(tmp_path, keep="all")
    assert steps(tmp_path) == [4, 8]
    fit(tmp_path, keep=1)
    assert steps(tmp_path) == [8]


def test_a_damaged_checkpoint_may_be_the_best_and_is_not_deleted(tmp_path: Path) -> None:
    class Damage(Callback):
        def on_saved(self, path: Path, step: int) -> None:
            if step == 1:
                (path / "manifest.json").write_text("{}")

    keep = {"last": 1, "best": 1}
    trainer = Trainer(
        max_steps=4,
        run_dir=tmp_path,
        keep=keep,
        seed=1,
        progress=False,
        save_every=1,
        validate_every=1,
        plugins=[Damage()],
    )
    trainer.fit(Measured(), Noisy(), Noisy(4), batch_size=4)
    assert steps(tmp_path) == [1, 2, 4]


def test_what_cannot_be_deleted_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Files.rename

    def rename(self: Files, source: Path, target: Path) -> None:
        if target.name == ".trash-step-00000002":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(self, source, target)

    monkeypatch.setattr(Files, "rename", rename)
    fit(tmp_path, keep=1, save_every=2)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("prune_failed") == 3
    assert "Training goes on" in capsys.readouterr().err
    monkeypatch.undo()
    fit(tmp_path, keep=1, save_every=2)
    assert steps(tmp_path) == [8]


def test_a_fit_that_is_done_says_so_and_changes_nothing(tmp_path: Path) -> None:
    fit(tmp_path)
    before, lines = content(step(tmp_path)), metrics(tmp_path)
    module = fit(tmp_path)
    assert module.seen == []
    assert content(step(tmp_path)) == before
    assert metrics(tmp_path) == lines


class Built(TrainModule):
    """Big layers in configure_model, as the documentation advises."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width = width

    def configure_model(self) -> None:
        self.body = torch.nn.Linear(4, self.width)
        self.head = torch.nn.Linear(self.width, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.head(self.body(batch[1])).square().mean()

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_loaded_module_keeps_its_weights_when_a_trainer_runs_it(tmp_path: Path) -> None:
    trained = fit(tmp_path, module=Built(width=2))
    loaded = Built.load_from_checkpoint(tmp_path)
    assert loaded.width == 2
    trainer = Trainer(max_steps=0, progress=False)
    wanted = trainer.validate(trained, Noisy(8), batch_size=4)
    assert trainer.validate(loaded, Noisy(8), batch_size=4) == wanted
    trainer.fit(loaded, Noisy(), batch_size=4)
    assert torch.equal(loaded.body.weight, trained.body.weight)


# ------------------------------------------------------------------------------------------------- two ranks


class Storyteller(TrainModule):
    """A small GPT-2, whose head is tied to its embedding."""

    def configure_model(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(
            GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        )

    def training_step(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def predict_step(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=batch[0]).logits
        return logits

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def stories() -> TensorDataset:
    return TensorDataset(torch.randint(1, 31, (8, 8), generator=torch.Generator().manual_seed(2)))


def tell(root: Path, strategy: str, batch_size: int) -> list[torch.Tensor] | None:
    """Initial weights to `initial-STRATEGY`, those after two updates to `stories-STRATEGY`; returns their logits."""
    for name, number in (("initial", 0), ("stories", 2)):
        module = Storyteller()
        trainer = Trainer(
            strategy=strategy, max_steps=number, seed=3, run_dir=root / f"{name}-{strategy}", progress=False
        )
        trainer.fit(module, stories(), batch_size=batch_size, shuffle=False)
    return trainer.predict(module, stories(), batch_size=batch_size)


class MixedWidths(Net):
    """Weights of several element sizes, in another order than a file holds them."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 3).double()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x.to(block.weight.dtype))
        return self.head(x.float())


class Remembers(Net):
    """Every rank's running statistics are its own, and what it computes depends on them."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("same", torch.arange(3.0))

    def training_step(self, batch: Any) -> torch.Tensor:
        self.average.lerp_(batch[1].mean(0), 0.5)
        return super().training_step((batch[0], batch[1] - self.average))


def remember(root: Path, strategy: str) -> Any:
    """Straight and crashed; this rank's statistics at the end of both."""
    found = []
    for name in ("straight", "crashed"):
        run_dir, options = root / f"remembers-{name}-{strategy}", {"strategy": strategy, "batch_size": 2}
        if name == "crashed":
            fit_until_the_crash(run_dir, module=Remembers(), **options)
        module = fit(run_dir, module=Remembers(), **options)
        found.append([module.average.tolist(), module.norm.running_mean.tolist()])
    return found


def on_two_ranks(root: Path) -> dict[str, Any]:
    """Everything that two ranks write into `root`; what a run returned or raised, by name."""

    def resumed(strategy: str) -> Any:
        """Straight and crashed, with the state of a sharded plugin; the order of the samples."""
        seen = {}
        options = {"strategy": strategy, "batch_size": 2}
        seen["straight"] = fit(root / f"straight-{strategy}", plugins=[Average()], **options).seen
        fit_until_the_crash(root / f"crashed-{strategy}", plugins=[Average()], **options)
        seen["resumed"] = fit(root / f"crashed-{strategy}", plugins=[Average()], **options).seen
        return seen

    def crossed(name: str, strategy: str, saved: str) -> Any:
        """The checkpoint of another strategy: once only loaded and saved again, once trained on."""
        source, plugins = root / saved, {"plugins": [Average()]} if "alone" not in saved else {}
        options = {"strategy": strategy, "batch_size": 2, "resume": step(source, SAVED), **plugins}
        fit(root / f"loaded-{name}", SAVED, **options)
        return fit(root / f"{name}", **options).seen

    jobs: dict[str, Callable[[], Any]] = {
        "ddp": lambda: resumed("ddp"),
        "fsdp": lambda: resumed("fsdp"),
        "fsdp to ddp": lambda: crossed("fsdp-to-ddp", "ddp", "straight-fsdp"),
        "single to fsdp": lambda: crossed("single-to-fsdp", "fsdp", "straight-alone"),
        "stories": lambda: tell(root, "fsdp", 2),
        "ddp remembers": lambda: remember(root, "ddp"),
        "fsdp remembers": lambda: remember(root, "fsdp"),
        "mixed": lambda: fit(root / "mixed", 2, strategy="fsdp:wrap=Linear", module=MixedWidths(), batch_size=2).seen,
    }
    found = {}
    for name, run in jobs.items():
        try:
            found[name] = run()
        except Exception as exception:
            found[name] = "".join(traceback.format_exception(exception))
    return found


class Pair:
    """What two ranks did, and the directory they did it in."""

    def __init__(self, root: Path, alone: list[list[int]], ranks: list[dict[str, Any]]) -> None:
        self.root, self.alone, self._ranks = root, alone, ranks

    def __getitem__(self, name: str) -> list[Any]:
        for rank in self._ranks:
            if isinstance(rank[name], str):
                pytest.fail(rank[name], pytrace=False)
        return [rank[name] for rank in self._ranks]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    alone = fit(root / "straight-alone").seen
    return Pair(root, alone, run_ranks(on_two_ranks, 2, root))


def updates(*ranks: list[list[int]]) -> list[list[int]]:
    """Per update, the rows that went into it, whichever rank had them; an update is two micro-batches."""
    return [
        sorted(row for rank in ranks for micro_batch in rank[at : at + 2] for row in micro_batch)
        for at in range(0, len(ranks[0]), 2)
    ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_that_crashed_end_as_two_that_never_stopped(pair: Pair, strategy: str) -> None:
    pair[strategy]
    assert_same_run(pair.root / f"straight-{strategy}", pair.root / f"crashed-{strategy}")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_running_statistics_of_each_rank_come_back_to_it(pair: Pair, strategy: str) -> None:
    ranks = pair[f"{strategy} remembers"]
    for straight, crashed in ranks:
        assert crashed == straight
    straight, crashed = (pair.root / f"remembers-{name}-{strategy}" for name in ("straight", "crashed"))
    assert_same_run(straight, crashed)
    own = sorted(name for name in content(step(straight)) if "/buffers/" in name)
    if strategy == "fsdp":  # ddp gives every rank those of rank 0 before each forward
        assert ranks[0][0] != ranks[1][0]
        assert own == [f"rank/00001/buffers/{name}" for name in ("average", "norm.running_mean", "norm.running_var")]


def test_the_order_of_samples_is_the_same_on_every_number_of_ranks_and_goes_on_after_a_resume(pair: Pair) -> None:
    alone = updates(pair.alone)
    assert sorted(row for update in alone[:3] for row in update) == list(range(ROWS)), "an epoch, each row once"
    for strategy in ("ddp", "fsdp"):
        ranks = pair[strategy]
        assert updates(*(rank["straight"] for rank in ranks)) == alone
        assert updates(*(rank["resumed"] for rank in ranks)) == alone[SAVED:]
    assert updates(*pair["fsdp to ddp"]) == alone[SAVED:]
    assert updates(*pair["single to fsdp"]) == alone[SAVED:]
    begun = fit(pair.root / "fsdp-to-single", resume=step(pair.root / "straight-fsdp", SAVED), plugins=[Average()])
    assert updates(begun.seen) == alone[SAVED:]


@pytest.mark.parametrize("name", ["fsdp-to-ddp", "fsdp-to-single", "single-to-fsdp"])
def test_a_checkpoint_loads_under_another_strategy_bit_by_bit(pair: Pair, name: str) -> None:
    saved = step(pair.root / ("straight-alone" if name.startswith("single") else "straight-fsdp"), SAVED)
    if name == "fsdp-to-single":
        fit(pair.root / f"loaded-{name}", SAVED, resume=saved, plugins=[Average()])
    else:
        pair[name.replace("-", " ")]
    before, after = content(saved), content(step(pair.root / f"loaded-{name}", SAVED))
    kept = [key for key in before if key.startswith(("model/", "optimizer/", "plugin/"))]
    assert len(kept) > 20
    assert [key for key in kept if after.get(key) != before[key]] == []
    for key in ("optimizers", "schedulers", "progress", "data", "seed", "latest"):
        assert after["state.json"][key] == before["state.json"][key]
    collected = {
        when: [
            entry for file in sorted(found) if file.startswith("rank-") for entry in found[file]["metrics"]["pending"]
        ]
        for when, found in (("before", before), ("after", after))
    }
    assert collected["after"] == collected["before"], "since the last log boundary, on all ranks together"


@pytest.mark.parametrize("kind", ["alone", "ddp", "fsdp"])
def test_the_exported_model_is_plain_safetensors_named_as_in_the_state_dict(pair: Pair, kind: str) -> None:
    if kind != "alone":
        pair[kind]
    run_dir = pair.root / f"straight-{kind}"
    assert [path.name for path in (run_dir / "model").iterdir()] == ["model.safetensors"]
    exported = load_file(run_dir / "model" / "model.safetensors")
    module = Net.load_from_checkpoint(run_dir)
    assert exported.keys() == module.state_dict().keys()
    assert all(torch.equal(exported[name], value) for name, value in module.state_dict().items())
    Net().load_state_dict(exported)


def test_weights_of_several_element_sizes_are_exported_from_shards(pair: Pair) -> None:
    pair["mixed"]
    exported = load_file(pair.root / "mixed" / "model" / "model.safetensors")
    saved = MixedWidths.load_from_checkpoint(pair.root / "mixed").state_dict()
    assert {value.dtype for value in exported.values()} >= {torch.bfloat16, torch.float64, torch.float32}
    assert all(torch.equal(exported[name], value) for name, value in saved.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transformers_reads_the_exported_folder_and_computes_the_same(pair: Pair) -> None:
    from transformers import AutoModelForCausalLM

    first, second = pair["stories"]
    assert second is None
    told = {"fsdp": first, "single": tell(pair.root, "single", 4)}
    initial = [load_file(pair.root / f"initial-{strategy}" / "model" / "model.safetensors") for strategy in told]
    assert initial[0].keys() == initial[1].keys()
    assert all(torch.equal(value, initial[1][name]) for name, value in initial[0].items())
    for strategy, logits in told.items():
        folder = pair.root / f"stories-{strategy}" / "model"
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert type(model).__name__ == "GPT2LMHeadModel"
        assert model.lm_head.weight is model.transformer.wte.weight
        with torch.no_grad():
            found = model(input_ids=stories().tensors[0]).logits
        torch.testing.assert_close(found, torch.stack(logits), rtol=1e-5, atol=1e-6)
    assert Storyteller.load_from_checkpoint(pair.root / "stories-fsdp").model.lm_head.weight.shape == (31, 8)
