"""`adapt`: the `TrainModule` of a LightningModule, made of the parts that it needs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fabricate import ConfigurationError
from fabricate_lightning.adapter import Adapted
from fabricate_lightning.callbacks import translated
from fabricate_lightning.data import TRANSFER, transfers
from fabricate_lightning.hooks import NEVER_CALLED, Hooks
from fabricate_lightning.kinds import is_a, overrides
from fabricate_lightning.manual import Manual
from fabricate_lightning.parts import WithBatchHooks, WithLoggers, WithModel, WithOptimizerStep, WithStepHook
from fabricate_lightning.surface import attach
from fabricate_lightning.view import TrainerView

_BATCH = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *TRANSFER,
)


def adapt(
    module: Any, *, datamodule: Any = None, callbacks: Sequence[Any] = (), view: TrainerView | None = None
) -> Adapted:
    """A `TrainModule` that runs `module`, a LightningModule, as it is: `Trainer(...).fit(adapt(module), train, val)`.

    It has the parameters and names of `module`, which is trained in place. datamodule: the source of the data; it may also be given to
    `fit` instead of `train`. callbacks: Lightning's or the user's, called before the module's hooks. view: the object for `self.trainer`,
    by default a view of fabricate's Trainer. Raises `ConfigurationError` for a module or callback that cannot run.
    """
    if isinstance(getattr(module, "_orig_mod", None), torch.nn.Module):
        raise ConfigurationError(
            "adapt: the module was compiled with torch.compile; pass the module as it was before, and set Trainer(compile=True)"
        )
    if inspect.isclass(module) or not is_a(module, "LightningModule"):
        kind = f"the class {module.__name__}" if inspect.isclass(module) else type(module).__name__
        raise ConfigurationError(f"adapt({kind}): give an object of a class that inherits from LightningModule")
    if view is None:
        view = TrainerView()
        own = module.configure_callbacks() if overrides(module, "configure_callbacks") else []
        _take_callbacks(view, with_own(list(callbacks), own))
    view.datamodule = datamodule
    if refused := next((name for name in NEVER_CALLED if overrides(module, name)), None):
        raise ConfigurationError(f"{type(module).__name__}.{refused} would not be called: {NEVER_CALLED[refused]}")
    attach(module, view)
    hooks = Hooks(view, module, view.called, view.logs)
    own = {"lightning": module, "hooks": hooks, "view": view, "__module__": type(module).__module__}
    adapted_class: Any = type(type(module).__name__, (*_parts(module, hooks, view), Adapted), own)
    adapted: Adapted = adapted_class(**{str(name): value for name, value in dict(module.hparams).items()})
    return adapted


def _parts(module: Any, hooks: Hooks, view: TrainerView) -> Iterator[type[Adapted]]:
    """The classes that `module` needs in addition to `Adapted`."""
    if view.loggers:
        yield WithLoggers
    if hooks.listened(_BATCH) or transfers(view.datamodule):
        yield WithBatchHooks
    if not module.automatic_optimization:
        yield Manual
    elif hooks.listened(("on_before_optimizer_step", "configure_gradient_clipping")):
        yield WithStepHook
    if overrides(module, "optimizer_step") and module.automatic_optimization:
        yield WithOptimizerStep
    if overrides(module, "configure_model"):
        yield WithModel


def with_own(callbacks: list[Any], own: Any) -> list[Any]:
    """`callbacks`, with `own`, those of configure_callbacks, in place of others of the same class."""
    several: list[Any] = list(own) if isinstance(own, Sequence) else [own]
    kinds = {type(callback) for callback in several}
    return [callback for callback in callbacks if type(callback) not in kinds] + several


def _take_callbacks(view: TrainerView, callbacks: list[Any]) -> None:
    """Give `callbacks` to `view`. Raises `ConfigurationError` for callbacks that fabricate replaces by arguments of its Trainer."""
    translation = translated(callbacks)
    if translation.settings or translation.plugins:
        kinds = ", ".join(type(callback).__name__ for callback in callbacks if callback not in translation.called)
        raise ConfigurationError(
            f"adapt: {kinds} cannot be passed here, because fabricate has arguments of the Trainer for what it does; give these "
            "(keep=, save_every=, max_time=, plugins=), or use fabricate_lightning.Trainer(callbacks=...)"
        )
    view.callbacks, view.called = callbacks, translation.called
