"""What is seen of an evaluation's steps: cross-entropies with the labels that they count, sums, and means over other things than rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, kl_div, mse_loss, nll_loss

from fabricate import ConfigurationError
from fabricate.metrics.step_watch import StepWatch

LOGITS = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
TARGET = torch.tensor([0, -100, 4, 2, -100, 2])
LABELLED = TARGET != -100
RIGHT = torch.tensor([True, False, True, True, False, False])
CLASSES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])


@pytest.mark.parametrize("classes", [None, CLASSES])
def test_watching_finds_the_cross_entropy_among_what_was_logged(classes: torch.Tensor | None) -> None:
    watch = StepWatch()
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


def test_each_cross_entropy_of_an_evaluation_weighs_its_own_labels() -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        few, all_of_them = cross_entropy(LOGITS, TARGET), cross_entropy(LOGITS, TARGET.clamp(min=0))
    logged: list[Any] = [("a", all_of_them, None, "mean"), ("b", few, None, "mean"), ("c", 1.0, None, "mean")]
    labels = watch.weigh(logged)
    assert [float(logged[0][2]), float(logged[1][2]), logged[2][2]] == [6, 4, None]
    assert labels is not None
    assert float(labels) == 6


def test_a_mean_of_one_number_per_row_weighs_rows_beside_a_cross_entropy_of_more_labels() -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        loss = cross_entropy(LOGITS, TARGET)  # 4 labels of 6, 3 for a row
        right = LOGITS.argmax(1) == TARGET
        exact, tokens, scaled = (
            right.view(2, 3).all(1).float().mean(),
            right[LABELLED].float().mean(),
            right[:2].float().mean(),
        )
        number = torch.mean(torch.tensor([0.25, 0.5])).item()
    logged: list[Any] = [
        ("loss", loss, None, "mean"),
        ("exact", exact, None, "mean"),
        ("tokens", tokens, None, "mean"),
        ("scaled", 1 - scaled, None, "mean"),
        ("given", exact, 5, "mean"),
        ("number", number, None, "mean"),
    ]
    assert float(watch.weigh(logged, rows=2)) == 4  # of the others
    assert [weight if weight is None else float(weight) for _, _, weight, _ in logged] == [4, 2, None, None, 5, 2]


@pytest.mark.parametrize(
    "mean",
    [
        lambda right: right.sum() / len(right),
        lambda right: right.float().sum() / right.size(0),
        lambda right: right.sum().div(len(right)),
        lambda right: torch.count_nonzero(right) / 6.0,
        lambda right: right.sum().item() / len(right),
        lambda right: int(right.sum()) / len(right),
    ],
)
def test_a_sum_of_one_number_per_row_divided_by_the_rows_weighs_rows(mean: Any) -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        right = LOGITS.argmax(1) == TARGET
        logged: list[Any] = [
            ("loss", cross_entropy(LOGITS, TARGET), None, "mean"),
            ("exact", mean(right), None, "mean"),
            ("scaled", right.sum() / len(right) + 1, None, "mean"),
            ("tokens", right.sum() / LABELLED.sum(), None, "mean"),
        ]
    assert float(watch.weigh(logged, rows=6)) == 4
    assert [weight if weight is None else float(weight) for _, _, weight, _ in logged] == [4, 6, 6, None]


@pytest.mark.parametrize("number", [float, lambda value: value])
def test_a_metric_over_labels_does_not_weigh_rows_because_the_first_batch_has_a_label_in_each_row(number: Any) -> None:
    """The first batch decided for all, and on several ranks each rank for itself."""
    watch = StepWatch()
    for target in (torch.tensor([0, 3, 4, 2, 1, 2]), TARGET):
        with torch.no_grad(), watch:
            of_labels = LOGITS[:, 0][target != -100].mean()
            logged: list[Any] = [
                ("loss", cross_entropy(LOGITS, target), None, "mean"),
                ("mean", number(of_labels), None, "mean"),
            ]
        labels = float(watch.weigh(logged, rows=6))
        assert labels == (target != -100).sum()
        assert logged[1][2] in (None, labels)


def test_a_metric_over_the_labels_of_another_cross_entropy_than_the_first_is_named() -> None:
    """It has the weight of the first one's labels, and nothing said so because it is a mean over labels."""
    for first in (LOGITS, None):
        watch = StepWatch()
        with torch.no_grad(), watch:
            tokens, rows = cross_entropy(LOGITS, TARGET), cross_entropy(LOGITS[:3], TARGET[2:5].abs() % 5)
            right = (LOGITS.argmax(1) == TARGET)[LABELLED].float().mean()
            losses = [("tokens", tokens, None, "mean"), ("rows", rows, None, "mean")]
            logged: list[Any] = [*(losses if first is not None else losses[::-1]), ("right", right, None, "mean")]
        assert float(watch.weigh(logged, rows=3)) == (4 if first is not None else 3)
        assert watch.beside(logged, 3) == ("" if first is not None else "'right' as a mean over 4 values for 3 rows")


PER_ROW = torch.tensor([0.5, 1.0, -2.0])


def _in_a_loop(means: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for mean in means:
        total += mean
    return total


@pytest.mark.parametrize(
    ("value", "is_over_rows"),
    [
        (lambda: mse_loss(PER_ROW, torch.ones(3)), True),
        (lambda: 0.5 * binary_cross_entropy_with_logits(PER_ROW, torch.ones(3)), True),
        (lambda: kl_div(PER_ROW[:, None].log_softmax(1), torch.ones(3, 1), reduction="batchmean"), True),
        (lambda: 100 * (1 - (PER_ROW > 0).float().mean()), True),
        (lambda: 100 * (PER_ROW > 0).sum() / len(PER_ROW), True),
        (lambda: (LOGITS[:3] > 0).sum() / 3, True),  # how many of each row
        (lambda: (LOGITS[:3] > 0).sum().item() / 3, True),
        (lambda: 100 * ((LOGITS[:3] > 0).sum() / 3), True),
        (lambda: cross_entropy(LOGITS, TARGET.abs() % 5, reduction="sum") / 3, True),
        (lambda: (PER_ROW > 0).float().mean().mul_(100), True),
        (lambda: (PER_ROW > 0).float().sum() * (100 / 3), True),
        (lambda: (1 / 3) * PER_ROW.sum(), True),
        (lambda: (PER_ROW > 0).sum().float() / 3, True),
        (lambda: (PER_ROW > 0).long().sum().double().div(3).cpu(), True),
        (lambda: PER_ROW.mean().clone().detach(), True),
        (lambda: (PER_ROW > 0).float().sum().div_(3), True),
        (
            lambda: (PER_ROW > 0).float().sum(0, keepdim=True).mul_(100.0 / 3)[0],
            True,
        ),  # the accuracy of many ImageNet scripts
        (
            lambda: (LOGITS[:3] > 0).reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / 3),
            True,
        ),  # of the five best classes
        (lambda: PER_ROW.sum().zero_().add_(1).mul_(100 / 3), False),
        (lambda: PER_ROW.sum() * 0.5, False),
        (lambda: (LOGITS[:3] > 0).sum() * (1 / 15), False),
        (lambda: (LOGITS[:3] > 0).sum() / 15, False),
        (lambda: (LOGITS[:3] > 9).sum().item() / 3, False),  # 0 might be a mean over labels too
        (lambda: (PER_ROW.mean() + PER_ROW.abs().mean()) / 2, True),
        (lambda: sum(LOGITS[: 1 + row].mean() for row in range(3)) / 3, True),
        (lambda: _in_a_loop([LOGITS[: 1 + row].mean() for row in range(3)]) / 3, True),
        (lambda: (LOGITS[:1].mean() + LOGITS[:2].mean()) / 2, False),
        (lambda: PER_ROW.mean() * PER_ROW.abs().mean(), False),
        (lambda: PER_ROW.mean() / PER_ROW.abs().mean(), False),
        (lambda: PER_ROW.mean() + PER_ROW.max(), False),
        (lambda: mse_loss(LOGITS, torch.ones_like(LOGITS)), False),
        (lambda: PER_ROW.max(), False),
    ],
)
def test_losses_sums_and_multiples_of_means_over_rows_weigh_rows(value: Any, is_over_rows: bool) -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        logged: list[Any] = [("loss", cross_entropy(LOGITS, TARGET), None, "mean"), ("value", value(), None, "mean")]
    assert float(watch.weigh(logged, rows=3)) == 4
    assert logged[1][2] == (3 if is_over_rows else None)


@pytest.mark.parametrize(
    "metric",
    [
        lambda right: 100 * right.sum().item() / len(right),
        lambda right: 100 * right.float().mean().item(),
        lambda right: 1 - right.float().mean().item(),
    ],
)
@pytest.mark.parametrize("counts", [[1, 0, 2, 3], [0, 1, 2, 0], [3, 2, 1, 0]])
def test_a_python_number_made_of_a_mean_over_rows_weighs_rows_in_every_batch(metric: Any, counts: list[int]) -> None:
    watch = StepWatch()
    for count in counts:
        with torch.no_grad(), watch:
            right = torch.arange(3) < count
            logged: list[Any] = [("loss", cross_entropy(LOGITS, TARGET), None, "mean")]
            logged.append(("right", float(metric(right)), None, "mean"))
        watch.weigh(logged, rows=3)
        assert logged[1][2] == 3


def test_a_python_number_that_is_rounded_later_keeps_the_weight_that_it_had_before() -> None:
    watch = StepWatch()
    for count in (2, 3, 5):
        with torch.no_grad(), watch:
            mean = (torch.arange(8) < count).float().mean().item()
            logged: list[Any] = [("loss", cross_entropy(LOGITS, TARGET), None, "mean")]
            logged.append(("right", round(mean, 2), None, "mean"))
        watch.weigh(logged, rows=8)
        assert logged[1][2] == 8


def test_a_python_number_that_equals_a_mean_over_rows_by_chance_keeps_the_weight_that_it_had_before() -> None:
    watch = StepWatch()
    for right_labels, right_rows in ((3, 2), (2, 2), (4, 4), (1, 3)):
        with torch.no_grad(), watch:
            (torch.arange(4) < right_rows).sum()
            logged: list[Any] = [("loss", cross_entropy(LOGITS, TARGET), None, "mean")]
            logged.append(("tokens", right_labels / 4, None, "mean"))
        watch.weigh(logged, rows=4)
        assert logged[1][2] is None


def test_a_mean_of_two_metrics_keeps_its_weight_in_a_batch_of_two_rows() -> None:
    watch = StepWatch()
    for rows in (6, 2):
        with torch.no_grad(), watch:
            both = (LOGITS[LABELLED].mean() + LOGITS[:, 0].mean()) / 2
            logged: list[Any] = [("loss", cross_entropy(LOGITS, TARGET), None, "mean"), ("both", both, None, "mean")]
        watch.weigh(logged, rows=rows)
        assert logged[1][2] is None


def test_a_multiple_of_a_cross_entropy_with_as_many_labels_as_rows_weighs_those_that_count() -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        loss = cross_entropy(LOGITS, TARGET)
        logged: list[Any] = [("loss", loss, None, "mean"), ("twice", 2 * loss, None, "mean")]
    assert float(watch.weigh(logged, rows=6)) == 4
    assert logged[1][2] is None


def test_a_mean_over_the_columns_of_all_rows_is_named_beside_a_cross_entropy_of_other_labels() -> None:
    texts = _beside(lambda batch: mse_loss(LOGITS, torch.full_like(LOGITS, batch)))
    assert texts == ["'number' as a mean over 30 values for 6 rows", "", "", "", ""]
    assert _beside(lambda batch: mse_loss(LOGITS[:, 0], torch.full((6,), batch))) == [""] * 5


def test_a_mean_over_all_positions_is_named_beside_a_cross_entropy_that_ignores_some() -> None:
    """It was taken for a mean over the labels, because it has as many values as there are labels with the ignored ones."""
    texts = _beside(lambda batch: (LOGITS[:, 0] + batch).mean(), rows=3)
    assert texts == ["'number' as a mean over 6 values for 3 rows", "", "", "", ""]
    assert _beside(lambda batch: (LOGITS[:4, 0] + batch).mean(), rows=3) == [""] * 5


def _beside(number: Any, rows: int = 6) -> list[str]:
    """What is said, batch after batch, about a number that `number(batch)` gives beside a cross-entropy of 4 labels."""
    watch, texts = StepWatch(), []
    for batch in range(5):
        with torch.no_grad(), watch:
            logged: list[Any] = [
                ("loss", cross_entropy(LOGITS, TARGET), None, "mean"),
                ("number", number(batch), None, "mean"),
            ]
        watch.weigh(logged, rows=rows)
        texts.append(watch.beside(logged, rows=rows))
    return texts


def test_a_number_that_torch_did_not_compute_is_named_once_beside_a_cross_entropy_of_other_labels() -> None:
    text = "'number' as a number that was computed outside of torch"
    assert _beside(lambda batch: [0.5, 0.5, 0.5, 0.5, 0.25][batch]) == ["", "", "", "", text]
    assert _beside(lambda batch: float(np.mean([batch, 0.3]))) == ["", text, "", "", ""]
    assert _beside(lambda batch: 0.5) == [""] * 5  # the mean of a constant is the same with any weights
    assert _beside(lambda batch: float(np.mean([batch, 0.3])), rows=4) == [""] * 5
    assert _beside(lambda batch: (torch.ones(4) * batch).sum().item() / 4) == [""] * 5  # a mean over labels


_COLUMN = LOGITS[:, 0]


@pytest.mark.parametrize(
    "compute",
    [
        lambda scale: torch.nanmean(_COLUMN * scale),
        lambda scale: torch.nanmean(_COLUMN * scale).item(),
        lambda scale: torch.ones(()) - (_COLUMN * scale).mean(),
        lambda scale: (_COLUMN * scale).sum() / torch.tensor(6),
    ],
)
def test_another_form_of_a_mean_over_rows_is_named_once_beside_a_cross_entropy_of_other_labels(compute: Any) -> None:
    texts = _beside(lambda batch: compute(1.0 + batch))
    assert texts == ["", "'number' as a mean over 6 values for 6 rows", "", "", ""]
    assert _beside(lambda batch: compute(1.0)) == [""] * 5
    assert _beside(lambda batch: compute(1.0 + batch), rows=2) == [""] * 5  # as many labels in every row


@pytest.mark.parametrize(
    "compute",
    [
        lambda scale: torch.tensor(float(np.mean([scale, 0.3]))),
        lambda scale: sum(_COLUMN * scale) / 6,
        lambda scale: (_COLUMN * scale).median(),
        lambda scale: (_COLUMN * scale).max(),
    ],
)
def test_a_number_in_a_tensor_that_is_no_known_mean_is_named_beside_a_cross_entropy_of_other_labels(
    compute: Any,
) -> None:
    text = "'number' as a number that is not known as a mean over labels"
    assert _beside(lambda batch: compute([1, 1, 1, 2, 1][batch])) == ["", "", "", text, ""]


@pytest.mark.parametrize(
    "compute",
    [
        lambda loss, scale: loss * scale / math.log(2),
        lambda loss, scale: cross_entropy(LOGITS * scale, TARGET).item() / math.log(2),
        lambda loss, scale: (loss + cross_entropy(LOGITS * scale, TARGET)) / 2,
        lambda loss, scale: loss * torch.tensor(scale),
        lambda loss, scale: torch.where(LABELLED, _COLUMN * scale, math.nan).nanmean(),
        lambda loss, scale: -(_COLUMN * scale * LABELLED).sum() / LABELLED.sum(),
        lambda loss, scale: 0.5 * (_COLUMN * scale * LABELLED).sum() / LABELLED.sum().clamp(min=1),
        lambda loss, scale: torch.ones(()) - (_COLUMN * scale)[LABELLED].mean(),
    ],
)
def test_a_multiple_of_the_cross_entropy_and_a_mean_over_its_labels_are_not_named(compute: Any) -> None:
    assert _beside(lambda batch: compute(cross_entropy(LOGITS, TARGET), 1.0 + batch)) == [""] * 5


def test_a_score_that_equals_a_quotient_of_the_step_by_chance_is_named_in_a_later_batch() -> None:
    text = "'number' as a number that was computed outside of torch"
    scores = [0.3, 0.5, 0.123, 0.7, 0.8]

    def score(batch: int) -> float:
        (torch.arange(4) < 2).sum() / (torch.arange(4) < 4).sum()
        return scores[batch]

    assert _beside(score) == ["", "", text, "", ""]


@pytest.mark.parametrize("counts", [[0, 0, 3, 2, 1], [0, 2, 2, 0, 1]])
def test_a_count_per_row_that_was_0_in_the_first_batch_is_named_if_that_batch_weighed_labels(counts: list[int]) -> None:
    texts = _beside(lambda batch: int((torch.arange(12).view(6, 2) < counts[batch]).sum()) / 6)
    text = "'number' as a number that was taken for a mean over rows in one batch and for one over labels in another"
    assert [text for text in texts if text] == [text]


@pytest.mark.parametrize(
    "compute",
    [
        lambda: 100.0 * RIGHT.sum() / len(RIGHT),
        lambda: RIGHT.sum() * 1.0 / len(RIGHT),
        lambda: -0.5 * (LOGITS[:, 0] - LOGITS[:, 1].exp()).sum() / len(LOGITS),
        lambda: RIGHT.float().mean().clamp(0, 1),
        lambda: torch.where(torch.tensor(True), RIGHT.float().mean(), torch.tensor(0.0)),
        lambda: cross_entropy(LOGITS, LOGITS.softmax(1)),
    ],
)
def test_a_multiple_of_a_mean_over_rows_weighs_rows_beside_a_cross_entropy_of_other_labels(compute: Any) -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        logged: list[Any] = [("loss", cross_entropy(LOGITS, TARGET), None, "mean"), ("number", compute(), None, "mean")]
    watch.weigh(logged, rows=6)
    assert logged[1][2] == 6


@pytest.mark.parametrize(
    "compute",
    [
        lambda scale: torchmetrics.functional.accuracy(
            LOGITS * scale, torch.zeros(6).long(), "multiclass", num_classes=5
        ),
        lambda scale: torch.where(torch.tensor(True), (LOGITS * scale).mean(0)[1], torch.tensor(0.0)),
        lambda scale: (LOGITS * scale).mean(0)[1],
    ],
)
def test_other_scores_over_rows_are_named_beside_a_cross_entropy_of_other_labels(compute: Any) -> None:
    assert [text[:14] for text in _beside(lambda batch: compute(1.0 - 0.9 * batch)) if text] == ["'number' as a "]


def test_a_percentage_of_the_tokens_is_named_beside_a_cross_entropy_with_one_label_per_row() -> None:
    texts = _beside(lambda batch: 100.0 * (torch.arange(13) < batch).sum() / 13, rows=4)
    assert texts == ["'number' as a mean over 13 values for 4 rows", "", "", "", ""]


def test_a_percentage_of_the_items_that_python_divides_is_named_beside_other_losses() -> None:
    for divisor, text in ((13, "'right' as a sum divided by 13 for 6 rows"), (6, "")):
        watch = StepWatch()
        with torch.no_grad(), watch:
            counted = (torch.arange(13) >= 0).sum().item()
            share = 100.0 * (torch.arange(13) < 4).sum().item() / (counted if divisor == 13 else divisor)
        assert watch.of_other_than_rows([("right", share, None, "mean")], rows=6) == text


@pytest.mark.parametrize(
    "compute",
    [
        lambda: LOGITS.square().sum() - 0.5 * LOGITS[:, :2].sum(),
        lambda: mse_loss(LOGITS, LOGITS * 2, reduction="sum") + LOGITS[:, 0].sum(),
    ],
)
def test_sums_over_rows_that_are_added_or_subtracted_are_named(compute: Any) -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        logged: list[Any] = [("loss", compute(), None, "mean")]
    assert watch.summed(logged, rows=6) == ["loss"]


def test_a_long_loop_of_additions_does_not_fill_the_memory() -> None:
    """Each partial sum holds the sizes of all of its terms."""
    watch = StepWatch()
    with torch.no_grad(), watch:
        total = torch.zeros(())
        for _ in range(2500):
            total = total + LOGITS.sum()
    assert max(len(each.terms) for each in watch._all()) < 1000


def test_a_sum_or_mean_over_as_many_values_as_a_parameter_has_is_named_if_it_varies() -> None:
    summed, named = [], []
    watch = StepWatch()
    for scale in (1.0, 1.0, 2.0):
        with torch.no_grad(), watch:
            squares = (LOGITS[:, 0] * scale).square()
            logged: list[Any] = [("sum", 0.5 * squares.sum(), None, "mean"), ("mean", squares[:5].mean(), None, "mean")]
        summed.append(watch.summed(logged, rows=6, others={5, 6}))
        named.append(watch.of_other_than_rows(logged, rows=6, others={5, 6}))
        watch = watch.another_look() or watch
    assert summed == [[], [], ["sum"]]
    assert named == ["", "", "'mean' as a mean over 5 values for 6 rows"]


def test_a_mean_over_a_loop_over_rows_that_begins_with_a_batch_of_one_row_is_named() -> None:
    watch, weights, texts = StepWatch(), [], []
    for rows in (1, 1, 4, 4):
        with torch.no_grad(), watch:
            mean = sum((LOGITS[row] > rows / 8).float().mean() for row in range(rows)) / rows
            logged: list[Any] = [("loss", cross_entropy(LOGITS, TARGET.clamp(0)), None, "mean")]
            logged.append(("right", mean, None, "mean"))
        watch.weigh(logged, rows=rows)
        weights.append(logged[1][2])
        texts.append(watch.beside(logged, rows=rows))
    text = "'right' as a number that was taken for a mean over rows in one batch and for one over labels in another"
    assert (weights, texts) == ([None, None, 4, 4], ["", "", text, ""])


def test_a_python_number_that_equals_a_mean_over_rows_only_in_the_first_batch_is_named() -> None:
    watch, texts = StepWatch(), []
    for right_labels, right_rows in ((2, 3), (2, 3), (3, 3), (1, 3)):
        with torch.no_grad(), watch:
            (torch.arange(6) < right_rows).float().mean()
            share = (torch.arange(4) < right_labels).sum().item() / 4
            logged: list[Any] = [("loss", cross_entropy(LOGITS, TARGET), None, "mean"), ("share", share, None, "mean")]
        watch.weigh(logged, rows=6)
        texts.append(watch.beside(logged, rows=6))
    text = "'share' as a number that was taken for a mean over rows in one batch and for one over labels in another"
    assert texts == ["", "", text, ""]


def test_watching_finds_nothing_where_there_is_no_mean_cross_entropy() -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        logged = [
            ("sum", cross_entropy(LOGITS, TARGET, reduction="sum"), None, "mean"),
            ("soft", cross_entropy(LOGITS, LOGITS.softmax(1)), None, "mean"),
            ("number", 1.0, None, "mean"),
        ]
    assert watch.weigh(list(logged)) is None


def test_a_mean_of_cross_entropies_is_none_even_if_all_are_nan() -> None:
    for target in (torch.full((2,), -100), torch.tensor([0, 1])):
        watch = StepWatch()
        with torch.no_grad(), watch:
            start, end = (cross_entropy(torch.zeros(2, 3), target) for _ in range(2))
            logged: list[Any] = [("loss", (start + end) / 2 + 0.5, None, "mean")]
        assert watch.weigh(logged) is None


def test_watching_finds_a_result_of_nll_loss_and_one_that_is_a_number_by_now() -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        nll = nll_loss(LOGITS.log_softmax(1), TARGET.clamp(min=0), weight=CLASSES)
        number = cross_entropy(LOGITS, TARGET).item()
    logged: list[Any] = [
        ("nll", nll * 1.0, None, "mean"),
        ("number", number, None, "mean"),
        ("zero", 0.0, None, "mean"),
    ]
    watch.weigh(logged)
    counted_by_hand = float(CLASSES[TARGET.clamp(min=0)].sum())
    assert [None if weight is None else float(weight) for _, _, weight, _ in logged] == [counted_by_hand, 4, None]


def test_what_is_made_of_a_cross_entropy_in_its_place_is_another_metric_and_is_named() -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        loss = cross_entropy(LOGITS, TARGET)
        loss += 1
    assert watch.weigh([("loss", loss, None, "mean")]) is None
    assert watch.of_other_than_rows([]) == "a cross-entropy that counts 4 of 6 labels"


@pytest.mark.parametrize(("rows", "text"), [(6, ""), (4, "a cross-entropy of 1 labels for 4 rows")])
def test_a_loop_with_a_cross_entropy_for_each_row_is_a_mean_over_rows(rows: int, text: str) -> None:
    with StepWatch() as watch:
        target = TARGET.clamp(min=0)
        loss = sum(cross_entropy(LOGITS[i], target[i]) for i in range(6)) / 6
    assert watch.of_other_than_rows([("loss", loss, None, "mean")], rows=rows) == text


def test_watching_refuses_a_step_that_changes_its_mind() -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        loss = cross_entropy(LOGITS, TARGET)
    assert watch.weigh([("loss", loss, None, "mean")]) is not None
    with pytest.raises(
        ConfigurationError, match="for earlier batches an evaluation step returned a plain cross-entropy, which is"
    ):
        watch.weigh([("loss", torch.tensor(1.0), None, "mean")])


def test_a_number_that_equals_the_cross_entropy_only_up_to_rounding_takes_its_labels() -> None:
    watch = StepWatch()
    for offset in (0.0, 1e-3):
        with torch.no_grad(), watch:
            loss = cross_entropy(LOGITS, TARGET)
            by_hand = loss.clone() + offset
        logged = [("by_hand", by_hand, None, "mean"), ("loss", loss, None, "mean")]
        assert watch.weigh(logged) == 4
        assert [weight in (None, 4) for *_, weight, _ in logged] == [True, True]
    with torch.no_grad(), watch:
        loss, other = cross_entropy(LOGITS, TARGET), cross_entropy(LOGITS[:3], TARGET[:3])
        logged = [("by_hand", loss + 1e-3, None, "mean"), ("loss", loss, None, "mean"), ("other", other, None, "mean")]
    with pytest.raises(ConfigurationError, match="for earlier batches an evaluation step returned a plain"):
        watch.weigh(logged)


def test_a_mean_over_a_tensor_without_rows_is_not_named() -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        logged: list[Any] = [("usage", torch.ones(7).mean(), None, "mean")]
    assert watch.of_other_than_rows(logged, rows=2, others={7}) == ""
    assert watch.of_other_than_rows(logged, rows=2) == "'usage' as a mean over 7 values for 2 rows"


def test_a_count_of_labels_and_a_penalty_on_parameters_are_no_sums_over_rows() -> None:
    watch, right = StepWatch(), LOGITS.argmax(1) == TARGET
    with torch.no_grad(), watch:
        logged: list[Any] = [
            ("loss", cross_entropy(LOGITS, TARGET), None, "mean"),
            ("accuracy", right.sum() / (TARGET >= 0).sum(), None, "mean"),
            ("penalty", torch.ones(6, 3).square().sum(), None, "mean"),
        ]
        few = ("few", right[:5].sum() / torch.tensor(5), None, "mean")
    watch.weigh(logged, rows=6)
    assert watch.summed(logged, rows=6, others={18}) == []
    assert watch.summed(logged, rows=6) == ["penalty"]
    assert watch.beside(logged, rows=6) == ""
    assert watch.beside([*logged, few], rows=6) == "'few' as a mean over 5 values for 6 rows"
    assert watch.beside([*logged, few], rows=6) == ""  # once


ITEMS = [2, 0, 3, 1, 4, 3]
"""Numbers of items of six rows, 13 in all."""


def _looped(start: Any, values: list[torch.Tensor], divisor: Any) -> torch.Tensor:
    total = start
    for value in values:
        total = total + value.sum()
    return total / divisor  # type: ignore[no-any-return]


def _looped_in_place(divisor: int) -> torch.Tensor:
    total = _BOXES[0].sum()
    for box in _BOXES[1:]:
        total += box.sum()
    return total / divisor


_BOXES = [torch.rand(items, 4) for items in ITEMS if items]


@pytest.mark.parametrize(
    ("compute", "divisor"),
    [
        (lambda: _looped(0, _BOXES, 13), 13),
        (lambda: _looped(0.0, _BOXES, torch.tensor(13.0)), 13),
        (lambda: _looped(0, _BOXES, 13).item(), 13),
        (lambda: _looped(torch.zeros(()), _BOXES, 13), 13),
        (lambda: _looped(torch.rand(6, 4).sum() * 0, _BOXES, 13), 13),
        (lambda: sum(box.sum() for box in _BOXES) / 13, 13),
        (lambda: _looped_in_place(13), 13),
        (lambda: sum(box.sum() for box in _BOXES) / len(_BOXES), 5),  # without the row that has no items
        (lambda: _looped(0, _BOXES, 6), None),
        (lambda: _looped(0, [torch.rand(4) for _ in ITEMS], 24), None),
        (lambda: _looped(0, [torch.rand(6, 5), torch.rand(6, 2)], 7), None),  # two losses of the whole batch
        (lambda: _looped(torch.rand(6).mean(), _BOXES[:1], 13), None),
        (lambda: _looped(0, [torch.rand(12), torch.rand(6)], 5), None),
        (lambda: _looped(0, [torch.rand(10), torch.rand(7)], 2), None),  # parameters
        (lambda: _looped(0, [torch.rand(4)] * 7, 5), None),  # more terms than rows
    ],
)
def test_a_sum_over_the_items_of_each_row_that_is_divided_by_their_number_is_named(
    compute: Any, divisor: int | None
) -> None:
    watch = StepWatch()
    with torch.no_grad(), watch:
        logged: list[Any] = [("l1", compute(), None, "mean")]
    wanted = "" if divisor is None else f"'l1' as a sum divided by {divisor} for 6 rows"
    assert watch.of_other_than_rows(logged, rows=6, others={10, 7}) == wanted
    assert watch.summed(logged, rows=6, others={10, 7}) == []


_HEADS = torch.arange(30.0).view(6, 5)


@pytest.mark.parametrize(
    ("compute", "text"),
    [
        (lambda: torch.stack([mse_loss(_HEADS[:, i], _HEADS[:, 0]) for i in range(4)]).mean(), ""),
        (lambda: torch.stack([mse_loss(_HEADS[:, i], _HEADS[:, 0]) for i in range(4)]).sum() / 4, ""),
        (lambda: 0.5 * torch.mean(torch.stack([_HEADS[:, 0].mean(), _HEADS.square().mean()])), ""),
        (lambda: torch.stack(tensors=[_HEADS[i].mean() for i in range(6)]).mean(), ""),  # of each row
        (lambda: torch.stack([_HEADS[i].mean() for i in range(4)]).mean(), "a mean over 5 values for 6 rows"),
        (lambda: torch.stack([_HEADS[:4, 0].mean(), _HEADS[:4, 1].mean()]).mean(), "a mean over 4 values for 6 rows"),
        (lambda: torch.stack([_HEADS[0].sum(), _HEADS[1].sum()]).mean(), "a mean over 2 values for 6 rows"),
    ],
)
def test_the_mean_of_a_stack_of_means_over_rows_is_one(compute: Any, text: str) -> None:
    with torch.no_grad(), StepWatch() as watch:
        value = compute()
    wanted = f"'value' as {text}" if text else ""
    assert watch.of_other_than_rows([("value", value, None, "mean")], rows=6) == wanted


def test_a_term_of_one_value_beside_a_mean_over_rows_gets_no_note() -> None:
    boundary = torch.ones(1, 1)
    with torch.no_grad(), StepWatch() as watch:
        logged = [
            ("sum", _COLUMN.square().mean() + boundary.square().mean(), None, "mean"),
            ("alone", boundary.square().mean(), None, "mean"),
        ]
    assert watch.of_other_than_rows(logged[:1], rows=6) == ""
    assert watch.of_other_than_rows(logged, rows=6) == "'alone' as a mean over 1 values for 6 rows"
