"""The values that `self.log` records, by Lightning's names: values of a step, and means of an epoch or an evaluation.

In training, fabricate's metrics compute weighted means over micro-batches and ranks, and are saved in checkpoints; the mean of an epoch is
read from them at its end. The values of an evaluation are summed here, because Lightning computes its metrics between two of its hooks.
Must not know: which hooks there are (`levels`), who calls them (`adapter`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather_object

from fabricate import ConfigurationError
from fabricate_lightning.kinds import is_metric
from fabricate_lightning.levels import level

_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "sum", "min", "max")},
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
    sum: "sum",
    min: "min",
    max: "max",
}


class Options(NamedTuple):
    """The options of `self.log` that are needed after the call."""

    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduction: str
    suffix: str = ""
    """The end of the name that identifies one of several data sets."""


class Sum:
    """The values of one name in an evaluation, or in a hook at the end of an epoch, on this rank."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._total: Any = {"min": math.inf, "max": -math.inf}.get(options.reduction, 0.0)
        self._weight: Any = 0.0

    def add(self, value: Any, weight: float) -> None:
        """Add a number or a 0-dim tensor. No wait for a device."""
        kind = self.options.reduction
        if kind in ("min", "max"):
            self._total = getattr(torch, f"{kind}imum")(torch.as_tensor(self._total).to(value), value)
        else:
            exact = value if value.device.type == "mps" else value.double()  # MPS has no float64
            self._total = self._total + (exact * weight if kind == "mean" else exact)
        self._weight += weight

    def state(self) -> tuple[float, float]:
        """Total and weight. Waits for the device."""
        return float(self._total), float(self._weight)


def combined(reduction: str, parts: list[tuple[float, float]]) -> float:
    """The value for the totals and weights of all ranks."""
    totals = [total for total, _ in parts]
    if reduction == "mean":
        weight = sum(weight for _, weight in parts)
        return sum(totals) / weight if weight else math.nan
    return min(totals) if reduction == "min" else max(totals) if reduction == "max" else sum(totals)


class Logs:
    """The values that a module and its callbacks have logged, by Lightning's names."""

    def __init__(self) -> None:
        self.hook = ""
        """Lightning's name of the method that runs; empty outside of one."""
        self.evaluates = False
        self.muted = False
        """Whether logged values are ignored, because the current batch is a stand-in."""
        self.suffix = ""
        """The end of the names that a step logs in an evaluation of several data sets."""
        self.rows: Callable[[], int] = lambda: 1
        """Returns the number of rows of the current batch."""
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.logged_metrics: dict[str, torch.Tensor] = {}
        self.progress_bar_metrics: dict[str, torch.Tensor] = {}
        self.epoch: dict[str, tuple[str, Options]] = {}
        """The names and options logged in the training epoch in progress, by the name under which fabricate records the value."""
        self.not_of_steps: set[str] = set()
        """Names that the loggers do not get at log boundaries, because they are logged for the epoch only or with logger=False."""
        self._sums: dict[str, Sum] = {}
        self._objects: dict[str, tuple[Any, Options]] = {}
        """torchmetrics objects that were logged and are not computed yet."""
        self._computed: list[Any] = []
        self._waiting: dict[str, tuple[Any, Options]] = {}
        self._of_steps: dict[str, tuple[Options, str, torch.Tensor]] = {}
        """The last values of steps that were logged with sync_dist=True, on this rank, with their options and forks."""

    def log(self, record: Callable[..., None], name: str, value: Any, **given: Any) -> None:
        """`self.log(name, value, ...)`. record: `TrainModule.log`, which takes values of training."""
        options = self._options(name, given)
        name += options.suffix
        if self.muted:
            return
        fork = "_step" if options.on_step and options.on_epoch else ""
        if is_metric(value):
            self._objects[name] = value, options
            value, options = value._forward_cache if options.on_step else None, options._replace(on_epoch=False)
            if value is None:
                return
        value = _one_number(name, value)
        if options.on_epoch and (self.evaluates or self.hook == "on_train_epoch_end"):
            self._sum_up(name, value, options, given["batch_size"])
        elif not self.evaluates:
            self._in_training(record, name + fork, name, value, options, given["batch_size"])
        if options.on_step:
            self._know(name, value, options, fork)
            if given["sync_dist"] and not self.evaluates:
                self._of_steps[name] = options, fork, value

    def _sum_up(self, name: str, value: torch.Tensor, options: Options, batch_size: int | None) -> None:
        """Add `value` to those of an evaluation, or of the hook at the end of an epoch."""
        weight = batch_size or (self.rows() if self._of_batch() and options.reduction == "mean" else 1)
        together = self._sums.setdefault(name, Sum(options))
        together.add(value, weight)
        if not self._of_batch():
            # Callbacks read it in the same hook: on several ranks, this rank's value until the ranks are reduced.
            so_far = combined(options.reduction, [together.state()])
            self._know(name, torch.as_tensor(so_far), options, "", whole=True)

    @property
    def in_training_batch(self) -> bool:
        """Whether a method runs that belongs to a batch of the training."""
        return self._of_batch() and not self.evaluates

    def _of_batch(self) -> bool:
        return "batch" in self.hook or self.hook.endswith("_step")

    def _options(self, name: str, given: Mapping[str, Any]) -> Options:
        on_step, on_epoch = level(self.hook, name, given["on_step"], given["on_epoch"])
        adds = given["add_dataloader_idx"]
        if adds and "/dataloader_idx_" in name:
            raise ConfigurationError(
                f"self.log({name!r}): Lightning adds '/dataloader_idx_N' to the name itself; leave it out of the name"
            )
        suffix = self.suffix if adds and self._of_batch() else ""
        reduction = _reduction(name, given["reduce_fx"])
        return Options(on_step, on_epoch, given["prog_bar"], given["logger"] is not False, reduction, suffix)

    def _in_training(
        self, record: Any, recorded: str, name: str, value: Any, options: Options, batch_size: int | None
    ) -> None:
        if options.on_epoch and options.reduction in ("min", "max"):
            raise ConfigurationError(
                f"self.log({name!r}, reduce_fx={options.reduction!r}) is not supported over a training epoch: log a torchmetrics "
                f"object ({options.reduction.title()}Metric), or the value of each step"
            )
        is_mean = options.reduction == "mean" or not options.on_epoch
        if batch_size is None and is_mean and self.hook == "on_train_batch_end":
            batch_size = self.rows()  # the last batch of an update would be weighed like the whole update
        if options.on_epoch or options.logger:
            record(recorded, value, weight=batch_size, reduce=options.reduction if options.on_epoch else "mean")
        if options.on_epoch:
            self.epoch[recorded] = name, options
        if not (options.on_step and options.logger):
            self.not_of_steps.add(recorded)

    def settle(self, known: Mapping[str, float], module: torch.nn.Module, world_size: int) -> dict[str, float]:
        """The values logged for the epoch or the evaluation since the last call, by their names for loggers. known: the values that
        fabricate recorded for the epoch; empty in an evaluation. All ranks; waits for the device."""
        settled: dict[str, float] = {}
        if world_size > 1:
            self._synchronise()
        if known:
            for recorded, (name, options) in self.epoch.items():
                settled |= self._settled(name, known.get(f"epoch_{recorded}", math.nan), options)
            self.epoch = {}
        for name, options, value in self._summed(world_size):
            settled |= self._settled(name, value, options)
        for name, (metric, options) in sorted(self._all_objects(module, world_size).items()):
            value = metric.compute()
            self._computed.append(metric)
            several = value.items() if isinstance(value, Mapping) else [(None, value)]
            for key, each in several:
                settled |= self._settled(name if key is None else f"{name}_{key}", _one_number(name, each), options)
        self._objects = {}
        return settled

    def forget(self) -> None:
        """Discard all values, because a fit or an evaluation begins."""
        self.callback_metrics, self.logged_metrics, self.progress_bar_metrics, self.epoch = {}, {}, {}, {}
        self.not_of_steps = set()
        self._sums, self._objects, self._computed, self._of_steps = {}, {}, [], {}

    def restore(self, metrics: Mapping[str, float], epoch: Mapping[str, Any]) -> None:
        """Restore the values and the names of a checkpoint."""
        self.callback_metrics = {name: torch.tensor(value) for name, value in metrics.items()}
        self.epoch = {recorded: (name, Options(*options)) for recorded, (name, options) in epoch.items()}
        self.not_of_steps = {
            name for name, (_, options) in self.epoch.items() if not (options.on_step and options.logger)
        }

    def begin_evaluation(self) -> None:
        """Record values for an evaluation from now on; torchmetrics objects of the training in progress are set aside."""
        self.evaluates, self._waiting, self._objects = True, self._objects, {}

    def end_evaluation(self) -> None:
        """Record values for the training again from now on."""
        self.evaluates, self._objects = False, self._waiting

    def reset(self) -> None:
        """Reset the torchmetrics objects that were computed, because the epoch or the evaluation is over."""
        for metric in self._computed:
            metric.reset()
        self._computed = []

    def _settled(self, name: str, value: Any, options: Options) -> dict[str, float]:
        value = torch.as_tensor(value, dtype=torch.get_default_dtype())
        forked = self._know(name, value, options, "_epoch" if options.on_step and options.on_epoch else "", whole=True)
        return {forked: float(value)} if options.logger else {}

    def _know(self, name: str, value: torch.Tensor, options: Options, fork: str, *, whole: bool = False) -> str:
        """Store `value` as the last one of `name`. whole: it is of an epoch or evaluation. Returns the name that distinguishes step and
        epoch."""
        forked = name.removesuffix(options.suffix) + fork + options.suffix
        if whole or not self.evaluates:  # callbacks see no single batch of an evaluation
            self.callback_metrics[name] = self.callback_metrics[forked] = value
        if options.logger:
            self.logged_metrics[forked] = value
        if options.prog_bar:
            self.progress_bar_metrics[forked] = value
        return forked

    def _synchronise(self) -> None:
        """Reduce the last values of steps over the ranks where that was asked for, because callbacks monitor them. All ranks."""
        mine = [(name, tuple(options), fork, float(value)) for name, (options, fork, value) in self._of_steps.items()]
        self._of_steps = {}
        together: dict[str, tuple[Options, str, list[tuple[float, float]]]] = {}
        for name, options, fork, value in sorted(gather_object(mine)):
            together.setdefault(name, (Options(*options), fork, []))[2].append((value, 1.0))
        for name, (options, fork, parts) in together.items():
            self._know(name, torch.as_tensor(combined(options.reduction, parts)), options, fork, whole=True)

    def _summed(self, world_size: int) -> list[tuple[str, Options, float]]:
        mine = [(name, tuple(entry.options), entry.state()) for name, entry in self._sums.items()]
        self._sums = {}
        together: dict[str, tuple[Options, list[tuple[float, float]]]] = {}
        for name, options, state in sorted(gather_object(mine) if world_size > 1 else mine):
            together.setdefault(name, (Options(*options), []))[1].append(state)
        return [(name, options, combined(options.reduction, parts)) for name, (options, parts) in together.items()]

    def _all_objects(self, module: torch.nn.Module, world_size: int) -> dict[str, tuple[Any, Options]]:
        """The torchmetrics objects that any rank logged: computing them is a collective, and a rank without a batch logged none."""
        if world_size == 1:
            return self._objects
        paths = {id(part): path for path, part in module.named_modules()}
        mine = [(name, paths.get(id(metric), ""), tuple(options)) for name, (metric, options) in self._objects.items()]
        everyone = {name: (path, options) for name, path, options in gather_object(mine)}
        if missing := sorted(name for name, (path, _) in everyone.items() if not path):
            raise ConfigurationError(
                f"self.log({missing[0]!r}): this torchmetrics object is not part of the module; assign it in __init__, so that every rank "
                "can compute it"
            )
        return {name: (module.get_submodule(path), Options(*options)) for name, (path, options) in everyone.items()}


def _reduction(name: str, reduce_fx: Any) -> str:
    named = _REDUCTIONS.get(reduce_fx) if isinstance(reduce_fx, str) or callable(reduce_fx) else None
    if named is None:
        raise ConfigurationError(
            f"self.log({name!r}, reduce_fx={reduce_fx!r}): give 'mean', 'sum', 'min' or 'max', or log a torchmetrics object"
        )
    return named


def _one_number(name: str, value: Any) -> torch.Tensor:
    """`value` as a detached 0-dim tensor of floats."""
    if isinstance(value, Mapping):
        raise ConfigurationError(f"self.log({name!r}) got a mapping; use self.log_dict(...)")
    tensor = value.detach() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    if tensor.numel() != 1:
        raise ConfigurationError(
            f"self.log({name!r}): a metric is one number, but this value has the shape {tuple(tensor.shape)}"
        )
    return (tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())).reshape(())
