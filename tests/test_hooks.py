"""The hooks: their list, when each is called, and the order of the listeners."""

from __future__ import annotations

import ast
import inspect
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fabricate import Callback, Precision, Single, Trainer, hookimpl
from fabricate import hooks as specifications
from fabricate.hooks import ACTIONS, EVENTS, HOOKS, PER_LISTENER, REGISTRATIONS, Events, Listener, Registrations
from tests.support.hearing import ROWS, Regression, fit, hearing

ROOT = Path(__file__).parent.parent


def _arguments(hook: str) -> list[str]:
    return [name for name in inspect.signature(getattr(Events, hook)).parameters if name != "self"]


def _everything(base: type, hear: Callable[..., None]) -> Any:
    """An object of a subclass of `base` that hears every hook with all of its arguments."""
    return type(f"Hearing{base.__name__}", (base,), {hook: hearing(hook, _arguments(hook), hear) for hook in EVENTS})()


def _recorder() -> tuple[Callback, list[str]]:
    calls: list[str] = []
    listener: Callback = _everything(Callback, lambda self, hook, **arguments: calls.append(hook))
    return listener, calls


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
    listener, calls = _recorder()
    fit(
        listener,
        val=ROWS[:4],
        max_steps=None,
        max_epochs=2,
        gradient_accumulation_steps=2,
        log_every=2,
        run_dir=tmp_path,
    )
    assert calls == ["on_fit_start", *EPOCH, *EPOCH, "on_complete", "on_export", "on_fit_end", "on_teardown"]


def test_what_is_not_asked_for_is_not_called() -> None:
    listener, calls = _recorder()
    fit(listener, log_every=100)
    once = ["train_step", "on_accumulate", "on_before_step", "optimizer_step", "on_step"]
    assert calls == ["on_fit_start", "on_epoch_start", *once, "on_log", "on_complete", "on_fit_end", "on_teardown"]


def test_a_state_that_no_moment_saved_is_saved_at_the_end(tmp_path: Path) -> None:
    listener, calls = _recorder()
    fit(listener, max_steps=3, run_dir=tmp_path, save_every=2)
    assert calls.count("write_checkpoint") == 2
    end = ["write_checkpoint", "on_save", "on_saved", "on_log", "on_complete", "on_export", "on_fit_end", "on_teardown"]
    assert calls[-8:] == end


def test_a_resumed_fit_loads_after_it_started(tmp_path: Path) -> None:
    fit(_recorder()[0], run_dir=tmp_path)
    listener, calls = _recorder()
    fit(listener, run_dir=tmp_path, max_steps=2)
    assert calls[:3] == ["on_fit_start", "on_load", "on_epoch_start"]


def test_an_update_that_is_skipped_is_told_instead_of_the_step() -> None:
    class Infinite(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            return super().training_step(batch) * (torch.inf if self.trainer.progress.skipped == 0 else 1.0)

    listener, hook_calls = _recorder()
    fit(listener, module=Infinite(), nonfinite="skip")
    calls = [hook for hook in hook_calls if hook.startswith("on_step")]
    assert calls == ["on_step_skipped", "on_step"]


def test_a_failure_is_told_before_the_teardown(tmp_path: Path) -> None:
    class Failing(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            raise RuntimeError("broken")

    listener, calls = _recorder()
    with pytest.raises(RuntimeError, match="broken"):
        fit(listener, module=Failing(), run_dir=tmp_path)
    assert calls == ["on_fit_start", "on_epoch_start", "train_step", "on_exception", "on_teardown"]


def test_weights_that_a_listener_changes_when_the_fit_is_complete_are_validated_and_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    class Changes(Callback):
        def on_complete(self, trainer: Trainer, module: torch.nn.Module) -> None:
            for parameter in module.parameters():
                parameter.data.zero_()
            trainer.request_eval()

    module, recorder = Regression(), _recorder()
    result = fit(Changes(), recorder[0], module=module, val=ROWS[:4], run_dir=tmp_path)
    evaluation = ["on_eval_start", "eval_step", "eval_step", "on_eval_end"]
    assert recorder[1][-8:] == ["on_complete", *evaluation, "on_export", "on_fit_end", "on_teardown"]
    zeros = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    assert result.metrics["val_loss"] == pytest.approx(float(torch.stack([y for _, y in ROWS[:4]]).square().mean()))
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == zeros.keys()
    assert all(not value.any() for value in load_file(tmp_path / "model" / "model.safetensors").values())
    assert all(not value.any() for value in module.state_dict().values())


def test_an_interrupted_fit_saves_and_exports_nothing(tmp_path: Path) -> None:
    class Interrupts(Callback):
        def on_step(self) -> None:
            signal.raise_signal(signal.SIGINT)

    listener, calls = _recorder()
    result = fit(listener, Interrupts(), run_dir=tmp_path, max_steps=5)
    assert calls[-6:] == ["write_checkpoint", "on_save", "on_saved", "on_preempt", "on_fit_end", "on_teardown"]
    assert (result.steps, result.stop_reason) == (1, "interrupted")


def test_every_event_is_heard_by_the_tests_above(tmp_path: Path) -> None:
    listed = {*EPOCH, "on_fit_start", "on_complete", "on_export", "on_fit_end", "on_teardown"}
    others = {"on_load", "on_load_weights", "on_step_skipped", "on_exception", "on_preempt"}
    assert listed | others == set(EVENTS)


@pytest.mark.parametrize(
    ("stage", "method"), [("validate", "validation_step"), ("test", "test_step"), ("predict", "x")]
)
def test_an_evaluation_calls_its_own_hooks_only(stage: str, method: str) -> None:
    class Evaluated(Regression):
        def test_step(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.training_step(batch)}

        def predict_step(self, batch: Any) -> torch.Tensor:
            return self.layer(batch[0])  # type: ignore[no-any-return]

    listener, calls = _recorder()
    getattr(Trainer(plugins=[listener], progress=False), stage)(Evaluated(), ROWS, batch_size=4)
    assert calls == ["on_eval_start", "eval_step", "eval_step", "on_eval_end", "on_teardown"]


# -------------------------------------------------------------------------------------------------- who hears them, in which order


def test_listeners_are_called_in_a_fixed_order(tmp_path: Path) -> None:
    calls: dict[str, list[str]] = {hook: [] for hook in EVENTS}

    def hear(self: Any, hook: str, **arguments: Any) -> None:
        calls[hook].append(getattr(self, "label", type(self).__name__))

    first, second = _everything(Callback, hear), _everything(Callback, hear)
    first.label, second.label = "first", "second"
    module = _everything(Regression, hear)
    strategy, precision = _everything(Single, hear), _everything(Precision, hear)
    precision.name = "own"
    fit(
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
    silent = {"on_load", "on_load_weights", "on_step_skipped", "on_exception", "on_preempt"}
    assert {hook: names[:5] for hook, names in calls.items() if hook not in silent} == {
        hook: expected for hook in EVENTS if hook not in silent
    }


def test_what_fabricate_ships_comes_last() -> None:
    class Looks(Callback):
        def on_log(self, trainer: Trainer) -> None:
            manager = trainer._live().calls.manager
            self.orders = manager.order("on_log"), manager.order("optimizer_step")

    looks = Looks()
    fit(looks, progress=True, log_every=1)
    assert looks.orders == (["Looks", "progress_bar"], ["fabricate"])


def test_tryfirst_and_trylast_move_a_listener() -> None:
    calls: list[str] = []

    class Late(Callback):
        @hookimpl(trylast=True)
        def on_step(self) -> None:
            calls.append("late")

    class Early(Callback):
        @hookimpl(tryfirst=True)
        def on_step(self) -> None:
            calls.append("early")

    class Plain(Callback):
        def on_step(self) -> None:
            calls.append("plain")

    fit(Late(), Plain(), Early())
    assert calls == ["early", "plain", "late"]


# ------------------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("hook", [hook for hook in EVENTS if len(_arguments(hook)) > 1])
def test_any_subset_of_the_arguments_may_be_taken(hook: str, tmp_path: Path) -> None:
    by_listener: dict[int, dict[str, Any]] = {}
    names = _arguments(hook)
    subsets = [[], *([name] for name in names), names[::-1]]
    listeners = []
    for number, subset in enumerate(subsets):

        def hear(self: Any, hook: str, *, number: int = number, **arguments: Any) -> None:
            by_listener.setdefault(number, arguments)

        listeners.append(type(f"Taking{number}", (Callback,), {hook: hearing(hook, subset, hear)})())

    class Once(Regression):
        def training_step(self, batch: Any) -> torch.Tensor:
            return super().training_step(batch) * (torch.inf if self.trainer.progress.skipped == 0 else 1.0)

    class Ends(Callback):
        def on_step(self) -> None:
            if hook == "on_exception":
                raise ValueError("on purpose")
            if hook == "on_preempt":
                signal.raise_signal(signal.SIGINT)

    def listened_to(**arguments: Any) -> None:
        module = Once() if hook == "on_step_skipped" else Regression()
        fit(
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
            listened_to()
    else:
        listened_to(max_steps=4)
    if hook in PER_LISTENER:
        listened_to(max_steps=5)
    if hook in ("on_load", "on_load_weights"):  # what a listener saved nothing for, it does not hear
        assert by_listener == {}
    else:
        assert [list(by_listener[number]) for number in range(len(subsets))] == subsets


def test_on_load_gives_back_what_on_save_put_there(tmp_path: Path) -> None:
    class Keeps(Callback):
        loaded: dict[str, Any] | None = None

        def on_save(self, state: dict[str, Any], trainer: Trainer) -> None:
            state.update(step=trainer.step, tensor=torch.arange(3))

        def on_load(self, state: dict[str, Any]) -> None:
            self.loaded = state

    fit(Keeps(), run_dir=tmp_path)
    second = Keeps()
    fit(second, run_dir=tmp_path, max_steps=2)
    assert second.loaded is not None
    assert second.loaded["step"] == 1
    assert torch.equal(second.loaded["tensor"], torch.arange(3))


class Centred(Regression):
    """What it subtracts is in no buffer."""

    mean = 0.0

    def on_save(self, state: dict[str, Any]) -> None:
        state["mean"] = self.mean

    def on_step(self) -> None:
        self.mean += 1.0

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"mean": self.mean}


class Takes(Centred):
    def on_load_weights(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def test_what_a_module_saved_beside_its_weights_comes_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(module=Centred(), run_dir=tmp_path, max_steps=3)
    capsys.readouterr()
    trainer = Trainer(run_dir=tmp_path, progress=False)
    assert trainer.validate(Takes(), ROWS, checkpoint="last", batch_size=4) == {"val_mean": 3.0}
    assert Takes.load_from_checkpoint(tmp_path).mean == 3.0
    assert "on_save" not in str(capsys.readouterr())
    assert trainer.validate(Centred(), ROWS, checkpoint="last", batch_size=4) == {"val_mean": 0.0}
    assert Centred.load_from_checkpoint(tmp_path).mean == 0.0
    output = capsys.readouterr()
    for text in output:
        assert "note: Centred.on_save put values into" in text
        assert "define on_load_weights(self, state)" in text


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
        self.arguments = step, trainer.strategy.name


class Rounded(Precision):
    def check(self, device: torch.device, strategy: Strategy) -> list[str]:
        return [strategy.name]

    def on_fit_start(self, module: TrainModule) -> None: ...

    @hookimpl
    def train_step(self, batch: torch.Tensor) -> None: ...


Trainer(strategy=Mine(), precision=Rounded(), plugins=[Watch()], max_steps=1).fit(Module(), [])
"""


def test_overrides_with_some_of_the_arguments_pass_mypy_strict(tmp_path: Path) -> None:
    file = tmp_path / "user_code.py"
    file.write_text(USER_CODE)
    # With the configuration and the cache of the lint that precedes the tests: what torch means is known then.
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    process = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(file)], capture_output=True, text=True, check=False
    )
    assert (process.stdout, process.stderr) == ("Success: no issues found in 1 source file\n", "")
