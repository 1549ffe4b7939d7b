"""The plugin manager of one Trainer, and the functions through which the loop calls hooks.

Owns: registration, the order of the listeners, one function per hook, and the note on an exception that names the plugin which raised it.
Must not know: what a strategy or a checkpoint is.

Order of the listeners of a hook, the same on every rank: wrappers outermost, then strategy, precision, module, the plugins in the order
they were listed, then fabricate's own implementations. `tryfirst` and `trylast` move a listener as in pluggy.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import pluggy

from fabricate.errors import PluginError
from fabricate.hooks import (
    ACTIONS,
    EVENTS,
    PER_LISTENER,
    PROJECT,
    REGISTRATIONS,
    Callback,
    Events,
    Listener,
    Registrations,
)
from fabricate.registry.hook_checks import check_plugin

Call = Callable[..., Any]


@dataclass(frozen=True)
class Origin:
    """The source of a registered plugin: a distribution and its version, or the user's script (both are "")."""

    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip() or "this script"


class Manager(pluggy.PluginManager):
    """pluggy's manager. It also recognises overridden methods of a `Listener`, and refuses hooks that could never be called."""

    def __init__(self) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(Registrations)
        self.add_hookspecs(Events)
        self.origins: dict[str, Origin] = {}
        self.changes = 0
        """A counter that grows with every change of the set of listeners. The loop compares it with `Calls.changes`."""
        self.monitors = 0

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None and isinstance(plugin, Listener) and name in EVENTS and name not in ACTIONS:
            method = getattr(type(plugin), name, None)
            if callable(method) and method is not getattr(Listener, name):
                return {}
        return options

    def add(self, plugin: object, name: str, origin: Origin | None = None) -> None:
        """Register `plugin` under `name`. Raises `PluginError` for a hook that could never be called."""
        check_plugin(plugin, name)
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
        # A strategy, a precision or a module is also a listener; it need not implement a hook.
        only_listens = isinstance(plugin, Callback) or not isinstance(plugin, Listener)
        offers = any(hasattr(plugin, hook) for hook in REGISTRATIONS)
        if only_listens and not offers and not self.get_hookcallers(plugin):
            raise PluginError(
                f"plugin {name!r} ({type(plugin).__name__}) implements no hook and offers no name: inherit from "
                "fabricate.Callback and override a hook, or remove it"
            )
        self.origins[name] = origin or Origin()

    def remove(self, name: str) -> None:
        """Unregister a plugin."""
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

    def listeners(self, hook: str) -> list[pluggy.HookImpl]:
        """The implementations of `hook` in calling order (pluggy stores them in reverse)."""
        return list(reversed(getattr(self.hook, hook).get_hookimpls()))

    def order(self, hook: str) -> list[str]:
        """Names of the plugins that implement `hook`, in calling order. Wrappers are first, because they begin first."""
        return [listener.plugin_name for listener in self.listeners(hook)]

    def table(self) -> list[list[Any]]:
        """Every hook with its listeners in order. Ranks compare this table at fit start."""
        return [[hook, self.order(hook)] for hook in EVENTS if self.order(hook)]

    def wants(self, hook: str, argument: str) -> bool:
        """Whether any listener of `hook` takes `argument`. If none does, the loop does not compute it."""
        return any(argument in listener.argnames for listener in self.listeners(hook))


class Calls:
    """One attribute per hook: None if there is no listener, else a function that takes the hook's arguments by position.

    The loop skips a hook that is None. It calls `refresh()` at update boundaries, if the manager changed.
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
    on_complete: Call | None
    on_export: Call | None
    on_fit_end: Call | None
    on_preempt: Call | None
    on_exception: Call | None
    on_teardown: Call | None

    def __init__(
        self, manager: Manager, context: Callable[[str], AbstractContextManager[object] | None] = lambda hook: None
    ) -> None:
        """`context`: a function from a hook's name to the context in which the hook's listeners run, or to None."""
        self.manager = manager
        self._context = context
        self.step = 0
        """The update in progress, for the note of an exception."""
        self.refresh()

    def refresh(self) -> None:
        """Set every attribute again, from the manager's present listeners."""
        for name in EVENTS:
            if name not in PER_LISTENER:
                setattr(self, name, self._prepare(name))
        self.changes = self.manager.changes

    def of_module(self) -> Calls:
        """A copy that calls only the implementations of the module and of fabricate, without wrappers."""
        only = copy.copy(self)
        for hook in EVENTS:
            if hook not in PER_LISTENER:
                own = [
                    i for i in self.manager.listeners(hook) if i.plugin_name in ("module", PROJECT) and not i.wrapper
                ]
                setattr(only, hook, self._one_by_one(hook, own) if own else None)
        return only

    def listeners(self, hook: str) -> list[tuple[str, Call]]:
        """(plugin name, function of the hook's arguments by name) of each listener of a per-listener hook, in order."""
        return [(i.plugin_name, self._by_name(hook, i)) for i in self.manager.listeners(hook)]

    def places(self) -> list[tuple[str, int, int, str]]:
        """The code of each listener of each hook: (file, first line, last line, description)."""
        listed = []
        for hook in EVENTS:
            for listener in self.manager.listeners(hook):
                code, plugin = _code(listener), listener.plugin_name
                if code is not None and plugin != PROJECT:
                    last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
                    name = f"hook {hook} of " + ("the module" if plugin == "module" else f"plugin {plugin!r}")
                    listed.append((code.co_filename, code.co_firstlineno, last, name))
        return listed

    def _by_name(self, hook: str, listener: pluggy.HookImpl) -> Call:
        call = self._one_by_one(hook, [listener])
        argnames = self._argnames(hook)
        return lambda **arguments: call(*(arguments[name] for name in argnames))

    def _argnames(self, hook: str) -> tuple[str, ...]:
        specification = getattr(self.manager.hook, hook).spec
        return tuple(specification.argnames)

    def _prepare(self, hook: str) -> Call | None:
        """The function that calls the listeners of `hook`. None if there are none, or only fabricate's default, which the loop runs
        directly."""
        listeners = self.manager.listeners(hook)
        if self.manager.monitors or any(i.wrapper or i.hookwrapper for i in listeners):
            return self._through_pluggy(hook)
        if not listeners or (hook in ACTIONS and [i.plugin_name for i in listeners] == [PROJECT]):
            return None
        return self._one_by_one(hook, listeners)

    def _one_by_one(self, hook: str, listeners: list[pluggy.HookImpl]) -> Call:
        """A function that calls the listeners in a loop, as pluggy would without wrappers: each gets the arguments that it names, and an
        action ends with the first result that is not None."""
        places = {name: place for place, name in enumerate(self._argnames(hook))}
        prepared = [
            (i.plugin_name, self._inside(hook, i.function), [places[name] for name in i.argnames]) for i in listeners
        ]
        is_event = hook not in ACTIONS

        def call(*arguments: Any) -> Any:
            try:
                for plugin, function, taken in prepared:
                    result = function(*map(arguments.__getitem__, taken))
                    if result is not None:
                        if is_event:
                            raise _returned(hook, repr(plugin), result)
                        return result
            except BaseException as exc:
                self._attribute(hook, exc)
                raise

        return call

    def _inside(self, hook: str, function: Call) -> Call:
        """`function`, run in the context of `hook`."""
        if (context := self._context(hook)) is None:
            return function

        def call(*arguments: Any, **named: Any) -> Any:
            with context:
                return function(*arguments, **named)

        return call

    def _through_pluggy(self, hook: str) -> Call:
        """A function that calls the listeners through pluggy, which runs wrappers and monitoring."""
        caller = self._inside(hook, getattr(self.manager.hook, hook))
        argnames = self._argnames(hook)
        is_event = hook not in ACTIONS
        may_be_none = is_event or hook == "eval_step"

        def call(*arguments: Any) -> Any:
            try:
                result = caller(**dict(zip(argnames, arguments, strict=True)))
                if is_event and result:
                    plugins = " or ".join(map(repr, self.manager.order(hook)))
                    raise _returned(hook, plugins, result[0] if isinstance(result, list) else result)
                if result is None and not may_be_none:
                    raise self._unanswered(hook)
            except BaseException as exc:
                self._attribute(hook, exc)
                raise
            return None if is_event else result

        return call

    def _unanswered(self, hook: str) -> PluginError:
        wrappers = [i.plugin_name for i in self.manager.listeners(hook) if i.wrapper]
        own = "training_step returned nothing, or " if hook == "train_step" else ""
        return PluginError(
            f"hook {hook} has no result: {own}a wrapper did not return the result ({', '.join(wrappers)}); end the wrapper with "
            "`return (yield)` or `result = yield; ...; return result`"
        )

    def _attribute(self, hook: str, exc: BaseException) -> None:
        """Add a note that names plugin, distribution, hook and step. The traceback identifies the plugin, so calls that do not raise cost
        nothing."""
        by_code: dict[Any, list[pluggy.HookImpl]] = {}
        for implementation in self.manager.listeners(hook):
            by_code.setdefault(_code(implementation), []).append(implementation)
        innermost = None
        traceback = exc.__traceback__
        while traceback is not None:
            frame = traceback.tb_frame
            if candidates := by_code.get(frame.f_code):
                owner = frame.f_locals.get("self")
                innermost = next((c for c in candidates if c.plugin is owner), candidates[0])
            traceback = traceback.tb_next
        if innermost is not None and innermost.plugin_name != PROJECT:
            plugin = innermost.plugin_name
            origin = self.manager.origins.get(plugin, Origin())
            exc.add_note(f"raised in hook {hook} of plugin {plugin!r} ({origin}) at step {self.step}")


def _code(listener: pluggy.HookImpl) -> CodeType | None:
    """The code object of a listener; None if the listener is not written in Python."""
    function = inspect.unwrap(listener.function)
    code: CodeType | None = getattr(getattr(function, "__func__", function), "__code__", None)
    return code


def _returned(hook: str, plugin: str, result: object) -> PluginError:
    return PluginError(
        f"hook {hook} of plugin {plugin} returned {type(result).__name__}; an event returns nothing: "
        "use trainer.request_save(), request_eval() or stop(reason) to ask for something"
    )
