"""What a step of an evaluation computes: its cross-entropies, sums and means, and multiples and sums of these.

There is no autograd graph in an evaluation, so calls of torch are recorded. Nothing waits for the device, except functions that say so.
Must not know: metrics and their weights, modules, batches, the loop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch.overrides import TorchFunctionMode

from fabricate.metrics.loss_form import is_a_count
from fabricate.metrics.loss_weight import Counted, count_labels
from fabricate.metrics.reading import on_device

_CROSS_ENTROPIES = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)
_MEANS = (torch.mean, torch.Tensor.mean)
_SUMS = (
    *(torch.sum, torch.Tensor.sum, torch.count_nonzero, torch.Tensor.count_nonzero, torch.dot, torch.Tensor.dot),
    *(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.inner, torch.vdot),
)
_DIVISIONS = (
    *(torch.div, torch.true_divide, torch.Tensor.div, torch.Tensor.true_divide, torch.Tensor.__truediv__),
    *(torch.Tensor.div_, torch.Tensor.__itruediv__),
)
_SCALING = (
    *_DIVISIONS,
    *(torch.add, torch.sub, torch.mul, torch.neg, torch.rsub, torch.Tensor.add, torch.Tensor.sub, torch.Tensor.mul),
    *(torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__sub__, torch.Tensor.__rsub__, torch.Tensor.__mul__),
    *(torch.Tensor.__rmul__, torch.Tensor.__neg__, torch.Tensor.neg, torch.Tensor.mul_, torch.Tensor.__imul__),
)
_PRODUCTS = (
    *(torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__),
    *(torch.Tensor.mul_, torch.Tensor.__imul__),
)
_ADDITIONS = (
    *(torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__add__, torch.Tensor.__radd__),
    *(torch.Tensor.__iadd__, torch.sub, torch.Tensor.sub, torch.Tensor.__sub__),
)
"""Sums and differences."""
_ABSOLUTE = (torch.abs, torch.Tensor.abs, torch.Tensor.__abs__)
_COPIES = (
    *(torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.to),
    *(torch.Tensor.type, torch.Tensor.cpu, torch.Tensor.clone, torch.Tensor.detach, torch.clone),
    *(torch.squeeze, torch.Tensor.squeeze, torch.neg, torch.Tensor.neg, torch.Tensor.__neg__, torch.clamp),
    *(
        torch.abs,
        torch.Tensor.abs,
        torch.Tensor.__abs__,
        torch.Tensor.clamp,
        torch.clamp_min,
        torch.Tensor.clamp_min,
        torch.nan_to_num,
        torch.Tensor.nan_to_num,
    ),
)
"""Functions whose result is over the same values as the argument."""
_FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys((torch.sqrt, torch.Tensor.sqrt, torch.rsqrt, torch.Tensor.rsqrt), "sqrt"),
    **dict.fromkeys((torch.exp, torch.Tensor.exp, torch.exp2, torch.Tensor.exp2), "exp"),
    **dict.fromkeys((torch.log, torch.log2, torch.log10, torch.log1p), "log"),
    **dict.fromkeys((torch.Tensor.log, torch.Tensor.log2, torch.Tensor.log10, torch.Tensor.log1p), "log"),
    **dict.fromkeys((torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.Tensor.__rpow__), "pow"),
    **dict.fromkeys((torch.reciprocal, torch.Tensor.reciprocal, torch.Tensor.__rdiv__), "1/x"),
}
"""Functions of one number that are not linear, with their names in messages."""
_STATISTICS: dict[Any, str] = {
    **dict.fromkeys((torch.norm, torch.Tensor.norm, torch.linalg.norm, torch.linalg.vector_norm), "norm"),
    **dict.fromkeys((torch.std, torch.Tensor.std), "std"),
    **dict.fromkeys((torch.var, torch.Tensor.var), "var"),
    **dict.fromkeys((torch.logsumexp, torch.Tensor.logsumexp), "logsumexp"),
    **dict.fromkeys((torch.median, torch.Tensor.median), "median"),
    **dict.fromkeys((torch.max, torch.Tensor.max, torch.amax, torch.Tensor.amax), "max"),
    **dict.fromkeys((torch.min, torch.Tensor.min, torch.amin, torch.Tensor.amin), "min"),
}
"""Functions of all values of a tensor that are not linear, with their names in messages."""
ORDERS = ("median", "max", "min")
"""Those that are no functions of means."""
_DESCRIBED = frozenset({*_FUNCTIONS, *_STATISTICS, *_SCALING, *_ADDITIONS, *_ABSOLUTE})
"""The functions whose result may be a non-linear function of what a step computes."""
_MOST_VECTORS, _MOST_COLUMNS = 100, 100
"""The number of sums and means over the first dimension that are recorded, and of the elements of one."""
_MOST_NUMBERS, _MOST_SUMS, _MOST_MEANS = 10_000, 1000, 8
"""The number of sums and means that are recorded in one batch, and of sums and of means that are followed when they are added up."""


class CrossEntropy(NamedTuple):
    """A mean cross-entropy that was computed."""

    result: torch.Tensor
    version: int | None
    over: Counted
    elements: int
    """The number of labels, including those that did not count."""

    def is_here(self, value: torch.Tensor) -> bool:
        """Whether `value` is this result: it uses the same memory, which was not changed in place."""
        return value.data_ptr() == self.result.data_ptr() and self.is_unchanged()

    def is_unchanged(self) -> bool:
        """Whether the result was not changed in place."""
        return _version(self.result) == self.version


class Reduced(NamedTuple):
    """A sum or a mean over the elements of a tensor, as a 0-dim tensor."""

    result: torch.Tensor
    version: int | None
    divisor: torch.Tensor | float | None
    """What the sum was divided by; None for a sum."""
    sizes: tuple[int, ...]
    """The sizes of the tensor; for a mean the number of its elements."""
    is_mean: bool = False
    """Whether it is the result of `mean` or of a loss function like mse_loss, or a sum divided by the number of its elements or of equal
    groups of them, such as rows, perhaps scaled by a number, or a sum of such means over equal sizes."""
    terms: tuple[tuple[int, ...], ...] = ()
    """For sums that were added up one by one, as in a loop over rows: the sizes of the tensor of each."""
    means: int = 1
    """How many means were added up, as in a loop over rows; `divisor` and `sizes` are those of one of them."""
    mean_of_means: bool = False
    """Whether the sum of these means was divided by their number."""

    def is_over(self, rows: int | None) -> bool:
        """Whether this is a mean of one number per row."""
        return (self.mean_of_means and self.means == rows) or (self.is_mean and self.divisor == rows)

    def is_sum_over(self, rows: int) -> bool:
        """Whether this is a sum over tensors that each have `rows` rows."""
        return self.divisor is None and all(sizes[:1] == (rows,) for sizes in self.terms or (self.sizes,))

    def is_unchanged(self) -> bool:
        """Whether the result was not changed in place."""
        return _version(self.result) == self.version

    def is_in(self, value: Any) -> bool:
        """Whether `value` is this tensor, which was not changed in place, or its number, if it is on the host."""
        if not self.is_unchanged():
            return False
        if isinstance(value, torch.Tensor):
            return value.data_ptr() == self.result.data_ptr()
        return type(value) in (int, float) and not on_device(self.result) and repr(value) == repr(self.result.item())

    def other_than(self, rows: int, others: Collection[int], counts: Collection[int] = ()) -> str:
        """A description if this is a mean over something other than `rows` rows, or as many values of each; else "". `others`: the sizes
        of tensors without rows. `counts`: numbers of labels. Waits for the device."""
        if self.is_over(rows) or self.divisor is None or (divisor := float(self.divisor)) in counts:
            return ""
        if self.terms and not self._is_loop_over(rows, others):
            return ""
        counted = isinstance(self.divisor, torch.Tensor)
        if divisor % rows == 0 if counted else is_a_count(divisor, rows, self.sizes):
            return ""
        if self.sizes != (divisor,):
            return f"a sum divided by {divisor:g} for {rows} rows"
        return "" if divisor in others else f"a mean over {divisor:g} values for {rows} rows"

    def _is_loop_over(self, rows: int, others: Collection[int]) -> bool:
        """Whether each of the terms was probably computed from one row of a batch of `rows`: there are at most as many terms as rows,
        and the first dimension of none is a multiple of the number of rows."""
        of_one_row = (bool(sizes) and sizes[0] % rows and math.prod(sizes) not in others for sizes in self.terms)
        return len(self.terms) <= rows and all(of_one_row)


class StepRecord(TorchFunctionMode):
    """A context that records every mean cross-entropy (or nll_loss), every other mean, and every sum that is computed inside it. Costs a
    Python call per call of torch. Entering it begins a new record."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[CrossEntropy] = []
        self._reduced: dict[int, list[Reduced]] = {}
        """By the id of the result: sums, means, and means to which numbers or other means were added, or which were multiplied by numbers.
        An entry holds its result, so that the id is not used again."""
        self._functions: dict[int, tuple[Reduced, str]] = {}
        """By the id of the result: non-linear functions of means, and `ORDERS`, perhaps scaled, with their names. `is_mean`: whether
        the mean was computed by itself, and not inside of the function. `terms`: the sizes of the factors of a product. `divisor`: the
        mean of which it is the absolute value, which is linear unless the mean changes its sign."""

        self._stacks: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """By the id of the result: stacks of numbers, such as the losses of several heads, and what was stacked."""
        self._elements: list[tuple[torch.Tensor, int | None]] = []
        """Elements that were taken out of tensors, with their versions."""
        self._vectors: list[tuple[torch.Tensor, int | None, tuple[int, ...] | None]] = []
        """Sums and means over the first dimension that are not one number, such as one of each column: the result, its version, and for a
        sum the sizes of what was summed up."""

    def __enter__(self) -> Self:
        self._found, self._reduced, self._functions, self._stacks = [], {}, {}, {}
        self._elements, self._vectors = [], []
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def pause(self) -> bool:
        """Record nothing until `resume`. Does nothing and returns False if other modes of torch functions are active too."""
        if torch.overrides._get_current_function_mode_stack() != [self]:  # type: ignore[no-untyped-call]
            return False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return True

    def resume(self) -> None:
        """Record again."""
        super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_number(result):
            if func in _CROSS_ENTROPIES:
                self._remember(result, *args, **kwargs)
                args = args[1:]  # a sum is one over labels
            if func is torch.Tensor.__getitem__ and len(self._elements) < _MOST_NUMBERS:
                self._elements.append((result, _version(result)))
            if args and isinstance(args[0], torch.Tensor) and args[0].layout is torch.strided:
                self._describe(func, result, args, kwargs.get("reduction"))
        elif func is torch.stack and args and all(id(part) in self._reduced for part in args[0]):
            self._stacks[id(result)] = result, list(args[0])
        elif func in _MEANS or func in _SUMS:
            self._remember_vector(func, result, *args, **kwargs)
        return result

    def _describe(
        self, func: Callable[..., Any], result: torch.Tensor, args: tuple[Any, ...], reduction: str | None
    ) -> None:
        """Record what the number `result` of `func` is, if it is a sum, a mean, or computed from one."""
        version = _version(result)
        if result is args[0]:
            self._forget_changed(result, version)
        new = partial(Reduced, result, version)
        of_labels = self._found[-1].over.weight if self._found and self._found[-1].result is result else None
        described = self._of_stack(new, func, args[0]) or list(_reduction(new, func, args[0], reduction, of_labels))
        for copied in args[:1] if func in _COPIES else args[1:3] if func is torch.where else ():
            described += [each._replace(result=result, version=version) for each in self._unchanged(copied)]
        if func in _SCALING or func in _ADDITIONS:
            described += self._scaled(new, func, args)
        if func in _ADDITIONS:
            described += self._added(new, *args[:2])
        self._describe_function(new, func, args)
        if described and len(self._reduced) < _MOST_NUMBERS:
            self._reduced[id(result)] = described

    def _of_stack(self, new: Callable[..., Reduced], func: Callable[..., Any], values: torch.Tensor) -> list[Reduced]:
        """What the sum or mean over `values` is, if these are a stack of means."""
        stack, parts = self._stacks.get(id(values), (values, []))
        if not parts or func not in (*_MEANS, *_SUMS) or _version(stack):
            return []
        known = [[each for each in self._unchanged(part) if each.divisor is not None] for part in parts]
        combined = _combined(new, tuple(parts), known, is_product=False) if all(known) else []
        return [_quotient(new, each, len(parts)) for each in combined] if func in _MEANS else combined

    def _describe_function(self, new: Callable[..., Reduced], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Record the result of `func` if it is a non-linear function of means, or a multiple or sum of such functions."""
        if len(self._functions) >= _MOST_NUMBERS or func not in _DESCRIBED:
            return
        of = []
        if func in _FUNCTIONS:
            of = [(new(None, each, is_mean=True), _FUNCTIONS[func]) for each in self._sizes_of_means(args[0])]
        elif func in _STATISTICS and args[0].numel() > 1:
            of = [(new(None, tuple(args[0].shape)), _STATISTICS[func])]
        elif func in _ABSOLUTE:
            of = [(new(args[0], each, is_mean=True), "abs") for each in self._sizes_of_means(args[0])]
        elif func in _PRODUCTS and all(means := [self._sizes_of_means(arg)[:1] for arg in args[:2]]):
            of = [(new(None, (), terms=tuple(itertools.chain(*means))), "product")]
        of += self._function_of_functions(new(None, ()), func, args[:2])
        self._functions |= {id(each.result): (each, name) for each, name in of[:1]}

    def _function_of_functions(
        self, new: Reduced, func: Callable[..., Any], args: tuple[Any, ...]
    ) -> Iterator[tuple[Reduced, str]]:
        """What the result `new` of `func` is, if one of `args` is a non-linear function of means. A sum of such functions may be one over
        rows, and the square of a norm is one."""
        if func in _DIVISIONS or (len(_numbers(args)) == len(args) - 1 and _FUNCTIONS.get(func) != "pow"):
            for each, name in map(self._function, args):
                if each:
                    yield each._replace(result=new.result, version=new.version), name

    def _forget_changed(self, result: torch.Tensor, version: int | None) -> None:
        """Forget what the argument and result of a function is, unless at most this function changed it."""
        if version is not None and id(result) in self._reduced:
            kept = (each for each in self._reduced[id(result)] if each.version in (version - 1, version))
            self._reduced[id(result)] = list(kept)

    def _unchanged(self, value: Any) -> list[Reduced]:
        return [each for each in self._reduced.get(id(value), []) if each.is_unchanged()]

    def _remember_vector(
        self, func: Callable[..., Any], result: Any, values: Any = None, dim: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Record the `result` of a sum or mean over `dim` if this has the first dimension of `values`."""
        values, dim = kwargs.get("input", values), kwargs.get("axis", dim)
        dims = {dim} if isinstance(dim, int) else set(dim) if isinstance(dim, tuple | list) else set()
        if not isinstance(result, torch.Tensor) or not isinstance(values, torch.Tensor) or not dims & {0, -values.ndim}:
            return
        if result.numel() <= _MOST_COLUMNS and len(self._vectors) < _MOST_VECTORS:
            sizes = (values.numel() // max(result.numel(), 1),)
            self._vectors.append((result, _version(result), sizes if func in _SUMS else None))

    def _is_element(self, value: torch.Tensor) -> bool:
        """Whether `value` was taken out of a tensor, and not changed."""
        return any(
            value.data_ptr() == each.data_ptr() and _version(each) == version for each, version in self._elements
        )

    def _columns(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """The elements of sums and means over the first dimension, with the sizes of what was summed up. Waits for the device."""
        for vector, version, sizes in self._vectors:
            if _version(vector) == version and not vector.is_complex():
                for number in vector.flatten().tolist():
                    yield float(number), sizes or ()

    def _function(self, value: Any) -> tuple[Reduced | None, str]:
        each, name = self._functions.get(id(value), (None, ""))
        return (each, name) if each and each.is_unchanged() else (None, "")

    def _sizes_of_means(self, value: torch.Tensor) -> list[tuple[int, ...]]:
        """The sizes of the tensors over which `value` is a recorded mean, or a cross-entropy."""
        means = [each.sizes for each in self._reduced.get(id(value), []) if each.divisor is not None]
        return means + [(each.elements,) for each in self._found if each.result is value]

    def _scaled(self, new: Callable[..., Reduced], func: Callable[..., Any], args: tuple[Any, ...]) -> list[Reduced]:
        """What the sum, difference, product or quotient of `args` is, if one of them is a sum or a mean."""
        known = [self._reduced.get(id(arg), []) for arg in (*args, None)[:2]]
        if func in _DIVISIONS:
            return [_quotient(new, each, args[1]) for each in known[0]]
        combined = _combined(new, args, known, is_product=func in _PRODUCTS)
        if func not in _PRODUCTS or len(numbers := _numbers(args)) != 1 or not numbers[0]:
            return combined
        return [*combined, *(_shares(new, known, numbers[0]) or _multiples(new, known))]

    def _added(self, new: Callable[..., Reduced], *args: Any) -> Iterator[Reduced]:
        """What the sum of two sums is, or of a sum and a number of which nothing is known, such as the 0 with which a loop begins."""
        known = [self._reduced.get(id(arg), []) for arg in args]
        sums = [next((each for each in of_arg if each.divisor is None), None) for of_arg in known]
        if any(of_arg and not each for of_arg, each in zip(known, sums, strict=True)):
            return  # a mean
        terms = tuple(itertools.chain.from_iterable(each.terms or (each.sizes,) for each in sums if each))
        if terms and len(terms) < _MOST_SUMS:
            yield new(None, (sum(map(math.prod, terms)),), False, terms)

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
            count = count_labels(target, weight, ignore_index)
            self._found.append(CrossEntropy(result, _version(result), count, target.numel()))

    def _all(self) -> Iterator[Reduced]:
        return itertools.chain.from_iterable(self._reduced.values())

    def _sums(self) -> list[Reduced]:
        """The sums over one tensor."""
        return [each for each in self._all() if each.divisor is None and not each.terms]


def _reduction(
    new: Callable[..., Reduced],
    func: Callable[..., Any],
    values: torch.Tensor,
    reduction: str | None,
    of_labels: torch.Tensor | None,
) -> Iterator[Reduced]:
    """What the 0-dim result of `func` is, if it is a sum or a mean over `values`. `of_labels`: by what a cross-entropy divided its sum."""
    if of_labels is not None:
        yield new(of_labels, (values.numel(),))
    elif func in _CROSS_ENTROPIES and reduction == "mean" and values.is_floating_point():
        number = values.numel() // max(values.shape[values.ndim > 1], 1)  # without the classes
        yield new(number, (number,), True)
    elif func in _MEANS or reduction == "mean":
        yield new(values.numel(), (values.numel(),), True)
    elif reduction == "batchmean":
        yield new(len(values), (len(values),), True)
    elif func in (torch.nanmean, torch.Tensor.nanmean):
        yield new((~values.isnan()).sum(), tuple(values.shape))
    elif func in _SUMS or reduction == "sum":
        yield new(None, tuple(values.shape))


def _combined(
    new: Callable[..., Reduced], args: tuple[Any, ...], known: list[list[Reduced]], is_product: bool
) -> list[Reduced]:
    """What a sum, difference or product of `args` is, or a sum of more of them, of which sums and means are `known`."""
    means = [[each for each in part if each.divisor is not None] for part in known]
    every = list(itertools.chain.from_iterable(means))
    alike = {}  # a loss that is added up over many steps is one mean
    for each in every[:_MOST_MEANS]:
        alike[id(each.divisor) if isinstance(each.divisor, torch.Tensor) else each.divisor, each.sizes] = each
    is_linear = len(_numbers(args)) + sum(map(bool, means)) == len(args) and not (is_product and all(means))
    is_mean = is_linear and len(alike) == 1 and all(each.is_mean for each in every)
    count = sum(part[0].means for part in means if part)
    return [new(each.divisor, each.sizes, is_mean, means=count) for each in alike.values()]


def _multiples(new: Callable[..., Reduced], known: list[list[Reduced]]) -> list[Reduced]:
    """What multiples of `known` sums are, such as a percentage before its division, or the intersection in a Dice score."""
    return [new(None, each.sizes, False, each.terms) for part in known for each in part if each.divisor is None]


def _shares(new: Callable[..., Reduced], known: list[list[Reduced]], factor: float) -> list[Reduced]:
    """What products of `known` sums and `factor` are, if this is 1 divided by the number of their elements, or 100 divided by this or a
    part of it."""
    shares = []
    for each in itertools.chain.from_iterable(known):
        size = math.prod(each.sizes)
        number = round(100 / factor) if 0 < factor < 100 else 0
        if each.divisor is None and math.isclose(factor * size, 1):
            shares.append(_quotient(new, each, size))
        elif each.divisor is None and number and size % number == 0 and math.isclose(factor * number, 100):
            shares.append(_quotient(new, each, number))
    return shares


def _numbers(args: tuple[Any, ...]) -> list[int | float]:
    return [arg for arg in args if isinstance(arg, int | float)]


def _quotient(new: Callable[..., Reduced], dividend: Reduced, divisor: Any) -> Reduced:
    """What a sum or mean is that was divided by `divisor`."""
    sizes, terms, means = dividend.sizes, dividend.terms, dividend.means
    number = None if isinstance(divisor, torch.Tensor) else divisor
    if dividend.divisor is None:
        is_mean = len(terms) <= 1 and number is not None and number >= 1 and math.prod(sizes) % number == 0
        return new(divisor, sizes, is_mean, terms)
    if number is None:  # a mean that is divided by a mean of its weights
        return new(math.prod(sizes) * divisor, sizes, False, terms)
    return new(dividend.divisor, sizes, dividend.is_mean, terms, means, mean_of_means=number == means > 1)


def _is_number(result: Any) -> bool:
    """Whether `result` is a tensor of one real number, of no dimension or one, with memory of its own: not one inside vmap or grad of
    torch.func."""
    if not isinstance(result, torch.Tensor) or result.is_complex() or result.layout is not torch.strided:
        return False
    if result.ndim > 1 or (result.ndim and len(result) != 1):
        return False
    try:
        result.data_ptr()
    except RuntimeError:
        return False
    return True


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
