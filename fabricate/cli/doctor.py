"""`fabricate doctor`. Owns what is printed and the exit code: 1 when something is broken. Imports no torch until it is called."""

from __future__ import annotations

import dataclasses
import json

import click


@click.command()
@click.option("--cpu", is_flag=True, help="Leave accelerators out of it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, /, cpu: bool, as_json: bool) -> None:
    """Find out what this machine and installation can do, by trying: versions, devices, precisions, network, two ranks that
    meet, plugins, DeepSpeed's compiled parts, the Accelerate configuration in force.

    Exit code 1 when something is broken; what is only absent is no fault.

    \b
    Examples:
      fabricate doctor
      fabricate doctor --json > machine.json
    """
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
