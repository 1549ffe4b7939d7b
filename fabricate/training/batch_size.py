"""The search for the batch size of a fit: the possible sizes, the size that an earlier fit found, and a trial of one size.

Must not know: how the next size is chosen (`configuration.batch_size_finder`), how a process is forked (`distributed.trials`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from fabricate.configuration.arguments import Settings
from fabricate.configuration.batch_size_finder import FOUND, BatchSizeFinder, sizes
from fabricate.configuration.opened_data import open_data, reader
from fabricate.configuration.resolve import resolve
from fabricate.data.source import Loading
from fabricate.distributed.trials import Trials
from fabricate.errors import ConfigurationError
from fabricate.hooks import Callback
from fabricate.launch.ranks import detect
from fabricate.launch.settings import requests
from fabricate.module import TrainModule

_SAME = ("world_size", "strategy", "precision", "device")
"""The settings that must equal those of the earlier run for its batch size to be used."""


def found_size(
    finder: BatchSizeFinder,
    settings: Settings,
    loading: Loading,
    facts: Callable[[Loading], dict[str, Any]],
    fit: Callable[[Settings, Loading], None],
) -> Loading:
    """`loading` with the batch size that `finder` finds, and the source of this size. All ranks, before any of them uses a device.

    facts: `facts_of` this fit, for a given batch size; fit: trains with given settings and batch size."""
    if "plan_only" in requests(os.environ):
        return first_size(finder, loading)
    launch = detect(os.environ)
    shows = launch.rank == 0
    trials = Trials(launch, timedelta(seconds=settings.timeout.seconds))
    smallest = replace(loading, batch_size=1)
    # raises the same error here if it failed in the forked process
    first_facts = trials.ask(lambda: facts(smallest)) or facts(smallest)
    if first_facts["found_before"] is not None:
        size, found = first_facts["found_before"]
        return replace(loading, batch_size=size, found=found)
    _check_device(first_facts)

    def fits(size: int) -> bool:
        fitted = trials.fits(lambda: fit(_until(settings, finder.steps_per_trial), replace(loading, batch_size=size)))
        if shows:
            print(f" {size}" if fitted else f" {size} (out of memory)", end="", flush=True)
        return fitted

    print("BatchSizeFinder tries" if shows else "", end="", flush=True)
    try:
        size = finder.search(sizes(first_facts["readers"], first_facts["rows"], first_facts["global_batch_size"]), fits)
    finally:
        print("\n" if shows else "", end="", flush=True)
    return replace(loading, batch_size=size, found=finder.described())


def first_size(finder: BatchSizeFinder, loading: Loading) -> Loading:
    """`loading` with the first size of the search, for a plan, which runs no trial."""
    return replace(
        loading,
        batch_size=finder.init_val,
        found=f"the first size that {finder} tries; a fit searches for the size that fits",
    )


def facts_of(
    settings: Settings, module: TrainModule, train: Any, val: Any, reuse: bool, loading: Loading
) -> dict[str, Any]:
    """The facts that determine which sizes are possible, as JSON values. `reuse`: whether to read the size that the earlier run in
    `run_dir` found. Called in a forked process, because detecting a device may initialise it."""
    resolved = resolve(settings, module)
    data = open_data(settings, resolved, train, val, loading)
    assert data.train is not None
    identity = {
        "world_size": resolved.launch.world_size,
        "strategy": resolved.strategy.name,
        "precision": resolved.precision.name,
        "device": str(resolved.device),
    }
    return {
        "readers": reader(resolved)[1],
        "rows": data.train.num_units,
        "global_batch_size": resolved.global_batch_size[0] if resolved.global_batch_size else None,
        "device_source": resolved.device_source,
        "found_before": _found_before(settings.run_dir, identity) if reuse else None,
    }


def _found_before(run_dir: Path | None, identity: dict[str, Any]) -> tuple[int, str] | None:
    """The size that an earlier run in `run_dir` found, and its source, from `plan.json`; None if its settings differ."""
    if run_dir is None:
        return None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        settings = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))["settings"]
        source = settings["micro_batch_size"]["source"]
        if FOUND in source and all(settings[name]["value"] == identity[name] for name in _SAME):
            return int(settings["micro_batch_size"]["value"]), source[source.index(FOUND) :]
    return None


def _check_device(facts: dict[str, Any]) -> None:
    """Raise an error if forked processes do not see the GPU: trials would silently run on the CPU."""
    if facts["device_source"] == "no accelerator here" and torch.cuda.device_count():
        raise ConfigurationError(
            "a batch size cannot be tried in a forked process: this process has already queried the GPUs "
            "(torch.cuda.is_available(), for example), and its forked processes do not see them. Set "
            "PYTORCH_NVML_BASED_CUDA_CHECK=1 before Python starts, or give a number, for instance batch_size=16"
        )


def _until(settings: Settings, steps: int) -> Settings:
    """The settings of a trial of `steps` updates."""
    quiet = replace(settings, fast_dev_run=steps + 1, progress=False, print_plan="none")
    return replace(quiet.for_a_trial(), plugins=(*settings.plugins, _Ends(steps)))


class _Ends(Callback):
    """Ends the process of a trial after its updates on all ranks, before anything is saved."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step(self, trainer: Any, step: int) -> None:
        if step == self._steps:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            trainer.accelerator.wait_for_everyone()
            raise SystemExit
