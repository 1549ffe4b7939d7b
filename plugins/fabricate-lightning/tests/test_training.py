"""Modules in the shapes of public projects, trained by Lightning and by fabricate from the same weights: losses and weights are equal."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning
import pytest
import torch
from fabricate_lightning import adapt
from lightning_shapes import Classifier, apart, both, by_fabricate, loader, regression_loss, rows
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import fabricate
from fabricate import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own advice
TOLERANCE = 1e-6


def data() -> tuple[Any, ...]:
    return loader(), loader(number=20, seed=1)


def test_a_classifier_with_metrics_is_trained_as_by_lightning() -> None:
    theirs, ours = both(Classifier, data)
    assert apart(theirs, ours) == 0
    assert theirs.metrics == pytest.approx(ours.metrics, abs=TOLERANCE)
    assert set(ours.metrics) == {
        *("train_loss", "train_loss_step", "train_loss_epoch", "train_accuracy", "val_loss", "val/accuracy"),
    }


def test_fabricates_own_trainer_runs_an_adapted_module() -> None:
    theirs, _ = both(Classifier, data)
    torch.manual_seed(0)
    module = Classifier()
    result = fabricate.Trainer(max_epochs=3, progress=False, precision="fp32").fit(adapt(module), *data())
    assert result.steps == 21
    assert result.metrics["val_loss"] == pytest.approx(theirs.metrics["val_loss"], abs=TOLERANCE)
    assert max(float((theirs.weights[n] - w).abs().max()) for n, w in module.state_dict().items()) == 0


def test_after_a_fit_the_module_is_pickled_copied_and_trained_by_lightning_as_before() -> None:
    module = Classifier()
    fabricate.Trainer(max_steps=2, progress=False).fit(adapt(module), *data())
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module), module):
        assert isinstance(other, Classifier)
        assert all(torch.equal(w, other.state_dict()[n]) for n, w in module.state_dict().items())
        assert (type(other) is Classifier) == (other is not module)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(max_steps=2, **quiet)
        trainer.fit(other, *data())
        assert trainer.global_step == 2
        assert type(other) is Classifier
    result = fabricate.Trainer(max_steps=2, progress=False).fit(adapt(module), *data())
    assert result.steps == 2


@pytest.mark.parametrize(("interval", "printed"), [(4, True), (0.5, True), (1.0, False)])
def test_a_validation_within_an_epoch_is_among_the_printed_differences(
    interval: float, printed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    by_fabricate(Classifier(), *data(), max_epochs=1, val_check_interval=interval)
    assert ("val_check_interval counts the updates of the whole fit" in capsys.readouterr().out) == printed


@pytest.mark.parametrize(("limit", "batches", "printed"), [(0.4, 3, True), (2, 2, False), (1.0, 7, False)])
def test_a_share_of_the_data_is_a_share_of_the_rows(
    limit: float, batches: int, printed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = by_fabricate(Classifier(), loader(8, 52), max_epochs=1, limit_train_batches=limit, limit_val_batches=0)
    assert trained.trainer.num_training_batches == trained.trainer.global_step == batches  # 0.4: of 20 rows
    assert ("limit_train_batches=0.4: a share of the rows, so the last batch" in capsys.readouterr().out) == printed


# ------------------------------------------------------------------------------------------------- configure_optimizers


def _optimizer(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


FORMS: dict[str, Any] = {
    "an optimizer": _optimizer,
    "a list": lambda m: [_optimizer(m)],
    "two lists": lambda m: ([o := _optimizer(m)], [lr_scheduler.StepLR(o, 1, 0.5)]),
    "a mapping": lambda m: {"optimizer": (o := _optimizer(m)), "lr_scheduler": lr_scheduler.ExponentialLR(o, 0.5)},
    "per step": lambda m: {
        "optimizer": (o := _optimizer(m)),
        "lr_scheduler": {
            "scheduler": lr_scheduler.OneCycleLR(o, 0.3, total_steps=m.trainer.estimated_stepping_batches),
            "interval": "step",
        },
    },
    "every second step": lambda m: (
        [o := _optimizer(m)],
        [{"scheduler": lr_scheduler.ExponentialLR(o, 0.8), "interval": "step", "frequency": 2}],
    ),
    "every second epoch": lambda m: (
        [o := _optimizer(m)],
        [{"scheduler": lr_scheduler.ExponentialLR(o, 0.1), "frequency": 2}],
    ),
    "two schedulers": lambda m: (
        [o := _optimizer(m)],
        [lr_scheduler.StepLR(o, 1, 0.5), lr_scheduler.StepLR(o, 2, 0.5)],
    ),
    "by a metric of validation": lambda m: {
        "optimizer": (o := _optimizer(m)),
        "lr_scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
        "monitor": "val_loss",
    },
    "by a metric of training": lambda m: {
        "optimizer": (o := _optimizer(m)),
        "lr_scheduler": {
            "scheduler": lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
            "monitor": "train_loss_epoch",
        },
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_configure_optimizers_trains_as_by_lightning(form: str) -> None:
    kind = type("Formed", (Classifier,), {"configure_optimizers": FORMS[form]})
    theirs, ours = both(kind, data, max_epochs=4)
    assert apart(theirs, ours) == 0
    rates = [[group["lr"] for o in run.trainer.optimizers for group in o.param_groups] for run in (theirs, ours)]
    assert rates[0] == rates[1]


class OwnSchedule(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = _optimizer(self)
        return [optimizer], [{"scheduler": lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1)), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        scheduler.step()


class WarmUp(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 10)
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize("kind", [OwnSchedule, WarmUp])
def test_a_module_may_advance_its_schedule_and_step_itself(kind: Any) -> None:
    assert apart(*both(kind, data)) == 0


def test_an_update_of_the_modules_own_is_refused_where_fabricate_scales_the_loss() -> None:
    with pytest.raises(ConfigurationError, match=r"WarmUp\.optimizer_step steps the optimizer itself"):
        by_fabricate(WarmUp(), *data(), precision="16-mixed")


def test_what_configure_optimizers_may_not_return_is_named() -> None:
    for returned, message in (
        (None, "returned NoneType"),
        ({"optimiser": 1}, "a mapping with 'optimiser'"),
        ([], "returned nothing in place of an optimizer"),
    ):
        kind = type("Wrong", (Classifier,), {"configure_optimizers": lambda self, returned=returned: returned})
        with pytest.raises(ConfigurationError, match=message):
            by_fabricate(kind(), *data())


def test_a_metric_that_a_schedule_waits_for_has_to_be_logged() -> None:
    class Waits(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = _optimizer(self)
            return {
                "optimizer": optimizer,
                "lr_scheduler": lr_scheduler.ReduceLROnPlateau(optimizer),
                "monitor": "val_f1",
            }

    with pytest.raises(
        ConfigurationError, match="ReduceLROnPlateau needs the metric 'val_f1', but the logged metrics are"
    ):
        by_fabricate(Waits(), *data())


# ------------------------------------------------------------------------------------------------------------ steps


class Mapping(Classifier):
    def training_step(self, batch: Any) -> Any:  # no batch_idx
        loss = regression_loss(self, batch)
        self.losses.append(float(loss))
        self.log_dict({"loss": loss, "twice": 2 * loss})
        return {"loss": loss, "rows": len(batch[0])}

    def validation_step(self, batch: Any, _: int) -> Any:
        return {"anything": 1}


def test_a_step_may_return_a_mapping_and_log_its_loss() -> None:
    assert apart(*both(Mapping, data)) == 0


class Skips(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class SkipsRegression(Skips):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = regression_loss(self, batch)
        self.losses.append(float(loss))
        return None if batch_idx % 3 == 1 else loss


@pytest.mark.parametrize("kind", [Skips, SkipsRegression])
def test_a_step_that_returns_none_skips_its_batch(kind: Any) -> None:
    assert apart(*both(kind, data)) == 0


@pytest.mark.parametrize("kind", [Skips, SkipsRegression])
def test_a_skipped_batch_counts_in_the_mean_of_its_update(kind: Any) -> None:
    assert apart(*both(kind, lambda: (loader(number=48),), accumulate_grad_batches=2)) < 1e-6


class NoStepForTheFirst(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


def test_none_for_the_first_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="training_step returned None for the first batch of a fit"):
        by_fabricate(NoStepForTheFirst(), *data())


class Sequence(lightning.LightningModule):
    """A model of tokens, with padding that its loss does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.lstm = torch.nn.LSTM(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 11)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores = self.head(self.lstm(self.embedding(batch))[0])
        loss = cross_entropy(scores[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
        self.losses.append(float(loss))
        self.log("perplexity", loss.detach().exp(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def tokens() -> tuple[Any, ...]:
    rows = torch.randint(0, 11, (40, 6), generator=torch.Generator().manual_seed(3))
    return (DataLoader(rows, batch_size=8),)  # type: ignore[arg-type]


def test_a_sequence_model_is_trained_as_by_lightning() -> None:
    assert apart(*both(Sequence, tokens)) == 0


# ------------------------------------------------------------------------------------------------ arguments that change updates


def full_windows() -> tuple[Any, ...]:
    """48 rows: 6 batches, which 1, 2 and 3 divide."""
    return DataLoader(rows(48), batch_size=8), loader(number=20, seed=1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"max_steps": 12},
        {"max_steps": 8},
        {"limit_train_batches": 3, "limit_val_batches": 1},
        {"limit_train_batches": 0.5, "limit_val_batches": 0},
        {"overfit_batches": 2},
        {"val_check_interval": 3},
        {"val_check_interval": 0.5},
        {"check_val_every_n_epoch": 2},
        {"fast_dev_run": 2},
        {"num_sanity_val_steps": 0},
    ],
    ids=str,
)
def test_an_argument_of_the_trainer_means_what_it_means_in_lightning(arguments: dict[str, Any]) -> None:
    theirs, ours = both(Classifier, full_windows, **arguments)
    assert apart(theirs, ours) < TOLERANCE
    assert ours.trainer.global_step == theirs.trainer.global_step
    assert ours.trainer.current_epoch == theirs.trainer.current_epoch
    own = {"overfit_batches": "val", "max_steps": "train", "fast_dev_run": "train"}
    beside = next(
        (own[name] for name in arguments if name in own), "-"
    )  # validates on train; no means of a part of an epoch
    theirs_alike = {name: value for name, value in theirs.metrics.items() if not name.startswith(beside)}
    assert {name: ours.metrics[name] for name in theirs_alike} == pytest.approx(theirs_alike, abs=1e-5)


class LooksAtGradients(Classifier):
    """Norms of gradients before they are clipped, and clipping of its own."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.losses.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))


class ClipsItself(LooksAtGradients):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if self.current_epoch > 0:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


@pytest.mark.parametrize("kind", [LooksAtGradients, ClipsItself])
def test_hooks_see_gradients_before_they_are_clipped(kind: Any) -> None:
    theirs, ours = both(kind, data, gradient_clip_val=0.05)
    assert apart(theirs, ours) < TOLERANCE
