"""The Trainer of a dry run: its fit is a rehearsal. Must not know: how a script is started."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any

from fabricate import trainer
from fabricate.configuration.batch_size_finder import BatchSizeFinder
from fabricate.data.source import Loading
from fabricate.errors import ConfigurationError
from fabricate.module import TrainModule
from fabricate.selfcheck.dry_run.engines import FakeEngine, RecordedEngine
from fabricate.selfcheck.dry_run.fakes import Fakes
from fabricate.selfcheck.dry_run.outlines import make_fake
from fabricate.selfcheck.dry_run.recorder import Recorder
from fabricate.selfcheck.dry_run.rehearsal import rehearse
from fabricate.selfcheck.dry_run.report import Measured
from fabricate.training.batch_size import first_size
from fabricate.values import FitResult


class DryTrainer(trainer.Trainer):
    """A `fabricate.Trainer` whose `fit` measures an update instead of training; `measured` has the result.

    The module has no values afterwards and cannot be used. In a real group, all ranks call `fit`."""

    fake = True
    """True: tensors without memory, and no other ranks. False: the same measurements with real tensors and ranks."""
    room: int | None = None
    """The bytes for which the largest micro-batch is searched."""
    measured: Measured

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.settings = replace(
            self.settings,
            run_dir=None,
            trackers=(),
            progress=False,
            print_plan="none",
            compile=None,
            fast_dev_run=False,
            load_best=False,
            detect_anomaly=False,
        )

    def fit(
        self,
        module: TrainModule,
        train: Any = None,
        val: Any = None,
        *,
        resume: str | os.PathLike[str] = "never",
        batch_size: int | BatchSizeFinder | None = None,
        num_workers: int = 0,
        collate_fn: Any = None,
        shuffle: bool | None = None,
    ) -> FitResult:
        if isinstance(batch_size, BatchSizeFinder):  # the rehearsal searches for the largest size
            batch_size = first_size(batch_size, Loading()).batch_size
        loading = Loading(None, num_workers, collate_fn, shuffle)
        resolved, data = self._open_data(module, train, val, resume, batch_size, loading)
        if "DEEPSPEED" in resolved.strategy.distributed_types:
            raise ConfigurationError(
                f"--dry-run uses tensors without memory, on which DeepSpeed, the engine of strategy={resolved.strategy.name!r}, does not "
                "run. Use strategy='fsdp', which shards the same tensors. Or leave --dry-run out: the plan then estimates weights and "
                "optimizer states"
            )
        fakes = Fakes() if self.fake else None
        if fakes is None:
            recorder = Recorder()
        else:
            recorder = Recorder(fakes.run)
            make_fake(module, fakes)
        engine = functools.partial(RecordedEngine if fakes is None else FakeEngine, recorder)
        self.measured = rehearse(self, resolved, module, data, recorder, engine, fakes, self.room)
        return FitResult(0, 0, stop_reason="dry run")

    def _evaluate(self, stage: str, *arguments: Any, **options: Any) -> Any:
        raise ConfigurationError(
            f"--dry-run measures the first fit, but the script calls an evaluation ({stage}) before it. Skip the evaluation in a dry run"
        )
