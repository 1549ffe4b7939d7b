"""The Trainer of a script that runs under a check: it trains as the check requests.

It changes settings and the arguments of `fit`, and adds a plugin; a user could do the same. Must not know: the comparison that the check
makes.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from torch.utils.data import BatchSampler, DataLoader

from fabricate import trainer
from fabricate.callbacks.hub_push import HubPush
from fabricate.callbacks.profiler import Profiler
from fabricate.callbacks.save_on_exception import SaveOnException
from fabricate.configuration.arguments import Settings
from fabricate.configuration.batch_size_finder import BatchSizeFinder
from fabricate.errors import ConfigurationError
from fabricate.module import TrainModule
from fabricate.selfcheck import runner
from fabricate.selfcheck.plugins import Rehearsing, Trying
from fabricate.selfcheck.requests import Rehearsal, Trial
from fabricate.values import Every, FitResult

__all__ = ["Trainer"]

_fitted: set[str] = set()
"""The folders of the trials whose fit has begun."""


class Trainer(trainer.Trainer):
    """A `fabricate.Trainer` that follows `runner.request`. The request is read at each call, because modules that the script imported keep
    this class when the request changes."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        match runner.request:
            case Rehearsal():
                self.settings = rehearsed(self.settings, runner.request)
            case Trial():
                self.settings = tried(self.settings, runner.request)

    def fit(
        self,
        module: TrainModule,
        train: Any = None,
        val: Any = None,
        *,
        resume: str | os.PathLike[str] = "auto",
        batch_size: int | BatchSizeFinder | None = None,
        **loading: Any,
    ) -> FitResult:
        if isinstance(runner.request, Trial):
            if runner.request.notes in _fitted:
                end_at_second_fit(runner.request, self.is_main)
            _fitted.add(runner.request.notes)
            train, batch_size = resplit(train, runner.request)
            resume = "auto"
        if isinstance(batch_size, BatchSizeFinder):
            raise ConfigurationError(
                f"verify-resume compares runs of one batch size, but the script searches one. Give a number instead of {batch_size}"
            )
        return super().fit(module, train, val, resume=resume, batch_size=batch_size, **loading)


def rehearsed(settings: Settings, rehearsal: Rehearsal) -> Settings:
    """`settings` with another run directory, and a plugin that saves, records and kills."""
    run_dir = rehearsal.run_dir(settings.run_dir) if settings.run_dir is not None else None
    return replace(settings, run_dir=run_dir, plugins=(*settings.plugins, Rehearsing(rehearsal)))


def tried(settings: Settings, trial: Trial) -> Settings:
    """`settings` with the accumulation and the number of updates of the trial, without trackers and files. Validation is one batch at the
    end, because callbacks and schedules may need its metrics."""
    steps = trial.steps if settings.max_steps is None else min(trial.steps, settings.max_steps)
    plugins = [each for each in settings.plugins if not isinstance(each, HubPush | Profiler | SaveOnException)]
    return replace(
        settings,
        strategy="auto",  # the launcher sets it
        precision="auto",
        max_steps=steps,
        gradient_accumulation_steps=trial.accumulation,
        global_batch_size=None,
        seed=1 if settings.seed is None else settings.seed,
        run_dir=None,
        validate_every=Every(steps=steps),
        limit_val_batches=1,
        validate_first=False,
        sanity_batches=0,
        trackers=(),
        limit_train_batches=None,
        load_best=False,
        plugins=(*plugins, Trying(trial)),
    )


def end_at_second_fit(trial: Trial, is_main: bool) -> NoReturn:
    """End the script, because a trial compares its first fit, and note this."""
    file = Path(trial.notes, "notes.json")
    if is_main and file.exists():
        notes = json.loads(file.read_text())
        notes["notes"].append("the script has further fits, and only the first was checked")
        file.write_text(json.dumps(notes))
    raise SystemExit


def resplit(train: Any, trial: Trial) -> tuple[Any, int | None]:
    """The training data in micro-batches of the trial, and the `batch_size` for `fit`: None for a DataLoader."""
    if not isinstance(train, DataLoader):
        return train, trial.micro_batch
    if type(train.batch_sampler) is not BatchSampler:
        raise ConfigurationError(
            "check-invariance cannot split these batches: the DataLoader has its own batch sampler, or none. Give the "
            "DataLoader batch_size= instead"
        )
    loader = DataLoader(
        train.dataset,
        batch_size=trial.micro_batch,
        sampler=train.batch_sampler.sampler,
        num_workers=train.num_workers,
        collate_fn=train.collate_fn,
        drop_last=train.batch_sampler.drop_last,
        worker_init_fn=train.worker_init_fn,
    )
    return loader, None
