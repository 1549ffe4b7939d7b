"""Arguments of the Trainer from `fabricate run --set NAME=VALUE` and from a YAML file of them."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner

from fabricate import ConfigurationError, Every, Trainer
from fabricate.cli.launch import prepared
from fabricate.cli.main import main
from fabricate.configuration.arguments import CHECKS
from fabricate.configuration.launched import VARIABLE, Launched, check_launched, read_setting, variables
from tests.support.regression import ROWS, Regression

SCRIPT = """
import json, sys
from fabricate import Trainer
settings = Trainer(max_epochs=2).settings
print(json.dumps([settings.max_steps, settings.max_epochs, str(settings.save_every), settings.strategy, settings.keep["best"]]))
"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("max_steps=100", 100),
        ("save_every=1 epoch", "1 epoch"),
        ("max_grad_norm=1e-3", 1e-3),
        ("deterministic=true", True),
        ("validate_every=null", None),
        ("seed=None", None),
        ("max_grad_norm=none", None),
        ("print_plan=none", "none"),
        ("keep={last: 2, best: 1}", {"last": 2, "best": 1}),
        ("progress=[loss, accuracy]", ["loss", "accuracy"]),
        ("precision=no", "no"),
        ("seed=010", 10),
        ("seed=0x10", 16),
        ("max_steps=1_000", 1000),
    ],
)
def test_values_are_written_as_in_yaml(text: str, value: Any) -> None:
    name, setting = read_setting(text)
    assert (name, setting, type(setting)) == (text.partition("=")[0], value, type(value))
    Trainer(**{name: setting})


def launched(**arguments: Any) -> str:
    """The value of the variable that carries `arguments`, given with --set."""
    return variables({name: Launched(value, "--set") for name, value in arguments.items()})[VARIABLE]


def test_a_trainer_takes_what_its_script_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, launched(max_steps=3, log_every=5))
    settings = Trainer(max_epochs=1, log_every="5 steps").settings  # the same, written in another way
    assert (settings.max_steps, settings.max_epochs, settings.log_every) == (3, 1, Every(steps=5))


def test_an_argument_that_script_and_launcher_set_differently_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, launched(max_steps=3))
    with pytest.raises(ConfigurationError, match="max_steps=7 is set in the Trainer and 3 by --set; remove one"):
        Trainer(max_steps=7)


def test_the_plan_names_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, launched(max_steps=3, gradient_accumulation_steps=2))
    plan = Trainer().plan(Regression(), ROWS, batch_size=2)
    assert (plan["max_steps"], plan.source("max_steps")) == (3, "--set")
    assert (plan["gradient_accumulation_steps"], plan.source("gradient_accumulation_steps")) == (2, "--set")
    assert "  adopted  max_steps=3 (--set), gradient_accumulation_steps=2 (--set)\n" in plan.summary()


ONE_OF_EACH: dict[str, Any] = {
    "strategy": "ddp",
    "precision": "bf16",
    "max_steps": 3,
    "max_epochs": 3,
    "min_steps": 1,
    "min_epochs": 1,
    "max_time": "1 hours",
    "timeout": "2 minutes",
    "gradient_accumulation_steps": 2,
    "global_batch_size": 4,
    "max_grad_norm": 0.5,
    "max_grad_value": 0.5,
    "nonfinite": "skip",
    "seed": 7,
    "deterministic": True,
    "detect_anomaly": True,
    "compile": {"mode": "default"},
    "activation_checkpointing": True,
    "run_dir": "somewhere",
    "save": "async",
    "save_every": "1 epoch",
    "keep": {"last": 2, "best": 1},
    "load_best": True,
    "save_frozen": False,
    "save_weights_only": True,
    "validate_every": None,
    "validate_first": True,
    "sanity_batches": 0,
    "log_every": "5 steps",
    "progress": ["loss"],
    "print_plan": "full",
    "trackers": ["tensorboard"],
    "limit_train_batches": 2,
    "limit_val_batches": 0.5,
    "limit_test_batches": 1,
    "limit_predict_batches": 1,
    "overfit_batches": 2,
    "fast_dev_run": 2,
    "accept_changes": ["seed"],
}
"""A value for every argument of the Trainer but `plugins`, which have an option of their own."""


def test_every_argument_stands_in_the_plan_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ONE_OF_EACH.keys() == CHECKS.keys() - {"plugins"}
    for name, value in ONE_OF_EACH.items():
        monkeypatch.setenv(VARIABLE, variables({name: Launched(value, "run.yaml")})[VARIABLE])
        plan = Trainer().plan(Regression(), ROWS, ROWS, batch_size=2)
        assert plan.source(name) == "run.yaml"
        assert re.search(rf"(?m)^  {name.replace('_', ' ')} .*\[run\.yaml\]$", str(plan)), name
        assert f"{name}=" in plan.summary()


def test_every_argument_of_a_script_stands_in_the_plan_as_an_argument(tmp_path: Path) -> None:
    for name, value in {**ONE_OF_EACH, "save_every": "2 epochs", "run_dir": tmp_path}.items():
        plan = Trainer(**{name: value}).plan(Regression(), ROWS, ROWS, batch_size=2)
        source = plan.source("clipping" if name.startswith("max_grad_") else name)
        assert "argument" in source or (name, source) == ("global_batch_size", "2 x 2 x 1"), (name, source)
    plan = Trainer().plan(Regression(), ROWS, ROWS, batch_size=2)
    assert {
        plan.source(name).partition(";")[0] for name in ("save_every", "validate_every", "log_every", "nonfinite")
    } == {"default"}


def test_the_file_on_the_page_reaches_the_plan_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/configuration.md: its YAML, its --set."""
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    file = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0]
    command = next(line for line in page.splitlines() if line.startswith("fabricate run train.py --set "))
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(file + "max_grad_norm: 1e-1\n")
    Path("train.py").touch()
    for config, settings in (("run.yaml", ()), (None, shlex.split(command)[4::2])):
        keywords: dict[str, Any] = {name: None for name in inspect.signature(prepared).parameters}
        keywords |= {"script": "train.py", "arguments": (), "plugins": (), "config": config, "settings": settings}
        _, environment = prepared(**(keywords | {"plan_only": False}))
        source, arguments = (config, yaml.safe_load(file)) if config else ("--set", dict(map(read_setting, settings)))
        assert len(arguments) >= 3
        with monkeypatch.context() as patched:
            for name in (VARIABLE, "FABRICATE_STRATEGY", "FABRICATE_PRECISION"):
                patched.setenv(name, environment.get(name, ""))
            plan = Trainer().plan(Regression(), ROWS, ROWS, batch_size=2)
        assert {plan.source(name) for name in arguments} == {source}
        if config:
            assert (plan["strategy"], plan["precision"], plan["max_grad_norm"]) == ("fsdp", "bf16", 0.1)
            assert "adopted  strategy=fsdp (run.yaml), precision=bf16 (run.yaml)" in plan.summary()


def test_a_precision_that_yaml_takes_for_false_is_its_name() -> None:
    assert check_launched("precision", False, "run.yaml").value == "no"


def test_a_variable_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("max_steps=3", "[1]", '{"max_steps": 3}'):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(ConfigurationError, match=f"{VARIABLE}=.* cannot be read. It has to be a JSON object"):
            Trainer()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "max_step=3"], "--set: Trainer has no argument 'max_step'; did you mean 'max_steps'?"),
        (["--set", "accumulate_grad_batches=3"], "use gradient_accumulation_steps="),
        (["--set", "max_steps=few"], "--set: max_steps='few': give a whole number"),
        (["--set", "max_steps"], "give NAME=VALUE, for instance --set max_steps=100"),
        (["--set", "keep={last: 2"], "is not valid YAML"),
        (["--set", "max_steps=3", "--set", "max_steps=4"], "max_steps: --set sets 3, but --set sets 4"),
        (["--set", "plugins=[ema]"], "the argument plugins cannot be set in this way. Use --plugin NAME"),
        (
            ["--set", "strategy=ddp", "--strategy", "fsdp"],
            "--strategy fsdp and --set strategy=ddp contradict each other",
        ),
        (["--config", "run.yaml", "--set", "max_steps=4"], "run.yaml sets 3, but --set sets 4"),
        (["--config", "wrong.yaml"], "wrong.yaml: Trainer has no argument 'max_stepps'; did you mean 'max_steps'?"),
    ],
)
def test_mistakes_are_errors_before_a_rank_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    (tmp_path / "run.yaml").write_text("max_steps: 3\n")
    (tmp_path / "wrong.yaml").write_text("max_stepps: 3\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = CliRunner().invoke(main, ["run", "train.py", *options])  # in this process: nothing is started
    assert ended.exit_code != 0
    assert words in ended.output


def test_a_file_and_set_together_reach_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run.yaml").write_text("strategy: ddp\nsave_every: 1 epoch\nkeep: {last: 2, best: 1}\n")
    command = [sys.executable, "-m", "fabricate", "run", "train.py", "--config", "run.yaml", "--set", "max-steps=9"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    # The strategy travels as the option --strategy does.
    assert json.loads(process.stdout) == [9, 2, "1 epoch", "auto", 1]


def test_a_time_is_not_read_as_a_number_of_steps() -> None:
    assert read_setting("save_every=1:30") == ("save_every", "1:30")
