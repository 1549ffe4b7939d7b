"""Checks, when a plugin is registered, that its hooks can be called as they are written.

pluggy silently ignores a method whose name is not a hook, and never fills `*args`, keyword-only arguments or arguments with a default.
Here, all of these are errors. Must not know: the plugin manager, order of the listeners.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from fabricate.errors import PluginError, did_you_mean
from fabricate.hooks import (
    ACTIONS,
    EVENTS,
    HOOKS,
    PER_LISTENER,
    PROJECT,
    Callback,
    Events,
    Listener,
    Registrations,
)
from fabricate.registry import foreign_names

__all__ = ["check_plugin"]

_NOT_BY_USERS = ("torch", "fabricate", "builtins")
"""Packages whose methods a plugin inherits: they are not checked."""


def check_plugin(plugin: object, name: str) -> None:
    """Raise `PluginError` for an object that cannot be a plugin and for an implementation that would never be called."""
    _check_object(plugin, name)
    owner = plugin.__name__ if inspect.ismodule(plugin) else type(plugin).__name__
    for method, function, options in _functions(plugin):
        where = f"{owner}.{method}"
        if method in EVENTS and getattr(function, "__func__", None) is vars(Listener)[method]:
            hidden = next(
                base.__name__ for base in type(plugin).__mro__ if method in vars(base) and base is not Listener
            )
            raise PluginError(
                f"{where}: a base class that comes before {hidden} has an empty method {method}, which hides that of {hidden}. List "
                f"{hidden} first: class {owner}({hidden}, ...)"
            )
        if options is not None or isinstance(plugin, Listener):
            _check_hook(plugin, where, method, function, options)
        elif method in EVENTS:
            raise PluginError(
                f"plugin {name!r}: {where} would never be called: inherit from fabricate.Callback or decorate it with "
                "@fabricate.hookimpl"
            )


def _check_object(plugin: object, name: str) -> None:
    kind = type(plugin)
    _refuse_callback_of_another_library(kind, name)
    if inspect.isclass(plugin):
        raise PluginError(f"plugin {name!r} is the class {plugin.__name__}; pass an instance: {plugin.__name__}()")
    if kind.__hash__ is None:
        raise PluginError(
            f"plugin {name!r}: {kind.__name__} defines __eq__ without __hash__; plugins compare by identity: use "
            "@dataclass(eq=False)"
        )
    if isinstance(plugin, Listener):
        for hook in EVENTS:
            if hook in getattr(plugin, "__dict__", {}):
                raise PluginError(
                    f"plugin {name!r}: {hook} is an attribute of the object and would never be called; define it as a method in "
                    f"{kind.__name__}"
                )


_FOREIGN = {
    ("transformers", "TrainerCallback"): ("transformers", "docs/from-transformers.md"),
    ("lightning", "Callback"): ("Lightning", "docs/from-lightning.md"),
    ("pytorch_lightning", "Callback"): ("Lightning", "docs/from-lightning.md"),
}
"""Base classes of callbacks, as (package, class): the name of the library, and the page with its events."""


def _refuse_callback_of_another_library(kind: type, name: str) -> None:
    """Raise `PluginError` for a callback of transformers or Lightning: its methods have names like hooks, but other arguments."""
    for base in kind.__mro__:
        library, page = _FOREIGN.get((base.__module__.partition(".")[0], base.__name__), ("", ""))
        if library:
            remedy = foreign_names.use(kind.__name__, foreign_names.PLUGINS)
            raise PluginError(
                f"plugin {name!r}: {kind.__name__} is a callback of {library}, whose events are not called here"
                f"{remedy or f'; inherit from fabricate.Callback, {page} has the events by their old names'}"
            )


def _functions(plugin: object) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any] | None]]:
    """(name, bound function, hook options or None if it is not marked) of every public function that user code defines on a plugin."""
    if inspect.ismodule(plugin):
        names = [n for n, v in vars(plugin).items() if getattr(v, "__module__", None) == plugin.__name__]
    else:
        classes = [base for base in type(plugin).__mro__ if base.__module__.partition(".")[0] not in _NOT_BY_USERS]
        names = list(dict.fromkeys(n for base in classes for n in vars(base)))
    for name in names:
        value = inspect.getattr_static(plugin, name)
        if not name.startswith("_") and inspect.isfunction(getattr(value, "__func__", value)):
            function = getattr(plugin, name)
            yield name, function, getattr(function, f"{PROJECT}_impl", None)


def _is_called_by_its_class(plugin: object, method: str) -> bool:
    """Whether another method of a plugin calls `method`, which is then one of the user's own."""
    from fabricate.data.identity import names_in  # which imports torch

    functions = [value for base in type(plugin).__mro__ for value in vars(base).values() if inspect.isfunction(value)]
    return any(method in names_in(each.__code__) for each in functions if each.__name__ != method)


def _check_hook(
    plugin: object, where: str, method: str, function: Callable[..., Any], marked: dict[str, Any] | None
) -> None:
    """Check the name and the arguments of a listener's method or a function marked with @hookimpl (`marked`: the options of the mark)."""
    options = marked or {}
    hook = options.get("specname") or method
    if hook in ACTIONS and marked is None and not inspect.isgeneratorfunction(function):
        raise _unmarked(plugin, where, hook)
    if hook in HOOKS:
        _check_arguments(where, function, hook)
        _check_kind(where, function, hook, wrapper=bool(options.get("wrapper")))
    elif options.get("optionalhook"):
        return
    elif hook in foreign_names.HOOKS:
        raise PluginError(f"{where} is not a hook of fabricate{foreign_names.use(hook, foreign_names.HOOKS)}")
    elif marked is not None:
        raise PluginError(f"{where} is not a hook of fabricate{did_you_mean(hook, HOOKS)}")
    elif hook.startswith("on_"):
        if not _is_called_by_its_class(plugin, method):
            hint = did_you_mean(hook, HOOKS)
            otherwise = "it is a method of your own, give it a name that does not begin with on_"
            raise PluginError(f"{where} is not a hook of fabricate{f'{hint} If' if hint else '; if'} {otherwise}")
    elif _never_called(plugin, method):
        raise PluginError(f"{where} would never be called; use {foreign_names.CALLBACK_NAMES[method][1]}")
    elif _is_callback(plugin) and (near := difflib.get_close_matches(hook, ACTIONS, n=1, cutoff=0.85)):
        raise PluginError(f"{where} is not a hook of fabricate; did you mean {near[0]!r}?")


def _is_callback(plugin: object) -> bool:
    """Whether `plugin` is a callback, and not a torch module that inherits from one too: a module has methods with other names."""
    return isinstance(plugin, Callback) and not hasattr(plugin, "named_parameters")


def _never_called(plugin: object, method: str) -> bool:
    """Whether `method` of a callback is a method of Lightning's callbacks that fabricate does not call."""
    meant = foreign_names.CALLBACK_NAMES.get(method)
    return (
        meant is not None
        and _is_callback(plugin)
        and foreign_names.begins_with(getattr(type(plugin), method), meant[0])
    )


_REPLACES = {
    "train_step": "the forward through the prepared model",
    "optimizer_step": "the update",
    "eval_step": "validation_step, test_step and predict_step",
    "write_checkpoint": "the writing of checkpoints",
}
"""By action: what an implementation replaces, unless it is a wrapper."""


def _unmarked(plugin: object, where: str, hook: str) -> PluginError:
    """The error for an unmarked method with the name of an action, which is more often a helper than a hook."""
    helper = "rename the method; or, if it is meant as the hook, " if not isinstance(plugin, Callback) else ""
    return PluginError(
        f"{where} has the name of a hook and would replace {_REPLACES[hook]}: {helper}use @hookimpl(wrapper=True) to run around "
        "the original, or @hookimpl if the method is meant to replace it"
    )


def _check_arguments(where: str, function: Callable[..., Any], hook: str) -> None:
    """Raise `PluginError` unless `function` (bound, without self) takes only arguments of the hook, and in a form that pluggy passes."""
    owner: type = Registrations if hook in vars(Registrations) else Events
    allowed = [p for p in inspect.signature(getattr(owner, hook)).parameters if p != "self"]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PluginError(
                f"{where}: name the arguments you want, any of {', '.join(allowed)}; {parameter} is never filled"
            )
        if parameter.name not in allowed:
            hint = did_you_mean(parameter.name, allowed)
            if hook == "on_step" and parameter.name in ("batch", "batch_idx"):
                hint = (
                    "; a step may span several batches: compute the loss in `training_step(batch)`, or implement "
                    "`on_accumulate(batch)`"
                )
            raise PluginError(
                f"{where}: hook {hook} has no argument {parameter.name!r} (it has {', '.join(allowed) or 'none'}){hint}"
            )
        if parameter.default is not parameter.empty:
            raise PluginError(
                f"{where}: argument {parameter.name!r} has a default, and hooks are then always called with that default; remove "
                "the default"
            )


def _check_kind(where: str, function: Callable[..., Any], hook: str, *, wrapper: bool) -> None:
    """Raise `PluginError` unless `function` is a plain function, or a generator if it is a wrapper; otherwise its body would never run."""
    if inspect.iscoroutinefunction(function):
        raise PluginError(f"{where} is a coroutine and would never run; write def, not async def")
    if wrapper and hook in PER_LISTENER:
        raise PluginError(
            f"{where}: {hook} is called for each listener separately and cannot be wrapped; leave wrapper=True out, and change the "
            "argument `state`"
        )
    if not wrapper and inspect.isgeneratorfunction(function):
        raise PluginError(
            f"{where} is a generator and its body would never run; decorate it with @hookimpl(wrapper=True)"
        )
