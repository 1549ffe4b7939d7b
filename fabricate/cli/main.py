"""The `fabricate` command. `run` and `plan` are defined here; the other commands are added.

Owns the options, the output and the exit codes. Must not know: the loop, Accelerate. Imports no torch, so that commands start fast. Exit
codes: 2 for a wrong command, 1 for a failed check, and that of the script for `run` and `plan`.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click

from fabricate.cli.checkpoints import ckpt
from fabricate.cli.diff import diff
from fabricate.cli.doctor import doctor
from fabricate.cli.dry_run import dry_run_of
from fabricate.cli.launch import Launching, launching, prepared
from fabricate.cli.plugins import PluginCommands, plugins
from fabricate.cli.push import push
from fabricate.cli.report import report
from fabricate.cli.rows import rows
from fabricate.cli.self_checks import check_invariance, verify_resume
from fabricate.cli.watch import watch
from fabricate.errors import ConfigurationError, FabricateError


class _Group(PluginCommands):
    """A group that prints fabricate's errors in one line; with `--debug` they are raised."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Like click's, but with a hint if the command is a script or a name from other launchers."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            if not args[0].endswith(".py") and args[0] not in ("launch", "train", "fit"):
                raise
            script = args[0] if args[0].endswith(".py") else "SCRIPT"
            raise click.UsageError(
                f"{args[0]!r} is not a command of fabricate. To run a script: fabricate run {script}", ctx
            ) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FabricateError as exc:
            if ctx.params["debug"]:
                raise
            click.echo(f"error: {exc}", err=True)
            ctx.exit(2)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands with whole sentences, which click would cut to one line."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(200)) for name, command in commands.items() if command]
            )


def _version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from fabricate import __version__

        click.echo(f"fabricate {__version__}")
        ctx.exit()


@click.group(cls=_Group)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def main(debug: bool) -> None:
    """Train with fabricate: one script, any number of devices.

    \b
    Example:
      fabricate run train.py --nproc 4 --strategy zero3 --precision bf16
    """


@main.command(cls=Launching, context_settings={"ignore_unknown_options": True})
@launching
def run(**options: Any) -> None:
    """Run SCRIPT on this node's processes, through torchrun where there are several.

    The options below are recognised before and after SCRIPT. Every other option is SCRIPT's own; one of the same name,
    or of a name that looks like a mistake, goes after --. The exit code is SCRIPT's, or 75 when its fit was preempted and
    saved: start the same command again.

    \b
    Examples:
      fabricate run train.py --nproc 4 --strategy zero3 --learning-rate 0.1
      fabricate run train.py --nproc 4 -- --config data.yaml
      fabricate run train.py --nproc 8 --nnodes 2 --node-rank 0 --master-addr node1
      fabricate run train.py --config accelerate.yaml
    """
    _start(plan_only=False, **options)


@main.command(cls=Launching, context_settings={"ignore_unknown_options": True})
@click.option(
    "--dry-run",
    is_flag=True,
    help="Simulate updates on tensors without memory, and print the memory and communication they need.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="With --dry-run: find the largest micro-batch that fits into this memory per rank (80GB).",
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(1),
    metavar="N",
    help="With --dry-run and without --nnodes: ranks on one node. Default: 8 if that divides --nproc, else all.",
)
@launching
def plan(dry_run: bool, memory: str | None, ranks_per_node: int | None, **options: Any) -> None:
    """Run SCRIPT up to its first fit, print the plan, and stop.

    With --dry-run, one process tries a few updates on tensors that have no memory, as rank 0 of all that --nproc and --nnodes say, and
    prints what a rank needs and sends: memory by kind, collectives, the largest micro-batch.

    \b
    Examples:
      fabricate plan train.py --nproc 4 --strategy fsdp
      fabricate plan train.py --nproc 1024 --strategy fsdp:shard=8 --dry-run --memory 80GB
    """
    if dry_run:
        _become(*dry_run_of(options, memory, ranks_per_node))
    for option, value in (("--memory", memory), ("--ranks-per-node", ranks_per_node)):
        if value is not None:
            raise ConfigurationError(
                f"{option} {value} has no effect without --dry-run. Add --dry-run, or leave {option} out"
            )
    _start(plan_only=True, **options)


def _start(*, plan_only: bool, **options: Any) -> NoReturn:
    _become(*prepared(plan_only=plan_only, **options))


def _become(command: list[str], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # This process is replaced by torchrun or the script, without a parent process that waits.
    os.execve(command[0], command, environment)


main.add_command(plugins)
main.add_command(ckpt)
main.add_command(verify_resume)
main.add_command(check_invariance)
main.add_command(doctor)
main.add_command(report)
main.add_command(rows)
main.add_command(diff)
main.add_command(watch)
main.add_command(push)
