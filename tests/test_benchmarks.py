"""The benchmarks that no test measures with still run: on tiny sizes, as far as the machine goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import __main__ as suite
from benchmarks.gpu import LOOPS, SIZES

ROOT = Path(suite.__file__).parent.parent


def test_the_gpu_benchmark_trains_the_same_weights_as_the_loop_by_hand(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--size",
        "tiny",
        "--warm-up",
        "2",
        "--updates",
        "2",
        "--rounds",
        "2",
    ]
    command += ["--backend", "aot_eager", "--json", str(found)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # a rehearsal, whatever the machine has
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(found.read_text())
    assert results["device"] == "no GPU"
    assert list(results["loops"]) == list(LOOPS)
    for figures in results["loops"].values():
        assert len(figures["milliseconds"]) == 2
        assert min(figures["milliseconds"]) > 0
        assert figures["apart"] == 0
        assert figures["mfu"] is None
    assert "a rehearsal" in done.stdout


def test_the_floating_point_operations_of_an_update_are_those_of_its_matrix_products() -> None:
    size = SIZES["tiny"]
    model = size.build()
    model.set_attn_implementation("eager")  # the fused kernel of a CPU is not counted
    with FlopCounterMode(display=False) as counter:
        tokens = torch.zeros(size.rows, size.length, dtype=torch.int64)
        model(input_ids=tokens).logits.sum().backward()
    assert counter.get_total_flops() == size.flops()
