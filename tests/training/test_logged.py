"""Values logged in training, with learning rates: over the right rows, at the right step."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from transformers.optimization import Adafactor

from fabricate import Callback, ConfigurationError, LearningRateFinder, RankError, Trainer
from fabricate.testing import run_ranks
from tests.support.regression import ROWS, Hears, Regression, Scripted, exploding, fit, weights


def test_a_torchmetrics_object_is_computed_over_each_set() -> None:
    class Measures(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.largest = torchmetrics.MaxMetric()

        def validation_step(self, batch: Any) -> None:
            self.largest(batch[1] * 8)
            self.log("largest", self.largest)

    result = fit(Measures(), val={"low": ROWS[:3], "all": ROWS}, validate_every=1)
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

    assert fit(Measures(), max_steps=None, max_epochs=2).metrics["epoch_largest"] == 14.0


def test_a_torchmetrics_object_goes_on_after_a_resume_inside_an_epoch(tmp_path: Path) -> None:
    class Measures(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.total = torchmetrics.SumMetric()

        def training_step(self, batch: Any) -> torch.Tensor:
            self.total.update(batch[1] * 8)
            self.log("total", self.total)
            return super().training_step(batch)

    fit(Measures(), max_steps=2, run_dir=tmp_path)
    assert fit(Measures(), max_steps=4, run_dir=tmp_path).metrics["epoch_total"] == sum(range(8))


def test_one_torchmetrics_object_may_serve_training_and_the_validations_in_it() -> None:
    class Measures(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.measures = torchmetrics.MetricCollection(
                [
                    torchmetrics.SumMetric(),
                    torchmetrics.classification.BinaryPrecision(),
                    torchmetrics.classification.BinaryRecall(),
                ]
            )

        def measure(self, batch: Any) -> None:
            number = batch[1] * 8
            self.measures["SumMetric"].update(number)
            for name in ("BinaryPrecision", "BinaryRecall"):
                self.measures[name].update((number > 3).int(), (number > 5).int())
            self.log("all", self.measures)

        def training_step(self, batch: Any) -> torch.Tensor:
            self.measure(batch)
            return super().training_step(batch)

        def validation_step(self, batch: Any) -> None:
            self.measure(batch)

    module = Measures()
    metrics = fit(module, val=ROWS[5:], max_steps=None, max_epochs=1, validate_every=1).metrics
    assert {name: value for name, value in metrics.items() if "_all_" in name} == {
        "epoch_all_SumMetric": 28.0,
        "epoch_all_BinaryPrecision": 0.5,
        "epoch_all_BinaryRecall": 1.0,
        "val_all_SumMetric": 18.0,
        "val_all_BinaryPrecision": pytest.approx(2 / 3),
        "val_all_BinaryRecall": 1.0,
    }


class Counting(Regression):
    """Counts rows in four ways, in training and in validation, where it may fail."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.seen = torchmetrics.SumMetric(), torchmetrics.SumMetric()

    def training_step(self, batch: Any) -> torch.Tensor:
        self.rows.update(torch.ones_like(batch[1]))
        self.log("object", self.rows)
        self.log("sum", len(batch[1]), reduce="sum")
        self.log("own", batch[1].mean(), weight=len(batch[1]))
        self.log("mean", batch[1].mean())
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> None:
        self.seen.update(torch.ones_like(batch[1]))
        self.log("seen", self.seen)
        if self.fails:
            raise ZeroDivisionError("the user's own")


def counted(strategy: str) -> dict[str, float]:
    """The means over an epoch of five rows. On two ranks its last window has one row, so that one of them has none."""
    trainer = Trainer(strategy=strategy, max_epochs=1, seed=1, progress=False)
    metrics = trainer.fit(Counting(), ROWS[:5], batch_size=2, shuffle=False).metrics
    return {name: value for name, value in metrics.items() if name.startswith("epoch_") and name != "epoch_loss"}


def test_an_object_that_no_checkpoint_holds_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Listed(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.measures = {"rows": torchmetrics.SumMetric()}

        def training_step(self, batch: Any) -> torch.Tensor:
            self.measures["rows"].update(1)
            self.log("rows", self.measures["rows"])
            return super().training_step(batch)

    fit(Listed(), run_dir=tmp_path)
    assert "note: the torchmetrics objects logged as rows are not part of the module, so the" in capsys.readouterr().err


class Measuring(Regression):
    """Of kinds that ranks add up, compare and string together, and one that only knows what to make of all of them."""

    def __init__(self) -> None:
        super().__init__()
        kinds = torchmetrics.SumMetric, torchmetrics.MaxMetric, torchmetrics.CatMetric, torchmetrics.PearsonCorrCoef
        self.sum, self.largest, self.rows, self.pearson = (kind() for kind in kinds)

    def training_step(self, batch: Any) -> torch.Tensor:
        number = batch[1].flatten()
        for metric in (self.sum, self.largest, self.rows):
            metric.update(number)
        self.pearson.update(number.square(), number)
        self.log("sum", self.sum)
        self.log("largest", self.largest)
        self.log("pearson", self.pearson)
        return super().training_step(batch)

    def on_epoch_end(self) -> None:
        self.log("middle", self.rows.compute().median())


def measured(run_dir: Path, strategy: str, steps: int, batch_size: int) -> tuple[float, ...]:
    trainer = Trainer(strategy=strategy, max_steps=steps, run_dir=run_dir, seed=1, progress=False, print_plan="none")
    metrics = trainer.fit(Measuring(), ROWS, batch_size=batch_size, shuffle=False).metrics
    return tuple(metrics.get(name, 0.0) for name in ("epoch_sum", "epoch_largest", "middle", "epoch_pearson"))


def test_torchmetrics_objects_go_on_on_another_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = measured(tmp_path / "whole", "single", 4, 2)
    measured(tmp_path / "more", "single", 2, 2)
    for metrics in run_ranks(measured, 2, tmp_path / "more", "ddp", 4, 1):
        assert metrics == pytest.approx(whole)
    run_ranks(measured, 2, tmp_path / "fewer", "ddp", 2, 1)
    capsys.readouterr()
    assert measured(tmp_path / "fewer", "single", 4, 2)[:3] == pytest.approx(whole[:3])
    assert "note: the state of pearson was counted on 2 ranks" in capsys.readouterr().err


class Wrapped(Regression):
    """Logs wrappers of torchmetrics that count beside their states."""

    def __init__(self) -> None:
        super().__init__()
        wrappers = torchmetrics.wrappers
        self.least = wrappers.MinMaxMetric(torchmetrics.SumMetric())
        self.recent = wrappers.Running(torchmetrics.SumMetric(), window=3)
        self.tracker = wrappers.MetricTracker(torchmetrics.SumMetric(), maximize=True)
        self.both = wrappers.MetricTracker(torchmetrics.MetricCollection([torchmetrics.SumMetric()]), maximize=[True])

    def on_epoch_start(self, epoch: int) -> None:
        if self.tracker.n_steps == epoch:  # this hook is called again if the epoch is resumed
            self.tracker.increment()
            self.both.increment()

    def training_step(self, batch: Any) -> torch.Tensor:
        number = batch[1].flatten() * (1 + self.trainer.epoch)
        for metric in (self.least, self.recent, self.tracker, self.both):
            metric.update(number)
        self.log("least", self.least)
        return super().training_step(batch)

    def on_epoch_end(self) -> None:
        self.log("recent", self.recent.compute())
        self.log("best", self.tracker.best_metric())
        self.log("sums", self.both.compute_all()["SumMetric"].sum())


def wrapped(run_dir: Path, strategy: str, steps: int, batch_size: int) -> dict[str, float]:
    trainer = Trainer(strategy=strategy, max_steps=steps, run_dir=run_dir, seed=1, progress=False, print_plan="none")
    metrics = trainer.fit(Wrapped(), ROWS, batch_size=batch_size, shuffle=False).metrics
    return {name: value for name, value in metrics.items() if not name.endswith(("loss", "lr"))}


@pytest.mark.parametrize("stop", [2, 4, 5, 9])
def test_wrappers_of_torchmetrics_go_on_after_a_resume(tmp_path: Path, stop: int) -> None:
    whole = wrapped(tmp_path / "whole", "single", 12, 2)
    assert whole["epoch_least_max"] == 3 * whole["epoch_least_min"] == whole["best"] == 10.5
    wrapped(tmp_path / "stopped", "single", stop, 2)
    assert wrapped(tmp_path / "stopped", "single", 12, 2) == whole


def test_wrappers_of_torchmetrics_go_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole = wrapped(tmp_path / "whole", "single", 12, 2)
    wrapped(tmp_path / "stopped", "single", 5, 2)
    for metrics in run_ranks(wrapped, 2, tmp_path / "stopped", "ddp", 12, 1):
        assert metrics == pytest.approx(whole)


def test_a_rank_without_rows_logs_nothing() -> None:
    expected = {"epoch_object": 5.0, "epoch_sum": 5.0, "epoch_own": 0.25, "epoch_mean": 0.25}
    assert counted("single") == expected
    for strategy in ("ddp", "fsdp"):
        assert run_ranks(counted, 2, strategy) == [expected] * 2


class Items(torchmetrics.Metric):
    """Keeps one number and one matrix for each row in lists that torchmetrics does not concatenate, and numbers in one that it does."""

    numbers: list[torch.Tensor]
    matrices: list[torch.Tensor]
    joined: Any

    def __init__(self) -> None:
        super().__init__()
        self.add_state("numbers", [], dist_reduce_fx=None)
        self.add_state("matrices", [], dist_reduce_fx=None)
        self.add_state("joined", [], dist_reduce_fx="cat")

    def update(self, numbers: torch.Tensor) -> None:
        self.joined += numbers.unbind()
        self.numbers += numbers.unbind()
        self.matrices += [number.expand(round(8 * float(number)) % 3, 2) for number in numbers]

    def compute(self) -> torch.Tensor:
        assert all(each.ndim == 0 for each in self.numbers)
        assert sorted(each.shape[0] for each in self.matrices) == sorted(round(8 * float(n)) % 3 for n in self.numbers)
        whole = torchmetrics.utilities.dim_zero_cat(self.joined).sum()
        return torch.stack(self.numbers).square().sum() + sum(each.sum() for each in self.matrices) + whole


class Ranks(Regression):
    """Measures with torchmetrics objects that keep rows: numbers and labels, alone and in a collection, and items."""

    def __init__(self) -> None:
        super().__init__()
        self.area = torchmetrics.AveragePrecision("binary")
        both = {"one": torchmetrics.AveragePrecision("binary"), "two": torchmetrics.AveragePrecision("binary")}
        self.several = torchmetrics.MetricCollection(both)
        self.rank = torchmetrics.retrieval.RetrievalMRR()
        self.items = torchmetrics.MetricCollection({"one": Items(), "two": Items()})
        self.least = torchmetrics.wrappers.MinMaxMetric(Items())
        kinds = {"area": torchmetrics.AveragePrecision("binary"), "list": Items()}
        self.by_hand = torch.nn.ModuleDict(kinds)
        self.train_items = Items()

    def training_step(self, batch: Any) -> torch.Tensor:
        self.validation_step(batch)
        self.train_items.update(batch[1].flatten())
        return super().training_step(batch)

    def on_epoch_end(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric .* was called before")
            self.log("epoch_by_hand", self.train_items.compute())
        self.train_items.reset()

    def validation_step(self, batch: Any) -> None:
        number, label = batch[1].flatten(), (batch[1].flatten() * 8).long() % 2
        self.area.update(number, label)
        self.several.update(number, label)
        self.rank.update(number, label, label * 0)
        self.items.update(number)
        self.least.update(number)
        self.by_hand["area"].update(number, label)
        self.by_hand["list"].update(number)
        self.log("area", self.area)
        self.log("of", self.several)
        self.log("rank", self.rank)
        self.log("items", self.items)
        self.log("least", self.least)

    def on_eval_end(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric .* was called before")
            for name, metric in self.by_hand.items():
                self.log(f"by_hand_{name}", metric.compute())
                metric.reset()


def ranked(strategy: str, rows: int, epochs: int = 0) -> dict[str, float]:
    trainer = Trainer(strategy=strategy, max_epochs=epochs or None, progress=False, print_plan="none")
    if epochs:
        metrics = trainer.fit(Ranks(), ROWS[-rows:], batch_size=2, shuffle=False).metrics
        return {name: value for name, value in metrics.items() if name.startswith("epoch_") and "loss" not in name}
    return trainer.validate(Ranks(), ROWS[-rows:], batch_size=2)


def test_torchmetrics_objects_that_keep_rows_compute_on_ranks_with_different_numbers_of_them() -> None:
    """A rank without rows sent floats where the other one had whole numbers, and gloo ended the process. Of lists that are gathered item
    by item, ranks waited for items that another rank does not have. A single number was no vector."""
    for rows, epochs in ((1, 0), (3, 0), (5, 0), (7, 0), (1, 1), (3, 2), (7, 1)):
        alone = ranked("single", rows, epochs)
        assert len(alone) == (10 if epochs else 11)
        assert run_ranks(ranked, 2, "ddp", rows, epochs) == [pytest.approx(alone)] * 2
    assert run_ranks(ranked, 3, "ddp", 7) == [pytest.approx(ranked("single", 7))] * 3


def test_an_error_of_a_torchmetrics_object_names_the_object() -> None:
    class Measures(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.likeness = torchmetrics.R2Score()

        def validation_step(self, batch: Any) -> None:
            self.likeness.update(batch[1], batch[1])
            self.log("likeness", self.likeness)

    with pytest.raises(ValueError, match="at least two samples") as caught:
        fit(Measures(), val=ROWS[:1], validate_every=1, max_steps=1)
    assert "while computing the torchmetrics object logged as 'likeness'" in caught.value.__notes__


class LogsItsOwn(Regression):
    def validation_step(self, batch: Any) -> None:
        OWN.update(torch.ones(len(batch[0])))
        self.log("rows", OWN)


OWN = torchmetrics.SumMetric()


def logs_its_own(rows: int) -> float:
    trainer = Trainer(strategy="ddp", progress=False, print_plan="none")
    return trainer.validate(LogsItsOwn(), ROWS[:rows], batch_size=2)["val_rows"]


def test_an_object_outside_the_module_is_computed_if_every_rank_logs_it() -> None:
    assert run_ranks(logs_its_own, 2, 4) == [4.0, 4.0]
    with pytest.raises(RankError, match=r"log\('rows'\): this torchmetrics object is not part of the module"):
        run_ranks(logs_its_own, 2, 1)


def test_what_a_torchmetrics_object_counted_in_a_fit_or_an_evaluation_that_did_not_end_counts_nowhere_else() -> None:
    module, whole = Counting(), {"max_steps": None, "max_epochs": 1}
    fit(module, LearningRateFinder(num_training_steps=3), max_steps=3)
    assert fit(module, **whole).metrics["epoch_object"] == 8
    fit(module, max_steps=6)
    assert fit(module, **whole).metrics["epoch_object"] == 8
    module.fails = True
    with pytest.raises(ZeroDivisionError):
        Trainer(progress=False).validate(module, ROWS, batch_size=2)
    module.fails = False
    assert Trainer(progress=False).validate(module, ROWS, batch_size=2)["val_seen"] == 8


def test_the_learning_rate_follows_its_schedule_once_per_update() -> None:
    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    hears = Hears()
    fit(Scheduled(rate=0.6), hears, max_steps=3, log_every=1, gradient_accumulation_steps=2)
    assert [metrics["lr"] for _, metrics in hears.logs] == pytest.approx([0.3, 0.2, 0.15])


def test_a_schedule_stands_still_while_updates_are_skipped() -> None:
    class Scheduled(type(exploding(0))):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    hears = Hears()
    fit(Scheduled(rate=0.6), hears, max_steps=1, log_every=1, nonfinite="skip")
    assert hears.skips
    assert hears.logs[-1][1]["lr"] == pytest.approx(0.3)


def test_reduce_lr_on_plateau_steps_with_the_validation_loss() -> None:
    class Plateau(Scripted):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    hears = Hears()
    fit(Plateau([1.0, 2.0, 0.5, 3.0]), hears, val=ROWS[:2], validate_every=1, log_every=1, max_steps=4)
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
    fit(Two(), Compares(), hears, log_every=1, gradient_accumulation_steps=2)
    assert changed == [(True, False), (False, True)]
    assert [(metrics["lr_first"], metrics["lr_second"]) for _, metrics in hears.logs] == [(0.1, 0.2)] * 2


def test_what_is_logged_is_written_with_its_step_and_epoch(tmp_path: Path) -> None:
    fit(None, val=ROWS, max_steps=6, log_every=3, run_dir=tmp_path)
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
    return weights(module)


@pytest.mark.parametrize("weigh", [lambda batch: None, lambda batch: batch[1][:, 0] * 8 + 1], ids=["rows", "weights"])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 7), (2, 4), (3, 3)])
def test_the_update_does_not_depend_on_how_its_batch_is_split(batch_size: int, accumulation: int, weigh: Any) -> None:
    whole, split = _accumulated(7, 1, weigh), _accumulated(batch_size, accumulation, weigh)
    for one, two in zip(whole, split, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("max_steps", "shown"), [(1, ["step 1/1"]), (2, ["step 1/2", "step 2/2"])])
def test_the_first_and_the_last_step_have_a_line_and_no_step_has_two(
    capsys: pytest.CaptureFixture[str], max_steps: int, shown: list[str]
) -> None:
    fit(max_steps=max_steps, log_every=1, progress=True)
    assert re.findall(r"^step \d+/\d+", capsys.readouterr().out, re.MULTILINE) == shown


@pytest.mark.parametrize("where", ["training_step", "on_step"])
def test_another_value_under_the_name_of_the_loss_is_refused_and_the_same_is_recorded_once(where: str) -> None:
    class Logs(Regression):
        wrong = False

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = super().training_step(batch)
            if where == "training_step":
                self.log("loss", loss if self.trainer.step < 2 or not self.wrong else 2 * loss)
            return loss

        def on_step(self, loss: torch.Tensor) -> None:
            if where == "on_step":
                self.log("loss", 2 * loss if self.wrong else loss)

    arguments: dict[str, Any] = {"max_steps": 4, "gradient_accumulation_steps": 2, "seed": 1}
    torch.manual_seed(0)
    plain = fit(Regression(), **arguments).metrics["loss"]
    torch.manual_seed(0)
    assert fit(Logs(), **arguments).metrics["loss"] == pytest.approx(plain)
    wrong = Logs()
    wrong.wrong = True
    with pytest.raises(ConfigurationError, match=r"the loss (which|that) training_step returns"):
        fit(wrong, **arguments)


def test_an_optimizer_without_a_learning_rate_of_its_own_is_logged_without_one() -> None:
    class Adafactors(Regression):
        def configure_optimizers(self) -> Any:
            return Adafactor(self.parameters(), lr=None, relative_step=True)

    assert set(fit(Adafactors()).metrics) == {"loss"}
