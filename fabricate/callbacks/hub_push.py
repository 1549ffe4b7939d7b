"""Push of a fit's model to the Hugging Face Hub, at the end of the fit or also at each save."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabricate.callbacks.hub_repository import HubRepository
from fabricate.callbacks.model_card import write_card
from fabricate.errors import ConfigurationError, FabricateError
from fabricate.hooks import Callback, hookimpl

if TYPE_CHECKING:
    from fabricate.module import TrainModule
    from fabricate.trainer import Trainer


class HubPush(Callback):
    """Pushes the files of `RUN_DIR/model/` to the model repository `repo` of the hub, with a model card (README.md) about the plan, the
    metrics of the last validation, the data and the versions.

    repo: "user/name". at: "end", or "saves" to push the current weights at each save too. license, datasets: for the card, identifiers of
    the hub ("apache-2.0"; ["stanfordnlp/imdb"]). private, revision, token, endpoint: see `HubRepository`.

    Before the first step, rank 0 logs in and creates the repository; if that fails (offline, for example), it is an error. Rank 0 pushes.
    Pushes at saves run in the background; a save is not pushed if the previous push is still running. If such a push fails, it is reported
    as a note and an event, and the next save is pushed. At its end, the fit waits for the push. If that fails, it is an error after
    everything is saved; `fabricate push RUN_DIR REPO`, or the same script again, continues the push. A preempted fit does not wait.

        Trainer(plugins=[HubPush("user/name", license="apache-2.0")], run_dir="runs/one", ...)
    """

    def __init__(
        self,
        repo: str,
        *,
        at: str = "end",
        license: str | None = None,
        datasets: Sequence[str] = (),
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        if at not in ("end", "saves"):
            raise ConfigurationError(f"HubPush(at={at!r}): give 'end' or 'saves'")
        if isinstance(datasets, str):
            raise ConfigurationError(f"HubPush(datasets={datasets!r}): give a list of names, [{datasets!r}]")
        self.at, self.license, self.datasets = at, license, tuple(datasets)
        self.repository = HubRepository(repo, private=private, revision=revision, token=token, endpoint=endpoint)
        self._thread: threading.Thread | None = None
        """The thread of the current or the last push, on rank 0."""
        self._failure: FabricateError | None = None
        """The error of the last push, on rank 0."""
        self._exported: Path | None = None
        """RUN_DIR/model/, after the export; else None."""

    def on_fit_start(self, trainer: Trainer) -> None:
        self._thread = self._failure = self._exported = None
        if trainer.settings.fast_dev_run:
            return
        if trainer.run_dir is None:
            raise ConfigurationError("HubPush pushes RUN_DIR/model/, and no run_dir is set. Set Trainer(run_dir=...)")
        if trainer.is_main:
            self.repository.open()

    def on_saved(self, trainer: Trainer, module: TrainModule) -> None:
        if self.at != "saves" or trainer.run_dir is None or self._under_way(trainer, module):
            return
        if trainer.is_main:
            shutil.rmtree(trainer.run_dir / ".hub-model", ignore_errors=True)
        self._push(trainer, trainer.export(trainer.run_dir / ".hub-model"), f"step {trainer.step}")

    @hookimpl(trylast=True)  # after plugins that add files
    def on_export(self, path: Path) -> None:
        self._exported = path

    @hookimpl(trylast=True)
    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._exported is None or trainer.settings.fast_dev_run:
            return  # not exported: the fit was preempted, and its time is limited
        self._wait(trainer, module)
        if trainer.is_main:
            assert trainer.run_dir is not None
            shutil.rmtree(trainer.run_dir / ".hub-model", ignore_errors=True)
        self._push(trainer, self._exported, f"the end of the fit, step {trainer.step}")
        self._wait(trainer, module)
        if self._any(trainer, module, self._failure is not None):
            raise FabricateError(
                f"{self._failure or 'rank 0 could not push the model'}. The model is complete in {self._exported}. "
                f"To push it again: fabricate push {trainer.run_dir} {self.repository.repo}"
            ) from self._failure

    def _push(self, trainer: Trainer, folder: Path, message: str) -> None:
        """Start a push of `folder` in a thread, on rank 0."""
        if trainer.is_main:
            assert trainer.run_dir is not None
            target = (trainer.run_dir, folder, message, trainer.step, folder == self._exported)
            self._thread = threading.Thread(target=self._run, args=target, name="fabricate-hub-push", daemon=True)
            self._thread.start()

    def _run(self, run_dir: Path, folder: Path, message: str, step: int, ended: bool) -> None:
        began, self._failure = time.monotonic(), None
        try:
            repo = self.repository.repo
            write_card(
                run_dir, folder, repo, license=self.license, datasets=self.datasets, step=None if ended else step
            )
            url = self.repository.push(folder, message)
        except Exception as exc:
            self._failure = exc if isinstance(exc, FabricateError) else FabricateError(f"{type(exc).__name__}: {exc}")
            event("push_failed", run_dir, step=step, reason=str(self._failure))
            print(f"note: {message}: {self._failure}", file=sys.stderr, flush=True)
        else:
            event("pushed", run_dir, step=step, url=url, seconds=round(time.monotonic() - began, 3))

    def _under_way(self, trainer: Trainer, module: TrainModule) -> bool:
        """Whether rank 0 is pushing. All ranks."""
        return self._any(trainer, module, self._thread is not None and self._thread.is_alive())

    def _wait(self, trainer: Trainer, module: TrainModule) -> None:
        """Wait until the current push has ended. All ranks: they exchange a number every second, so that a long push causes no time-out of
        a collective."""
        while True:
            if self._thread is not None:
                self._thread.join(1.0)
            if not self._under_way(trainer, module):
                return

    def _any(self, trainer: Trainer, module: TrainModule, mine: bool) -> bool:
        """Whether `mine` is true on any rank. All ranks."""
        import torch

        count = torch.tensor([float(mine)], device=module.device)
        return bool(trainer.accelerator.reduce(count, reduction="sum").item())

    def on_teardown(self) -> None:
        self._thread = None


def event(kind: str, run_dir: Path, **fields: Any) -> None:
    """Append an event to events.jsonl."""
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": kind, **fields, "time": time.time()}) + "\n")
