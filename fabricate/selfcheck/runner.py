"""Run a script on a rank, with the Trainer of `checked_trainer` in place of `fabricate.Trainer`.

Owns the environment of the script: its folder, its arguments, its Trainer. Must not know: what is checked. Does not import torch or another
package that the script may have to configure before the import.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import fabricate
from fabricate.selfcheck.requests import Request, Trial, read_requests

__all__ = ["main"]

request: Request | None = None
"""The request for the fits of the script that is running."""


def main() -> None:
    """Run the script `sys.argv[2]` with the arguments after it, as `__main__`, once per request in `sys.argv[1]`. All ranks."""
    global request
    requests, script, *arguments = sys.argv[1:]
    script_file = Path(script).absolute()
    if not sys.flags.safe_path:
        sys.path[0] = str(script_file.resolve().parent)
    # `fabricate` imports from this table when the script first uses the name.
    fabricate._HOME["Trainer"] = "selfcheck.checked_trainer"
    for request in read_requests(requests):
        sys.argv = [script, *arguments]  # set each time, because runpy and scripts change it
        if isinstance(request, Trial):
            _try(script_file, request)
        else:
            runpy.run_path(str(script_file), run_name="__main__")


def _try(script_file: Path, trial: Trial) -> None:
    """Run the script from a fixed seed, so that random values drawn before its fit (data, for example) are the same in every trial."""
    fabricate.seed_everything(1)
    try:
        runpy.run_path(str(script_file), run_name="__main__")
    except SystemExit as exc:
        if exc.code not in (None, 0):
            raise
    except Exception:
        # After its fit, a script may fail because the trial left something out, such as the metrics of a validation.
        if not Path(trial.notes, "end").exists():
            raise
