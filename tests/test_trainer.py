"""What a Trainer does in one process: limits, validation, precision in effect, what it leaves behind, what it gives back."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torchmetrics

from fabricate import (
    Callback,
    EarlyStopping,
    FabricateError,
    FitResult,
    Trainer,
    TrainModule,
    hookimpl,
)

ROWS = [(torch.full((3,), row / 8), torch.tensor([row / 8])) for row in range(8)]


class Regression(TrainModule):
    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.rate = rate

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Hears(Callback):
    """Keeps what it was told, as (hook, value)."""

    def __init__(self) -> None:
        self.evaluations: list[dict[str, float]] = []
        self.logs: list[tuple[int, dict[str, float]]] = []
        self.skips: list[tuple[int, str]] = []

    def on_eval_end(self, metrics: dict[str, float]) -> None:
        self.evaluations.append(metrics)

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        self.logs.append((step, metrics))

    def on_step_skipped(self, step: int, reason: str) -> None:
        self.skips.append((step, reason))


def _fit(
    module: TrainModule | None = None, *plugins: object, val: Any = None, train: Any = ROWS, **arguments: Any
) -> FitResult:
    arguments = {"max_steps": 2, "progress": False, **arguments}
    loading = {"batch_size": 2} if train is ROWS else {}
    return Trainer(plugins=plugins, **arguments).fit(module or Regression(), train, val, **loading)


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in module.state_dict().values()]


def _equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))


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

    result = _fit(Totals(), **arguments)
    assert (result.steps, result.epochs, result.stop_reason) == (steps, epochs, reason)
    assert totals == [steps]


def test_a_hook_may_stop_the_fit_and_say_why() -> None:
    class Stops(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            if step == 3:
                trainer.stop("enough")

    result = _fit(None, Stops(), max_steps=9)
    assert (result.steps, result.stop_reason) == (3, "enough")


def test_limit_val_batches_cuts_each_evaluation() -> None:
    hears = Hears()
    rows: list[int] = []

    class Counts(Regression):
        def validation_step(self, batch: Any) -> None:
            rows.append(len(batch[0]))

    _fit(Counts(), hears, val=ROWS, max_steps=1, validate_every=1, limit_val_batches=2)
    assert rows == [2, 2]


def test_fast_dev_run_goes_through_everything_and_writes_nothing(tmp_path: Path) -> None:
    heard: list[str] = []

    class Walks(Callback):
        def on_step(self) -> None:
            heard.append("step")

        def on_eval_end(self) -> None:
            heard.append("eval")

        def on_saved(self, path: Path) -> None:
            heard.append("saved")
            assert path.is_dir()
            self.path = path

        def on_export(self, path: Path) -> None:
            heard.append("export")
            assert (path / "model.safetensors").is_file()

    walks = Walks()
    run_dir = tmp_path / "run"
    result = _fit(None, walks, val=ROWS, max_steps=None, max_epochs=5, fast_dev_run=True, run_dir=run_dir)
    assert heard == ["step", "eval", "saved", "export"]
    assert (result.steps, result.checkpoint) == (1, None)
    assert _files(tmp_path) == []
    assert not walks.path.exists()


def test_without_a_run_dir_nothing_is_written_and_the_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(max_steps=2, progress=False)
    trainer.fit(Regression(), ROWS, ROWS, batch_size=2)
    assert _files(tmp_path) == []
    plan = trainer.plan(Regression(), ROWS, batch_size=2)
    assert (plan["run_dir"], plan.source("run_dir")) == (None, "nothing is written")


def test_building_a_trainer_has_no_effect(tmp_path: Path) -> None:
    states = torch.get_rng_state(), random.getstate(), dict(os.environ)
    Trainer(max_steps=1, seed=3, run_dir=tmp_path / "run", strategy="ddp", precision="fp16", plugins=["unknown"])
    assert torch.equal(states[0], torch.get_rng_state())
    assert (random.getstate(), dict(os.environ)) == states[1:]
    assert _files(tmp_path) == []


def test_a_plan_is_resolved_without_training() -> None:
    module = Regression()
    before = _weights(module)
    plan = Trainer(max_epochs=3, gradient_accumulation_steps=2, precision="bf16").plan(module, ROWS, batch_size=2)
    found = {
        name: plan[name]
        for name in ("strategy", "precision", "compute_dtype", "global_batch_size", "total_steps", "world_size")
    }
    assert found == {
        "strategy": "single",
        "precision": "bf16",
        "compute_dtype": "bfloat16",
        "global_batch_size": 4,
        "total_steps": 6,
        "world_size": 1,
    }
    assert plan.source("precision") == "argument"
    assert json.loads(json.dumps(plan.to_json()))["settings"]["total_steps"]["value"] == 6
    assert _equal(before, _weights(module))


# -------------------------------------------------------------------------------------------------------------------- validation


def test_validate_first_evaluates_before_the_first_step() -> None:
    order: list[str] = []

    class Notes(Callback):
        def on_eval_end(self) -> None:
            order.append("eval")

        def on_step(self) -> None:
            order.append("step")

    _fit(None, Notes(), val=ROWS, validate_first=True, validate_every=2)
    assert order == ["eval", "step", "step", "eval"]


def test_several_validation_sets_are_named_in_their_metrics() -> None:
    class Mean(Regression):
        def validation_step(self, batch: Any) -> Any:
            self.log("last", batch[1][-1, 0])
            return {"mean": batch[1].mean()}

    hears = Hears()
    result = _fit(Mean(), hears, val={"low": ROWS[:3], "high": ROWS[5:]}, validate_every=2)
    [metrics] = hears.evaluations
    assert metrics == pytest.approx(
        {
            "val_low_mean": 1 / 8,
            "val_low_last": (2 * 1 + 2) / 3 / 8,
            "val_high_mean": 6 / 8,
            "val_high_last": (2 * 6 + 7) / 3 / 8,
        }
    )
    assert result.metrics.items() >= metrics.items()


def test_validation_metrics_are_exact_over_a_ragged_last_batch() -> None:
    class Mean(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"mean": batch[1].mean()}

    assert _fit(Mean(), val=ROWS[:7], validate_every=2).metrics["val_mean"] == pytest.approx(3 / 8)


def test_a_metric_returned_with_a_weight_is_a_mean_over_it() -> None:
    class Weighted(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"last": batch[1][-1, 0] * 8, "weight": float(batch[1][-1, 0] == 7 / 8)}

    assert _fit(Weighted(), val=ROWS, validate_every=2).metrics["val_last"] == 7


def test_validating_more_often_changes_nothing_bitwise() -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    class Draws(Regression):
        def validation_step(self, batch: Any) -> Any:
            assert not self.training
            assert not torch.is_grad_enabled()
            return {"drawn": sum(draw())}

    ends = []
    for arguments in ({"validate_every": None}, {"validate_every": 1, "validate_first": True}):
        module = Draws()
        module.layers.load_state_dict(
            {name: torch.full_like(value, 0.1) for name, value in module.layers.state_dict().items()}
        )
        _fit(module, val=ROWS, max_steps=8, seed=5, **arguments)
        ends.append((_weights(module), draw()))
    assert _equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_validation_leaves_the_modes_of_submodules_as_they_were() -> None:
    modes: list[tuple[bool, bool]] = []

    class Frozen(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            modes.append((self.training, self.layers[1].training))
            return super().training_step(batch)

        def validation_step(self, batch: Any) -> None:
            modes.append((self.training, self.layers[1].training))

        def on_fit_start(self) -> None:
            self.layers[1].eval()

    _fit(Frozen(), val=ROWS[:2], validate_every=1)
    assert modes == [(True, False), (False, False), (True, False), (False, False)]


def test_a_hook_may_ask_for_an_evaluation() -> None:
    class Asks(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            if step == 2:
                trainer.request_eval()

    hears = Hears()
    _fit(None, Asks(), hears, val=ROWS, validate_every=None, max_steps=3)
    assert len(hears.evaluations) == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_evaluation_batches_are_numbered(wrapped: bool) -> None:
    numbers: list[int] = []

    class Numbered(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            numbers.append(batch_idx)

    class Wraps(Callback):
        @hookimpl(wrapper=True)
        def eval_step(self) -> Any:
            return (yield)

    _fit(Numbered(), *([Wraps()] if wrapped else []), val=ROWS, max_steps=1, validate_every=1)
    assert numbers == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------------------- early stopping


class Scripted(Regression):
    """Validates to the given values, one after another."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = iter(values)

    def validation_step(self, batch: Any) -> Any:
        return {"loss": next(self.values)}


@pytest.mark.parametrize(
    ("values", "options", "steps"),
    [
        ([3.0, 2.0, 2.5, 2.1], {"patience": 2}, 4),
        ([3.0, 2.0, 2.5, 1.0, 1.1, 1.2], {"patience": 2}, 6),
        ([3.0, 2.9, 2.8], {"patience": 2, "min_delta": 0.5}, 3),
        ([1.0, 2.0, 1.5], {"patience": 1, "mode": "max"}, 3),
        ([1.0, float("nan"), float("nan")], {"patience": 2}, 3),
    ],
)
def test_early_stopping_stops_after_its_patience(values: list[float], options: dict[str, Any], steps: int) -> None:
    result = _fit(Scripted(values), EarlyStopping("val_loss", **options), val=ROWS[:2], validate_every=1, max_steps=20)
    assert result.steps == steps
    assert result.stop_reason.startswith("early stopping: val_loss has not improved on ")


def test_early_stopping_begins_anew_with_each_fit() -> None:
    stopping = EarlyStopping(patience=2)
    for _ in range(2):
        assert _fit(Scripted([1.0, 2.0, 3.0, 4.0]), stopping, val=ROWS[:2], validate_every=1, max_steps=20).steps == 3


def test_early_stopping_goes_on_counting_after_a_resume(tmp_path: Path) -> None:
    common: dict[str, Any] = {"val": ROWS[:2], "validate_every": 1, "run_dir": tmp_path}
    assert _fit(Scripted([1.0, 2.0]), EarlyStopping(patience=2), max_steps=2, **common).stop_reason == "max_steps"
    result = _fit(Scripted([2.0, 2.0]), EarlyStopping(patience=2), max_steps=9, **common)
    assert (result.steps, result.stop_reason) == (3, "early stopping: val_loss has not improved on 1 in 2 validations")


def test_early_stopping_on_a_metric_that_is_not_there_says_which_are() -> None:
    with pytest.raises(
        FabricateError, match=r"EarlyStopping\(metric='val_acc'\): validation gave val_loss; use one of these"
    ):
        _fit(None, EarlyStopping("val_acc"), val=ROWS, validate_every=1)


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
    _fit(module, precision=precision)
    told = precision if precision in ("bf16", "fp16") else "no"
    assert module.dtypes == (activation, torch.float32, told)


def test_fits_with_other_precisions_follow_one_another() -> None:
    module = Watches()
    seen = []
    for precision in ("fp32", "bf16", "fp16", "fp32"):
        _fit(module, precision=precision)
        seen.append(module.dtypes[0])
    assert seen == [torch.float32, torch.bfloat16, torch.float16, torch.float32]


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
    _fit(module, val=ROWS, precision="bf16", seed=1, deterministic=True)
    assert look() == before
    assert [child.training for child in module.modules()] == [True, True, True, False, True]


def test_a_failed_fit_leaves_the_process_ready_for_the_next() -> None:
    class Fails(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        _fit(Fails(), precision="bf16")
    assert _fit(Watches(), precision="fp32").steps == 2


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
        _fit(module, seed=seed, max_steps=6)
        ends.append(_weights(module))
    assert _equal(ends[0], ends[1])
    assert not _equal(ends[0], ends[2])


# --------------------------------------------------------------------------------------------------------------- loss scaling


def _exploding(at: int, *, gradient_only: bool = False) -> Any:
    """A module whose loss, or its gradient only, is infinite in the update after `at` of them, once."""

    class Explodes(Regression):
        exploded = False

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = super().training_step(batch)
            if self.trainer.step == at and not self.exploded:
                self.exploded = True
                weight = self.layers[2].weight
                return loss + 1e38 * (weight - weight.detach()).sum() if gradient_only else loss * torch.inf
            return loss

    return Explodes()


def test_fp16_really_scales_the_loss() -> None:
    scales: list[Any] = []

    class Looks(Callback):
        def on_accumulate(self, trainer: Trainer, module: Any, loss: torch.Tensor) -> None:
            gradient = float(module.layers[2].bias.grad)
            scaler = trainer.accelerator.scaler
            assert scaler is not None
            scales.append((scaler.get_scale(), gradient))

        def on_before_step(self, module: Any) -> None:
            scales.append(float(module.layers[2].bias.grad))

    _fit(None, Looks(), precision="fp16:init_scale=1024", max_steps=1)
    (scale, scaled), unscaled = scales
    assert scale == 1024
    assert scaled == pytest.approx(1024 * unscaled)


def test_an_overflow_under_fp16_skips_the_update_and_halves_the_scale(tmp_path: Path) -> None:
    hears = Hears()
    seen: list[Any] = []

    class Watch(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            seen.append((step, trainer.accelerator.scaler.get_scale()))  # type: ignore[union-attr]

        def on_step_skipped(self, module: Any) -> None:
            seen.append(_weights(module))

        def on_before_step(self, module: Any) -> None:
            seen.append(_weights(module))

    result = _fit(
        _exploding(1, gradient_only=True),
        Watch(),
        hears,
        precision="fp16:init_scale=1024",
        max_steps=3,
        run_dir=tmp_path,
    )
    assert hears.skips == [(1, "loss scale overflow")]
    assert [entry for entry in seen if isinstance(entry, tuple)] == [(1, 1024.0), (2, 512.0), (3, 512.0)]
    assert _equal(seen[2], seen[3]), "weights changed in a skipped update"
    assert result.steps == 3
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(event["step"], event["reason"]) for event in events if event["event"] == "skipped"] == [
        (1, "loss scale overflow")
    ]


def test_the_scale_survives_a_resume(tmp_path: Path) -> None:
    _fit(_exploding(0, gradient_only=True), precision="fp16:init_scale=1024", max_steps=1, run_dir=tmp_path)
    scales: list[float] = []

    class Looks(Callback):
        def on_step(self, trainer: Trainer) -> None:
            scales.append(trainer.accelerator.scaler.get_scale())  # type: ignore[union-attr]

    _fit(None, Looks(), precision="fp16:init_scale=1024", max_steps=2, run_dir=tmp_path)
    assert scales == [512.0]


# ------------------------------------------------------------------------------------------------------------ not a number


def test_a_loss_that_is_not_finite_stops_the_fit_with_the_remedy() -> None:
    with pytest.raises(
        FabricateError,
        match=r"the loss became inf in the updates up to step 2; .* skip such updates with nonfinite='skip'",
    ):
        _fit(_exploding(1), max_steps=9, log_every=2)


def test_a_loss_that_is_not_finite_is_noticed_at_the_end_too(tmp_path: Path) -> None:
    with pytest.raises(FabricateError, match="the loss became inf"):
        _fit(_exploding(1), max_steps=2, log_every=100, run_dir=tmp_path)
    assert not (tmp_path / "model").exists()


class Root(TrainModule):
    """The gradient of a square root at nothing is infinite, the loss is not: from the third update on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any) -> torch.Tensor:
        return (self.weight * (0.0 if self.trainer.step == 2 else 1.0)).sqrt().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("options", [{"save_every": 3, "max_steps": 9}, {"max_steps": 3}])
def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(FabricateError, match=r"weights are not finite after step 3 \(weight\): no checkpoint"):
        _fit(Root(), log_every=100, run_dir=tmp_path, **{"save_every": 2, **options})
    saved = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
    assert saved == ([] if options["max_steps"] == 9 else ["step-00000002"])


def test_updates_that_are_not_finite_are_skipped_on_request() -> None:
    hears, module = Hears(), _exploding(1)
    result = _fit(module, hears, max_steps=3, nonfinite="skip")
    assert hears.skips == [(1, "non-finite gradients")]
    assert result.steps == 3
    assert all(torch.isfinite(weight).all() for weight in _weights(module))


# ------------------------------------------------------------------------------------------------------------- metrics and schedules


def test_a_torchmetrics_object_is_computed_over_each_set() -> None:
    class Measures(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.largest = torchmetrics.MaxMetric()

        def validation_step(self, batch: Any) -> None:
            self.largest(batch[1] * 8)
            self.log("largest", self.largest)

    result = _fit(Measures(), val={"low": ROWS[:3], "all": ROWS}, validate_every=1)
    assert {name: value for name, value in result.metrics.items() if "largest" in name} == {
        "val_low_largest": 2.0,
        "val_all_largest": 7.0,
    }


def test_a_torchmetrics_object_in_training_is_computed_at_the_end_of_the_epoch() -> None:
    class Measures(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.largest = torchmetrics.MaxMetric()

        def training_step(self, batch: Any) -> torch.Tensor:
            self.largest.update(batch[1] * 8 * (1 + self.trainer.epoch))
            self.log("largest", self.largest)
            return super().training_step(batch)

    assert _fit(Measures(), max_steps=None, max_epochs=2).metrics["epoch_largest"] == 14.0


def test_a_torchmetrics_object_goes_on_after_a_resume_inside_an_epoch(tmp_path: Path) -> None:
    class Measures(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.total = torchmetrics.SumMetric()

        def training_step(self, batch: Any) -> torch.Tensor:
            self.total.update(batch[1] * 8)
            self.log("total", self.total)
            return super().training_step(batch)

    _fit(Measures(), max_steps=2, run_dir=tmp_path)
    assert _fit(Measures(), max_steps=4, run_dir=tmp_path).metrics["epoch_total"] == sum(range(8))


def test_the_learning_rate_follows_its_schedule_once_per_update() -> None:
    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    hears = Hears()
    _fit(Scheduled(rate=0.6), hears, max_steps=3, log_every=1, gradient_accumulation_steps=2)
    assert [metrics["lr"] for _, metrics in hears.logs] == pytest.approx([0.3, 0.2, 0.15])


def test_a_schedule_stands_still_while_updates_are_skipped() -> None:
    class Scheduled(type(_exploding(0))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    hears = Hears()
    _fit(Scheduled(rate=0.6), hears, max_steps=1, log_every=1, nonfinite="skip")
    assert hears.skips
    assert hears.logs[-1][1]["lr"] == pytest.approx(0.3)


def test_reduce_lr_on_plateau_steps_with_the_validation_loss() -> None:
    class Plateau(Scripted):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    hears = Hears()
    _fit(Plateau([1.0, 2.0, 0.5, 3.0]), hears, val=ROWS[:2], validate_every=1, log_every=1, max_steps=4)
    assert [metrics["lr"] for _, metrics in hears.logs] == pytest.approx([1e-3, 1e-3, 1e-4, 1e-4])


def test_each_optimizer_is_updated_when_it_is_chosen() -> None:
    class Two(Regression):
        def configure_optimizers(self) -> Any:
            return {
                "first": torch.optim.SGD(self.layers[0].parameters(), lr=0.1),
                "second": torch.optim.SGD(self.layers[2].parameters(), lr=0.2),
            }

        def training_step(self, batch: Any) -> Any:
            return {"loss": super().training_step(batch), "optimizer": ("first", "second")[self.trainer.step % 2]}

    changed: list[tuple[bool, bool]] = []

    class Compares(Callback):
        def on_step(self, module: Any) -> None:
            now = [layer.weight.detach().clone() for layer in (module.layers[0], module.layers[2])]
            changed.append((not torch.equal(now[0], self.before[0]), not torch.equal(now[1], self.before[1])))

        def on_before_step(self, module: Any) -> None:
            self.before = [layer.weight.detach().clone() for layer in (module.layers[0], module.layers[2])]

    hears = Hears()
    _fit(Two(), Compares(), hears, log_every=1, gradient_accumulation_steps=2)
    assert changed == [(True, False), (False, True)]
    assert [(metrics["lr_first"], metrics["lr_second"]) for _, metrics in hears.logs] == [(0.1, 0.2)] * 2


def test_what_is_logged_is_written_with_its_step_and_epoch(tmp_path: Path) -> None:
    _fit(None, val=ROWS, max_steps=6, log_every=3, run_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["stage"]) for line in lines] == [
        (3, "train"),
        (4, "epoch"),
        (4, "validate"),
        (6, "train"),
    ]
    assert lines[0]["metrics"].keys() == {"loss", "lr"}
    assert lines[2]["metrics"].keys() == {"val_loss"}


def test_the_loss_of_a_step_is_the_mean_over_its_window() -> None:
    class Rows(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            return batch[1].mean() + 0 * self.layers[0].weight.sum()  # type: ignore[no-any-return]

    losses: list[float] = []

    class Listens(Callback):
        def on_step(self, loss: torch.Tensor) -> None:
            losses.append(float(loss))

    trainer = Trainer(max_epochs=1, gradient_accumulation_steps=2, plugins=[Listens()], progress=False)
    trainer.fit(Rows(), ROWS[:7], batch_size=3, shuffle=False)
    assert losses == pytest.approx([2.5 / 8, 6 / 8])


def _accumulated(batch_size: int, accumulation: int, weigh: Callable[[Any], Any]) -> list[torch.Tensor]:
    class Weighs(Regression):
        def training_step(self, batch: Any) -> Any:
            weight = weigh(batch)
            each = (self.layers[2](self.layers[0](batch[0])) - batch[1]).square().mean(dim=1)
            if weight is None:
                return each.mean()
            return {"loss": (each * weight).sum() / weight.sum(), "weight": weight.sum()}

    module = Weighs(rate=0.5)
    module.layers.load_state_dict(
        {
            name: torch.linspace(-0.3, 0.3, value.numel()).reshape(value.shape)
            for name, value in module.layers.state_dict().items()
        }
    )
    trainer = Trainer(max_epochs=2, gradient_accumulation_steps=accumulation, progress=False)
    trainer.fit(module, ROWS[:7], batch_size=batch_size, shuffle=False)
    return _weights(module)


@pytest.mark.parametrize("weigh", [lambda batch: None, lambda batch: batch[1][:, 0] * 8 + 1], ids=["rows", "weights"])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 7), (2, 4), (3, 3)])
def test_the_update_does_not_depend_on_how_its_batch_is_split(batch_size: int, accumulation: int, weigh: Any) -> None:
    whole, split = _accumulated(7, 1, weigh), _accumulated(batch_size, accumulation, weigh)
    for one, two in zip(whole, split, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------------------------------- predictions and checkpoints


class Predicts(Regression):
    def predict_step(self, batch: Any) -> Any:
        return {"twice": batch[1] * 16, "names": [f"row {int(value * 8)}" for value in batch[1]]}


def test_predictions_come_in_the_order_of_the_data() -> None:
    found = Trainer().predict(Predicts(), ROWS[:7], batch_size=3)
    assert found is not None
    assert [(int(row["twice"]), row["names"]) for row in found] == [
        (2 * number, f"row {number}") for number in range(7)
    ]


def test_predictions_of_a_shuffled_loader_come_in_the_order_of_the_data_too() -> None:
    loader = torch.utils.data.DataLoader(ROWS, batch_size=3, shuffle=True)  # type: ignore[arg-type]
    found = Trainer(seed=1).predict(Predicts(), loader)
    assert found is not None
    assert [row["names"] for row in found] == [f"row {number}" for number in range(8)]


def test_an_evaluation_takes_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    class Sums(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"sum": sum(weight.sum() for weight in self.layers.state_dict().values())}

        test_step = validation_step

    module = Sums()
    _fit(module, max_steps=3, run_dir=tmp_path, save_every=1)
    wanted = float(sum(weight.sum() for weight in _weights(module)))
    trainer = Trainer(run_dir=tmp_path)
    assert trainer.validate(Sums(), ROWS, "last", batch_size=2) == {"val_sum": pytest.approx(wanted, abs=1e-5)}
    assert trainer.test(Sums(), ROWS, tmp_path / "checkpoints" / "step-00000003", batch_size=2) == {
        "test_sum": pytest.approx(wanted, abs=1e-5)
    }


def test_the_best_checkpoint_is_kept_and_found(tmp_path: Path) -> None:
    common: dict[str, Any] = {"run_dir": tmp_path, "keep": {"last": 1, "best": 1, "metric": "val_loss"}}
    _fit(Scripted([3.0, 1.0, 2.0, 4.0]), val=ROWS[:2], max_steps=4, validate_every=1, save_every=1, **common)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000004"]
    first = Scripted([0.0])
    Trainer(**common).validate(first, ROWS[:2], "best", batch_size=2)
    assert _equal(
        _weights(first), _weights(Scripted.load_from_checkpoint(tmp_path / "checkpoints" / "step-00000002", values=[]))
    )


def test_the_final_weights_are_exported(tmp_path: Path) -> None:
    import safetensors.torch

    module = Regression()
    _fit(module, run_dir=tmp_path)
    exported = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == module.state_dict().keys()
    assert all(torch.equal(exported[name], value) for name, value in module.state_dict().items())


def test_a_hook_may_save_at_a_place_of_its_own(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            trainer.save(tmp_path / "mine" / f"at-{step}")

    module = Regression()
    assert _fit(module, Saves()).checkpoint is None
    assert _equal(_weights(module), _weights(Regression.load_from_checkpoint(tmp_path / "mine" / "at-2")))


def test_trackers_are_told(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _fit(None, val=ROWS, run_dir=tmp_path, trackers=["tensorboard"], log_every=1, validate_every=2)
    [events] = list(tmp_path.rglob("events.out.tfevents.*"))[:1]
    read = EventAccumulator(str(events))
    read.Reload()
    assert {"loss", "lr", "val_loss"} <= set(read.Tags()["scalars"])
    assert [event.step for event in read.Scalars("loss")] == [1, 2]
