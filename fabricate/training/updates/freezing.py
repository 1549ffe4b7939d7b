"""Freezing and unfreezing of parameters between two updates of a fit.

Optimizers hold all parameters from the beginning and skip those without a gradient, so groups, schedules and checkpoints do not change.
Must not know: the loop, why something is frozen.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fabricate.errors import ConfigurationError, FabricateError, RankError, few
from fabricate.training.state.run_state import Run


def request(run: Run, parameters: Iterable[torch.nn.Parameter], *, trained: bool) -> None:
    """Unfreeze or freeze `parameters` from the next update on. All ranks, with the same arguments; no collectives."""
    method, strategy = "unfreeze" if trained else "freeze", run.engine.strategy
    if run.source is None:
        raise FabricateError(f"trainer.{method} is for a fit; in an evaluation nothing is trained")
    if not strategy.exposes_gradients:
        raise ConfigurationError(
            f"trainer.{method}: strategy={strategy.name!r} cannot freeze or unfreeze parameters during a fit; use strategy='ddp' or "
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
                f"trainer.{method}: no optimizer holds {name}; keep it trainable until the fit begins, pass it to an optimizer in "
                "configure_optimizers, and then freeze it with trainer.freeze"
            )
        run.optim.changing[parameter] = trained


def digest(run: Run) -> int:
    """A digest of the requests since the last update, equal on ranks with equal requests; 0 if there are none."""
    changing = run.optim.changing
    return hash(tuple(changing.get(p, -1) for p in run.optim.trained.values())) % 2**62 if changing else 0


def check_alike(run: Run, largest: int, smallest: int) -> None:
    """Raise `RankError` if ranks freeze or unfreeze different parameters, that is, if the largest and the smallest of their digests
    differ."""
    if largest != smallest:
        raise RankError(
            f"ranks freeze or unfreeze different parameters after step {run.progress.step}: a hook calls trainer.freeze or "
            "unfreeze on some ranks only, or with different parameters. Call them on every rank with the same parameters, and "
            "decide by values that are equal on all ranks"
        )


def compare(run: Run) -> None:
    """Raise `RankError` if ranks have requested different changes since the last update. All ranks; one message."""
    mine = digest(run)
    largest, minus_smallest = run.engine.agree([mine, -mine])
    check_alike(run, largest, -minus_smallest)


def paused(run: Run) -> list[str]:
    """The names of the parameters that `trainer.freeze` has frozen, including requests for the next update; a checkpoint holds them."""
    optim = run.optim
    return [name for name, p in optim.trained.items() if not optim.changing.get(p, p not in optim.paused)]


def restore(run: Run, names: Iterable[str]) -> None:
    """Freeze exactly the parameters that were frozen when the checkpoint was saved. Requests of on_fit_start are dropped, because it ran
    before the step was known. `ConfigurationError` if the strategy does not support it."""
    optim, frozen = run.optim, set(names)
    optim.changing.clear()
    if frozen:
        request(run, [p for name, p in optim.trained.items() if name in frozen], trained=False)


def take_effect(run: Run) -> None:
    """Freeze and unfreeze as requested since the last update. All ranks."""
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
    """Raise an error if a hook or a step has called `requires_grad_`: optimizers, strategies and checkpoints rely on what was trainable
    when the fit began. All ranks."""
    optim, step = run.optim, run.progress.step
    for name, parameter in optim.frozen.items():
        if parameter.requires_grad:
            raise ConfigurationError(
                f"{name} was frozen when the fit began and requires a gradient at step {step}, so neither the optimizer nor the "
                "strategy was prepared for it. Keep it trainable until the fit begins, then freeze it with UnfreezeAt or "
                "trainer.freeze. Or end the fit, unfreeze it, and fit the module again, with resume='never' or another run_dir"
            )
    stopped = [name for name, p in optim.trained.items() if not p.requires_grad and p not in optim.paused]
    if not stopped:
        return
    if run.engine.strategy.exposes_gradients:
        run.journal.note(
            f"{few(stopped)} required a gradient when the fit began and not at step {step}. After a resume they require a "
            "gradient again, until a step or a hook freezes them again; to resume exactly, use UnfreezeAt or trainer.freeze"
        )
    else:
        raise ConfigurationError(
            f"{few(stopped)} required a gradient when the fit began and not at step {step}: strategy={run.engine.strategy.name!r} "
            "goes on updating it. Freeze it before the fit, or use strategy='ddp' or 'fsdp' and trainer.freeze(parameters)"
        )
