"""The autograd graph of a loss: the operations that computed it, from the last one down, past those that only scale, copy or add up.

An operation is a node of the graph. It is recognised by its name and its saved fields; torch has no public way. Nothing waits for the
device. Must not know: modules, batches, what is read from a loss.
"""

from __future__ import annotations

import math
from typing import Any

import torch

MEAN, SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
_UNCHANGED = frozenset(
    {
        *("_DDPSinkBackward", "PreBackwardFunctionForModuleBackward", "ToCopyBackward0", "CloneBackward0"),
        *("AliasBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0"),
        *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward3", "PermuteBackward0"),
        "NegBackward0",
    }
)
"""Operations that do not change a loss, except for its sign: those that DDP and DeepSpeed add to outputs, copies, changes of dtype and of
shape."""
# MulBackward1 and DivBackward1 come from torch's own code, which scales by numbers.
_SCALED = ("MulBackward0", "DivBackward0", "MulBackward1", "DivBackward1")
_ADDED = ("AddBackward0", "SubBackward0")
REDUCED = ("MeanBackward0", "SumBackward0")
_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
_ELEMENTWISE = ("Mul", "Div", "Add", "Sub", "Neg")
_MOST_PARTS, _NEAR_STACK = 30, 4
"""Limits: the parts of a loss, and the operations between a stack and the sum of its elements."""
_NEAR_ROW = 6
"""The number of operations before a mean that are searched for the selection of a row."""


def terms_of(loss: torch.Tensor) -> list[tuple[Any, list[float]]]:
    """The operations whose results add up to `loss`, each with the numbers that it is divided by."""
    divisors: list[float] = []
    return _terms(origin_of(loss, divisors=divisors), divisors)


def _terms(node: Any, divisors: list[float]) -> list[tuple[Any, list[float]]]:
    """The operations whose results add up to that of `node`, which is divided by `divisors`."""
    terms = []
    nodes = [(node, divisors)]
    while nodes:
        node, divisors = nodes.pop()
        if type(node).__name__ not in _ADDED:
            terms.append((node, divisors))
            continue
        for each, _ in node.next_functions:
            if each is not None:
                own = list(divisors)
                nodes.append((before_scaling(each, divisors=own), own))
    return terms


def parts_of(loss: torch.Tensor, rows: int | None = None) -> list[Any]:
    """The operations whose results, each one number, are combined into `loss`: its terms, and those that it multiplies by learned factors
    or stacks before it adds them up, as losses of several tasks are. A stack of `rows` numbers holds one for each row and is one part."""
    parts: list[Any] = []
    nodes = [node for node, _ in terms_of(loss)]
    while nodes and len(parts) < _MOST_PARTS:
        node = nodes.pop()
        inside = combined(node, rows)
        parts += [] if inside else [node]
        nodes += [term for each in inside for term, _ in _terms(before_scaling(each), [])]
    return parts


def combined(node: Any, rows: int | None) -> list[Any]:
    """The operations whose results, each one number, `node` multiplies, or adds up as the elements of a stack; empty for another
    operation. A sum that is divided by a count is one operation, not two. A stack of `rows` numbers has one for each row."""
    name = operation_of(node)
    if name == "Mul" or (name == "Div" and len(inputs_of(node)) == 2):
        return [each for each in inputs_of(node) if _is_one_number(each)]
    stacks = _stacks_below(node) if name in ("Sum", "Mean", "Dot") else []
    stacked = [each for stack in stacks for each in inputs_of(stack)]
    return stacked if len(stacked) != rows and all(map(_is_one_number, stacked)) else []


def _stacks_below(node: Any) -> list[Any]:
    """The operations that stacked the tensors whose elements `node` adds up, perhaps after operations on each element."""
    below = inputs_of(node)
    for _ in range(_NEAR_STACK):
        if stacks := [each for each in below if operation_of(each) in ("Stack", "Cat")]:
            return stacks
        below = [inner for each in below if operation_of(each) in _ELEMENTWISE for inner in inputs_of(each)]
    return []


def _is_one_number(node: Any) -> bool:
    """Whether the result of an operation has one element."""
    return bool(math.prod(node._input_metadata[0].shape) == 1)


def origin_of(loss: torch.Tensor, divisors: list[float] | None = None) -> Any:
    """The operation that computed `loss`, before copies, added numbers and scaling by numbers. The numbers by which the result was divided
    are appended to `divisors`."""
    node: Any = loss.grad_fn
    if type(node).__name__ == "_DDPSinkBackward":
        node = node.next_functions[loss.output_nr][0]
    return before_scaling(node, divisors)


def before_scaling(node: Any, divisors: list[float] | None = None, means: bool = True) -> Any:
    """The operation that computed the result of `node`, before copies, added numbers and scaling by numbers; `node` itself if it is none of
    these; None if no operation did. See `origin_of` for `divisors`. `means`: whether means and sums of one number are copies too."""
    while node is not None:
        name = type(node).__name__
        if name in _ADDED:
            terms = [each for each, _ in node.next_functions if each is not None]
            if len(terms) != 1:
                return node
            node = terms[0]
        elif name in _UNCHANGED or is_scaled(name, node) or (means and name in REDUCED and not _several(node)):
            if divisors is not None and name in _SCALED and (factor := float(node._saved_other)):
                divisors.append(factor if name.startswith("Div") else 1 / factor)
            node = node.next_functions[0][0]
        else:
            return node
    return None


def is_scaled(name: str, node: Any) -> bool:
    """Whether an operation multiplies or divides by a Python number, and not by a tensor such as the number of labels."""
    if name not in _SCALED or node.next_functions[0][0] is None:
        return False
    factor = node._saved_other
    if not isinstance(factor, torch.Tensor):
        return factor is not None
    if factor.ndim:
        return False
    small = torch.float16 if factor.is_floating_point() else torch.int8
    # For a Python number and a 0-dim tensor, torch takes the tensor's dtype; for two 0-dim tensors, the larger dtype.
    return bool(torch.result_type(factor, torch.zeros((), dtype=small)) == small and factor.dtype != small)


def _several(node: Any) -> bool:
    """Whether a mean or sum was taken over more than one element."""
    return bool(math.prod(node._saved_self_sym_sizes) != 1)


def operation_of(node: Any) -> str:
    """The name of an operation, such as "Sum"."""
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def inputs_of(node: Any) -> list[Any]:
    """The operations that computed the inputs of `node`, which is None for a value that nothing computed."""
    return [] if node is None else [each for each, _ in node.next_functions if each is not None]


def is_mean_cross_entropy(node: Any) -> bool:
    """Whether an operation is a cross-entropy (or nll_loss) of class labels with reduction="mean"."""
    return type(node).__name__ in _CROSS_ENTROPIES and node._saved_reduction == MEAN


def is_of_one_row(node: Any, rows: int | None) -> bool:
    """Whether a result is computed from one of `rows` rows, as in a loop over rows: within `_NEAR_ROW` operations a row is selected."""
    if not rows:
        return False
    for _ in range(_NEAR_ROW):
        if _selects_a_row(node, rows):
            return True
        if len(inputs_of(node)) != 1:  # it may join several rows
            return False
        (node,) = inputs_of(node)
    return False


def _selects_a_row(node: Any, rows: int) -> bool:
    """Whether an operation gives one of `rows` rows of a result, or all of them one by one. A parameter and a stack of results have
    none."""
    if any(type(each).__name__ in ("AccumulateGrad", "StackBackward0") for each in inputs_of(node)):
        return False
    if operation_of(node) == "Unbind":
        return node._saved_dim == 0 and len(node._input_metadata) == rows
    if operation_of(node) in ("Slice", "Split"):
        return rows > 1 and sizes_before(node)[:1] == (rows,) and node._input_metadata[0].shape[0] == 1
    return operation_of(node) == "Select" and node._saved_dim == 0 and node._saved_self_sym_sizes[0] == rows


def sizes_before(node: Any) -> tuple[int, ...]:
    """The sizes of the first input of `node`; empty if nothing computed it."""
    below, number = node.next_functions[0] if node.next_functions else (None, 0)
    return () if below is None else tuple(below._input_metadata[number].shape)
