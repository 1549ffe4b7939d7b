"""What a loss is the mean of: read off torch, compared with counting by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss, nll_loss

from fabricate import ConfigurationError, Trainer, TrainModule
from fabricate.metrics.loss_weight import CrossEntropies, counted, last_operation

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 5, generator=GENERATOR).requires_grad_()
TARGET = torch.tensor([0, -100, 4, 2, -100, 2])
CLASSES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
PIXELS = torch.randn(2, 3, 4, 4, generator=GENERATOR).requires_grad_()
MASK = torch.randint(0, 3, (2, 4, 4), generator=GENERATOR)
MASK[0, :3] = 255


def test_a_cross_entropy_counts_the_labels_that_are_not_ignored() -> None:
    found = counted(cross_entropy(LOGITS, TARGET))
    assert found is not None
    assert (float(found.weight), float(found.labels)) == (4, 4)


def test_class_weights_weigh_the_loss_and_not_what_is_logged_beside_it() -> None:
    found = counted(cross_entropy(LOGITS, TARGET, weight=CLASSES))
    assert found is not None
    assert (float(found.weight), float(found.labels)) == (1 + 16 + 4 + 4, 4)


def test_pixels_and_another_ignore_index_are_counted() -> None:
    found = counted(cross_entropy(PIXELS, MASK, ignore_index=255))
    assert found is not None
    assert float(found.labels) == float((MASK != 255).sum()) == 20


def test_half_precision_logits_are_counted_exactly() -> None:
    logits = torch.zeros(1002, 2, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(1002, dtype=torch.long)
    target[0] = -100
    loss = cross_entropy(logits, target)
    assert float(loss.grad_fn._saved_total_weight) != 1001  # type: ignore[union-attr]
    found = counted(loss)
    assert found is not None
    assert float(found.weight) == 1001


def test_a_change_of_dtype_keeps_what_the_mean_was_taken_over() -> None:
    found = counted(cross_entropy(LOGITS.double(), TARGET).float())
    assert found is not None
    assert float(found.weight) == 4


@pytest.mark.parametrize(
    ("loss", "operation"),
    [
        (lambda: mse_loss(LOGITS, LOGITS.detach() + 1), "MseLoss"),
        (lambda: cross_entropy(LOGITS, TARGET) + 0.1 * LOGITS.square().mean(), "Add"),
        (lambda: cross_entropy(LOGITS, TARGET, reduction="sum"), "NllLoss"),
        (lambda: cross_entropy(LOGITS, TARGET, label_smoothing=0.1), "Add"),
        (lambda: cross_entropy(LOGITS, LOGITS.detach().softmax(1)), "Div"),
        (lambda: 2 * cross_entropy(LOGITS, TARGET), "Mul"),
    ],
)
def test_any_other_loss_is_not_counted(loss: Callable[[], torch.Tensor], operation: str) -> None:
    assert counted(loss()) is None
    assert last_operation(loss()) == operation


@pytest.mark.parametrize("classes", [None, CLASSES])
def test_watching_finds_the_cross_entropy_among_what_was_logged(classes: torch.Tensor | None) -> None:
    watch = CrossEntropies()
    with torch.no_grad(), watch:
        cross_entropy(LOGITS[:2], TARGET[:2])
        loss = torch.nn.CrossEntropyLoss(weight=classes)(LOGITS, TARGET)
        accuracy = (LOGITS.argmax(1) == TARGET).float().mean()
    logged: list[Any] = [("accuracy", accuracy, None, "mean"), ("loss", loss.detach(), None, "mean")]
    labels = watch.weigh(logged)
    assert labels is not None
    assert float(labels) == 4
    assert logged[0][2] is None
    assert float(logged[1][2]) == (4 if classes is None else 25)


def test_watching_finds_nothing_where_there_is_no_mean_cross_entropy() -> None:
    watch = CrossEntropies()
    with torch.no_grad(), watch:
        logged = [
            ("sum", cross_entropy(LOGITS, TARGET, reduction="sum"), None, "mean"),
            ("soft", cross_entropy(LOGITS, LOGITS.softmax(1)), None, "mean"),
            ("nll", nll_loss(LOGITS.log_softmax(1), TARGET), None, "mean"),
            ("number", 1.0, None, "mean"),
        ]
    assert watch.weigh(list(logged)) is None


def test_watching_refuses_a_step_that_changes_its_mind() -> None:
    watch = CrossEntropies()
    with torch.no_grad(), watch:
        loss = cross_entropy(LOGITS, TARGET)
    assert watch.weigh([("loss", loss, None, "mean")]) is not None
    with pytest.raises(ConfigurationError, match="one unit has to hold throughout"):
        watch.weigh([("loss", torch.tensor(1.0), None, "mean")])


# ------------------------------------------------------------------------------------------------- in a fit


class Tagger(TrainModule):
    """Classes per token, six tokens to a row; `kind` says how the loss is returned."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(2, 3)
        self.kind = kind
        self.weights: list[float] = []

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(self.layer(batch["x"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("tokens_per_row", (batch["labels"] != -100).float().sum(1).mean())
        if self.kind == "sum" or (self.kind == "changes" and batch_idx):
            return loss + 0.0 * self.layer.weight.sum()
        return {"loss": loss, "weight": 5} if self.kind == "gives at last" and batch_idx == 3 else loss

    def validation_step(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(batch) + 1 if self.kind == "sum" else self.loss(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_accumulate(self, weight: Any) -> None:
        self.weights.append(float(weight))


def tokens(rows: int = 8) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(rows, 6, 2, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(rows * 6).reshape(rows, 6) % 3
    labels[torch.arange(6) >= (torch.arange(rows) % 4 + 1)[:, None]] = -100  # 1, 2, 3, 4 labels, and again
    return [{"x": each, "labels": label} for each, label in zip(x, labels, strict=True)]


def fit(module: Tagger, **options: Any) -> dict[str, float]:
    trainer = Trainer(max_epochs=1, progress=False, **options)
    return trainer.fit(module, tokens(), tokens(), batch_size=2, shuffle=False).metrics


def test_a_micro_batch_weighs_its_labels_and_a_mean_over_them_is_that_of_all() -> None:
    module = Tagger()
    metrics = fit(module, gradient_accumulation_steps=2)
    assert module.weights == [3, 7, 3, 7]
    assert metrics["epoch_tokens_per_row"] == pytest.approx((1.5 * 3 + 3.5 * 7) / 10)
    rows = torch.utils.data.default_collate(tokens())
    with torch.no_grad():
        assert metrics["val_loss"] == pytest.approx(float(module.loss(rows)), rel=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_update_over_no_label_changes_nothing_and_its_loss_is_not_taken_for_a_failure(accumulation: int) -> None:
    rows, logged = tokens(), {}
    for row in rows[:4]:
        row["labels"] = torch.full((6,), -100)

    class Looks(Tagger):
        def on_log(self, metrics: dict[str, float], step: int) -> None:
            logged[step] = "loss" in metrics, torch.equal(self.layer.weight, Tagger().layer.weight)

    trainer = Trainer(max_epochs=1, progress=False, log_every=1, gradient_accumulation_steps=accumulation)
    trainer.fit(Looks(), rows, batch_size=2, shuffle=False)
    empty = 2 // accumulation
    assert logged == {step: (step > empty, step <= empty) for step in range(1, 2 * empty + 1)}


def test_a_loss_of_several_terms_weighs_rows_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    module = Tagger("sum")
    fit(module, validate_every="1 step")
    assert module.weights == [2, 2, 2, 2]
    told = capsys.readouterr().err
    assert told.count("no plain cross-entropy (it comes from Add), so it weighs the rows") == 1
    assert told.count("validation_step returns no plain cross-entropy") == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("changes", "as no plain cross-entropy (it comes from Add), and before as a plain cross-entropy"),
        ("gives at last", "returned its loss with a weight, and before as a plain cross-entropy"),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_that_changes_what_its_loss_weighs_is_refused(kind: str, message: str, accumulation: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        fit(Tagger(kind), gradient_accumulation_steps=accumulation)
    assert message in str(caught.value)


def test_one_micro_batch_in_one_process_is_trained_to_the_last_bit_as_by_hand() -> None:
    module, by_hand = Tagger(), Tagger()
    fit(module)
    optimizer = by_hand.configure_optimizers()
    for start in range(0, 8, 2):
        by_hand.loss(torch.utils.data.default_collate(tokens()[start : start + 2])).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(module.layer.weight, by_hand.layer.weight)
