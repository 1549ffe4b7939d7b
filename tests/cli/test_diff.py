"""`fabricate diff` prints the differences of two runs by topic, and the first metric and tensor that differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from fabricate.cli.main import main
from tests.support.recorded import SAVED, record


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of one learning rate each."""
    root = tmp_path_factory.mktemp("diff")
    record(root / "first", fails=False)
    record(root / "second", fails=False, learning_rate=0.03)
    return root / "first", root / "second"


def diff(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, arguments)])


def differences(*arguments: object) -> dict[str, dict[str, dict[str, str]]]:
    by_topic: dict[str, Any] = {}
    for different in json.loads(diff(*arguments, "--json").stdout):
        by_topic.setdefault(different["topic"], {})[different["name"]] = different
    return by_topic


def test_a_run_differs_in_nothing_from_itself(runs: tuple[Path, Path]) -> None:
    same = diff(runs[0], runs[0])
    assert (same.exit_code, same.stdout) == (0, f"no difference between {runs[0]} and {runs[0]}\n")


def test_metrics_of_one_step_on_two_lines_are_no_difference(runs: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines.append({**lines[-1], "metrics": {"weight_norm": 5.0}})  # as a hook logs at the end of an epoch
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert diff(copy, copy).stdout == f"no difference between {copy} and {copy}\n"
    assert "weight_norm" in diff(copy, runs[0]).stdout


def test_what_was_set_otherwise_is_named_with_both_values(runs: tuple[Path, Path]) -> None:
    by_topic = differences(*runs)
    assert by_topic["plan"].keys() == {"learning_rate"}
    rate = by_topic["configuration"]["lr of group 0 of optimizer 'main'"]
    assert (rate["first"], rate["second"]) == ("0.01", "0.03")
    assert "versions" not in by_topic
    assert "data" not in by_topic


def test_the_first_metric_and_the_first_tensor_that_differ_are_named(runs: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    fifth = next(line for line in lines if line["step"] == 5 and line["stage"] == "train")
    fifth["metrics"]["loss"] = 7.5
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (different,) = differences(runs[0], copy)["metrics"].values()
    assert (different["name"], different["second"]) == ("loss at step 5 (train)", "7.5")
    (tensor,) = differences(*runs)["checkpoints"].values()
    assert f"at step {SAVED} (weights)" in tensor["name"]
    assert "elements; first at" in tensor["first"]


def test_versions_and_data_come_from_the_last_fit(runs: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    text = (copy / "events.jsonl").read_text()
    (copy / "events.jsonl").write_text(text.replace('"seed": 1', '"seed": 2').replace('"torch": "', '"torch": "x'))
    by_topic = differences(runs[0], copy)
    assert (by_topic["versions"].keys(), by_topic["data"].keys()) == ({"torch"}, {"seed"})


def test_a_log_that_ends_earlier_is_a_difference(runs: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:3]))
    shorter = diff(runs[0], copy)
    assert shorter.exit_code == 1
    assert "length of the log" in shorter.stdout


def test_means_over_other_steps_are_not_compared(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for name, log_every in (("often", 1), ("rarely", 2)):
        torch.manual_seed(0)
        record(tmp_path / name, fails=False, log_every=log_every)
    by_topic = differences(tmp_path / "often", tmp_path / "rarely")
    assert by_topic.keys() == {"plan", "configuration", "metrics"}
    (different,) = by_topic["metrics"].values()
    assert different["name"] == "not compared, because they are means over other steps"
    assert (different["first"], different["second"]) == ("steps 2 to 2", "steps 1 to 2")
    (different, other) = differences(runs[1], tmp_path / "rarely")["metrics"].values()
    assert "(epoch)" in other["name"]
    assert "weights" in str(differences(runs[1], tmp_path / "rarely")["checkpoints"])


def test_runs_without_a_common_checkpoint_say_so(runs: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints")
    assert differences(runs[0], copy)["checkpoints"].keys() == {"no step in common"}
