"""Distributions written by `fabricate plugins new`, built, installed and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from fabricate.cli.main import main
from fabricate.cli.plugin_template import KINDS

SCRIPT = """
import sys
import torch
from fabricate import Trainer, TrainModule
class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = Trainer(trackers=["new-tracker"], run_dir=sys.argv[1], max_steps=2, log_every=1, progress=False)
trainer.fit(Module(), torch.linspace(-1, 1, 64).reshape(16, 4), batch_size=4)
"""


def test_new_distributions_are_installed_found_and_run_on_two_ranks(tmp_path: Path) -> None:
    for kind in KINDS:
        invocation = CliRunner().invoke(
            main, ["plugins", "new", f"new-{kind}", "--kind", kind, "--into", str(tmp_path)]
        )
        assert invocation.exit_code == 0, invocation.output
    roots = [str(tmp_path / f"fabricate-new-{kind}") for kind in KINDS]
    site, script, run_dir = tmp_path / "site", tmp_path / "train.py", tmp_path / "run"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(site), *roots], check=True, cwd=tmp_path)
    script.write_text(SCRIPT)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def fabricate(*arguments: str) -> str:
        command = [sys.executable, "-m", "fabricate", *arguments]
        process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    chosen = ("--strategy", "new-strategy", "--precision", "new-precision", "--plugin", "new-callback:every=1")
    shown = fabricate("run", str(script), "--nproc", "2", *chosen, "--", str(run_dir))
    assert shown.count("new-callback: 2 updates, step 2") == 1
    plan = json.loads((run_dir / "plan.json").read_text())
    parts = {part["name"]: part["origin"] for part in plan["plugins"]}
    assert parts["strategy new-strategy"] == "fabricate-new-strategy 0.1.0"
    assert parts["precision new-precision"] == "fabricate-new-precision 0.1.0"
    assert parts["new-callback"] == "fabricate-new-callback 0.1.0"
    logged = (run_dir / "trackers" / "fabricate-new-tracker.jsonl").read_text().splitlines()
    assert [json.loads(line).get("step") for line in logged if '"lr"' in line] == [1, 2]
    tests = [sys.executable, "-m", "pytest", "-q", "-W", "error", "--import-mode=importlib", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [*tests, *roots], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout
    assert f"{len(KINDS)} passed" in process.stdout
