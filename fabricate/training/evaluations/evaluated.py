"""The metrics of one evaluation: those of its data sets, and those that hooks add at its end. The same floats on every rank.

Owns the names of metrics. Must not know: how steps are run (`evaluation`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from fabricate.errors import ConfigurationError
from fabricate.metrics.reduction import Metrics, one_number
from fabricate.metrics.torchmetrics_objects import SetApart, path_inside
from fabricate.training.state.run_state import Run


def prefix_of(stage: str) -> str:
    """The prefix of the names of a stage's metrics."""
    return "val_" if stage == "validate" else f"{stage}_"


class Evaluated:
    """The metrics of an evaluation in progress."""

    def __init__(self, run: Run, stage: str) -> None:
        self._run = run
        self._prefix = prefix_of(stage)
        self.metrics: dict[str, float] = {}
        """The metrics by name. Hooks receive this mapping and may write into it; `check` then compares the ranks."""
        self._own: dict[str, float] = {}
        self._hooks = new_metrics(run)
        self._finished = new_metrics(run)
        """Those of the data set that was evaluated last."""
        self._apart: list[SetApart] = []
        """The torchmetrics objects of the data sets before."""

    def add(self, metrics: Mapping[str, float], data_set: str = "") -> None:
        """Add `metrics` under the names that steps use. All ranks, with the same values."""
        for name, value in metrics.items():
            full = self._named(name, data_set)
            if full in self._own:
                raise ConfigurationError(
                    f"two metrics of this evaluation would be called {full!r}, one of them {name!r}"
                    + (f" of val[{data_set!r}]" if data_set else "")
                    + ": give one of them another name"
                )
            self.metrics[full] = self._own[full] = value

    def _named(self, name: str, data_set: str) -> str:
        """The full name of a metric, such as "val_loss", with the data set's name if it has one; "val/loss" keeps its slash."""
        for separator in ("_", "/"):
            prefix = self._prefix[:-1] + separator
            if name.startswith(prefix):
                break
        else:
            prefix, separator = self._prefix, "_"
        rest = name.removeprefix(prefix)
        return f"{prefix}{data_set}{separator}{rest}" if data_set else f"{prefix}{rest}"

    def finish(self, metrics: Metrics) -> dict[str, float]:
        """What `metrics` gives for one data set. Its torchmetrics objects keep their counts until `release`, because `on_eval_end` may
        compute them too. All ranks."""
        self._finished = metrics
        return finish_metrics(self._run, metrics)

    def set_apart(self) -> None:
        """Take the counts out of the torchmetrics objects of the data set that was evaluated last, because the next one may use them."""
        self._apart.append(SetApart(self._finished.objects.values()))
        self._apart[-1].reset()

    def put_back_unused(self, used: Collection[str]) -> None:
        """Restore the counts of objects that no later data set used; `used`: the paths of those that have counts on some rank."""
        for apart in self._apart:
            apart.put_back_unused(used, self._run.module)

    def release(self) -> None:
        """Reset the torchmetrics objects of all data sets, at the end."""
        for apart in self._apart:
            apart.reset()
        self._finished.release()

    def take(self) -> None:
        """Collect what a hook logged, until `join` adds it. This rank only."""
        self._hooks.take(self._run.module._logged, 1)

    def join(self) -> None:
        """Add what hooks logged since the last call. All ranks."""
        self.take()
        self._note_own_values()
        self.add(finish_metrics(self._run, self._hooks))
        self._hooks.release()

    def _note_own_values(self) -> None:
        """Note values without a weight that hooks logged and that differ between ranks. All ranks."""
        if self._run.engine.world_size == 1:
            return
        mine = {
            name: float(value) for name, value, weight, reduce in self._hooks.pending if (weight, reduce) == (1, "mean")
        }
        zero, *others = self._run.engine.gather_json(mine)
        common = [name for name in zero if all(name in other for other in others)]
        differing = [name for name in common if not all(_alike(zero[name], other[name]) for other in others)]
        for name in differing:
            self._run.journal.note(
                f"log({name!r}) in a hook of the evaluation gets different values on the ranks, because each sees only its own "
                "rows; the mean of the ranks is recorded. That suits a time or a size. A metric that is no mean over rows (R2, F1) has "
                "to be computed in compute_metrics(self, outputs), which sees all rows; a mean over rows needs a weight in self.log"
            )

    def check(self) -> None:
        """Raise `ConfigurationError` unless `on_eval_end` wrote the same values into `metrics` on every rank. All ranks."""
        written = {}
        for name, value in self.metrics.items():
            if name not in self._own or self._own[name] is not value:
                self.metrics[name] = written[name] = float(one_number(name, value))
        everyone = self._run.engine.gather_json([[name, repr(value)] for name, value in sorted(written.items())])
        different = next((rank for rank, mine in enumerate(everyone) if mine != everyone[0]), None)
        if different is not None:
            raise ConfigurationError(
                f"on_eval_end wrote {dict(everyone[0])} into its metrics on rank 0 and {dict(everyone[different])} on rank {different}: "
                "each rank sees only its own rows. Use self.log(name, value, weight=...), which reduces over ranks, or compute_metrics"
            )


def _alike(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))


def new_metrics(run: Run) -> Metrics:
    """An empty `Metrics`."""
    return Metrics(run.engine, run.engine.device, run.engine.ranks_per_row)


def finish_metrics(run: Run, metrics: Metrics) -> dict[str, float]:
    """`metrics.finish()`, where some ranks may have no rows: each rank computes the torchmetrics objects that any rank logged, because that
    is a collective. All ranks."""
    if run.engine.world_size == 1:
        return metrics.finish()
    mine = {name: path_inside(run.module, metric) for name, metric in metrics.objects.items()}
    logged = run.engine.gather_json(mine)
    for name, path in {name: path for rank in logged for name, path in rank.items()}.items():
        if path is None and not all(name in rank for rank in logged):
            raise ConfigurationError(
                f"log({name!r}): this torchmetrics object is not part of the module; assign it in __init__, self.{name} = ..., so that "
                "every rank can compute it"
            )
        if path is not None:
            metrics.objects.setdefault(name, run.module.get_submodule(path))
    return metrics.finish()
