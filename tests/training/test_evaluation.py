"""Validation: when it runs, the rows of its metrics, and the state that it does not change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fabricate import (
    Callback,
    ConfigurationError,
    Trainer,
    TrainModule,
    hookimpl,
)
from fabricate.testing import reference, run_ranks
from fabricate.testing.reference import Learner
from tests.support.regression import ROWS, Hears, Regression, equal, fit, weights


def test_validate_first_evaluates_before_the_first_step() -> None:
    order: list[str] = []

    class Notes(Callback):
        def on_eval_end(self) -> None:
            order.append("eval")

        def on_step(self) -> None:
            order.append("step")

    fit(None, Notes(), val=ROWS, validate_first=True, validate_every=2)
    assert order == ["eval", "step", "step", "eval"]


def test_several_validation_sets_are_named_in_their_metrics() -> None:
    class Mean(Regression):
        def validation_step(self, batch: Any) -> Any:
            self.log(f"of_{self.trainer.data_set}", 1)
            self.log("last", batch[1][-1, 0])
            return {"mean": batch[1].mean()}

    hears = Hears()
    result = fit(Mean(), hears, val={"low": ROWS[:3], "high": ROWS[5:]}, validate_every=2)
    [metrics] = hears.evaluations
    assert metrics == pytest.approx(
        {
            "val_low_of_low": 1,
            "val_high_of_high": 1,
            "val_low_mean": 1 / 8,
            "val_low_last": (2 * 1 + 2) / 3 / 8,
            "val_high_mean": 6 / 8,
            "val_high_last": (2 * 6 + 7) / 3 / 8,
        }
    )
    assert result.metrics.items() >= metrics.items()


SUMS: dict[str, Any] = {
    "sum of squares": lambda error: {"sse": error.square().sum()},
    "loss with reduction": lambda error: {"sse": torch.nn.functional.mse_loss(error, error * 0, reduction="sum")},
    "count as a number": lambda error: {"correct": (error.expand(-1, 3).abs() < 9).sum().item()},
    "count": lambda error: {"correct": torch.count_nonzero(error.abs() < 9)},
}
"""What a validation step may return, given the errors of the rows: sums over these rows."""
NO_SUMS: dict[str, Any] = {
    "mean": lambda error: {"mse": error.square().mean()},
    "divided": lambda error: {"accuracy": (error.abs() < 9).sum() / len(error)},
    "divided in place": lambda error: {"mse": error.square().sum().div_(len(error))},
    "weighed": lambda error: {"sse": error.square().sum(), "weight": 1},
    "over something else": lambda error: {"norm": torch.ones(7).sum()},
    "plain number": lambda error: {"rows": len(error), "mse": error.square().mean()},
    "explained by the rows": lambda error: {
        "accuracy": (error.abs() < 9).sum().item() / 2,
        "other": torch.ones(3).sum().item() / 3 + 0 * error.mean(),
        "more": error.expand(-1, 3).count_nonzero() / torch.tensor(6),
    },
    "inside torch.func": lambda error: {
        "each": torch.func.vmap(lambda row: row.square().sum() + row.mean())(error.expand(-1, 3)).mean(),
        "slope": torch.func.grad(lambda row: row.square().sum() / 3)(error[0]).mean().item(),
        "loss": torch.func.vmap(torch.nn.functional.cross_entropy)(
            error.expand(-1, 3), torch.zeros(len(error)).long()
        ).mean(),
    },
    "complex and infinite": lambda error: {
        "power": float(torch.fft.fft(error[:, 0]).sum().abs()) / 3,
        "least": float((error / 0).sum()) if error.sum() > 9 else 0.123,
    },
    "added up over many steps": lambda error: {"loss": sum((error * step).square().mean() for step in range(40))},
    "equal by chance": lambda error: {"rows": (error.abs() < 9).sum().item(), "none": (error.abs() > 9).sum().item()},
}


@pytest.mark.parametrize("gives", [*SUMS, *NO_SUMS])
def test_a_metric_that_is_a_sum_over_the_rows_of_a_batch_gets_a_note(
    gives: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Sums(Regression):
        def validation_step(self, batch: Any) -> Any:
            return (SUMS | NO_SUMS)[gives](self.layers(batch[0]) - batch[1])

    fit(Sums(), val=ROWS[:5], validate_every=1)
    noted = capsys.readouterr().err.count("as a sum over the rows of a batch, and metrics are averaged")
    assert noted == (gives in SUMS)


PARTS: dict[str, Any] = {
    "masked mean": lambda error: {"mse": error[:1].square().sum() / torch.tensor(1)},
    "sum divided by the rows of the set": lambda error: {"mse": error.square().sum() / 8},
    "count divided by the rows of the set": lambda error: {"accuracy": (error.abs() < 9).sum().item() / 8},
    "mean of more values than rows": lambda error: {"loss": error.expand(-1, 3).flatten()[:-1].square().mean()},
    "mean over a mask": lambda error: {"mae": error.expand(-1, 3).flatten()[:-1].abs().mean()},
    "mean of what is not nan": lambda error: {
        "mae": torch.where(torch.arange(6).view(2, 3) > 0, error.expand(-1, 3), torch.nan).nanmean()
    },
    "loss over nodes": lambda error: {"mse": torch.nn.functional.mse_loss(*torch.zeros(2, 2 * len(error) + 1))},
}
"""What a validation step may return, given the errors of the rows: means over something other than these rows."""
NO_PARTS: dict[str, Any] = {
    "mask of one size": lambda error: {"mae": error.expand(-1, 3)[:, :2].abs().sum() / torch.tensor(2 * len(error))},
    "count of rows": lambda error: {"accuracy": (error.abs() < 9).sum() / torch.tensor(len(error))},
    "mean over the rows": lambda error: {"loss": error.square().mean(), "mae": error.abs().mean()},
    "sum divided by the rows": lambda error: {"mse": error.square().sum() / len(error)},
    "count divided by the rows": lambda error: {"accuracy": (error.abs() < 9).sum().item() / len(error)},
    "several values per row": lambda error: {
        "loss": torch.nn.functional.mse_loss(error.expand(-1, 3), error.expand(-1, 3))
    },
    "weighed": lambda error: {"loss": torch.ones(7).mean(), "weight": 7},
}


@pytest.mark.parametrize("gives", [*PARTS, *NO_PARTS])
def test_a_metric_that_is_no_mean_over_the_rows_gets_a_note(gives: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Parts(Regression):
        def validation_step(self, batch: Any) -> Any:
            return (PARTS | NO_PARTS)[gives](self.layers(batch[0]) - batch[1])

    fit(Parts(), val=ROWS, validate_every=1)
    assert capsys.readouterr().err.count("so its metrics are weighted by rows") == (gives in PARTS)


BESIDE: dict[str, Any] = {
    "masked mean": lambda ce, error: {"ce": ce, "mae": error.expand(-1, 3).flatten()[1:].abs().mean()},
    "loss over nodes": lambda ce, error: {
        "ce": ce,
        "mse": torch.nn.functional.mse_loss(torch.zeros(5), torch.zeros(5)),
    },
    "sum of two": lambda ce, error: {
        "ce": ce,
        "loss": ce + torch.nn.functional.cross_entropy(error[:1].expand(-1, 3), torch.zeros(1).long()),
    },
}
"""What a validation step may return beside a cross-entropy over two rows that does not have its weight."""
NOT_BESIDE: dict[str, Any] = {
    "mean over rows": lambda ce, error: {
        "ce": ce,
        "mae": error.abs().mean(),
        "loss": ce * 2,
        "accuracy": (error > 0).float().mean(),
    },
    "penalty": lambda ce, error: {"ce": ce, "loss": ce + 0.1 * error.square().mean()},
    "share of the labels": lambda ce, error: {"ce": ce, "accuracy": (error > 0).sum() / torch.tensor(2)},
    "own weight": lambda ce, error: {"ce": ce, "weight": 2, "mae": error.expand(-1, 3).flatten()[1:].abs().mean()},
}


@pytest.mark.parametrize("gives", [*BESIDE, *NOT_BESIDE])
def test_a_metric_with_the_weight_of_a_cross_entropy_that_is_not_its_own_gets_a_note(
    gives: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Both(Regression):
        def validation_step(self, batch: Any) -> Any:
            error = self.layers(batch[0]) - batch[1]
            labels = torch.zeros(len(error), dtype=torch.long)
            return (BESIDE | NOT_BESIDE)[gives](torch.nn.functional.cross_entropy(error.expand(-1, 3), labels), error)

    fit(Both(), val=ROWS, validate_every=1)
    noted = capsys.readouterr().err.count(
        "its weight in the mean over the data set is that of the cross-entropy in the same step"
    )
    assert noted == (gives in BESIDE)


@pytest.mark.parametrize(("number", "notes"), [(0, 1), (9, 1), (10, 0)])
def test_the_first_batches_of_an_evaluation_are_inspected(
    number: int, notes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Masked(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            error = self.layers(batch[0]) - batch[1]
            return {"mae": error.expand(-1, 3).flatten()[int(batch_idx == number) :].abs().mean()}

    fit(Masked(), val=ROWS * 3, validate_every=1, sanity_batches=0)
    assert capsys.readouterr().err.count("'mae' as a mean over 5 values for 2 rows") == notes


def test_an_error_in_compute_metrics_says_what_it_gets() -> None:
    class OfTransformers(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"outputs": self.layers(batch[0])}

        def compute_metrics(self, eval_pred: Any) -> Any:
            return {"n": len(eval_pred.predictions)}

    with pytest.raises(AttributeError) as caught:
        fit(OfTransformers(), val=ROWS, validate_every=1)
    assert "in OfTransformers.compute_metrics(outputs): a list with one item per row" in caught.value.__notes__[0]


@pytest.mark.parametrize(("metrics", "notes"), [(["loss"], 1), (["accuracy"], 0), (["loss", "weight"], 0)])
def test_an_evaluation_without_the_weight_that_training_has_gets_a_note(
    metrics: list[str], notes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Weighs(Regression):
        def training_step(self, batch: Any) -> Any:
            return {"loss": super().training_step(batch), "weight": 2 * len(batch[0])}

        def validation_step(self, batch: Any) -> Any:
            return dict.fromkeys(metrics, 2.5)

    fit(Weighs(), val=ROWS, validate_every=1)
    text = "training_step returns a weight with its loss, and validation_step does not return a plain cross-entropy"
    assert capsys.readouterr().err.count(text) == notes


def test_a_note_whose_numbers_change_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Overlap(Regression):
        def validation_step(self, batch: Any) -> Any:
            count = torch.tensor(5 + self.trainer.step)
            error = (self.layers(batch[0]) - batch[1]).expand(-1, 3)
            return {"iou@1": error.abs().sum() / count, "iou@5": error.square().sum() / (count + 20)}

    Trainer(max_steps=3, progress=False, validate_every=1).fit(Overlap(), ROWS, ROWS[:4], batch_size=2)
    err = capsys.readouterr().err
    assert err.count("'iou@1' as a sum divided by") == 1


def test_a_sum_that_is_logged_as_one_gets_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    class Sums(Regression):
        def validation_step(self, batch: Any) -> None:
            self.log("sse", (self.layers(batch[0]) - batch[1]).square().sum(), reduce="sum")

    fit(Sums(), val=ROWS[:5], validate_every=1)
    assert "as a sum over the rows" not in capsys.readouterr().err


@pytest.mark.parametrize("in_hook", [False, True])
def test_a_validation_without_any_metric_gets_one_note(in_hook: bool, capsys: pytest.CaptureFixture[str]) -> None:
    class Silent(Regression):
        def validation_step(self, batch: Any) -> Any:
            self.training_step(batch)

        def on_eval_end(self) -> None:
            self.log("of_all", 1.0)

    if not in_hook:
        del Silent.on_eval_end
    fit(Silent(), val=ROWS, validate_every=1)
    note = "note: Silent.validation_step returned no metrics and logged none, so this evaluation has no result"
    assert capsys.readouterr().err.count(note) == (not in_hook)


def test_validation_metrics_are_exact_over_a_ragged_last_batch() -> None:
    class Mean(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"mean": batch[1].mean()}

    assert fit(Mean(), val=ROWS[:7], validate_every=2).metrics["val_mean"] == pytest.approx(3 / 8)


def test_a_metric_returned_with_a_weight_is_a_mean_over_it() -> None:
    class Weighted(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"last": batch[1][-1, 0] * 8, "weight": float(batch[1][-1, 0] == 7 / 8)}

    assert fit(Weighted(), val=ROWS, validate_every=2).metrics["val_last"] == 7


def test_validating_more_often_changes_nothing_bitwise() -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    class Draws(Regression):
        def validation_step(self, batch: Any) -> Any:
            assert not self.training
            assert not torch.is_grad_enabled()
            return {"drawn": sum(draw())}

        def on_fit_end(self) -> None:
            self.next_draw = draw()

    ends = []
    for arguments in ({"validate_every": None}, {"validate_every": 1, "validate_first": True}):
        module = Draws()
        module.layers.load_state_dict(
            {name: torch.full_like(value, 0.1) for name, value in module.layers.state_dict().items()}
        )
        fit(module, val=ROWS, max_steps=8, seed=5, **arguments)
        ends.append((weights(module), module.next_draw))
    assert equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_a_validation_before_the_first_step_advances_no_schedule() -> None:
    """With transformers' eval_on_start, which a loop by hand does too, the first validation only measures; here it used up patience."""

    class Plateau(Regression):
        def validation_step(self, batch: Any) -> Any:
            return {"loss": torch.tensor(float(self.trainer.step))}  # worse every time

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            rates.append(optimizer.param_groups[0])
            return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)

    for first in (False, True):
        for steps, rate in ((2, 1.0), (3, 0.1)):
            rates: list[dict[str, Any]] = []
            fit(Plateau(), val=ROWS, max_steps=steps, validate_every=1, validate_first=first)
            assert rates[0]["lr"] == pytest.approx(rate), first


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

    fit(Frozen(), val=ROWS[:2], validate_every=1)
    assert modes == [(True, False), (False, False), (True, False), (False, False)]


@pytest.mark.parametrize("hook", ["on_step", "on_log"])
def test_a_hook_may_ask_for_an_evaluation(hook: str) -> None:
    def ask(self: Callback, trainer: Trainer, step: int) -> None:
        if step == 2:
            trainer.request_eval()

    asks = type("Asks", (Callback,), {hook: ask})
    hears = Hears()
    fit(None, asks(), hears, val=ROWS, validate_every=None, max_steps=4, log_every=1)
    assert len(hears.evaluations) == 1


@pytest.mark.parametrize(
    ("hook", "call", "note"),
    [
        ("on_fit_end", "request_eval", "request_eval() in on_fit_end has no effect, because no update follows: call it in on_complete"),
        ("on_fit_end", "request_save", "request_save() in on_fit_end has no effect, because no update follows: call trainer.save(path)"),
        ("on_complete", "request_save", "request_save() in on_complete has no effect, because no update follows: call trainer.save"),
        ("on_complete", "request_eval", ""),
        ("on_step", "request_save", ""),
    ],
)  # fmt: skip
def test_a_request_that_no_update_follows_is_noted(
    hook: str, call: str, note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asks = type("Asks", (Callback,), {hook: lambda self, trainer: getattr(trainer, call)()})
    hears = Hears()
    fit(None, asks(), hears, val=ROWS, validate_every=None, run_dir=tmp_path)
    noted = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert [line.startswith(f"note: {note}") for line in noted] == [True] * bool(note)
    assert len(hears.evaluations) == (hook == "on_complete" and call == "request_eval")


class Encodes(TrainModule):
    """Averages over padded positions too, at which layers with a fast path give other values than without it. `direct`: calls `forward`
    of the encoder, without its hooks."""

    def __init__(self, direct: bool = False) -> None:
        super().__init__()
        self.direct = direct
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(50, 32, padding_idx=0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder, self.head = torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(32, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        encoder = self.encoder.forward if self.direct else self.encoder
        return self.head(encoder(self.embedding(ids), src_key_padding_mask=ids == 0).mean(1))

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> dict[str, torch.Tensor]:
        scores = self(batch[0])
        return {
            "loss": torch.nn.functional.cross_entropy(scores, batch[1]),
            "right": (scores.argmax(1) == batch[1]).float().mean(),
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize(("fits", "direct"), [(False, False), (False, True), (True, False)])
def test_layers_with_a_fast_path_take_it_in_an_evaluation_as_by_hand(fits: bool, direct: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(1, 50, (32, 20), generator=draws), torch.randint(0, 2, (32,), generator=draws)
    ids[torch.arange(20) >= torch.randint(2, 20, (32, 1), generator=draws)] = 0
    rows = torch.utils.data.TensorDataset(ids, labels)
    module, trainer = Encodes(direct), Trainer(max_steps=2, validate_every=2, progress=False)
    metrics = (
        trainer.fit(module, rows, rows, batch_size=8).metrics if fits else trainer.validate(module, rows, batch_size=8)
    )

    def by_hand() -> float:
        with torch.no_grad():
            parts = [
                torch.nn.functional.cross_entropy(module.eval()(ids[n : n + 8]), labels[n : n + 8])
                for n in range(0, 32, 8)
            ]
        return float(torch.stack(parts).mean())

    assert metrics["val_loss"] == pytest.approx(by_hand(), rel=1e-6)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert abs(metrics["val_loss"] - by_hand()) > 1e-3
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


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

    fit(Numbered(), *([Wraps()] if wrapped else []), val=ROWS, max_steps=1, validate_every=1)
    assert numbers == [0, 1, 2, 3]


def test_predictions_of_a_sampler_come_in_the_order_of_the_data_set_with_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Targets(Regression):
        def predict_step(self, batch: Any) -> Any:
            return batch[1]

    note = "note: the sampler of the DataLoader chooses the rows; their predictions come in the order of the data set"
    for options, indices in (({"sampler": [2, 0]}, [0, 2]), ({"shuffle": True}, range(len(ROWS)))):
        rows = torch.utils.data.DataLoader(ROWS, batch_size=2, **options)  # type: ignore[arg-type]
        predictions = Trainer(progress=False).predict(Targets(), rows)
        assert [float(each) for each in predictions] == [float(ROWS[index][1]) for index in indices]
        assert (note in capsys.readouterr().err) == ("sampler" in options)


def test_predictions_may_be_arrays_and_need_all_rows() -> None:
    class Arrays(Regression):
        def predict_step(self, batch: Any) -> Any:
            return {"x": batch[0].numpy(), "y": batch[1].numpy()[:, 0]}

    predictions = Trainer(progress=False).predict(Arrays(), ROWS, batch_size=3)
    assert predictions is not None
    assert [(row["x"].tolist(), float(row["y"])) for row in predictions] == [(x.tolist(), float(y)) for x, y in ROWS]

    several = Trainer(progress=False).predict(Arrays(), {"all": ROWS, "some": ROWS[1:3]}, batch_size=3)
    assert {name: [float(row["y"]) for row in rows] for name, rows in several.items()} == {
        name: [float(y) for _, y in rows] for name, rows in (("all", ROWS), ("some", ROWS[1:3]))
    }

    def leave_out(rows: list[Any]) -> Any:
        return torch.utils.data.default_collate([row for row in rows if row[1] != 0.5])

    with pytest.raises(ConfigurationError, match="for a batch of 2 rows, but 3 rows were read for this batch"):
        Trainer(progress=False).predict(Arrays(), ROWS, batch_size=3, collate_fn=leave_out)


class Attacked(Learner):
    """Its validation computes gradients, as one against adversarial rows does."""

    def validation_step(self, batch: Any) -> dict[str, Any]:
        with torch.enable_grad():
            loss = self.loss(batch)
            loss.backward()
        return {"loss": loss.detach()}


def attacked(strategies: tuple[str, ...]) -> list[Any]:
    """Whether the weights of two fits are equal, with a backward in the validations of one; or the error."""
    outcomes: list[Any] = []
    for strategy in strategies:
        snapshots = []
        for kind in (Learner, Attacked):
            torch.manual_seed(0)
            module, data = kind(), reference.rows(16)
            trainer = Trainer(
                strategy=strategy, max_steps=4, validate_every=1, sanity_batches=0, seed=1, progress=False
            )
            try:
                trainer.fit(module, data, data, batch_size=4)
            except ConfigurationError as exc:
                outcomes.append(str(exc))
                break
            snapshots.append([p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()])
        else:
            outcomes.append(all(map(torch.equal, *snapshots)))
    return outcomes


def test_a_backward_in_a_validation_leaves_no_gradient_for_the_next_update() -> None:
    assert attacked(("single",)) == [True]
    for ddp, fsdp, zero in run_ranks(attacked, 2, ("ddp", "fsdp", "zero1")):
        assert (ddp, fsdp) == (True, True)
        assert zero.startswith("strategy='zero1': a step or a hook calls backward() itself")


def evaluated_without_gradients(strategies: tuple[str, ...]) -> list[dict[str, float]]:
    evaluations = []
    for strategy in strategies:
        with torch.no_grad():
            evaluations.append(
                Trainer(strategy=strategy, progress=False).validate(Learner(), reference.rows(16), batch_size=4)
            )
    return evaluations


def test_a_script_may_evaluate_under_no_grad_on_several_ranks() -> None:
    for evaluations in run_ranks(evaluated_without_gradients, 2, ("ddp", "fsdp", "zero1")):
        assert all(metrics.keys() == {"val_loss"} for metrics in evaluations), evaluations


class Collects(Regression):
    """Collects its outputs in a list, counts rows and logs a sum, as users of other frameworks write it."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[float] = []
        self.count = torch.zeros(())
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))

    def validation_step(self, batch: Any) -> None:
        self.collected.extend(self.layers(batch[0]).flatten().tolist())
        self.count += len(batch[0])
        self.written += len(batch[0])
        self.assigned = self.assigned + len(batch[0])
        self.rows = getattr(self, "rows", 0) + len(batch[0])

    def predict_step(self, batch: Any) -> torch.Tensor:
        self.validation_step(batch)
        return batch[0]


def collected(strategies: tuple[str, ...]) -> list[tuple[int, int, int, int, int]]:
    counts = []
    for strategy in strategies:
        for ask in ("validate", "predict"):
            module = Collects()
            getattr(Trainer(strategy=strategy, progress=False, print_plan="none"), ask)(module, ROWS[:5], batch_size=2)
            buffers = int(module.written), int(module.assigned)
            counts.append((len(module.collected), int(module.count), module.rows, *buffers))
    return counts


def test_what_a_step_collects_for_a_stand_in_is_not_kept() -> None:
    """Of 3 batches, rank 1 has one; under strategies that gather parameters it computes a second one without rows of its own."""
    one, other = run_ranks(collected, 2, ("ddp", "fsdp", "zero3"))
    assert [tuple(map(sum, zip(*pair, strict=True))) for pair in zip(one, other, strict=True)] == [(5,) * 5] * 6


class Taking(TrainModule):
    """Takes its tensors out of the batch, in which parts of other lengths remain."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def validation_step(self, batch: Any) -> Any:
        x = batch.pop("x")
        return {"x": x.mean()}

    def predict_step(self, batch: Any) -> Any:
        return batch.pop("x")


@pytest.mark.parametrize("size", [3, 12])
def test_a_step_that_takes_parts_out_of_its_batch_gets_the_weight_of_its_rows(size: int) -> None:
    rows = [{"x": torch.tensor([float(row**2)]), "tags": ["a", "b"]} for row in range(13)]
    trainer = Trainer(progress=False)
    assert trainer.validate(Taking(), rows, batch_size=size)["val_x"] == pytest.approx(50.0)
    assert len(trainer.predict(Taking(), rows, batch_size=size)) == 13


@pytest.mark.parametrize(
    "log",
    [
        lambda module, loss: loss,
        lambda module, loss: float(loss),
        lambda module, loss: module.log("val_loss", loss) or loss,
        lambda module, loss: module.log("loss", loss) or {"loss": loss},
        lambda module, loss: module.log("loss", float(loss)) or {"val_loss": float(loss)},
        lambda module, loss: module.log("loss", loss) or loss * 2,  # as in Lightning, what is logged counts
    ],
)
def test_a_validation_step_may_return_its_loss_alone_and_may_log_it_too(log: Any) -> None:
    class Returns(Regression):
        def validation_step(self, batch: Any) -> Any:
            return log(self, self.training_step(batch))

    def test_step(self: Any, batch: Any) -> Any:
        return {"loss": self.training_step(batch)}

    Returns.test_step = test_step  # type: ignore[method-assign]
    module, trainer = Returns(), Trainer(progress=False)
    validated = trainer.validate(module, ROWS, batch_size=3)
    assert validated == {"val_loss": trainer.test(module, ROWS, batch_size=3)["test_loss"]}
