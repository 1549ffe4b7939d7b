"""What an evaluation must not do: update the weights, or run layers in training mode. Must not know: the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fabricate.errors import ConfigurationError
from fabricate.training.state.run_state import Run


@contextlib.contextmanager
def without_training(run: Run, stage: str) -> Iterator[None]:
    """Raise an error if the body steps an optimizer. Note if it leaves a submodule in training mode that was in eval mode before."""
    name = type(run.module).__name__

    def refuse(*_: object) -> None:
        raise ConfigurationError(
            f"{name} steps an optimizer in an evaluation ({stage}), so it would train on data that is held out. Remove the call of step"
        )

    hooks = [optimizer.register_step_pre_hook(refuse) for optimizer in run.optim.optimizers.values()]
    in_eval_mode = [module for module in run.module.modules() if not module.training]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if any(module.training for module in in_eval_mode):
        run.journal.note(
            f"{name} is in training mode at the end of an evaluation ({stage}), because a step or a hook of the evaluation called train(). "
            "Dropout was active, and batch normalisation learned from these rows; remove the call, or keep it if that is meant"
        )
