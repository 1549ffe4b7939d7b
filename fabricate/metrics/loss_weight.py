"""The weight of a loss, if torch knows it: the labels that a cross-entropy counts, after any shift and with any class weights.

It is read from two attributes of the autograd graph; in an evaluation there is none, see `step_watch`. Nothing waits for the device, except
functions that say so. Must not know: modules, batches, the loop.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import torch

_MEAN, _SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
_UNCHANGED = frozenset(
    {
        *(
            "_DDPSinkBackward",
            "PreBackwardFunctionForModuleBackward",
            "ToCopyBackward0",
            "CloneBackward0",
            "AliasBackward0",
        ),
        *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "PermuteBackward0"),
        *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward3", "NegBackward0"),
    }
)
"""Operations that do not change a loss, except for its sign: those that DDP and DeepSpeed add to outputs, copies, changes of dtype and of
shape."""
# MulBackward1 and DivBackward1 come from torch's own code, which scales by numbers.
_SCALED = ("MulBackward0", "DivBackward0", "MulBackward1", "DivBackward1")
_ADDED = ("AddBackward0", "SubBackward0")
_REDUCED = ("MeanBackward0", "SumBackward0")
_PRODUCTS = ("DotBackward0", "VdotBackward0", "BmmBackward0")
"""Products that sum over all elements if their result is one number: of two vectors, and that of an einsum."""
_NON_LINEAR = frozenset(
    {
        *("Sqrt", "Rsqrt", "Pow", "Reciprocal", "Exp", "Expm1", "Log", "Log2", "Log10", "Log1p"),
        *(
            "Sigmoid",
            "LogSigmoid",
            "Softplus",
            "Tanh",
            "Abs",
            "Relu",
            "Maximum",
            "Minimum",
            "Softmax",
            "LogSoftmax",
            "Logsumexp",
            "Max",
            "Min",
        ),
    }
)
_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
_SELECTIONS = ("IndexBackward0", "IndexSelectBackward0", "GatherBackward0")
_NEAR = 30
"""The number of operations before a mean that are searched for a mask, and before a loss for means over rows."""
_NEAR_ROW = 6
"""The number of operations before a mean that are searched for the selection of a row."""


class Counted(NamedTuple):
    """The items over which the mean of a cross-entropy was taken, as 0-dim device tensors: `weight`, by which the sum was divided, and the
    number of `labels` that counted. They differ only with class weights."""

    weight: torch.Tensor
    labels: torch.Tensor


def counted(loss: torch.Tensor) -> Counted | None:
    """The items over which `loss` is a mean, if it is a cross-entropy (or nll_loss) with reduction="mean", possibly scaled by a number.
    Call it before backward. None for any other loss: a sum of terms, label smoothing, a compiled or hand-written kernel."""
    node = _origin(loss)
    if not _is_mean_cross_entropy(node):
        return None
    classes = node._saved_weight
    weight: torch.Tensor = node._saved_total_weight
    if classes is None and weight.dtype not in (torch.bfloat16, torch.float16):  # 16-bit floats cannot hold every count
        return Counted(weight, weight)
    ignored = node._saved_ignore_index
    return count_labels(node._saved_target, classes, ignored if ignored < 2**63 else ignored - 2**64)


def last_operation(loss: torch.Tensor) -> str:
    """The name of the operation that made `loss`, for a message."""
    node = _origin(loss)
    return _operation(loss.grad_fn if node is None else node)


def is_sum(loss: torch.Tensor, rows: int | None = None) -> bool:
    """Whether `loss`, or one of the terms that it adds up, is a sum over its batch of `rows` rows. A sum that is divided by at least half
    of `rows`, or by any number if `rows` is None, is taken for a mean."""
    terms = _terms(loss)
    return any(_is_sum(node, divisors, rows, alone=len(terms) == 1) for node, divisors in terms)


def _is_sum(node: Any, divisors: list[float], rows: int | None, alone: bool) -> bool:
    if not _sums_rows(node, rows, alone):
        return False
    return not (divisors if rows is None else any(divisor >= rows / 2 for divisor in divisors))


def odd_divisor(loss: torch.Tensor, rows: int) -> float | None:
    """The number by which `loss`, or one of its terms, divides a sum over its batch of `rows` rows, if this is neither the number of rows
    nor of elements, but a constant or a count of labels. None if there is no such number, or if the sum is not divided: see `is_sum`."""
    terms = _terms(loss)
    for node, divisors in terms:
        if _sums_rows(node, rows, alone=len(terms) == 1):
            large = [divisor for divisor in divisors if divisor >= rows / 2]
            if large and not any(is_a_count(divisor, rows, _summed_sizes(node)) for divisor in large):
                return large[0]
    return None


def is_a_count(number: float, rows: int, sizes: tuple[int, ...]) -> bool:
    """Whether `number` is the number of rows, or of elements along some dimensions of a tensor of these `sizes`, whose first dimension is
    rows, or as many parts of each row."""
    possible = {float(rows), float(sizes[0])} if sizes and sizes[0] % rows == 0 else {float(rows)}
    for size in sizes[1:]:
        possible |= {each * size for each in possible}
    return any(math.isclose(number, each, rel_tol=1e-6) for each in possible)


def _summed_sizes(node: Any) -> tuple[int, ...]:
    """The sizes of the tensor whose elements a sum or mean adds up, of which a product keeps only their number; empty if it is not
    known."""
    name = type(node).__name__
    if name in ("SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"):
        return tuple(node._saved_self_sym_sizes)
    if name in _PRODUCTS:
        seconds = (
            getattr(node, "_saved_tensor", None),
            getattr(node, "_saved_other", None),
            getattr(node, "_saved_mat2", None),
        )
        return (next(factor.numel() for factor in (node._saved_self, *seconds) if factor is not None),)
    target = getattr(node, "_saved_target", None)
    return () if target is None else tuple(target.shape)


def _sums_rows(node: Any, rows: int | None, alone: bool) -> bool:
    """Whether an operation sums over the rows of a batch. A sum over another tensor is probably a penalty on parameters, unless it is the
    whole loss (`alone`)."""
    name, sizes = type(node).__name__, _summed_sizes(node)
    if name in _PRODUCTS or name == "SumBackward0" or (name == "SumBackward1" and 0 in node._saved_dim):
        sums = (alone or (rows is not None and sizes[:1] == (rows,))) and not _is_of_means(node, rows)
    else:
        sums = getattr(node, "_saved_reduction", None) == _SUM
    return sums and not _is_of_a_parameter(node, sizes)


def _is_of_means(node: Any, rows: int | None) -> bool:
    """Whether what a sum adds up are means over `rows` rows already, such as the losses of several tasks."""
    return rows is not None and any(_Means(rows, alone=False).visit(below).depends for below in _below(node))


def _is_of_a_parameter(node: Any, sizes: tuple[int, ...]) -> bool:
    """Whether a sum over a tensor of these `sizes` is a sum over a parameter, or over what was computed from it element by element: all
    parameters near it have these sizes."""
    parameters = [each.variable for each in _near(node) if type(each).__name__ == "AccumulateGrad"]
    return bool(parameters) and all(tuple(parameter.shape) == sizes for parameter in parameters)


def function_of_a_mean(loss: torch.Tensor, rows: int | None) -> str:
    """The name of the operation by which `loss`, or one of the terms that it adds up, is a non-linear function of a mean or sum over its
    batch of `rows` rows, such as a square root or the product of two means. "" if there is none, or if the batch has one row: a mean over
    micro-batches is then a mean over rows."""
    if rows is None or rows == 1:
        return ""
    terms = _terms(loss)
    return next(filter(None, (_Means(rows, alone=len(terms) == 1).visit(node).function for node, _ in terms)), "")


class _Depends(NamedTuple):
    """How a result depends on means or sums over the rows of a batch."""

    depends: bool = False
    function: str = ""
    """The first operation that is not linear in them."""
    is_ratio: bool = False
    """Whether a sum over rows is divided by a tensor, which is probably a count."""


class _Means:
    """Looks for means and sums over `rows` rows in an autograd graph, from a result down to them. `alone`: whether the result is the whole
    loss, in which a mean over a multiple of the rows counts too."""

    def __init__(self, rows: int, alone: bool) -> None:
        self._rows, self._alone = rows, alone
        self._seen: dict[Any, _Depends] = {}

    def visit(self, node: Any) -> _Depends:
        """How the result of `node` depends on them. At most `_NEAR` operations are visited."""
        if node in self._seen or node is None or len(self._seen) == _NEAR or _is_a_layer(node):
            return self._seen.get(node, _Depends())
        self._seen[node] = _Depends()
        self._seen[node] = self._of(node)
        return self._seen[node]

    def _of(self, node: Any) -> _Depends:
        """See `visit`. A mean over as many values as rows may be one over tasks, whose losses are means over rows."""
        found = [one for one in map(self.visit, _below(node)) if one.depends]
        depends = bool(found) or self._is_over_rows(node) or self._is_over_a_multiple(node)
        function = next((one.function for one in found if one.function), "")
        if not function and _is_non_linear(node, len(found)):
            function = _operation(node)
        return _Depends(
            depends, function, any(one.is_ratio for one in found) or (bool(found) and self._is_a_ratio(node))
        )

    def _is_a_ratio(self, node: Any) -> bool:
        """Whether an operation divides a sum over rows by a tensor without gradient other than the number of rows. Waits for the device."""
        if _operation(node) != "Div" or len(_below(node)) != 1 or _is_scaled("DivBackward0", node):
            return False
        summed = _through(_below(node)[0])
        is_sum = _operation(summed) == "Sum" and self._is_over_rows(summed)
        return is_sum and bool((node._saved_other != self._rows).any())

    def _is_over_rows(self, node: Any) -> bool:
        """Whether an operation is a mean or sum over the rows of the batch."""
        sizes = _summed_sizes(node)
        if type(node).__name__ in ("SumBackward1", "MeanBackward1"):  # over some dimensions
            over = 0 in node._saved_dim or 2**64 - len(sizes) in node._saved_dim
        else:
            over = _reduces(node)
        return over and sizes[:1] == (self._rows,) and not _is_of_a_parameter(node, sizes)

    def _is_over_a_multiple(self, node: Any) -> bool:
        """Whether an operation is a mean or sum over values of which there are as many for each row, such as the tokens of all rows."""
        sizes = _summed_sizes(node) if self._alone and _reduces(node) else ()
        return bool(sizes) and math.prod(sizes) % self._rows == 0 and not _is_of_a_parameter(node, sizes)


def _is_a_layer(node: Any) -> bool:
    """Whether an operation is probably a layer of the model, below which no part of the loss is computed."""
    name = type(node).__name__
    return name not in _PRODUCTS and any(
        word in name for word in ("mm", "Mm", "Linear", "Convolution", "Norm", "Embedding")
    )


def _is_non_linear(node: Any, found: int) -> bool:
    """Whether an operation is not linear in the `found` inputs that depend on means."""
    if _operation(node) == "Clamp":
        return found > 0 and node._saved_self.numel() > 1  # a limit of one number is usually a guard that does not act
    if hasattr(node, "_saved_reduction"):
        return found > 0  # a loss function of means, such as the mse_loss of mean features
    return (found > 0 and _operation(node) in _NON_LINEAR) or (found > 1 and _operation(node) in ("Mul", "Div"))


def _operation(node: Any) -> str:
    """The name of an operation, such as "Sum"."""
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def _below(node: Any) -> list[Any]:
    """The operations that computed the inputs of `node`, which is None for a value that nothing computed."""
    return [] if node is None else [each for each, _ in node.next_functions if each is not None]


def _reduces(node: Any) -> bool:
    """Whether an operation is a mean or sum over all elements of a tensor."""
    return type(node).__name__ in (*_REDUCED, *_PRODUCTS) or getattr(node, "_saved_reduction", None) in (_MEAN, _SUM)


def is_over_a_part(loss: torch.Tensor, rows: int | None = None) -> bool:
    """Whether `loss`, or one of the terms that it adds up, is a mean over the part that a mask selects of its batch of `rows` rows, or a
    sum divided by a tensor, which is probably a count, or a mean over values times weights of mean 1. May wait for the device."""
    terms = [node for node, _ in _terms(loss)]
    counts = {node._saved_target.numel() for node in terms if _is_mean_cross_entropy(node)}
    return any(_is_over_a_part(node, rows, counts) for node in terms if not (rows and _is_of_one_row(node, rows)))


def divisors(loss: torch.Tensor) -> list[float]:
    """The numbers by which the whole `loss` is divided."""
    numbers: list[float] = []
    _origin(loss, numbers)
    return numbers


def mean_over(loss: torch.Tensor, rows: int | None = None) -> int:
    """How many values `loss` averages; 0 if it is no mean, has several terms, or averages means over `rows` rows."""
    nodes = [node for node, _ in _terms(loss)]
    is_mean = type(nodes[0]).__name__ == "MeanBackward0" or getattr(nodes[0], "_saved_reduction", None) == _MEAN
    return _elements(nodes[0]) if len(nodes) == 1 and is_mean and not _is_of_means(nodes[0], rows) else 0


def _is_over_a_part(node: Any, rows: int | None, counts: set[int]) -> bool:
    """See `is_over_a_part`. `counts`: the numbers of labels of the cross-entropies among the terms; label smoothing divides its other term
    by such a number."""
    name = type(node).__name__
    if name == "MeanBackward0" or getattr(node, "_saved_reduction", None) == _MEAN:
        below, elements = node.next_functions[0][0], _elements(node)
        selection = _through(below)
        if rows and elements % rows and (any(map(_is_masked, _near(below))) or _is_selection(selection, elements)):
            return True
        # Other selections usually take one value per row.
        weights = _weights(selection) if name == "MeanBackward0" else getattr(node, "_saved_weight", None)
        if _is_masked(selection) or _are_normalised(weights, {elements, rows}):
            return True
    if name == "DivBackward0":  # a count has no gradient, but a learned scale has one
        return node.next_functions[1][0] is None and not (counts and float(node._saved_other) in counts)
    return bool(rows) and _Means(rows or 0, alone=False).visit(node).is_ratio


def _is_of_one_row(node: Any, rows: int) -> bool:
    """Whether a result is computed from one of `rows` rows, as in a loop over rows: within `_NEAR_ROW` operations a row is selected."""
    for _ in range(_NEAR_ROW):
        if type(node).__name__ == "SelectBackward0" and node._saved_dim == 0 and node._saved_self_sym_sizes[0] == rows:
            return True
        if len(_below(node)) != 1:  # it may join several rows
            return False
        (node,) = _below(node)
    return False


def _weights(node: Any) -> Any:
    """The mask or weights by which `node` multiplies values, perhaps before a `where` that replaces nan; None if it does not."""
    if type(node).__name__ == "WhereBackward0":
        node = _through(next(each for each, _ in node.next_functions if each is not None))
    if type(node).__name__ != "MulBackward0":
        return None
    constant = [source is None for source, _ in node.next_functions]
    if True not in constant:  # a saved tensor is read for a mask only: reading may compute an activation again
        return None
    return node._saved_self if constant[0] else node._saved_other


def _are_normalised(weights: Any, sizes: set[int | None]) -> bool:
    """Whether `weights`, as many as one of `sizes`, were divided by their own mean, as in `mask /= mask.mean()`. Waits for the device."""
    if not isinstance(weights, torch.Tensor) or not weights.is_floating_point() or weights.numel() not in sizes - {1}:
        return False
    return bool((weights != 1).any()) and math.isclose(weights.mean(), 1, abs_tol=1e-5)


def _elements(node: Any) -> int:
    """The number of elements that a mean was taken over; 0 if the operation does not keep it."""
    if type(node).__name__ == "MeanBackward0":
        return math.prod(node._saved_self_sym_sizes)
    averaged = getattr(node, "_saved_self", None)
    return averaged.numel() if isinstance(averaged, torch.Tensor) else 0


def _near(node: Any) -> list[Any]:
    """The last `_NEAR` operations that led to the result of `node`, including `node`."""
    nodes: list[Any] = []
    following = deque([node])
    while following and len(nodes) < _NEAR:
        if (each := following.popleft()) is not None and each not in nodes:
            nodes.append(each)
            following.extend(below for below, _ in each.next_functions)
    return nodes


def _is_selection(node: Any, elements: int) -> bool:
    """Whether an operation selects, by whole numbers, `elements` values that are not the same number from each row of its tensor."""
    rows = getattr(node, "_saved_self_sym_sizes", ())[:1]
    return type(node).__name__ in _SELECTIONS and all(elements % size for size in rows)


def _is_masked(node: Any) -> bool:
    """Whether an operation selects by a boolean mask, or the largest or smallest values over rows."""
    if type(node).__name__ == "TopkBackward0":
        return node._saved_dim in (0, 2**64 - len(node._saved_self_sym_sizes))
    if type(node).__name__ == "IndexBackward0":
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in node._saved_indices)
    return type(node).__name__ == "MaskedSelectBackward0"


def terms_over_labels(loss: torch.Tensor, rows: int | None = None) -> list[tuple[bool, torch.Tensor, int]]:
    """For each cross-entropy among the terms of `loss`: whether it has class weights, the number or total weight of the labels that it
    counted (0-dim, on the device), and the number of all labels. Without those of single rows of a batch of `rows` rows."""
    terms = []
    for node, _ in _terms(loss):
        if _is_mean_cross_entropy(node) and not (rows and _is_of_one_row(node, rows)):
            terms.append(
                (node._saved_weight is not None, node._saved_total_weight.detach(), node._saved_target.numel())
            )
    return terms


def _is_mean_cross_entropy(node: Any) -> bool:
    return type(node).__name__ in _CROSS_ENTROPIES and node._saved_reduction == _MEAN


def _terms(loss: torch.Tensor) -> list[tuple[Any, list[float]]]:
    """The operations whose results add up to `loss`, each with the numbers that it is divided by."""
    terms = []
    divisors: list[float] = []
    nodes = [(_origin(loss, divisors=divisors), divisors)]
    while nodes:
        node, divisors = nodes.pop()
        if type(node).__name__ not in _ADDED:
            terms.append((node, divisors))
            continue
        for each, _ in node.next_functions:
            if each is not None:
                own = list(divisors)
                nodes.append((_through(each, divisors=own), own))
    return terms


def _origin(loss: torch.Tensor, divisors: list[float] | None = None) -> Any:
    """The operation that computed `loss`, before copies, added numbers and scaling by numbers. The numbers by which the result was divided
    are appended to `divisors`."""
    node: Any = loss.grad_fn
    if type(node).__name__ == "_DDPSinkBackward":
        node = node.next_functions[loss.output_nr][0]
    return _through(node, divisors)


def _through(node: Any, divisors: list[float] | None = None) -> Any:
    while node is not None:
        name = type(node).__name__
        if name in _ADDED:
            terms = [each for each, _ in node.next_functions if each is not None]
            if len(terms) != 1:
                return node
            node = terms[0]
        elif name in _UNCHANGED or _is_scaled(name, node) or (name in _REDUCED and not _several(node)):
            if divisors is not None and name in _SCALED and (factor := float(node._saved_other)):
                divisors.append(factor if name.startswith("Div") else 1 / factor)
            node = node.next_functions[0][0]
        else:
            return node
    return None


def _is_scaled(name: str, node: Any) -> bool:
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


def count_labels(target: torch.Tensor, classes: torch.Tensor | None, ignored: int) -> Counted:
    counts = target != ignored
    labels = counts.sum()
    if classes is None:
        return Counted(labels, labels)
    each = classes.float()[target.clamp(0, len(classes) - 1)]
    return Counted(torch.where(counts, each, 0.0).sum(), labels)
