"""Metrics: values stay where they are until a log boundary, then one reduction makes floats of all of them.

Owns: collecting (name, value, weight), weighted means over micro-batches and ranks, per-epoch means, torchmetrics objects.
Must not know: who writes or shows the floats.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from fabricate.errors import ConfigurationError

Entry = tuple[str, Any, Any, str]
"""(name, value, weight, "mean" or "sum"); value and weight are numbers or 0-dim tensors."""


class Collectives(Protocol):
    """What a reduction needs of the ranks."""

    world_size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over all ranks, in place; all ranks."""

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order; all ranks."""


def is_torchmetric(value: object) -> bool:
    """Whether `value` is a torchmetrics object, without importing torchmetrics."""
    module = sys.modules.get("torchmetrics")
    return module is not None and isinstance(value, module.Metric)


def check_value(name: str, value: object) -> None:
    """Refuse what cannot become one float, while the traceback still points at the user's line."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ConfigurationError(
                f"log({name!r}): a metric is one number, this tensor has shape {tuple(value.shape)}; reduce it first"
            )
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(
            f"log({name!r}): give a number, a 0-dim tensor or a torchmetrics object, not {type(value).__name__}"
        )


class Total(NamedTuple):
    """A sum over all ranks, already on the host: of weighted values and of weights, or of plain values."""

    total: float = 0.0
    weight: float = 0.0
    mean: bool = True

    def __add__(self, other: Total) -> Total:  # type: ignore[override]
        return Total(self.total + other.total, self.weight + other.weight, self.mean and other.mean)

    def value(self) -> float:
        """The mean, nan over nothing; or the sum."""
        if not self.mean:
            return self.total
        return self.total / self.weight if self.weight else math.nan


class Metrics:
    """Collects entries of one stage ("train", or one evaluation) and reduces them over the ranks."""

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self.pending: list[Entry] = []
        self._since: dict[str, Total] = {}
        self._totals: dict[str, Total] = {}
        self._objects: dict[str, Any] = {}

    def take(self, logged: list[Any], weight: Any) -> None:
        """Move what a module logged during one micro-batch here; entries without a weight of their own get `weight`."""
        for name, value, own, reduce in logged:
            if reduce == "object":
                self._objects[name] = value
            else:
                self.pending.append((name, value, weight if own is None else own, reduce))
        logged.clear()

    def reduce(self) -> dict[str, float]:
        """Means (or sums) since the last `reduce`, over micro-batches and ranks, as floats. All ranks; the one wait for
        the device."""
        self._fold()
        since, self._since = self._since, {}
        return {name: total.value() for name, total in since.items()}

    def look(self) -> dict[str, float]:
        """What `reduce` would return, leaving everything as it is. All ranks; one wait for the device."""
        fresh = self._sums()
        return {n: (self._since.get(n, Total()) + fresh.get(n, Total())).value() for n in {**self._since, **fresh}}

    def finish(self) -> dict[str, float]:
        """Means over everything since the last `finish` (an epoch, an evaluation), torchmetrics objects computed and
        reset. All ranks."""
        self._fold()
        totals, self._totals = self._totals, {}
        result = {name: totals[name].value() for name in sorted(totals)}
        for name, metric in sorted(self._objects.items()):
            value = metric.compute()
            check_value(name, value)
            result[name] = float(value)
            metric.reset()
        self._objects = {}
        return result

    def _fold(self) -> None:
        for name, total in self._sums().items():
            self._totals[name] = self._totals.get(name, Total()) + total
            self._since[name] = self._since.get(name, Total()) + total
        self.pending = []

    def _sums(self) -> dict[str, Total]:
        """Everything pending, summed over micro-batches and ranks: one collective for all names."""
        sums: dict[tuple[str, str], list[list[torch.Tensor]]] = {}
        for name, value, weight, reduce in self.pending:
            pair = sums.setdefault((name, reduce), [[], []])
            pair[0].append(self._tensor(value))
            pair[1].append(self._tensor(weight))
        keys = sorted(sums)
        if self._collectives.world_size > 1:
            # A rank that had no rows logged nothing: the ranks agree on the names before they reduce.
            keys = sorted({(n, r) for names in self._collectives.gather_json(keys) for n, r in names})
        names = [name for name, _ in keys]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigurationError(
                f"log({twice[0]!r}) is called with reduce='mean' and with reduce='sum'; choose one of them"
            )
        if not keys:
            return {}
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        rows = []
        for key in keys:
            values, weights = sums.get(key, ([], []))
            if not values:
                rows += [zero, zero]
                continue
            value, weight = torch.stack(values), torch.stack(weights)
            # A weight of zero means "no rows here", whatever the value (it may be nan).
            weighted = torch.where(weight == 0, zero, value * weight) if key[1] == "mean" else value
            rows += [weighted.sum(), weight.sum()]
        flat = self._collectives.all_reduce(torch.stack(rows)).tolist()
        return {
            name: Total(flat[2 * number], flat[2 * number + 1], reduce == "mean")
            for number, (name, reduce) in enumerate(keys)
        }

    def _tensor(self, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.detach().reshape(()).to(self._device, torch.float64)
        return torch.tensor(float(value), dtype=torch.float64, device=self._device)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: this rank's pending entries as floats, and the sums. Waits for the device."""
        pending = [[n, float(v), float(w), r] for n, v, w, r in self.pending]
        return {"pending": pending, "since": _lists(self._since), "totals": _lists(self._totals)}

    def load(self, state: dict[str, Any], *, same_rank: bool) -> None:
        """Take over what `state()` gave; pending entries only on the rank that had them."""
        self._since = {name: Total(*total) for name, total in state["since"].items()}
        self._totals = {name: Total(*total) for name, total in state["totals"].items()}
        self.pending = [(n, v, w, r) for n, v, w, r in state["pending"]] if same_rank else []


def _lists(totals: dict[str, Total]) -> dict[str, list[Any]]:
    return {name: list(total) for name, total in totals.items()}


def torchmetrics_state(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """What every torchmetrics object inside `module` has seen so far, by its name in the module; copies."""
    state: dict[str, dict[str, Any]] = {}
    for name, metric in module.named_modules():
        if is_torchmetric(metric):
            fields: Any = [*metric._defaults, "_update_count", "_computed"]  # no public snapshot exists
            values = {field: getattr(metric, field) for field in fields}
            state[name] = {
                field: value.clone()
                if isinstance(value, torch.Tensor)
                else list(value)
                if isinstance(value, list)
                else value
                for field, value in values.items()
            }
    return state


def load_torchmetrics_state(module: torch.nn.Module, state: dict[str, dict[str, Any]]) -> None:
    """Put back what `torchmetrics_state` gave; tensors go to each object's device."""
    for name, metric in module.named_modules():
        for field, value in state.get(name, {}).items():
            if isinstance(value, torch.Tensor):
                value = value.to(metric.device)
            elif isinstance(value, list):
                value = [v.to(metric.device) if isinstance(v, torch.Tensor) else v for v in value]
            object.__setattr__(metric, field, value) if field.startswith("_") else setattr(metric, field, value)


def snapshot_torchmetrics(module: torch.nn.Module) -> Callable[[], None]:
    """Remember what every torchmetrics object inside `module` has; the returned function puts it back."""
    state = torchmetrics_state(module)
    return lambda: load_torchmetrics_state(module, state)
