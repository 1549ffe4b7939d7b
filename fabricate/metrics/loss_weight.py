"""What a loss is the mean of, where torch knows it: the labels that a cross-entropy counts, after any shift and with any weights.

In training the autograd graph tells, at the cost of two attribute reads; in evaluation, where there is no graph, the calls are
watched. Nothing waits for the device. Must not know: modules, batches, the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fabricate.errors import ConfigurationError

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
        *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "NegBackward0"),
        *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward3"),
    }
)
"""Operations that hand a loss on as it is, apart from its sign: what DDP and DeepSpeed put around outputs, copies, changes of dtype
and of shape."""
_SCALED = ("MulBackward0", "DivBackward0")
_ADDED = ("AddBackward0", "SubBackward0")
_REDUCED = ("MeanBackward0", "SumBackward0")
_MASKED = ("IndexBackward0", "MaskedSelectBackward0")


class Counted(NamedTuple):
    """What a cross-entropy's mean was taken over, as 0-dim device tensors: `weight`, which divided the sum, and how many
    `labels` counted. They differ under class weights only."""

    weight: torch.Tensor
    labels: torch.Tensor


def counted(loss: torch.Tensor) -> Counted | None:
    """What `loss` is the mean of, if it is a cross-entropy (or nll_loss) with reduction="mean", times a number and nothing else;
    call it before backward. None for any other loss: a sum of terms, label smoothing, a compiled or hand-written kernel."""
    node = _origin(loss)
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
    node = _origin(loss)
    return type(loss.grad_fn if node is None else node).__name__.rstrip("0123456789").removesuffix("Backward")


def is_sum(loss: torch.Tensor) -> bool:
    """Whether `loss` is a sum over its batch, or a sum of terms of which one has reduction="sum"."""
    origin = _origin(loss, scaled=False)  # a sum times a number is most likely a mean: sum() / len(batch)
    if type(origin).__name__ == "SumBackward0":
        return True
    nodes = [origin]
    while nodes:
        node = nodes.pop()
        if getattr(node, "_saved_reduction", None) == _SUM:
            return True
        if type(node).__name__ in _ADDED:
            nodes += [_through(each, scaled=False) for each, _ in node.next_functions if each is not None]
    return False


def is_over_a_part(loss: torch.Tensor) -> bool:
    """Whether `loss` is a mean over what a mask selects, or a sum that is divided by a tensor: by a count, most likely."""
    node = _origin(loss)
    name = type(node).__name__
    if name == "MeanBackward0":
        return type(node.next_functions[0][0]).__name__ in _MASKED
    return name == "DivBackward0"


def _origin(loss: torch.Tensor, scaled: bool = True) -> Any:
    """The operation that `loss` comes from, apart from copies, numbers added to it and (`scaled`) numbers that scale it."""
    node: Any = loss.grad_fn
    if type(node).__name__ == "_DDPSinkBackward":
        node = node.next_functions[loss.output_nr][0]
    return _through(node, scaled)


def _through(node: Any, scaled: bool) -> Any:
    while node is not None:
        name = type(node).__name__
        if name in _ADDED:
            terms = [each for each, _ in node.next_functions if each is not None]
            if len(terms) != 1:
                return node
            node = terms[0]
        elif name in _UNCHANGED or (scaled and _is_scaled(name, node)) or (name in _REDUCED and not _several(node)):
            node = node.next_functions[0][0]
        else:
            return node
    return None


def _is_scaled(name: str, node: Any) -> bool:
    """Whether a product or quotient is one with a Python number. The factor may as well be a tensor: the number of labels, say."""
    if name not in _SCALED or node.next_functions[0][0] is None:
        return False
    factor = node._saved_other
    if factor is None or factor.ndim:
        return False
    small = torch.float16 if factor.is_floating_point() else torch.int8
    # Of a number and a tensor without dimensions torch takes the tensor's dtype, of two such tensors the larger one.
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


class CrossEntropies(TorchFunctionMode):
    """While entered, remembers every mean cross-entropy that is computed. Costs a Python call per call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[tuple[torch.Tensor, Counted]] = []
        self._weighed: set[str] = set()
        """The names of the metrics that were weighed."""

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
        """Give every one of `logged` (name, value, weight, reduce) that is a remembered cross-entropy its weight, and return the
        labels that the first of them counted, for the rest. None if there is none; `ConfigurationError` if a metric was one in
        the batches before."""
        found = {result.data_ptr(): count for result, count in self._found}
        self._found = []
        labels, weighed = None, set()
        for place, (name, value, weight, reduce) in enumerate(logged):
            if isinstance(value, torch.Tensor) and (count := found.get(value.data_ptr())) is not None:
                logged[place] = (name, value, count.weight if weight is None else weight, reduce)
                weighed.add(name)
                labels = count.labels if labels is None else labels
        missing = self._weighed - weighed
        self._weighed |= weighed
        if missing & {name for name, *_ in logged} or (missing and not weighed):
            raise ConfigurationError(
                "an evaluation step returned no plain cross-entropy, which weighs the labels that it counts, but did so for the batches "
                "before; one unit has to hold throughout: return 'weight' with the metrics every time"
            )
        return labels
