"""What is trained changes during a fit: parameters are frozen and unfrozen between two updates.

Optimizers hold all of them from the beginning, and leave out what receives no gradient; so groups, schedules and checkpoints are the same
before and after. Must not know: the loop, why something is frozen.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fabricate.errors import ConfigurationError, FabricateError, few
from fabricate.training.state.run_state import Run


def request(run: Run, parameters: Iterable[torch.nn.Parameter], *, trained: bool) -> None:
    """Train `parameters`, or train them no longer, from the next update on. All ranks alike; no collectives."""
    method, strategy = "unfreeze" if trained else "freeze", run.engine.strategy
    if run.source is None:
        raise FabricateError(f"trainer.{method} is for a fit; in an evaluation nothing is trained")
    if not strategy.exposes_gradients:
        raise ConfigurationError(
            f"trainer.{method}: strategy={strategy.name!r} trains what was trainable when the fit began, throughout; use strategy='ddp' or "
            "'fsdp'"
        )
    held = {
        p for optimizer in run.optim.optimizers.values() for group in optimizer.param_groups for p in group["params"]
    }
    for parameter in parameters:
        if parameter not in held:
            name = next(
                (n for n, p in run.module.named_parameters() if p is parameter), "a parameter of another module"
            )
            raise ConfigurationError(
                f"trainer.{method}: no optimizer holds {name}; leave it trainable until the fit begins, give it to an optimizer in "
                "configure_optimizers, and freeze it with trainer.freeze"
            )
        run.optim.changing[parameter] = trained


def take_effect(run: Run) -> None:
    """Do what was requested since the last update. All ranks."""
    optim, changes = run.optim, dict(run.optim.changing)
    optim.changing.clear()
    for parameter, trained in changes.items():
        if parameter.requires_grad is not trained:
            parameter.requires_grad_(trained)
            run.closing.callback(parameter.requires_grad_, not trained)  # afterwards everything is as before
            (optim.paused.discard if trained else optim.paused.add)(parameter)
    if not any(p.requires_grad for p in run.module.parameters()):
        raise ConfigurationError(
            f"after step {run.progress.step} everything is frozen, so there is nothing to train; leave a part out of UnfreezeAt or "
            "trainer.freeze"
        )
    run.engine.trained_changed()


def check_trained(run: Run) -> None:
    """Look for `requires_grad_` in a hook or a step: optimizers, strategies and checkpoints go by what was trainable when the fit began.
    All ranks."""
    optim, step = run.optim, run.progress.step
    for name, parameter in optim.frozen.items():
        if parameter.requires_grad:
            raise ConfigurationError(
                f"{name} was frozen when the fit began and requires a gradient at step {step}: neither the optimizer nor the "
                "strategy knows of it. Leave it trainable until the fit begins and freeze it then, with UnfreezeAt or trainer.freeze; or "
                "end the fit, unfreeze it, and fit the module again, with resume='never' or another run_dir"
            )
    stopped = [name for name, p in optim.trained.items() if not p.requires_grad and p not in optim.paused]
    if not stopped:
        return
    if run.engine.strategy.exposes_gradients:
        run.journal.note(
            f"{few(stopped)} required a gradient when the fit began and not at step {step}: a resumed run begins as the fit began, unless "
            "the step or a hook freezes again; UnfreezeAt and trainer.freeze, as a function of the step, resume exactly"
        )
    else:
        raise ConfigurationError(
            f"{few(stopped)} required a gradient when the fit began and not at step {step}: strategy={run.engine.strategy.name!r} "
            "goes on updating it. Freeze it before the fit, or use strategy='ddp' or 'fsdp' and trainer.freeze(parameters)"
        )
