"""`fabricate diff`: the differences between two runs. Owns the output and the exit code; imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

import click

from fabricate.cli.recorded.compared import differences
from fabricate.cli.recorded.files import read_run
from fabricate.cli.tables import print_table

_RUN = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("first", metavar="RUN_A", type=_RUN)
@click.argument("second", metavar="RUN_B", type=_RUN)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def diff(ctx: click.Context, first: Path, second: Path, as_json: bool) -> None:
    """Show what the runs in RUN_A and RUN_B do not have in common. Exit code 1 if they differ.

    Compares plan, versions, the description of the data and the configuration; then names the first logged metric that differs,
    and the first tensor of the checkpoints of one step. Times and RUN_DIR/model/ do not count.

    \b
    Examples:
      fabricate diff runs/first runs/second
    """
    sections = differences(read_run(first), read_run(second))
    if as_json:
        click.echo(json.dumps([different._asdict() for different in sections], indent=1))
    elif sections:
        print_table(("", "what", str(first), str(second)), sections)
    else:
        click.echo(f"no difference between {first} and {second}")
    if sections:
        ctx.exit(1)
