"""fabricate in the workers of Ray Train: metrics and checkpoints go to Ray, and a machine that will be taken away is noticed in time.
And in the trials of Ray Tune, each of which is a process that fits: metrics and checkpoints go to Ray.

Every worker is a rank, with the device and the place that Ray gives it; fabricate needs no help with either. What Ray expects of a worker:
the docstrings of `ray.train.report`, `get_checkpoint` and `get_preemption_info`, Ray 2.60. A fit runs in a thread of a worker, and Python
handles signals in the main one, where the worker's actor answers calls: its method `execute` runs a function there (not documented). The
actor of a trial answers none while the trial runs.
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

    copy: whether Ray gets a copy of each checkpoint for its storage (`Result.checkpoint`, `ray.train.get_checkpoint`); without it, RUN_DIR
    alone holds them. look_every: updates between two looks for a preemption, each a barrier of all workers; 0: never. Where Ray says that a
    node will be taken away, or where a worker gets SIGTERM, all ranks save at the next update and train on, because Ray takes a function
    that returns for finished. A second SIGTERM ends the worker. A trial of Ray Tune neither looks nor handles SIGTERM.

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
        """`checkpoint`: what Ray shall copy. `path`: what all workers saved."""
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
    """What a worker or a trial gives to `Trainer.fit(resume=)`: "auto" where `run_dir` holds checkpoints or Ray has none of it, else the
    path of Ray's newest, fetched first if it is on a remote store. Every worker calls it, before its fit. A trial has one fit: there
    Ray's names of checkpoints do not say which run they are of."""
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
        return "auto"  # of another fit of these workers
    local = checkpoint.filesystem.type_name == "local"
    return str(checkpoint.path if local else checkpoint.to_directory())


def _is_trial() -> bool:
    """Whether this process is a trial of Ray Tune, else a worker of Ray Train. `ConfigurationError` where it is neither."""
    import ray.train

    try:
        ray.train.get_context().get_world_size()
    except DeprecationWarning:  # what Ray Train raises for a trial
        return True
    except RuntimeError as exc:
        raise ConfigurationError(
            "the plugin 'ray' reports to Ray Train or Ray Tune, but this process is neither a worker nor a trial of Ray; leave "
            "the plugin out"
        ) from exc
    return False


_fits: list[Trainer] = []
"""At work in this worker: one, or one inside of another."""
_handlers: list[Any] = []
"""Ray's own, while there is one of ours."""


def _in_main_thread(function: Callable[[], None]) -> None:
    """Run `function` where Python allows to set signal handlers. Without effect where the fit itself runs there (`num_workers=0`)."""
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
    """The first SIGTERM; the next is Ray's again."""
    signal.signal(signal.SIGTERM, _handlers[0])
    for trainer in _fits:
        if trainer.running:
            trainer.request_save()


def _check_run_dir(run_dir: Path | None) -> None:
    """The working directory of a worker or a trial is a folder of Ray's session, and is deleted with it."""
    import ray

    session = ray.get_runtime_context().get_session_name()
    if run_dir is not None and session in run_dir.resolve().parts:
        raise ConfigurationError(
            f"run_dir={str(run_dir)!r} is in the folder of Ray's session ({run_dir.resolve()}), which Ray deletes; give an absolute path"
        )
