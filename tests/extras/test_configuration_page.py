"""The scripts for Hydra and jsonargparse on docs/configuration.md run unchanged, with their command lines, on two ranks."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
BEFORE = """
import torch
from fabricate import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))

    def training_step(self, batch):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

rows = torch.arange(256.0).view(64, 4) / 256
"""


@pytest.mark.parametrize("parser", ["Hydra", "jsonargparse"])
def test_the_script_and_the_command_of_the_page_work_together(parser: str, tmp_path: Path) -> None:
    section = PAGE.partition(f"\n## {parser}\n")[2].partition("\n## ")[0]
    (script,) = re.findall(r"```python no-run\n(.*?)```", section, re.DOTALL)
    (tmp_path / "train.py").write_text(BEFORE + script)
    for file in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL):
        (tmp_path / "conf").mkdir()
        (tmp_path / "conf" / "run.yaml").write_text(file)
    (command,) = re.findall(r"`(fabricate run .*? --nproc 2 -- .*?)`", section)
    process = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"fabricate: Net, {4 * 64 + 64 + 64 + 1} parameters" in process.stdout
    assert "updates  20 of 16 rows (8 x 1 x 2)" in process.stdout
    assert "2 ranks (cpu)" in process.stdout
