"""fabricate in the workers of Ray Train and in the trials of Ray Tune: metrics and checkpoints are reported to Ray, and workers save before
a node is preempted.

Every worker is a rank, on the device that Ray assigns. Source for Ray's interface: the docstrings of `ray.train.report`, `get_checkpoint`
and `get_preemption_info`, Ray 2.60. A fit runs in a thread of a worker, but Python handles signals in the main thread. The method `execute`
of the worker's actor runs a function in the main thread (not documented). The actor of a trial handles no calls while the trial runs.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fabricate import Callback, ConfigurationError

if TYPE_CHECKING:
    from fabricate import Trainer

__all__ = ["RayTrain", "resume_from_ray"]


@dataclasses.dataclass(eq=False)
class RayTrain(Callback):
    """Reports to Ray Train or Ray Tune: the metrics of every validation, and every durable checkpoint with the metrics known then.

    copy: whether each checkpoint is copied to Ray's storage (`Result.checkpoint`, `ray.train.get_checkpoint`); otherwise it is in RUN_DIR
    only. look_every: updates between two checks for a preemption, each a barrier of all workers; 0: never. If Ray announces that a node
    will be preempted, or if a worker receives SIGTERM, all ranks save at the next update and continue, because Ray regards a function that
    returns as finished. A second SIGTERM ends the worker. A trial of Ray Tune makes no such checks and does not handle SIGTERM.

    Raises `ConfigurationError` in a process that is neither a worker nor a trial, and for a `run_dir` in the folder of Ray's session,
    which Ray deletes.
    """

    copy: bool = True
    look_every: int = 50

    def __post_init__(self) -> None:
        if self.look_every < 0:
            raise ConfigurationError(f"ray: look_every={self.look_every!r}: give a number of updates, or 0 for never")
        self._preempted = self._is_trial = False

    def on_fit_start(self, trainer: Trainer) -> None:
        self._is_trial = _is_trial()
        _check_run_dir(trainer.run_dir)
        self._preempted = False
        if not self._is_trial:
            _fits.append(trainer)
            _in_main_thread(_hear)

    def on_teardown(self, trainer: Trainer) -> None:
        if trainer in _fits:
            _fits.remove(trainer)
            _in_main_thread(_hear_no_more)

    def on_step(self, trainer: Trainer, step: int) -> None:
        import ray.train

        look = self.look_every and not self._preempted and not self._is_trial and step % self.look_every == 0
        if look and ray.train.get_preemption_info() is not None:
            self._preempted = True
            trainer.request_save()

    def on_eval_end(self, trainer: Trainer, stage: str, metrics: dict[str, float]) -> None:
        if stage == "validate":
            self._report({**trainer.metrics, **metrics, "step": trainer.step})

    def on_saved(self, trainer: Trainer, path: Path, step: int) -> None:
        self._report({**trainer.metrics, "step": step}, path if self.copy and trainer.is_main else None, path)

    def _report(self, metrics: dict[str, Any], checkpoint: Path | None = None, path: Path | None = None) -> None:
        """Report `metrics` to Ray. checkpoint: the directory that Ray copies. path: the checkpoint that all workers saved."""
        import ray.train

        if self._is_trial:
            import ray.tune

            ray.tune.report(metrics, checkpoint=ray.tune.Checkpoint.from_directory(checkpoint) if checkpoint else None)
            return
        # The name has the run directory and the step: one worker may run several fits.
        name = f"{path.parents[1].name}-{path.name}" if path else None
        whole = ray.train.Checkpoint.from_directory(str(checkpoint)) if checkpoint else None
        ray.train.report(metrics, checkpoint=whole, checkpoint_dir_name=name)


def resume_from_ray(run_dir: str | Path) -> str:
    """The value for `Trainer.fit(resume=)` in a worker or a trial: "auto" if `run_dir` holds checkpoints or Ray has none of this run, else
    the path of Ray's newest checkpoint, downloaded first if it is on a remote store. Every worker calls it before its fit. A trial may have
    only one fit, because the names of Ray Tune's checkpoints do not identify the run."""
    checkpoint: Any
    if trial := _is_trial():
        import ray.tune

        checkpoint = ray.tune.get_checkpoint()
    else:
        import ray.train

        checkpoint = ray.train.get_checkpoint()
    if checkpoint is None or any(Path(run_dir).glob("checkpoints/step-*")):
        return "auto"
    if not trial and not Path(checkpoint.path).name.startswith(f"{Path(run_dir).name}-step-"):
        return "auto"  # the checkpoint is of another fit of these workers
    local = checkpoint.filesystem.type_name == "local"
    return str(checkpoint.path if local else checkpoint.to_directory())


def _is_trial() -> bool:
    """True in a trial of Ray Tune, False in a worker of Ray Train; `ConfigurationError` in any other process."""
    import ray.train

    try:
        ray.train.get_context().get_world_size()
    except DeprecationWarning:  # Ray Train raises it in a trial
        return True
    except RuntimeError as exc:
        raise ConfigurationError(
            "the plugin 'ray' reports to Ray Train or Ray Tune, but this process is neither a worker nor a trial of Ray; leave "
            "the plugin out"
        ) from exc
    return False


_fits: list[Trainer] = []
"""The trainers that fit in this worker: one, or one inside another."""
_handlers: list[Any] = []
"""Ray's handler of SIGTERM, while this plugin's handler is installed."""


def _in_main_thread(function: Callable[[], None]) -> None:
    """Run `function` in the worker's main thread, where Python allows signal handlers to be set. Does nothing outside of an actor
    (`num_workers=0`)."""
    import ray

    context = ray.get_runtime_context()
    if context.get_actor_id() is not None:
        ray.get(context.current_actor.execute.remote(function), timeout=60)


def _hear() -> None:
    if not _handlers:
        _handlers.append(signal.signal(signal.SIGTERM, _save))


def _hear_no_more() -> None:
    if _handlers and not _fits:
        signal.signal(signal.SIGTERM, _handlers.pop())


def _save(number: int, frame: FrameType | None) -> None:
    """Handle the first SIGTERM: save at the next update, and let Ray handle the next signal."""
    signal.signal(signal.SIGTERM, _handlers[0])
    for trainer in _fits:
        if trainer.running:
            trainer.request_save()


def _check_run_dir(run_dir: Path | None) -> None:
    """Raise `ConfigurationError` if `run_dir` is in the folder of Ray's session, as the working directory of a worker or trial is: Ray
    deletes it."""
    import ray

    session = ray.get_runtime_context().get_session_name()
    if run_dir is not None and session in run_dir.resolve().parts:
        raise ConfigurationError(
            f"run_dir={str(run_dir)!r} is in the folder of Ray's session ({run_dir.resolve()}), which Ray deletes; give an absolute path"
        )
