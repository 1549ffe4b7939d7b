"""The `fabricate` command: start a script, show its plan; the other commands are added here.

Owns the options, what is printed and the exit codes. It must not know the loop or Accelerate, and imports no torch: a
command line answers at once. Exit codes: 2 for a wrong command, 1 for a failed check, and that of the script for `run`
and `plan`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from fabricate import launch
from fabricate.cli_checkpoints import ckpt
from fabricate.cli_plugins import PluginCommands, plugins
from fabricate.errors import ConfigurationError, FabricateError


class _Group(PluginCommands):
    """A group that prints fabricate's own errors as one line; `--debug` lets them through with their traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FabricateError as exc:
            if ctx.params["debug"]:
                raise
            click.echo(f"error: {exc}", err=True)
            ctx.exit(2)


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


def _once(ctx: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
    """The value of an option that may be given on either side of SCRIPT, and means one thing."""
    if len(set(values)) > 1:
        given = " and ".join(map(str, values))
        raise click.UsageError(
            f"{parameter.opts[0]} is given as {given}; give it once. SCRIPT's own options go after --"
        )
    return values[0] if values else None


def _single(*names: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(*names, multiple=True, callback=_once, **settings)


_LAUNCH_OPTIONS = (
    _single("--nproc", type=int, metavar="N", help="Processes on this node; default: 1, or what the config file says."),
    _single("--nnodes", type=int, metavar="N", help="Nodes in all; start the same command on each."),
    _single("--node-rank", type=int, metavar="I", help="Which of the nodes this is, from 0."),
    _single("--master-addr", metavar="HOST", help="The host of node rank 0."),
    _single("--master-port", type=int, metavar="PORT", help="A free port there; default: 29500."),
    _single("--strategy", metavar="NAME", help="ddp, fsdp, zero3, ..., with options: zero3:offload_optimizer=cpu."),
    _single("--precision", metavar="NAME", help="fp32, bf16, fp16, ..."),
    click.option(
        "--plugin", "plugins", multiple=True, metavar="NAME", help="Activate an installed plugin; repeatable."
    ),
    _single("--config", metavar="FILE", help="An Accelerate YAML or a DeepSpeed JSON, told apart by content."),
    click.argument("script"),
    click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED),
)


def _launching(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_LAUNCH_OPTIONS):
        function = option(function)
    return function


@main.command(context_settings={"ignore_unknown_options": True})
@_launching
def run(**options: Any) -> None:
    """Run SCRIPT on this node's processes, through torchrun where there are several.

    The options below are recognised before and after SCRIPT. Every other option is SCRIPT's own; one of the same name
    goes after --. The exit code is SCRIPT's, or 75 when its fit was preempted and saved: start the same command again.

    \b
    Examples:
      fabricate run train.py --nproc 4 --strategy zero3 --learning-rate 0.1
      fabricate run train.py --nproc 4 -- --config data.yaml
      fabricate run train.py --nproc 8 --nnodes 2 --node-rank 0 --master-addr node1
      fabricate run train.py --config accelerate.yaml
    """
    _start(plan_only=False, **options)


@main.command(context_settings={"ignore_unknown_options": True})
@_launching
def plan(**options: Any) -> None:
    """Run SCRIPT up to its first fit, print the plan, and stop.

    \b
    Example:
      fabricate plan train.py --nproc 4 --strategy fsdp
    """
    _start(plan_only=True, **options)


def _start(
    *,
    plan_only: bool,
    script: str,
    arguments: Sequence[str],
    config: str | None,
    plugins: Sequence[str],
    nproc: int | None,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    strategy: str | None,
    precision: str | None,
) -> NoReturn:
    if not Path(script).is_file():
        raise ConfigurationError(f"SCRIPT {script!r} is not a file; give a Python script, before its own options")
    file = launch.read_config(config) if config is not None else launch.ConfigFile("")
    nnodes = _agreed("--nnodes", nnodes, file.path, "num_machines", file.num_nodes) or 1
    if file.num_processes and file.num_processes % nnodes:
        raise ConfigurationError(
            f"{file.path}: num_processes is {file.num_processes}, which {nnodes} nodes cannot share equally; change one"
        )
    per_node = file.num_processes // nnodes if file.num_processes else None
    nproc = _agreed("--nproc", nproc, file.path, "num_processes", per_node)
    nproc = 1 if nproc is None else nproc
    command = launch.command(
        script,
        arguments,
        nproc=nproc,
        nnodes=nnodes,
        node_rank=_agreed("--node-rank", node_rank, file.path, "machine_rank", file.node_rank) or 0,
        master_addr=_agreed("--master-addr", master_addr, file.path, "main_process_ip", file.master_addr),
        master_port=_agreed("--master-port", master_port, file.path, "main_process_port", file.master_port),
    )
    environment = launch.environment(
        os.environ,
        nproc=nproc,
        strategy=_agreed("--strategy", strategy, file.path, "the strategy", file.strategy),
        precision=_agreed("--precision", precision, file.path, "mixed_precision", file.precision),
        plugins=plugins,
        plan_only=plan_only,
        variables=file.variables,
    )
    launch.requests(environment)  # what contradicts itself is told here, once, and not by every rank
    if file.unused:
        click.echo(f"note: {file.path}: not used by fabricate: {', '.join(file.unused)}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # Replaced, not wrapped: this process goes on as torchrun, or as the script itself.
    os.execve(command[0], command, environment)


def _agreed(option: str, given: Any, path: str, key: str, configured: Any) -> Any:
    """The command line's value or the config file's. Raises ConfigurationError where both are set and differ."""
    if given is not None and configured is not None and given != configured:
        raise ConfigurationError(
            f"{option} {given} and config file {path!r} ({key}: {configured}) differ; set one of them"
        )
    return configured if given is None else given


main.add_command(plugins)
main.add_command(ckpt)
