"""The options with which a command starts a script on its ranks, and what they come to.

Owns: the options, and that they agree with a configuration file. Must not know what the command is for; imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from fabricate.configuration.launched import Launched, check_launched, merged, read_setting, variables
from fabricate.errors import ConfigurationError
from fabricate.launch import commands
from fabricate.launch.config_files import ConfigFile, read_config
from fabricate.launch.settings import requests
from fabricate.registry import foreign_names

__all__ = ["Launching", "launching", "prepared"]


class Launching(click.Command):
    """A command that starts SCRIPT: an option that looks like one of its own, or of another launcher, is not passed on."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {
            option
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option)
            for option in parameter.opts
        }
        for argument in args[: args.index("--")] if "--" in args else args:
            option = argument.partition("=")[0]
            dashed = option.replace("_", "-")
            if not option.startswith("--") or option in own:
                continue
            if hint := f"; use {dashed}" if dashed in own else foreign_names.hint(dashed, foreign_names.RUN, own):
                raise click.UsageError(
                    f"{option} is not an option of fabricate{hint}. An option of SCRIPT goes after --"
                )
        return super().parse_args(ctx, args)


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


class _Count(click.ParamType[int | str]):
    """A number of processes, or a word for torchrun."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value in ("gpu", "auto"):
            return str(value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of processes; give one, 'gpu' or 'auto'", param, ctx)


_OPTIONS = (
    _single(
        "--nproc",
        type=_Count(),
        metavar="N|gpu|auto",
        help="Processes on this node, or one per device, counted by torchrun; default: 1, or what the config file says.",
    ),
    _single("--nnodes", type=int, metavar="N", help="Nodes in all; start the same command on each."),
    _single("--node-rank", type=int, metavar="I", help="Which of the nodes this is, from 0."),
    _single("--master-addr", metavar="HOST", help="The host of node rank 0."),
    _single("--master-port", type=int, metavar="PORT", help="A free port there; default: 29500."),
    _single(
        "--shutdown-timeout",
        type=click.IntRange(min=0),
        metavar="SECONDS",
        help="How long ranks have to save and end, once told to or once another one failed; default: 30.",
    ),
    _single(
        "--numa-binding",
        type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
        help="torchrun's option: which cores near its GPU each rank is bound to.",
    ),
    _single("--strategy", metavar="NAME", help="ddp, fsdp, zero3, ..., with options: zero3:offload_optimizer=cpu."),
    _single("--precision", metavar="NAME", help="fp32, bf16, fp16, ..."),
    click.option(
        "--plugin", "plugins", multiple=True, metavar="NAME", help="Activate an installed plugin; repeatable."
    ),
    _single(
        "--config",
        metavar="FILE",
        help="An Accelerate YAML, a DeepSpeed JSON, or a YAML of Trainer arguments, told apart by content.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="An argument of the Trainer that SCRIPT leaves out; repeatable: --set max_steps=100 --set 'save_every=1 epoch'.",
    ),
    click.argument("script"),
    click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED),
)


def launching(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that start a script, and SCRIPT with its own arguments."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def prepared(
    *,
    script: str,
    arguments: Sequence[str],
    config: str | None,
    plugins: Sequence[str],
    nproc: int | str | None,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    shutdown_timeout: int | None,
    numa_binding: str | None,
    strategy: str | None,
    precision: str | None,
    settings: Sequence[str] = (),
    plan_only: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that the options above ask for."""
    if not Path(script).is_file():
        raise ConfigurationError(f"SCRIPT {script!r} is not a file; give a Python script, before its own options")
    file = read_config(config) if config is not None else ConfigFile("")
    nnodes = _agreed("--nnodes", nnodes, file.path, "num_machines", file.num_nodes) or 1
    if file.num_processes and file.num_processes % nnodes:
        raise ConfigurationError(
            f"{file.path}: num_processes is {file.num_processes}, which {nnodes} nodes cannot share equally; change one"
        )
    per_node = file.num_processes // nnodes if file.num_processes else None
    nproc = _agreed("--nproc", nproc, file.path, "num_processes", per_node)
    nproc = 1 if nproc is None else nproc
    command = commands.command(
        script,
        arguments,
        nproc=nproc,
        nnodes=nnodes,
        node_rank=_agreed("--node-rank", node_rank, file.path, "machine_rank", file.node_rank) or 0,
        master_addr=_agreed("--master-addr", master_addr, file.path, "main_process_ip", file.master_addr),
        master_port=_agreed("--master-port", master_port, file.path, "main_process_port", file.master_port),
        numa_binding=numa_binding,
    )
    given = _arguments(file, settings)
    strategy = _same("strategy", strategy, given)
    precision = _same("precision", precision, given)
    environment = commands.environment(
        os.environ,
        nproc=nproc,
        strategy=_agreed("--strategy", strategy, file.path, "the strategy", file.strategy),
        precision=_agreed("--precision", precision, file.path, "mixed_precision", file.precision),
        plugins=plugins,
        shutdown_timeout=shutdown_timeout,
        plan_only=plan_only,
        variables=file.variables | variables(given),
    )
    requests(environment)  # contradictions are reported here, once, not by every rank
    if file.unused:
        click.echo(f"note: {file.path}: not used by fabricate: {', '.join(file.unused)}", err=True)
    return command, environment


def _arguments(file: ConfigFile, settings: Sequence[str]) -> dict[str, Launched]:
    """The arguments of the Trainer in a configuration file and in --set."""
    from_file = {name: check_launched(name, value, file.path) for name, value in file.arguments.items()}
    set_here = [{name: check_launched(name, value, "--set")} for name, value in map(read_setting, settings)]
    return merged(from_file, *set_here)


def _same(name: str, option: str | None, given: dict[str, Launched]) -> str | None:
    """Take the strategy or the precision out of `given`: it is an option too. Raises ConfigurationError where both are set and differ."""
    if name not in given:
        return option
    value, source = given.pop(name)
    if option is not None and option != value:
        raise ConfigurationError(f"--{name} {option} and {source} {name}={value} differ; set one of them")
    return str(value)


def _agreed(option: str, given: Any, path: str, key: str, configured: Any) -> Any:
    """The command line's value or the config file's. Raises ConfigurationError where both are set and differ."""
    if given is not None and configured is not None and given != configured:
        raise ConfigurationError(
            f"{option} {given} and config file {path!r} ({key}: {configured}) differ; set one of them"
        )
    return configured if given is None else given
