"""The hooks: which there are, when each is called, who hears them in which order, and what is refused at start-up."""

from __future__ import annotations

import ast
import inspect
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, FitResult, PluginError, Precision, Single, Trainer, TrainModule, hookimpl
from fabricate import hooks as specifications
from fabricate.hooks import (
    ACTIONS,
    EVENTS,
    FOREIGN,
    HOOKS,
    PER_LISTENER,
    REGISTRATIONS,
    Events,
    Listener,
    Registrations,
)

ROOT = Path(__file__).parent.parent
ROWS = [(torch.full((3,), float(row)), torch.tensor([float(row)])) for row in range(8)]


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def _fit(*plugins: object, module: TrainModule | None = None, val: Any = None, **arguments: Any) -> FitResult:
    arguments = {"max_steps": 1, "progress": False, **arguments}
    return Trainer(plugins=plugins, **arguments).fit(module or Regression(), ROWS, val, batch_size=2)


def _arguments(hook: str) -> list[str]:
    return [name for name in inspect.signature(getattr(Events, hook)).parameters if name != "self"]


def _hearing(hook: str, arguments: list[str], hear: Callable[..., None]) -> Any:
    """A method that takes exactly `arguments` of `hook` and hands them on to `hear(self, hook, ...)`; a wrapper for actions."""
    named = ", ".join(f"{name}={name}" for name in arguments)
    call = f"hear(self, {hook!r}, {named})"
    body = f"    {call}\n    return (yield)" if hook in ACTIONS else f"    {call}"
    scope: dict[str, Any] = {"hear": hear}
    exec(f"def {hook}(self, {', '.join(arguments)}):\n{body}\n", scope)
    return hookimpl(wrapper=True)(scope[hook]) if hook in ACTIONS else scope[hook]


def _everything(base: type, hear: Callable[..., None]) -> Any:
    """An object of a subclass of `base` that hears every hook with all of its arguments."""
    return type(f"Hearing{base.__name__}", (base,), {hook: _hearing(hook, _arguments(hook), hear) for hook in EVENTS})()


def _recorder() -> tuple[Callback, list[str]]:
    heard: list[str] = []
    listener: Callback = _everything(Callback, lambda self, hook, **arguments: heard.append(hook))
    return listener, heard


# ------------------------------------------------------------------------------------------------------ when they are called

UPDATE = ["train_step", "on_accumulate", "train_step", "on_accumulate", "on_before_step", "optimizer_step", "on_step"]
EPOCH = [
    "on_epoch_start",
    *UPDATE,
    *UPDATE,
    "on_log",
    *("on_eval_start", "eval_step", "eval_step", "on_eval_end"),
    "on_epoch_end",
    *("write_checkpoint", "on_save", "on_saved"),
]


def test_a_fit_calls_every_hook_in_exactly_this_order(tmp_path: Path) -> None:
    listener, heard = _recorder()
    _fit(
        listener,
        val=ROWS[:4],
        max_steps=None,
        max_epochs=2,
        gradient_accumulation_steps=2,
        log_every=2,
        run_dir=tmp_path,
    )
    assert heard == ["on_fit_start", *EPOCH, *EPOCH, "on_export", "on_fit_end", "on_teardown"]


def test_what_is_not_asked_for_is_not_called() -> None:
    listener, heard = _recorder()
    _fit(listener, log_every=100)
    once = ["train_step", "on_accumulate", "on_before_step", "optimizer_step", "on_step"]
    assert heard == ["on_fit_start", "on_epoch_start", *once, "on_log", "on_fit_end", "on_teardown"]


def test_a_state_that_no_moment_saved_is_saved_at_the_end(tmp_path: Path) -> None:
    listener, heard = _recorder()
    _fit(listener, max_steps=3, run_dir=tmp_path, save_every=2)
    assert heard.count("write_checkpoint") == 2
    end = ["write_checkpoint", "on_save", "on_saved", "on_log", "on_export", "on_fit_end", "on_teardown"]
    assert heard[-7:] == end


def test_a_resumed_fit_loads_after_it_started(tmp_path: Path) -> None:
    _fit(_recorder()[0], run_dir=tmp_path)
    listener, heard = _recorder()
    _fit(listener, run_dir=tmp_path, max_steps=2)
    assert heard[:3] == ["on_fit_start", "on_load", "on_epoch_start"]


def test_an_update_that_is_skipped_is_told_instead_of_the_step() -> None:
    class Infinite(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            return super().training_step(batch) * (torch.inf if self.trainer.progress.skipped == 0 else 1.0)

    listener, heard = _recorder()
    _fit(listener, module=Infinite(), nonfinite="skip")
    told = [hook for hook in heard if hook.startswith("on_step")]
    assert told == ["on_step_skipped", "on_step"]


def test_a_failure_is_told_before_the_teardown(tmp_path: Path) -> None:
    class Failing(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            raise RuntimeError("broken")

    listener, heard = _recorder()
    with pytest.raises(RuntimeError, match="broken"):
        _fit(listener, module=Failing(), run_dir=tmp_path)
    assert heard == ["on_fit_start", "on_epoch_start", "train_step", "on_exception", "on_teardown"]


def test_an_interrupted_fit_saves_and_exports_nothing(tmp_path: Path) -> None:
    class Interrupts(Callback):
        def on_step(self) -> None:
            signal.raise_signal(signal.SIGINT)

    listener, heard = _recorder()
    result = _fit(listener, Interrupts(), run_dir=tmp_path, max_steps=5)
    assert heard[-6:] == ["write_checkpoint", "on_save", "on_saved", "on_preempt", "on_fit_end", "on_teardown"]
    assert (result.steps, result.stop_reason) == (1, "interrupted")


def test_every_event_is_heard_by_the_tests_above(tmp_path: Path) -> None:
    listed = {*EPOCH, "on_fit_start", "on_export", "on_fit_end", "on_teardown"}
    told = {"on_load", "on_step_skipped", "on_exception", "on_preempt"}
    assert listed | told == set(EVENTS)


@pytest.mark.parametrize(
    ("stage", "method"), [("validate", "validation_step"), ("test", "test_step"), ("predict", "x")]
)
def test_an_evaluation_calls_its_own_hooks_only(stage: str, method: str) -> None:
    class Evaluated(Regression):
        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.training_step(batch)}

        def predict_step(self, batch: Any) -> torch.Tensor:
            return self.layer(batch[0])  # type: ignore[no-any-return]

    listener, heard = _recorder()
    getattr(Trainer(plugins=[listener], progress=False), stage)(Evaluated(), ROWS, batch_size=4)
    assert heard == ["on_eval_start", "eval_step", "eval_step", "on_eval_end", "on_teardown"]


# -------------------------------------------------------------------------------------------------- who hears them, in which order


def test_listeners_are_called_in_a_fixed_order(tmp_path: Path) -> None:
    heard: dict[str, list[str]] = {hook: [] for hook in EVENTS}

    def hear(self: Any, hook: str, **arguments: Any) -> None:
        heard[hook].append(getattr(self, "label", type(self).__name__))

    first, second = _everything(Callback, hear), _everything(Callback, hear)
    first.label, second.label = "first", "second"
    module = _everything(Regression, hear)
    strategy, precision = _everything(Single, hear), _everything(Precision, hear)
    precision.name = "own"
    _fit(
        first,
        second,
        module=module,
        strategy=strategy,
        precision=precision,
        run_dir=tmp_path,
        val=ROWS[:2],
        log_every=1,
        max_steps=4,
    )
    expected = ["HearingSingle", "HearingPrecision", "HearingRegression", "first", "second"]
    silent = {"on_load", "on_step_skipped", "on_exception", "on_preempt"}
    assert {hook: names[:5] for hook, names in heard.items() if hook not in silent} == {
        hook: expected for hook in EVENTS if hook not in silent
    }


def test_what_fabricate_ships_comes_last() -> None:
    class Looks(Callback):
        def on_log(self, trainer: Trainer) -> None:
            manager = trainer._live().calls.manager
            self.found = manager.order("on_log"), manager.order("optimizer_step")

    looks = Looks()
    _fit(looks, progress=True, log_every=1)
    assert looks.found == (["Looks", "progress_bar"], ["fabricate"])


def test_tryfirst_and_trylast_move_a_listener() -> None:
    heard: list[str] = []

    class Late(Callback):
        @hookimpl(trylast=True)
        def on_step(self) -> None:
            heard.append("late")

    class Early(Callback):
        @hookimpl(tryfirst=True)
        def on_step(self) -> None:
            heard.append("early")

    class Plain(Callback):
        def on_step(self) -> None:
            heard.append("plain")

    _fit(Late(), Plain(), Early())
    assert heard == ["early", "plain", "late"]


# ------------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("hook", [hook for hook in EVENTS if len(_arguments(hook)) > 1])
def test_any_subset_of_the_arguments_may_be_taken(hook: str, tmp_path: Path) -> None:
    seen: dict[int, dict[str, Any]] = {}
    names = _arguments(hook)
    subsets = [[], *([name] for name in names), names[::-1]]
    listeners = []
    for number, subset in enumerate(subsets):

        def hear(self: Any, hook: str, *, number: int = number, **arguments: Any) -> None:
            seen.setdefault(number, arguments)

        listeners.append(type(f"Taking{number}", (Callback,), {hook: _hearing(hook, subset, hear)})())

    class Once(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            return super().training_step(batch) * (torch.inf if self.trainer.progress.skipped == 0 else 1.0)

    class Ends(Callback):
        def on_step(self) -> None:
            if hook == "on_exception":
                raise ValueError("on purpose")
            if hook == "on_preempt":
                signal.raise_signal(signal.SIGINT)

    def fit(**arguments: Any) -> None:
        module = Once() if hook == "on_step_skipped" else Regression()
        _fit(
            *listeners,
            Ends(),
            module=module,
            nonfinite="skip",
            val=ROWS[:2],
            run_dir=tmp_path,
            log_every=1,
            **arguments,
        )

    if hook == "on_exception":
        with pytest.raises(ValueError, match="on purpose"):
            fit()
    else:
        fit(max_steps=4)
    if hook in PER_LISTENER:
        fit(max_steps=5)
    if hook == "on_load":  # what a listener saved nothing for, it does not hear
        assert seen == {}
    else:
        assert [list(seen[number]) for number in range(len(subsets))] == subsets


def test_on_load_gives_back_what_on_save_put_there(tmp_path: Path) -> None:
    class Keeps(Callback):
        loaded: dict[str, Any] | None = None

        def on_save(self, state: dict[str, Any], trainer: Trainer) -> None:
            state.update(step=trainer.step, tensor=torch.arange(3))

        def on_load(self, state: dict[str, Any]) -> None:
            self.loaded = state

    _fit(Keeps(), run_dir=tmp_path)
    second = Keeps()
    _fit(second, run_dir=tmp_path, max_steps=2)
    assert second.loaded is not None
    assert second.loaded["step"] == 1
    assert torch.equal(second.loaded["tensor"], torch.arange(3))


# --------------------------------------------------------------------------------------------------- what a specification says


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented(hook: str) -> None:
    owner = Registrations if hook in REGISTRATIONS else Events
    text = inspect.getdoc(getattr(owner, hook))
    assert text
    assert text.endswith(".")


def test_the_text_says_where_ranks_and_collectives_matter() -> None:
    says = {hook for hook in EVENTS if "ollectives" in (getattr(Events, hook).__doc__ or "")}
    assert says == {"train_step", "on_accumulate", "on_log", "on_exception", "on_teardown"}
    ranks = {hook for hook in EVENTS if "rank" in (getattr(Events, hook).__doc__ or "")}
    assert ranks >= {
        "on_save",
        "on_saved",
        "on_export",
        "on_exception",
        "on_preempt",
        "on_log",
        "on_eval_end",
        "on_step",
    }
    assert "every rank" in (Events.__doc__ or "")


def test_the_modules_text_shows_every_event() -> None:
    assert [hook for hook in EVENTS if hook not in (specifications.__doc__ or "")] == []


@pytest.mark.parametrize("hook", ACTIONS)
def test_an_action_says_that_it_is_wrappable(hook: str) -> None:
    assert (getattr(Events, hook).__doc__ or "").startswith("Wrappable")


def test_the_declarations_for_type_checkers_are_the_events() -> None:
    tree = ast.parse(inspect.getsource(Listener))
    declared = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert declared == list(EVENTS)


USER_CODE = """
from __future__ import annotations

from typing import Any

import torch

from fabricate import DDP, Callback, Precision, Strategy, Trainer, TrainModule, hookimpl


class Module(TrainModule):
    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return batch[0].sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, Any]:
        return {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())

    def on_step(self, step: int) -> None:
        self.log("step", step)

    def on_save(self, state: dict[str, Any]) -> None:
        state["a"] = 1


class Watch(Callback):
    def on_accumulate(self, loss: torch.Tensor, is_last: bool) -> None: ...

    def on_step(self, loss: torch.Tensor, trainer: Trainer) -> None: ...

    def on_teardown(self) -> None: ...

    @hookimpl(wrapper=True)
    def optimizer_step(self) -> Any:
        return (yield)


class Mine(DDP):
    def check(self, world_size: int, device: torch.device) -> list[str]:
        return [*super().check(world_size, device)]

    def on_step(self, trainer: Trainer, step: int) -> None:
        self.heard = step, trainer.strategy.name


class Rounded(Precision):
    def check(self, device: torch.device, strategy: Strategy) -> list[str]:
        return [strategy.name]

    def on_fit_start(self, module: TrainModule) -> None: ...

    def train_step(self, batch: torch.Tensor) -> None: ...


Trainer(strategy=Mine(), precision=Rounded(), plugins=[Watch()], max_steps=1).fit(Module(), [])
"""


def test_overrides_with_some_of_the_arguments_pass_mypy_strict(tmp_path: Path) -> None:
    file = tmp_path / "user_code.py"
    file.write_text(USER_CODE)
    # With the configuration and the cache of the lint that precedes the tests: what torch means is known then.
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(file)], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("Success: no issues found in 1 source file\n", "")


# ------------------------------------------------------------------------------------------------- what is refused at start-up


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
        _fit(plugin, module=Counting(), **arguments)
    assert message in str(caught.value)
    assert not forwards


@pytest.mark.parametrize(("wrong", "right"), sorted(FOREIGN.items()))
def test_a_hook_of_lightning_or_transformers_is_refused_with_ours(wrong: str, right: str) -> None:
    plugin = type("Migrated", (Callback,), {wrong: _method(wrong)})()
    _refused(plugin, f"Migrated.{wrong} is not a hook of fabricate; use {right}")


@pytest.mark.parametrize("wrong", sorted(FOREIGN))
def test_a_foreign_hook_on_the_module_is_refused_too(wrong: str) -> None:
    with pytest.raises(PluginError, match=f"Migrated.{wrong} is not a hook of fabricate; use "):
        _fit(module=type("Migrated", (Regression,), {wrong: _method(wrong)})())


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
    )
    assert [name for name, hint in FOREIGN.items() if not hint.startswith(here)] == []
    assert sorted(set(FOREIGN) & set(HOOKS)) == []


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
    assert _fit(plugin).steps == 1


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
        ("self, step=0", "argument 'step' has a default, which a hook would always use; remove it"),
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
    _refused(plugin, f"{hook} is called for each listener by itself and cannot be wrapped")


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
        _fit(Answers(), *([Wraps()] if wrapped else []))


@pytest.mark.parametrize("hook", ["train_step", "optimizer_step", "write_checkpoint"])
def test_a_wrapper_that_keeps_the_answer_is_an_error(hook: str, tmp_path: Path) -> None:
    plugin = type("Keeps", (Callback,), {hook: hookimpl(wrapper=True)(_method(hook, "self", "yield"))})()
    with pytest.raises(
        PluginError, match=rf"hook {hook} ended without an answer: .*\(Keeps\); end it with `return \(yield\)`"
    ):
        _fit(plugin, run_dir=tmp_path)


def test_a_wrapper_may_pass_on_nothing_from_a_validation_step() -> None:
    class Silent(Regression):
        def validation_step(self, batch: Any) -> None: ...  # type: ignore[override]

    class Wraps(Callback):
        @hookimpl(wrapper=True)
        def eval_step(self) -> Iterator[None]:
            return (yield)

    assert _fit(Wraps(), module=Silent(), val=ROWS[:2], validate_every=1).steps == 1


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
def test_a_plugin_that_hears_and_offers_nothing_is_refused(plugin: object) -> None:
    _refused(plugin, "hears no hook and offers no name: inherit from fabricate.Callback")


def test_a_hook_set_on_the_object_is_refused() -> None:
    plugin = Callback()
    plugin.on_step = lambda: None  # type: ignore[method-assign]
    _refused(plugin, "on_step is set on the object and would never be called; define it in Callback")


def test_a_step_of_the_module_on_a_callback_is_refused() -> None:
    plugin = type("Confused", (Callback,), {"training_step": _method("training_step", "self, batch")})()
    _refused(plugin, "Confused.training_step is not a hook of fabricate; did you mean 'train_step'?")


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_static_or_class_method_is_heard(kind: Any) -> None:
    heard: list[int] = []
    method = _hearing("on_step", ["step"], lambda self, hook, step: heard.append(step))
    if kind is staticmethod:
        method = lambda step: heard.append(step)  # noqa: E731
    assert _fit(type("Odd", (Callback,), {"on_step": kind(method)})()).steps == 1
    assert heard == [1]


def test_one_object_listed_twice_is_refused() -> None:
    plugin = type("Watch", (Callback,), {"on_step": _method("on_step")})()
    with pytest.raises(PluginError, match="this Watch object is listed twice"):
        _fit(plugin, plugin)


def test_a_name_that_is_taken_is_refused() -> None:
    plugin = type("Watch", (Callback,), {"on_step": _method("on_step"), "name": "module"})()
    _refused(plugin, "plugin 'module': the name is taken by another plugin of this run")
