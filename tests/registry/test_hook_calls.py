"""Hook calls: the same semantics as pluggy's, the order of listeners, and the name of a listener that raises."""

from __future__ import annotations

import inspect
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, PluginError, Trainer, TrainModule, hookimpl
from fabricate.hooks import ACTIONS, EVENTS, PER_LISTENER, PROJECT, Events
from fabricate.registry import hook_calls
from fabricate.registry.hook_calls import Calls, Manager, Origin

CALLED = [hook for hook in EVENTS if hook not in PER_LISTENER]


class Hears(Callback):
    """Appends (label, arguments) for each on_step and on_log."""

    def __init__(self, label: str, calls: list[Any]) -> None:
        self.label = label
        self.calls = calls

    def on_step(self, step: int) -> None:
        self.calls.append((self.label, step))


def _arguments(hook: str) -> list[str]:
    return [name for name in inspect.signature(getattr(Events, hook)).parameters if name != "self"]


# ------------------------------------------------------------------------------------------------------- the same as pluggy


def _random_listener(draw: random.Random, number: int, trace: list[Any]) -> Callback:
    """A listener of some hooks: any subset of the arguments in any order, wrappers, ordering marks, answers and None."""
    methods: dict[str, Any] = {}
    for hook in draw.sample(CALLED, draw.randint(1, 4)):
        names = _arguments(hook)
        arguments = draw.sample(names, draw.randint(0, len(names)))
        order = draw.choice([{}, {}, {"tryfirst": True}, {"trylast": True}])
        wraps = draw.random() < 0.2
        answer = draw.choice([None, number]) if hook in ACTIONS else None
        record = f"trace.append(({number}, {hook!r}, {', '.join(arguments)}{',' if arguments else ''}))"
        body = f"    {record}\n"
        if wraps:
            body += f"    result = yield\n    trace.append(({number}, 'after', result))\n    return result\n"
        else:
            body += f"    return {answer}\n"
        scope: dict[str, Any] = {"trace": trace}
        exec(f"def {hook}(self{''.join(', ' + name for name in arguments)}):\n{body}", scope)
        methods[hook] = (
            hookimpl(wrapper=wraps, **order)(scope[hook]) if wraps or order or hook in ACTIONS else scope[hook]
        )
    listener: Callback = type(f"Random{number}", (Callback,), methods)()
    return listener


@pytest.mark.parametrize("part", range(10))
def test_calls_do_what_pluggy_does(part: int) -> None:
    compared = 0
    for seed in range(100 * part, 100 * part + 100):
        draw, trace = random.Random(seed), list[Any]()
        manager = Manager()
        for number in range(draw.randint(0, 6)):
            manager.add(_random_listener(draw, number, trace), f"plugin{number}")
        calls = Calls(manager)
        for hook in CALLED:
            values = {name: f"{hook}.{name}" for name in _arguments(hook)}
            theirs = getattr(manager.hook, hook)(**values)
            expected, trace[:] = list(trace), []
            call = getattr(calls, hook)
            if call is None:
                assert (expected, manager.order(hook)) == ([], [])
                continue
            if (
                hook in ACTIONS
                and theirs is None
                and hook != "eval_step"
                and any(entry[1] == "after" for entry in expected)
            ):
                with pytest.raises(PluginError, match="has no result"):
                    call(*values.values())
            else:
                assert call(*values.values()) == (theirs if hook in ACTIONS else None)
            assert trace == expected, (seed, hook)
            trace.clear()
            compared += 1
    assert compared > 300


def test_the_order_that_is_told_is_the_order_of_the_calls() -> None:
    for seed in range(50):
        draw, trace = random.Random(seed), list[Any]()
        manager = Manager()
        for number in range(6):
            manager.add(_random_listener(draw, number, trace), f"plugin{number}")
        for hook in CALLED:
            getattr(manager.hook, hook)(**dict.fromkeys(_arguments(hook)))
            order = [int(name.removeprefix("plugin")) for name in manager.order(hook)]
            called = [entry[0] for entry in trace if entry[1] == hook]
            assert called == order[: len(called)]
            assert hook in ACTIONS or len(called) == len(order)
            trace.clear()


# ----------------------------------------------------------------------------------------------------- lists of calls, kept fresh


def test_a_hook_that_nobody_implements_is_none() -> None:
    calls = Calls(Manager())
    assert {hook: getattr(calls, hook) for hook in CALLED} == dict.fromkeys(CALLED)


def test_an_action_with_only_the_loops_own_default_is_none() -> None:
    class Default:
        @hookimpl(trylast=True)
        def optimizer_step(self) -> bool:
            return True

    manager = Manager()
    manager.add(Default(), PROJECT)
    assert Calls(manager).optimizer_step is None
    manager.add(type("Own", (Callback,), {"optimizer_step": hookimpl(lambda self: None)})(), "own")
    step = Calls(manager).optimizer_step
    assert step is not None
    assert step(None, None, None) is True


def test_the_calls_declare_every_hook_that_is_not_per_listener() -> None:
    assert list(Calls.__annotations__) == CALLED


def test_adding_and_removing_changes_the_calls_after_a_refresh() -> None:
    entries: list[Any] = []
    manager = Manager()
    manager.add(Hears("first", entries), "first")
    calls = Calls(manager)

    def step(number: int) -> None:
        assert calls.on_step is not None
        calls.on_step(None, None, number, None, None)

    step(1)
    manager.add(Hears("second", entries), "second")
    assert manager.changes != calls.changes
    step(2)
    calls.refresh()
    assert manager.changes == calls.changes
    step(3)
    manager.remove("first")
    calls.refresh()
    step(4)
    manager.remove("second")
    calls.refresh()
    assert calls.on_step is None
    assert entries == [("first", 1), ("first", 2), ("second", 3), ("first", 3), ("second", 4)]


def test_pluggys_monitoring_sees_calls_while_it_is_on() -> None:
    entries: list[Any] = []
    manager = Manager()
    manager.add(Hears("one", entries), "one")
    monitored: list[str] = []
    undo = manager.add_hookcall_monitoring(lambda name, impls, kwargs: monitored.append(name), lambda *a: None)
    calls = Calls(manager)
    assert calls.on_step is not None
    calls.on_step(None, None, 7, None, None)
    undo()
    calls.refresh()
    calls.on_step(None, None, 8, None, None)
    assert (entries, monitored) == ([("one", 7), ("one", 8)], ["on_step"])


def test_the_table_lists_heard_hooks_with_their_listeners_in_order() -> None:
    manager = Manager()
    for name in ("a", "b"):
        manager.add(Hears(name, []), name)
    manager.add(type("Log", (Callback,), {"on_log": lambda self, step: None})(), "c")
    assert manager.table() == [["on_step", ["b", "a"]], ["on_log", ["c"]]]


def test_wants_tells_which_arguments_are_taken() -> None:
    manager = Manager()
    manager.add(Hears("a", []), "a")
    assert manager.wants("on_step", "step")
    assert not manager.wants("on_step", "loss")
    assert not manager.wants("on_log", "step")


def test_per_listener_calls_pass_only_what_is_taken() -> None:
    class Keeps(Callback):
        def on_save(self, state: dict[str, Any]) -> None:
            state["here"] = True

    manager = Manager()
    manager.add(Keeps(), "keeps")
    [(name, call)] = Calls(manager).listeners("on_save")
    state: dict[str, Any] = {}
    call(trainer=None, module=None, state=state)
    assert (name, state) == ("keeps", {"here": True})


def test_the_loss_is_computed_only_when_a_listener_takes_it() -> None:
    calls: list[Any] = []

    class TakesLoss(Callback):
        def on_step(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
            calls.append((loss, grad_norm))

    class AddsLater(Callback):
        def on_step(self, trainer: Trainer, step: int) -> None:
            if step == 1:
                trainer._live().calls.manager.add(TakesLoss(), "later")

    _fit(AddsLater(), max_steps=3)
    assert [(type(loss), norm.ndim) for loss, norm in calls] == [(torch.Tensor, 0)] * 2


# ---------------------------------------------------------------------------------------------------- what it costs, in calls


class HearsMost(Callback):
    """Hears what there is in every update, and a log boundary."""

    def on_accumulate(self, loss: torch.Tensor) -> None: ...
    def on_before_step(self) -> None: ...
    def on_step(self, trainer: Trainer, step: int) -> None: ...
    def on_log(self, metrics: dict[str, float]) -> None: ...


def _calls_per_update(*plugins: object) -> dict[str, int]:
    """Python calls in one update of three micro-batches with a log boundary, from the end of the second update to that of
    the third: of listeners by function, of `hook_calls` and of pluggy in all."""
    counted: dict[str, int] = {}

    def profile(frame: Any, event: str, argument: object) -> None:
        place = frame.f_code.co_filename
        if event == "call" and (place in (hook_calls.__file__, __file__) or "pluggy" in place):
            name = frame.f_code.co_qualname if place == __file__ else Path(place).stem
            counted[name] = counted.get(name, 0) + 1

    class Counts(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            if self.trainer.step == 2 and sys.getprofile() is None:
                sys.setprofile(profile)
            elif self.trainer.step == 3:
                sys.setprofile(None)
            return super().training_step(batch)

    module = Counts()
    trainer = Trainer(plugins=plugins, max_steps=4, gradient_accumulation_steps=3, log_every=1, progress=False)
    try:
        trainer.fit(module, torch.ones(24, 2).split(2))
    finally:
        sys.setprofile(None)
    return {name: count for name, count in counted.items() if "training_step" not in name}


def test_hooks_that_nobody_hears_cost_no_call() -> None:
    assert _calls_per_update() == {}


@pytest.mark.parametrize("listeners", [1, 3])
def test_a_heard_hook_costs_one_call_and_one_per_listener(listeners: int) -> None:
    counts = {"on_accumulate": 3, "on_before_step": 1, "on_step": 1, "on_log": 1}
    theirs = {f"HearsMost.{hook}": count * listeners for hook, count in counts.items()}
    ours = {"hook_calls": sum(counts.values())}
    assert _calls_per_update(*(HearsMost() for _ in range(listeners))) == ours | theirs


def test_the_benchmark_compares_with_pluggy_in_one_run(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.dispatch", "--rounds", "11", "--steps", "300", "--json", str(path)]
    process = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert process.returncode == 0 or process.stderr.startswith("missed"), (
        process.stderr
    )  # a clock on a busy machine is no gate
    rows = json.loads(path.read_text())
    assert [row["listeners"] for row in rows] == [0, 1, 3, 10]
    assert all(row["pluggy"] > row["fabricate"] for row in rows)
    assert len([line for line in process.stdout.splitlines() if line.startswith("|")]) == 2 + len(rows)


# ------------------------------------------------------------------------------------------------------------ who raised what


class Regression(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(*plugins: object, module: TrainModule | None = None, **arguments: Any) -> None:
    arguments = {"max_steps": 3, "progress": False, **arguments}
    Trainer(plugins=plugins, **arguments).fit(module or Regression(), torch.ones(8, 2).split(2))


def _notes(run: Callable[[], object]) -> list[str]:
    with pytest.raises(ZeroDivisionError) as caught:
        run()
    return [note for note in caught.value.__notes__ if note.startswith("raised in")]


class Divides(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, step: int) -> None:
        _helper(step - self.at)


def _helper(number: int) -> float:
    return 1 / number


def test_an_exception_names_plugin_script_hook_and_step() -> None:
    assert _notes(lambda: _fit(Divides(2))) == ["raised in hook on_step of plugin 'Divides' (this script) at step 2"]


def test_of_two_objects_of_one_class_the_right_one_is_named() -> None:
    assert _notes(lambda: _fit(Divides(9), Divides(3))) == [
        "raised in hook on_step of plugin 'Divides#2' (this script) at step 3"
    ]


def test_the_module_is_named_too() -> None:
    module = type("Own", (Regression,), {"on_epoch_start": lambda self: _helper(0)})()
    assert _notes(lambda: _fit(module=module)) == [
        "raised in hook on_epoch_start of plugin 'module' (this script) at step 0"
    ]


def test_a_plugin_is_named_through_a_wrapper_around_it() -> None:
    class Wraps(Callback):
        @hookimpl(wrapper=True)
        def on_step(self) -> Any:
            return (yield)

    assert _notes(lambda: _fit(Divides(1), Wraps())) == [
        "raised in hook on_step of plugin 'Divides' (this script) at step 1"
    ]


@pytest.mark.parametrize("before", [True, False])
def test_a_wrapper_that_raises_is_named(before: bool) -> None:
    class Wraps(Callback):
        @hookimpl(wrapper=True)
        def train_step(self) -> Any:
            if before:
                _helper(0)
            result = yield
            _helper(0)
            return result

    assert _notes(lambda: _fit(Wraps())) == ["raised in hook train_step of plugin 'Wraps' (this script) at step 1"]


def test_a_training_step_that_raises_inside_a_wrapper_blames_no_plugin() -> None:
    class Wraps(Callback):
        @hookimpl(wrapper=True)
        def train_step(self) -> Any:
            return (yield)

    module = type("Own", (Regression,), {"training_step": lambda self, batch: _helper(0)})()
    assert _notes(lambda: _fit(Wraps(), module=module)) == []


def test_a_listener_that_fails_while_saving_is_named(tmp_path: Any) -> None:
    plugin = type("Keeps", (Callback,), {"on_save": lambda self, state: _helper(0)})()
    assert _notes(lambda: _fit(plugin, run_dir=tmp_path)) == [
        "raised in hook on_save of plugin 'Keeps' (this script) at step 3"
    ]


def test_the_distribution_and_its_version_are_named() -> None:
    manager = Manager()
    manager.add(Divides(0), "divides", Origin("fabricate-divides", "1.2"))
    calls = Calls(manager)
    calls.step = 5
    assert calls.on_step is not None
    with pytest.raises(ZeroDivisionError) as caught:
        calls.on_step(None, None, 0, None, None)
    assert caught.value.__notes__ == ["raised in hook on_step of plugin 'divides' (fabricate-divides 1.2) at step 5"]
