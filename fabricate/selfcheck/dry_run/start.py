"""Run a script up to its first fit, which is a rehearsal. The process is rank 0; the environment has the number of ranks.

The exit code is 2 for an error of fabricate, as under `fabricate plan`.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path
from typing import Any

import fabricate
from fabricate.errors import FabricateError
from fabricate.selfcheck.dry_run.outlines import without_values
from fabricate.selfcheck.dry_run.trainer import DryTrainer
from fabricate.values import FitResult

_building = contextlib.ExitStack()
"""The contexts that end when the script has built its module."""


class Trainer(DryTrainer):
    """A Trainer whose `fit` prints the measurements and ends the script."""

    def fit(self, *arguments: Any, **options: Any) -> FitResult:
        _building.close()
        super().fit(*arguments, **options)
        print(self.measured, flush=True)
        raise SystemExit(0)


def main() -> None:
    """Run the script from the command line ROOM SCRIPT ARGUMENTS. ROOM: the bytes for which the largest micro-batch is searched, or 0."""
    room, script, *arguments = sys.argv[1:]
    script_file = Path(script).absolute()
    if not sys.flags.safe_path:
        sys.path[0] = str(script_file.resolve().parent)
    sys.argv = [script, *arguments]
    DryTrainer.room = int(room) or None
    fabricate._HOME["Trainer"] = "selfcheck.dry_run.start"
    try:
        with _building:
            _building.enter_context(without_values())
            runpy.run_path(str(script_file), run_name="__main__")
    except FabricateError as exc:
        print(f"error: {exc}", file=sys.stderr)
        raise SystemExit(2) from None
    print("error: the script ended without a fit. Give a script that calls Trainer.fit", file=sys.stderr)
    raise SystemExit(2)
