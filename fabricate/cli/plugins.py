"""`fabricate plugins` and the commands that plugins add. Imports no torch, and plugins only when they are needed.

Owns: the output about plugins. A broken plugin must never break the command line. Must not know: what a plugin does.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fabricate.cli.plugin_template import KINDS, write
from fabricate.cli.tables import print_table
from fabricate.errors import ConfigurationError, FabricateError, PluginError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabricate.registry.registry import Registry


class PluginCommands(click.Group):
    """A group that looks up names in the installed plugins if it has no such command itself."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        from fabricate.registry.registry import Registry

        offered = {offer.name for offer in Registry(tolerant=True).offered("command")}
        return [*super().list_commands(ctx), *sorted(offered - self.commands.keys())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or _offered_command(cmd_name)


def _offered_command(name: str) -> click.Command | None:
    from fabricate.registry.registry import Registry

    registry = Registry(tolerant=True)
    if name.rpartition("/")[2] not in {offer.name for offer in registry.offered("command")}:
        return None
    try:
        offer = registry.find("command", name)
        command = offer.load()()
        if not isinstance(command, click.Command):
            raise PluginError(f"its function returned a {type(command).__name__}, not a click.Command")
    except (Exception, SystemExit) as exc:
        return _broken_command(name, exc)
    return command


def _broken_command(name: str, reason: BaseException) -> click.Command:
    """A replacement for a command that cannot be built: its help is the reason, and calling it is an error."""
    text = str(reason) if isinstance(reason, FabricateError) else f"{type(reason).__name__}: {reason}"

    def fail(arguments: tuple[str, ...]) -> None:
        raise PluginError(f"the command {name!r} of a plugin cannot be loaded: {text}. Update or uninstall the plugin")

    argument = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    settings = {"ignore_unknown_options": True}
    return click.Command(name, callback=fail, params=[argument], context_settings=settings, help=f"(broken: {text})")


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--order", "hook", metavar="HOOK", help="Print the listeners of HOOK in the order in which they are called."
)
@click.option(
    "--plugin", "names", multiple=True, metavar="NAME", help="With --order: activate it; repeatable, in order."
)
@click.option("--strategy", metavar="NAME", default="single", help="With --order: the run's strategy; default: single.")
@click.option("--precision", metavar="NAME", default="fp32", help="With --order: the run's precision; default: fp32.")
@click.pass_context
def plugins(ctx: click.Context, /, as_json: bool, hook: str | None, names: tuple[str, ...], **parts: str) -> None:
    """List what is built in and installed: names on offer, distribution, version, state.

    An installed plugin is active once it is named: Trainer(plugins=["ema"]), --plugin ema or FABRICATE_PLUGINS=ema.

    \b
    Examples:
      fabricate plugins --json
      fabricate plugins --order on_step --plugin ema --strategy diloco
    """
    from fabricate.registry.registry import Registry

    if ctx.invoked_subcommand is not None:
        return
    if hook is not None:
        rows = _order(Registry(names), hook, parts)
        columns: Sequence[str] = ("order", "plugin", "distribution", "how")
    elif names:
        raise click.UsageError("--plugin has an effect only with --order. Add --order HOOK")
    else:
        plugins = Registry(tolerant=True).describe()
        columns = ("name", "distribution", "version", "offers", "state", "reason")
        rows = [{**dataclasses.asdict(row), "offers": list(row.offers)} for row in plugins]
    _show(columns, rows, as_json)


def _show(columns: Sequence[str], rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    cells = [["\n".join(c) if isinstance(c := row[name], list) else str(c) for name in columns] for row in rows]
    print_table(columns, cells)


def _order(registry: Registry, hook: str, parts: dict[str, str]) -> list[dict[str, Any]]:
    from fabricate.hooks import ACTIONS, EVENTS, PROJECT, Callback, hookimpl
    from fabricate.registry import foreign_names
    from fabricate.registry.hook_calls import Origin
    from fabricate.registry.registry import progress_bar

    if hook not in EVENTS:
        hint = foreign_names.use(hook, foreign_names.HOOKS) or did_you_mean(hook, EVENTS)
        raise PluginError(f"--order {hook}: fabricate has no such hook{hint}")

    def stand_in(kind: type) -> Any:
        """An object that implements the hook in place of the module, or (if `kind` is object) last, in place of the loop."""

        def listener(self: object) -> None: ...

        return type("StandIn", (kind,), {hook: hookimpl(trylast=kind is object)(listener)})()

    listeners = []
    for kind, text in parts.items():
        part, offer = registry.resolve(kind, text)
        listeners.append((f"{kind}/{part.name}", part, offer.origin if offer else Origin()))
    listeners.append(("module", stand_in(Callback), Origin()))
    if hook in ACTIONS:
        registry.manager.add(stand_in(object), PROJECT)
    elif hook == "on_eval_end":
        listeners.append((PROJECT, stand_in(Callback), Origin()))
    registry.manager.add(progress_bar(), "progress_bar")
    manager = registry.activate(listeners)
    notes = {
        "module": "if it overrides the hook",
        PROJECT: "the work itself" if hook in ACTIONS else "adds what the module logged",
    }
    rows: list[dict[str, Any]] = []
    for implementation in reversed(getattr(manager.hook, hook).get_hookimpls()):
        marks = [mark for mark in ("wrapper", "tryfirst", "trylast") if getattr(implementation, mark)]
        name = implementation.plugin_name
        how = ", ".join(filter(None, [*marks, notes.get(name, "")]))
        origin = "" if name in notes else str(manager.origins[name])
        rows.append({"order": len(rows) + 1, "plugin": name, "distribution": origin, "how": how})
    return rows


@plugins.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def check(ctx: click.Context, as_json: bool) -> None:
    """Import every installed plugin and tell what is wrong: broken ones, clashes, shadowed names. Exit code 1 if any.

    Milliseconds are those of the import, on top of what earlier rows imported.

    \b
    Example:
      fabricate plugins check
    """
    from fabricate.registry.registry import Registry

    registry = Registry(tolerant=True)
    root = ctx.find_root().command
    taken: dict[str, list[str]] = {"command": list(root.commands) if isinstance(root, click.Group) else []}
    if registry.offered("tracker"):
        from fabricate.distributed.trackers import tracker_names

        taken["tracker"] = tracker_names()
    plugins = registry.check(taken)
    if not plugins and not as_json:
        click.echo("no plugins are installed")
        return
    rows = [
        {**dataclasses.asdict(row), "milliseconds": round(row.milliseconds), "problems": list(row.problems)}
        for row in plugins
    ]
    _show(("name", "distribution", "version", "milliseconds", "problems"), rows, as_json)
    if any(row.problems for row in plugins):
        ctx.exit(1)


@plugins.command()
@click.argument("name")
@click.option("--kind", type=click.Choice(KINDS), required=True, help="What the plugin adds.")
@click.option(
    "--into",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="Where to put it; default: here.",
)
def new(name: str, kind: str, into: Path) -> None:
    """Write the distribution fabricate-NAME: a plugin of one KIND that runs, with its tests.

    \b
    Example:
      fabricate plugins new lookahead --kind callback
    """
    from fabricate import __version__
    from fabricate.registry.registry import KINDS as REGISTERED
    from fabricate.registry.registry import Registry

    if kind in REGISTERED and name in Registry(tolerant=True).names(kind):
        raise ConfigurationError(
            f"NAME {name!r}: a built-in {kind} has this name and would be used instead. Choose another name"
        )
    root = write(name, kind, into, __version__)
    click.echo(f"wrote {root}\n  pip install -e '{root}[test]'\n  pytest {root}")
