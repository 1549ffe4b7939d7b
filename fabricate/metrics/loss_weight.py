"""What a loss is the mean of, where torch knows it: the labels that a cross-entropy counts, after any shift and with any weights.

In training the autograd graph tells, at the cost of two attribute reads; in evaluation, where there is no graph, the calls are
watched. Nothing waits for the device. Must not know: modules, batches, the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fabricate.errors import ConfigurationError

_MEAN = 1  # torch's number for reduction="mean"
_UNCHANGED = ("_DDPSinkBackward", "PreBackwardFunctionForModuleBackward", "ToCopyBackward0")
"""Operations that hand a loss on as it is: what DDP and DeepSpeed put around outputs, and a change of dtype."""


class Counted(NamedTuple):
    """What a cross-entropy's mean was taken over, as 0-dim device tensors: `weight`, which divided the sum, and how many
    `labels` counted. They differ under class weights only."""

    weight: torch.Tensor
    labels: torch.Tensor


def counted(loss: torch.Tensor) -> Counted | None:
    """What `loss` is the mean of, if it is a cross-entropy (or nll_loss) with reduction="mean" and nothing else; call it
    before backward. None for any other loss: a sum of terms, label smoothing, a compiled or hand-written kernel."""
    node: Any = loss.grad_fn
    while node is not None and type(node).__name__ in _UNCHANGED:
        node = node.next_functions[loss.output_nr if type(node).__name__ == "_DDPSinkBackward" else 0][0]
    if type(node).__name__ not in ("NllLossBackward0", "NllLoss2DBackward0") or node._saved_reduction != _MEAN:
        return None
    classes = node._saved_weight
    weight: torch.Tensor = node._saved_total_weight
    if classes is None and weight.dtype not in (torch.bfloat16, torch.float16):  # which cannot hold every count
        return Counted(weight, weight)
    ignored = node._saved_ignore_index
    return _count(node._saved_target, classes, ignored if ignored < 2**63 else ignored - 2**64)


def last_operation(loss: torch.Tensor) -> str:
    """The name of the operation that made `loss`, for a message."""
    return type(loss.grad_fn).__name__.rstrip("0123456789").removesuffix("Backward")


def _count(target: torch.Tensor, classes: torch.Tensor | None, ignored: int) -> Counted:
    counts = target != ignored
    labels = counts.sum()
    if classes is None:
        return Counted(labels, labels)
    each = classes.float()[target.clamp(0, len(classes) - 1)]
    return Counted(torch.where(counts, each, 0.0).sum(), labels)


class CrossEntropies(TorchFunctionMode):
    """While entered, remembers every mean cross-entropy that is computed. Costs a Python call per call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[torch.Tensor, Counted]] = []
        self._weighed = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.nn.functional.cross_entropy:
            self._remember(result, *args, **kwargs)
        return result

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
            self._found.append((result, _count(target, weight, ignore_index)))

    def weigh(self, logged: list[Any]) -> torch.Tensor | None:
        """If one of `logged` (name, value, weight, reduce) is a remembered cross-entropy: give it its weight, and return the
        labels that counted, for the rest. None if there is none; `ConfigurationError` if there was one the last time."""
        found = {result.data_ptr(): count for result, count in self._found}
        self._found = []
        for place, (name, value, weight, reduce) in enumerate(logged):
            if isinstance(value, torch.Tensor) and (count := found.get(value.data_ptr())) is not None:
                logged[place] = (name, value, count.weight if weight is None else weight, reduce)
                self._weighed = True
                return count.labels
        if self._weighed:
            raise ConfigurationError(
                "an evaluation step returned no plain cross-entropy, which weighs the labels that it counts, but did so for the batches "
                "before; one unit has to hold throughout: return 'weight' with the metrics every time"
            )
        return None
