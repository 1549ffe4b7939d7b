"""The plugin manager of one Trainer, and hook calls resolved up front.

Owns: registration with its checks, the order of listeners, call lists compiled once per set of plugins, and the note that
names the plugin when one raises. Must not know: what a strategy or a checkpoint is.

Order of the listeners of a hook, the same on every rank: wrappers outermost, then strategy, precision, module, the
plugins in the order they were listed, then what fabricate ships. `tryfirst` and `trylast` move a listener as in pluggy.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pluggy

from fabricate.errors import PluginError, did_you_mean
from fabricate.hooks import (
    ACTIONS,
    EVENTS,
    FOREIGN,
    HOOKS,
    PER_LISTENER,
    PROJECT,
    REGISTRATIONS,
    Callback,
    Events,
    Listener,
    Registrations,
)

Call = Callable[..., Any]


@dataclass(frozen=True)
class Origin:
    """Where a registered plugin comes from: the distribution and its version, or the user's script ("" both)."""

    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip() or "this script"


class Manager(pluggy.PluginManager):
    """pluggy's manager, which also recognises overridden methods of a `Listener` and refuses what could never be called."""

    def __init__(self) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(Registrations)
        self.add_hookspecs(Events)
        self.origins: dict[str, Origin] = {}
        self.changes = 0
        """Grows whenever the set of listeners changes; compiled calls compare it."""
        self.monitors = 0

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None and isinstance(plugin, Listener) and name in EVENTS:
            found = getattr(type(plugin), name, None)
            if callable(found) and found is not getattr(Listener, name):
                return {}
        return options

    def add(self, plugin: object, name: str, origin: Origin | None = None) -> None:
        """Register `plugin` under `name`. Raises `PluginError` for anything that could silently never be called."""
        _check(plugin, name)
        if self.has_plugin(name):
            raise PluginError(
                f"plugin {name!r}: the name is taken by another plugin of this run; give it another `name`"
            )
        try:
            self.register(plugin, name)
            self.check_pending()
        except (pluggy.PluginValidationError, ValueError) as exc:
            raise PluginError(f"plugin {name!r} cannot be registered: {exc}") from exc
        finally:
            self.changes += 1
        offers = any(hasattr(plugin, hook) for hook in REGISTRATIONS)
        several = isinstance(plugin, Listener) and not isinstance(
            plugin, Callback
        )  # it is there for something else, too
        if not several and not offers and not self.get_hookcallers(plugin):
            raise PluginError(
                f"plugin {name!r} ({type(plugin).__name__}) hears no hook and offers no name: inherit from fabricate.Callback and "
                "override a hook, or remove it"
            )
        self.origins[name] = origin or Origin()

    def remove(self, name: str) -> None:
        """Take a plugin out again."""
        self.unregister(name=name)
        self.origins.pop(name, None)
        self.changes += 1

    def add_hookcall_monitoring(self, before: Any, after: Any) -> Callable[[], None]:
        undo = super().add_hookcall_monitoring(before, after)
        self.monitors += 1
        self.changes += 1

        def stop() -> None:
            undo()
            self.monitors -= 1
            self.changes += 1

        return stop

    def order(self, hook: str) -> list[str]:
        """Names of the plugins that `hook` reaches, in the order they are called (wrappers first, as they begin first)."""
        implementations = getattr(self.hook, hook).get_hookimpls()
        return [i.plugin_name for i in reversed(implementations)]

    def table(self) -> list[list[Any]]:
        """Every hook with its listeners in order: what ranks compare at fit start."""
        return [[hook, self.order(hook)] for hook in EVENTS if self.order(hook)]

    def wants(self, hook: str, argument: str) -> bool:
        """Whether any listener of `hook` takes `argument`, so that the loop computes it only when somebody looks."""
        return any(argument in i.argnames for i in getattr(self.hook, hook).get_hookimpls())


def _functions(plugin: object) -> Iterator[tuple[str, Call, dict[str, Any] | None]]:
    """(name, function as the manager sees it, hook options if it is marked) of every public function that user code put on
    a plugin; torch's and ours are not the user's."""
    if inspect.ismodule(plugin):
        names = [n for n, v in vars(plugin).items() if getattr(v, "__module__", None) == plugin.__name__]
    else:
        ours = ("torch", "fabricate", "builtins")
        users = [base for base in type(plugin).__mro__ if base.__module__.partition(".")[0] not in ours]
        names = list(dict.fromkeys(n for base in users for n in vars(base)))
    for name in names:
        value = inspect.getattr_static(plugin, name)
        if not name.startswith("_") and inspect.isfunction(getattr(value, "__func__", value)):
            function = getattr(plugin, name)
            yield name, function, getattr(function, f"{PROJECT}_impl", None)


def _check(plugin: object, name: str) -> None:
    kind = type(plugin)
    if inspect.isclass(plugin):
        raise PluginError(f"plugin {name!r} is the class {plugin.__name__}; pass an instance: {plugin.__name__}()")
    if kind.__hash__ is None:
        raise PluginError(
            f"plugin {name!r}: {kind.__name__} defines __eq__ without __hash__; plugins compare by identity: use "
            "@dataclass(eq=False)"
        )
    listener = isinstance(plugin, Listener)
    attached = [hook for hook in EVENTS if listener and hook in getattr(plugin, "__dict__", {})]
    if attached:
        raise PluginError(
            f"plugin {name!r}: {attached[0]} is set on the object and would never be called; define it in {kind.__name__}"
        )
    for method, function, marked in _functions(plugin):
        where = f"{plugin.__name__ if inspect.ismodule(plugin) else kind.__name__}.{method}"
        options = marked or {}
        hook = options.get("specname") or method
        if not listener and marked is None:
            if hook in EVENTS:
                raise PluginError(
                    f"plugin {name!r}: {where} would never be called: inherit from fabricate.Callback or decorate it with "
                    "@fabricate.hookimpl"
                )
        elif hook in HOOKS:
            check_arguments(where, function, hook, wrapper=bool(options.get("wrapper")))
        elif options.get("optionalhook"):
            continue
        elif hook in FOREIGN:
            raise PluginError(f"{where} is not a hook of fabricate; use {FOREIGN[hook]}")
        elif hook.startswith("on_") or marked is not None:
            raise PluginError(f"{where} is not a hook of fabricate{did_you_mean(hook, HOOKS)}")
        elif isinstance(plugin, Callback) and (near := difflib.get_close_matches(hook, ACTIONS, n=1, cutoff=0.85)):
            raise PluginError(f"{where} is not a hook of fabricate; did you mean {near[0]!r}?")


def check_arguments(where: str, function: Call, hook: str, *, wrapper: bool = False) -> None:
    """Refuse an implementation of `hook` (bound, so without self) whose arguments the hook does not have, or which pluggy
    would not pass, or whose body would never run."""
    owner: type = Registrations if hook in vars(Registrations) else Events
    known = [p for p in inspect.signature(getattr(owner, hook)).parameters if p != "self"]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PluginError(
                f"{where}: name the arguments you want, any of {', '.join(known)}; {parameter} is never filled"
            )
        if parameter.name not in known:
            hint = did_you_mean(parameter.name, known)
            if hook == "on_step" and parameter.name in ("batch", "batch_idx"):
                hint = (
                    "; a step may span several batches: compute the loss in `training_step(batch)`, or hear "
                    "`on_accumulate(batch)`"
                )
            raise PluginError(
                f"{where}: hook {hook} has no argument {parameter.name!r} (it has {', '.join(known) or 'none'}){hint}"
            )
        if parameter.default is not parameter.empty:
            raise PluginError(
                f"{where}: argument {parameter.name!r} has a default, which a hook would always use; remove it"
            )
    if inspect.iscoroutinefunction(function):
        raise PluginError(f"{where} is a coroutine and would never run; write def, not async def")
    if wrapper and hook in PER_LISTENER:
        raise PluginError(f"{where}: {hook} is called for each listener by itself and cannot be wrapped; take `state`")
    if not wrapper and inspect.isgeneratorfunction(function):
        raise PluginError(
            f"{where} is a generator and its body would never run; decorate it with @hookimpl(wrapper=True)"
        )


class Calls:
    """One attribute per event: None when nobody listens, else a function of the hook's arguments, in order.

    The loop tests for None and calls by position; nothing is looked up per call. `refresh()` rebuilds the attributes when
    the manager changed; the loop does so at update boundaries.
    """

    on_fit_start: Call | None
    on_epoch_start: Call | None
    train_step: Call | None
    on_accumulate: Call | None
    on_before_step: Call | None
    optimizer_step: Call | None
    on_step: Call | None
    on_step_skipped: Call | None
    on_log: Call | None
    on_eval_start: Call | None
    eval_step: Call | None
    on_eval_end: Call | None
    write_checkpoint: Call | None
    on_saved: Call | None
    on_epoch_end: Call | None
    on_export: Call | None
    on_fit_end: Call | None
    on_preempt: Call | None
    on_exception: Call | None
    on_teardown: Call | None

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.step = 0
        """The update the loop is at; only used in the note of an exception."""
        self.refresh()

    def refresh(self) -> None:
        """Rebuild every call list from the manager's present listeners."""
        for name in EVENTS:
            if name not in PER_LISTENER:
                setattr(self, name, self._compile(name))
        self.changes = self.manager.changes

    def listeners(self, hook: str) -> list[tuple[str, Call]]:
        """(plugin name, call by keyword) of each listener of a per-listener hook, in order."""
        return [(i.plugin_name, self._one(hook, i)) for i in reversed(getattr(self.manager.hook, hook).get_hookimpls())]

    def _one(self, hook: str, implementation: Any) -> Call:
        def call(**arguments: Any) -> None:
            try:
                result = implementation.function(*(arguments[a] for a in implementation.argnames))
            except BaseException as exc:
                self._attribute(hook, exc)
                raise
            if result is not None:
                self._returned(hook, implementation, result)

        return call

    def _compile(self, name: str) -> Call | None:
        hook = getattr(self.manager.hook, name)
        implementations = list(reversed(hook.get_hookimpls()))
        if not implementations and not self.manager.monitors:
            return None
        arguments = ", ".join((*hook.spec.argnames, *hook.spec.kwargnames))
        event = name not in ACTIONS
        scope: dict[str, Any] = {"hook": hook, "name": name, "attribute": self._attribute}
        scope |= {"returned": self._returned, "unanswered": self._unanswered}
        if self.manager.monitors or any(i.wrapper or i.hookwrapper for i in implementations):
            # pluggy itself runs wrappers: compiled calls are an optimisation, never a second semantics.
            named = ", ".join(f"{a}={a}" for a in arguments.split(", "))
            body = [f"result = hook({named})"]
            if event:
                body.append("if result: returned(name, None, result)")
            else:
                if name != "eval_step":  # the one action whose answer may be nothing
                    body.append("if result is None: unanswered(name)")
                body.append("return result")
        elif event:
            body = []
            for number, implementation in enumerate(implementations):
                scope[f"call{number}"], scope[f"impl{number}"] = implementation.function, implementation
                body.append(f"result = call{number}({', '.join(implementation.argnames)})")
                body.append(f"if result is not None: returned(name, impl{number}, result)")
        else:
            if len(implementations) == 1 and implementations[0].plugin_name == PROJECT:
                return None  # only the loop's own default: the loop does it without a call
            body = []
            for number, implementation in enumerate(implementations):
                scope[f"call{number}"] = implementation.function
                body.append(f"result = call{number}({', '.join(implementation.argnames)})")
                body.append("if result is not None: return result")
        lines = "\n        ".join(body)
        source = (
            f"def {name}({arguments}):\n    try:\n        {lines}\n"
            "    except BaseException as exc:\n        attribute(name, exc)\n        raise\n"
        )
        exec(compile(source, f"<fabricate hook {name}>", "exec"), scope)
        compiled: Call = scope[name]
        return compiled

    def _returned(self, hook: str, implementation: Any, result: Any) -> None:
        if implementation is None:
            result = result[0] if isinstance(result, list) else result
            name = " or ".join(repr(n) for n in self.manager.order(hook))
        else:
            name = repr(implementation.plugin_name)
        raise PluginError(
            f"hook {hook} of plugin {name} returned {type(result).__name__}; an event returns nothing: "
            "use trainer.request_save(), request_eval() or stop(reason) to ask for something"
        )

    def _unanswered(self, hook: str) -> None:
        wrappers = [i.plugin_name for i in getattr(self.manager.hook, hook).get_hookimpls() if i.wrapper]
        own = "training_step returned nothing, or " if hook == "train_step" else ""
        raise PluginError(
            f"hook {hook} ended without an answer: {own}a wrapper did not pass it on ({', '.join(wrappers)}); end it with "
            "`return (yield)` or `result = yield; ...; return result`"
        )

    def _attribute(self, hook: str, exc: BaseException) -> None:
        """Add a note that names plugin, distribution, hook and step, found from the traceback: costs nothing until raised."""
        by_code: dict[Any, list[Any]] = {}
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            function = inspect.unwrap(implementation.function)
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            by_code.setdefault(code, []).append(implementation)
        found = None
        traceback = exc.__traceback__
        while traceback is not None:
            candidates = by_code.get(traceback.tb_frame.f_code)
            if candidates:
                owner = traceback.tb_frame.f_locals.get("self")
                found = next((c for c in candidates if c.plugin is owner), candidates[0])
            traceback = traceback.tb_next
        if found is not None and found.plugin_name != PROJECT:
            origin = self.manager.origins.get(found.plugin_name, Origin())
            exc.add_note(f"raised in hook {hook} of plugin {found.plugin_name!r} ({origin}) at step {self.step}")
