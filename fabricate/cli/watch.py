"""`fabricate watch`: show a run in the terminal while it is running.

Owns the interval of updates and the end of the command. Must not know: how files are followed (`recorded.following`), what is shown
(`recorded.terminal`). Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from fabricate.cli.recorded.arguments import run_directories


@click.command()
@run_directories
@click.option(
    "--every",
    type=click.FloatRange(0.1),
    default=2.0,
    metavar="SECONDS",
    help="Time between two looks at the files; default: 2.",
)
def watch(run_dirs: Sequence[Path], every: float) -> None:
    """Show the run in RUN_DIR while it is running: how far it is, its metrics with their curves, rates, what happened.

    It reads files only, so it may run anywhere that sees them, and begin and end at any time. Ctrl-C ends it. Where the output is
    not a terminal it prints how things stand, once.

    \b
    Examples:
      fabricate watch runs/first
      fabricate watch runs/first runs/second --every 10
    """
    from rich.console import Console, Group
    from rich.live import Live

    from fabricate.cli.recorded.following import Following
    from fabricate.cli.recorded.terminal import view

    followed, console = [Following(run_dir) for run_dir in run_dirs], Console()

    def now() -> Group:
        return Group(*(view(each.look()) for each in followed))

    if not console.is_terminal:
        Console(width=10_000).print(now())  # whole lines in a file or a pipe
        return
    try:
        with Live(now(), console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(every)
                live.update(now(), refresh=True)
    except KeyboardInterrupt:
        console.print(now())
