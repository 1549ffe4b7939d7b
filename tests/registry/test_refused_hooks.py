"""Hooks that are refused at the start, or because of their return value: misspelt, foreign, in the wrong place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, PluginError, hookimpl
from fabricate.hooks import ACTIONS, EVENTS, HOOKS, PER_LISTENER
from fabricate.registry import foreign_names
from tests.support.hearing import ROWS, Regression, fit, hearing


def _method(name: str, parameters: str = "self", body: str = "pass") -> Any:
    scope: dict[str, Any] = {}
    exec(f"def {name}({parameters}):\n    {body}\n", scope)
    return scope[name]


def _refused(plugin: object, message: str, **arguments: Any) -> None:
    """`plugin` is refused with `message` (a part of it) before the first forward."""
    forwards: list[int] = []

    class Counting(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            forwards.append(1)
            return super().training_step(batch)

    with pytest.raises(PluginError) as caught:
        fit(plugin, module=Counting(), **arguments)
    assert message in str(caught.value)
    assert not forwards


def test_a_hook_that_a_base_class_hides_is_refused_with_the_order_that_shows_it() -> None:
    class Mixed:
        def on_step(self, loss: torch.Tensor) -> None:
            self.heard = True

        @staticmethod
        def helper() -> None: ...

    _refused(type("Hidden", (Callback, Mixed), {})(), "List Mixed first: class Hidden(Mixed, ...)")
    with pytest.raises(PluginError, match=r"List Mixed first: class Hidden\(Mixed, \.\.\.\)"):
        fit(module=type("Hidden", (Regression, Mixed), {})())
    shown = type("Shown", (Mixed, Regression), {})()
    fit(module=shown)
    assert shown.heard


def test_a_module_may_inherit_from_a_callback_too() -> None:
    class Counts(Callback):
        def on_step(self, step: int) -> None:
            self.last = step

    class Mixed(Counts, Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            return super().training_step(batch)

    module = Mixed()
    fit(module=module)
    assert module.last


@pytest.mark.parametrize(("wrong", "right"), sorted(foreign_names.HOOKS.items()))
def test_a_hook_of_lightning_or_transformers_is_refused_with_ours(wrong: str, right: str) -> None:
    plugin = type("Migrated", (Callback,), {wrong: _method(wrong)})()
    remedy = foreign_names.use(wrong, {wrong: right})
    _refused(plugin, f"Migrated.{wrong} is not a hook of fabricate{remedy}")


@pytest.mark.parametrize("wrong", sorted(foreign_names.HOOKS))
def test_a_foreign_hook_on_the_module_is_refused_too(wrong: str) -> None:
    with pytest.raises(PluginError, match=f"Migrated.{wrong} is not a hook of fabricate; (use|leave it out:) "):
        fit(module=type("Migrated", (Regression,), {wrong: _method(wrong)})())


def test_foreign_names_point_to_what_exists() -> None:
    here = (
        *EVENTS,
        "training_step",
        "validation_step",
        "configure_optimizers",
        "configure_model",
        "Trainer(",
        "trainer.",
        "nothing: ",
        "collate_fn",
    )
    assert [name for name, hint in foreign_names.HOOKS.items() if not hint.startswith(here)] == []
    assert sorted(set(foreign_names.HOOKS) & set(HOOKS)) == []


@pytest.mark.parametrize("hook", EVENTS)
def test_a_misspelt_hook_is_refused_with_the_nearest(hook: str) -> None:
    wrong = hook + "x"
    _refused(
        type("Misspelt", (Callback,), {wrong: _method(wrong)})(),
        f"Misspelt.{wrong} is not a hook of fabricate; did you mean {hook!r}?",
    )


def test_a_misspelt_hook_of_a_marked_object_is_refused_with_the_nearest() -> None:
    plugin = type("Marked", (), {"on_stp": hookimpl(_method("on_stp"))})()
    _refused(plugin, "Marked.on_stp is not a hook of fabricate; did you mean 'on_step'?")


def test_a_hook_of_a_later_version_may_be_marked_optional() -> None:
    plugin = type("Newer", (Callback,), {"on_future": hookimpl(optionalhook=True)(_method("on_future"))})()
    assert fit(plugin).steps == 1


@pytest.mark.parametrize("marked", [False, True])
def test_a_misspelt_argument_is_refused_with_the_nearest(marked: bool) -> None:
    method = _method("on_step", "self, stepp")
    plugin = (
        type("Misspelt", (), {"on_step": hookimpl(method)})()
        if marked
        else type("Misspelt", (Callback,), {"on_step": method})()
    )
    text = "Misspelt.on_step: hook on_step has no argument 'stepp' (it has trainer, module, step, loss, grad_norm); did you mean 'step'?"
    _refused(plugin, text)


@pytest.mark.parametrize("argument", ["batch", "batch_idx"])
def test_a_batch_in_on_step_points_to_the_training_step(argument: str) -> None:
    plugin = type("Old", (Callback,), {"on_step": _method("on_step", f"self, {argument}")})()
    _refused(plugin, "compute the loss in `training_step(batch)`")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            "self, step=0",
            "argument 'step' has a default, and hooks are then always called with that default; remove the default",
        ),
        ("self, *, step", "step is never filled"),
        ("self, **rest", "**rest is never filled"),
        ("self, *rest", "*rest is never filled"),
    ],
)
def test_an_argument_that_would_not_be_filled_is_refused(parameters: str, message: str) -> None:
    _refused(type("Odd", (Callback,), {"on_step": _method("on_step", parameters)})(), message)


def test_a_generator_that_is_no_wrapper_is_refused() -> None:
    plugin = type("Yields", (Callback,), {"train_step": _method("train_step", "self", "return (yield)")})()
    _refused(
        plugin,
        "Yields.train_step is a generator and its body would never run; decorate it with @hookimpl(wrapper=True)",
    )


def test_a_wrapper_that_is_no_generator_is_refused() -> None:
    plugin = type("Wraps", (Callback,), {"train_step": hookimpl(wrapper=True)(_method("train_step"))})()
    _refused(plugin, "not a generator function")


@pytest.mark.parametrize("hook", PER_LISTENER)
def test_a_hook_called_per_listener_cannot_be_wrapped(hook: str) -> None:
    plugin = type(
        "Wraps", (Callback,), {hook: hookimpl(wrapper=True)(_method(hook, "self, state", "return (yield)"))}
    )()
    _refused(plugin, f"{hook} is called for each listener separately and cannot be wrapped")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_value_returned_from_an_event_is_an_error(wrapped: bool) -> None:
    class Answers(Callback):
        def on_step(self) -> str:
            return "stop"

    class Wraps(Callback):
        @hookimpl(wrapper=True)
        def on_step(self) -> Iterator[None]:
            return (yield)

    with pytest.raises(
        PluginError, match=r"'Answers' returned str; an event returns nothing: use trainer.request_save\(\)"
    ):
        fit(Answers(), *([Wraps()] if wrapped else []))


@pytest.mark.parametrize("hook", ["train_step", "optimizer_step", "write_checkpoint"])
def test_a_wrapper_that_keeps_the_answer_is_an_error(hook: str, tmp_path: Path) -> None:
    plugin = type("Keeps", (Callback,), {hook: hookimpl(wrapper=True)(_method(hook, "self", "yield"))})()
    with pytest.raises(
        PluginError, match=rf"hook {hook} has no result: .*\(Keeps\); end the wrapper with `return \(yield\)`"
    ):
        fit(plugin, run_dir=tmp_path)


def test_a_wrapper_may_pass_on_nothing_from_a_validation_step() -> None:
    class Silent(Regression):
        def validation_step(self, batch: Any) -> None: ...  # type: ignore[override]

    class Wraps(Callback):
        @hookimpl(wrapper=True)
        def eval_step(self) -> Iterator[None]:
            return (yield)

    assert fit(Wraps(), module=Silent(), val=ROWS[:2], validate_every=1).steps == 1


def test_a_class_instead_of_an_object_is_refused() -> None:
    _refused(type("Watch", (Callback,), {}), "plugins: Watch is a class; pass an instance: Watch()")


def test_a_dataclass_that_compares_by_value_is_refused() -> None:
    @dataclass
    class Options(Callback):
        decay: float = 0.5

        def on_step(self) -> None: ...

    _refused(Options(), "plugins compare by identity: use @dataclass(eq=False)")


def test_an_unmarked_hook_of_a_plain_object_is_refused() -> None:
    plugin = type("Plain", (), {"on_step": _method("on_step")})()
    _refused(
        plugin,
        "Plain.on_step would never be called: inherit from fabricate.Callback or decorate it with @fabricate.hookimpl",
    )


@pytest.mark.parametrize("plugin", [None, object(), 3])
def test_a_plugin_that_implements_and_offers_nothing_is_refused(plugin: object) -> None:
    _refused(plugin, "implements no hook and offers no name: inherit from fabricate.Callback")


def test_a_hook_set_on_the_object_is_refused() -> None:
    plugin = Callback()
    plugin.on_step = lambda: None  # type: ignore[method-assign]
    _refused(
        plugin, "on_step is an attribute of the object and would never be called; define it as a method in Callback"
    )


def test_a_step_of_the_module_on_a_callback_is_refused() -> None:
    plugin = type("Confused", (Callback,), {"training_step": _method("training_step", "self, batch")})()
    _refused(plugin, "Confused.training_step is not a hook of fabricate; did you mean 'train_step'?")


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_static_or_class_method_is_heard(kind: Any) -> None:
    calls: list[int] = []
    method = hearing("on_step", ["step"], lambda self, hook, step: calls.append(step))
    if kind is staticmethod:
        method = lambda step: calls.append(step)  # noqa: E731
    assert fit(type("Odd", (Callback,), {"on_step": kind(method)})()).steps == 1
    assert calls == [1]


def test_one_object_listed_twice_is_refused() -> None:
    plugin = type("Watch", (Callback,), {"on_step": _method("on_step")})()
    with pytest.raises(PluginError, match="this Watch object is listed twice"):
        fit(plugin, plugin)


def test_a_name_that_is_taken_is_refused() -> None:
    plugin = type("Watch", (Callback,), {"on_step": _method("on_step"), "name": "module"})()
    _refused(plugin, "plugin 'module': the name is taken by another plugin of this run")


# ----------------------------------------------------------------------------------------------------- names of actions


@pytest.mark.parametrize("parameters", ["self, batch", "self", "self, images, labels=None"])
@pytest.mark.parametrize("hook", ACTIONS)
def test_a_helper_of_the_module_with_the_name_of_an_action_is_refused(hook: str, parameters: str) -> None:
    module = type("Helps", (Regression,), {hook: _method(hook, parameters)})()
    with pytest.raises(
        PluginError, match=f"Helps.{hook} has the name of a hook and would replace .*: rename the method"
    ):
        fit(module=module)


@pytest.mark.parametrize("hook", ACTIONS)
def test_an_action_of_a_callback_is_refused_unless_it_is_marked(hook: str, tmp_path: Path) -> None:
    method = _method(hook)
    _refused(type("Plain", (Callback,), {hook: method})(), f"Plain.{hook} has the name of a hook")
    assert fit(type("Marked", (Callback,), {hook: hookimpl(method)})(), val=ROWS, run_dir=tmp_path).steps == 1


@pytest.mark.parametrize("leaves", ["nothing", "an empty directory", "less than it should"])
def test_a_checkpoint_that_a_plugin_did_not_write_is_not_announced(leaves: str, tmp_path: Path) -> None:
    announced: list[Path] = []

    class Writes(Callback):
        @hookimpl
        def write_checkpoint(self, path: Path) -> Any:
            if leaves == "an empty directory":
                path.mkdir(parents=True)
            return True

        def on_saved(self, path: Path) -> None:
            announced.append(path)

    if leaves == "less than it should":

        def write_checkpoint(self: object, path: Path) -> Iterator[Any]:
            result = yield
            (path / "state.json").unlink()
            return result  # type: ignore[return-value]

        Writes.write_checkpoint = hookimpl(wrapper=True)(write_checkpoint)  # type: ignore[method-assign,assignment]
    with pytest.raises(
        PluginError, match="hook write_checkpoint of plugin 'Writes' returned without a good checkpoint at "
    ):
        fit(Writes(), run_dir=tmp_path)
    assert announced == []


def test_a_method_of_the_users_own_may_begin_as_hooks_do_if_another_one_calls_it() -> None:
    class Learns(Regression):
        def training_step(self, batch: Any) -> Any:
            return self.on_policy_loss(batch)

        def on_policy_loss(self, batch: Any) -> Any:
            return super().training_step(batch)

    assert fit(module=Learns()).steps == 1

    class Checks(Callback):
        def on_gpu_check(self) -> None:
            """Called by a script."""

    _refused(
        Checks(), "Checks.on_gpu_check is not a hook of fabricate; if it is a method of your own, give it a name that"
    )
