"""The scripts of examples/transformers: the losses of `transformers.Trainer` on the same model and data, and several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.transformers_scripts.cases import CASES
from campaigns.transformers_scripts.page import Row, distance, wrong
from campaigns.transformers_scripts.sides import EXAMPLES, by_fabricate, by_trainer


@pytest.fixture(scope="module", autouse=True)
def _environment() -> None:
    """Imported by the first `transformers.Trainer`: torchao sets a variable of the environment."""
    import transformers.trainer  # noqa: F401


@pytest.mark.parametrize("name", CASES)
def test_a_script_has_the_losses_and_metrics_of_transformers(name: str, tmp_path: Path) -> None:
    row = Row(name, by_fabricate(name, tmp_path), by_trainer(name, tmp_path), None)
    assert list(wrong(row)) == []
    if CASES[name].factor != 1:
        assert distance(row.ours, row.trainer) > 1e-3, "then transformers has mended it: take the reason off the page"


def test_the_same_command_line_trains_the_same_on_two_ranks_in_shards(tmp_path: Path) -> None:
    """--use_cpu, because Accelerate takes ranks on a CPU for single processes without it."""
    losses = {}
    for ranks, rows in ((1, 4), (2, 2)):
        options = ["--predict_with_generate", "--num_train_epochs", "1", "--train_sampling_strategy", "sequential"]
        options += ["--use_cpu", "--logging_steps", "1", "--learning_rate", "5e-3", "--max_target_length", "20"]
        options += ["--do_train", "--do_eval", "--output_dir", f"runs/{ranks}", "--save_strategy", "no"]
        options += ["--per_device_train_batch_size", str(rows)]
        launch = ["-m", "fabricate", "run", str(EXAMPLES / "run_summarization.py"), "--nproc", str(ranks)]
        launch += ["--strategy", "fsdp"] if ranks > 1 else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, *launch, "--", *options]
        process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert process.returncode == 0, process.stderr[-4000:]
        lines = [
            json.loads(line) for line in (tmp_path / "runs" / str(ranks) / "metrics.jsonl").read_text().splitlines()
        ]
        losses[ranks] = [line["metrics"]["loss"] for line in lines if line["stage"] == "train"]
        assert process.stdout.count("val_rougeL") == 1
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
