"""The norm of the gradient of each group of layers, recorded as metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabricate.errors import ConfigurationError
from fabricate.hooks import Callback

if TYPE_CHECKING:
    import torch

    from fabricate.module import TrainModule
    from fabricate.trainer import Trainer


class GradientNorms(Callback):
    """Records `grad_norm/GROUP` for each group of layers: the 2-norm of its gradient, after clipping.

    depth: the number of components of a parameter's name that form the group's name; with 2, "encoder.layers.0.weight" is in
    "encoder.layers".
    every: updates between two records; each record costs one norm per group, and under `fsdp` one all-reduce per group.

    The values are logged with `module.log`: `metrics.jsonl` and the trackers have the mean over the records between two log boundaries. It
    is an error under a strategy that hides gradients (`zero1`, `zero2`, `zero3`).

        Trainer(plugins=[GradientNorms(depth=2, every=50)], ...)
    """

    def __init__(self, depth: int = 1, every: int = 10) -> None:
        for name, value in (("depth", depth), ("every", every)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"GradientNorms({name}={value!r}): give a whole number of at least 1")
        self.depth, self.every = depth, every
        self._groups: dict[str, list[torch.nn.Parameter]] = {}

    def on_fit_start(self, module: TrainModule) -> None:
        self._groups = {}
        for name, parameter in module.named_parameters():
            group = ".".join(name.split(".")[: self.depth])
            self._groups.setdefault(group, []).append(parameter)

    def on_before_step(self, trainer: Trainer, module: TrainModule) -> None:
        if (trainer.step + 1) % self.every:
            return
        for group, parameters in self._groups.items():
            trained = [parameter for parameter in parameters if parameter.grad is not None]
            if trained:
                module.log(f"grad_norm/{group}", trainer.strategy.grad_norm(trained), weight=1)

    def on_teardown(self) -> None:
        self._groups = {}
