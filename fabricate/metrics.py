"""Metrics: values stay where they are until a log boundary, then one reduction makes floats of all of them.

Owns: collecting (name, value, weight), weighted means over micro-batches and ranks, per-epoch means, torchmetrics objects.
Must not know: who writes or shows the floats.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, Protocol

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


class Metrics:
    """Collects entries of one stage ("train", or one evaluation) and reduces them over the ranks."""

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives = collectives
        self._device = device
        self.pending: list[Entry] = []
        self._totals: dict[str, list[float]] = {}
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
        """Means (or sums) of everything pending over micro-batches and ranks, as floats. All ranks; the one wait for the
        device. The result also counts into the totals that `finish` returns."""
        sums: dict[tuple[str, str], list[list[torch.Tensor]]] = {}
        for name, value, weight, reduce in self.pending:
            pair = sums.setdefault((name, reduce), [[], []])
            pair[0].append(self._tensor(value))
            pair[1].append(self._tensor(weight))
        self.pending = []
        keys = sorted(sums)
        if self._collectives.world_size > 1:
            # A rank that had no rows logged nothing: the ranks agree on the names before they reduce.
            keys = sorted({(n, r) for names in self._collectives.gather_json(keys) for n, r in names})
        if not keys:
            return {}
        names = [name for name, _ in keys]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigurationError(
                f"log({twice[0]!r}) is called with reduce='mean' and with reduce='sum'; choose one of them"
            )
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        rows = []
        for key in keys:
            values, weights = sums.get(key, ([], []))
            if not values:
                rows += [zero, zero]
                continue
            value, weight = torch.stack(values), torch.stack(weights)
            # A weight of zero means "no rows here", whatever the value (it may be nan).
            rows += [
                torch.where(weight == 0, zero, value * weight).sum() if key[1] == "mean" else value.sum(),
                weight.sum(),
            ]
        flat = self._collectives.all_reduce(torch.stack(rows)).tolist()
        result = {}
        for number, (name, reduce) in enumerate(keys):
            total, weight_sum = flat[2 * number], flat[2 * number + 1]
            stored = self._totals.setdefault(name, [0.0, 0.0, 1.0 if reduce == "mean" else 0.0])
            stored[0] += total
            stored[1] += weight_sum
            result[name] = _mean(total, weight_sum) if reduce == "mean" else total
        return result

    def _tensor(self, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.detach().reshape(()).to(self._device, torch.float64)
        return torch.tensor(float(value), dtype=torch.float64, device=self._device)

    def finish(self) -> dict[str, float]:
        """Means over everything since the last `finish` (an epoch, an evaluation), torchmetrics objects computed and
        reset. All ranks."""
        self.reduce()
        result = {n: _mean(t, w) if mean else t for n, (t, w, mean) in sorted(self._totals.items())}
        for name, metric in sorted(self._objects.items()):
            value = metric.compute()
            check_value(name, value)
            result[name] = float(value)
            metric.reset()
        self._totals = {}
        self._objects = {}
        return result

    def state(self) -> dict[str, Any]:
        """For a checkpoint: this rank's pending entries as floats, and the totals. Waits for the device."""
        pending = [[n, float(v), float(w), r] for n, v, w, r in self.pending]
        return {"pending": pending, "totals": self._totals}

    def load(self, state: dict[str, Any], *, same_rank: bool) -> None:
        """Take over what `state()` gave; pending entries only on the rank that had them."""
        self._totals = {name: list(total) for name, total in state["totals"].items()}
        self.pending = [(n, v, w, r) for n, v, w, r in state["pending"]] if same_rank else []


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def snapshot_torchmetrics(module: torch.nn.Module) -> Callable[[], None]:
    """Remember the state of every torchmetrics object inside `module`; the returned function puts it back."""
    saved = []
    for metric in module.modules():
        if is_torchmetric(metric):
            names = [*metric._defaults, "_update_count", "_computed"]  # type: ignore[misc]  # torchmetrics has no public snapshot
            values = {n: getattr(metric, n) for n in names}
            copies = {
                n: v.clone() if isinstance(v, torch.Tensor) else list(v) if isinstance(v, list) else v
                for n, v in values.items()
            }
            saved.append((metric, copies))

    def restore() -> None:
        for metric, values in saved:
            for name, value in values.items():
                object.__setattr__(metric, name, value) if name.startswith("_") else setattr(metric, name, value)

    return restore
