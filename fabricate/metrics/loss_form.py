"""What a loss is, for a note about one that is no mean over rows: a sum, a mean over a part of its rows, a function of means.

It is read from the autograd graph. A form that is not recognised gets no note. Functions that wait for the device say so. Must not know:
modules, batches, the loop.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import torch

from fabricate.metrics.loss_graph import (
    MEAN,
    REDUCED,
    SUM,
    before_scaling,
    combined,
    inputs_of,
    is_mean_cross_entropy,
    is_of_one_row,
    is_scaled,
    operation_of,
    origin_of,
    parts_of,
    sizes_before,
    terms_of,
)

_PRODUCTS = ("DotBackward0", "VdotBackward0", "BmmBackward0")
"""Products that sum over all elements if their result is one number: of two vectors, and that of an einsum."""
_NON_LINEAR = frozenset(
    {
        *("Sqrt", "Rsqrt", "Pow", "Reciprocal", "Exp", "Expm1", "Log", "Log2", "Log10", "Log1P", "Abs", "Relu", "Tanh"),
        *("Sigmoid", "LogSigmoid", "Softplus", "Softmax", "LogSoftmax", "Logsumexp", "Hardsigmoid", "Threshold"),
        *("Elu", "LeakyRelu", "Gelu", "Silu", "Mish", "Sin", "Cos", "Atan", "Erf"),
        *("Maximum", "Minimum", "Max", "Min"),
    }
)
_LIMITS = {"Clamp": ("_saved_min", "_saved_max"), "ClampMin": ("_saved_min", ""), "ClampMax": ("", "_saved_max")}
_LIMITS |= {"Hardtanh": ("_saved_min_val", "_saved_max_val")}
"""The operations that limit a value, with the fields that hold the least and the largest value."""
_STATISTICS = frozenset({"LinalgVectorNorm", "Norm", "Dist", "Std", "Var", "Median", "Logsumexp"})
"""Reductions that are not linear in what they reduce."""
_SELECTIONS = ("IndexBackward0", "IndexSelectBackward0", "GatherBackward0")
_LEAST_SHARE = 1e-12
"""The least number that is taken for the reciprocal of a count."""
_NEAR = 30
"""The number of operations before a mean that are searched for a mask, and before a loss for means over rows."""


def last_operation(loss: torch.Tensor) -> str:
    """The name of the operation that made `loss`, for a message."""
    node = origin_of(loss)
    return operation_of(loss.grad_fn if node is None else node)


def is_sum(loss: torch.Tensor, rows: int | None = None) -> bool:
    """Whether `loss`, or one of the terms that it adds up, is a sum over its batch of `rows` rows. A sum that is divided by at least half
    of `rows`, or by any number if `rows` is None, is taken for a mean."""
    terms = terms_of(loss)
    single = _of_single_rows(terms, rows)
    if (
        rows
        and single
        and len(single) % rows == 0
        and not any(d >= rows / 2 for _, divisors in single for d in divisors)
    ):
        return True
    return any(_is_sum(node, divisors, rows, alone=len(terms) == 1) for node, divisors in terms)


def _of_single_rows(terms: list[tuple[Any, list[float]]], rows: int | None) -> list[tuple[Any, list[float]]]:
    """Those of the terms of a loss that are computed from one row each of several, as in a loop over rows."""
    return [term for term in terms if is_of_one_row(term[0], rows)] if rows and rows > 1 else []


def _is_sum(node: Any, divisors: list[float], rows: int | None, alone: bool) -> bool:
    if not _sums_rows(node, rows, alone):
        return False
    return not (divisors if rows is None else any(divisor >= rows / 2 for divisor in divisors))


def odd_divisor(loss: torch.Tensor, rows: int) -> float | None:
    """The number by which `loss`, or one of its terms, divides a sum over its batch of `rows` rows, if this is neither the number of rows
    nor of elements, but a constant or a count of labels. None if there is no such number, or if the sum is not divided: see `is_sum`."""
    terms = terms_of(loss)
    for node, divisors in terms:
        if _sums_rows(node, rows, alone=len(terms) == 1):
            large = [divisor for divisor in divisors if divisor >= rows / 2]
            if large and not any(is_a_count(divisor, rows, _summed_sizes(node)) for divisor in large):
                return large[0]
        elif not is_of_one_row(node, rows) and (count := _items_divided_by(node, divisors, rows)):
            return count
    return None


def _items_divided_by(node: Any, divisors: list[float], rows: int) -> float | None:
    """The number of items, such as the boxes of all images, by which a sum over them is divided; None for another operation."""
    sizes = _summed_sizes(node)
    sums = operation_of(node) == "Sum" or getattr(node, "_saved_reduction", None) == SUM
    if not sums or not sizes or sizes[0] % rows == 0 or not any(_takes_from_rows(each, rows) for each in _near(node)):
        return None
    return next((each for each in divisors if each in (sizes[0], math.prod(sizes))), None)


def is_a_count(number: float, rows: int, sizes: tuple[int, ...]) -> bool:
    """Whether `number` is the number of rows, or of elements along some dimensions of a tensor of these `sizes`, whose first dimension is
    rows, or as many parts of each row."""
    possible = {float(rows), float(sizes[0])} if sizes and sizes[0] % rows == 0 else {float(rows)}
    for size in sizes[1:]:
        possible |= {each * size for each in possible}
    return any(math.isclose(number, each, rel_tol=1e-6) for each in possible)


def _takes_from_rows(node: Any, rows: int) -> bool:
    """Whether an operation selects items of a tensor with `rows` rows, or joins those of single rows, such as the boxes of all images."""
    if operation_of(node) in ("Index", "IndexSelect", "Gather", "MaskedSelect"):
        return sizes_before(node)[:1] == (rows,)
    joined = inputs_of(node) if operation_of(node) in ("Cat", "Stack") else []
    return bool(joined) and is_of_one_row(joined[0], rows)


def _is_product(node: Any) -> bool:
    """Whether an operation is a product of two tensors whose result is one number."""
    if type(node).__name__ != "BmmBackward0":
        return type(node).__name__ in _PRODUCTS
    first, second = node._saved_self, node._saved_mat2  # a factor is None if the other has no gradient
    return (first is None or first.shape[:2] == (1, 1)) and (second is None or second.shape[::2] == (1, 1))


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
    if combined(node, rows):  # of the losses of several tasks
        return False
    name, sizes = type(node).__name__, _summed_sizes(node)
    if _is_product(node) or name == "SumBackward0" or (name == "SumBackward1" and 0 in node._saved_dim):
        sums = (alone or (rows is not None and sizes[:1] == (rows,))) and not _is_of_means(node, rows)
    else:
        sums = getattr(node, "_saved_reduction", None) == SUM
    return sums and not _is_of_a_parameter(node, sizes)


def _is_of_means(node: Any, rows: int | None) -> bool:
    """Whether what a sum adds up are means over `rows` rows already, such as the losses of several tasks."""
    return rows is not None and any(_Means(rows, alone=False).visit(below).depends for below in inputs_of(node))


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
    terms = terms_of(loss)
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
        if _is_a_sum_of_squares(node):
            return _Depends(self._is_a_statistic(inputs_of(node)[0]))
        found = [one for one in map(self.visit, inputs_of(node)) if one.depends]
        is_statistic = self._is_a_statistic(node)
        depends = bool(found) or is_statistic or self._is_over_rows(node) or self._is_over_a_multiple(node)
        function = next((one.function for one in found if one.function), "")
        if not function and (is_statistic or _is_non_linear(node, len(found))):
            function = operation_of(node)
        is_ratio = any(one.is_ratio for one in found) or self._is_a_ratio(node)
        return _Depends(depends, function, is_ratio)

    def _is_a_ratio(self, node: Any) -> bool:
        """Whether an operation divides a sum over rows by a tensor without gradient other than the number of rows, or multiplies it by the
        reciprocal of a count. Waits for the device."""
        name = operation_of(node)
        if name not in ("Div", "Mul") or len(inputs_of(node)) != 1 or is_scaled(type(node).__name__, node):
            return False
        summed = before_scaling(inputs_of(node)[0])
        if operation_of(summed) != "Sum":
            return False
        if name == "Mul":
            return self._is_of_a_count(_weights(node), summed)
        return self._is_over_rows(summed) and bool((node._saved_other != self._rows).any())

    def _is_of_a_count(self, factor: Any, summed: Any) -> bool:
        """Whether a tensor is one number, the reciprocal of a count of items of the tensor that `summed` adds up, such as the number of
        labels, that is not small and that is neither its number of rows nor of elements."""
        sizes = _summed_sizes(summed)
        over_rows = bool(sizes) and sizes[0] % self._rows == 0 and not _is_of_a_parameter(summed, sizes)
        if not over_rows or not isinstance(factor, torch.Tensor) or factor.ndim:
            return False
        value = abs(float(factor))
        count = round(1 / value) if value > _LEAST_SHARE else 0  # nor is nan
        is_whole = math.isclose(count * value, 1, rel_tol=1e-5)
        return is_whole and self._rows / 2 <= count <= math.prod(sizes) and not is_a_count(count, self._rows, sizes)

    def _is_over_rows(self, node: Any) -> bool:
        """Whether an operation is a mean or sum over the rows of the batch."""
        sizes = _summed_sizes(node)
        if type(node).__name__ in ("SumBackward1", "MeanBackward1"):  # over some dimensions
            over = 0 in node._saved_dim or 2**64 - len(sizes) in node._saved_dim
        else:
            over = _reduces(node)
        return over and sizes[:1] == (self._rows,) and not _is_of_a_parameter(node, sizes)

    def _is_a_statistic(self, node: Any) -> bool:
        """Whether an operation is one of `_STATISTICS` over the rows of the batch."""
        if operation_of(node) not in _STATISTICS:
            return False
        sizes, dims = sizes_before(node), getattr(node, "_saved_dim", None)
        over = dims is None or bool({0, 2**64 - len(sizes)} & set(dims if isinstance(dims, tuple) else (dims,)))
        return over and sizes[:1] == (self._rows,) and not _is_of_a_parameter(node, sizes)

    def _is_over_a_multiple(self, node: Any) -> bool:
        """Whether an operation is a mean or sum over values of which there are as many for each row, such as the tokens of all rows."""
        sizes = _summed_sizes(node) if self._alone and _reduces(node) else ()
        return bool(sizes) and math.prod(sizes) % self._rows == 0 and not _is_of_a_parameter(node, sizes)


def _is_a_layer(node: Any) -> bool:
    """Whether an operation is probably a layer of the model, below which no part of the loss is computed."""
    name = type(node).__name__
    known = _is_product(node) or operation_of(node) in _STATISTICS
    return not known and any(word in name for word in ("mm", "Mm", "Linear", "Convolution", "Norm", "Embedding"))


def _is_non_linear(node: Any, found: int) -> bool:
    """Whether an operation is not linear in the `found` inputs that depend on means. May wait for the device."""
    if operation_of(node) in _LIMITS:
        return found > 0 and (node._saved_self.numel() != 1 or _is_near_a_limit(node))
    if operation_of(node) == "Where":
        return found > 1 or (found > 0 and _replaces_means(node))
    if hasattr(node, "_saved_reduction"):
        return found > 0  # a loss function of means, such as the mse_loss of mean features
    return (found > 0 and operation_of(node) in _NON_LINEAR) or (found > 1 and operation_of(node) in ("Mul", "Div"))


def _is_near_a_limit(node: Any) -> bool:
    """Whether one number is limited to less than ten times, or more than a tenth, of itself. Other limits are usually guards that do not
    act. Waits for the device."""
    value = float(node._saved_self.detach())
    given = [getattr(node, name, None) for name in _LIMITS[operation_of(node)]]
    least, most = (None if limit is None else float(torch.as_tensor(limit).detach().max()) for limit in given)
    return (least is not None and value <= max(least, 10 * least)) or (
        most is not None and value >= min(most, most / 10)
    )


def _replaces_means(node: Any) -> bool:
    """Whether `where` takes some of its values from an input without gradient. Waits for the device."""
    constant = [source is None for source, _ in node.next_functions]
    condition = node._saved_condition
    return (constant[0] and bool(condition.any())) or (constant[-1] and not bool(condition.all()))


def _is_a_sum_of_squares(node: Any) -> bool:
    """Whether an operation is the square of a Euclidean norm."""
    below = inputs_of(node)
    if type(node).__name__ == "PowBackward0" and node._saved_exponent == 2:
        below *= 2
    elif operation_of(node) != "Mul":
        return False
    same = len(below) == 2 and below[0] == below[1]
    return same and operation_of(below[0]) in ("LinalgVectorNorm", "Norm") and getattr(below[0], "_saved_ord", 2) == 2


def _reduces(node: Any) -> bool:
    """Whether an operation is a mean or sum over all elements of a tensor."""
    return type(node).__name__ in REDUCED or _is_product(node) or getattr(node, "_saved_reduction", None) in (MEAN, SUM)


def divisors(loss: torch.Tensor) -> list[float]:
    """The numbers by which the whole `loss` is divided."""
    numbers: list[float] = []
    origin_of(loss, numbers)
    return numbers


def mean_over(loss: torch.Tensor, rows: int | None = None) -> int:
    """How many values `loss` averages; 0 if it is no mean, has several terms, or averages means over `rows` rows."""
    if rows == 1 and _elements(before_scaling(loss.grad_fn, means=False)) == 1:
        return 1  # a mean of one number is otherwise taken for a copy
    nodes = [node for node, _ in terms_of(loss)]
    is_mean = type(nodes[0]).__name__ == "MeanBackward0" or getattr(nodes[0], "_saved_reduction", None) == MEAN
    return _elements(nodes[0]) if len(nodes) == 1 and is_mean and not _is_of_means(nodes[0], rows) else 0


def is_over_a_part(loss: torch.Tensor, rows: int | None = None) -> bool:
    """Whether `loss`, or one of the parts that it combines, is a mean over the part that a mask selects of its batch of `rows` rows, or a
    sum divided by a tensor, which is probably a count, or a mean over values times weights of mean 1, or adds up losses of some single
    rows. May wait for the device."""
    terms = terms_of(loss)
    if rows and _leaves_rows_out(terms, rows):
        return True
    parts = parts_of(loss, rows)
    if any(_selects_one(node, rows) for node in parts):  # the mean of one value is taken for a copy
        return True
    counts = {node._saved_target.numel() for node in parts if is_mean_cross_entropy(node)}
    products = [node for node, _ in terms if operation_of(node) == "Mul" and node not in parts]
    several = [node for node in parts + products if not is_of_one_row(node, rows)]
    rescaled = (_is_rescaled(*term, rows) for term in terms if term[0] in several)
    return any(_is_over_a_part(node, rows, counts) for node in several) or any(rescaled)


def _leaves_rows_out(terms: list[tuple[Any, list[float]]], rows: int) -> bool:
    """Whether a loss with these `terms` adds up losses of some single rows of `rows`, but not of all."""
    single = _of_single_rows(terms, rows)
    several = len(single) > 1 or (len(terms) == 1 and any(_is_a_list_of_one(*term) for term in single))
    return several and any(_is_odd(divisors, rows, len(single)) for _, divisors in single)


def _is_a_list_of_one(node: Any, divisors: list[float]) -> bool:
    """Whether a result is the mean of a list of one loss: stacked, or divided by one."""
    return operation_of(node) in ("Stack", "Cat") or 1.0 in divisors


def _is_odd(divisors: list[float], rows: int, terms: int) -> bool:
    """Whether a loss that adds up `terms` losses of single rows is no mean over all `rows` rows: some are missing, or it is divided by
    another count."""
    if any(each % rows == 0 for each in divisors):
        return False
    return terms % rows != 0 or any(each >= rows / 2 for each in divisors)


def _is_over_a_part(node: Any, rows: int | None, counts: set[int]) -> bool:
    """See `is_over_a_part`. `counts`: the numbers of labels of the cross-entropies among the parts; label smoothing divides its other term
    by such a number."""
    name = type(node).__name__
    if name == "MeanBackward0" or getattr(node, "_saved_reduction", None) == MEAN:
        below, elements = node.next_functions[0][0], _elements(node)
        selection = before_scaling(below)
        if rows and elements % rows and (any(map(_is_masked, _near(below))) or _is_selection(selection, elements)):
            return True
        # Other selections usually take one value per row.
        weights = _weights(selection) if name == "MeanBackward0" else getattr(node, "_saved_weight", None)
        if _is_masked(selection) or _are_normalised(weights, {elements, rows}):
            return True
    if name == "DivBackward0":
        # A learned scale has a gradient, and a divisor for each row, as in ctc_loss, has a dimension; a count has neither.
        by_a_count = node.next_functions[1][0] is None and not node._saved_other.ndim
        return by_a_count and not (counts and float(node._saved_other) in counts)
    return bool(rows) and _Means(rows or 0, alone=False).visit(node).is_ratio


def _is_rescaled(node: Any, divisors: list[float], rows: int | None) -> bool:
    """Whether a term is a mean over values times weights, divided by the mean of these weights, as in `(error * mask).mean() * scale`.
    `divisors`: the numbers by which it is divided. Waits for the device."""
    factors: list[Any] = [1 / each for each in divisors if each]
    if operation_of(node) == "Mul" and isinstance(factor := _weights(node), torch.Tensor) and factor.numel() == 1:
        factors.append(factor)
        node = before_scaling(inputs_of(node)[0])
    if type(node).__name__ != "MeanBackward0" or not factors:
        return False
    weights, sizes = _weights_of_rows(before_scaling(node.next_functions[0][0])), {_elements(node), rows}
    if not isinstance(weights, torch.Tensor):
        return False
    return any(_are_normalised(weights * factor, sizes, rows) for factor in (*factors, math.prod(factors)))


def _weights(node: Any) -> Any:
    """The mask or weights by which `node` multiplies values, perhaps before a `where` that replaces nan, or before a division by a number
    such as their mean; None if it does not."""
    if type(node).__name__ == "WhereBackward0":
        node = before_scaling(next(each for each, _ in node.next_functions if each is not None))
    if type(node).__name__ == "DivBackward0" and node.next_functions[1][0] is None and not node._saved_other.ndim:
        weights = _weights_of_rows(node.next_functions[0][0])
        return None if weights is None else weights / node._saved_other
    if type(node).__name__ != "MulBackward0":
        return None
    constant = [source is None for source, _ in node.next_functions]
    if True not in constant:  # a saved tensor is read for a mask only: reading may compute an activation again
        return None
    return node._saved_self if constant[0] else node._saved_other


def _weights_of_rows(node: Any) -> Any:
    """As `_weights`; the sums of the weights over each row if `node` sums over each row what was multiplied by them."""
    if type(node).__name__ != "SumBackward1":
        return _weights(node)
    weights, sizes = _weights(before_scaling(inputs_of(node)[0])), _summed_sizes(node)
    if not isinstance(weights, torch.Tensor) or tuple(weights.shape) != sizes:
        return None
    dims = [dim % len(sizes) if dim < len(sizes) else (dim - 2**64) % len(sizes) for dim in node._saved_dim]
    return None if 0 in dims else weights.sum(dims)


def _are_normalised(weights: Any, sizes: set[int | None], rows: int | None = None) -> bool:
    """Whether `weights`, as many as one of `sizes` or some for each of `rows` rows, were divided by their own mean, as in
    `mask /= mask.mean()`. Waits for the device."""
    if not isinstance(weights, torch.Tensor) or not weights.is_floating_point() or weights.numel() == 1:
        return False
    if weights.numel() not in sizes and (not rows or weights.shape[:1] != (rows,)):
        return False
    return bool(((weights - 1).abs() > 1e-4).any()) and math.isclose(weights.mean(), 1, abs_tol=1e-5)


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


def _selects_one(node: Any, rows: int | None) -> bool:
    """Whether an operation selects one value of those of several `rows`."""
    if not rows or rows == 1 or not (_is_masked(node) or _is_selection(node, 1)):
        return False
    sizes = sizes_before(node)
    return bool(sizes) and sizes[0] % rows == 0 and type(inputs_of(node)[0]).__name__ != "AccumulateGrad"


def _is_masked(node: Any) -> bool:
    """Whether an operation selects by a boolean mask, or the largest or smallest values over rows."""
    if type(node).__name__ == "TopkBackward0":
        return node._saved_dim in (0, 2**64 - len(node._saved_self_sym_sizes))
    if type(node).__name__ == "IndexBackward0":
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in node._saved_indices)
    return type(node).__name__ == "MaskedSelectBackward0"
