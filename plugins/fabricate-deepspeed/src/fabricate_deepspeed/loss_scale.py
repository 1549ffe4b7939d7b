"""DeepSpeed's loss scale, controlled so that an update is divided by the number by which its loss was multiplied.

DeepSpeed adapts the scale in the middle of the update and divides by the new one, so that an update at which the scale grows would be half
as large. The scale in force is therefore stored separately and renewed between updates. Without loss scaling it is 1. Must not know:
strategies.
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
        """The number by which the gradients of the next update are divided."""
        return self._zero.external_loss_scale

    def renew(self) -> None:
        """Use the scaler's new scale from now on. To be called after an update."""
        self._zero.external_loss_scale = self._zero.loss_scaler.cur_scale

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply the gradients of the next update by `factor`, through a smaller divisor in the pass that divides them anyway. With an
        offloaded optimizer the gradients are in host memory, so the divisor has to be there too."""
        self._zero.external_loss_scale = self._zero.external_loss_scale / factor.to(self._zero.device)

    def state(self) -> dict[str, Any] | None:
        """The state, with the keys of `torch.amp.GradScaler.state_dict`; None unless the scale is dynamic."""
        scaler = self._zero.loss_scaler
        if not scaler.dynamic:
            return None
        clean = scaler.cur_iter - scaler.last_overflow_iter - 1
        clean = (clean - 1) % scaler.scale_window + 1 if clean else 0  # the scale grows when it reaches the window
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
        """Restore a state of `state` or of a `torch.amp.GradScaler`. A fixed scale is not changed."""
        scaler = self._zero.loss_scaler
        if scaler.dynamic:
            tracker = int(state["_growth_tracker"])
            scaler.cur_scale = float(state["scale"])
            scaler.last_overflow_iter = -1
            scaler.cur_iter = int(state.get("clean", tracker + 1 if tracker else 0))
            scaler.cur_hysteresis = int(state.get("hysteresis", scaler.delayed_shift))
            self.renew()
