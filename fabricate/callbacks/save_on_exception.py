"""A checkpoint of the last complete update when a fit fails."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fabricate.errors import ConfigurationError
from fabricate.hooks import Callback, hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from fabricate.module import TrainModule
    from fabricate.trainer import Trainer


class SaveOnException(Callback):
    """When a fit fails, saves the state after the last complete update as `RUN_DIR/checkpoints/step-...`. The error is raised as usual,
    with a note about what was saved, or why nothing was.

    The same call of `fit` continues from there, bitwise as if it had not failed; a validation that failed is run again. For this, generator
    states, buffers and torchmetrics objects are copied after every update, and after the hooks between two updates. What else
    `training_step` changes, such as a frozen copy of the network that follows it, or a counter that `on_save` stores, is saved as the
    failed update left it. What `on_eval_end` changes in a torchmetrics object is not saved if the next batch cannot be read.

    Nothing is saved if the error is raised in the optimizer or in a hook `on_step`, if weights are not finite, at a second Ctrl-C, or if
    another rank continues or has ended: a checkpoint needs all ranks, so they have to fail in the same update, within ten seconds. A rank
    that fails alone reports its error after that time.

        Trainer(plugins=[SaveOnException()], run_dir="runs/one", ...)
    """

    def __init__(self) -> None:
        self._put_back: dict[str, Callable[[], None]] = {}
        """Functions that restore generators, buffers and torchmetrics objects as they were after the last complete update."""
        self._torn = True
        """Whether an update is incomplete, or no state was recorded yet."""
        self._stale = False
        """Whether hooks were called since then, which may have changed torchmetrics objects."""

    def on_fit_start(self, trainer: Trainer) -> None:
        if trainer.run_dir is None:
            raise ConfigurationError(
                "SaveOnException() saves to RUN_DIR/checkpoints, and no run_dir is set. Set Trainer(run_dir=...)"
            )
        if trainer.settings.save_weights_only:
            raise ConfigurationError(
                "SaveOnException() saves a checkpoint to resume from, but save_weights_only=True leaves out what a resume needs. "
                "Remove one of the two"
            )

    @hookimpl(wrapper=True)
    def on_epoch_start(self, module: TrainModule) -> Generator[None, Any, Any]:
        self._remember(module)
        return (yield)

    @hookimpl(wrapper=True)
    def on_epoch_end(self, module: TrainModule) -> Generator[None, Any, Any]:
        self._remember(module)  # a validation before it is complete
        self._stale = True
        return (yield)

    @hookimpl(wrapper=True, tryfirst=True)
    def on_eval_end(self, module: TrainModule) -> Generator[None, Any, Any]:
        result = yield
        # The evaluation is not over: it restores generators and torchmetrics objects after this.
        if self._put_back:
            self._remember_buffers(module)
        self._stale = True
        return result

    @hookimpl(wrapper=True, tryfirst=True)
    def on_log(self, module: TrainModule) -> Generator[None, Any, Any]:
        result = yield
        self._remember(module)
        return result

    @hookimpl(wrapper=True, tryfirst=True)
    def on_saved(self, module: TrainModule) -> Generator[None, Any, Any]:
        result = yield
        self._remember(module)
        return result

    @hookimpl(wrapper=True)
    def train_step(self, module: TrainModule) -> Generator[None, Any, Any]:
        if self._stale:  # generators may have been used to read the batch
            self._remember_buffers(module)
            self._remember_torchmetrics(module)
            self._stale = False
        return (yield)

    @hookimpl(wrapper=True)
    def optimizer_step(self) -> Generator[None, Any, Any]:
        self._torn = True
        return (yield)

    @hookimpl(trylast=True)
    def on_step(self, module: TrainModule) -> None:
        self._remember(module)

    @hookimpl(trylast=True)
    def on_step_skipped(self, module: TrainModule) -> None:
        self._remember(module)

    def _remember(self, module: TrainModule) -> None:
        from fabricate.callbacks.kept_state import generator_states, set_generator_states

        self._put_back["generators"] = functools.partial(set_generator_states, generator_states())
        self._remember_buffers(module)
        self._remember_torchmetrics(module)
        self._torn = self._stale = False

    def _remember_buffers(self, module: TrainModule) -> None:
        from fabricate.callbacks.kept_state import kept_registered

        self._put_back["buffers"] = kept_registered(module)

    def _remember_torchmetrics(self, module: TrainModule) -> None:
        from fabricate.callbacks.kept_state import kept_torchmetrics

        self._put_back["torchmetrics"] = kept_torchmetrics(module)

    def on_exception(self, trainer: Trainer, exception: BaseException) -> None:
        if not self._put_back or trainer.step == 0 or isinstance(exception, KeyboardInterrupt):
            return
        try:
            exception.add_note(f"SaveOnException: {self._save(trainer)}")
        except Exception as second:
            exception.add_note(f"SaveOnException: no checkpoint was saved: {second}")

    def _save(self, trainer: Trainer) -> str:
        assert trainer.run_dir is not None
        path = trainer.run_dir / "checkpoints" / f"step-{trainer.step:08d}"
        if self._torn:
            return f"no checkpoint was saved, because the update after step {trainer.step} was not complete"
        if path.exists():
            return f"step {trainer.step} was saved already, in {path}"
        for put_back in self._put_back.values():
            put_back()
        trainer.save(path)
        return f"step {trainer.step} is saved in {path}. Run the same script again to continue from it"

    def on_teardown(self) -> None:
        self._put_back, self._torn = {}, True
