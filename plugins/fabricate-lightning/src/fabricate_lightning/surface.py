"""The methods of a LightningModule that use its Trainer, for an adapted module: all other methods are Lightning's.

`Surface` is inserted between the user's classes and LightningModule, so that the user's overrides still apply. Must not know: how fabricate
runs the module (`adapter`).
"""

from __future__ import annotations

from typing import Any

import torch

from fabricate import ConfigurationError
from fabricate_lightning.kinds import base

_made: dict[type, type] = {}


def attach(module: Any, view: Any) -> None:
    """Make `view` the Trainer of `module` and of the LightningModules inside it."""
    for part in module.modules():
        if (lightnings := base(type(part), "LightningModule")) is not None and not isinstance(part, Surface):
            part.__class__ = _with_surface(type(part), lightnings)
    module.trainer = view


def _with_surface(kind: type, lightnings: type) -> type:
    """The class of a user's module with `Surface` below the user's own classes."""
    if kind not in _made:
        surface = _made.setdefault(lightnings, type("LightningModule", (Surface, lightnings), {}))
        _made[kind] = type(
            kind.__name__, (kind, surface), {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        )
    return _made[kind]


def _users(module: Any) -> Any:
    """The user's class of an attached module."""
    return type(module).__mro__[1]


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


class Surface:
    """The methods of an adapted module that replace LightningModule's."""

    automatic_optimization: bool

    @property
    def trainer(self) -> Any:
        """The view of the running Trainer, or Lightning's own Trainer."""
        return super().trainer  # type: ignore[misc]

    @trainer.setter
    def trainer(self, value: Any) -> None:
        if value is not None and not hasattr(value, "take_logged"):  # Lightning's own Trainer: back to the user's class
            self.__class__ = _users(self)
            self.trainer = value
        else:
            super(Surface, type(self)).trainer.fset(self, value)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy the module as an object of the user's class."""
        return _new, (_users(self),), self.__getstate__()

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value, as in Lightning; see `Logs.log`. Values are reduced over ranks, also without sync_dist."""
        self.trainer.take_logged(
            name,
            value,
            prog_bar=prog_bar,
            logger=logger,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduce_fx,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
            sync_dist=sync_dist,
        )

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or a list of several. With manual optimization, `step` of each takes a closure."""
        listed = self.trainer.stepping_optimizers if use_pl_optimizer else self.trainer.optimizers
        return listed[0] if len(listed) == 1 else listed

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward of `loss`, with manual optimization."""
        if self.automatic_optimization:
            raise ConfigurationError(
                "manual_backward: set self.automatic_optimization = False in __init__, or return the loss"
            )
        self.trainer.manual_backward(loss, *args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of `optimizer`; by default as the Trainer's arguments set it."""
        self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    @property
    def device(self) -> torch.device:
        """The device of the batches; outside of a fit, the device of the first parameter."""
        parameter = next(self.parameters(), None)  # type: ignore[attr-defined]
        own = parameter.device if parameter is not None else torch.device("cpu")
        device: torch.device = own if self.__dict__.get("_trainer") is None else self.trainer.device_of(own)
        return device
