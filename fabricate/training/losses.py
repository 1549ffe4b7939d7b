"""The losses of one window, and how their gradients become the gradient of one mean.

A loss is a mean over its weight: over the rows of its batch, over the labels that a cross-entropy counts, or over what
`training_step` returns as "weight". An update wants the mean over the whole window, of all micro-batches of all ranks::

    mean = sum(loss * weight) / sum(weight)

Backward adds gradients up over micro-batches and averages them over ranks. So each loss is multiplied beforehand by
`weight * ranks / rows of the window`. For rows that is all. The sum of other weights is known after the last micro-batch only;
then gradients are multiplied once by `rows / sum(weight)`. docs/numerics.md has the derivation.

Must not know: in which order things happen (`fabricate.training.loop`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from fabricate.data.batches import Window, rows_of
from fabricate.metrics.loss_weight import counted, last_operation
from fabricate.training.run_state import Run
from fabricate.training.step_output import check_logged, check_loss, check_window, choose, other_weight, unpack


class RowWeights:
    """Every row counts the same. The window knows its rows beforehand."""

    source: ClassVar[str] = "rows"
    summed: ClassVar[bool] = False
    """Whether the weight of a window has to be added up over micro-batches and ranks."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        """The number of ranks that read rows of their own; backward averages over them."""

    def alone(self) -> RowWeights:
        """The weights of a window that is one micro-batch of one rank."""
        return self

    def weigh(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> tuple[Any, Any]:
        """The weight of `loss`, and that of metrics logged beside it. `given`: what training_step returned; `rows`: 0 for a
        stand-in, None where the data does not show it. No wait for the device."""
        if given is not None:
            raise other_weight(self.source, "given", loss)
        weight = rows_of(batch) if rows is None else rows
        return weight, weight

    def scale(self, loss: torch.Tensor, weight: Any, rows: int) -> torch.Tensor:
        """`loss` times its share of a window of `rows`."""
        if type(weight) is int and weight * self.readers == rows:
            return loss  # times one, which the product below may miss by a rounding: 49 * (1 / 49) is not 1
        scaled: torch.Tensor = loss * (weight * (self.readers / rows))
        return scaled

    def total(self, rows: int, weights: list[Any]) -> Any:
        """The weight of a window, where nothing has to be added up."""
        return rows


class GivenWeights(RowWeights):
    """The weights that training_step returns."""

    source = "given"
    summed = True

    def weigh(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> tuple[Any, Any]:
        if given is None:
            raise other_weight(self.source, recognised(loss, None).source, loss)
        return (0, 0) if rows == 0 else (given, given)  # a stand-in takes part and weighs nothing


class LabelWeights(RowWeights):
    """A plain cross-entropy weighs the labels that it counts; torch knows how many."""

    source = "counted"
    summed = True

    def alone(self) -> RowWeights:
        return OnlyLabelWeights(self.readers)

    def weigh(self, loss: torch.Tensor, given: Any, batch: Any, rows: int | None) -> tuple[Any, Any]:
        labels = counted(loss)
        if given is not None or labels is None:
            raise other_weight(self.source, recognised(loss, given).source, loss)
        return (0, 0) if rows == 0 else labels


class OnlyLabelWeights(LabelWeights):
    """The only cross-entropy of its window is the mean of the window as it is."""

    summed = False

    def scale(self, loss: torch.Tensor, weight: Any, rows: int) -> torch.Tensor:
        return loss

    def total(self, rows: int, weights: list[Any]) -> Any:
        return weights[0]


def recognised(loss: torch.Tensor, given: Any) -> type[RowWeights]:
    """What weighs `loss`, going by this loss alone."""
    if given is not None:
        return GivenWeights
    return RowWeights if counted(loss) is None else LabelWeights


class Weighed(NamedTuple):
    """The loss of one micro-batch."""

    scaled: torch.Tensor
    """For backward."""
    loss: torch.Tensor
    """Detached."""
    weight: Any
    labels: Any
    """The weight of metrics logged beside it. Another one than `weight` under class weights only."""


class Losses:
    """The losses of a fit: what weighs those of each optimizer, which its first window settles."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.readers = run.engine.data_world_size
        self.only_optimizer = next(iter(run.optim.optimizers)) if len(run.optim.optimizers) == 1 else None
        self.weights: dict[str, RowWeights] = {}

    def of(self, window: Window, *, averaged: bool) -> WindowLosses:
        """The losses of `window`, none yet. `averaged`: whether a listener wants their mean."""
        settled = len(self.weights) == len(self.run.optim.optimizers)
        return WindowLosses(self, window, averaged) if settled else FirstWindowLosses(self, window, averaged)


class WindowLosses:
    """The losses of one window on this rank."""

    def __init__(self, losses: Losses, window: Window, averaged: bool) -> None:
        self._losses = losses
        self._rows = window.rows
        self._alone = window.num_micro_steps == 1 and losses.readers == 1
        self._averaged = averaged and not self._alone
        self._weights: list[Any] = []
        self._sums: Callable[[], torch.Tensor] | None = None
        self.values: list[torch.Tensor] = []
        """Detached, one per micro-batch."""
        self.optimizer: Any = losses.only_optimizer
        """The name of the optimizer that the window updates; where there are several, known from the first loss on."""
        self.weighed_by: Any = None
        """The `RowWeights` at work, known from the first loss on."""
        self.total: Any = None
        """The weight of the window over all ranks, from `normalise` on: a number or a 0-dim tensor."""
        self.mean: torch.Tensor | None = None
        """The mean of the losses over all ranks, from `normalise` on; None where no listener wants it."""

    def add(self, output: Any, batch: Any, rows: int | None) -> Weighed:
        """Take what training_step returned for `batch`. No wait for the device."""
        loss, given, chosen = unpack(output)
        if chosen is not None or self.optimizer is None:
            self.optimizer = choose(self._losses.run, self.optimizer, chosen, len(self.values))
        if self.weighed_by is None:
            self._settle(loss, given)
        weight, labels = self.weighed_by.weigh(loss, given, batch, rows)
        scaled = self.weighed_by.scale(loss, weight, self._rows)
        loss = loss.detach()
        self.values.append(loss)
        self._weights.append(weight)
        return Weighed(scaled, loss, weight, labels)

    def _settle(self, loss: torch.Tensor, given: Any) -> None:
        weights = self._losses.weights.get(self.optimizer) or recognised(loss, given)(self._losses.readers)
        self.weighed_by = weights.alone() if self._alone else weights

    def begin_sums(self) -> None:
        """Start the sums over ranks that `normalise` needs, once the last loss is added: they travel beside its backward. All
        ranks."""
        if self._averaged or self.weighed_by.summed:
            engine = self._losses.run.engine
            zero = torch.zeros((), device=engine.device)
            products = map(_product, self.values, self._weights) if self._averaged else ()
            self._sums = engine.begin_sum(torch.stack([sum(self._weights, zero), sum(products, zero)]))

    def normalise(self, parameters: list[torch.nn.Parameter]) -> None:
        """Make the gradients of `parameters` those of the mean over the window. All ranks; no wait for the device."""
        self.total = self.weighed_by.total(self._rows, self._weights)
        self.mean = self.values[0] if self._alone else None
        if self._sums is None:
            return
        of_weights, of_losses = self._sums()
        if self.weighed_by.summed:
            self.total = of_weights
            factor = torch.where(of_weights > 0, self._rows / of_weights, 0.0)  # nothing counted: no gradient
            self._losses.run.engine.strategy.scale_gradients(parameters, factor)
        if self._averaged:
            self.mean = of_losses / self.total


class FirstWindowLosses(WindowLosses):
    """A window before every optimizer had its first: what training_step returns is checked, on all ranks."""

    def add(self, output: Any, batch: Any, rows: int | None) -> Weighed:
        loss = unpack(output)[0]
        check_loss(self._losses.run, loss)
        check_logged(self._losses.run)
        self._last_operation = last_operation(loss)
        return super().add(output, batch, rows)

    def begin_sums(self) -> None:
        """Not yet: ranks that weigh by different things would meet in different collectives."""

    def normalise(self, parameters: list[torch.nn.Parameter]) -> None:
        losses, source = self._losses, self.weighed_by.source
        if self.optimizer not in losses.weights:
            check_window(losses.run, source, self.optimizer, self._last_operation)
            kinds = {kind.source: kind for kind in (RowWeights, GivenWeights, LabelWeights)}
            losses.weights[self.optimizer] = kinds[source](losses.readers)
        super().begin_sums()
        super().normalise(parameters)


def _product(loss: torch.Tensor, weight: Any) -> torch.Tensor:
    """A weight of zero means that nothing was counted, whatever the loss: it may be nan."""
    zero = torch.zeros((), device=loss.device)
    return torch.where(torch.as_tensor(weight, device=loss.device) == 0, zero, loss.float() * weight)
