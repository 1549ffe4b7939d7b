"""The return value of `training_step`: reading it, and checks against earlier ones and those of other ranks; and what the names in the
code of `training_step` show.

Must not know: in which order things happen (fabricate.training.loop).
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fabricate.data.batches import leading_dimensions, several_labels
from fabricate.data.identity import names_in
from fabricate.errors import ConfigurationError, did_you_mean
from fabricate.metrics.loss_form import (
    divisors,
    function_of_a_mean,
    is_over_a_part,
    is_sum,
    last_operation,
    mean_over,
    odd_divisor,
)
from fabricate.metrics.loss_weight import terms_over_labels
from fabricate.module import TrainModule
from fabricate.training.state.run_state import Run


def unpack(output: Any) -> tuple[Any, Any, Any]:
    """The loss, the weight or None, and the name of the optimizer (or a list of names) or None."""
    if isinstance(output, Mapping):
        allowed = {"loss", "weight", "optimizer"}
        unknown = sorted(set(output) - allowed)
        if "loss" not in output or unknown:
            missing = allowed - set(output)
            raise ConfigurationError(
                f"training_step returned a mapping with the keys {sorted(output)}; it has to hold 'loss', one number to train on, and may "
                f"hold 'weight' and 'optimizer'{did_you_mean(unknown[0], missing) if unknown else ''}; record "
                "other values with self.log(name, value)"
            )
        weight = output.get("weight")
        return output["loss"], None if weight is None else one_weight(weight), output.get("optimizer")
    return output, None, None


def one_weight(weight: Any) -> Any:
    """The `weight` that a step returned, as a number or a 0-dim tensor. Does not wait for the device."""
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ConfigurationError(
                f"a step returned a weight of shape {tuple(weight.shape)}; return one number, for instance weight.sum()"
            )
        return weight.detach().reshape(())
    check_not_negative(weight)
    return weight


def check_not_negative(weight: Any) -> None:
    """Raise `ConfigurationError` for a negative weight. Waits for the device if `weight` is a tensor on it."""
    if weight is not None and float(weight) < 0:
        raise ConfigurationError(
            f"a step returned the weight {float(weight):g}; a weight is the number of items that the mean was taken over, so it "
            "cannot be negative. To maximise a loss, return -loss"
        )


class Made(NamedTuple):
    """How a loss was computed, read from its autograd graph."""

    operation: str
    is_sum: bool
    divisor: float | None
    """The divisor, if the loss is a sum over the batch that is divided by a number; see `odd_divisor`."""
    divisors: list[float]
    """The numbers by which the whole loss is divided."""
    over_a_part: bool
    values: int
    """How many values the loss averages; 0 if it is no mean or has several terms."""
    function: str
    """The non-linear function of a mean that the loss is; see `function_of_a_mean`."""
    cross_entropies: list[tuple[bool, torch.Tensor, int]]
    """The cross-entropies among the terms of the loss; see `terms_over_labels`."""
    rows: int | None

    @classmethod
    def by(cls, loss: torch.Tensor, rows: int | None) -> Made:
        """Read the autograd graph of `loss`, before backward. `rows`: the number of rows of its batch, if it is known."""
        with _disable_current_modes():  # torch's counter of FLOPs fails on the numbers in the graph
            return cls._read(loss, rows or None)

    @classmethod
    def _read(cls, loss: torch.Tensor, rows: int | None) -> Made:
        divisor = odd_divisor(loss, rows) if rows else None
        over_a_part, cross_entropies = is_over_a_part(loss, rows), terms_over_labels(loss, rows)
        values, function = mean_over(loss, rows), function_of_a_mean(loss, rows)
        return cls(
            last_operation(loss),
            is_sum(loss, rows),
            divisor,
            divisors(loss),
            over_a_part,
            values,
            function,
            cross_entropies,
            rows,
        )

    def is_notable(self) -> bool:
        """Whether the loss seems to be no mean over rows. Waits for the device."""
        return bool(self.is_sum or self.divisor is not None or self.function or self.part())

    def is_plain(self) -> bool:
        """Whether the loss is a cross-entropy and nothing else."""
        return self.operation.startswith("NllLoss") and bool(self.cross_entropies)

    def part(self) -> str:
        """The reason why the loss seems to be a mean over something other than rows; "" if there is none. Waits for the device."""
        is_it = "the loss is" if self.is_plain() else "a term of the loss is"
        for has_weights, counted, labels in self.cross_entropies:
            if has_weights:
                return f"{is_it} a cross-entropy with class weights, a mean over these,"
            if float(counted) < labels:
                return f"{is_it} a cross-entropy that counts {float(counted):g} of {labels} labels,"
            if self.rows and labels % self.rows:
                return f"{is_it} a cross-entropy of {labels} labels for {self.rows} rows,"
        if self.over_a_part:
            return "the loss seems to be a weighted mean or a mean over a part of its batch"
        return (
            f"the loss is a mean over {self.values} values for {self.rows} rows"
            if self.rows and self.values % self.rows
            else ""
        )


class Scale(NamedTuple):
    """By what a plain cross-entropy is divided, and over what it is a mean."""

    divisor: float
    labels: torch.Tensor
    rows: int

    @classmethod
    def of(cls, loss: torch.Tensor, labels: torch.Tensor, rows: int) -> Scale:
        with _disable_current_modes():  # as in `Made.by`
            return cls(math.prod(divisors(loss)), labels, rows)

    def undone(self) -> float:
        """By what the sum over the labels is divided. Waits for the device."""
        return float(self.labels) * self.divisor


def note_scale(run: Run, first: Scale, now: Scale) -> bool:
    """Note a cross-entropy that two batches multiply by their numbers of labels, because it is then no mean over labels any more; returns
    whether it is one. Waits for the device if their scales differ."""
    if now.divisor == first.divisor:
        return False
    by_rows = all(math.isclose(each.undone(), each.rows, rel_tol=_SAME_SCALE) for each in (first, now))
    if not by_rows and not math.isclose(first.undone(), now.undone(), rel_tol=_SAME_SCALE):
        return False
    run.journal.note(
        "the loss is a cross-entropy scaled by a number that changes from batch to batch with the number of its labels, and is weighted by "
        "these labels too, so they count twice. Return {'loss': loss, 'weight': the number of rows} from training_step if the sum over the "
        "labels is divided by the rows, or else the cross-entropy itself"
    )
    return True


_SAME_SCALE = 1e-4


def check_loss(run: Run, loss: Any) -> None:
    where = f"{type(run.module).__name__}.training_step returned"
    if loss is None:
        raise ConfigurationError(
            f"{where} nothing; return the loss. To leave rows out, leave them out of the data, or return {{'loss': a finite loss, "
            "'weight': 0}: the batch then counts for nothing, but the optimizer makes the update even if no other batch is part of it"
        )
    if not isinstance(loss, torch.Tensor):
        raise ConfigurationError(
            f"{where} {type(loss).__name__}; return the loss as a 0-dim tensor, or a mapping with 'loss'"
        )
    if loss.ndim:
        raise ConfigurationError(
            f"{where} a tensor of shape {tuple(loss.shape)}; reduce it to one number, for instance with .mean()"
        )
    if not torch.is_grad_enabled():
        raise ConfigurationError(
            f"{where} a loss without gradient: gradients are off around the whole fit, by torch.no_grad() or "
            "torch.set_grad_enabled(False) in the code that calls it; call fit outside of it"
        )
    if not loss.requires_grad:
        raise ConfigurationError(
            f"{where} a loss without gradient; compute it from the module's parameters, without detach() or no_grad()"
        )


def check_logged(run: Run, loss: torch.Tensor) -> None:
    """Raise `ConfigurationError` if training_step logs a "loss" other than the returned one, because the logged one is left out of the
    metrics."""
    for name, value, *_ in run.module._logged:
        if name == "loss" and (not isinstance(value, torch.Tensor | int | float) or not _same(float(value), loss)):
            raise ConfigurationError(
                f"{type(run.module).__name__}.training_step logs {value} as 'loss', but returns the loss {loss.item()}, which is recorded "
                "under the name 'loss'; log the other value under another name"
            )


def leave_out_mean(run: Run, mean: torch.Tensor | None) -> None:
    """Drop a "loss" that on_step logs, because the loss is recorded in any case. `ConfigurationError` unless it is the `mean` that on_step
    got."""
    logged = run.module._logged
    for name, value, _, reduce in logged:
        if name == "loss" and reduce != "object" and (mean is None or not _same(float(value), mean)):
            raise ConfigurationError(
                f"on_step logs {float(value):g} as 'loss', which is the name of the loss that training_step returns: give it another name"
            )
    logged[:] = [entry for entry in logged if entry[0] != "loss" or entry[3] == "object"]


def _same(value: float, loss: torch.Tensor) -> bool:
    return math.isclose(value, loss.item(), rel_tol=1e-6) or value != value


def check_window(run: Run, how: str, name: str, made: Made, is_split: bool) -> bool:
    """Check, after the first window of an optimizer, that every rank uses the same rule for the loss and updates the same optimizer.
    `is_split`: whether the window has several micro-batches or readers. Returns whether there is a note about a loss that is weighted by
    rows. All ranks."""
    if run.engine.world_size > 1:
        answers = run.engine.gather_json([how, name])
        if any(a != answers[0] for a in answers):
            raise ConfigurationError(
                f"training_step returns different things on different ranks (source of the loss's weight, optimizer): {answers}; "
                "return the same keys on every rank"
            )
    trainable = [(n, p) for n, p in run.module.named_parameters() if p.requires_grad]
    unused = [n for n, p in trainable if p.grad is None]
    # If no parameter has a gradient, the strategy's engine holds the gradients elsewhere.
    if 0 < len(unused) < len(trainable) and name == run.optim.default:
        run.journal.event("unused_parameters", names=unused[:20])
    run.journal.event("loss_weight", optimizer=name, source=how)
    run.optim.gives_weights |= how == "given"
    if is_split and made.function:
        run.journal.note(
            f"the loss is, or contains, a non-linear function ({made.function}) of a mean over its batch. An update takes the mean of this "
            "loss over its micro-batches, which is not the loss of the whole batch, so the update depends on how a global batch is split. "
            "Return the mean itself (the mean squared error, not its square root), or give the whole batch to one rank as one micro-batch"
        )
    return how == "rows" and note_rows(run, made)


def note_rows(run: Run, made: Made) -> bool:
    """Note a loss that is weighted by rows but is probably a mean over something else, or no mean; returns whether it is."""
    if made.is_sum:
        run.journal.note(
            f"the loss is, or contains, a sum over the batch (its last operation is {made.operation}), but is treated as a mean, "
            "so the size of an update depends on the number of rows of a micro-batch. Return the mean, for example with "
            "reduction='mean'"
        )
        return True
    if made.divisor is not None:
        _note_divisor(run, made.divisor)
        return True
    one_per_row = made.rows is not None and made.values == made.rows
    shape = None if one_per_row else several_labels(run.now.batch)
    why = f"a batch holds whole numbers of the shape {shape}, several per row," if shape is not None else made.part()
    leading = leading_dimensions(run.now.batch)
    if not why and run.source is not None and run.source.kind == "iterable" and len(leading) > 1:
        why = (
            f"the tensors of a batch begin with the dimensions {', '.join(map(str, leading))}, of which the first is taken for the "
            "rows,"
        )
    if not why:
        return False
    kind = f"and the loss is not a plain cross-entropy (it comes from {made.operation})"
    if made.is_plain():
        kind = "but earlier losses were not plain cross-entropies"
    run.journal.note(
        f"{why} {kind}, so this loss is weighted by the number of rows of its batch. Where rows have unequal numbers of labels, return "
        "{'loss': loss, 'weight': the number that the mean was taken over} from training_step, and a weight with the metrics of "
        "validation_step"
        f"{_SEVERAL_MEANS if made.operation in ('Add', 'Sub') else ''}"
    )
    return True


_SEVERAL_MEANS = (
    ". Terms that are means over different numbers of items have no common weight: divide each by a number that does not depend on the "
    "batch, or by its rows"
)
_ACCUMULATION = re.compile("(?i:accum.*(step|grad|batch|iter)|grad.*accum|acc_?steps)|^ACC(UM)?$")
"""Finds names such as accumulation_steps, accumulate_grad_batches, accum_iter, grad_accum, acc_steps and the constant ACC."""


def note_accumulation(run: Run, divisors: list[float], micro_batches: int) -> None:
    """Note a loss that training_step divides by the number of `micro_batches` of the update, as the names in its code confirm: other losses
    may be divided by 2 or 4 too."""
    if micro_batches == 1 or not any(math.isclose(divisor, micro_batches) for divisor in divisors):
        return
    if name := next((each for each in sorted(names_in_step(run.module)) if _ACCUMULATION.search(each)), ""):
        run.journal.note(
            f"{type(run.module).__name__}.training_step divides its loss by {micro_batches} ({name}), and the loop takes the mean over the "
            f"{micro_batches} micro-batches of an update: gradients are {micro_batches} times too small. Return the loss undivided"
        )


def _note_divisor(run: Run, divisor: float) -> None:
    """Note a loss that is a sum over its batch, divided by a number other than that of its rows."""
    run.journal.note(
        f"the loss divides a sum over its batch by {divisor:g}, but the batch has another number of rows. It is treated as a mean "
        "over the rows, so the update depends on how a global batch is split. Divide by the rows of the batch, as .mean() does. "
        "If the number counts labels, return {'loss': loss, 'weight': that number} from training_step"
    )


def changed_weight(known: str, how: str, loss: torch.Tensor) -> ConfigurationError:
    said = {
        "given": "with a weight",
        "counted": "as a plain cross-entropy, which weighs the labels that it counts",
        "rows": f"without a weight and not as a plain cross-entropy (it comes from {last_operation(loss)})",
    }
    return ConfigurationError(
        f"training_step returned its loss {said[how]}, but before {said[known]}. All losses need a weight in the same unit: "
        "return {'loss': loss, 'weight': what its mean was taken over} every time"
    )


_CLIPPING = {"clip_grad_norm_": "max_grad_norm", "clip_grad_value_": "max_grad_value"}
"""The argument of `Trainer` that has the effect of each function."""


def notes_of_clipping(module: TrainModule) -> list[str]:
    """A note if `training_step`, or a method that it calls, clips gradients and computes none of its own. Decided by the names in the
    code."""
    names = names_in_step(module)
    if any("backward" in name or name in ("grad", "autograd") for name in names):
        return []
    return [
        f"{type(module).__name__}.training_step calls {name}, but gradients are computed after it returns: nothing is clipped, or, with "
        f"gradient accumulation, only the gradients of earlier micro-batches. Remove the call and use Trainer({argument}=...)"
        for name, argument in _CLIPPING.items()
        if name in names
    ]


def check_scaling(module: TrainModule) -> None:
    """Raise `ConfigurationError` if `training_step` scales its loss by a GradScaler, left over from a loop by hand."""
    names = names_in_step(module)
    known = vars(module) | getattr(inspect.unwrap(type(module).training_step), "__globals__", {})
    scalers = [name for name in sorted(names) if isinstance(known.get(name), torch.amp.GradScaler)]
    if "scale" in names and scalers and known[scalers[0]].is_enabled():
        raise ConfigurationError(
            f"{type(module).__name__}.training_step calls scale of the GradScaler {scalers[0]}, but nothing divides the gradients by the "
            "scale again. Return the loss itself, and use Trainer(precision='fp16'), which scales it"
        )


def names_in_step(module: TrainModule) -> set[str]:
    """The names of globals, attributes and enclosing variables in the code of `training_step`, and of the user's methods that these names
    may stand for."""
    return _names(module, "training_step", set())


def _names(module: TrainModule, method: str, seen: set[str]) -> set[str]:
    seen.add(method)
    owner = next((kind for kind in type(module).__mro__ if method in vars(kind)), TrainModule)
    code = getattr(inspect.unwrap(getattr(owner, method, None)), "__code__", None)  # type: ignore[arg-type]
    if code is None or owner.__module__.startswith(("torch.", "fabricate.", "fabricate_")):
        return set()
    names = set(names_in(code))
    return names.union(
        *(_names(module, name, seen) for name in names if hasattr(type(module), name) and name not in seen)
    )
