"""What a step of an evaluation computes: its cross-entropies, sums and means, from which the weights of its metrics follow.

There is no autograd graph in an evaluation, so calls of torch are recorded. Nothing waits for the device, except functions that say so.
Must not know: modules, batches, the loop.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fabricate.errors import ConfigurationError
from fabricate.metrics.loss_form import is_a_count
from fabricate.metrics.loss_weight import Counted, count_labels
from fabricate.metrics.reading import on_device

_CROSS_ENTROPIES = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)
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
    torch.Tensor.__iadd__,
)
_COPIES = (
    *(torch.Tensor.float, torch.Tensor.double, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.to),
    *(torch.Tensor.type, torch.Tensor.cpu, torch.Tensor.clone, torch.Tensor.detach, torch.clone),
    *(torch.squeeze, torch.Tensor.squeeze, torch.neg, torch.Tensor.neg, torch.Tensor.__neg__),
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
_MOST_LOOKS, _MOST_NUMBERS, _MOST_TERMS = 3, 1000, 8
"""The number of batches that are inspected, of sums and means that are recorded in one batch, and of means in a sum that are followed."""


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


class StepWatch(TorchFunctionMode):
    """A context that records every mean cross-entropy (or nll_loss), every other mean, and every sum that is computed inside it. Costs a
    Python call per call of torch."""

    def __init__(self, looks: int = _MOST_LOOKS) -> None:
        """`looks`: the number of batches without a cross-entropy that are inspected."""
        super().__init__()
        self._looks = looks
        self._found: list[_Remembered] = []
        self._reduced: dict[int, list[_Reduced]] = {}
        """By the id of the result: sums, means, and means to which numbers or other means were added, or which were multiplied by numbers.
        An entry holds its result, so that the id is not used again."""
        self._functions: dict[int, tuple[_Reduced, str]] = {}
        """By the id of the result: non-linear functions of means, perhaps scaled, with the name of the function."""
        self._weighed: set[str] = set()
        """The names of the metrics that were cross-entropies."""
        self._decided = False
        """Whether a batch was weighed before."""
        self._numbers: dict[str, float] = {}
        """The first value of each metric that is a Python number."""
        self._labels: torch.Tensor | None = None
        """The labels of the first cross-entropy in `logged` of this batch, by which metrics beside it are weighted."""
        self._over_rows: dict[str, bool] = {}
        """For metrics beside a cross-entropy of which one batch decides: whether they are means of one number per row."""
        self._inspected: Counter[str] = Counter()
        """How many batches were inspected for metrics beside a cross-entropy, by name; `_MOST_LOOKS` for one that was described."""
        self._unclear: dict[str, set[bool]] = {}
        """For metrics beside a cross-entropy: what was found where too little was known to decide."""

    def __enter__(self) -> StepWatch:
        self._found, self._reduced, self._functions = [], {}, {}
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
            if args and isinstance(args[0], torch.Tensor) and args[0].layout is torch.strided:
                self._describe(func, result, args, kwargs.get("reduction"))
        return result

    def _describe(
        self, func: Callable[..., Any], result: torch.Tensor, args: tuple[Any, ...], reduction: str | None
    ) -> None:
        """Record what the number `result` of `func` is, if it is a sum, a mean, or computed from one."""
        version = _version(result)
        if result is args[0]:
            self._forget_changed(result, version)
        new = partial(_Reduced, result, version)
        of_labels = self._found[-1].over.weight if self._found and self._found[-1].result is result else None
        described = list(_reduction(new, func, args[0], reduction, of_labels))
        if func in _COPIES:
            described += [each._replace(result=result, version=version) for each in self._unchanged(args[0])]
        if func in _SCALING or func in _ADDITIONS:
            described += self._scaled(new, func, args)
        if func in _ADDITIONS:
            described += self._added(new, *args[:2])
        self._describe_function(new, func, args)
        if described and len(self._reduced) < _MOST_NUMBERS:
            self._reduced[id(result)] = described

    def _describe_function(self, new: Callable[..., _Reduced], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Record the result of `func` if it is a non-linear function of a mean, or a multiple or sum of such functions."""
        if len(self._functions) >= _MOST_NUMBERS or not (func in _FUNCTIONS or func in _SCALING or func in _ADDITIONS):
            return
        sizes = self._sizes_of_means(args[0]) if func in _FUNCTIONS else []
        of = [(new(None, each), _FUNCTIONS[func]) for each in sizes]
        if len(_numbers(args[:2])) == len(args[:2]) - 1:  # a sum of functions may be one over rows
            of += [(new(None, each.sizes), name) for each, name in map(self._function, args[:2]) if each]
        self._functions |= {id(each.result): (each, name) for each, name in of[:1]}

    def _forget_changed(self, result: torch.Tensor, version: int | None) -> None:
        """Forget what the argument and result of a function is, unless at most this function changed it."""
        if version is not None and id(result) in self._reduced:
            kept = (each for each in self._reduced[id(result)] if each.version in (version - 1, version))
            self._reduced[id(result)] = list(kept)

    def _unchanged(self, value: torch.Tensor) -> list[_Reduced]:
        return [each for each in self._reduced.get(id(value), []) if each.is_unchanged()]

    def _function(self, value: Any) -> tuple[_Reduced | None, str]:
        each, name = self._functions.get(id(value), (None, ""))
        return (each, name) if each and each.is_unchanged() else (None, "")

    def _sizes_of_means(self, value: torch.Tensor) -> list[tuple[int, ...]]:
        """The sizes of the tensors over which `value` is a recorded mean, or a cross-entropy."""
        means = [each.sizes for each in self._reduced.get(id(value), []) if each.divisor is not None]
        return means + [(each.elements,) for each in self._found if each.result is value]

    def function_of_a_mean(self, logged: list[Any], rows: int, others: Collection[int]) -> str:
        """A description of an entry of `logged` that is a non-linear function of a mean over the batch of `rows` rows, such as its root; ""
        if there is none. `others`: the sizes of tensors without rows."""
        for name, value, weight, reduce in logged:
            if weight is None and reduce == "mean" and isinstance(value, torch.Tensor):
                for each, function in self._functions.values():
                    size = math.prod(each.sizes)
                    if each.is_in(value) and (size not in others or size == rows):
                        return f"{name!r} as a non-linear function ({function}) of a mean over the batch"
        return ""

    def _scaled(self, new: Callable[..., _Reduced], func: Callable[..., Any], args: tuple[Any, ...]) -> list[_Reduced]:
        """What the sum, difference, product or quotient of `args` is, if one of them is a sum or a mean."""
        known = [self._reduced.get(id(arg), []) for arg in (*args, None)[:2]]
        if func in _DIVISIONS:
            return [_quotient(new, each, args[1]) for each in known[0]]
        combined = _combined(new, args, known, is_product=func in _PRODUCTS)
        if func not in _PRODUCTS or len(numbers := _numbers(args)) != 1 or not numbers[0]:
            return combined
        return [*combined, *(_shares(new, known, numbers[0]) or _multiples(new, known))]

    def _added(self, new: Callable[..., _Reduced], *args: Any) -> Iterator[_Reduced]:
        """What the sum of two sums is, or of a sum and a number of which nothing is known, such as the 0 with which a loop begins."""
        known = [self._reduced.get(id(arg), []) for arg in args]
        sums = [next((each for each in of_arg if each.divisor is None), None) for of_arg in known]
        if any(of_arg and not each for of_arg, each in zip(known, sums, strict=True)):
            return  # a mean
        terms = tuple(itertools.chain.from_iterable(each.terms or (each.sizes,) for each in sums if each))
        if terms and len(terms) < _MOST_NUMBERS:
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
        unweighed = missing & {name for name, *_ in logged}
        # A number that equals the cross-entropy up to rounding gets the weight of the others: its labels, if no other count is there.
        if (unweighed and not (weighed and self._counts_are_alike())) or (missing and not weighed):
            raise ConfigurationError(
                "for earlier batches an evaluation step returned a plain cross-entropy, which is weighted by its counted labels, "
                "but not for this batch. All batches need a weight in the same unit: return 'weight' with the metrics every time. A number "
                "that was equal to a cross-entropy by chance was taken for it; self.log(name, value, weight=...) sets its weight"
            )
        self._labels = labels
        if labels is not None:
            for place, (name, value, weight, reduce) in enumerate(logged):
                if weight is None and name not in unweighed and self._weighs_rows(name, value, rows):
                    logged[place] = (name, value, rows, reduce)
        return labels

    def _counts_are_alike(self) -> bool:
        """Whether all recorded cross-entropies count equally many labels. Waits for the device."""
        return len({int(each.over.labels) for each in self._found}) == 1

    def beside(self, logged: list[Any], rows: int | None, others: Collection[int] = ()) -> str:
        """After `weigh` found a cross-entropy: a description of an entry of `logged` that is weighted by its labels, but is no mean over
        them or over `rows` rows; "" if there is none, or if enough batches were inspected. `others`: as in `of_other_than_rows`. Waits for
        the device."""
        if not rows:
            return ""
        if text := self._decided_late() or self._over_no_labels(logged, rows):
            return text
        self._looks -= 1
        return self._over_others(logged, rows, others) if self._looks >= 0 else ""

    def _decided_late(self) -> str:
        """A description of a metric that was weighted by rows in some batches and by labels in others; "" if there is none."""
        for name, found in self._unclear.items():
            if len(found | {self._over_rows.get(name, True in found)}) == 2:
                del self._unclear[name]
                return f"{name!r} as a number that was taken for a mean over rows in one batch and for one over labels in another"
        return ""

    def _over_others(self, logged: list[Any], rows: int, others: Collection[int]) -> str:
        """A description of an entry of `logged` that is a recorded mean over values other than the labels by which it is weighted; "" if
        there is none. Waits for the device."""
        counts = {int(each.over.labels) for each in self._found}
        weights = counts if self._labels is None else {int(self._labels)}
        for name, value, weight, reduce in logged:
            if weight is None and reduce == "mean":
                text = self._over_other_than_rows(name, value, rows, None, others, weights)
                text = text or self._over_columns(name, value, rows, others, counts)
                if not text and len(counts) > 1 and name.endswith("loss"):
                    text = f"{name!r} beside cross-entropies of {' and '.join(map(str, sorted(counts)))} labels"
                if text:
                    self._looks = 0
                    self._inspected[name] = _MOST_LOOKS
                    return text
        return ""

    def _over_columns(self, name: str, value: Any, rows: int, others: Collection[int], counts: Collection[int]) -> str:
        """A description of the metric `value` if it is a mean over several values per row other than the labels that count (the columns of
        a regression, or all positions, also the ignored ones), and rows have unequal numbers of labels; else ""."""
        labels = {*counts, *others}
        if not any(count % rows for count in counts):
            return ""
        for each in self._all():
            if each.is_mean and each.divisor not in labels and not each.is_over(rows) and each.is_in(value):
                return f"{name!r} as a mean over {each.divisor} values for {rows} rows"
        return ""

    def _over_no_labels(self, logged: list[Any], rows: int) -> str:
        """A description of an entry of `logged` that is weighted by the labels, if these are not as many in each row, but that is not known
        as a mean over them, such as a score of NumPy or the result of `nanmean`; "" if there is none. Each is inspected in the first
        batches in which its value differs from that in the first batch, because the mean of a constant is the same with any weights, and
        one value may be that of something else by chance. Waits for the device for Python numbers, and in the first batches."""
        for name, value, weight, reduce in logged:
            if weight is not None or reduce != "mean" or self._inspected[name] >= _MOST_LOOKS:
                continue
            if self._function(value)[0] or (on_device(value) and self._looks <= 0):
                continue
            if not math.isfinite(number := float(value)) or self._numbers.setdefault(name, number) == number:
                continue
            if self._labels is None or (labels := int(self._labels)) % rows == 0:
                continue  # perhaps as many labels in every row
            self._inspected[name] += 1
            if text := self._other_than_labels(value, rows, labels):
                self._inspected[name] = _MOST_LOOKS
                return f"{name!r} as {text}"
        return ""

    def _other_than_labels(self, value: Any, rows: int, labels: int) -> str:
        """A description of the metric `value` if it is not known as a mean over the `labels`; else "". Waits for the device."""
        counts = {rows, *(int(each.over.labels) for each in self._found)}
        if isinstance(value, float) and not self._is_recorded(value, counts):
            return "a number that was computed outside of torch"
        known = {float(each.divisor) for each in self._all() if each.divisor is not None and each.is_in(value)}
        if not known:
            return "" if isinstance(value, float) else "a number that is not known as a mean over labels"
        return "" if known == {labels} else f"a mean over {min(known):g} values for {rows} rows"

    def _is_recorded(self, value: float, counts: Collection[int]) -> bool:
        """Whether `value` is a recorded result, or a recorded sum divided by one of `counts` or by another sum. Waits for the device."""
        if any(each.is_in(value) for each in self._all()) or (value and self._divisor(value, 1, None, ()) is not None):
            return True
        if value > 0:  # perhaps a perplexity, or in bits
            losses = (math.log(value), value * math.log(2))
            if any(math.isclose(loss, float(each.result), rel_tol=1e-6) for loss in losses for each in self._found):
                return True
        sums = [float(each.result) for each in self._sums()]
        return any(math.isclose(number, value * count) for number in sums for count in counts)

    def _all(self) -> Iterator[_Reduced]:
        return itertools.chain.from_iterable(self._reduced.values())

    def another_look(self) -> StepWatch | None:
        """A context for the next batch of an evaluation whose metrics are weighted by rows; None if enough batches were inspected."""
        return StepWatch(self._looks - 1) if self._looks > 1 else None

    def _weighs_rows(self, name: str, value: Any, rows: int | None) -> bool:
        """Whether a metric is a mean of one number per row. A mean of means may be one of two metrics in a batch of two rows, so the first
        batch decides about it. A Python number may be rounded, or equal to something else by chance: the first value decides in a batch
        that does not have as many labels as rows; this may wait for the device."""
        if not rows or not isinstance(value, float):
            over = [each for each in self._all() if each.is_over(rows) and each.is_in(value)]
            return any(not each.mean_of_means for each in over) or self._over_rows.setdefault(name, bool(over))
        if name not in self._over_rows:
            if self._labels is not None and int(self._labels) == rows:
                return False  # the weight is the same
            is_over = self._is_made_of_mean_over(value, rows)
            if value in (0, 1, 100):  # the usual values of many metrics
                self._unclear.setdefault(name, set()).add(is_over)
                return is_over
            self._over_rows[name] = is_over
        return self._over_rows[name]

    def _is_made_of_mean_over(self, value: float, rows: int) -> bool:
        """Whether `value` is a mean of one number per row, its difference from 1, or a hundred times these (a percentage), also if the mean
        was made of a sum outside of torch. Waits for the device."""
        sums = [each for each in self._sums() if each.is_unchanged()]
        if not value and any(each.sizes != (rows,) and not float(each.result) for each in sums):
            return False  # it may come from this sum
        means = [float(each.result) for each in self._all() if each.is_over(rows) and each.is_unchanged()]
        means += [float(each.result) / rows for each in sums if each.sizes == (rows,)]
        # A sum over several values of each row that is 0, or its difference from 1, says too little.
        parts = [*means, *(1 - mean for mean in means), *filter(None, _per_row(sums, rows))]
        return any(math.isclose(value, scale * part) for part in parts for scale in (1, 100))

    def gives_losses_over_rows(self, logged: list[Any], rows: int) -> bool:
        """Whether the losses in `logged`, or all its entries if none is called a loss, are recorded means over one value for each of `rows`
        rows."""
        averaged = [(name, value) for name, value, weight, reduce in logged if weight is None and reduce == "mean"]
        losses = [value for name, value in averaged if name.endswith("loss")] or [value for _, value in averaged]
        over_rows = [each for each in self._all() if each.sizes == (rows,) and each.divisor == rows]
        return bool(losses) and all(any(each.is_in(value) for each in over_rows) for value in losses)

    def summed(self, logged: list[Any], rows: int | None, others: Collection[int] = ()) -> list[str]:
        """The names of the entries of `logged` that are sums over the `rows` of the batch, but will be averaged. `others`: the sizes of
        tensors without rows."""
        if rows is None or rows < 2:
            return []
        over_rows = [each for each in self._sums() if each.sizes[:1] == (rows,)]
        found = [each for each in over_rows if math.prod(each.sizes) not in others]
        averaged = [(name, value) for name, value, weight, reduce in logged if weight is None and reduce == "mean"]
        usual = (0, 1, rows)  # numbers that may be equal by chance
        return [
            name
            for name, value in averaged
            if (isinstance(value, torch.Tensor) or value not in usual) and any(each.is_in(value) for each in found)
        ]

    def _sums(self) -> list[_Reduced]:
        """The sums over one tensor."""
        return [each for each in self._all() if each.divisor is None and not each.terms]

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
        self,
        name: str,
        value: Any,
        rows: int,
        whole: int | None,
        others: Collection[int],
        counts: Collection[int] = (),
    ) -> str:
        """A description of the metric `value` if it is a mean over other values than `rows` rows; else "". See `other_than`."""
        computed = (each.other_than(rows, others, counts) for each in self._all() if each.is_in(value))
        if text := next(filter(None, computed), ""):
            return f"{name!r} as {text}"
        divisor = self._divisor(value, rows, whole, counts) if type(value) is float and value else None
        return "" if divisor is None else f"{name!r} as a sum divided by {divisor:g} for {rows} rows"

    def _divisor(self, value: float, rows: int, whole: int | None, counts: Collection[int]) -> float | None:
        """By what the step divided the number of a sum, if `value` is such a quotient and no mean over rows or labels; else None."""
        numbers = ((each.result.item(), each.sizes) for each in self._sums())
        sums = [(number, sizes) for number, sizes in numbers if math.isfinite(number)]
        if any(is_a_count(number / value, rows, sizes) for number, sizes in sums):
            return None  # what else it is equal to is chance
        counted = [number for number, _ in sums if number and number % rows and number not in counts]
        for number, _ in sums:
            for divisor in [*counted, whole] if whole else counted:
                if math.isclose(value * divisor, number):
                    return divisor
        return None


def _reduction(
    new: Callable[..., _Reduced],
    func: Callable[..., Any],
    values: torch.Tensor,
    reduction: str | None,
    of_labels: torch.Tensor | None,
) -> Iterator[_Reduced]:
    """What the 0-dim result of `func` is, if it is a sum or a mean over `values`. `of_labels`: by what a cross-entropy divided its sum."""
    if of_labels is not None:
        yield new(of_labels, (values.numel(),))
    elif func in (torch.mean, torch.Tensor.mean) or reduction == "mean":
        yield new(values.numel(), (values.numel(),), True)
    elif reduction == "batchmean":
        yield new(len(values), (len(values),), True)
    elif func in (torch.nanmean, torch.Tensor.nanmean):
        yield new((~values.isnan()).sum(), tuple(values.shape))
    elif func in _SUMS or reduction == "sum":
        yield new(None, tuple(values.shape))


def _combined(
    new: Callable[..., _Reduced], args: tuple[Any, ...], known: list[list[_Reduced]], is_product: bool
) -> list[_Reduced]:
    """What a sum, difference or product of `args` is, of which sums and means are `known`."""
    means = [[each for each in part if each.divisor is not None] for part in known]
    every = [*means[0], *means[1]]
    alike = {}  # a loss that is added up over many steps is one mean
    for each in every[:_MOST_TERMS]:
        alike[id(each.divisor) if isinstance(each.divisor, torch.Tensor) else each.divisor, each.sizes] = each
    is_linear = len(_numbers(args)) + sum(map(bool, means)) == len(args) and not (is_product and all(means))
    is_mean = is_linear and len(alike) == 1 and all(each.is_mean for each in every)
    count = sum(part[0].means for part in means if part)
    return [new(each.divisor, each.sizes, is_mean, means=count) for each in alike.values()]


def _multiples(new: Callable[..., _Reduced], known: list[list[_Reduced]]) -> list[_Reduced]:
    """What multiples of `known` sums are, such as a percentage before its division, or the intersection in a Dice score."""
    sums = (each for part in known for each in part if each.divisor is None)
    return [new(None, each.sizes, False, each.terms or (each.sizes,)) for each in sums]


def _shares(new: Callable[..., _Reduced], known: list[list[_Reduced]], factor: float) -> list[_Reduced]:
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


def _quotient(new: Callable[..., _Reduced], dividend: _Reduced, divisor: Any) -> _Reduced:
    """What a sum or mean is that was divided by `divisor`."""
    sizes, terms, means = dividend.sizes, dividend.terms, dividend.means
    number = None if isinstance(divisor, torch.Tensor) else divisor
    if dividend.divisor is None:
        is_mean = len(terms) <= 1 and number is not None and number >= 1 and math.prod(sizes) % number == 0
        return new(divisor, sizes, is_mean, terms)
    if number is None:  # a mean that is divided by a mean of its weights
        return new(math.prod(sizes) * divisor, sizes, False, terms)
    return new(dividend.divisor, sizes, dividend.is_mean, terms, means, mean_of_means=number == means > 1)


def _per_row(sums: Iterable[_Reduced], rows: int) -> list[float]:
    """What sums over equally many values of each row are, divided by the `rows`. Waits for the device."""
    return [float(each.result) / rows for each in sums if math.prod(each.sizes) % rows == 0]


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
