"""Runs a script again and again in one process of each rank, once for every trial that is asked for.

Owns the order and that a script finds its own folder and arguments each time. Must not know what a trial is for.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from fabricate.seeding import seed_everything
from fabricate.selfcheck.requests import Trial

__all__ = ["TRIALS", "repeat"]

TRIALS = "FABRICATE_TRIALS"
"""The variable with all trials, as a JSON list of what `Trial.to_environment` gives."""


def repeat() -> None:
    """Run `sys.argv[1]` with the arguments after it, as `__main__`, once per trial, from the same seed each time: what a script
    draws before its fit, such as data, is the same in all of them. All ranks."""
    script, *arguments = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    for variables in json.loads(os.environ[TRIALS]):
        os.environ.update(variables)
        sys.argv = [script, *arguments]
        seed_everything(1)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as exc:
            if exc.code not in (None, 0):
                raise
        except Exception:
            # Once its fit is over a script may miss what the trial left out, such as the metrics of a validation.
            trial = Trial.from_environment(variables)
            if trial is None or not Path(trial.notes, "end").exists():
                raise
    del os.environ[Trial.VARIABLE]
