"""The weights of the metrics of an evaluation, and which metrics are no means over what they are weighted by.

They follow from what its steps compute, see `step_record`. Nothing waits for the device, except functions that say so. Must not know:
modules, batches, the loop.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from fabricate.errors import ConfigurationError
from fabricate.metrics.loss_form import is_a_count
from fabricate.metrics.loss_weight import Counted
from fabricate.metrics.reading import on_device
from fabricate.metrics.step_record import ORDERS, Reduced, StepRecord

_WHOLE, _ELEMENT, _NUMBER = "whole number", "element", "number"
_MOST_LOOKS = 10
"""The number of batches that are inspected."""


class StepWatch(StepRecord):
    """A record of what each step of an evaluation computes, from which the weights of its metrics follow."""

    def __init__(self, looks: int = _MOST_LOOKS, numbers: dict[str, float] | None = None) -> None:
        """`looks`: the number of batches without a cross-entropy that are inspected. `numbers`: values from batches before."""
        super().__init__()
        self._looks = self._looks_at_unknown = looks
        self._weighed: set[str] = set()
        """The names of the metrics that were cross-entropies."""
        self._decided = False
        """Whether a batch was weighed before."""
        self._numbers = {} if numbers is None else numbers
        """The first value of each metric that was compared."""
        self._labels: torch.Tensor | None = None
        """The labels of the first cross-entropy in `logged` of this batch, by which metrics beside it are weighted."""
        self._over_rows: dict[str, bool] = {}
        """For metrics beside a cross-entropy of which one batch decides: whether they are means of one number per row."""
        self._inspected: Counter[str] = Counter()
        """How many batches were inspected for metrics beside a cross-entropy, by name; `_MOST_LOOKS` for one that was described."""
        self._unclear: dict[str, set[bool]] = {}
        """For metrics beside a cross-entropy: what was found where too little was known to decide."""

    def function_of_a_mean(self, logged: list[Any], rows: int, others: Collection[int]) -> str:
        """A description of an entry of `logged` that is a non-linear function of a mean over the batch of `rows` rows, such as its root; ""
        if there is none. `others`: the sizes of tensors without rows."""
        for name, value, weight, reduce in logged:
            if weight is None and reduce == "mean":
                for each, function in self._functions.values():
                    if each.is_in(value) and self._is_of_the_batch(each, name, value, rows, others):
                        what = f"a non-linear function ({function}) of a mean"
                        return f"{name!r} as {f'the {function}' if function in ORDERS else what} over the batch"
        return ""

    def unknown(self, logged: list[Any], rows: int, known: Collection[str] = ()) -> list[str]:
        """The names of entries of `logged` that differ between batches and in one of these were not known as a mean over the `rows` or
        labels of the batch, or as a function for which there are other notes: F1, a count of Python, a quantile. Without the names in
        `known`. Empty if enough batches were inspected. Waits for the device."""
        self._looks_at_unknown -= 1
        if self._looks_at_unknown < 0 or not (found := list(self._unrecognised(logged, known))):
            return []
        counts = {rows, *(int(each.over.labels) for each in self._found)}
        results = [(float(each.result), each.sizes) for each in self._all() if each.is_unchanged()]
        results += self._columns()
        for name, value, kind in found:
            shares = counts if kind == _NUMBER else ()
            usual = value in (0, 1, rows) or not math.isfinite(value)
            if not usual and (kind == _WHOLE or not _is_known(value, rows, shares, counts, results)):
                self._numbers[f"unknown {name}"] = value
            if self._varies(name, value):
                self._numbers[f"varying {name}"] = value
        return [name for name, *_ in found if {f"unknown {name}", f"varying {name}"} <= self._numbers.keys()]

    def _unrecognised(self, logged: list[Any], known: Collection[str]) -> Iterator[tuple[str, float, str]]:
        """The entries of `logged` that are averaged over rows and are no recorded result: name, number, and `_WHOLE` for a type of whole
        numbers, `_ELEMENT` for what was taken out of a tensor, else `_NUMBER`. Waits for the device."""
        for name, value, weight, reduce in logged:
            if weight is not None or reduce != "mean" or name in known or self._is_result(value):
                continue
            if isinstance(value, torch.Tensor) and value.dtype is not torch.bool and not value.is_complex():
                kind = _ELEMENT if self._is_element(value) else _NUMBER
                yield name, float(value), kind if value.is_floating_point() else _WHOLE
            elif type(value) in (int, float):
                yield name, float(value), _WHOLE if type(value) is int else _NUMBER

    def _is_result(self, value: Any) -> bool:
        """Whether `value` is a recorded sum, mean or function, or a cross-entropy."""
        recorded = itertools.chain(self._all(), (each for each, _ in self._functions.values()))
        found = any(each.is_in(value) for each in recorded)
        return found or (isinstance(value, torch.Tensor) and any(each.is_here(value) for each in self._found))

    def _is_of_the_batch(self, each: Reduced, name: str, value: Any, rows: int, others: Collection[int]) -> bool:
        """Whether the metric `value` is computed from the batch of `rows` rows. Waits for the device for some sizes."""
        if each.divisor is not None:  # an absolute value
            sign = float(each.divisor) > 0
            return self._numbers.setdefault(f"sign of {name}", sign) != sign
        sizes = {math.prod(tensor) for tensor in each.terms or (each.sizes,)}
        may_be_constant = sizes.issubset(others) and rows not in sizes
        if each.is_mean:
            return not may_be_constant or self._varies(name, value)
        return not may_be_constant and not any(size % rows for size in sizes) and self._varies(name, value)

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
                self._inspected[name] = _MOST_LOOKS
                return f"{name!r} as a number that was taken for a mean over rows in one batch and for one over labels in another"
        return ""

    def _over_others(self, logged: list[Any], rows: int, others: Collection[int]) -> str:
        """A description of an entry of `logged` that is a recorded mean over values other than the labels by which it is weighted; "" if
        there is none. Waits for the device."""
        counts = {int(each.over.labels) for each in self._found}
        weights = counts if self._labels is None else {int(self._labels)}
        for name, value, weight, reduce in logged:
            if weight is None and reduce == "mean":
                sizes = self._without_rows(name, value, others)
                text = self._over_other_than_rows(name, value, rows, None, sizes, weights)
                text = text or self._over_columns(name, value, rows, sizes, counts)
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
            is_noted = self._function(value)[1] not in ("", "abs", *ORDERS)
            if is_noted or (on_device(value) and self._looks <= 0):
                continue
            if not self._varies(name, value):
                continue
            if self._labels is None or (labels := int(self._labels)) % rows == 0:
                continue  # perhaps as many labels in every row
            self._inspected[name] += 1
            if text := self._other_than_labels(value, rows, labels):
                self._inspected[name] = _MOST_LOOKS
                return f"{name!r} as {text}"
        return ""

    def _varies(self, name: str, value: Any) -> bool:
        """Whether the metric `value` differs from the first one of this name. Waits for the device."""
        return math.isfinite(number := float(value)) and self._numbers.setdefault(name, number) != number

    def _without_rows(self, name: str, value: Any, others: Collection[int]) -> Collection[int]:
        """`others`, the sizes of parameters and buffers, unless the metric `value` varies and so is not computed from these alone. Waits
        for the device."""
        return () if others and self._varies(name, value) else others

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

    def supposing_another_value(self, name: str) -> StepWatch:
        """The same record of the same batch, as if the metric `name` had another value in a batch before."""
        watch = copy.copy(self)
        watch._numbers, watch._inspected, watch._unclear = {name: math.nan}, Counter(), {}
        return watch

    def another_look(self) -> StepWatch | None:
        """A context for the next batch of an evaluation whose metrics are weighted by rows; None if enough batches were inspected."""
        return StepWatch(self._looks - 1, self._numbers) if self._looks > 1 else None

    def _weighs_rows(self, name: str, value: Any, rows: int | None) -> bool:
        """Whether a metric is a mean of one number per row. A mean of means may be one of two metrics in a batch of two rows, so the first
        batch of several rows decides about it."""
        if rows and isinstance(value, float):
            return self._number_weighs_rows(name, value, rows)
        over = [each for each in self._all() if each.is_over(rows) and each.is_in(value)]
        if any(not each.mean_of_means for each in over):
            return True
        if rows == 1:
            self._unclear.setdefault(name, set()).add(self._over_rows.get(name, False))
            return self._over_rows.get(name, False)
        return self._over_rows.setdefault(name, bool(over))

    def _number_weighs_rows(self, name: str, value: float, rows: int) -> bool:
        """The same for a Python number, which may be rounded, or equal to something else by chance: the first value decides in a batch that
        does not have as many labels as rows. May wait for the device."""
        if name not in self._over_rows:
            if self._labels is not None and int(self._labels) == rows:
                return False  # the weight is the same
            is_over = self._is_made_of_mean_over(value, rows)
            if value in (0, 1, 100):  # the usual values of many metrics
                self._unclear.setdefault(name, set()).add(is_over)
                return is_over
            self._over_rows[name] = is_over
        elif self._over_rows[name] and value not in (0, 1, 100) and self._inspected[name] < _MOST_LOOKS:
            self._inspected[name] += 1  # the first value may have been that of another mean by chance
            if not self._is_made_of_mean_over(value, rows):
                self._unclear.setdefault(name, set()).add(False)
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
        over_rows = [each for each in self._all() if each.is_sum_over(rows)]
        averaged = [(name, value) for name, value, weight, reduce in logged if weight is None and reduce == "mean"]
        usual = (0, 1, rows)  # numbers that may be equal by chance
        return [
            name
            for name, value in averaged
            if (isinstance(value, torch.Tensor) or value not in usual)
            and (found := [math.prod(each.sizes) for each in over_rows if each.is_in(value)])
            and (not set(found).issubset(others) or self._varies(name, value))
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
        same = (it.over for it in self._found if repr(number) == repr(float(it.result)) and it.is_unchanged())
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
            if rows and elements % rows and not (elements == 1 and len(self._found) % rows == 0):  # one for each row
                return f"a cross-entropy of {elements} labels for {rows} rows"
        averaged = [(name, value) for name, value, weight, reduce in logged if weight is None and reduce == "mean"]
        found = (
            self._over_other_than_rows(name, value, rows, whole, self._without_rows(name, value, others))
            for name, value in averaged
            if rows
        )
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
        found = [each for each in self._all() if each.is_in(value)]
        several = [each for each in found if math.prod(each.sizes) > 1]  # a term of one value is the same for all rows
        computed = (each.other_than(rows, others, counts) for each in several or found)
        if text := next(filter(None, computed), ""):
            return f"{name!r} as {text}"
        divisor = self._divisor(value, rows, whole, counts) if type(value) is float and value else None
        return "" if divisor is None else f"{name!r} as a sum divided by {divisor:g} for {rows} rows"

    def _divisor(self, value: float, rows: int, whole: int | None, counts: Collection[int]) -> float | None:
        """By what the step divided the number of a sum, if `value` is such a quotient, perhaps in percent, and no mean over rows or labels;
        else None."""
        numbers = ((each.result.item(), each.sizes) for each in self._sums())
        sums = [(number, sizes) for number, sizes in numbers if math.isfinite(number)]
        if any(is_a_count(scale * number / value, rows, sizes) for number, sizes in sums for scale in (1, 100)):
            return None  # what else it is equal to is chance
        counted = [number for number, _ in sums if number and number % rows and number not in counts]
        for number, _ in sums:
            for divisor in [*counted, whole] if whole else counted:
                if math.isclose(value * divisor, number) or math.isclose(value * divisor, 100 * number):
                    return divisor
        return None


def _is_known(
    value: float,
    rows: int,
    shares: Collection[int],
    counts: Collection[int],
    results: Iterable[tuple[float, tuple[int, ...]]],
) -> bool:
    """Whether `value` is a share of a number in `shares`, up to rounding, or a mean that follows from one of `results`, each with its
    sizes, perhaps divided by one of `counts`."""
    parts = (value * number for number in shares)
    if any(math.isfinite(part) and round(part) and math.isclose(part, round(part), rel_tol=1e-6) for part in parts):
        return True
    return any(_is_mean_of(value, result, rows, sizes, counts) for result, sizes in results)


def _is_mean_of(value: float, result: float, rows: int, sizes: tuple[int, ...], counts: Collection[int]) -> bool:
    """Whether `value` is `result`, or this divided by the number of rows or values of a tensor of these `sizes` or one of `counts`, its
    difference from 1, or one of these in percent."""
    divisors = [abs(result / part) for part in (value, 1 - value, value / 100, 1 - value / 100) if part]
    known = (1, *counts)
    return any(
        is_a_count(divisor, rows, sizes) or any(math.isclose(divisor, count, rel_tol=1e-6) for count in known)
        for divisor in divisors
    )


def _per_row(sums: Iterable[Reduced], rows: int) -> list[float]:
    """What sums over equally many values of each row are, divided by the `rows`. Waits for the device."""
    return [float(each.result) / rows for each in sums if math.prod(each.sizes) % rows == 0]
