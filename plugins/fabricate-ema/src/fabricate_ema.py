"""An exponential moving average of the weights, evaluated and exported in their place.

Each rank averages the part of the weights that it holds (a shard under FSDP or ZeRO), so that nothing is communicated. The
average is put into the module for every evaluation, and for the export.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from fabricate import Callback, ConfigurationError, hookimpl

if TYPE_CHECKING:
    import torch

    from fabricate import Strategy, Trainer, TrainModule


@dataclasses.dataclass(eq=False)
class EMA(Callback):
    """Average of the trainable parameters: `average = decay * average + (1 - decay) * weights` after each update.

    decay: between 0 and 1. start: updates before the average begins; until then the average equals the weights.
    """

    averages_weights = True

    decay: float = 0.999
    start: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1 or self.start < 0:
            raise ConfigurationError(f"{self}: give decay of at least 0 and below 1, and start of at least 0")
        self._parts: dict[str, tuple[Strategy.Part, torch.Tensor]] = {}
        self._kept: list[torch.Tensor] = []
        """The weights while the module holds the average; otherwise empty."""
        self._complete = False
        """Whether the fit ends with the average, so that a validation after that leaves it in the module."""

    def on_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Begin the average, unless `on_load` began it. Not in on_fit_start: a checkpoint without an average may still change the
        weights."""
        self._begin(trainer, module, {})

    def _begin(self, trainer: Trainer, module: TrainModule, averages: Mapping[str, torch.Tensor]) -> None:
        """Begin the averages of the trained parameters: at the present weights, or at `averages`, by name."""
        import torch  # here, because looking for plugins imports this file and has to stay quick

        self._strategy = trainer.strategy
        for name, parameter in module.named_parameters():
            if name not in self._parts and (parameter.requires_grad or name in averages):
                part = self._strategy.local_part(parameter)
                # In bfloat16 the average would not move: its changes are too small.
                self._parts[name] = part, part.memory.to(torch.promote_types(part.dtype, torch.float32), copy=True)
        for name, saved in averages.items():
            part, average = self._parts[name]
            part.over(average).write(saved.flatten()[part.start : part.start + part.count])

    def on_step(self, step: int) -> None:
        import torch

        averages = [average for _, average in self._parts.values()]
        weights = [part.memory.to(average.dtype) for part, average in self._parts.values()]
        torch._foreach_lerp_(averages, weights, 1 - self.decay if step > self.start else 1.0)

    # The first and the last hook of an evaluation, so that all others find the average. Around the exchange, `train` and `eval` are called:
    # a layer that merges weights in eval mode then merges the new ones.
    @hookimpl(tryfirst=True)
    def on_eval_start(self, module: TrainModule) -> None:
        self._show(module.train(), average=True).eval()

    @hookimpl(trylast=True)
    def on_eval_end(self, module: TrainModule) -> None:
        self._show(module.train(), average=self._complete).eval()

    def on_complete(self, module: TrainModule) -> None:
        module.print("ema: RUN_DIR/model/ and this fit's validations use the average, the module the trained weights")
        self._complete = True
        self._show(module, average=True)

    @hookimpl(tryfirst=True)  # the hooks of the module and of other plugins then find the trained weights
    def on_fit_end(self, module: TrainModule) -> None:
        self._show(module, average=False)

    def on_save(self, state: MutableMapping[str, Any]) -> None:
        state["average"] = {name: part.over(average) for name, (part, average) in self._parts.items()}

    def on_load(self, trainer: Trainer, module: TrainModule, state: MutableMapping[str, Any]) -> None:
        self._kept = []  # copies of weights that the checkpoint has overwritten
        self._begin(trainer, module, state["average"])

    on_load_weights = on_load

    @hookimpl(tryfirst=True)  # before a checkpoint of the last update is saved
    def on_exception(self, module: TrainModule) -> None:
        self._show(module, average=False, tell=False)

    def on_teardown(self, module: TrainModule) -> None:
        self._show(module, average=False, tell=False)
        self._parts, self._complete = {}, False

    def _show(self, module: TrainModule, *, average: bool, tell: bool = True) -> TrainModule:
        """Put the average into `module`, or the weights back, unless they are there already; returns `module`. tell: also call `after_load`
        of the strategy, which needs all ranks (not after an exception)."""
        import torch

        if average != bool(self._kept) and self._parts:
            wanted = [mean for _, mean in self._parts.values()] if average else self._kept
            self._kept = [part.memory.clone() for part, _ in self._parts.values()] if average else []
            torch._foreach_copy_([part.memory for part, _ in self._parts.values()], wanted)
            if tell:
                self._strategy.after_load()
        return module
