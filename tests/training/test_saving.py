"""Saving, resuming and exporting whole runs: bit for bit, in one process."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, CheckpointError, FabricateError, StochasticWeightAveraging, Trainer, TrainModule
from fabricate.checkpoint.format.directory import Reader
from fabricate.checkpoint.format.files import Files
from tests.support.regression import ROWS, Quantising, Regression
from tests.support.runs import (
    GLOBAL_BATCH,
    SAVED,
    STEPS,
    Average,
    Bounded,
    Net,
    Noisy,
    assert_same_run,
    content,
    events,
    fit,
    fit_until_the_crash,
    metrics,
    step,
    steps,
    weights,
)


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
        copies = dict(options)
        if "module" in copies:
            copies["module"] = Net(copies["module"][0], schedule=copies["module"][1])
        copies["plugins"] = [Average()] if "plugins" in copies else []
        copies["val"] = Noisy(7) if "val" in copies else None
        return copies

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
    whole = fit(tmp_path / "straight", seed=None).rows
    begun = fit(tmp_path / "resumed", SAVED, seed=None).rows
    torch.manual_seed(12345)
    module = Net()
    trainer = Trainer(max_steps=STEPS, run_dir=tmp_path / "resumed", progress=False, global_batch_size=GLOBAL_BATCH)
    trainer.fit(module, Noisy(), batch_size=4)
    assert begun + module.rows == whole


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


class SavesAtTheEnd(Regression):
    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        assert self.trainer is not None
        return {"loss": torch.tensor(abs(self.trainer.epoch - 1.0))}  # best after the second epoch

    def on_fit_end(self) -> None:
        assert self.trainer is not None
        assert self.trainer.run_dir is not None
        self.trainer.save(self.trainer.run_dir / "mine")


def saving_at_the_end(run_dir: Path, *plugins: Any, **options: Any) -> SavesAtTheEnd:
    module = SavesAtTheEnd()
    trainer = Trainer(max_epochs=4, run_dir=run_dir, seed=0, progress=False, plugins=plugins, **options)
    trainer.fit(module, ROWS, ROWS, batch_size=8)
    return module


@pytest.mark.parametrize("average", [False, True])
def test_a_checkpoint_of_weights_that_training_did_not_end_with_is_not_resumed(
    average: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if average:
        module = saving_at_the_end(tmp_path, StochasticWeightAveraging(0.1, swa_epoch_start=2))
    else:
        best: Any = {"last": 1, "best": 1, "metric": "val_loss"}
        module = saving_at_the_end(tmp_path, load_best=True, keep=best)
    note = capsys.readouterr().err
    assert (
        f"{tmp_path / 'mine'} holds the weights and buffers that the module has now. They are not those of the last update"
        in note
    )
    assert "The state after the last update is in" in note
    loaded = SavesAtTheEnd.load_from_checkpoint(tmp_path / "mine")
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in loaded.state_dict().items())
    with pytest.raises(CheckpointError, match="mine holds weights only"):
        Trainer(max_epochs=5, progress=False).fit(SavesAtTheEnd(), ROWS, batch_size=8, resume=tmp_path / "mine")


def test_a_checkpoint_of_buffers_that_a_hook_changed_at_the_end_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Recalibrates(SavesAtTheEnd):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("threshold", torch.zeros(()))

        def on_complete(self) -> None:
            self.threshold += 1

    Trainer(max_epochs=1, run_dir=tmp_path, progress=False).fit(Recalibrates(), ROWS, batch_size=8)
    assert "mine holds the weights and buffers that the module has now" in capsys.readouterr().err
    assert float(Recalibrates.load_from_checkpoint(tmp_path / "mine").threshold) == 1
    with pytest.raises(CheckpointError, match="mine holds weights only"):
        Trainer(max_epochs=2, progress=False).fit(Recalibrates(), ROWS, batch_size=8, resume=tmp_path / "mine")


def test_a_checkpoint_of_the_last_update_that_is_also_the_best_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class BestAtTheEnd(SavesAtTheEnd):
        def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
            assert self.trainer is not None
            return {"loss": torch.tensor(-float(self.trainer.epoch))}

    best: Any = {"last": 1, "best": 1, "metric": "val_loss"}
    trainer = Trainer(max_epochs=2, run_dir=tmp_path, seed=0, progress=False, load_best=True, keep=best)
    trainer.fit(BestAtTheEnd(), ROWS, ROWS, batch_size=8)
    assert "that the module has now" not in capsys.readouterr().err
    more = Trainer(max_epochs=3, run_dir=tmp_path / "more", seed=0, progress=False)
    assert more.fit(BestAtTheEnd(), ROWS, batch_size=8, resume=tmp_path / "mine").epochs == 3


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
    assert "this checkpoint is renamed to .bad-step-00000008" in capsys.readouterr().err
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
    monkeypatch.setattr("fabricate.checkpoint.format.manifest.VERSION", 2)
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


def test_a_relative_run_directory_stays_where_it_was_when_the_trainer_was_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaves(Callback):
        def on_step(self, step: int) -> None:
            (tmp_path / f"{step}").mkdir()
            os.chdir(tmp_path / f"{step}")

    monkeypatch.chdir(tmp_path)
    trainer = Trainer(run_dir="run", max_steps=3, save_every=1, log_every=1, progress=False, plugins=[Leaves()])
    (tmp_path / "before").mkdir()
    os.chdir(tmp_path / "before")
    trainer.fit(Regression(), ROWS, ROWS, batch_size=2)
    assert steps(tmp_path / "run") == [1, 2, 3]
    assert len(metrics(tmp_path / "run")) >= 3
    assert not list(tmp_path.glob("*/run"))


def test_a_run_from_another_ones_checkpoint_does_not_meet_old_files(tmp_path: Path) -> None:
    fit(tmp_path / "straight")
    fit(tmp_path / "other", SAVED, seed=77)
    fit(tmp_path / "other", resume=step(tmp_path / "straight", SAVED))
    assert weights(tmp_path / "other") == weights(tmp_path / "straight")
    assert steps(tmp_path / "other") == [8]
    assert steps(tmp_path / "other" / "before-1") == [4]


def test_a_copy_of_a_runs_checkpoint_continues_that_run(tmp_path: Path) -> None:
    fit(tmp_path / "straight")
    fit(tmp_path / "run", SAVED)
    shutil.copytree(step(tmp_path / "run", SAVED), tmp_path / "copy")
    fit(tmp_path / "run", resume=tmp_path / "copy")
    assert_same_run(tmp_path / "straight", tmp_path / "run")
    assert not (tmp_path / "run" / "before-1").exists()


def test_a_run_goes_on_from_the_newest_checkpoint_of_another_run_directory(tmp_path: Path) -> None:
    fit(tmp_path / "straight")
    fit(tmp_path / "begun", SAVED)
    fit(tmp_path / "other", resume=tmp_path / "begun")
    assert weights(tmp_path / "other") == weights(tmp_path / "straight")
    fit(tmp_path / "third", resume=tmp_path / "begun" / "checkpoints")
    assert weights(tmp_path / "third") == weights(tmp_path / "straight")


def test_metrics_that_cannot_be_written_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(FabricateError, match=r"cannot write .*metrics\.jsonl: No space left on device. Make room"):
        fit(tmp_path)


def test_a_path_that_is_no_checkpoint_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    fit(tmp_path / "run", SAVED)
    with pytest.raises(CheckpointError, match=r"neither a checkpoint nor.*RUN_DIR/checkpoints/step"):
        fit(None, resume=tmp_path)
    with pytest.raises(CheckpointError, match=r"neither a checkpoint nor.*RUN_DIR/checkpoints/step"):
        fit(None, resume=tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(CheckpointError, match="does not exist"):
        fit(None, resume=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": 4}, r"global_batch_size=8, but this run has 4.*accept_changes=\('global_batch_size',\)"),
        ({"train": Noisy(23)}, r"num_samples=22, but this run has 23.*accept_changes=\('train',\)"),
        ({"shuffle": False}, r"shuffle=True, but this run has False.*accept_changes=\('train',\)"),
        ({"seed": 6}, r"seed=5, but this run has seed=6.*accept_changes=\('seed',\)"),
        ({"plugins": [Average()]}, r"has no state for the plugin Average.*accept_changes=\('plugins',\)"),
        (
            {"module": Net("sgd")},
            r"optimizer 'main': the checkpoint has a AdamW, but this run has a SGD.*resume='never'",
        ),
        ({"module": Net(schedule="cosine")}, r"schedulers \{\}, but this run has \{'main': 'CosineAnnealingLR'\}"),
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
    with pytest.raises(CheckpointError, match=r"model/head\.weight has shape \(1, 3\), but \(2, 3\) in this module"):
        fit(tmp_path, module=module)
    del module.norm
    with pytest.raises(CheckpointError, match=r"and the module lacks model/norm\.bias"):
        fit(tmp_path, module=module, plugins=[])


def test_a_cache_that_forwards_make_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    class Caches(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("grows", torch.ones(1), persistent=False)

        def training_step(self, batch: Any) -> torch.Tensor:
            self.register_buffer("grows", torch.ones(2 + self.trainer.step), persistent=False)
            self.register_buffer("made", torch.ones(1), persistent=False)
            return super().training_step(batch)

    options: dict[str, Any] = {"progress": False, "seed": 1, "run_dir": tmp_path}

    def trained(number: int, **other: Any) -> Any:
        torch.manual_seed(0)
        return Trainer(max_steps=number, **{**options, **other}).fit(Caches(), ROWS, batch_size=2)

    trained(2)
    result, whole = trained(4), trained(4, run_dir=tmp_path / "whole")
    assert result.metrics == whole.metrics
    Caches.load_from_checkpoint(tmp_path)


def test_an_observer_that_has_grown_is_resumed_and_loaded(tmp_path: Path) -> None:
    for number, folder in ((2, "parts"), (4, "parts"), (4, "whole")):
        torch.manual_seed(0)
        trainer = Trainer(max_steps=number, progress=False, seed=1, run_dir=tmp_path / folder)
        trainer.fit(Quantising(), ROWS, batch_size=2)
    assert weights(tmp_path / "parts", 4) == weights(tmp_path / "whole", 4)
    assert Quantising.load_from_checkpoint(tmp_path / "whole").fake_quantise.scale.shape == (2,)


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


def test_of_values_that_differ_by_rounding_the_oldest_is_the_best(tmp_path: Path) -> None:
    class Rounded(Net):
        def validation_step(self, batch: Any) -> dict[str, Any]:
            return {"score": (0.0, 0.5, 0.936026936026936, 0.9360269362, 0.9360269366)[self.trainer.step]}

    keep = {"last": 1, "best": 1, "metric": "val_score", "mode": "max"}
    trainer = Trainer(max_steps=4, run_dir=tmp_path, keep=keep, seed=1, progress=False, save_every=1, validate_every=1)
    result = trainer.fit(Rounded(), Noisy(), Noisy(4), batch_size=4)
    assert steps(tmp_path) == [2, 4]
    assert (result.best_checkpoint, result.best_score) == (step(tmp_path, 2), 0.936026936026936)


@pytest.mark.parametrize(
    ("keep", "validate_every", "numbers"),
    [
        (2, 1, [3, 4]),
        ("all", 1, [1, 2, 3, 4]),
        ({"last": 1, "best": 1}, 1, [2, 4]),
        ({"last": 1, "best": 2}, 1, [2, 3, 4]),
        ({"last": 1, "best": 1, "mode": "max"}, 1, [1, 4]),
        ({"last": 1, "best": 1}, 2, [2, 4]),  # step 3 carries the value of step 2, where it was measured
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path: Path, keep: Any, validate_every: int, numbers: list[int]) -> None:
    often = {"save_every": 1, "validate_every": validate_every}
    trainer = Trainer(max_steps=4, run_dir=tmp_path, keep=keep, seed=1, progress=False, **often)
    trainer.fit(Measured(), Noisy(), Noisy(4), batch_size=4)
    assert steps(tmp_path) == numbers
    for which, number in [("last", 4), *([("best", numbers[0])] if keep == {"last": 1, "best": 1} else [])]:
        module = Net()
        trainer.validate(module, Noisy(4), which, batch_size=4)
        saved = Net.load_from_checkpoint(step(tmp_path, number))
        assert torch.equal(module.head.weight, saved.head.weight)


@pytest.mark.parametrize(
    ("keep", "number", "reason"),
    [
        ({"last": "all", "best": 1, "metric": "val_score", "mode": "max"}, 1, "(val_score 3)"),
        (2, 3, "(val_loss 2), the best of the checkpoints that still exist. The best one of the run"),
    ],
)
def test_the_best_for_an_evaluation_is_that_by_which_the_run_kept_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keep: Any, number: int, reason: str
) -> None:
    class Scored(Measured):
        def validation_step(self, batch: Any) -> dict[str, Any]:
            return {**super().validation_step(batch), "score": (0.0, 3.0, 1.0, 2.0, 1.0)[self.trainer.step]}

    trainer = Trainer(max_steps=4, run_dir=tmp_path, keep=keep, seed=1, progress=False, save_every=1, validate_every=1)
    trainer.fit(Scored(), Noisy(), Noisy(4), batch_size=4)
    module = Net()
    Trainer(run_dir=tmp_path, progress=False).validate(module, Noisy(4), "best", batch_size=4)
    assert torch.equal(module.head.weight, Net.load_from_checkpoint(step(tmp_path, number)).head.weight)
    assert f"the weights are those of {step(tmp_path, number)} {reason}" in capsys.readouterr().out


def test_the_best_checkpoint_has_the_weights_that_were_measured(tmp_path: Path) -> None:
    class Table(Net):
        def validation_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": 10.0 - self.trainer.step if self.trainer.step < 5 else 9.0}

    keep = {"last": 1, "best": 1}
    trainer = Trainer(max_steps=7, run_dir=tmp_path, keep=keep, seed=1, progress=False, save_every=3, validate_every=2)
    result = trainer.fit(Table(), Noisy(), Noisy(4), batch_size=4)
    assert (result.best_checkpoint, result.best_score) == (step(tmp_path, 4), 6.0)
    assert steps(tmp_path) == [4, 7]
    with Reader(step(tmp_path, 7)) as reader:
        assert "val_loss" not in reader.manifest.metrics, "it was measured at step 6"


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
    assert module.rows == []
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
    wanted = Trainer(seed=0, progress=False).validate(trained, Noisy(8), batch_size=4)
    assert Trainer(seed=0, progress=False).validate(loaded, Noisy(8), batch_size=4) == wanted
    Trainer(max_steps=0, progress=False).fit(loaded, Noisy(), batch_size=4)
    assert torch.equal(loaded.body.weight, trained.body.weight)
