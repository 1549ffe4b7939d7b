"""The argument for run directories, which several commands share."""

from __future__ import annotations

from pathlib import Path

import click

run_directories = click.argument(
    "run_dirs",
    metavar="RUN_DIR...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
"""One or more existing run directories, as the argument `run_dirs` of a command."""
