"""`fabricate doctor`. Owns the output and the exit code: 1 if something is broken. Imports torch only when it is called."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click


@click.command()
@click.option("--cpu", is_flag=True, help="Do not check accelerators.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--run",
    "run_dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Instead of this machine, show the stacks of the ranks of the run that is running in this directory.",
)
@click.pass_context
def doctor(ctx: click.Context, /, cpu: bool, as_json: bool, run_dir: Path | None) -> None:
    """Find out what this machine and installation can do, by trying: versions, devices, precisions, network, two ranks that
    meet, plugins, DeepSpeed's compiled parts, the Accelerate configuration in force.

    With --run: what each rank of a live run on this host is doing, with its stack, while it goes on.

    Exit code 1 when something is broken, or a rank cannot be asked; what is only absent is no fault.

    \b
    Examples:
      fabricate doctor
      fabricate doctor --json > machine.json
      fabricate doctor --run runs/one
    """
    if run_dir is not None:
        from fabricate.cli.doctor_run import ask_run

        text, good = ask_run(run_dir, as_json=as_json)
        click.echo(text)
        ctx.exit(0 if good else 1)
    from fabricate.cli.doctor_checks import examine

    marks = {"good": "ok", "absent": "-", "broken": "BROKEN"}
    findings = []
    for finding in examine("cpu" if cpu else None):
        findings.append(finding)
        if not as_json:
            click.echo(f"{marks[finding.state]:<7} {finding.topic:<18} {finding.text}")
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    if broken := [finding.topic for finding in findings if finding.state == "broken"]:
        if not as_json:
            click.echo(f"broken: {'; '.join(broken)}", err=True)
        ctx.exit(1)
