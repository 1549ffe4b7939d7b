"""The weight of a loss, if torch knows it: the labels that a cross-entropy counts, after any shift and with any class weights.

In training it is read from two attributes of the autograd graph. In evaluation there is no graph, so calls of torch are recorded. Nothing
waits for the device, except functions that say so. Must not know: modules, batches, the loop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fabricate.errors import ConfigurationError
from fabricate.metrics.reading import on_device

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
        *("Sigmoid", "LogSigmoid", "Softplus", "Tanh"),
    }
)
_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
_SELECTIONS = ("IndexBackward0", "IndexSelectBackward0", "GatherBackward0")
_SUMS = (
    *(torch.sum, torch.Tensor.sum, torch.count_nonzero, torch.Tensor.count_nonzero, torch.dot, torch.Tensor.dot),
    *(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.inner, torch.vdot),
)
_DIVISIONS = (torch.div, torch.true_divide, torch.Tensor.div, torch.Tensor.true_divide, torch.Tensor.__truediv__)
_SCALING = (
    *_DIVISIONS,
    *(torch.add, torch.sub, torch.mul, torch.neg, torch.rsub, torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul),
    *(torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__sub__, torch.Tensor.__rsub__, torch.Tensor.__mul__),
    *(torch.Tensor.__rmul__, torch.Tensor.__neg__, torch.Tensor.neg),
)
_MOST_LOOKS = 3
_NEAR = 30
"""The number of operations before a mean that are searched for a mask."""


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
    return _count(node._saved_target, classes, ignored if ignored < 2**63 else ignored - 2**64)


def last_operation(loss: torch.Tensor) -> str:
    """The name of the operation that made `loss`, for a message."""
    node = _origin(loss)
    return type(loss.grad_fn if node is None else node).__name__.rstrip("0123456789").removesuffix("Backward")


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
            if large and not any(_counts(divisor, rows, _summed_sizes(node)) for divisor in large):
                return large[0]
    return None


def _counts(number: float, rows: int, sizes: tuple[int, ...]) -> bool:
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
        sums = alone or (rows is not None and sizes[:1] == (rows,))
    else:
        sums = getattr(node, "_saved_reduction", None) == _SUM
    return sums and not _is_of_a_parameter(node, sizes)


def _is_of_a_parameter(node: Any, sizes: tuple[int, ...]) -> bool:
    """Whether a sum over a tensor of these `sizes` is a sum over a parameter, or over what was computed from it element by element: all
    parameters near it have these sizes."""
    parameters = [each.variable for each in _near(node) if type(each).__name__ == "AccumulateGrad"]
    return bool(parameters) and all(tuple(parameter.shape) == sizes for parameter in parameters)


def function_of_a_mean(loss: torch.Tensor, rows: int | None) -> str:
    """The name of the operation by which `loss`, or one of the terms that it adds up, is a non-linear function of a mean or sum over its
    batch of `rows` rows, such as a square root. "" if there is none, or if the batch has one row: a mean over micro-batches is then a mean
    over rows."""
    if rows is None or rows == 1:
        return ""
    terms = _terms(loss)
    for node, _ in terms:
        name = type(node).__name__.removesuffix("Backward0")
        if name in _NON_LINEAR:
            mean = _through(node.next_functions[0][0])
            if type(mean).__name__ == "DivBackward0":  # a sum divided by a tensor, probably a count
                mean = _through(mean.next_functions[0][0])
            sizes = _summed_sizes(mean)
            over_rows = sizes[:1] == (rows,) if len(terms) > 1 else bool(sizes) and math.prod(sizes) % rows == 0
            if over_rows and not _is_of_a_parameter(mean, sizes):
                return name
    return ""


def is_over_a_part(loss: torch.Tensor, rows: int | None = None) -> bool:
    """Whether `loss`, or one of the terms that it adds up, is a mean over the part that a mask selects of its batch of `rows` rows, or a
    sum divided by a tensor, which is probably a count, or a mean over values times a mask of mean 1. May wait for the device."""
    terms = [node for node, _ in _terms(loss)]
    counts = {node._saved_target.numel() for node in terms if _is_mean_cross_entropy(node)}
    return any(_is_over_a_part(node, rows, counts) for node in terms)


def divisors(loss: torch.Tensor) -> list[float]:
    """The numbers by which the whole `loss` is divided."""
    numbers: list[float] = []
    _origin(loss, numbers)
    return numbers


def mean_over(loss: torch.Tensor) -> int:
    """How many values `loss` averages; 0 if it is no mean or has several terms."""
    nodes = [node for node, _ in _terms(loss)]
    is_mean = type(nodes[0]).__name__ == "MeanBackward0" or getattr(nodes[0], "_saved_reduction", None) == _MEAN
    return _elements(nodes[0]) if len(nodes) == 1 and is_mean else 0


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
        return _is_masked(selection) or any(_has_normalised_mask(each, elements) for each in _near(below))
    return name == "DivBackward0" and not (counts and float(node._saved_other) in counts)


def _has_normalised_mask(node: Any, elements: int) -> bool:
    """Whether an operation multiplies by a mask that was divided by its own mean, as in `mask /= mask.mean()`. Waits for the device."""
    if type(node).__name__ != "MulBackward0":
        return False
    factors = zip((node._saved_self, node._saved_other), node.next_functions, strict=True)
    constant = [factor for factor, (source, _) in factors if source is None and isinstance(factor, torch.Tensor)]
    masks = [each for each in constant if each.is_floating_point() and each.numel() == elements > 1]
    return any(bool((each == 0).any()) and math.isclose(each.mean(), 1, abs_tol=1e-5) for each in masks)


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
    """Whether an operation selects by a boolean mask."""
    if type(node).__name__ == "IndexBackward0":
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in node._saved_indices)
    return type(node).__name__ == "MaskedSelectBackward0"


def terms_over_labels(loss: torch.Tensor) -> list[tuple[bool, torch.Tensor, int]]:
    """For each cross-entropy among the terms of `loss`: whether it has class weights, the number or total weight of the labels that it
    counted (0-dim, on the device), and the number of all labels."""
    terms = []
    for node, _ in _terms(loss):
        if _is_mean_cross_entropy(node):
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


def _count(target: torch.Tensor, classes: torch.Tensor | None, ignored: int) -> Counted:
    counts = target != ignored
    labels = counts.sum()
    if classes is None:
        return Counted(labels, labels)
    each = classes.float()[target.clamp(0, len(classes) - 1)]
    return Counted(torch.where(counts, each, 0.0).sum(), labels)


class _Remembered(NamedTuple):
    """A mean cross-entropy that was computed."""

    result: torch.Tensor
    version: int | None
    over: Counted
    elements: int
    """The number of labels, including those that did not count."""

    def is_here(self, value: torch.Tensor) -> bool:
        """Whether `value` is this result: it uses the same memory, which was not changed in place."""
        return value.data_ptr() == self.result.data_ptr() and _version(self.result) == self.version


class _Reduced(NamedTuple):
    """A sum or a mean over the elements of a tensor, as a 0-dim tensor."""

    result: torch.Tensor
    version: int | None
    divisor: torch.Tensor | float | None
    """What the sum was divided by; None for a sum."""
    sizes: tuple[int, ...]
    """The sizes of the tensor; for a mean the number of its elements."""
    is_mean: bool = False
    """Whether it is the result of `mean`, and not a function of it."""

    def is_in(self, value: Any) -> bool:
        """Whether `value` is this tensor, which was not changed in place, or its number, if it is on the host."""
        if _version(self.result) != self.version:
            return False
        if isinstance(value, torch.Tensor):
            return value.data_ptr() == self.result.data_ptr()
        return type(value) in (int, float) and not on_device(self.result) and repr(value) == repr(self.result.item())

    def other_than(self, rows: int, others: Collection[int]) -> str:
        """A description if this is a mean over something other than `rows` rows, or as many values of each; else "". Waits for the
        device."""
        if self.divisor is None or _counts(divisor := float(self.divisor), rows, self.sizes):
            return ""
        if self.sizes != (divisor,):
            return f"a sum divided by {divisor:g} for {rows} rows"
        return "" if divisor in others else f"a mean over {divisor:g} values for {rows} rows"


class CrossEntropies(TorchFunctionMode):
    """A context that records every mean cross-entropy (or nll_loss), every other mean, and every sum that is computed inside it. Costs a
    Python call per call of torch."""

    def __init__(self, looks: int = _MOST_LOOKS) -> None:
        """`looks`: the number of batches without a cross-entropy that are inspected."""
        super().__init__()
        self._looks = looks
        self._found: list[_Remembered] = []
        self._reduced: list[_Reduced] = []
        """Sums, means, and means to which numbers or other means were added, or which were multiplied by numbers."""
        self._weighed: set[str] = set()
        """The names of the metrics that were cross-entropies."""
        self._decided = False
        """Whether a batch was weighed before."""

    def __enter__(self) -> CrossEntropies:
        self._found, self._reduced = [], []
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
            self._remember(result, *args, **kwargs)
            args = args[1:]  # a sum is one over labels
        if args and isinstance(result, torch.Tensor) and not result.ndim:
            new = partial(_Reduced, result, _version(result))
            self._reduced += _reduction(new, func, args[0], kwargs.get("reduction"))
            if func in _SCALING:
                self._reduced += list(self._scaled(new, func, args))
        return result

    def _scaled(
        self, new: Callable[..., _Reduced], func: Callable[..., Any], args: tuple[Any, ...]
    ) -> Iterator[_Reduced]:
        """What the sum, difference, product or quotient of `args` is, if one of them is a sum or a mean."""
        for each in [each for each in self._reduced if any(each.result is arg for arg in args[:2])]:
            if func not in _DIVISIONS:
                if each.divisor is not None:
                    yield new(each.divisor, each.sizes)
            elif each.result is args[0]:
                # A mean that is divided by a mean of its weights; a number only scales it.
                weights = isinstance(args[1], torch.Tensor)
                of_a_mean = math.prod(each.sizes) * args[1] if weights else each.divisor
                yield new(args[1] if each.divisor is None else of_a_mean, each.sizes)

    def _remember(
        self,
        result: torch.Tensor,
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: object = None,
        ignore_index: int = -100,
        reduce: object = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if reduction == "mean" and size_average is reduce is None and not target.is_floating_point():
            count = _count(target, weight, ignore_index)
            self._found.append(_Remembered(result, _version(result), count, target.numel()))

    def weigh(self, logged: list[Any], rows: int | None = None) -> torch.Tensor | None:
        """Add weights to the entries of `logged` (name, value, weight, reduce): to a recorded cross-entropy its own weight; then, to a mean
        of one number per row, the `rows` of the batch. Returns the number of labels that the first cross-entropy counted, as weight for the
        other entries; None if there is no cross-entropy. Raises `ConfigurationError` if a metric was a cross-entropy only in earlier
        batches. May wait for the device."""
        labels, weighed = None, set()
        for place, (name, value, weight, reduce) in enumerate(logged):
            if (count := self._count_of(name, value)) is not None:
                logged[place] = (name, value, count.weight if weight is None else weight, reduce)
                weighed.add(name)
                labels = count.labels if labels is None else labels
        missing = self._weighed - weighed
        self._weighed |= weighed
        self._decided = True
        if missing & {name for name, *_ in logged} or (missing and not weighed):
            raise ConfigurationError(
                "for earlier batches an evaluation step returned a plain cross-entropy, which is weighted by its counted labels, "
                "but not for this batch. All batches need a weight in the same unit: return 'weight' with the metrics every time"
            )
        if labels is not None:
            for place, (name, value, weight, reduce) in enumerate(logged):
                if weight is None and self._is_over_rows(value, rows):
                    logged[place] = (name, value, rows, reduce)
        return labels

    def beside(self, logged: list[Any], rows: int | None, others: Collection[int] = ()) -> str:
        """After `weigh` found a cross-entropy: a description of an entry of `logged` that is weighted by its labels, but is no mean over
        them or over `rows` rows; "" if there is none, or if enough batches were inspected. `others`: as in `of_other_than_rows`. Waits for
        the device."""
        self._looks -= 1
        if self._looks < 0 or not rows:
            return ""
        counts = {int(each.over.labels) for each in self._found}
        for name, value, weight, reduce in logged:
            if weight is None and reduce == "mean":
                if text := self._over_other_than_rows(name, value, rows, None, {*others, *counts}):
                    return text
                if len(counts) > 1 and name.endswith("loss"):
                    return f"{name!r} beside cross-entropies of {' and '.join(map(str, sorted(counts)))} labels"
        return ""

    def another_look(self) -> CrossEntropies | None:
        """A context for the next batch of an evaluation whose metrics are weighted by rows; None if enough batches were inspected."""
        return CrossEntropies(self._looks - 1) if self._looks > 1 else None

    def _is_over_rows(self, value: Any, rows: int | None) -> bool:
        """Whether a metric is a mean of one number per row."""
        return any(each.is_mean and each.divisor == rows and each.is_in(value) for each in self._reduced)

    def summed(self, logged: list[Any], rows: int | None) -> list[str]:
        """The names of the entries of `logged` that are sums over the `rows` of the batch, but will be averaged."""
        if rows is None or rows < 2:
            return []
        sums = [each for each in self._reduced if each.divisor is None and each.sizes[:1] == (rows,)]
        averaged = [(name, value) for name, value, weight, reduce in logged if weight is None and reduce == "mean"]
        usual = (0, 1, rows)  # numbers that may be equal by chance
        return [
            name
            for name, value in averaged
            if (isinstance(value, torch.Tensor) or value not in usual) and any(each.is_in(value) for each in sums)
        ]

    def _count_of(self, name: str, value: Any) -> Counted | None:
        """The items that a metric counted, if it is a recorded cross-entropy, or a number on the host that equals one; else None."""
        if isinstance(value, torch.Tensor) and (it := next(filter(lambda it: it.is_here(value), self._found), None)):
            return it.over
        if on_device(value) or not isinstance(value, torch.Tensor | float):
            return None
        number = float(value)
        # The first batch decides which numbers are compared: a comparison may wait for a device. Many numbers are 0 or nan.
        if name not in self._weighed and (self._decided or not number or math.isnan(number)):
            return None
        same = (
            it.over
            for it in self._found
            if repr(number) == repr(float(it.result)) and _version(it.result) == it.version
        )
        return next(same, None)

    def of_other_than_rows(
        self, logged: list[Any], rows: int | None = None, whole: int | None = None, others: Collection[int] = ()
    ) -> str:
        """A description of a recorded cross-entropy, or of an entry of `logged` without a weight, that is not a mean over the `rows` of the
        batch; "" if there is none. `whole`: the rows of the whole data set, by which a step may divide. `others`: the sizes of tensors that
        have no rows, such as parameters. For batches whose cross-entropies were not logged unchanged. Waits for the device."""
        for _, _, count, elements in self._found:
            if count.weight is not count.labels:
                return "a cross-entropy with class weights"
            if int(count.labels) < elements:
                return f"a cross-entropy that counts {int(count.labels)} of {elements} labels"
            if rows and elements % rows:
                return f"a cross-entropy of {elements} labels for {rows} rows"
        averaged = [(name, value) for name, value, weight, reduce in logged if weight is None and reduce == "mean"]
        found = (self._over_other_than_rows(name, value, rows, whole, others) for name, value in averaged if rows)
        return next(filter(None, found), "")

    def _over_other_than_rows(
        self, name: str, value: Any, rows: int, whole: int | None, others: Collection[int]
    ) -> str:
        """A description of the metric `value` if it is a mean over other values than `rows` rows; else ""."""
        computed = (each.other_than(rows, others) for each in self._reduced if each.is_in(value))
        if text := next(filter(None, computed), ""):
            return f"{name!r} as {text}"
        sums = [each for each in self._reduced if each.divisor is None] if type(value) is float and value else []
        numbers = {each.result.item(): each.sizes for each in sums}  # the step may have divided the numbers of sums
        for number, sizes in numbers.items():
            for divisor in (*numbers, whole):
                if divisor and math.isclose(value * divisor, number) and not _counts(divisor, rows, sizes):
                    return f"{name!r} as a sum divided by {divisor:g} for {rows} rows"
        return ""


def _reduction(
    new: Callable[..., _Reduced], func: Callable[..., Any], values: torch.Tensor, reduction: str | None
) -> Iterator[_Reduced]:
    """What the 0-dim result of `func` is, if it is a sum or a mean over `values`."""
    if func in (torch.mean, torch.Tensor.mean) or reduction == "mean":
        yield new(values.numel(), (values.numel(),), reduction is None)
    elif func in (torch.nanmean, torch.Tensor.nanmean):
        yield new((~values.isnan()).sum(), tuple(values.shape))
    elif func in _SUMS or reduction == "sum":
        yield new(None, tuple(values.shape))


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
