"""`self.log` in every hook: the value is in the metrics of the evaluation or epoch of the call, or there is an error."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

from fabricate import Callback, ConfigurationError, EarlyStopping, FabricateError, SaveOnException, Trainer
from fabricate.testing import run_ranks
from tests.support.regression import ROWS, Hears, Regression, Scripted, fit


def lines(run_dir: Path, name: str) -> list[tuple[str, int, int, float]]:
    """Where metrics.jsonl has a metric: (stage, step, epoch, value)."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        (each["stage"], each["step"], each["epoch"], each["metrics"][name]) for each in rows if name in each["metrics"]
    ]


def logging_in(hook: str) -> Regression:
    kind = type("Logs", (Regression,), {hook: lambda self: self.log("seen", self.epoch), "epoch": 0})

    def on_epoch_start(self: Any, epoch: int) -> None:
        self.epoch = epoch
        if hook == "on_epoch_start":
            self.log("seen", epoch)

    kind.on_epoch_start = on_epoch_start
    module: Regression = kind()
    return module


@pytest.mark.parametrize("steps", [6, 7, 8, 10])
def test_the_last_line_has_the_norm_of_the_last_update(steps: int, tmp_path: Path) -> None:
    norms: list[float] = []

    class Norms(Callback):
        def on_step(self, grad_norm: torch.Tensor) -> None:
            norms.append(float(grad_norm))

    result = fit(None, Norms(), max_steps=steps, log_every=5, max_grad_norm=1.0, run_dir=tmp_path)
    assert result.metrics["grad_norm"] == pytest.approx(norms[-1])
    logged = [(step, value) for stage, step, _, value in lines(tmp_path, "grad_norm") if stage == "train"]
    assert logged == [(step, pytest.approx(norms[step - 1])) for step in sorted({*range(5, steps + 1, 5), steps})]


@pytest.mark.parametrize("hook", ["on_epoch_start", "on_accumulate", "on_before_step", "on_step", "on_epoch_end"])
def test_what_a_hook_logs_belongs_to_its_epoch(hook: str, tmp_path: Path) -> None:
    fit(logging_in(hook), max_steps=None, max_epochs=3, log_every=4, run_dir=tmp_path)
    if hook == "on_epoch_end":
        assert lines(tmp_path, "seen") == [("epoch", 4, 0, 0.0), ("epoch", 8, 1, 1.0), ("epoch", 12, 2, 2.0)]
    else:
        assert lines(tmp_path, "seen") == [("train", 4, 0, 0.0), ("train", 8, 1, 1.0), ("train", 12, 2, 2.0)]
        assert [value for *_, value in lines(tmp_path, "epoch_seen")] == [0.0, 1.0, 2.0]


def test_what_a_module_logs_at_the_start_and_end_of_an_evaluation_is_of_that_evaluation(tmp_path: Path) -> None:
    class Ends(Regression):
        def on_eval_start(self) -> None:
            self.log("began", self.trainer.step)

        def on_eval_end(self, metrics: dict[str, float]) -> None:
            self.log("twice", 2 * metrics["val_loss"])

    listener = Hears()
    result = fit(Ends(), listener, val=ROWS, max_steps=8, validate_every=4, run_dir=tmp_path)
    assert [metrics["val_began"] for metrics in listener.evaluations] == [4, 8]
    assert [metrics["val_twice"] for metrics in listener.evaluations] == [
        2 * m["val_loss"] for m in listener.evaluations
    ]
    assert [line[:3] for line in lines(tmp_path, "val_twice")] == [("validate", 4, 0), ("validate", 8, 1)]
    assert result.metrics["val_twice"] == listener.evaluations[-1]["val_twice"]


def test_a_metric_of_on_eval_end_stops_a_fit_and_chooses_checkpoints(tmp_path: Path) -> None:
    class Ends(Scripted):
        def on_eval_end(self, metrics: dict[str, float]) -> None:
            self.log("gain", -metrics["val_loss"])

    stops = EarlyStopping("val_gain", mode="max", patience=1)
    keep = {"best": 1, "metric": "val_gain", "mode": "max"}
    result = fit(
        Ends([3.0, 1.0, 2.0, 0.0]),
        stops,
        val=ROWS[:2],
        max_steps=9,
        validate_every=1,
        save_every=1,
        keep=keep,
        run_dir=tmp_path,
    )
    assert result.steps == 3
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("on_log", "on_log is called with metrics that are already reduced and"),
        ("on_save", "the checkpoint is written already and would not hold this"),
        ("on_saved", "the checkpoint is written already and would not hold this"),
        ("on_complete", "the fit is over"),
        ("on_export", "the fit is over"),
        ("on_fit_end", "the fit is over"),
        ("on_teardown", "the run is over"),
    ],
)
def test_a_hook_that_is_too_late_to_log_says_so(hook: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FabricateError, match=message):
        fit(logging_in(hook), max_steps=4, log_every=1, save_every=1, run_dir=tmp_path)


def test_what_on_log_writes_into_its_metrics_is_an_error_and_not_lost() -> None:
    class Adds(Callback):
        def on_log(self, metrics: dict[str, float]) -> None:
            metrics["perplexity"] = math.exp(metrics["loss"])

    with pytest.raises(
        ConfigurationError, match=r"on_log writes 'perplexity' into its metrics: .*already reduced and written"
    ):
        fit(Regression(), Adds(), log_every=1)


def test_logging_where_nothing_records_it_is_an_error() -> None:
    class Predicts(Regression):
        def predict_step(self, batch: Any) -> Any:
            self.log("seen", 1.0)
            return batch[0]

    module = Predicts()
    with pytest.raises(FabricateError, match="no fit or evaluation is running"):
        module.log("seen", 1.0)
    with pytest.raises(FabricateError, match="a prediction has no metrics; return what you want from predict_step"):
        Trainer(progress=False).predict(module, ROWS, batch_size=2)
    fit(module)
    with pytest.raises(FabricateError, match="no fit or evaluation is running"):
        module.log("seen", 1.0)


def test_what_on_eval_end_logs_does_not_end_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    class Logs(Regression):
        def predict_step(self, batch: Any) -> Any:
            return batch[0]

        def on_eval_end(self) -> None:
            self.log("norm", next(self.parameters()).norm())

    module, trainer = Logs(), Trainer(max_epochs=1, progress=False, print_plan="none")
    assert "val_norm" in trainer.fit(module, ROWS, ROWS, batch_size=4).metrics
    capsys.readouterr()
    predictions = trainer.predict(module, ROWS, batch_size=4)
    assert predictions is not None
    assert len(predictions) == len(ROWS)
    assert (
        capsys.readouterr().err.count("what on_eval_end logged is not used, because a prediction has no metrics") == 1
    )


# ------------------------------------------------------------------------------------------------- names that the loop records


@pytest.mark.parametrize(
    "log", [lambda self, loss: self.log("loss", loss), lambda self, loss: self.log("loss", loss.item())]
)
def test_logging_the_loss_that_is_returned_changes_nothing(log: Callable[[Any, Any], None], tmp_path: Path) -> None:
    class Logs(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            torch.manual_seed(0)
            loss = super().training_step(batch)
            log(self, loss)
            return loss

        def on_step(self, loss: torch.Tensor) -> None:
            log(self, loss)

    ends = []
    for kind in (Logs, Seeded):
        torch.manual_seed(0)
        ends.append(fit(kind(), max_steps=4, seed=1, log_every=2).metrics)
    assert ends[0] == ends[1]


class Seeded(Regression):
    def training_step(self, batch: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return super().training_step(batch)


def test_another_number_logged_as_loss_is_refused() -> None:
    class Logs(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            loss = super().training_step(batch)
            self.log("loss", 2 * loss)
            return loss

    with pytest.raises(
        ConfigurationError,
        match=r"logs [\d.]+ as 'loss', but returns the loss [\d.]+, which is recorded under the name 'loss'",
    ):
        fit(Logs())


def test_a_learning_rate_and_a_norm_that_a_step_logs_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    class Logs(Regression):
        def on_step(self) -> None:
            self.log("lr", 42)
            self.log("grad_norm", 43)

    metrics = fit(Logs(), max_grad_norm=1.0, log_every=1).metrics
    assert (metrics["lr"], metrics["grad_norm"]) == (42, 43)
    assert capsys.readouterr().err.count("logs grad_norm, lr, a name under which the loop records a value too") == 1


def test_a_name_of_the_validation_or_of_an_epochs_mean_that_a_step_logs_gets_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Logs(Regression):
        def on_step(self) -> None:
            self.log("val_loss", 1)
            self.log("epoch_loss", 2)
            self.log("epoch_time", 3)

    fit(Logs(), val=ROWS, log_every=1, validate_every=1, sanity_batches=1)
    assert "logs epoch_loss, val_loss, a name under which" in capsys.readouterr().err


def test_a_name_of_the_validation_or_of_an_epochs_mean_that_on_epoch_end_logs_gets_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Logs(Regression):
        def on_epoch_end(self) -> None:
            self.log("val_loss", 1)
            self.log("epoch_loss", 2)
            self.log("epoch_time", 3)

    metrics = fit(Logs(), val=ROWS, max_epochs=2, max_steps=None).metrics
    assert (metrics["val_loss"], metrics["epoch_loss"]) == (1, 2)
    assert capsys.readouterr().err.count("on_epoch_end logs epoch_loss, val_loss, a name under which") == 1
    fit(Logs(), max_epochs=2, max_steps=None)  # without a validation its name is free
    assert "on_epoch_end logs epoch_loss, a name under which" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"loss": 1.0, "val_loss": 2.0}, "returns 'val_loss' and 'loss', which is the same name"),
        ({"last": 1.0}, "returns 'last' and logs it too"),
        (
            {"outputs": torch.zeros(2)},
            r"'outputs', which are for compute_metrics: define compute_metrics\(self, outputs\)",
        ),
    ],
)
def test_two_metrics_of_one_name_are_refused(returned: dict[str, Any], message: str) -> None:
    class Twice(Regression):
        def validation_step(self, batch: Any) -> Any:
            self.log("val_last", 0.0)
            return returned

    with pytest.raises(ConfigurationError, match=message):
        fit(Twice(), val=ROWS, validate_every=1)


def test_validation_sets_whose_metrics_would_share_a_name_are_refused() -> None:
    class Names(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"loss": 1.0, "b_loss": 2.0}

    with pytest.raises(ConfigurationError, match="two metrics of this evaluation would be called 'val_a_b_loss'"):
        fit(Names(), val={"a": ROWS, "a_b": ROWS}, validate_every=1)


def test_a_name_with_a_slash_stays_as_it_is() -> None:
    class Slash(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"val/loss": 1.0, "val_other": 2.0, "third": 3.0}

    names = {name for name in fit(Slash(), val=ROWS, validate_every=1).metrics if name.startswith("val")}
    assert names == {"val/loss", "val_other", "val_third"}
    metrics = Trainer(progress=False).validate(Slash(), {"low": ROWS}, batch_size=2)
    assert set(metrics) == {"val/low/loss", "val_low_other", "val_low_third"}


# ------------------------------------------------------------------------------------------------------------- of the whole set


class WholeSet(Regression):
    """R2 of a guess, over the whole set; the number and the order of its rows."""

    def validation_step(self, batch: Any) -> Any:
        x, y = batch
        return {
            "loss": (x[:, :1] - y).square().mean(),
            "outputs": {"guess": x[:, 0] ** 2, "y": y[:, 0], "name": [str(v) for v in y]},
        }

    test_step = validation_step

    def compute_metrics(self, outputs: list[Any]) -> dict[str, Any]:
        guess, y = (torch.stack([each[key] for each in outputs]) for key in ("guess", "y"))
        r2 = 1 - (y - guess).square().sum() / (y - y.mean()).square().sum()
        return {"r2": r2, "rows": len(outputs), "ordered": int(torch.equal(y, y.sort().values))}


class WithTorchmetrics(WholeSet):
    """torchmetrics objects synchronise over the ranks in `compute`, unless there is one process."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torchmetrics.MeanSquaredError()

    def compute_metrics(self, outputs: list[Any]) -> dict[str, Any]:
        guess, y = (torch.stack([each[key] for each in outputs]) for key in ("guess", "y"))
        self.kept.reset()
        errors = {"kept": self.kept, "local": torchmetrics.MeanSquaredError()}
        for error in errors.values():
            error.update(guess, y)
        return {name: error.compute() for name, error in errors.items()}


def squared_errors() -> list[dict[str, float]]:
    return [
        Trainer(progress=False, strategy="ddp", timeout="30 seconds").test(WithTorchmetrics(), ROWS[:7], batch_size=2)
    ]


def test_torchmetrics_computes_in_compute_metrics_on_several_ranks() -> None:
    y = torch.arange(7) / 8
    wanted = float((y - y**2).square().mean())
    for (metrics,) in run_ranks(squared_errors, 2, timeout=60):
        assert (metrics["test_kept"], metrics["test_local"]) == (pytest.approx(wanted), pytest.approx(wanted))


def r2(rows: int) -> float:
    y = torch.arange(rows) / 8
    return float(1 - (y - y**2).square().sum() / (y - y.mean()).square().sum())


def test_metrics_of_a_whole_set_are_computed_from_what_the_steps_return_for_its_rows() -> None:
    listener = Hears()
    metrics = fit(WholeSet(), listener, EarlyStopping("val_r2", mode="max"), val=ROWS[:7], validate_every=2).metrics
    assert (metrics["val_r2"], metrics["val_rows"], metrics["val_ordered"]) == (pytest.approx(r2(7)), 7, 1)
    assert listener.evaluations[-1].keys() == {"val_loss", "val_r2", "val_rows", "val_ordered"}
    assert Trainer(progress=False).test(WholeSet(), ROWS, batch_size=3)["test_r2"] == pytest.approx(r2(8))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (3.0, "compute_metrics returned float; return a mapping of metrics"),
        ({"loss": 3.0}, "compute_metrics returns 'loss', which the evaluation steps return too"),
        ({"r2": "good"}, "give a number, a 0-dim tensor or a torchmetrics object, not str"),
    ],
)
def test_what_compute_metrics_returns_is_checked(returned: Any, message: str) -> None:
    class Wrong(WholeSet):
        def compute_metrics(self, outputs: list[Any]) -> Any:
            return returned

    with pytest.raises(ConfigurationError, match=message):
        fit(Wrong(), val=ROWS, validate_every=1)


def test_outputs_that_never_come_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    class Forgets(WholeSet):
        def validation_step(self, batch: Any) -> Any:
            return {"loss": 1.0}

    fit(Forgets(), val=ROWS, validate_every=1)
    printed = capsys.readouterr().err
    assert "compute_metrics is not called in this evaluation (validate), because validation_step returned no" in printed


def test_a_collection_of_torchmetrics_is_logged_as_one() -> None:
    class Collects(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.both = torchmetrics.MetricCollection([torchmetrics.MaxMetric(), torchmetrics.MinMetric()])

        def validation_step(self, batch: Any) -> None:
            self.both.update(batch[1] * 8)
            self.log("y", self.both)

    metrics = fit(Collects(), val=ROWS[3:], validate_every=1).metrics
    assert (metrics["val_y_MaxMetric"], metrics["val_y_MinMetric"]) == (7.0, 3.0)


# ---------------------------------------------------------------------------------------------------------------------- on ranks


class OnRanks(WholeSet):
    """One row per rank and batch; the last batches are not on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = torchmetrics.MaxMetric()
        self.row_count = 0

    def validation_step(self, batch: Any) -> Any:
        self.row_count += len(batch[0])
        self.largest.update(batch[1] * 8)
        self.log("largest", self.largest)
        return super().validation_step(batch)

    def on_eval_end(self, metrics: dict[str, float]) -> None:
        self.log("seen", self.row_count, reduce="sum")
        metrics["val_root"] = metrics["val_loss"] ** 0.5
        self.row_count = 0


class RankLocal(Regression):
    def on_eval_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        metrics["val_own"] = float(trainer.accelerator.process_index)


class LogsItsShare(Regression):
    def on_eval_end(self, trainer: Trainer) -> None:
        rank = trainer.accelerator.process_index
        self.log("share", 0.5 + rank)
        self.log("weighed", 0.5 + rank, weight=1 + rank)
        self.log("added", rank, reduce="sum")
        self.log("same", 0.5)
        self.log("nan", math.nan)


def on_two_ranks() -> dict[str, Any]:
    listener = Hears()
    results: dict[str, Any] = {}
    for rows in (1, 5):
        fit(OnRanks(), listener, val=ROWS[:rows], validate_every=2, strategy="ddp")
    results["evaluations"] = listener.evaluations
    try:
        fit(RankLocal(), val=ROWS, validate_every=2, strategy="ddp")
    except FabricateError as exc:
        results["refused"] = str(exc)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        results["averaged"] = fit(LogsItsShare(), val=ROWS, validate_every=1, strategy="ddp").metrics
    results["notes"] = [line for line in printed.getvalue().splitlines() if "different values on the ranks" in line]
    return results


def test_on_ranks_the_end_of_an_evaluation_is_the_same_everywhere() -> None:
    one, two = run_ranks(on_two_ranks, 2)
    assert repr(one["evaluations"]) == repr(two["evaluations"])  # r2 over one row is nan
    few, more = one["evaluations"]
    assert (few["val_rows"], few["val_seen"], few["val_largest"]) == (1, 1, 0)
    assert (more["val_rows"], more["val_seen"], more["val_largest"], more["val_ordered"]) == (5, 5, 4, 1)
    assert more["val_r2"] == pytest.approx(r2(5))
    assert more["val_root"] == more["val_loss"] ** 0.5
    for results in (one, two):
        assert (
            "on_eval_end wrote {'val_own': '0.0'} into its metrics on rank 0 and {'val_own': '1.0'} on rank 1"
            in results["refused"]
        )
    assert {name: one["averaged"][f"val_{name}"] for name in ("share", "weighed", "added", "same")} == pytest.approx(
        {"share": 1.0, "weighed": 3.5 / 3, "added": 1.0, "same": 0.5}
    )
    assert [line.partition(" in a hook")[0] for line in one["notes"]] == ["note: log('share')"]


class ComputesInHooks(Regression):
    """Hooks at the end compute the objects that the steps log, as `on_validation_epoch_end` of Lightning does."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.judged, self.best, self.both = (torchmetrics.MeanMetric() for _ in range(4))
        self.fails = False

    def on_eval_start(self) -> None:
        if self.trainer.step:
            self.log("trained_before", self.trained.compute())

    def training_step(self, batch: Any) -> torch.Tensor:
        self.trained.update(batch[1])
        self.log("trained", self.trained)
        self.both.update(batch[1])
        self.log("both", self.both)
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        if self.fails:
            raise ValueError("fails in validation")
        self.judged.update(batch[1])
        self.log("judged", self.judged)
        self.both.update(batch[1])
        return {"loss": super().training_step(batch)}

    def on_eval_end(self) -> None:
        self.best.update(self.judged.compute())
        self.log("best", self.best.compute())
        self.log("judged_too", self.judged)
        if self.trainer.step:
            self.log("trained_after", self.trained.compute())
            self.log("both_after", self.both.compute())

    def on_epoch_end(self) -> None:
        self.log("again", self.trained.compute())
        self.log("trained_too", self.trained)


def compute_in_hooks() -> dict[str, float]:
    strategy = "ddp" if torch.distributed.is_initialized() else "single"
    arguments: dict[str, Any] = {"strategy": strategy, "max_steps": None, "max_epochs": 2, "validate_every": 2}
    return fit(ComputesInHooks(), val=ROWS[3:], sanity_batches=2, **arguments).metrics


_COMPUTED = {
    **dict.fromkeys(("epoch_trained", "epoch_both", "again", "trained_too"), 3.5 / 8),
    **dict.fromkeys(("val_trained_before", "val_trained_after"), 3.5 / 8),
    **dict.fromkeys(("val_judged", "val_best", "val_judged_too", "val_both_after"), 5 / 8),
}


def test_a_hook_at_the_end_may_compute_the_objects_that_steps_logged() -> None:
    metrics = compute_in_hooks()
    assert {name: metrics[name] for name in _COMPUTED} == pytest.approx(_COMPUTED)


def test_on_ranks_a_hook_at_the_end_may_compute_the_objects_that_steps_logged() -> None:
    for metrics in run_ranks(compute_in_hooks, 2):
        assert {name: metrics[name] for name in _COMPUTED} == pytest.approx(_COMPUTED)


def test_a_resumed_end_of_an_epoch_computes_the_objects_of_that_epoch_and_the_next_begins_anew(tmp_path: Path) -> None:
    module = ComputesInHooks()
    module.fails = True
    arguments: dict[str, Any] = {"val": ROWS[3:], "max_steps": None, "run_dir": tmp_path}
    with pytest.raises(ValueError, match="fails in validation"):
        fit(module, SaveOnException(), max_epochs=2, **arguments)
    metrics = fit(ComputesInHooks(), max_epochs=2, **arguments).metrics
    assert {name: metrics[name] for name in _COMPUTED} == pytest.approx(_COMPUTED)
    assert [value for *_, value in lines(tmp_path, "again")] == pytest.approx([3.5 / 8] * 2)


class OfSeveralSets(Regression):
    """An object for each data set, as in Lightning's examples with several loaders, and one that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.ModuleDict({"low": torchmetrics.MeanMetric(), "high": torchmetrics.MeanMetric()})
        self.shared = torchmetrics.MeanMetric()

    def validation_step(self, batch: Any) -> Any:
        for name, metric in {"own": self.own[self.trainer.data_set], "shared": self.shared}.items():
            metric.update(batch[1])
            self.log(name, metric)
        return {"loss": super().training_step(batch)}

    def on_eval_end(self) -> None:
        values = {name: metric.compute() for name, metric in self.own.items()}
        self.log("lowest", values["low"])
        self.log("highest", values["high"])
        self.log("span", values["high"] - values["low"])
        self.log("last", self.shared.compute())


def compute_of_several_sets() -> list[dict[str, float]]:
    strategy = "ddp" if torch.distributed.is_initialized() else "single"
    module = OfSeveralSets()
    val = {"low": ROWS[:3], "high": ROWS[3:]}
    first = fit(module, val=val, validate_every=2, strategy=strategy).metrics
    return [first, Trainer(strategy=strategy, progress=False).validate(module, val)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hook_at_the_end_may_compute_the_objects_of_each_of_several_data_sets(ranks: int) -> None:
    low, high = (sum(float(row[1]) for row in rows) / len(rows) for rows in (ROWS[:3], ROWS[3:]))
    expected = {"val_low_own": low, "val_high_own": high, "val_low_shared": low, "val_high_shared": high}
    expected |= {"val_lowest": low, "val_highest": high, "val_span": high - low, "val_last": high}
    everyone = run_ranks(compute_of_several_sets, ranks) if ranks > 1 else [compute_of_several_sets()]
    for results in everyone:
        for metrics in results:
            assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_objects_outside_of_the_module_have_the_rows_of_their_data_set_too() -> None:
    class InAList(OfSeveralSets):
        def __init__(self) -> None:
            super().__init__()
            del self.own
            object.__setattr__(self, "own", {name: torchmetrics.MeanMetric() for name in ("low", "high")})

    val = {"low": ROWS[:3], "high": ROWS[3:]}
    metrics = Trainer(progress=False).validate(InAList(), val)
    assert metrics["val_span"] == pytest.approx(metrics["val_high_own"] - metrics["val_low_own"])
