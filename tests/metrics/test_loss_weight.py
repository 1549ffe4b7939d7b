"""The number of items in the mean of a loss: read from torch's calls, and compared with counting by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cosine_similarity,
    cross_entropy,
    ctc_loss,
    l1_loss,
    logsigmoid,
    mse_loss,
)

from fabricate import ConfigurationError, Trainer, TrainModule
from fabricate.metrics.loss_form import (
    function_of_a_mean,
    is_over_a_part,
    is_sum,
    last_operation,
    odd_divisor,
)
from fabricate.metrics.loss_weight import counted
from fabricate.training.updates.step_output import Made

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(2, 15, generator=GENERATOR).requires_grad_().view(6, 5)  # not a leaf: a result of a model
TARGET = torch.tensor([0, -100, 4, 2, -100, 2])
SCALE = torch.nn.Parameter(torch.tensor(0.5))
SCALES = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
CLASSES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
PIXELS = torch.randn(2, 3, 4, 4, generator=GENERATOR).requires_grad_()
MASK = torch.randint(0, 3, (2, 4, 4), generator=GENERATOR)
MASK[0, :3] = 255


def test_a_cross_entropy_counts_the_labels_that_are_not_ignored() -> None:
    count = counted(cross_entropy(LOGITS, TARGET))
    assert count is not None
    assert (float(count.weight), float(count.labels)) == (4, 4)


def test_class_weights_weigh_the_loss_and_not_what_is_logged_beside_it() -> None:
    count = counted(cross_entropy(LOGITS, TARGET, weight=CLASSES))
    assert count is not None
    assert (float(count.weight), float(count.labels)) == (1 + 16 + 4 + 4, 4)


def test_pixels_and_another_ignore_index_are_counted() -> None:
    count = counted(cross_entropy(PIXELS, MASK, ignore_index=255))
    assert count is not None
    assert float(count.labels) == float((MASK != 255).sum()) == 20


def test_half_precision_logits_are_counted_exactly() -> None:
    logits = torch.zeros(1002, 2, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(1002, dtype=torch.long)
    target[0] = -100
    loss = cross_entropy(logits, target)
    assert float(loss.grad_fn._saved_total_weight) != 1001  # type: ignore[union-attr]
    count = counted(loss)
    assert count is not None
    assert float(count.weight) == 1001


def test_a_change_of_dtype_keeps_what_the_mean_was_taken_over() -> None:
    count = counted(cross_entropy(LOGITS.double(), TARGET).float())
    assert count is not None
    assert float(count.weight) == 4


@pytest.mark.parametrize(
    ("loss", "operation"),
    [
        (lambda: mse_loss(LOGITS, LOGITS.detach() + 1), "MseLoss"),
        (lambda: cross_entropy(LOGITS, TARGET) + 0.1 * LOGITS.square().mean(), "Add"),
        (lambda: cross_entropy(LOGITS, TARGET, reduction="sum"), "NllLoss"),
        (lambda: cross_entropy(LOGITS, TARGET, label_smoothing=0.1), "Add"),
        (lambda: cross_entropy(LOGITS, LOGITS.detach().softmax(1)), "Sum"),
        (lambda: (TARGET != -100).sum() * cross_entropy(LOGITS, TARGET), "Mul"),
        (lambda: cross_entropy(LOGITS, TARGET) * torch.tensor(2.0), "Mul"),
        (lambda: cross_entropy(LOGITS, TARGET) + cross_entropy(LOGITS, TARGET), "Add"),
        (lambda: cross_entropy(LOGITS, TARGET, reduction="none")[TARGET >= 0].mean(), "Mean"),
    ],
)
def test_any_other_loss_is_not_counted(loss: Callable[[], torch.Tensor], operation: str) -> None:
    assert counted(loss()) is None
    assert last_operation(loss()) == operation


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: 2 * loss,
        lambda loss: loss * 0.5 / 3,
        lambda loss: loss.clone().view(1).squeeze(),
        lambda loss: loss.unsqueeze(0).mean(),
        lambda loss: 0.0 + loss,
        lambda loss: loss - torch.tensor(1.0),
        lambda loss: -loss.double().sum(),
    ],
)
def test_a_copy_of_a_cross_entropy_or_one_times_a_number_counts_as_it_does(change: Callable[..., torch.Tensor]) -> None:
    count = counted(change(cross_entropy(LOGITS, TARGET)))
    assert count is not None
    assert float(count.weight) == 4


@pytest.mark.parametrize(
    ("loss", "a_sum", "over_a_part"),
    [
        (lambda: cross_entropy(LOGITS, TARGET, reduction="sum"), True, False),
        (lambda: mse_loss(LOGITS, LOGITS.detach() + 1, reduction="sum") + LOGITS.mean(), True, False),
        (lambda: LOGITS.square().sum(), True, False),
        (lambda: LOGITS.square().mean(), False, False),
        (lambda: cross_entropy(LOGITS, TARGET) + 0.1 * LOGITS.square().sum(), False, False),
        (lambda: cross_entropy(LOGITS, TARGET, reduction="none")[TARGET >= 0].mean(), False, True),
        (lambda: LOGITS.masked_select(LOGITS > 0).mean(), False, True),
        (lambda: (LOGITS.square() * (LOGITS > 0)).sum() / (LOGITS > 0).sum(), False, True),
        (lambda: LOGITS.square().sum() / 30, False, False),
        (lambda: cross_entropy(LOGITS, TARGET.clamp(min=0), label_smoothing=0.1), False, False),
        (lambda: cross_entropy(LOGITS, TARGET) + LOGITS.square().sum() / (LOGITS > 0).sum(), False, True),
        (lambda: (-SCALE).exp() * LOGITS[LOGITS > 0].mean() + SCALE, False, True),
        (lambda: torch.stack([LOGITS.mean(), LOGITS[LOGITS > 0].mean()]).sum(), False, True),
        (lambda: (torch.stack([LOGITS.mean(), LOGITS[LOGITS > 0].mean()]) * SCALES + SCALES).mean(), False, True),
        (lambda: torch.stack([LOGITS.mean(), LOGITS[LOGITS > 0].mean()]) @ SCALES, False, True),
        (lambda: torch.cat([LOGITS.mean()[None], LOGITS[LOGITS > 0].mean()[None]]).sum(), False, True),
        (lambda: (-SCALE).exp() * LOGITS.square().mean() + SCALE, False, False),
        (lambda: torch.stack([LOGITS.mean(), LOGITS.square().mean()]) @ SCALES, False, False),
    ],
)
def test_a_sum_and_a_mean_over_a_part_of_the_batch_are_seen(
    loss: Callable[[], torch.Tensor], a_sum: bool, over_a_part: bool
) -> None:
    assert (is_sum(loss()), is_over_a_part(loss())) == (a_sum, over_a_part)


def _masked(mask: torch.Tensor) -> torch.Tensor:
    """A mean as in graph networks for traffic: values times a mask that was divided by its own mean."""
    mask = mask.float()
    values = (LOGITS - LOGITS.detach() - 1).abs() * (mask / mask.mean())
    return torch.where(values.isnan(), torch.zeros_like(values), values).mean()


SIGMAS = torch.nn.Parameter(torch.ones(6))
EACH, WEIGHTS = LOGITS.square().mean(1), torch.linspace(0.1, 3.0, 6)
TASKS, ZERO = torch.ones(5, requires_grad=True), torch.zeros(())
COUNTS = (LOGITS > 0).sum(0)
"""A label is missing in some tasks of some rows."""


@pytest.mark.parametrize(
    ("loss", "over_a_part"),
    [
        (lambda: ((LOGITS * (LOGITS > 0)).sum(0) / COUNTS).mean(), True),
        (lambda: ((LOGITS * (LOGITS > 0)).sum(dim=-2) / COUNTS.clamp(min=1)).mean(), True),
        (lambda: ((LOGITS[:, :6] * (LOGITS > 0)).sum(0) / COUNTS * TASKS.exp()).sum(), True),
        (lambda: torch.stack([(LOGITS[:, i] * (LOGITS[:, i] > 0)).sum() / COUNTS[i] for i in range(5)]).mean(), True),
        (lambda: (LOGITS.sum(0) / torch.tensor(6)).mean(), False),  # the number of rows
        (lambda: LOGITS.square().mean() / (2 * TASKS[0] ** 2) + TASKS[0].log(), False),  # a learned scale
        (lambda: ((LOGITS * (LOGITS > 0)).sum(1) / (LOGITS > 0).sum(1)).mean(), False),  # of each row
        (lambda: (LOGITS * (LOGITS > 0)).sum() * (1 / (LOGITS > 0).sum()), True),
        (lambda: 0.5 * (1 / (LOGITS > 0).sum() * (LOGITS * (LOGITS > 0)).sum()), True),
        (lambda: (LOGITS * (LOGITS > 0)).sum() * (LOGITS > 0).sum().reciprocal() + TASKS[0].log(), True),
        (lambda: LOGITS.flatten()[:24].abs().sum() * (1 / torch.tensor(17)), True),
        (lambda: PARAMETER.abs().sum() * torch.tensor(0.2), False),
        (lambda: LOGITS.sum() * (1 / torch.tensor(30.0)), False),  # the number of elements
        (lambda: LOGITS.sum() / 6 * torch.tensor(0.3), False),  # the weight of a term
        (lambda: LOGITS.mean() * torch.tensor(0.1), False),
        (lambda: LOGITS.sum() * torch.tensor(torch.nan), False),
        (lambda: LOGITS.sum() * torch.tensor(0.0), False),
        (lambda: LOGITS.sum() * torch.tensor(1e-45), False),
        (lambda: EACH.topk(3).values.mean(), True),
        (lambda: LOGITS.square().topk(3, dim=1).values.mean(), False),  # of each row
        (lambda: sum(mse_loss(r[r > 0], r.detach()[r > 0] + 1) for r in map(LOGITS.__getitem__, range(6))) / 6, False),
        (lambda: torch.cat([LOGITS[i][LOGITS[i] > 0] for i in range(6)]).mean(), True),
    ],
)
def test_a_ratio_of_sums_over_rows_and_the_largest_losses_are_over_a_part(
    loss: Callable[[], torch.Tensor], over_a_part: bool
) -> None:
    assert is_over_a_part(loss(), rows=6) == over_a_part
    assert not is_sum(loss(), rows=6)


@pytest.mark.parametrize(
    ("loss", "over_a_part"),
    [
        (lambda: EACH.topk(1).values.mean(), True),
        (lambda: EACH[torch.arange(6) == 2].mean(), True),
        (lambda: EACH.masked_select(torch.arange(6) == 2).sum(), True),
        (lambda: EACH[torch.tensor([4])].mean() + LOGITS.mean(), True),
        (lambda: LOGITS.flatten()[torch.arange(30) == 7].mean(), True),
        (lambda: LOGITS.mean() + SIGMAS[torch.tensor(2)], False),  # of a parameter
        (lambda: LOGITS.mean() + (SIGMAS[:4] * 1)[torch.tensor(2)], False),  # not of rows
    ],
)
def test_the_mean_of_one_selected_row_is_over_a_part(loss: Callable[[], torch.Tensor], over_a_part: bool) -> None:
    assert is_over_a_part(loss(), rows=6) == over_a_part
    assert not is_over_a_part(loss(), rows=1)


def test_a_mean_over_as_many_tasks_as_rows_of_a_masked_mean_over_rows_is_over_a_part() -> None:
    square = torch.randn(36, generator=GENERATOR, requires_grad=True).view(6, 6)
    mask = torch.rand(6, 6, generator=GENERATOR) < 0.5
    assert is_over_a_part(((square * mask).sum(0) / mask.sum(0).clamp(min=1)).mean(), rows=6)
    assert not is_over_a_part(((square * mask).sum(1) / mask.sum(1).clamp(min=1)).mean(), rows=6)


@pytest.mark.parametrize("rows", [4, 2, 1])
def test_ctc_loss_is_a_mean_over_rows_of_any_length(rows: int) -> None:
    lengths = torch.tensor([1, 5, 2, 3])[:rows]
    scores = torch.rand(9, rows, 8).requires_grad_().log_softmax(2)
    loss = ctc_loss(scores, torch.ones(rows, 5, dtype=torch.long), torch.full((rows,), 9), lengths)
    assert (is_over_a_part(loss, rows), odd_divisor(loss, rows), is_sum(loss, rows)) == (False, None, False)
    assert function_of_a_mean(loss, rows) == ""


SOME = (torch.arange(30).view(6, 5) % 3 > 0).float()
PER_ROW = SOME.clone()
PER_ROW[:3, 2:] = 0
"""A mask of which rows have unequal parts."""


@pytest.mark.parametrize(
    ("loss", "over_a_part"),
    [
        (lambda: (LOGITS.square() * SOME).mean() * (SOME.numel() / SOME.sum()), True),
        (lambda: 0.5 * (SOME.numel() / SOME.sum() * (LOGITS.square() * SOME).mean()), True),
        (lambda: (LOGITS.square() * SOME.bool()).mean() / SOME.mean().item(), True),
        (lambda: 0.1 * ((LOGITS.square() * SOME).mean() / SOME.mean().item()) + LOGITS.mean(), True),
        (lambda: (LOGITS.square() * SOME).mean() * (SOME.numel() / int(SOME.sum())) + TASKS[0].log(), True),
        (lambda: ((LOGITS.square() * PER_ROW).sum(1) / PER_ROW.sum(1).mean()).mean(), True),
        (lambda: (LOGITS.square() * PER_ROW).sum(1).mean() / PER_ROW.sum(1).mean().item(), True),
        (lambda: ((LOGITS.square() * PER_ROW).sum(-1) / PER_ROW.sum(-1).mean()).mean(), True),
        (lambda: (LOGITS.square() * PER_ROW).sum([-1], keepdim=True).mean() / PER_ROW.sum(1).mean().item(), True),
        (lambda: (LOGITS[:, :, None].expand(6, 5, 3).square() * SOME[..., None]).mean() / SOME.mean().item(), True),
        (lambda: (LOGITS.square() * SOME).mean() * 2, False),  # the zeros count
        (lambda: (LOGITS.square() * torch.ones(6, 5)).mean() / torch.ones(6, 5).mean().item(), False),
        (lambda: (LOGITS.square() * torch.arange(5.0)).mean() / 2, False),  # a weight for each column
        (lambda: (LOGITS.square() * SOME).sum(1).mean() / 5, False),
    ],
)
def test_a_mean_that_is_divided_by_the_mean_of_its_mask_is_over_a_part(
    loss: Callable[[], torch.Tensor], over_a_part: bool
) -> None:
    assert is_over_a_part(loss(), rows=6) == over_a_part


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("scale", [1.0, 0.5, torch.tensor(1.0), torch.tensor(4.0)])
def test_a_cross_entropy_with_shares_of_classes_as_labels_is_a_mean_over_rows(dim: int, scale: Any) -> None:
    shares = torch.rand(6, 5, generator=GENERATOR).softmax(1)
    each = (-shares * LOGITS.log_softmax(1)).sum(dim)
    assert not is_over_a_part(each.mean() * scale, rows=6)
    assert not is_over_a_part((each / scale).mean(), rows=6)


def test_a_mean_over_rows_of_such_means_of_each_row_is_a_mean_over_rows() -> None:
    each = [(LOGITS[i].square() * PER_ROW[i]).mean() / PER_ROW[i].mean().item() for i in range(6)]
    assert not is_over_a_part(sum(each) / 6, rows=6)
    assert not is_over_a_part(torch.stack(each).mean(), rows=6)


def test_a_mean_over_values_times_a_normalised_mask_is_over_a_part() -> None:
    some = torch.arange(LOGITS.numel()).view(LOGITS.shape) % 3 > 0
    assert is_over_a_part(_masked(some))
    assert is_over_a_part(0.5 * _masked(some), rows=len(LOGITS))
    assert not is_over_a_part(_masked(torch.ones_like(some)))
    assert not is_over_a_part((LOGITS.square() * some.float()).mean())  # the zeros count
    assert not is_over_a_part((LOGITS.square() * (torch.arange(5.0) / 2)).mean())  # not one weight per value
    for of_rows in (WEIGHTS / WEIGHTS.mean(), WEIGHTS / WEIGHTS.sum() * 6):
        assert is_over_a_part((EACH * of_rows).mean(), rows=6)
        assert is_over_a_part((LOGITS.square() * of_rows[:, None]).mean(), rows=6)
        assert is_over_a_part(binary_cross_entropy_with_logits(EACH, (TARGET > 0).float(), weight=of_rows), rows=6)
    assert is_over_a_part((EACH * WEIGHTS / WEIGHTS.mean()).mean(), rows=6)
    assert is_over_a_part((WEIGHTS * EACH / WEIGHTS.mean().clamp(min=1e-8)).mean(), rows=6)
    for temperature in (torch.tensor(0.07), torch.full((6,), 0.07)):
        assert not is_over_a_part((EACH * WEIGHTS / temperature).mean(), rows=6)
        assert not is_over_a_part((EACH / temperature).mean(), rows=6)
    assert not is_over_a_part((EACH * WEIGHTS).mean(), rows=6)
    assert not is_over_a_part(binary_cross_entropy_with_logits(EACH, (TARGET > 0).float(), weight=WEIGHTS), rows=6)
    assert not is_over_a_part(cross_entropy(LOGITS, TARGET.clamp(min=0), weight=CLASSES / CLASSES.mean()), rows=6)


@pytest.mark.parametrize(
    ("loss", "rows", "a_sum"),
    [
        (lambda: cross_entropy(LOGITS, TARGET) + 0.5 * LOGITS.square().sum(), 6, True),
        (lambda: cross_entropy(LOGITS, TARGET) + 0.5 * LOGITS.square().sum(), 4, False),  # of parameters, most likely
        (lambda: LOGITS.square().sum(), 4, True),
        (lambda: LOGITS.square().sum() / 4, 6, False),  # a count, most likely
        (lambda: 0.5 * LOGITS.square().sum(), 6, True),
        (lambda: LOGITS.square().sum() / 6, 6, False),
        (lambda: 0.1 * LOGITS.square().sum() / 30, 6, False),
        (lambda: torch.dot(EACH, WEIGHTS), 6, True),
        (lambda: EACH @ WEIGHTS + 0.1 * LOGITS.square().mean(), 6, True),
        (lambda: LOGITS[0] @ LOGITS[1] + LOGITS.square().mean(), 6, False),  # not as long as the batch
        (lambda: torch.vdot(EACH, WEIGHTS) / 6, 6, False),
        (lambda: torch.einsum("b,b->", EACH, WEIGHTS), 6, True),
        (lambda: torch.einsum("bt,bt->", LOGITS.square(), torch.ones(6, 5)), 6, True),
        (lambda: torch.einsum("bt,bt->", LOGITS.square(), torch.ones(6, 5)) / 30, 6, False),
        (lambda: torch.einsum("b->", EACH), 6, True),
        (lambda: EACH.sum(dim=0), 6, True),
        (lambda: LOGITS[:1].square().sum(1).mean(), 1, False),  # a mean over one row
        (lambda: LOGITS.square().mean(0).sum(), 6, False),  # of means over rows
        (lambda: (LOGITS.square().mean(0) * (-TASKS).exp() + TASKS).sum(), 6, False),
        (lambda: torch.dot(LOGITS.square().mean(dim=-2), torch.ones(5) / 5), 6, False),
        (lambda: LOGITS.square().mean(1).sum(), 6, True),
        (lambda: mse_loss(LOGITS, LOGITS.detach() + 1, reduction="sum") / 6 + LOGITS.mean(), 6, False),
    ],
)
def test_a_sum_over_rows_that_are_known_is_told_from_a_mean(
    loss: Callable[[], torch.Tensor], rows: int, a_sum: bool
) -> None:
    assert is_sum(loss(), rows) == a_sum


@pytest.mark.parametrize(
    "combined", [torch.sum, torch.mean, lambda losses: torch.dot(torch.tensor([0.2, 0.8]), losses)]
)
def test_what_combines_the_means_of_several_tasks_is_no_sum_or_mean_over_values(combined: Callable[..., Any]) -> None:
    tasks = torch.stack([mse_loss(LOGITS, LOGITS.detach() + 1), cross_entropy(LOGITS, TARGET.clamp(min=0))])
    made = Made.by(combined(TASKS[:2].exp() * tasks + TASKS[:2]), 6)
    assert not made.is_notable()


PARAMETER, BIAS = torch.ones(6, 5, requires_grad=True), torch.ones(6, requires_grad=True)  # as long as the batch


@pytest.mark.parametrize(
    "penalty",
    [
        lambda: PARAMETER.pow(2).sum(),
        lambda: (PARAMETER * PARAMETER).sum(),
        lambda: (PARAMETER - 1).abs().sum(),
        lambda: mse_loss(PARAMETER, torch.zeros(6, 5), reduction="sum"),
        lambda: PARAMETER.square().sum() + BIAS @ BIAS,
    ],
)
def test_a_sum_over_a_parameter_is_not_one_over_the_batch(penalty: Callable[[], torch.Tensor]) -> None:
    loss = mse_loss(LOGITS, LOGITS.detach() + 1) + 1e-4 * penalty()
    assert odd_divisor(loss, 6) is None
    assert not is_sum(loss, 6)
    assert not is_sum(loss - 1e-4 * penalty() + penalty(), 6)


CHOICES = torch.rand(6, 3, 5).requires_grad_()

PLACES = (TARGET >= 0).nonzero().squeeze(1)


@pytest.mark.parametrize(
    ("loss", "rows", "over_a_part"),
    [
        (lambda: LOGITS.square().mean(1)[PLACES].mean(), 6, True),
        (lambda: LOGITS.square().mean(1).index_select(0, PLACES).mean(), 6, True),
        (lambda: mse_loss(LOGITS[PLACES], LOGITS.detach()[PLACES] + 1), 6, True),
        (lambda: LOGITS[torch.arange(6), TARGET.clamp(min=0)].mean(), 6, False),  # one value per row
        (lambda: LOGITS.gather(1, TARGET.clamp(min=0)[:, None]).mean(), 6, False),
        (lambda: LOGITS.square().mean(1)[PLACES].mean(), None, False),
    ],
)
def test_a_mean_over_a_selection_by_index_is_over_a_part_unless_it_has_as_many_values_per_row(
    loss: Callable[[], torch.Tensor], rows: int | None, over_a_part: bool
) -> None:
    assert is_over_a_part(loss(), rows) == over_a_part


@pytest.mark.parametrize(
    ("loss", "rows", "divisor"),
    [
        (lambda: LOGITS.square().sum() / 6, 6, None),
        (lambda: 0.5 * LOGITS.square().sum() / 30, 6, None),
        (lambda: LOGITS.square().sum() / 6 / 5, 6, None),
        (lambda: LOGITS.square().sum() / 24, 6, 24),
        (lambda: cross_entropy(LOGITS[PLACES], LOGITS.detach()[PLACES].softmax(1)), 6, len(PLACES)),
        (lambda: cross_entropy(LOGITS, LOGITS.detach().softmax(1)), 6, None),
        (lambda: cross_entropy(LOGITS, LOGITS.detach().softmax(1)), 3, None),
        (lambda: LOGITS.square().sum() / 5, 6, 5),
        (lambda: EACH @ WEIGHTS / 4, 6, 4),
        (lambda: EACH.sum(0) / 6, 6, None),
        (lambda: cross_entropy(LOGITS, TARGET, reduction="sum") / 6, 6, None),
        (lambda: cross_entropy(LOGITS, TARGET, reduction="sum") / 4, 6, 4),
        (lambda: mse_loss(LOGITS, LOGITS.detach() + 1, reduction="sum") / 12 + LOGITS.mean(), 6, 12),
        (lambda: LOGITS.square().mean() / 24, 6, None),
        (lambda: LOGITS.square().sum(), 6, None),
        (lambda: EACH.mean() + 5 * LOGITS[PLACES].abs().sum() / len(PLACES), 6, len(PLACES)),
        (lambda: EACH.mean() + l1_loss(LOGITS[PLACES], torch.zeros(4, 5), reduction="sum") / 20, 6, 20),
        (lambda: EACH.mean() + LOGITS.softmax(1).mean(0).sum() / 5, 6, None),  # of means over rows
        (lambda: EACH.mean() + torch.ones(4, 5, requires_grad=True).abs().sum() / 4, 6, None),  # of a parameter
        (lambda: EACH.mean() + torch.cat([LOGITS[row][:3] for row in range(5)]).abs().sum() / 15, 6, 15),
        (lambda: EACH.mean() + (PARAMETER @ PARAMETER.T)[:4].square().sum() / 4, 6, None),
        (lambda: EACH.mean() + torch.nn.Linear(2, 3)(torch.ones(101, 2)).square().sum() / 101, 6, None),
        (
            lambda: sum((each[: 1 + n % 4].abs().sum() / (1 + n % 4) for n, each in enumerate(LOGITS)), ZERO) / 6,
            6,
            None,
        ),
    ],
)
def test_a_sum_that_is_divided_by_something_else_than_its_rows_is_seen(
    loss: Callable[[], torch.Tensor], rows: int, divisor: float | None
) -> None:
    assert odd_divisor(loss(), rows) == divisor


@pytest.mark.parametrize("scaled", [1, 2.0])
def test_a_loss_that_no_operation_computed_is_no_mean_of_anything(scaled: float) -> None:
    assert not Made.by(scaled * torch.zeros((), requires_grad=True), 6).is_notable()


def focused(loss: torch.Tensor) -> torch.Tensor:
    """The focal loss of cross-entropies."""
    return (1 - torch.exp(-loss)) ** 2 * loss


def free_bits(limited: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A loss with a term that is a function of a mean over the batch, which is about 1."""
    return EACH.mean() + limited(LOGITS.square().mean(1).mean())


@pytest.mark.parametrize(
    ("loss", "rows", "function"),
    [
        (lambda: mse_loss(LOGITS, LOGITS.detach() + 1).sqrt(), 6, "Sqrt"),
        (lambda: 0.5 * (LOGITS.square().mean() + 1e-8) ** 0.5 + BIAS.square().sum(), 6, "Pow"),
        (lambda: 1 / EACH.mean(), 6, "Reciprocal"),
        (lambda: mse_loss(LOGITS, LOGITS.detach() + 1).log1p(), 6, "Log1P"),
        (lambda: -(EACH.sum() / 6).log(), 6, "Log"),
        (lambda: cross_entropy(LOGITS, TARGET).exp(), 6, "Exp"),
        (lambda: EACH.mean(0).sqrt(), 6, "Sqrt"),
        (lambda: ((EACH * WEIGHTS).sum() / WEIGHTS.sum()).sqrt(), 6, "Sqrt"),
        (lambda: focused(cross_entropy(LOGITS, TARGET.clamp(min=0))), 6, "Exp"),
        (lambda: focused(cross_entropy(LOGITS, TARGET.clamp(min=0), reduction="none")).mean(), 6, ""),
        (lambda: -10 * torch.log10(1 / LOGITS.square().mean()), 6, "Reciprocal"),
        (lambda: (LOGITS.square().mean() - 0.1).abs() + 0.1, 6, "Abs"),
        (lambda: LOGITS.square().mean() * (1 + EACH.mean()), 6, "Mul"),
        (lambda: LOGITS.square().mean(0).clamp(min=0.1).sum(), 6, "Clamp"),
        (lambda: LOGITS.square().mean().clamp(max=100.0), 6, ""),  # a guard
        (lambda: LOGITS.square().mean().clamp(min=1e-6), 6, ""),
        (lambda: free_bits(lambda kl: kl.clamp(min=0.5)), 6, "Clamp"),
        (lambda: free_bits(lambda kl: kl.clamp_min(0.5)), 6, "ClampMin"),
        (lambda: free_bits(lambda kl: kl.clamp(min=torch.tensor(0.5))), 6, "Clamp"),
        (lambda: free_bits(lambda kl: kl.clamp_max(1.5)), 6, "ClampMax"),
        (lambda: free_bits(torch.nn.functional.hardtanh), 6, "Hardtanh"),
        (lambda: free_bits(torch.nn.functional.elu), 6, "Elu"),
        (lambda: free_bits(lambda kl: torch.nn.functional.threshold(kl, 0.1, 0.1)), 6, "Threshold"),
        (lambda: free_bits(lambda kl: torch.where(kl > 1e3, kl, 1e3)), 6, "Where"),
        (lambda: free_bits(lambda kl: torch.where(kl > 1e3, kl, EACH.mean())), 6, "Where"),
        (lambda: free_bits(lambda kl: torch.where(kl.isnan(), 0.0, kl)), 6, ""),  # a guard
        (lambda: torch.where(LOGITS > 0, LOGITS, 0.0).mean(), 6, ""),
        (lambda: torch.where(LOGITS.square().mean(0) > 1e3, LOGITS.square().mean(0), 1e3).sum(), 6, "Where"),
        (lambda: EACH.mean() + mse_loss(LOGITS.mean(0), torch.zeros(5)), 6, "MseLoss"),
        (lambda: torch.stack([EACH.mean(), LOGITS.mean()]).max(), 6, "Max"),
        (lambda: EACH.mean() - (LOGITS.softmax(1).mean(0).log() * 0.2).sum(), 6, "Log"),
        (lambda: (LOGITS.square().mean(0) * (-TASKS).exp() + TASKS).sum(), 6, ""),  # linear in the means
        (lambda: LOGITS.square().mean(1).sqrt().mean(), 6, ""),
        (lambda: LOGITS[:1].square().mean(1).sqrt().mean(), 1, ""),
        (lambda: LOGITS[:1].square().mean().sqrt(), 1, ""),  # the mean over rows is that over one such value per row
        (lambda: LOGITS.square().mean().sqrt(), None, ""),
        (lambda: sum((each.square().mean().sqrt() for each in LOGITS), torch.zeros(())) / 6, 6, ""),
        (lambda: EACH.mean() + (PARAMETER.square().sum().sqrt() + BIAS.mean().exp()), 6, ""),
        (lambda: EACH.mean() * (-torch.ones((), requires_grad=True)).exp(), 6, ""),  # linear in the mean
        (lambda: torch.linalg.norm(LOGITS - 1), 6, "LinalgVectorNorm"),
        (lambda: EACH.mean() + 0.1 * torch.dist(LOGITS, torch.ones(6, 5)), 6, "Dist"),
        (lambda: 1 - cosine_similarity(EACH, WEIGHTS, dim=0), 6, "LinalgVectorNorm"),
        (lambda: EACH.mean() / EACH.std(), 6, "Std"),
        (lambda: (LOGITS.var(0) - 1).mean(), 6, "Var"),
        (lambda: EACH.median(), 6, "Median"),
        (lambda: EACH.logsumexp(0) - EACH.mean(), 6, "Logsumexp"),
        (lambda: torch.linalg.norm(LOGITS - 1) ** 2 / 6, 6, ""),  # a sum of squares
        (lambda: (norm := torch.linalg.norm(LOGITS - 1)) * norm / 6, 6, ""),
        (lambda: (LOGITS.sigmoid() ** LOGITS.detach()).mean() + (2**-EACH).mean(), 6, ""),
        (lambda: (EACH ** torch.tensor([1.0, 2.0] * 3)).mean() * torch.ones(()) ** SCALE, 6, ""),
        (lambda: (1 - cosine_similarity(LOGITS, LOGITS.detach() + 1)).mean(), 6, ""),
        (lambda: LOGITS.norm(dim=-1).mean() + LOGITS.std(1).mean() + LOGITS.logsumexp(1).mean(), 6, ""),
        (lambda: EACH.mean() + PARAMETER.norm() + BIAS.std(), 6, ""),
        (lambda: logsigmoid(torch.einsum("bd,bkd->bk", LOGITS, CHOICES)).mean(), 6, ""),  # a product within each row
        (lambda: logsigmoid((CHOICES @ LOGITS[..., None])[..., 0]).sum(1).mean(), 6, ""),
        (lambda: EACH.mean(), 6, ""),
        (lambda: EACH.mean() + (EACH.sum() * torch.ones(0)).clamp(min=0).sum(), 6, "Clamp"),  # of no element
    ],
)
def test_a_function_of_a_mean_is_told_from_a_mean_of_functions(
    loss: Callable[[], torch.Tensor], rows: int | None, function: str
) -> None:
    assert function_of_a_mean(loss(), rows) == function


def looped(chosen: list[int], length: Callable[[int], int] = lambda row: 5) -> torch.Tensor:
    """The sum of a loss of each of the chosen rows, over its first values."""
    total = torch.zeros(())
    for row in chosen:
        total = total + LOGITS[row][: length(row)].square().mean()
    return total


def summed(lengths: list[int]) -> torch.Tensor:
    values = [each[:length].abs().sum() for each, length in zip(LOGITS, lengths, strict=True)]
    return sum(values, torch.zeros(()))


@pytest.mark.parametrize(
    ("loss", "rows", "over_a_part", "sums"),
    [
        (lambda: looped([0, 2, 3]) / 3, 6, True, False),
        (lambda: looped([0, 2, 3]) / 2 + EACH.mean(), 6, True, False),
        (lambda: looped([0, 2, 3]) / 6 + EACH.mean(), 6, False, False),  # those that are left out count as zero
        (lambda: looped([4]) / 3 + EACH.mean(), 6, False, False),  # such as the state of the last layer
        (lambda: sum(((-each).exp() * EACH.mean() + each for each in BIAS), ZERO), 6, False, False),  # of a parameter
        (lambda: (pair := torch.stack([EACH.mean(), LOGITS.mean()]))[0] + pair[1], 2, False, False),
        (lambda: summed([1, 2, 3, 4, 5, 4]) / 19, 6, True, False),
        (lambda: looped(list(range(6))) / 6, 6, False, False),
        (lambda: 0.5 * looped(list(range(6)), lambda row: 1 + row % 5) / 6 + EACH.mean(), 6, False, False),
        (lambda: summed([5] * 6) / 30, 6, False, False),
        (lambda: looped(list(range(6))), 6, False, True),
        (lambda: torch.stack([LOGITS[4].mean()]).mean(), 6, True, False),
        (lambda: torch.cat([LOGITS[4].mean().reshape(1)]).mean(), 6, True, False),
        (lambda: looped([4]) / 1, 6, True, False),
        (lambda: sum((LOGITS[row : row + 1].mean() for row in (0, 2)), ZERO) / 2, 6, True, False),
        (lambda: sum((LOGITS[row : row + 1].mean() for row in range(6)), ZERO) / 6, 6, False, False),
        (lambda: sum((each.mean() for each in LOGITS.split(1)[2:]), ZERO) / 4, 6, True, False),
        (lambda: sum((each.mean() for each in LOGITS.split(2)[1:]), ZERO) / 2, 6, False, False),
        (lambda: LOGITS[4].mean(), 6, False, False),  # such as the state of the last layer
        (lambda: torch.stack([LOGITS[0].mean()]).mean(), 1, False, False),
        (lambda: looped([0]), 1, False, False),
        (lambda: looped([0, 1, 2]) / 3, 4, False, False),  # these are no rows
    ],
)
def test_a_loop_over_rows_that_leaves_some_out_is_over_a_part(
    loss: Callable[[], torch.Tensor], rows: int, over_a_part: bool, sums: bool
) -> None:
    assert (is_over_a_part(loss(), rows), is_sum(loss(), rows)) == (over_a_part, sums)


class Constant(TrainModule):
    """Divides by the rows of a whole batch, whatever the batch."""

    def __init__(self, divisor: int) -> None:
        super().__init__()
        self.layer, self.divisor = torch.nn.Linear(5, 1), divisor

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().sum() / self.divisor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("rows", "divisor", "noted"), [(8, 4, False), (8, 8, True), (10, 4, True)])
def test_a_constant_in_the_place_of_the_rows_gets_a_note(
    rows: int, divisor: int, noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(max_epochs=2, gradient_accumulation_steps=2, progress=False)
    trainer.fit(Constant(divisor), torch.ones(rows, 5), batch_size=4)
    assert capsys.readouterr().err.count(f"the loss divides a sum over its batch by {divisor}, but") == noted


class Root(Constant):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).square().mean().sqrt()


@pytest.mark.parametrize(("batch_size", "accumulation"), [(8, 1), (4, 2)])
def test_the_root_of_a_mean_gets_a_note_if_an_update_has_several_micro_batches(
    batch_size: int, accumulation: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(max_epochs=2, gradient_accumulation_steps=accumulation, progress=False)
    trainer.fit(Root(1), torch.ones(16, 5), batch_size=batch_size)
    noted = capsys.readouterr().err.count(
        "the loss is, or contains, a non-linear function (Sqrt) of a mean over its batch"
    )
    assert noted == accumulation - 1


MEASURED = torch.tensor([[0.0, torch.nan], [1.0, 2.0], [torch.nan, 0.5]])
OUTPUTS = torch.zeros(6, requires_grad=True).view(3, 2)


LABELLED = TARGET != -100


def focal(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = cross_entropy(logits, target, reduction="none")
    return ((1 - (-each).exp()).square() * each).mean()


@pytest.mark.parametrize(
    ("loss", "part"),
    [
        (lambda: mse_loss(OUTPUTS[~MEASURED.isnan()], MEASURED[~MEASURED.isnan()]), "a mean over a part of its batch"),
        (lambda: OUTPUTS.mean() + OUTPUTS[MEASURED > 0].square().sum() / (MEASURED > 0).sum(), "a mean over a part"),
        (lambda: mse_loss(LOGITS[torch.arange(6), TARGET.clamp(min=0)], torch.ones(6)), ""),
        (lambda: mse_loss(LOGITS.flatten()[:20], torch.ones(20)), "the loss is a mean over 20 values for 6 rows"),
        (lambda: LOGITS.flatten()[:20].abs().mean() * 0.5, "the loss is a mean over 20 values for 6 rows"),
        (lambda: LOGITS.square().mean() + LOGITS.flatten()[:20].abs().mean(), ""),  # the second may be a penalty
        (lambda: cross_entropy(LOGITS, TARGET.clamp(min=0), weight=CLASSES) + LOGITS.square().mean(), "class weights"),
        (lambda: cross_entropy(LOGITS, TARGET.clamp(min=0), weight=CLASSES, label_smoothing=0.1), "class weights"),
        (lambda: 0.5 * cross_entropy(LOGITS, TARGET) + LOGITS.square().mean(), "that counts 4 of 6 labels"),
        (lambda: cross_entropy(LOGITS, TARGET.clamp(min=0)) + LOGITS.square().mean(), ""),
        (
            lambda: cross_entropy(LOGITS, TARGET.clamp(min=0), label_smoothing=0.1),
            "",
        ),  # whose other term is divided by a tensor
        (lambda: cross_entropy(LOGITS, TARGET, label_smoothing=0.1), "that counts 4 of 6 labels"),
        (lambda: cross_entropy(LOGITS[LABELLED], TARGET[LABELLED]) + LOGITS.square().mean(), "of 4 labels for 6 rows"),
        (lambda: focal(LOGITS[LABELLED], TARGET[LABELLED]), "a mean over a part of its batch"),
        (lambda: focal(LOGITS, TARGET.clamp(min=0)), ""),
        (lambda: mse_loss(OUTPUTS.repeat(2, 1)[LABELLED] @ torch.ones(2, 1), torch.ones(4, 1)), "a mean over a part"),
        (lambda: LOGITS.square().mean() + torch.ones(5, requires_grad=True).mean(), ""),  # a penalty
    ],
)
def test_a_term_that_is_a_mean_over_something_else_than_rows_is_seen(
    loss: Callable[[], torch.Tensor], part: str
) -> None:
    text = Made.by(loss(), 6).part()
    assert part in text if part else not text


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
    output = capsys.readouterr().err
    assert output.count("not a plain cross-entropy (it comes from Add), so this loss is weighted by") == 1
    assert output.count("validation_step does not return a plain cross-entropy") == 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "changes",
            "not as a plain cross-entropy (it comes from Add), but before as a plain cross-entropy, which weighs the labels that it c",
        ),
        (
            "gives at last",
            "returned its loss with a weight, but before as a plain cross-entropy, which weighs the labels that it c",
        ),
    ],
)
def test_a_step_that_changes_what_its_loss_weighs_is_refused(kind: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        fit(Tagger(kind), gradient_accumulation_steps=2)
    assert message in str(caught.value)


class Changing(Tagger):
    """The kinds of losses that a curriculum may have, one for each batch."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.kinds = kinds

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        loss, kind = self.loss(batch), self.kinds[batch_idx]
        if kind == "r":
            return loss + self.layer.weight.square().sum()
        return loss if kind == "c" else {"loss": loss, "weight": 5}


@pytest.mark.parametrize("kinds", ["ccrr", "crcr", "rrgg", "gcgr", "ccgg", "rcgg"])
def test_losses_of_several_kinds_train_as_by_hand_where_each_is_an_update(
    kinds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, by_hand = Changing(kinds), Changing(kinds)
    fit(module)
    optimizer = by_hand.configure_optimizers()
    for number in range(4):
        batch = torch.utils.data.default_collate(tokens()[2 * number : 2 * number + 2])
        returned = by_hand.training_step(batch, number)
        (returned["loss"] if isinstance(returned, dict) else returned).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(module.layer.weight, by_hand.layer.weight, rtol=1e-6, atol=1e-6)
    assert "Here each update is made of one batch in one process, so the updates are right" in capsys.readouterr().err


def test_a_batch_that_does_not_show_its_rows_gets_that_error_alone(capsys: pytest.CaptureFixture[str]) -> None:
    class Opaque:
        values = torch.ones(2)

    class Sums(Tagger):
        def training_step(self, batch: Opaque, batch_idx: int) -> Any:
            return self.layer(batch.values).square().mean()

    with pytest.raises(ConfigurationError, match="cannot tell how many rows a batch of type Opaque has"):
        Trainer(max_steps=1, progress=False).fit(Sums(), iter([Opaque(), Opaque()]))
    assert "Here each update" not in capsys.readouterr().err


class Later(Tagger):
    """Gives a sum of terms instead of a plain cross-entropy from the second epoch on."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        return self.with_penalty(batch, self.trainer.epoch)

    def with_penalty(self, batch: dict[str, torch.Tensor], factor: float) -> torch.Tensor:
        loss = self.loss(batch)
        return loss + self.layer.weight.square().sum() if factor else loss


def test_a_resumed_run_may_begin_with_losses_that_weigh_something_else(tmp_path: Path) -> None:
    module, by_hand = Later(), Later()
    for epochs in (1, 2):
        trainer = Trainer(max_epochs=epochs, run_dir=tmp_path, seed=0, progress=False)
        trainer.fit(module, tokens(), batch_size=2, shuffle=False)
    optimizer = by_hand.configure_optimizers()
    for epoch in range(2):
        for first in range(0, 8, 2):
            batch = torch.utils.data.default_collate(tokens()[first : first + 2])
            by_hand.with_penalty(batch, epoch).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(module.layer.weight, by_hand.layer.weight)


class PlainAtLast(Later):
    """Gives a plain cross-entropy from the second epoch on, and a sum of terms before."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        return self.with_penalty(batch, self.trainer.epoch == 0)


def test_losses_weigh_rows_to_the_end_if_they_did_at_first_also_after_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(run_dir: Path, *epochs: int) -> torch.Tensor:
        for each in epochs:
            module = PlainAtLast()
            trainer = Trainer(
                max_epochs=each, run_dir=run_dir, seed=0, progress=False, gradient_accumulation_steps=2, log_every=1
            )
            trainer.fit(module, tokens(), batch_size=2, shuffle=False)
        return module.layer.weight

    whole = train(tmp_path / "whole", 2)
    assert capsys.readouterr().err.count("so this loss is weighted by the number of rows") == 1
    torch.testing.assert_close(train(tmp_path / "resumed", 1, 2), whole, rtol=0, atol=0)
    assert "earlier losses were not plain cross-entropies, so this loss is weighted by" in capsys.readouterr().err


def test_the_note_about_a_sum_over_labels_divided_by_the_rows_does_not_tell_of_earlier_losses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Sums(Tagger):
        def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            logits, labels = self.layer(batch["x"]).flatten(0, 1), batch["labels"]
            return cross_entropy(logits, labels.flatten(), reduction="sum") / len(labels)

    fit(Sums(), gradient_accumulation_steps=2)
    output = capsys.readouterr().err
    assert "not a plain cross-entropy (it comes from NllLoss)" in output
    assert "earlier losses" not in output


def test_one_micro_batch_in_one_process_is_trained_to_the_last_bit_as_by_hand() -> None:
    module, by_hand = Tagger(), Tagger()
    fit(module)
    optimizer = by_hand.configure_optimizers()
    for start in range(0, 8, 2):
        by_hand.loss(torch.utils.data.default_collate(tokens()[start : start + 2])).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(module.layer.weight, by_hand.layer.weight)


@pytest.mark.parametrize("name", ["labels", "targets", None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "masked"])
def test_a_loss_that_may_not_be_a_mean_over_rows_is_noted(
    name: str | None, reduction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Noted(Tagger):
        def training_step(self, batch: Any) -> torch.Tensor:
            x, labels = (batch["x"], batch[name]) if name else batch
            logits = self.layer(x).flatten(0, 1)
            if reduction == "masked":
                return cross_entropy(logits, labels.flatten(), reduction="none")[labels.flatten() >= 0].mean()
            return cross_entropy(
                logits, labels.flatten(), reduction=reduction, label_smoothing=0.1 * (reduction == "mean")
            )

    rows: Any = [(row["x"], row["labels"]) for row in tokens()]
    rows = [{"x": x, name: labels} for x, labels in rows] if name else rows
    Trainer(max_epochs=1, progress=False).fit(Noted(), rows, batch_size=2)
    noted = capsys.readouterr().err
    if reduction == "sum":
        assert "the loss is, or contains, a sum over the batch (its last operation is NllLoss)" in noted
    else:
        assert (
            "a batch holds whole numbers of the shape (2, 6), several per row, and the loss is not a plain cross-entropy"
            in noted
        )


class Columns(TrainModule):
    """A mean over one value per row, from several whole numbers per row, as of categorical columns or of the tokens of a text."""

    def __init__(self, per_token: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(5, 1)
        self.per_token = per_token

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self.embedding(x.flatten()[:, None]).view(x.shape) if self.per_token else self.embedding(x)
        return binary_cross_entropy_with_logits(logits, y[:, None].expand_as(logits))

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.training_step(batch), "positive": batch[1].mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("per_token", [False, True])
def test_a_mean_over_one_value_per_row_gets_no_note_whatever_else_the_batch_holds(
    per_token: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(torch.arange(row, row + 3) % 5, torch.tensor(float(row % 2))) for row in range(16)]
    Trainer(max_epochs=1, progress=False).fit(Columns(per_token), rows, rows, batch_size=4)
    assert capsys.readouterr().err.count("several per row") == (2 if per_token else 0)


@pytest.mark.parametrize(("batch_size", "per_token"), [(1, False), (1, True), (4, False), (4, True)])
def test_a_mean_over_the_one_value_of_a_batch_of_one_row_gets_no_note(
    batch_size: int, per_token: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Squares(Columns):
        def training_step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            logits = self.embedding(x.flatten()[:, None]).view(x.shape) if self.per_token else self.embedding(x)
            return (logits - y[:, None]).square().mean()

    rows = [(torch.arange(row, row + 3) % 5, torch.tensor(float(row % 2))) for row in range(17)]
    trainer = Trainer(max_epochs=1, progress=False, gradient_accumulation_steps=2)
    trainer.fit(Squares(per_token), rows, batch_size=batch_size, shuffle=False)
    assert capsys.readouterr().err.count("several per row") == per_token


def test_a_stack_of_one_number_per_row_is_a_mean_or_sum_over_rows() -> None:
    def stacked() -> torch.Tensor:
        return torch.stack([values[: number + 1].mean() for number, values in enumerate(LOGITS.unbind())])

    def masked() -> torch.Tensor:
        return torch.stack([values[values > -9].mean() for values in LOGITS.unbind()])

    assert not is_over_a_part(masked().mean(), 6)
    assert is_over_a_part(masked().mean(), 4)
    assert is_sum(stacked().sum(), 6)
    assert not is_sum(stacked().sum(), 4)


def test_images_are_no_labels(capsys: pytest.CaptureFixture[str]) -> None:
    class Encoder(Columns):
        def training_step(self, batch: Any) -> torch.Tensor:
            return mse_loss(self.embedding.weight.mean() * batch[0] / 255, batch[0] / 255)

    rows = [(torch.full((3, 2, 2), row, dtype=torch.uint8), torch.tensor(1.0)) for row in range(16)]
    Trainer(max_epochs=1, progress=False).fit(Encoder(False), rows, rows, batch_size=4)
    assert "several per row" not in capsys.readouterr().err


def test_metrics_without_the_weight_of_their_batch_get_no_note(capsys: pytest.CaptureFixture[str]) -> None:
    class Counts(Tagger):
        def validation_step(self, batch: Any) -> None:
            labels = batch["labels"] >= 0
            self.log("labels", labels.sum(), reduce="sum")
            self.log("share", labels.float().mean(), weight=labels.numel())

    Trainer(max_epochs=1, progress=False).fit(Counts(), tokens(), tokens(), batch_size=2)
    assert "several per row" not in capsys.readouterr().err


def test_a_loss_over_a_part_of_numbers_is_noted_and_a_plain_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    class Masked(Tagger):
        def training_step(self, batch: Any) -> torch.Tensor:
            error = (self.layer(batch[0]) - batch[1]).square()
            mask = batch[1] > 0
            return error.mean() if self.kind == "plain" else (error * mask).sum() / mask.sum().clamp(min=1)

    rows = [(torch.ones(2), torch.full((3,), row - 2.0)) for row in range(4)]
    for kind in ("plain", "masked"):
        Trainer(max_steps=1, progress=False).fit(Masked(kind), rows, batch_size=2)
        assert ("a mean over a part of its batch" in capsys.readouterr().err) == (kind == "masked")


@pytest.mark.parametrize("weight", [-1, -1.0, torch.tensor(-2.0)])
def test_a_negative_weight_is_refused(weight: Any) -> None:
    class Negative(Tagger):
        def training_step(self, batch: Any) -> Any:
            return {"loss": self.loss(batch), "weight": weight}

    with pytest.raises(ConfigurationError, match="a step returned the weight -"):
        fit(Negative())


@pytest.mark.parametrize("later", [1, 3])
def test_a_weight_that_becomes_negative_is_refused_at_the_next_log_boundary(later: int) -> None:
    class Negative(Tagger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "weight": torch.tensor(1.0 - 2 * (batch_idx == later))}

    with pytest.raises(
        ConfigurationError,
        match="'loss' has the weight -1; a weight cannot be negative; give the number of items that the mean was taken over",
    ):
        fit(Negative(), log_every=4)


def test_a_weight_of_one_element_is_a_number() -> None:
    class One(Tagger):
        def training_step(self, batch: Any) -> Any:
            return {"loss": self.loss(batch), "weight": (batch["labels"] != -100).sum().reshape(1)}

    one, plain = One(), Tagger()
    fit(one, gradient_accumulation_steps=2)
    fit(plain, gradient_accumulation_steps=2)
    torch.testing.assert_close(one.layer.weight, plain.layer.weight)
    with pytest.raises(ConfigurationError, match=r"a weight of shape \(2,\); return one number"):
        fit(
            type("Two", (Tagger,), {"training_step": lambda self, b: {"loss": self.loss(b), "weight": torch.ones(2)}})()
        )


@pytest.mark.parametrize("weight", [0, torch.tensor(0.0)])
def test_an_update_of_the_weight_0_gets_a_note_that_the_optimizer_makes_it(
    weight: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error for a step that returns nothing offered the weight 0 to leave a batch out, but momentum still changed the weights."""

    class LeavesOut(Tagger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "weight": 1 if batch_idx in without else weight}

    for without, noted in ((range(4), 0), ((0, 2), 0), ((0, 1), 1)):
        fit(LeavesOut(), gradient_accumulation_steps=2)
        errors = capsys.readouterr().err
        assert errors.count("all losses of the update after step 1 have the weight 0") == noted, without


def test_an_update_without_labels_gets_a_note_and_changes_what_a_loop_by_hand_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class NoLabels(Tagger):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.loss(batch if batch_idx != 1 else batch | {"labels": torch.full_like(batch["labels"], -100)})
            losses.append(loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

        def on_step(self) -> None:
            weights.append(self.layer.weight.detach().clone())

    losses: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []
    fit(NoLabels())
    assert capsys.readouterr().err.count("all losses of the update after step 1 have the weight 0, or no label") == 1
    assert [bool(loss.isnan()) for loss in losses[:3]] == [False, True, False]
    # momentum alone: v = 0.9 * v + weight_decay * w
    begun = NoLabels().layer.weight.detach()
    velocity = (begun - weights[0]) / 0.1
    torch.testing.assert_close(weights[1], weights[0] - 0.1 * (0.9 * velocity + 0.1 * weights[0]))


class Dropping(Tagger):
    """Trains on the mean over the rows that its collate_fn leaves."""

    def training_step(self, batch: Any) -> torch.Tensor:
        return (self.layer(batch[0]) - batch[1])[:, 0].square().mean()

    def validation_step(self, batch: Any) -> Any:
        return {"loss": self.training_step(batch)}


def _drop(rows: list[Any]) -> Any:
    return torch.utils.data.default_collate([row for row in rows if row[1][0] != 2])


@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 4), (4, 2), (8, 1)])
def test_rows_that_a_collate_fn_drops_weigh_nothing(
    batch_size: int, accumulation: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(torch.full((2,), row / 8), torch.full((3,), float([0, 2, 1, 2, 2, 1, 0, 1][row]))) for row in range(8)]
    module = Dropping()
    trainer = Trainer(max_epochs=1, progress=False, gradient_accumulation_steps=accumulation)
    metrics = trainer.fit(module, rows, rows, batch_size=batch_size, collate_fn=_drop, shuffle=False).metrics
    by_hand, whole = Dropping(), _drop(rows)
    optimizer = by_hand.configure_optimizers()
    by_hand.training_step(whole).backward()
    optimizer.step()
    torch.testing.assert_close(module.layer.weight, by_hand.layer.weight)
    with torch.no_grad():
        assert metrics["val_loss"] == pytest.approx(float(by_hand.training_step(whole)), rel=1e-5)
    assert "the loss is a mean over" not in capsys.readouterr().err


def test_an_evaluation_means_over_rows_what_is_one_number_per_row() -> None:
    class Exact(Tagger):
        def validation_step(self, batch: Any) -> Any:
            logits = self.layer(batch["x"])
            return {
                "loss": self.loss(batch),
                "first": logits[:, 0, 0].mean(),
                "least": logits.flatten(1).amin(1).mean(),
            }

    module = Exact()
    metrics = Trainer(progress=False).validate(module, tokens(), batch_size=3)
    with torch.no_grad():
        logits = module.layer(torch.stack([row["x"] for row in tokens()]))
    assert metrics["val_first"] == pytest.approx(float(logits[:, 0, 0].mean()), abs=1e-6)
    assert metrics["val_least"] == pytest.approx(float(logits.flatten(1).amin(1).mean()), abs=1e-6)


class Nodes(TrainModule):
    """Graphs of one to four nodes; the loss is a mean over the nodes of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.layer(batch["nodes"]), batch["targets"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def graphs(rows: list[int]) -> dict[str, Any]:
    nodes = sum(rows)
    return {"sizes": torch.tensor(rows), "nodes": torch.randn(nodes, 2), "targets": torch.randn(nodes, 1)}


@pytest.mark.parametrize(
    "sizes", [[2, 2, 4, 4, 1, 2, 3, 3], [1, 2, 2, 2, 3, 3, 4, 4], [2] * 12 + [1, 2], [1, 2] + [2] * 6]
)
@pytest.mark.parametrize("split", [1, 2, 4])
def test_a_mean_over_nodes_gets_one_note_although_one_batch_is_a_multiple_of_its_rows(
    sizes: list[int], split: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(max_epochs=2, progress=False, global_batch_size=2 * split).fit(
        Nodes(), sizes, batch_size=2, shuffle=False, collate_fn=graphs
    )
    assert capsys.readouterr().err.count("values for 2 rows and the loss is not a plain cross-entropy") == 1


def test_a_mean_over_nodes_gets_no_note_where_all_rows_have_as_many(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(max_epochs=2, progress=False).fit(Nodes(), [2] * 8, batch_size=2, shuffle=False, collate_fn=graphs)
    assert "note: the loss" not in capsys.readouterr().err


@pytest.mark.parametrize("scale", ["labels per row", "labels", "none", "constant", "ramp"])
def test_a_cross_entropy_scaled_by_its_number_of_labels_is_noted(
    scale: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Scaling(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = torch.nn.Linear(5, 4), 0

        def training_step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            self.calls += 1
            labels = (y != -100).sum().item()
            factors = {"labels per row": labels / len(y), "labels": labels, "none": 1, "constant": 0.5}
            loss = cross_entropy(self.layer(x).transpose(1, 2), y)
            return loss * factors.get(scale, self.calls**2 / 10)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    y = torch.arange(12)[:, None].expand(12, 6) % 4
    y = torch.where(torch.arange(6) < torch.arange(12)[:, None] // 2 + 1, y, -100)
    rows = torch.utils.data.TensorDataset(torch.randn(12, 6, 5, generator=GENERATOR), y)
    trainer = Trainer(max_epochs=1, seed=0, progress=False, gradient_accumulation_steps=2)
    trainer.fit(Scaling(), rows, batch_size=2, shuffle=False)
    noted = capsys.readouterr().err.count("the loss is a cross-entropy scaled by a number that changes")
    assert noted == scale.startswith("labels")
