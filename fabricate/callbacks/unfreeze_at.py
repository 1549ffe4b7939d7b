"""Staged fine-tuning in one fit: parts of a module are frozen at first, and trained later."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fabricate.errors import CheckpointError, ConfigurationError
from fabricate.hooks import Callback
from fabricate.values import Every

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    import torch

    from fabricate.module import TrainModule
    from fabricate.trainer import Trainer


class UnfreezeAt(Callback):
    """Freezes parts of the module when a fit begins, and unfreezes each at a given moment.

    stages: names of submodules or parameters, and the moment of each: "1 epoch", "2000 steps" or 2000, counted from the beginning of the
    run. If several names match a parameter, the longest counts.

        Trainer(plugins=[UnfreezeAt({"backbone.layer4": "1 epoch", "backbone": "3 epochs"})], ...)

    Do not change `requires_grad` before the fit, and pass all parameters to the optimizer: they are in its groups from the beginning and
    are not updated while they are frozen. Their learning rate is that of their group, for example from `self.parameter_groups({"^backbone":
    {"lr": 1e-5}})`; schedules advance meanwhile. The step and the epoch determine what is frozen, so a resumed run continues exactly.

    The modes of layers do not change: a frozen batch norm in train mode still updates its statistics. To keep them, call
    `self.backbone.eval()` in `on_fit_start`; the part then also stays in eval mode after it is unfrozen.

    It works under `single`, `ddp` and `fsdp`; under ZeRO it is an error. Also errors before the first step: a name that the module does not
    have, a part that is already frozen, a moment that is never reached.
    """

    def __init__(self, stages: Mapping[str, str | int | Every]) -> None:
        if not stages:
            raise ConfigurationError("UnfreezeAt({}): name what to unfreeze, for instance {'backbone': '1 epoch'}")
        self.stages = {name: Every.parse(f"UnfreezeAt({name!r})", moment) for name, moment in stages.items()}
        for name, moment in self.stages.items():
            if moment.unit not in ("steps", "epochs") or moment.amount < 1:
                raise ConfigurationError(
                    f"UnfreezeAt({{{name!r}: {str(moment)!r}}}): give a number of steps or of whole epochs, so that every run "
                    "unfreezes at the same update"
                )
        self._parts: dict[str, list[torch.nn.Parameter]] = {}
        self._frozen: set[str] | None = None
        """The stages that are frozen. None if this is not known: when a fit starts."""

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._parts, self._frozen = self._divide(module), None
        self._check_moments(trainer)

    def _divide(self, module: TrainModule) -> dict[str, list[torch.nn.Parameter]]:
        """The parameters of each stage. Raises `ConfigurationError` for a stage without parameters, and for parameters that are already
        frozen."""
        parts: dict[str, list[torch.nn.Parameter]] = {name: [] for name in self.stages}
        for name, parameter in module.named_parameters():
            stages = [stage for stage in parts if f"{name}.".startswith(f"{stage}.")]
            if not stages:
                continue
            if not parameter.requires_grad:
                raise ConfigurationError(
                    f"UnfreezeAt({max(stages, key=len)!r}): {name} was already frozen before the fit, so the optimizer does not have "
                    "this parameter. Remove requires_grad_(False) from the script: UnfreezeAt freezes the parameter itself"
                )
            parts[max(stages, key=len)].append(parameter)
        for stage, parameters in parts.items():
            if not parameters:
                names = [
                    name
                    for name, child in module.named_modules()
                    if name and next(child.parameters(), None) is not None
                ]
                raise ConfigurationError(
                    f"UnfreezeAt({stage!r}): no parameter is left for this name: none begins with the name, or longer names "
                    f"match all that do. Give the name of a submodule or a parameter: {', '.join(names[:8])}"
                )
        return parts

    def _check_moments(self, trainer: Trainer) -> None:
        settings = trainer.settings
        limits = {"steps": settings.max_steps, "epochs": settings.max_epochs}
        for name, moment in self.stages.items():
            limit = limits[moment.unit]
            if not settings.fast_dev_run and moment.amount >= (math.inf if limit is None else limit):
                raise ConfigurationError(
                    f"UnfreezeAt({{{name!r}: {str(moment)!r}}}) is never reached: the fit ends after {limit} "
                    f"{moment.unit}. Choose an earlier moment. For parameters that are never trained, call requires_grad_(False) instead"
                )

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._follow(trainer)  # also when a resumed run continues

    def on_step(self, trainer: Trainer, step: int) -> None:
        if any(moment.unit == "steps" and moment.amount == step for moment in self.stages.values()):
            self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        """Freeze and unfreeze the stages for the current step and epoch."""
        due = self._due(trainer)
        for name, parameters in self._parts.items():
            if self._frozen is None or (name in due) is not (name in self._frozen):
                (trainer.freeze if name in due else trainer.unfreeze)(parameters)
        self._frozen = due

    def _due(self, trainer: Trainer) -> set[str]:
        """The stages that are frozen now."""
        reached = {"steps": trainer.step, "epochs": trainer.epoch}
        return {name for name, moment in self.stages.items() if reached[moment.unit] < moment.amount}

    def on_save(self, state: MutableMapping[str, Any]) -> None:
        state["stages"] = self._texts()

    def on_load(self, trainer: Trainer, module: TrainModule, state: MutableMapping[str, Any]) -> None:
        if state["stages"] == self._texts():
            return
        if "plugins" not in trainer.settings.accept_changes:
            raise CheckpointError(
                f"UnfreezeAt: the checkpoint was saved with the stages {state['stages']}, but this run has {self._texts()}. "
                "Give the same, or Trainer(accept_changes=('plugins',)) to continue with the new ones"
            )
        gone = tuple(f"{stage}." for stage in state["stages"])
        trainer.unfreeze(p for name, p in module.named_parameters() if p.requires_grad and f"{name}.".startswith(gone))

    def _texts(self) -> dict[str, str]:
        return {name: str(moment) for name, moment in self.stages.items()}

    def on_teardown(self) -> None:
        self._parts, self._frozen = {}, None
