"""The differences of a fit of an adapted module from Lightning, as far as they apply; printed before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fabricate import Trainer
from fabricate_lightning.hooks import WITHOUT_EFFECT
from fabricate_lightning.kinds import overrides

_LIMITS = ("limit_train_batches", "limit_val_batches", "overfit_batches")


def lines(adapted: Any, trainer: Trainer) -> Iterator[str]:
    """The differences of a fit, one sentence each."""
    settings, ranks = trainer.settings, trainer.accelerator.num_processes
    accumulates = trainer.accelerator.gradient_accumulation_steps > 1
    if accumulates:
        yield (
            "the last update of an epoch takes the mean over the batches that are left; Lightning divides their sum by "
            "accumulate_grad_batches"
        )
    if accumulates or ranks > 1:
        yield (
            "a loss is weighted by the rows of its batch, or by the labels that its cross-entropy counts; in Lightning every batch "
            "has the same weight"
        )
    if ranks > 1:
        yield (
            "what is logged is reduced over the ranks, with sync_dist=True and without, by reduce_fx for an epoch, to a mean for a step; "
            "in hooks of a batch, callback_metrics has this rank's own value of a step; no row is evaluated twice"
        )
        yield "training data is read in the loader's order; on several ranks, Lightning shuffles it even if the loader does not"
    yield "shuffled data has another order, from the seed and the epoch, so that a run can resume within an epoch"
    yield "loaders and validation do not use the random generators of training, so dropout has other masks than in Lightning"
    yield (
        "in loggers, a value logged with on_step is the mean since the last log boundary (in Lightning: the last value), at the number of "
        "updates (in Lightning: one less); metrics.jsonl has such means of every value, and the mean of each epoch as epoch_NAME"
    )
    yield from _shares(trainer)
    yield from _validations(trainer)
    if settings.max_steps is not None:
        yield "an epoch that max_steps cuts short ends with on_train_epoch_end, and no mean is logged for it"
    if not adapted.lightning.automatic_optimization:
        yield "manual optimization: global_step counts batches, in Lightning the steps of all optimizers"
    if settings.sanity_batches and trainer.validates:
        yield "the check of validation before the first step leaves no trace in the module; callbacks keep what they saw, as in Lightning"
    if overrides(adapted.lightning, "configure_model"):
        yield "layers built in configure_model get their initial values from the seed and their names"
    if parts := list(_now_in_train_mode(adapted)):
        yield f"in train mode, where Lightning leaves them in the eval mode in which they came: {', '.join(parts)}"
    yield from _hooks(adapted)
    if trainer.run_dir is not None:
        yield f"checkpoints are directories in {trainer.run_dir}/checkpoints, named by their step and without pickle; they resume exactly"
    yield from adapted.view.notes


def _hooks(adapted: Any) -> Iterator[str]:
    for owner in (adapted.lightning, *adapted.view.called):
        for name in (name for name in WITHOUT_EFFECT if overrides(owner, name)):
            yield f"{name} of {type(owner).__name__} is not called: {WITHOUT_EFFECT[name]}"
    if adapted.hooks.listened(("on_before_zero_grad",)):
        yield "gradients are cleared before on_before_zero_grad, in Lightning after it; read them in on_before_optimizer_step"


def _shares(trainer: Trainer) -> Iterator[str]:
    given = {name: getattr(trainer.settings, name) for name in _LIMITS}
    if shares := [f"{name}={value}" for name, value in given.items() if isinstance(value, float) and value < 1]:
        yield (
            f"{', '.join(shares)}: a share of the rows, so the last batch may be smaller; Lightning takes a share of the batches, "
            "rounded down"
        )


def _validations(trainer: Trainer) -> Iterator[str]:
    every = trainer.settings.validate_every
    if trainer.validates and every is not None and (every.unit == "steps" or every.amount < 1):
        yield (
            "val_check_interval counts the updates of the whole fit; Lightning does so only with check_val_every_n_epoch=None, and else "
            "counts batches from the start of each epoch"
        )


def _now_in_train_mode(adapted: Any) -> Iterator[str]:
    """The outermost parts of the module that were in eval mode before the fit, as models loaded by transformers are, and train in train
    mode."""
    outer = None
    for name, part in adapted.lightning.named_modules():
        inside = outer is not None and (name.startswith(f"{outer}.") or not outer)
        if part.training and not adapted.modes.get(name, True) and not inside:
            outer = name
            yield name or type(adapted.lightning).__name__


def report(adapted: Any, trainer: Trainer) -> None:
    """Print the differences on rank 0."""
    if trainer.settings.print_plan != "none":
        adapted.print("\n  - ".join(["what differs from Lightning:", *lines(adapted, trainer)]))
