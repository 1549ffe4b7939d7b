"""The options with which a command starts a script on its ranks, and the command line and environment that follow from them.

Owns: the options, and the check that they agree with a configuration file. Must not know: the purpose of the command. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from fabricate.configuration.launched import Launched, check_launched, merged, read_setting, variables
from fabricate.errors import ConfigurationError
from fabricate.launch import commands
from fabricate.launch.config_files import ConfigFile, read_config
from fabricate.launch.settings import requests
from fabricate.launch.torchrun_variables import read_pod, several_ranks
from fabricate.registry import foreign_names

__all__ = ["Launching", "launching", "places", "prepared"]


class Launching(click.Command):
    """A command that starts SCRIPT. An option that resembles one of its own, or belongs to another launcher, is a usage error."""

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
                    f"{option} is not an option of fabricate{hint}. Put an option of SCRIPT after --"
                )
        return super().parse_args(ctx, args)


def _once(ctx: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
    """The value of an option, which may be given before and after SCRIPT. Different values are a usage error."""
    if len(set(values)) > 1:
        given = " and ".join(map(str, values))
        raise click.UsageError(
            f"{parameter.opts[0]} is given with several values: {given}. Give it once. Put options of SCRIPT after --"
        )
    return values[0] if values else None


def _single(*names: str, **settings: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(*names, multiple=True, callback=_once, **settings)


class _Count(click.ParamType[int | str]):
    """A number of processes, or 'gpu' or 'auto', which torchrun resolves."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value in ("gpu", "auto"):
            return str(value)
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of processes. Give a number, 'gpu' or 'auto'", param, ctx)


_OPTIONS = (
    _single(
        "--nproc",
        type=_Count(),
        metavar="N|gpu|auto",
        help="Processes on this node; gpu or auto: one per device. Default: the number in the config file, else 1.",
    ),
    _single("--nnodes", type=int, metavar="N", help="Number of nodes; start the same command on each."),
    _single("--node-rank", type=int, metavar="I", help="The rank of this node, from 0."),
    _single("--master-addr", metavar="HOST", help="The host of node rank 0."),
    _single("--master-port", type=int, metavar="PORT", help="A free port there; default: 29500."),
    _single(
        "--shutdown-timeout",
        type=click.IntRange(min=0),
        metavar="SECONDS",
        help="Time for the ranks to save and end after a signal to stop or the failure of another rank; default: 30.",
    ),
    _single(
        "--max-restarts",
        type=click.IntRange(min=0),
        metavar="N",
        help="How often all ranks are restarted after one of them failed; a script with a run_dir resumes. Default: 0.",
    ),
    _single(
        "--numa-binding",
        type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
        help="Bind each rank to the cores near its GPU, as torchrun's option of this name does.",
    ),
    _single(
        "--strategy", metavar="NAME", help="ddp, fsdp, zero3, ...; options follow a colon: zero3:offload_optimizer=cpu."
    ),
    _single("--precision", metavar="NAME", help="fp32, bf16, fp16, ..."),
    click.option(
        "--plugin", "plugins", multiple=True, metavar="NAME", help="Activate an installed plugin; repeatable."
    ),
    _single(
        "--config",
        metavar="FILE",
        help="An Accelerate YAML, a DeepSpeed JSON, or a YAML of Trainer arguments; the content decides which.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="An argument of the Trainer that SCRIPT does not set; repeatable: --set max_steps=100 --set 'save_every=1 epoch'.",
    ),
    click.argument("script"),
    click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED),
)


def launching(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options for starting a script to a command, and SCRIPT with its arguments."""
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
    max_restarts: int | None,
    numa_binding: str | None,
    strategy: str | None,
    precision: str | None,
    settings: Sequence[str] = (),
    plan_only: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that follow from the options above."""
    if not Path(script).is_file():
        raise ConfigurationError(
            f"SCRIPT {script!r} is not a file. Give a Python script, before the options of the script"
        )
    file, from_file = _read(config, script)
    where = places(file, nproc, nnodes, node_rank, master_addr, master_port)
    command = commands.command(script, arguments, **where, numa_binding=numa_binding, max_restarts=max_restarts or 0)
    given = merged(
        from_file, *({name: check_launched(name, value, "--set")} for name, value in map(read_setting, settings))
    )
    strategy = _same("strategy", strategy, given)
    precision = _same("precision", precision, given)
    environment = commands.environment(
        os.environ,
        nproc=where["nproc"],
        strategy=_agreed("--strategy", strategy, file.says("the strategy", file.strategy)),
        precision=_agreed("--precision", precision, file.says("mixed_precision", file.precision)),
        plugins=plugins,
        shutdown_timeout=shutdown_timeout,
        max_restarts=max_restarts or 0,
        plan_only=plan_only,
        variables=file.variables | variables(given),
    )
    requests(environment)  # report contradictions here, once, and not on every rank
    if file.unused:
        click.echo(f"note: {file.path}: not used by fabricate: {', '.join(file.unused)}", err=True)
    return command, environment


def _read(config: str | None, script: str) -> tuple[ConfigFile, dict[str, Launched]]:
    """A configuration file, and the arguments of the Trainer in it."""
    if config is None:
        return ConfigFile(""), {}
    try:
        file = read_config(config)
        return file, {name: check_launched(name, value, file.path) for name, value in file.arguments.items()}
    except ConfigurationError as exc:
        raise ConfigurationError(
            f"{exc}. If --config is an option of the script, put it after --: fabricate run {script} -- --config {config}"
        ) from exc


def _same(name: str, option: str | None, given: dict[str, Launched]) -> str | None:
    """The strategy or the precision, from the option or from `given`. Raises ConfigurationError if both are set and differ."""
    if name not in given:
        return option
    value, source = given[name]
    if option is not None and option != value:
        raise ConfigurationError(
            f"--{name} {option} and {source} {name}={value} contradict each other. Set only one of them"
        )
    return str(value)


def places(
    file: ConfigFile,
    nproc: int | str | None,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
) -> dict[str, Any]:
    """The numbers of ranks and nodes and their address, as arguments of `commands.command`: from the options, the configuration file and
    torchrun's variables. Raises ConfigurationError if these contradict each other."""
    pod = read_pod(os.environ)
    nnodes = _agreed("--nnodes", nnodes, file.says("num_machines", file.num_nodes), _pod("PET_NNODES", pod.nnodes)) or 1
    if file.num_processes and file.num_processes % nnodes:
        raise ConfigurationError(
            f"{file.path}: num_processes={file.num_processes} is not a multiple of the number of nodes, {nnodes}. Change one of them"
        )
    per_node = file.num_processes // nnodes if file.num_processes else None
    nproc = _agreed("--nproc", nproc, file.says("num_processes", per_node), _pod("PET_NPROC_PER_NODE", pod.nproc))
    if several_ranks(os.environ):
        names = ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("PET_"))
        click.echo(f"note: the number of ranks and their address come from environment variables: {names}", err=True)
    return {
        "nproc": 1 if nproc is None else nproc,
        "nnodes": nnodes,
        "node_rank": _agreed(
            "--node-rank", node_rank, file.says("machine_rank", file.node_rank), _pod("PET_NODE_RANK", pod.node_rank)
        )
        or 0,
        "master_addr": _agreed(
            "--master-addr",
            master_addr,
            file.says("main_process_ip", file.master_addr),
            _pod("PET_MASTER_ADDR", pod.master_addr),
        ),
        "master_port": _agreed(
            "--master-port",
            master_port,
            file.says("main_process_port", file.master_port),
            _pod("PET_MASTER_PORT", pod.master_port),
        ),
    }


def _pod(name: str, value: Any) -> tuple[str, Any]:
    return f"{name}={value}", value


def _agreed(option: str, given: Any, *others: tuple[str, Any]) -> Any:
    """The value that is set on the command line or elsewhere. others: (source, value), with None for unset. Raises ConfigurationError if
    two values differ."""
    named = [(source, value) for source, value in [(f"{option} {given}", given), *others] if value is not None]
    for (first, one), (second, other) in pairwise(named):
        if one != other:
            raise ConfigurationError(f"{first} and {second} contradict each other. Set only one of them")
    return named[0][1] if named else None
