"""The losses of one window, and their scaling, by which the gradients add up to the gradient of one mean.

A loss is a mean over its weight: over the rows of its batch, over the labels that a cross-entropy counts, or over what
`training_step` returns as "weight". An update wants the mean over the whole window, of all micro-batches of all ranks::

    mean = sum(loss * weight) / sum(weight)

Backward adds gradients up over micro-batches and averages them over the readers, the ranks that read rows of their own. So each loss is
first multiplied by its share, `weight * readers / expected`, where `expected` estimates the weight of the window: its number of rows, times
the power of two near the weight of one row. For weights by rows, the estimate is exact. The sum of other weights is known only after the
last micro-batch; the gradients are then multiplied once by `expected / sum(weight)`. The estimate keeps the gradients about as large as
those of the mean, because float16 cannot represent values above 65504. docs/numerics.md has the derivation.

A *rule* determines the weights of the losses of optimizers that step together: `RowWeights` (or `CountedRows`, if the user's collate_fn may
leave rows out), `GivenWeights` or `LabelWeights`. It is chosen in their first window. `RowWeights` takes every loss, so a resumed run that
had it goes on with it.

Must not know: in which order things happen (`fabricate.training.loop`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from fabricate.data.batches import Window, rows_of, rows_that_came
from fabricate.errors import ConfigurationError
from fabricate.metrics.loss_weight import counted
from fabricate.metrics.reading import on_device
from fabricate.training.state.run_state import Run
from fabricate.training.updates.step_output import (
    Made,
    Scale,
    changed_weight,
    check_logged,
    check_loss,
    check_not_negative,
    check_window,
    note_accumulation,
    note_rows,
    note_scale,
    unpack,
)
from fabricate.training.updates.stepping import choose

_MOST_LOOKS = 6
"""The number of micro-batches after a first window whose loss is inspected, and of different row counts, including 0 and None, after
them."""
_NO_WEIGHT = -1000
"""An exponent below all real ones, for a rank whose first micro-batch has the weight 0."""


class RowWeights:
    """The rule that gives every row the same weight. The number of rows of a window is known before the window begins."""

    source: ClassVar[str] = "rows"
    summed: ClassVar[bool] = False
    """Whether the weight of a window is a sum over micro-batches and ranks that has to be computed."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        """The number of ranks that read rows of their own; backward averages over them."""

    def for_one_micro_batch(self) -> RowWeights:
        """The rule for a window that consists of one micro-batch of one reader."""
        return self

    def weigh(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> tuple[Any, Any]:
        """The weight of `loss`, and the weight of metrics logged in the same step. `given`: the weight that training_step returned, or
        None; `rows`: the number of rows, 0 for a stand-in, None if the data does not show it. Does not wait for the device."""
        if given is not None:
            raise changed_weight(self.source, "given", loss)
        weight = rows_of(batch) if rows is None else rows
        return weight, weight

    def share(self, loss: torch.Tensor, weight: Any, expected: float) -> torch.Tensor:
        """`loss` times its share of a window with the weight `expected`."""
        if type(weight) is int and weight * self.readers == expected:
            return loss  # the factor is one, but rounding may make the product below differ: 49 * (1 / 49) is not 1
        share: torch.Tensor = loss * (weight * (self.readers / expected))
        return share

    def total(self, rows: int, weights: list[Any]) -> Any:
        """The weight of a window; `weights` holds those of its micro-batches on this rank."""
        return rows


class CountedRows(RowWeights):
    """The rule that counts the rows of each batch, because a collate_fn may leave out rows."""

    summed = True

    def for_one_micro_batch(self) -> RowWeights:
        return OnlyCountedRows(self.readers)

    def weigh(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> tuple[Any, Any]:
        return super().weigh(loss, given, batch, rows_that_came(batch, rows) if rows else rows)


class OnlyCountedRows(CountedRows):
    """`CountedRows` for a window of one batch, whose loss is the mean of the window."""

    summed = False

    def share(self, loss: torch.Tensor, weight: Any, expected: float) -> torch.Tensor:
        return loss

    def total(self, rows: int, weights: list[Any]) -> Any:
        return weights[0]


class GivenWeights(RowWeights):
    """The rule for weights that training_step returns."""

    source = "given"
    summed = True

    def weigh(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> tuple[Any, Any]:
        if given is None:
            raise changed_weight(self.source, recognised(loss, None).source, loss)
        return (0, 0) if rows == 0 else (given, given)  # a stand-in has the weight 0


class LabelWeights(RowWeights):
    """The rule for a plain cross-entropy: its weight is the number of labels that it counts, which is read from the autograd graph."""

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
    """`LabelWeights` for a window of one batch, whose loss is the mean of the window."""

    summed = False

    def share(self, loss: torch.Tensor, weight: Any, expected: float) -> torch.Tensor:
        return loss

    def total(self, rows: int, weights: list[Any]) -> Any:
        return weights[0]


def recognised(loss: torch.Tensor, given: Any) -> type[RowWeights]:
    """The rule for `loss` and the weight `given` with it."""
    if given is not None:
        return GivenWeights
    return RowWeights if counted(loss) is None else LabelWeights


class Rules(NamedTuple):
    """The rules for the losses of optimizers that step together."""

    window: RowWeights
    one_micro_batch: RowWeights
    """The rule for a window that consists of one micro-batch of one reader."""


class Weighed(NamedTuple):
    """The loss of one micro-batch."""

    for_backward: torch.Tensor
    """The loss times its share of the window."""
    loss: torch.Tensor
    """Detached."""
    weight: Any
    logged_weight: Any
    """The weight of metrics logged in the same step. It differs from `weight` only with class weights: it is then the number of labels."""


class Losses:
    """The rules for the losses of a fit, for each kind of update that has had its first window."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.readers = run.engine.data_world_size
        self.default = run.optim.default
        self.rules: dict[str | None, Rules] = {}
        self._looks = _MOST_LOOKS
        """How many more micro-batches are inspected, whatever their number of rows."""
        self._rows_seen: set[int | None] = {0, None}
        """The row counts of the micro-batches whose loss was inspected."""
        self._scales: list[Scale] = []
        """Those of the first micro-batches, for cross-entropies that are weighted by their labels."""
        self._noted = False
        """Whether a note says that the losses seem to be no means over rows; one is enough."""
        self._noted_no_weight = False
        """Whether a note says that all losses of an update had the weight 0."""
        self._epoch = -1
        """The last epoch in which a loss was inspected."""
        # If backward gathers parameters, its first gather would wait for this sum, and the sum for the slowest
        # forward.
        self.sum_beside_backward = not run.engine.strategy.shards_parameters

    def look_at(self, loss: torch.Tensor, batch: Any, rows: int | None) -> None:
        """Inspect the loss of a micro-batch that is weighted by rows, if it is one of the first of the fit, the first of an epoch, or has a
        new number of rows. One batch may be a multiple of its rows by chance, a loss may be divided by the rows of earlier batches, and
        may become another one in a later epoch."""
        is_new = rows not in self._rows_seen and len(self._rows_seen) < _MOST_LOOKS
        if self._epoch != self.run.progress.epoch:
            self._epoch, is_new = self.run.progress.epoch, True
        if rows and not self._noted and (self._looks or is_new):
            self._looks = max(0, self._looks - 1)
            self.seen(rows, note_rows(self.run, Made.by(loss, rows_that_came(batch, rows))))

    def look_at_scale(self, loss: torch.Tensor, labels: Any, rows: int | None) -> None:
        """Inspect the scale of a cross-entropy that is weighted by its labels, if its micro-batch is one of the first."""
        if rows and not self._noted and len(self._scales) < _MOST_LOOKS:
            self._scales.append(Scale.of(loss, labels, rows))
            self._noted = note_scale(self.run, self._scales[0], self._scales[-1])

    def look_at_weights(self, given: list[Any]) -> None:
        """Note an update whose losses all have the weight 0, if that is known without a wait for the device or for other ranks."""
        if not self._noted_no_weight and self.readers == 1 and not any(on_device(weight) or weight for weight in given):
            self._noted_no_weight = True
            self.run.journal.note(
                f"all losses of the update after step {self.run.progress.step} have the weight 0, or no label that counts. Their "
                "gradient is 0, but the optimizer makes the update, so the weights still change with momentum or weight decay. To make no "
                "update for some rows, leave them out of the data, for instance with torch.utils.data.Subset"
            )

    def seen(self, rows: int | None, noted: bool) -> None:
        """Record that the loss of a micro-batch of `rows` rows was inspected, and whether there is a note about it."""
        self._rows_seen.add(rows)
        self._noted |= noted

    def new_rules(self, optimizer: Any, loss: torch.Tensor, given: Any) -> Rules:
        """The rules for the optimizers of an update, chosen by their first loss. `optimizer`: as `WindowLosses.optimizer`."""
        kind = recognised(loss, given)
        if kind is LabelWeights and self.run.optim.weighed_by.get(optimizer) == RowWeights.source:
            kind = RowWeights  # as before the run was resumed
        self.run.optim.weighed_by[optimizer] = kind.source
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
        """The estimated weight of the window; known from its first loss on, or from earlier windows."""
        self._micro_batches = window.num_micro_steps
        self._one_micro_batch = window.num_micro_steps == 1 and losses.readers == 1
        self._averaged = averaged and not self._one_micro_batch
        self._weights: list[Any] = []
        self._sums: Callable[[], torch.Tensor] | None = None
        self.values: list[torch.Tensor] = []
        """Detached, one per micro-batch."""
        self._first: Made | None = None
        """In the first window of the optimizers of an update: how its first loss was computed, or the first loss about which there is
        something to note. All return values of training_step are checked there."""
        self.optimizer: Any = window.turn or losses.default
        """The update that the window makes, a key of `Optimization.updates`; if training_step names it, known from the first loss on."""
        self.rule: Any = None
        """The rule of this window, a `RowWeights`; known from the first loss on, or from earlier windows."""
        self._adds_up = False
        """Whether weights or losses are summed over micro-batches and ranks."""
        self.total: Any = None
        """The weight of the window over all ranks, from `normalise` on: a number or a 0-dim tensor."""
        self.mean: torch.Tensor | None = None
        """The mean of the losses over all ranks, from `normalise` on; None if it would need a sum over ranks and no listener uses it."""
        self._use(losses.rules.get(self.optimizer))

    def _use(self, rules: Rules | None) -> None:
        """Use `rules`; None while they are not known."""
        if rules is None:
            self.rule, self._expected = None, 0.0
        else:
            self.rule = rules.one_micro_batch if self._one_micro_batch else rules.window
            self._adds_up = self._averaged or self.rule.summed
            each = self._losses.run.optim.weight_per_row.get(self.optimizer, 0.0)
            if each and not self.rule.summed:
                each = 1.0  # losses of another kind, before a resume, may have given a row another weight
            self._expected = self._rows * each

    def add(self, output: Any, batch: Any, rows: int | None, is_last: bool) -> Weighed:
        """Take the return value of training_step for `batch`. With the last batch, all ranks begin the sums that `normalise` needs, so that
        they are exchanged during its backward; not in a first window, because ranks with different rules would call different collectives.
        Does not wait for the device."""
        is_loss = isinstance(output, torch.Tensor)
        loss, given, chosen = (output, None, None) if is_loss else self._unpacked(output)
        if chosen is not None or self.optimizer is None:
            self.optimizer = choose(self._losses.run, self.optimizer, chosen, len(self.values))
            if not self.values:
                self._use(self._losses.rules.get(self.optimizer))
        if self.rule is None or self._first is not None:
            self._settle(loss, given, batch, rows)
        weight, logged_weight = self._weigh(loss, given, batch, rows)
        if self._first is not None:
            self._note_missing_rows(weight, rows)
            self._losses.seen(rows, noted=False)
        elif self.rule.source == "rows":
            self._losses.look_at(loss, batch, rows)
        if not self._expected:
            self._expected = self._rows * self._weight_per_row(weight, 1 if rows is None else rows)
        for_backward = self.rule.share(loss, weight, self._expected)
        loss = loss.detach()
        self.values.append(loss)
        self._weights.append(weight)
        if is_last and self._adds_up and self._losses.sum_beside_backward and self._first is None:
            self._sums = self._begin_sums()
        return Weighed(for_backward, loss, weight, logged_weight)

    def _weigh(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> tuple[Any, Any]:
        """As `RowWeights.weigh`. A loss of another kind than before is an error, unless the window consists of it alone: then its weight
        does not change the update."""
        try:
            weight, logged_weight = self.rule.weigh(loss, given, batch, rows)
        except ConfigurationError as exc:
            if not self._one_micro_batch or recognised(loss, given).source == self.rule.source:
                raise
            self._change_rule(exc, loss, given)
            weight, logged_weight = self.rule.weigh(loss, given, batch, rows)
        if self.rule.source == "counted":
            self._losses.look_at_scale(loss, weight, rows)
        return weight, logged_weight

    def _change_rule(self, exc: ConfigurationError, loss: torch.Tensor, given: Any) -> None:
        self._losses.run.journal.note(
            f"{exc}. Here each update is made of one batch in one process, so the updates are right; only logged means over batches of "
            "both kinds mix their weights"
        )
        rules = self._losses.rules[self.optimizer] = self._losses.new_rules(self.optimizer, loss, given)
        self._use(rules)

    def _unpacked(self, output: Any) -> tuple[Any, Any, Any]:
        loss, given, chosen = unpack(output)
        if not isinstance(loss, torch.Tensor):
            check_loss(self._losses.run, loss)
        return loss, given, chosen

    def _settle(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> None:
        """Check a loss in the first window of its optimizers; the first loss determines the rule."""
        check_loss(self._losses.run, loss)
        check_not_negative(given)
        check_logged(self._losses.run, loss)
        if self._first is None or not self._first.is_notable():
            self._first = Made.by(loss, rows_that_came(batch, rows) if rows else None)
        if self.rule is None:
            self._new_rules = self._losses.new_rules(self.optimizer, loss, given)
            self._use(self._new_rules)

    def _note_missing_rows(self, weight: Any, rows: int | None) -> None:
        """Note that the user's collate_fn seems to have left rows out of a batch."""
        if rows and self.rule.source == "rows" and weight < rows:
            self._losses.run.journal.note(
                f"collate_fn made a batch of {weight} rows from {rows} rows that were read, so the weight of its loss is "
                f"{weight}. If the first dimension of the batch is not rows, return {{'loss': loss, 'weight': what its mean was "
                "taken over} from training_step"
            )

    def _weight_per_row(self, weight: Any, rows: int) -> float:
        """The power of two near the weight of one row. In the first window, the ranks agree on the largest of theirs, which waits for the
        device. `weight` and `rows` are those of the first micro-batch."""
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
        """Scale the gradients of `parameters` to those of the mean over the window. All ranks; does not wait for the device."""
        if self._first is not None:
            is_split = not self._one_micro_batch
            noted = check_window(self._losses.run, self.rule.source, self.optimizer, self._first, is_split)
            self._losses.seen(None, noted)
            note_accumulation(self._losses.run, self._first.divisors, self._micro_batches)
            self._losses.rules[self.optimizer] = self._new_rules
        if self.rule.source != RowWeights.source:
            self._losses.look_at_weights(self._weights)
        self.total = self.rule.total(self._rows, self._weights)
        self.mean = self.values[0] if self._one_micro_batch else None
        if not self._adds_up:
            return
        of_weights, of_losses = (self._sums or self._begin_sums())()
        if self.rule.summed:
            self.total = of_weights
            factor = torch.where(of_weights > 0, self._expected / of_weights, 0.0)  # no weight at all: no gradient
            self._losses.run.engine.strategy.scale_gradients(parameters, factor)
        if self._averaged:
            self.mean = of_losses / self.total


def _product(loss: torch.Tensor, weight: Any) -> torch.Tensor:
    """`loss * weight`; 0 for the weight 0, with which the loss may be nan. A weight that is a Python number is not copied to the device,
    because that would wait."""
    if on_device(weight):
        return torch.where(weight == 0, torch.zeros((), device=loss.device), loss.float() * weight)
    return loss.float() * weight if weight else torch.zeros((), device=loss.device)
