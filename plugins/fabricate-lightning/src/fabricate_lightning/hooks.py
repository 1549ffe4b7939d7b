"""Calls of Lightning's hooks: first of the callbacks in their order, then of the module, if they define the hook themselves.

Must not know: when a hook is due (`adapter`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fabricate_lightning.kinds import is_a, overrides
from fabricate_lightning.logs import Logs

NEVER_CALLED = {
    "backward": "the loop calls it, once per micro-batch; change the loss in training_step, or use manual optimization",
    "configure_sharded_model": "rename it configure_model",
    **{
        f"on_{stage}_model_{mode}": f"an evaluation puts every part into eval mode and back; use on_{stage}_start"
        for stage in ("validation", "test", "predict")
        for mode in ("eval", "train")
    },
    **{
        f"{stage}_epoch_end": f"Lightning 2 has removed it; use on_{stage.removesuffix('ing')}_epoch_end"
        for stage in ("training", "validation", "test")
    },
}
"""Methods of a LightningModule that would change a run, or that Lightning refuses as well, with what to do instead."""
WITHOUT_EFFECT = {
    **dict.fromkeys(
        ("optimizer_zero_grad", "on_validation_model_zero_grad"), "gradients are cleared after each update"
    ),
    **dict.fromkeys(
        ("on_epoch_start", "on_epoch_end", "on_batch_start", "on_batch_end"), "Lightning 2 does not call it either"
    ),
}
"""Methods of a LightningModule or a callback that are not called, and why a run is the same as under Lightning without them."""


class Hooks:
    """The hooks of one module and its callbacks."""

    def __init__(self, view: Any, module: Any, callbacks: Sequence[Any], logs: Logs) -> None:
        self._view, self._module, self._callbacks, self._logs = view, module, callbacks, logs
        self._known: dict[tuple[str, str], list[Callable[..., Any]]] = {}
        for callback in callbacks:  # so that it may call self.log, as under Lightning
            callback.log, callback.log_dict = module.log, module.log_dict

    def __call__(self, hook: str, *arguments: Any) -> None:
        """Call `hook` of the callbacks, then of the module. Return values are ignored; `of_module` returns that of the module."""
        self._run(hook, self._of(hook, "both"), arguments)

    def of_callbacks(self, hook: str, *arguments: Any, monitoring: bool | None = None) -> None:
        """Call `hook` of the callbacks alone; monitoring: True for EarlyStopping only, False for all others."""
        which = {None: "callbacks", True: "monitoring", False: "others"}[monitoring]
        self._run(hook, self._of(hook, which), arguments)

    def of_module(self, hook: str, *arguments: Any) -> Any:
        """Call `hook` of the module alone, and return its value."""
        return self._run(hook, self._of(hook, "module"), arguments)

    def listened(self, hooks: Iterable[str]) -> bool:
        """Whether any callback or the module defines one of `hooks`."""
        return any(self._of(hook, "both") for hook in hooks)

    def _run(self, hook: str, functions: list[Callable[..., Any]], arguments: Sequence[Any]) -> Any:
        before, self._logs.hook = self._logs.hook, hook
        answer = None
        for function in functions:
            answer = function(*arguments)
        self._logs.hook = before
        return answer

    def _of(self, hook: str, which: str) -> list[Callable[..., Any]]:
        functions = self._known.get((hook, which))
        if functions is None:
            functions = self._known[hook, which] = list(self._functions(hook, which))
        return functions

    def _functions(self, hook: str, which: str) -> Iterable[Callable[..., Any]]:
        for callback in self._callbacks if which != "module" else ():
            if not overrides(callback, hook) or is_a(callback, "EarlyStopping") == {
                "monitoring": False,
                "others": True,
            }.get(which):
                continue
            yield self._bound(callback, hook)
        if which in ("both", "module") and overrides(self._module, hook):
            yield getattr(self._module, hook)

    def _bound(self, callback: Any, hook: str) -> Callable[..., Any]:
        function = getattr(callback, hook)
        return lambda *arguments: function(self._view, self._module, *arguments)
