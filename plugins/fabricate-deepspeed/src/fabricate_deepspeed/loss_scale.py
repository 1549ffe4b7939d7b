"""DeepSpeed's loss scale, driven so that one update is divided by what its loss was multiplied with.

DeepSpeed adapts the scale in the middle of the update and divides by the new one, so that an update at which the scale grows
would be half as large. The scale in force is therefore kept apart and brought up to date between updates. Where nothing is
scaled it is 1. Must not know: strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class LossScale:
    """The loss scale of one DeepSpeed optimizer `zero`; dynamic, fixed, or 1."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        zero.custom_loss_scaler = True
        self.renew()

    @property
    def in_force(self) -> Any:
        """What gradients are divided by in the coming update."""
        return self._zero.external_loss_scale

    def renew(self) -> None:
        """After an update: take what the scaler made of it."""
        self._zero.external_loss_scale = self._zero.loss_scaler.cur_scale

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply the gradients of the coming update by `factor`: divided by less, in the pass that is made anyway. Where the
        optimizer is offloaded they are in host memory, and so has to be what they are divided by."""
        self._zero.external_loss_scale = self._zero.external_loss_scale / factor.to(self._zero.device)

    def state(self) -> dict[str, Any] | None:
        """With the keys of `torch.amp.GradScaler.state_dict`; None where nothing is scaled."""
        scaler = self._zero.loss_scaler
        if not scaler.dynamic:
            return None
        clean = scaler.cur_iter - scaler.last_overflow_iter - 1
        clean = (clean - 1) % scaler.scale_window + 1 if clean else 0  # the scale grows where it reaches the window
        return {
            "scale": float(scaler.cur_scale),
            "growth_factor": scaler.scale_factor,
            "backoff_factor": 1 / scaler.scale_factor,
            "growth_interval": scaler.scale_window,
            "_growth_tracker": max(clean - 1, 0),
            "clean": clean,
            "hysteresis": scaler.cur_hysteresis,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` or a `torch.amp.GradScaler` gave. A fixed scale stays."""
        scaler = self._zero.loss_scaler
        if scaler.dynamic:
            tracker = int(state["_growth_tracker"])
            scaler.cur_scale = float(state["scale"])
            scaler.last_overflow_iter = -1
            scaler.cur_iter = int(state.get("clean", tracker + 1 if tracker else 0))
            scaler.cur_hysteresis = int(state.get("hysteresis", scaler.delayed_shift))
            self.renew()
