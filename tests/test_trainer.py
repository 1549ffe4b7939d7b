"""Trainer, from its arguments to its result: its length, several fits in a row, predictions and checkpoints."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, ConfigurationError, FabricateError, Trainer, TrainModule
from tests.support.regression import ROWS, Hears, Regression, Scripted, equal, files, fit, weights

# -------------------------------------------------------------------------------------------------------------- how long, how much


@pytest.mark.parametrize(
    ("arguments", "steps", "epochs", "reason"),
    [
        ({"max_steps": 3}, 3, 0, "max_steps"),
        ({"max_steps": 4}, 4, 1, "max_steps"),
        ({"max_steps": 0}, 0, 0, "max_steps"),
        ({"max_steps": None, "max_epochs": 2}, 8, 2, "max_epochs"),
        ({"max_steps": 6, "max_epochs": 9}, 6, 1, "max_steps"),
        ({"max_steps": 9, "max_epochs": 1}, 4, 1, "max_epochs"),
        ({"max_steps": None, "max_epochs": 1, "gradient_accumulation_steps": 3}, 2, 1, "max_epochs"),
        ({"max_steps": None, "max_epochs": 1, "global_batch_size": 8}, 1, 1, "max_epochs"),
        ({"max_steps": None, "max_epochs": 2, "limit_train_batches": 2}, 4, 2, "max_epochs"),
        ({"max_steps": None, "max_epochs": 1, "limit_train_batches": 0.75}, 3, 1, "max_epochs"),
    ],
)
def test_a_fit_is_as_long_as_its_limits_say(arguments: dict[str, Any], steps: int, epochs: int, reason: str) -> None:
    totals: list[int] = []

    class Totals(Regression):
        def configure_optimizers(self) -> Any:
            totals.append(self.trainer.total_steps)
            return super().configure_optimizers()

    result = fit(Totals(), **arguments)
    assert (result.steps, result.epochs, result.stop_reason) == (steps, epochs, reason)
    assert totals == [steps]


def test_a_hook_may_stop_the_fit_and_say_why() -> None:
    class Stops(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            if step == 3:
                trainer.stop("enough")

    result = fit(None, Stops(), max_steps=9)
    assert (result.steps, result.stop_reason) == (3, "enough")


def test_limit_val_batches_cuts_each_evaluation() -> None:
    hears = Hears()
    rows: list[int] = []

    class Counts(Regression):
        def validation_step(self, batch: Any) -> None:
            rows.append(len(batch[0]))

    fit(Counts(), hears, val=ROWS, max_steps=1, validate_every=1, limit_val_batches=2)
    assert rows == [2, 2]


def test_fast_dev_run_goes_through_everything_and_writes_nothing(tmp_path: Path) -> None:
    calls: list[str] = []

    class Walks(Callback):
        def on_step(self) -> None:
            calls.append("step")

        def on_eval_end(self) -> None:
            calls.append("eval")

        def on_saved(self, path: Path) -> None:
            calls.append("saved")
            assert path.is_dir()
            self.path = path

        def on_export(self, path: Path) -> None:
            calls.append("export")
            assert (path / "model.safetensors").is_file()

    walks = Walks()
    run_dir = tmp_path / "run"
    result = fit(None, walks, val=ROWS, max_steps=None, max_epochs=5, fast_dev_run=True, run_dir=run_dir)
    assert calls == ["step", "eval", "saved", "export"]
    assert (result.steps, result.checkpoint) == (1, None)
    assert files(tmp_path) == []
    assert not walks.path.exists()


def test_without_a_run_dir_nothing_is_written_and_the_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(max_steps=2, progress=False)
    trainer.fit(Regression(), ROWS, ROWS, batch_size=2)
    assert files(tmp_path) == []
    plan = trainer.plan(Regression(), ROWS, batch_size=2)
    assert (plan["run_dir"], plan.source("run_dir")) == (None, "nothing is written")


def test_building_a_trainer_has_no_effect(tmp_path: Path) -> None:
    states = torch.get_rng_state(), random.getstate(), dict(os.environ)
    Trainer(max_steps=1, seed=3, run_dir=tmp_path / "run", strategy="ddp", precision="fp16", plugins=["unknown"])
    assert torch.equal(states[0], torch.get_rng_state())
    assert (random.getstate(), dict(os.environ)) == states[1:]
    assert files(tmp_path) == []


def test_a_plan_is_resolved_without_training() -> None:
    module = Regression()
    before = weights(module)
    plan = Trainer(max_epochs=3, gradient_accumulation_steps=2, precision="bf16").plan(module, ROWS, batch_size=2)
    values = {
        name: plan[name]
        for name in ("strategy", "precision", "compute_dtype", "global_batch_size", "total_steps", "world_size")
    }
    assert values == {
        "strategy": "single",
        "precision": "bf16",
        "compute_dtype": "bfloat16",
        "global_batch_size": 4,
        "total_steps": 6,
        "world_size": 1,
    }
    assert (plan.source("precision"), plan.source("total_steps")) == ("argument", "max_epochs")
    assert json.loads(json.dumps(plan.to_json()))["settings"]["total_steps"]["value"] == 6
    assert equal(before, weights(module))


# ------------------------------------------------------------------------------------------------------- several fits, what is left


class Watches(Regression):
    """Notes the dtype of an activation and of its parameters."""

    def training_step(self, batch: Any) -> torch.Tensor:
        hidden = self.layers[0](batch[0])
        self.dtypes = hidden.dtype, self.layers[0].weight.dtype, str(self.trainer.accelerator.mixed_precision)
        return torch.nn.functional.mse_loss(self.layers[2](hidden), batch[1])


@pytest.mark.parametrize(
    ("precision", "activation"),
    [
        ("fp32", torch.float32),
        ("no", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("auto", torch.float32),
    ],
)
def test_the_precision_asked_for_is_in_effect(precision: str, activation: torch.dtype) -> None:
    module = Watches()
    fit(module, precision=precision)
    autocast = precision if precision in ("bf16", "fp16") else "no"
    assert module.dtypes == (activation, torch.float32, autocast)


def test_fits_with_other_precisions_follow_one_another() -> None:
    module = Watches()
    dtypes = []
    for precision in ("fp32", "bf16", "fp16", "fp32"):
        fit(module, precision=precision)
        dtypes.append(module.dtypes[0])
    assert dtypes == [torch.float32, torch.bfloat16, torch.float16, torch.float32]


def test_one_trainer_fits_twice_from_the_beginning() -> None:
    trainer = Trainer(max_steps=2, progress=False)
    module = Regression()
    assert [trainer.fit(module, ROWS, batch_size=2).steps for _ in range(2)] == [2, 2]


def test_a_fit_leaves_the_process_as_it_was() -> None:
    def look() -> Any:
        return (
            dict(os.environ),
            torch.is_autocast_enabled("cpu"),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
        )

    before = look()
    module = Regression()
    module.layers[1].eval()
    fit(module, val=ROWS, precision="bf16", seed=1, deterministic=True)
    assert look() == before
    assert [child.training for child in module.modules()] == [True, True, True, False, True]


def test_a_failed_fit_leaves_the_process_ready_for_the_next() -> None:
    class Fails(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fit(Fails(), precision="bf16")
    assert fit(Watches(), precision="fp32").steps == 2


def test_a_seed_gives_the_same_fit_again() -> None:
    class Late(Regression):
        def __init__(self) -> None:
            TrainModule.__init__(self)
            self.rate = 0.01

        def configure_model(self) -> None:
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    ends = []
    for seed in (1, 1, 2):
        module = Late()
        fit(module, seed=seed, max_steps=6)
        ends.append(weights(module))
    assert equal(ends[0], ends[1])
    assert not equal(ends[0], ends[2])


# ------------------------------------------------------------------------------------------------------- predictions and checkpoints


class Predicts(Regression):
    def predict_step(self, batch: Any) -> Any:
        return {"twice": batch[1] * 16, "names": [f"row {int(value * 8)}" for value in batch[1]]}


def test_predictions_come_in_the_order_of_the_data() -> None:
    predictions = Trainer().predict(Predicts(), ROWS[:7], batch_size=3)
    assert predictions is not None
    assert [(int(row["twice"]), row["names"]) for row in predictions] == [
        (2 * number, f"row {number}") for number in range(7)
    ]


def test_predictions_of_a_shuffled_loader_come_in_the_order_of_the_data_too() -> None:
    loader = torch.utils.data.DataLoader(ROWS, batch_size=3, shuffle=True)  # type: ignore[arg-type]
    predictions = Trainer(seed=1).predict(Predicts(), loader)
    assert predictions is not None
    assert [row["names"] for row in predictions] == [f"row {number}" for number in range(8)]


def test_an_evaluation_takes_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    class Sums(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"sum": sum(weight.sum() for weight in self.layers.state_dict().values())}

        test_step = validation_step

    module = Sums()
    fit(module, max_steps=3, run_dir=tmp_path, save_every=1)
    wanted = float(sum(weight.sum() for weight in weights(module)))
    trainer = Trainer(run_dir=tmp_path)
    assert trainer.validate(Sums(), ROWS, "last", batch_size=2) == {"val_sum": pytest.approx(wanted, abs=1e-5)}
    assert trainer.test(Sums(), ROWS, tmp_path / "checkpoints" / "step-00000003", batch_size=2) == {
        "test_sum": pytest.approx(wanted, abs=1e-5)
    }


def test_the_best_checkpoint_is_kept_and_found(tmp_path: Path) -> None:
    common: dict[str, Any] = {"run_dir": tmp_path, "keep": {"last": 1, "best": 1, "metric": "val_loss"}}
    fit(Scripted([3.0, 1.0, 2.0, 4.0]), val=ROWS[:2], max_steps=4, validate_every=1, save_every=1, **common)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000004"]
    first = Scripted([0.0])
    Trainer(**common).validate(first, ROWS[:2], "best", batch_size=2)
    assert equal(
        weights(first), weights(Scripted.load_from_checkpoint(tmp_path / "checkpoints" / "step-00000002", values=[]))
    )


@pytest.mark.parametrize(("mode", "sign"), [("max", 1.0), ("min", -1.0)])
def test_an_infinite_metric_that_would_be_the_best_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, sign: float
) -> None:
    keep = {"last": 1, "best": 1, "metric": "val_loss", "mode": mode}
    values = [sign * value for value in (1.0, math.inf, 3.0, -math.inf)]
    result = fit(
        Scripted(values), val=ROWS[:2], max_steps=4, validate_every=1, save_every=1, run_dir=tmp_path, keep=keep
    )
    assert result.best_score == sign * 3.0
    notes = [line for line in capsys.readouterr().err.splitlines() if "not counted among the best" in line]
    assert [note.partition(" is not")[0] for note in notes] == [f"note: val_loss={sign * math.inf}"]


def test_a_fit_may_end_with_its_best_weights(tmp_path: Path) -> None:
    import safetensors.torch

    common: dict[str, Any] = {"run_dir": tmp_path, "keep": {"last": 1, "best": 1}, "validate_every": 1, "save_every": 1}
    for name, load_best in (("last", False), ("best", True)):
        module = Scripted([3.0, 1.0, 2.0, 4.0])
        run_dir = tmp_path / name
        result = fit(
            module, val=ROWS[:2], max_steps=4, seed=1, **(common | {"run_dir": run_dir, "load_best": load_best})
        )
        assert (result.best_checkpoint, result.best_score) == (run_dir / "checkpoints" / "step-00000002", 1.0)
        assert result.checkpoint == run_dir / "checkpoints" / "step-00000004"
        wanted = result.best_checkpoint if load_best else result.checkpoint
        assert equal(weights(module), weights(Scripted.load_from_checkpoint(wanted, values=[])))
        exported = safetensors.torch.load_file(run_dir / "model" / "model.safetensors")
        assert all(torch.equal(exported[key], value) for key, value in module.state_dict().items())
    assert fit().best_checkpoint is None


def test_the_best_weights_need_to_be_known(tmp_path: Path) -> None:
    for arguments in ({"run_dir": tmp_path}, {"keep": {"best": 1}}):
        with pytest.raises(ConfigurationError, match=r"load_best=True needs run_dir= and a keep= that says"):
            fit(load_best=True, **arguments)
    keep = {"best": 1, "metric": "accuracy", "mode": "max"}
    with pytest.raises(ConfigurationError, match=r"no checkpoint of this run recorded 'accuracy'; recorded are .*loss"):
        fit(load_best=True, run_dir=tmp_path / "absent", keep=keep)
    keep = {"best": 1, "metric": "val_loss"}
    with pytest.raises(ConfigurationError, match=r"'val_loss' was nan in every checkpoint of this run"):
        fit(
            Scripted([math.nan] * 2),
            load_best=True,
            run_dir=tmp_path / "nan",
            keep=keep,
            val=ROWS[:2],
            validate_every=1,
        )


def test_an_evaluation_after_a_fit_has_the_counters_of_its_weights(tmp_path: Path) -> None:
    class Counting(Callback):
        def on_eval_end(self, trainer: Trainer) -> None:
            counters.append((trainer.step, trainer.epoch))

    counters: list[tuple[int, int]] = []
    trainer = Trainer(max_steps=6, run_dir=tmp_path, save_every=3, progress=False, plugins=[Counting()])
    trainer.validate(Regression(), ROWS, batch_size=2)
    trainer.fit(Regression(), ROWS, batch_size=2)
    trainer.validate(Regression(), ROWS, batch_size=2)
    trainer.validate(Regression(), ROWS, tmp_path / "checkpoints" / "step-00000003", batch_size=2)
    assert counters == [(0, 0), (6, 1), (3, 0)]
    assert trainer.step == 6


def test_counters_and_metrics_are_readable_after_a_fit() -> None:
    trainer = Trainer(max_epochs=2, progress=False, log_every=1)
    with pytest.raises(
        FabricateError, match="this attribute of the trainer is available only after a fit, or while fit,"
    ):
        _ = trainer.step
    result = trainer.fit(Regression(), ROWS, ROWS, batch_size=2)
    for _ in range(2):
        assert (trainer.step, trainer.epoch, trainer.metrics) == (8, 2, result.metrics)
        assert trainer.progress.samples == 16
        assert trainer.rates["steps_per_second"] > 0
        trainer.validate(Regression(), ROWS, batch_size=2)
    module = weakref.ref(fitted := Regression())
    trainer.fit(fitted, ROWS, ROWS, batch_size=2)
    del fitted
    gc.collect()
    assert module() is None, "what is kept of a fit does not keep the module"
    with pytest.raises(FabricateError, match=r"only while fit, validate, test or predict is running"):
        _ = trainer.optimizers


def test_the_final_weights_are_exported(tmp_path: Path) -> None:
    import safetensors.torch

    module = Regression()
    fit(module, run_dir=tmp_path)
    exported = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == module.state_dict().keys()
    assert all(torch.equal(exported[name], value) for name, value in module.state_dict().items())


def test_a_hook_may_save_at_a_place_of_its_own(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            trainer.save(tmp_path / "mine" / f"at-{step}")

    module = Regression()
    assert fit(module, Saves()).checkpoint is None
    assert equal(weights(module), weights(Regression.load_from_checkpoint(tmp_path / "mine" / "at-2")))


def test_trackers_get_the_hyper_parameters_and_the_users_project(tmp_path: Path) -> None:
    fit(Regression(rate=0.125), run_dir=tmp_path, trackers=["tensorboard:project=mine"], seed=3)
    [file] = tmp_path.rglob("hparams.yml")
    assert file.is_relative_to(tmp_path / "trackers" / "mine")
    settings = file.read_text()
    assert "rate: 0.125" in settings
    assert "seed: 3" in settings
    with pytest.raises(ConfigurationError, match=r"trackers: the projects a and b differ, but .*; name only one$"):
        fit(run_dir=tmp_path / "other", trackers=["tensorboard:project=a", "tensorboard:project=b"])


def test_a_tracker_that_writes_elsewhere_needs_no_run_dir() -> None:
    from accelerate.tracking import GeneralTracker

    class Keeps(GeneralTracker):
        name = "keeps"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.logged: list[dict[str, Any]] = []

        @property
        def tracker(self) -> Any:
            return self.logged

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.logged.append(values)

        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            self.logged.append(values)

    tracker = Keeps()
    fit(Regression(rate=0.5), trackers=[tracker], log_every=1)
    assert tracker.logged[0]["rate"] == 0.5
    assert "loss" in tracker.logged[1]


def test_trackers_get_the_logged_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(None, val=ROWS, run_dir=tmp_path, trackers=["tensorboard"], log_every=1, validate_every=2)
    [events] = list(tmp_path.rglob("events.out.tfevents.*"))[:1]
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    assert {"loss", "lr", "val_loss"} <= set(accumulator.Tags()["scalars"])
    assert [event.step for event in accumulator.Scalars("loss")] == [1, 2]


def test_optimizers_cannot_be_replaced_in_a_fit() -> None:
    class Replaces(Callback):
        def on_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
            trainer.optimizers["main"] = torch.optim.SGD(module.parameters(), lr=1.0)  # type: ignore[index]

    with pytest.raises(TypeError, match="does not support item assignment"):
        Trainer(max_steps=1, progress=False, plugins=[Replaces()]).fit(Regression(), ROWS, batch_size=4)
