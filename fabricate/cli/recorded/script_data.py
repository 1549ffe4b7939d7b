"""The training data of a script: the script is run up to its first `fit`, which passes on its data instead of training.

Owns the Trainer that the script uses meanwhile. Must not know: the use of the data.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

import fabricate
from fabricate import trainer
from fabricate.configuration.batch_size_finder import BatchSizeFinder
from fabricate.data.identity import changed_rows, differ
from fabricate.data.indexed import Indexed
from fabricate.data.source import Loading
from fabricate.data.user_data import open_source
from fabricate.errors import ConfigurationError, few
from fabricate.module import TrainModule

__all__ = ["Trainer", "opened"]


class _Reached(BaseException):
    """The script called fit. It is not an Exception, because a script may catch these."""

    def __init__(self, train: Any, loading: Loading) -> None:
        self.train, self.loading = train, loading


class Trainer(trainer.Trainer):
    """A `fabricate.Trainer` whose `fit` raises `_Reached` with its data."""

    def fit(
        self,
        module: TrainModule,
        train: Any = None,
        val: Any = None,
        *,
        batch_size: int | BatchSizeFinder | None = None,
        collate_fn: Any = None,
        shuffle: bool | None = None,
        **others: Any,
    ) -> Any:
        train, _ = module.provide_data(self, "fit", train, val)
        size = None if isinstance(batch_size, BatchSizeFinder) else batch_size  # None: the recorded size
        raise _Reached(train, Loading(size, 0, collate_fn, shuffle))


def opened(script: Path, arguments: Sequence[str], recorded: Mapping[str, Any]) -> tuple[Indexed, list[str]]:
    """The data that `script` passes to its first fit, opened like the data of the fit that `recorded` describes, and notes on how it may
    differ from the data of that fit. Raises ConfigurationError if it does differ."""
    reached = _run(script, arguments)
    loading = reached.loading
    if loading.batch_size is None and not isinstance(reached.train, DataLoader):
        # The size was set by a strategy's file, or found by a search.
        loading = Loading(recorded["batch_size"], 0, loading.collate_fn, loading.shuffle)
    source = open_source(
        reached.train, argument="train", loading=loading, training=True, rank=0, world_size=1, seed=recorded["seed"]
    )
    now = source.order()
    if not isinstance(source, Indexed):
        raise ConfigurationError(
            f"{script} passes a {now['kind']} to fit, whose rows cannot be read by index. "
            "Give the script that the run was started with"
        )
    for name, there in (("rows", "units"), ("order", "drawn")):
        if now[there] != recorded[there]:
            raise ConfigurationError(
                f"{script} passes other data to fit than the run was trained on ({name}: {now[there]} now, {recorded[there]} in the "
                "run). Give the script and the arguments of the run"
            )
    if differ("indices", recorded, source.identity):
        raise ConfigurationError(
            f"{script} chooses other rows of its data set than the run was trained on: the indices of the Subset or sampler differ. Random "
            "indices need a seed, for instance random_split(..., generator=torch.Generator().manual_seed(0)); without one, the rows of the "
            "run cannot be drawn again. `fabricate rows` without the script shows their numbers"
        )
    return source, list(_notes(script, recorded, source))


def _notes(script: Path, recorded: Mapping[str, Any], source: Indexed) -> Iterator[str]:
    """What the user has to know about the rows that are shown."""
    if changed := changed_rows(recorded, source.identity):
        which = f" (in its {few(changed.names)})" if changed.names else ""
        yield (
            f"the data of {script} has the fingerprint {changed.now}, but that of the run had {changed.then}{which}: the rows differ, or "
            "the same rows were computed again. If they differ, the run was not trained on the rows shown here"
        )
    if recorded["drawn"] == "sampler":
        yield (
            f"the sampler of {script} drew this order again, as it is before training. If training changes it, for instance its weights, "
            "the run read other rows after the change"
        )


def _run(script: Path, arguments: Sequence[str]) -> _Reached:
    """Run `script` like `python SCRIPT`, up to its first fit. Afterwards the state of the process is restored."""
    before = sys.argv, list(sys.path), fabricate.__dict__.pop("Trainer", None)
    home = fabricate._HOME["Trainer"]
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.resolve().parent)
    fabricate._HOME["Trainer"] = "cli.recorded.script_data"  # used when the script first uses the name
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _Reached as reached:
        return reached
    finally:
        fabricate._HOME["Trainer"] = home
        fabricate.__dict__.pop("Trainer", None)
        sys.argv, sys.path[:] = before[0], before[1]
        if before[2] is not None:
            fabricate.__dict__["Trainer"] = before[2]
    raise ConfigurationError(
        f"{script} ended without calling Trainer.fit, so its training data is not known. Give a script that calls Trainer.fit"
    )
