"""`fabricate plugins`, its commands, commands that plugins add, and distributions written by `fabricate plugins new`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fabricate.cli.main import main
from tests.support.distributions import Install, installing


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from installing(tmp_path, monkeypatch)


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def _problems(plugin: str) -> str:
    shown = _invoke("plugins", "check", "--json")
    (row,) = [row for row in json.loads(shown.output) if row["name"] == plugin]
    assert shown.exit_code == (1 if any(r["problems"] for r in json.loads(shown.output)) else 0)
    return "\n".join(row["problems"])


STRATEGY = """
class Own(Strategy):
    name = "{0}"
@hookimpl
def register_strategies(register): register("{0}", Own)
"""
COMMAND = """
@hookimpl
def register_commands(register): register("{0}", lambda: click.Command("{0}", callback=lambda: click.echo("hello from {1}")))
"""
LISTENER = """
class Heard(Callback):
    def {0}(self): pass
"""


def test_the_order_of_a_hook_is_printed(install: Install) -> None:
    install("one", LISTENER.format("on_step"), attribute="Heard")
    install(
        "two", "class Heard(Callback):\n    @hookimpl(tryfirst=True)\n    def on_step(self): pass", attribute="Heard"
    )
    shown = _invoke("plugins", "--order", "on_step", "--plugin", "one", "--plugin", "two", "--json")
    rows = [(row["order"], row["plugin"], row["distribution"], row["how"]) for row in json.loads(shown.output)]
    assert rows == [
        (1, "two", "two 1.0", "tryfirst"),
        (2, "module", "", "if it overrides the hook"),
        (3, "one", "one 1.0", ""),
    ]


def test_the_loop_comes_last_in_the_order_of_a_hook() -> None:
    shown = _invoke("plugins", "--order", "train_step", "--json")
    assert [row["plugin"] for row in json.loads(shown.output)] == ["module", "fabricate"]


def test_what_a_module_logs_at_the_end_of_an_evaluation_is_there_before_plugins_are_called(install: Install) -> None:
    install("one", LISTENER.format("on_eval_end"), attribute="Heard")
    shown = _invoke("plugins", "--order", "on_eval_end", "--plugin", "one", "--json")
    rows = [(row["plugin"], row["how"]) for row in json.loads(shown.output)]
    assert rows[:3] == [
        ("module", "if it overrides the hook"),
        ("fabricate", "adds what the module logged"),
        ("one", ""),
    ]


@pytest.mark.parametrize(
    ("hook", "hint"), [("on_stpe", "did you mean 'on_step'?"), ("on_train_batch_end", "use on_accumulate")]
)
def test_an_unknown_hook_is_refused_with_a_hint(hook: str, hint: str) -> None:
    shown = _invoke("plugins", "--order", hook)
    assert shown.exit_code == 2
    assert hint in shown.output


def test_a_good_plugin_has_no_problems(install: Install) -> None:
    install("good", STRATEGY.format("good-strategy"))
    assert not _problems("good")


def test_a_strategy_that_asks_for_options_has_no_problems(install: Install) -> None:
    code = "def make(**options): raise ConfigurationError('give at least one option')"
    install("good", f"{code}\n@hookimpl\ndef register_strategies(register): register('choosy', make)")
    assert not _problems("good")


@pytest.mark.parametrize(
    "arguments", [["plugins"], ["plugins", "--order", "on_step", "--plugin", "light", "--strategy", "fsdp"], ["--help"]]
)
def test_looking_at_plugins_imports_no_torch(arguments: list[str], install: Install, tmp_path: Path) -> None:
    install("light", "", attribute="Heard")
    (tmp_path / "light.py").write_text("from fabricate import Callback\n" + LISTENER.format("on_step"))
    code = (
        "import sys\nfrom fabricate.cli.main import main\n"
        f"try: main({arguments})\nexcept SystemExit as end: assert not end.code\n"
        "assert 'fabricate.registry.hook_calls' in sys.modules\n"
        "assert not {'accelerate', 'numpy', 'torch'} & sys.modules.keys()"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "light" in process.stdout or "--help" in arguments


@pytest.mark.parametrize(
    ("code", "attribute", "problem"),
    [
        ("raise ValueError('no such luck')", "", "fails to import: ValueError: no such luck"),
        ("raise SystemExit(0)", "", "fails to import: SystemExit: 0"),
        (STRATEGY.format("ddp"), "", "strategy 'ddp' is shadowed by the built-in one; choose it as wrong/ddp"),
        (COMMAND.format("run", "it"), "", "command 'run' is shadowed by the built-in one"),
        (LISTENER.format("on_stpe"), "Heard", "is not a hook of fabricate; did you mean 'on_step'?"),
        ("@hookimpl\ndef register_precisions(register): register('mine', 'absent:Gone')", "", "absent"),
        (
            "@hookimpl\ndef register_trackers(register): register('wandb', 'absent:Gone')",
            "",
            "tracker 'wandb' is shadowed",
        ),
    ],
)
def test_check_tells_what_is_wrong(install: Install, code: str, attribute: str, problem: str) -> None:
    install("wrong", code, attribute=attribute)
    assert problem in _problems("wrong")


def test_check_names_both_who_offer_one_name(install: Install) -> None:
    install("one", STRATEGY.format("mars"))
    install("two", STRATEGY.format("mars"))
    assert "is offered by 'two' (two 1.0) too; choose with one/mars or two/mars" in _problems("one")
    assert "is offered by 'one' (one 1.0) too" in _problems("two")


def test_check_names_two_distributions_with_one_plugin_name(install: Install) -> None:
    install("one", "", name="same")
    install("two", "", name="same")
    rows = json.loads(_invoke("plugins", "check", "--json").output)
    assert [r["problems"] for r in rows if r["name"] == "same"] == [
        [f"{other} 1.0 has a plugin of the same name; uninstall one"] for other in ("two", "one")
    ]


def test_a_plugin_adds_a_command(install: Install) -> None:
    install("acme", COMMAND.format("greet", "acme"))
    assert _invoke("greet").output == "hello from acme\n"
    assert "greet" in _invoke("--help").output


def test_a_builtin_command_wins_and_the_qualified_name_reaches_the_other(install: Install) -> None:
    install("acme", COMMAND.format("plugins", "acme"))
    assert "hello" not in _invoke("plugins", "--help").output
    assert _invoke("acme/plugins").output == "hello from acme\n"


def test_an_unknown_command_is_still_unknown() -> None:
    shown = _invoke("plugin")
    assert shown.exit_code == 2
    assert "No such command 'plugin'" in shown.output


@pytest.mark.parametrize("factory", ["'absent:Gone'", "lambda: 1 / 0", "lambda: 3"])
def test_a_broken_command_is_listed_and_breaks_only_itself(install: Install, factory: str) -> None:
    install("acme", f"@hookimpl\ndef register_commands(register): register('greet', {factory})")
    shown = _invoke("--help")
    assert shown.exit_code == 0
    assert "(broken:" in shown.output
    called = _invoke("greet", "--loud", "x")
    assert called.exit_code == 2
    assert "error: the command 'greet' of a plugin cannot be loaded" in called.output


def test_a_broken_active_plugin_does_not_break_the_list(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("wrong", "raise ValueError('no such luck')")
    monkeypatch.setenv("FABRICATE_PLUGINS", "wrong;absent")
    states = {row["name"]: row["state"] for row in json.loads(_invoke("plugins", "--json").output)}
    assert (states["wrong"], states["absent"]) == ("broken", "broken")
    assert _invoke("--help").exit_code == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Mine", "small letters"),
        ("2fast", "small letters"),
        ("ddp", "has this name and would be used instead"),
        ("taken", "exists already"),
    ],
)
def test_new_refuses_a_name_that_cannot_be(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "fabricate-taken").mkdir()
    shown = _invoke("plugins", "new", name, "--kind", "strategy", "--into", str(tmp_path))
    assert shown.exit_code == 2
    assert reason in shown.output


def test_a_registered_tracker_that_is_none_is_refused(install: Install, tmp_path: Path) -> None:
    import torch

    from fabricate import PluginError, Trainer, TrainModule

    class Module(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    install("acme", "@hookimpl\ndef register_trackers(register): register('none', lambda run_name, logging_dir: 3)")
    trainer = Trainer(trackers=["none"], run_dir=tmp_path / "run", max_steps=1, progress=False)
    with pytest.raises(PluginError, match="made a int, not an accelerate GeneralTracker"):
        trainer.fit(Module(), torch.randn(4, 4), batch_size=4)
