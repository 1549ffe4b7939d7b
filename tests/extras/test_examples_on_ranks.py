"""The first examples, on two ranks: `fabricate run EXAMPLE --nproc 2 --strategy NAME`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = [
    ("vision", "fsdp", ("--max-epochs", "3"), r"accuracy (\S+);", 0.9, 1.0),
    ("lora_classifier", "ddp", ("--max-epochs", "1"), r"accuracy (\S+);", 0.8, 1.0),
    ("qlora", "fsdp", ("--max-steps", "6"), r"validation loss (\S+);", 0.0, 6.92),  # from 6.93, the logarithm of 1024
    ("sft", "fsdp", ("--max-epochs", "1"), r"validation loss (\S+)", 0.0, 4.0),
    ("dpo", "fsdp", ("--max-steps", "6", "--reference", "adapters"), r"loss (\S+), margin", 0.0, 0.68),
    ("diffusion", "fsdp", ("--max-epochs", "5"), r"validation loss (\S+)", 0.0, 0.5),
]


@pytest.mark.parametrize(
    ("example", "strategy", "arguments", "pattern", "least", "most"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES]
)
def test_an_example_learns_on_two_ranks_and_leaves_its_model(
    example: str, strategy: str, arguments: tuple[str, ...], pattern: str, least: float, most: float, tmp_path: Path
) -> None:
    launcher = [sys.executable, "-m", "fabricate", "run", str(EXAMPLES / f"{example}.py"), "--nproc", "2"]
    command = [*launcher, "--strategy", strategy, "--", *arguments, "--run-dir", "here"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    assert f"2 ranks (cpu), {strategy}" in process.stdout
    (value,) = re.findall(rf"^(?!step \d+ +val).*\b{pattern}", process.stdout, flags=re.MULTILINE)  # of rank 0 alone
    assert least < float(value) < most
    assert list((tmp_path / "here" / "model").glob("*.safetensors"))
