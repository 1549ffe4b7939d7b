"""Lightning's table of the hooks in which `self.log` may be called, with the defaults of on_step and on_epoch."""

from __future__ import annotations

from typing import NamedTuple

from fabricate import ConfigurationError


class Level(NamedTuple):
    """The defaults of on_step and on_epoch in a hook."""

    on_step: bool
    on_epoch: bool
    of_epoch: bool = False
    """Whether only on_epoch=True is possible: the hook belongs to no batch."""


_STEP, _EVALUATED, _EPOCH = Level(True, False), Level(False, True), Level(False, True, True)

LEVELS: dict[str, Level] = {
    **dict.fromkeys(
        (
            *("training_step", "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"),
            *("on_before_optimizer_step", "optimizer_step", "configure_gradient_clipping", "clip_gradients"),
            *("on_before_zero_grad", "optimizer_zero_grad", "backward"),
        ),
        _STEP,
    ),
    **{
        hook: _EVALUATED
        for word in ("validation", "test")
        for hook in (f"{word}_step", f"on_{word}_batch_start", f"on_{word}_batch_end")
    },
    **dict.fromkeys(("on_train_start", "on_train_epoch_start", "on_train_epoch_end"), _EPOCH),
    **{
        hook: _EPOCH
        for word in ("validation", "test")
        for hook in (f"on_{word}_start", f"on_{word}_epoch_start", f"on_{word}_epoch_end")
    },
}
"""The level of each hook in which values can be logged, by the hook's name."""


def level(hook: str, name: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    """Whether `self.log(name, ...)` in `hook` records the step and the epoch. `ConfigurationError` where it cannot be called."""
    default = LEVELS.get(hook)
    if default is None:
        where = f"in {hook}" if hook else "outside of a hook"
        raise ConfigurationError(
            f"self.log({name!r}) {where}: nothing can be logged there; log it in training_step or on_train_epoch_end, or write to "
            "self.logger.experiment"
        )
    chosen = (default.on_step if on_step is None else on_step, default.on_epoch if on_epoch is None else on_epoch)
    if default.of_epoch and chosen != (False, True):
        raise ConfigurationError(
            f"self.log({name!r}, on_step={chosen[0]}, on_epoch={chosen[1]}) in {hook}: this hook is called for an epoch, not for "
            "a batch; leave both out"
        )
    return chosen
