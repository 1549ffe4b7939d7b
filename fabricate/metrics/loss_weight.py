"""The weight of a loss, if torch knows it: the labels that a cross-entropy counts, after any shift and with any class weights.

It is read from the autograd graph; in an evaluation there is none, see `step_record`. Nothing waits for the device. Must not know: modules,
batches, the loop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fabricate.metrics.loss_graph import is_mean_cross_entropy, is_of_one_row, origin_of, parts_of


class Counted(NamedTuple):
    """The items over which the mean of a cross-entropy was taken, as 0-dim device tensors: `weight`, by which the sum was divided, and the
    number of `labels` that counted. They differ only with class weights."""

    weight: torch.Tensor
    labels: torch.Tensor


def counted(loss: torch.Tensor) -> Counted | None:
    """The items over which `loss` is a mean, if it is a cross-entropy (or nll_loss) with reduction="mean", possibly scaled by a number.
    Call it before backward. None for any other loss: a sum of terms, label smoothing, a compiled or hand-written kernel."""
    node = origin_of(loss)
    if not is_mean_cross_entropy(node):
        return None
    classes = node._saved_weight
    weight: torch.Tensor = node._saved_total_weight
    if classes is None and weight.dtype not in (torch.bfloat16, torch.float16):  # 16-bit floats cannot hold every count
        return Counted(weight, weight)
    ignored = node._saved_ignore_index
    return count_labels(node._saved_target, classes, ignored if ignored < 2**63 else ignored - 2**64)


def terms_over_labels(loss: torch.Tensor, rows: int | None = None) -> list[tuple[bool, torch.Tensor, int]]:
    """For each cross-entropy among the parts of `loss`: whether it has class weights, the number or total weight of the labels that it
    counted (0-dim, on the device), and the number of all labels. Without those of single rows of a batch of `rows` rows."""
    terms = []
    for node in parts_of(loss, rows):
        if is_mean_cross_entropy(node) and not (rows and is_of_one_row(node, rows)):
            terms.append(
                (node._saved_weight is not None, node._saved_total_weight.detach(), node._saved_target.numel())
            )
    return terms


def count_labels(target: torch.Tensor, classes: torch.Tensor | None, ignored: int) -> Counted:
    """The labels in `target` (integers of any shape) other than `ignored`, and their weight by `classes` (one per class) if it is given."""
    counts = target != ignored
    labels = counts.sum()
    if classes is None:
        return Counted(labels, labels)
    each = classes.float()[target.clamp(0, len(classes) - 1)]
    return Counted(torch.where(counts, each, 0.0).sum(), labels)
