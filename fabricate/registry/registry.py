"""Names to objects: built-in and installed plugins, strategies, precisions and trackers, each with its origin.

Owns: the entry-point group `fabricate`, lookup of exact and qualified names with options, the manager of one Trainer. Must not know:
Accelerate, devices, the loop.

An installed distribution only offers names; it is not active. Built-in names never import third-party code.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fabricate.errors import ConfigurationError, FabricateError, PluginError, did_you_mean
from fabricate.hooks import EVENTS, PROJECT, REGISTRATIONS, Listener
from fabricate.launch.commands import listed_plugins
from fabricate.launch.unsupported import instead
from fabricate.precisions.base import Precision
from fabricate.registry import foreign_names
from fabricate.registry.hook_calls import Manager, Origin
from fabricate.registry.names import build, parse_name
from fabricate.registry.validation import check_part
from fabricate.strategies.base import Strategy

DISTRIBUTION = "fabricate-trainer"
BUILTIN = ("fabricate.strategies.builtin", "fabricate.precisions.builtin")
KINDS = {
    "strategy": "register_strategies",
    "precision": "register_precisions",
    "tracker": "register_trackers",
    "command": "register_commands",
}
_EXAMPLES = {"strategy": "fsdp:offload=cpu", "precision": "fp16:init_scale=1024"}


@dataclass(frozen=True)
class Offer:
    """One registered name: the factory of the object, a one-line summary, and the plugin that offers it."""

    kind: str
    name: str
    factory: Callable[..., Any] | str
    summary: str
    plugin: str
    origin: Origin

    def load(self) -> Callable[..., Any]:
        """The factory; if it is a string, it is imported now."""
        if not isinstance(self.factory, str):
            return self.factory
        module, _, attribute = self.factory.partition(":")
        try:
            loaded: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as exc:
            raise PluginError(
                f"{self.kind} {self.name!r} of plugin {self.plugin!r} ({self.origin}) cannot be loaded from {self.factory!r}: {exc}"
            ) from exc
        return loaded


@dataclass(frozen=True)
class PluginInfo:
    """A row of `fabricate plugins`. state: "built-in", "active", "available", "blocked" or "broken" (`reason`: why)."""

    name: str
    distribution: str
    version: str
    state: str
    reason: str
    offers: tuple[str, ...]


@dataclass(frozen=True)
class Checked:
    """A row of `fabricate plugins check`: an installed plugin, the time of its import, and its problems."""

    name: str
    distribution: str
    version: str
    milliseconds: float
    problems: tuple[str, ...]


def _entry_points() -> dict[str, list[importlib.metadata.EntryPoint]]:
    """Installed plugins by name, without imports. Two distributions with the same name are both in its list."""
    by_group: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in sorted(importlib.metadata.entry_points(group=PROJECT), key=lambda p: (p.name, p.value)):
        by_group.setdefault(point.name, []).append(point)
    return by_group


def _origin(point: importlib.metadata.EntryPoint) -> Origin:
    return Origin(point.dist.name, point.dist.version) if point.dist else Origin()


class Registry:
    """The plugins of one Trainer.

    `plugins`: objects (listeners, modules with hook implementations), names of installed plugins, names with options ("ema:decay=0.99"), or
    "no:name" to block one. FABRICATE_PLUGINS adds names. `tolerant` (for the command line): a named plugin that cannot be activated is
    recorded as broken, with the reason, instead of raising.
    """

    def __init__(self, plugins: Iterable[object] = (), *, tolerant: bool = False) -> None:
        self.manager = Manager()
        self._points = _entry_points()
        self._offers: dict[str, list[Offer]] = {}
        self._broken: dict[str, str] = {}
        self._consulted: set[str] = set()
        self._classes: set[str] = set()
        self._milliseconds: dict[str, float] = {}
        self._blocked: set[str] = set()
        self.active: list[tuple[str, object]] = []
        """Named or passed plugins in the order given; registered by `activate`."""
        for name in BUILTIN:
            self._collect(importlib.import_module(name), "fabricate", Origin(DISTRIBUTION, own_version()), "built-in")
        given = list(plugins) + listed_plugins(os.environ.get("FABRICATE_PLUGINS", ""))
        self._blocked = {p[3:] for p in given if isinstance(p, str) and p.startswith("no:")}
        for plugin in given:
            if isinstance(plugin, str) and plugin.startswith("no:"):
                continue
            try:
                self._add(plugin)
            except FabricateError as exc:
                if not (tolerant and isinstance(plugin, str)):
                    raise
                self._broken[plugin.partition(":")[0].strip() or plugin] = str(exc)

    def _add(self, plugin: object) -> None:
        """Add one entry of `plugins` to the active plugins. An installed plugin that only offers names is an error: it would do nothing."""
        name, plugin, origin = self._named(plugin) if isinstance(plugin, str) else self._passed(plugin)
        if any(name == taken for taken, _ in self.active):
            raise PluginError(f"plugins: {name!r} is listed twice; remove one")
        self.active.append((name, plugin))
        self.manager.origins[name] = origin
        self._collect(plugin, name, origin, "active")
        offered = [o for offers in self._offers.values() for o in offers if o.plugin == name]
        if offered and origin.distribution and not any(hasattr(plugin, hook) for hook in EVENTS):
            chosen = " or ".join(
                f"trackers=[{o.name!r}]" if o.kind == "tracker" else f"{o.kind}={o.name!r}" for o in offered
            )
            raise PluginError(
                f"plugins={name!r}: this plugin implements no hook, it only offers names; choose one with {chosen}"
            )

    def _named(self, text: str) -> tuple[str, object, Origin]:
        """The installed plugin that `text` names, built with its options: (name, plugin, origin)."""
        name, options = parse_name("plugins", text)
        if name in self._blocked:
            raise PluginError(f"plugins: {name!r} is requested and blocked by 'no:{name}'; remove one of them")
        plugin, origin = self._load(name)
        if inspect.isclass(plugin) or (callable(plugin) and not isinstance(plugin, Listener)):
            plugin = build(plugin, "plugin", name, options)
        elif options:
            raise PluginError(
                f"plugins={name!r}: this plugin takes no options, but {options} was given; leave the options out"
            )
        return name, plugin, origin

    def _passed(self, plugin: object) -> tuple[str, object, Origin]:
        """(name, plugin, origin) of an object that the user passed. The name is its own or that of its class, with a number if it is
        already taken."""
        if inspect.isclass(plugin):
            other = "" if issubclass(plugin, Listener) else foreign_names.use(plugin.__name__, foreign_names.PLUGINS)
            remedy = other or f"; pass an instance: {plugin.__name__}()"
            raise PluginError(f"plugins: {plugin.__name__} is a class{remedy}")
        if any(plugin is active for _, active in self.active):
            raise PluginError(f"plugins: this {type(plugin).__name__} object is listed twice; remove one")
        names = (getattr(plugin, "name", None), getattr(plugin, "__name__", None))
        name = next((n for n in names if n and isinstance(n, str)), type(plugin).__name__)
        taken = {n for n, _ in self.active}
        if name in taken:
            name = next(f"{name}#{n}" for n in range(2, 1000) if f"{name}#{n}" not in taken)
        return name, plugin, distribution_of(plugin)

    def _load(self, name: str) -> tuple[Any, Origin]:
        points = self._points.get(name, [])
        if not points:
            declared = sorted(self._points)
            raise PluginError(
                f"plugins={name!r}: no installed plugin has this name"
                f"{foreign_names.use(name, foreign_names.PLUGINS) or did_you_mean(name, declared)}; installed: "
                f"{', '.join(declared) or 'none'}"
            )
        if len(points) > 1:
            owners = " and ".join(str(_origin(p)) for p in points)
            raise PluginError(
                f"plugins={name!r} is offered by {owners}; uninstall one, or pass the object itself in plugins=[...]"
            )
        origin = _origin(points[0])
        try:
            return points[0].load(), origin
        except (Exception, SystemExit) as exc:  # a SystemExit of a plugin must not look like the end of the run
            raise PluginError(
                f"plugin {name!r} ({origin}, {points[0].value}) fails to import: {type(exc).__name__}: {exc}"
            ) from exc

    def _collect(self, plugin: object, name: str, origin: Origin, state: str) -> None:
        self._consulted.add(name)
        for kind, hook in KINDS.items():
            function = getattr(plugin, hook, None)
            if function is None:
                continue

            def register(offered: str, factory: Any, *, summary: str = "", kind: str = kind) -> None:
                if not isinstance(offered, str) or not offered.replace("-", "_").isidentifier():
                    raise PluginError(
                        f"plugin {name!r} ({origin}) registers the {kind} name {offered!r}; use letters, digits, - and _"
                    )
                self._offers.setdefault(f"{kind}:{offered}", []).append(
                    Offer(kind, offered, factory, summary, name, origin)
                )

            try:
                function(register)
            except (Exception, SystemExit) as exc:
                if state != "available":
                    raise PluginError(
                        f"plugin {name!r} ({origin}) fails in {hook}: {type(exc).__name__}: {exc}"
                    ) from exc
                self._broken[name] = f"{hook}: {type(exc).__name__}: {exc}"

    def _consult_installed(self) -> None:
        """Import every installed plugin whose offers are not known yet. A broken plugin is recorded with the reason."""
        for name, points in self._points.items():
            if name in self._consulted or name in self._blocked:
                continue
            self._consulted.add(name)
            for point in points:
                began = time.perf_counter()
                try:
                    loaded = point.load()
                except (Exception, SystemExit) as exc:
                    self._broken[name] = f"{point.value} fails to import: {type(exc).__name__}: {exc}"
                    continue
                finally:
                    self._milliseconds[name] = (time.perf_counter() - began) * 1000
                if inspect.isclass(loaded):
                    self._classes.add(name)
                else:
                    self._collect(loaded, name, _origin(point), "available")

    def names(self, kind: str) -> list[str]:
        """Every name of `kind` that is known so far; nothing is imported."""
        return sorted(key.partition(":")[2] for key in self._offers if key.startswith(f"{kind}:"))

    def find(self, kind: str, name: str, others: Collection[str] = ()) -> Offer:
        """The offer called `name` or "plugin/name". A built-in offer wins over all others. Installed plugins are imported only if no
        built-in or active plugin offers the name. `others`: further valid names of `kind`, for messages.

        Raises `ConfigurationError` for an unknown name (with the nearest known one), `PluginError` for a name that two plugins offer.
        """
        offers = self._offered_as(kind, name)
        if not offers:
            self._consult_installed()
            offers = self._offered_as(kind, name)
        if not offers:
            raise self._unknown(kind, name, others)
        if len(offers) > 1:
            bare = offers[0].name
            both = " and ".join(f"{o.plugin!r} ({o.origin})" for o in offers)
            raise PluginError(
                f"{kind}={name!r} is offered by {both}; choose with {offers[0].plugin}/{bare} or {offers[1].plugin}/{bare}"
            )
        return offers[0]

    def _offered_as(self, kind: str, name: str) -> list[Offer]:
        """The offers called `name` of the plugins imported so far; only the built-in offer, if there is one."""
        owner, _, bare = name.rpartition("/")
        offers = [o for o in self._offers.get(f"{kind}:{bare}", []) if not owner or o.plugin == owner]
        return [o for o in offers if o.plugin == PROJECT] or offers

    def _unknown(self, kind: str, name: str, others: Collection[str]) -> ConfigurationError:
        reasons = "".join(f"; plugin {n!r} is broken: {r}" for n, r in self._broken.items())
        if name in self._classes:
            reasons = f"; {name!r} is a plugin that implements hooks: use plugins=[{name!r}]"
        names, bare = sorted({*self.names(kind), *others}), name.rpartition("/")[2]
        hint = _hint(kind, bare) or did_you_mean(bare, names)
        argument = "trackers" if kind == "tracker" else kind
        if os.environ.get(variable := f"FABRICATE_{kind.upper()}", "").partition(":")[0] == name:
            reasons += f". {variable} sets it, as `fabricate run --{kind}` does; put an option of the script after --"
        return ConfigurationError(f"{argument}={name!r} is not known{hint}; known: {', '.join(names)}{reasons}")

    def resolve(self, kind: str, value: object) -> tuple[Any, Offer | None]:
        """`value` as given to `strategy=` or `precision=`: an object, a name, or a name with options. Returns the object
        and the offer it came from (None for an object)."""
        base: type = {"strategy": Strategy, "precision": Precision}[kind]
        if isinstance(value, base):
            check_part(kind, value, base)
            return value, None
        if inspect.isclass(value) and issubclass(value, base):
            raise ConfigurationError(
                f"{kind}={value.__name__} is a class; pass an object, {value.__name__}(), or a name"
            )
        if not isinstance(value, str):
            raise ConfigurationError(
                f"{kind}={value!r}{_hint(kind, str(value))}: give a name ({', '.join(self.names(kind))}), a name with "
                f"options ({_EXAMPLES[kind]!r}) or a {base.__name__} object"
            )
        name, options = parse_name(kind, value)
        offer = self.find(kind, name)
        built = build(offer.load(), kind, name, options)
        if not isinstance(built, base):
            raise PluginError(
                f"{kind} {name!r} of plugin {offer.plugin!r} ({offer.origin}) made a {type(built).__name__}, not a {base.__name__}"
            )
        check_part(kind, built, base)
        return built, offer

    def tracker(self, text: str, others: Collection[str] = ()) -> Callable[[str, str], Any]:
        """A function of a run name and a logging directory that makes the registered tracker `text` (a name, possibly with options).
        `others`: further valid names, for messages."""
        name, options = parse_name("trackers", text)
        offer = self.find("tracker", name, others)

        def make(run_name: str, logging_dir: str) -> Any:
            return build(offer.load(), "tracker", name, options, run_name=run_name, logging_dir=logging_dir)

        return make

    def offered(self, kind: str) -> list[Offer]:
        """All offers of `kind`. Imports all installed plugins."""
        self._consult_installed()
        return [offer for key, offers in sorted(self._offers.items()) if key.startswith(f"{kind}:") for offer in offers]

    def activate(self, listeners: Iterable[tuple[str, object, Origin]]) -> Manager:
        """Register `listeners` (strategy, precision, module), the active plugins and fabricate's own, in calling order."""
        listed = [*listeners, *((n, p, self.manager.origins[n]) for n, p in self.active)]
        for name, plugin, origin in reversed(listed):  # pluggy calls the listener that was registered last first
            self.manager.add(plugin, name, origin)
        return self.manager

    def describe(self) -> list[PluginInfo]:
        """Every built-in, active and installed plugin. Imports the installed ones, because only then their offers are known."""
        self._consult_installed()
        active = {name for name, _ in self.active}
        rows = []
        for name in [PROJECT, *sorted({*self._points, *active, *self._blocked, *self._broken} - {PROJECT})]:
            origin = Origin(DISTRIBUTION, own_version()) if name == PROJECT else self.manager.origins.get(name)
            if origin is None:
                origin = _origin(self._points[name][0]) if name in self._points else Origin()
            offers = tuple(
                key for key, own_offers in sorted(self._offers.items()) if any(o.plugin == name for o in own_offers)
            )
            offers += (f"plugin:{name}",) if name in self._classes | active and not offers else ()
            state = (
                "built-in"
                if name == PROJECT
                else "active"
                if name in active
                else "blocked"
                if name in self._blocked
                else "available"
            )
            if name in self._broken:
                state = "broken"
            rows.append(
                PluginInfo(name, origin.distribution, origin.version, state, self._broken.get(name, ""), offers)
            )
        return rows

    def check(self, taken: Mapping[str, Collection[str]]) -> list[Checked]:
        """Import every installed plugin, build its offers that need no options, and list the problems. `taken`: by kind, names that win
        over plugins, in addition to the built-in ones."""
        self._consult_installed()
        rows = []
        for name, points in self._points.items():
            for point in points:
                origin = _origin(point)
                problems = [self._broken[name]] if name in self._broken else []
                problems += [
                    f"{_origin(p)} has a plugin of the same name; uninstall one" for p in points if p is not point
                ]
                own = [o for offers in self._offers.values() for o in offers if (o.plugin, o.origin) == (name, origin)]
                for offer in own:
                    problems += self._clashes(offer, taken.get(offer.kind, ()))
                if not problems:
                    problems += _trials(name, point.load(), own)
                milliseconds = self._milliseconds.get(name, 0.0)
                rows.append(Checked(name, origin.distribution, origin.version, milliseconds, tuple(problems)))
        return rows

    def _clashes(self, offer: Offer, taken: Collection[str]) -> Iterable[str]:
        same = [o for o in self._offers[f"{offer.kind}:{offer.name}"] if o is not offer]
        if offer.name in taken or any(o.plugin == PROJECT for o in same):
            yield f"{offer.kind} {offer.name!r} is shadowed by the built-in one; choose it as {offer.plugin}/{offer.name}"
        for other in same:
            if other.plugin != PROJECT:
                yield (
                    f"{offer.kind} {offer.name!r} is offered by {other.plugin!r} ({other.origin}) too; choose with "
                    f"{offer.plugin}/{offer.name} or {other.plugin}/{other.name}"
                )


def _hint(kind: str, name: str) -> str:
    """What to use instead of `name`, if a strategy, precision or tracker has this name in another framework; as the end of an error."""
    if kind == "precision" and name in foreign_names.NO_PRECISION:
        return f"; {foreign_names.NO_PRECISION[name]}"
    if kind == "tracker":
        return foreign_names.use(name, foreign_names.TRACKERS)
    names = {"strategy": foreign_names.STRATEGIES, "precision": foreign_names.PRECISIONS}.get(kind, {})
    if name.lower() in names:
        return f"; use {kind}={names[name.lower()]!r}"
    return instead(name) if kind == "strategy" else ""


def _trials(name: str, plugin: Any, offers: Iterable[Offer]) -> Iterable[str]:
    """The errors from building the plugin and its offers as a run would, for those that need no options."""
    candidates: list[tuple[str, Callable[[], Any]]] = [(f"plugin {name!r}", lambda: plugin)]
    candidates += [(f"{o.kind} {o.name!r}", o.load) for o in offers if o.kind in ("strategy", "precision")]
    for what, load in candidates:
        try:
            loaded = load()
            if not inspect.isclass(loaded) and what.startswith("plugin"):
                candidate = loaded
            elif any(
                p.default is p.empty and p.kind is not p.VAR_KEYWORD
                for p in inspect.signature(loaded).parameters.values()
            ):
                continue
            else:
                candidate = loaded()
            Manager().add(candidate, name)
        except ConfigurationError:
            continue  # an option is missing, which is not a fault of the plugin
        except (Exception, SystemExit) as exc:
            yield f"{what}: {type(exc).__name__}: {exc}"


def progress_bar(shown: Collection[str] = ()) -> Any:
    """The built-in progress display; see `ProgressBar`."""
    return importlib.import_module("fabricate.callbacks.progress_bar").ProgressBar(shown)


def distribution_of(plugin: object) -> Origin:
    """The installed distribution that the class of `plugin` comes from; empty for a class of the script."""
    package = type(plugin).__module__.partition(".")[0]
    if package == "fabricate":
        return Origin(DISTRIBUTION, own_version())
    for point in importlib.metadata.entry_points(group=PROJECT):
        if point.value.partition(":")[0].partition(".")[0] == package:
            return _origin(point)
    return Origin()


def own_version() -> str:
    """The version of fabricate."""
    version: str = importlib.import_module("fabricate").__version__
    return version


__all__ = ["REGISTRATIONS", "Checked", "Offer", "PluginInfo", "Registry", "distribution_of", "own_version"]
