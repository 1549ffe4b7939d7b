"""The losses of one window, and how their gradients become the gradient of one mean.

A loss is a mean over its weight: over the rows of its batch, over the labels that a cross-entropy counts, or over what
`training_step` returns as "weight". An update wants the mean over the whole window, of all micro-batches of all ranks::

    mean = sum(loss * weight) / sum(weight)

Backward adds gradients up over micro-batches and averages them over the readers, the ranks that read rows of their own. So each loss
is multiplied beforehand by its share, `weight * readers / expected`, where `expected` is the weight that the window is taken to have: its
rows, times the power of two that is near the weight of one row. For rows that is all. The sum of other weights is known after the last
micro-batch only; then gradients are multiplied once by `expected / sum(weight)`. They are of the size of the mean's from the beginning,
for the sake of dtypes that end at 65504. docs/numerics.md has the derivation.

A *rule* says what weighs the losses of the optimizers that step together: `RowWeights` (or `CountedRows`, where a collate_fn of the
user's may leave rows out), `GivenWeights` or `LabelWeights`. Their first window settles it.

Must not know: in which order things happen (`fabricate.training.loop`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from fabricate.data.batches import Window, rows_of, rows_that_came
from fabricate.metrics.loss_weight import counted, odd_divisor
from fabricate.metrics.reading import on_device
from fabricate.training.state.run_state import Run
from fabricate.training.updates.step_output import (
    Made,
    changed_weight,
    check_logged,
    check_loss,
    check_not_negative,
    check_window,
    note_divisor,
    unpack,
)
from fabricate.training.updates.stepping import choose

_MOST_LOOKS = 6
"""Different numbers of rows at which a loss is looked at, with 0 and None."""
_NO_WEIGHT = -1000
"""Below every exponent that a weight per row has: the rank's first micro-batch weighs nothing."""


class RowWeights:
    """The rule by which every row counts the same. The window knows its rows beforehand."""

    source: ClassVar[str] = "rows"
    summed: ClassVar[bool] = False
    """Whether the weight of a window has to be added up over micro-batches and ranks."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        """The number of ranks that read rows of their own; backward averages over them."""

    def for_one_micro_batch(self) -> RowWeights:
        """The rule for a window that is one micro-batch of one reader."""
        return self

    def weigh(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> tuple[Any, Any]:
        """The weight of `loss`, and that of metrics logged beside it. `given`: what training_step returned; `rows`: 0 for a
        stand-in, None where the data does not show it. No wait for the device."""
        if given is not None:
            raise changed_weight(self.source, "given", loss)
        weight = rows_of(batch) if rows is None else rows
        return weight, weight

    def share(self, loss: torch.Tensor, weight: Any, expected: float) -> torch.Tensor:
        """`loss` times its share of a window of the weight `expected`."""
        if type(weight) is int and weight * self.readers == expected:
            return loss  # times one, which the product below may miss by a rounding: 49 * (1 / 49) is not 1
        share: torch.Tensor = loss * (weight * (self.readers / expected))
        return share

    def total(self, rows: int, weights: list[Any]) -> Any:
        """The weight of a window, where nothing has to be added up."""
        return rows


class CountedRows(RowWeights):
    """The rows of the batch that came, where they may be fewer than planned."""

    summed = True

    def for_one_micro_batch(self) -> RowWeights:
        return OnlyCountedRows(self.readers)

    def weigh(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> tuple[Any, Any]:
        return super().weigh(loss, given, batch, rows_that_came(batch, rows) if rows else rows)


class OnlyCountedRows(CountedRows):
    """The only batch of its window is the mean of the window as it is."""

    summed = False

    def share(self, loss: torch.Tensor, weight: Any, expected: float) -> torch.Tensor:
        return loss

    def total(self, rows: int, weights: list[Any]) -> Any:
        return weights[0]


class GivenWeights(RowWeights):
    """The weights that training_step returns."""

    source = "given"
    summed = True

    def weigh(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> tuple[Any, Any]:
        if given is None:
            raise changed_weight(self.source, recognised(loss, None).source, loss)
        return (0, 0) if rows == 0 else (given, given)  # a stand-in takes part and weighs nothing


class LabelWeights(RowWeights):
    """A plain cross-entropy weighs the labels that it counts; torch knows how many."""

    source = "counted"
    summed = True

    def for_one_micro_batch(self) -> RowWeights:
        return OnlyLabelWeights(self.readers)

    def weigh(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> tuple[Any, Any]:
        labels = counted(loss)
        if given is not None or labels is None:
            raise changed_weight(self.source, recognised(loss, given).source, loss)
        return (0, 0) if rows == 0 else labels


class OnlyLabelWeights(LabelWeights):
    """The only cross-entropy of its window is the mean of the window as it is."""

    summed = False

    def share(self, loss: torch.Tensor, weight: Any, expected: float) -> torch.Tensor:
        return loss

    def total(self, rows: int, weights: list[Any]) -> Any:
        return weights[0]


def recognised(loss: torch.Tensor, given: Any) -> type[RowWeights]:
    """What weighs `loss`, going by this loss alone."""
    if given is not None:
        return GivenWeights
    return RowWeights if counted(loss) is None else LabelWeights


class Rules(NamedTuple):
    """What weighs the losses of the optimizers that step together."""

    window: RowWeights
    one_micro_batch: RowWeights
    """The same for a window that is one micro-batch of one reader."""


class Weighed(NamedTuple):
    """The loss of one micro-batch."""

    for_backward: torch.Tensor
    """The loss times its share of the window."""
    loss: torch.Tensor
    """Detached."""
    weight: Any
    logged_weight: Any
    """The weight of metrics logged beside it. It differs from `weight` under class weights only, where labels count."""


class Losses:
    """The losses of a fit, with the rule of each kind of update that has had its first window."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.readers = run.engine.data_world_size
        self.default = run.optim.default
        self.rules: dict[str | None, Rules] = {}
        self.rows_seen: set[int | None] = {0, None}
        """How many rows micro-batches have had, as far as that was looked at."""
        # Where backward gathers parameters, its first gather would wait behind the sum, and that for the end of the forward.
        self.sum_beside_backward = not run.engine.strategy.shards_parameters

    def look_at_rows(self, loss: torch.Tensor, rows: int | None) -> None:
        """The first times that a micro-batch has another number of rows: a loss may divide by the number of those before."""
        self.rows_seen.add(rows)
        if rows and len(self.rows_seen) <= _MOST_LOOKS and (divisor := odd_divisor(loss, rows)) is not None:
            note_divisor(self.run, divisor)

    def new_rules(self, loss: torch.Tensor, given: Any) -> Rules:
        """The rules of an update's optimizers whose first loss is `loss`."""
        kind = recognised(loss, given)
        assert self.run.source is not None
        if kind is RowWeights and not self.run.source.exact_rows:
            kind = CountedRows
        rule = kind(self.readers)
        return Rules(rule, rule.for_one_micro_batch())


class WindowLosses:
    """The losses of one window on this rank."""

    def __init__(self, losses: Losses, window: Window, averaged: bool) -> None:
        self._losses = losses
        self._rows = window.rows
        self._expected = 0.0
        """The weight that the window is taken to have; known from the first loss on, or from windows before."""
        self._one_micro_batch = window.num_micro_steps == 1 and losses.readers == 1
        self._averaged = averaged and not self._one_micro_batch
        self._weights: list[Any] = []
        self._sums: Callable[[], torch.Tensor] | None = None
        self.values: list[torch.Tensor] = []
        """Detached, one per micro-batch."""
        self._first: Made | None = None
        """In the first window of an update's optimizers, how its last loss came about: all that training_step returns is checked."""
        self.optimizer: Any = window.turn or losses.default
        """What the window updates, a key of `Optimization.updates`; where training_step names it, known from the first loss on."""
        self.rule: Any = None
        """What weighs the losses of this window, a `RowWeights`; known from the first loss on, or from windows before."""
        self._adds_up = False
        """Whether weights or losses are added up over micro-batches and ranks."""
        self.total: Any = None
        """The weight of the window over all ranks, from `normalise` on: a number or a 0-dim tensor."""
        self.mean: torch.Tensor | None = None
        """The mean of the losses over all ranks, from `normalise` on; None where it had to be added up and no listener wants it."""
        self._use(losses.rules.get(self.optimizer))

    def _use(self, rules: Rules | None) -> None:
        """Weigh by `rules`; None: they are not known yet."""
        if rules is None:
            self.rule, self._expected = None, 0.0
        else:
            self.rule = rules.one_micro_batch if self._one_micro_batch else rules.window
            self._adds_up = self._averaged or self.rule.summed
            self._expected = self._rows * self._losses.run.optim.weight_per_row.get(self.optimizer, 0.0)

    def add(self, output: Any, batch: Any, rows: int | None, is_last: bool) -> Weighed:
        """Take what training_step returned for `batch`. After the last, all ranks, the sums over ranks that `normalise` needs begin: they
        travel beside its backward. Not in a first window, where ranks that weigh by different things would meet in different collectives.
        No wait for the device."""
        is_loss = isinstance(output, torch.Tensor)
        loss, given, chosen = (output, None, None) if is_loss else self._unpacked(output)
        if chosen is not None or self.optimizer is None:
            self.optimizer = choose(self._losses.run, self.optimizer, chosen, len(self.values))
            if not self.values:
                self._use(self._losses.rules.get(self.optimizer))
        if self.rule is None or self._first is not None:
            self._settle(loss, given, rows)
        weight, logged_weight = self.rule.weigh(loss, given, batch, rows)
        if self._first is not None:
            self._note_missing_rows(weight, rows)
            self._losses.rows_seen.add(rows)
        elif rows not in self._losses.rows_seen and self.rule.source == "rows":
            self._losses.look_at_rows(loss, rows)
        if not self._expected:
            self._expected = self._rows * self._weight_per_row(weight, 1 if rows is None else rows)
        for_backward = self.rule.share(loss, weight, self._expected)
        loss = loss.detach()
        self.values.append(loss)
        self._weights.append(weight)
        if is_last and self._adds_up and self._losses.sum_beside_backward and self._first is None:
            self._sums = self._begin_sums()
        return Weighed(for_backward, loss, weight, logged_weight)

    def _unpacked(self, output: Any) -> tuple[Any, Any, Any]:
        loss, given, chosen = unpack(output)
        if not isinstance(loss, torch.Tensor):
            check_loss(self._losses.run, loss)
        return loss, given, chosen

    def _settle(self, loss: torch.Tensor, given: Any, rows: int | None) -> None:
        """Check the losses of optimizers that never had a window; the first decides what weighs them."""
        check_loss(self._losses.run, loss)
        check_not_negative(given)
        check_logged(self._losses.run, loss)
        self._first = Made.by(loss, rows)
        if self.rule is None:
            self._new_rules = self._losses.new_rules(loss, given)
            self._use(self._new_rules)

    def _note_missing_rows(self, weight: Any, rows: int | None) -> None:
        """Of a batch in which a collate_fn of the user's left rows out, or so it seems."""
        if rows and self.rule.source == "rows" and weight < rows:
            self._losses.run.journal.note(
                f"collate_fn made a batch of {weight} rows from {rows} rows that were read, so the weight of its loss is "
                f"{weight}. If the first dimension of the batch is not rows, return {{'loss': loss, 'weight': what its mean was "
                "taken over} from training_step"
            )

    def _weight_per_row(self, weight: Any, rows: int) -> float:
        """What these optimizers' losses weigh per row of a window, a power of two: agreed by all ranks in the first window, the largest of
        theirs, for which it waits for the device. `weight` is that of the first micro-batch, of `rows`."""
        weights = self._losses.run.optim.weight_per_row
        if self.optimizer not in weights:
            each = float(weight) / rows if rows else 0.0
            exponent = round(math.log2(each)) if 0 < each < math.inf else _NO_WEIGHT
            (largest,) = self._losses.run.engine.agree([exponent])
            weights[self.optimizer] = 1.0 if largest == _NO_WEIGHT else 2.0**largest
        return weights[self.optimizer]

    def _begin_sums(self) -> Callable[[], torch.Tensor]:
        engine = self._losses.run.engine
        zero = torch.zeros((), device=engine.device)
        products = map(_product, self.values, self._weights) if self._averaged else ()
        return engine.begin_sum(torch.stack([sum(self._weights, zero), sum(products, zero)]))

    def normalise(self, parameters: list[torch.nn.Parameter]) -> None:
        """Make the gradients of `parameters` those of the mean over the window. All ranks; no wait for the device."""
        if self._first is not None:
            check_window(self._losses.run, self.rule.source, self.optimizer, self._first)
            self._losses.rules[self.optimizer] = self._new_rules
        self.total = self.rule.total(self._rows, self._weights)
        self.mean = self.values[0] if self._one_micro_batch else None
        if not self._adds_up:
            return
        of_weights, of_losses = (self._sums or self._begin_sums())()
        if self.rule.summed:
            self.total = of_weights
            factor = torch.where(of_weights > 0, self._expected / of_weights, 0.0)  # nothing counted: no gradient
            self._losses.run.engine.strategy.scale_gradients(parameters, factor)
        if self._averaged:
            self.mean = of_losses / self.total


def _product(loss: torch.Tensor, weight: Any) -> torch.Tensor:
    """A weight of zero means that nothing was counted, whatever the loss: it may be nan. A number stays one: the way to the device would
    be waited for."""
    if on_device(weight):
        return torch.where(weight == 0, torch.zeros((), device=loss.device), loss.float() * weight)
    return loss.float() * weight if weight else torch.zeros((), device=loss.device)
