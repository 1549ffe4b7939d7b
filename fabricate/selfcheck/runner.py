"""Runs a script in a process of a rank, with the Trainer of `checked_trainer` in the place of `fabricate.Trainer`.

Owns what the script finds: its folder, its arguments, its Trainer. Must not know what is checked. Imports nothing that the
script could want to prepare first, such as torch.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import fabricate
from fabricate.selfcheck.requests import Request, Trial, read_requests

__all__ = ["main"]

request: Request | None = None
"""What the fits of the script that runs now have to do."""


def main() -> None:
    """Run the script `sys.argv[2]` with the arguments after it, as `__main__`, once per request in `sys.argv[1]`. All ranks."""
    global request
    requests, script, *arguments = sys.argv[1:]
    script_file = Path(script).absolute()
    if not sys.flags.safe_path:
        sys.path[0] = str(script_file.resolve().parent)
    # The package looks the name up when the script first uses it.
    fabricate._HOME["Trainer"] = "selfcheck.checked_trainer"
    for request in read_requests(requests):
        sys.argv = [script, *arguments]  # again, as runpy and scripts change it
        if isinstance(request, Trial):
            _try(script_file, request)
        else:
            runpy.run_path(str(script_file), run_name="__main__")


def _try(script_file: Path, trial: Trial) -> None:
    """From the same seed in every trial: what a script draws before its fit, such as data, is the same in all of them."""
    fabricate.seed_everything(1)
    try:
        runpy.run_path(str(script_file), run_name="__main__")
    except SystemExit as exc:
        if exc.code not in (None, 0):
            raise
    except Exception:
        # Once its fit is over a script may miss what the trial left out, such as the metrics of a validation.
        if not Path(trial.notes, "end").exists():
            raise
