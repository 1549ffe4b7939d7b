"""`fabricate doctor`: its findings on this machine; a fault is named and gives exit code 1."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fabricate.model.host_memory import host_memory


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-m", "fabricate", "doctor", *options],
        env=os.environ | base | environment,
        capture_output=True,
        text=True,
        timeout=800,
    )


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The findings on this machine, with a configuration of Accelerate, by topic."""
    home = tmp_path_factory.mktemp("home")
    (home / "accelerate").mkdir()
    (home / "accelerate" / "default_config.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config: {fsdp_offload_params: true}\n"
    )
    process = run("--json", HF_HOME=str(home))
    assert process.returncode == 0, process.stdout + process.stderr
    return {finding["topic"]: finding for finding in json.loads(process.stdout)}


def test_versions_and_devices_are_those_of_this_machine(findings: dict[str, dict[str, str]]) -> None:
    for package in ("torch", "accelerate", "transformers"):
        assert findings[package] == {"topic": package, "state": "good", "text": importlib.metadata.version(package)}
    memory, where = host_memory()
    assert findings["host"]["text"].startswith(f"{len(os.sched_getaffinity(0))} cores, ")
    assert f"GiB of memory ({where})" in findings["host"]["text"]
    assert memory > 0
    assert findings["devices"]["state"] == "absent"


def test_precisions_are_tried_on_the_device(findings: dict[str, dict[str, str]]) -> None:
    for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
        assert findings[name]["state"] == "good"
        assert findings[name]["text"].startswith(f"computes in {dtype} on cpu, ")
    assert "times as fast as fp32" in findings["bf16"]["text"]
    assert findings["fp8"]["state"] == "absent"


def test_two_ranks_meet_and_sum(findings: dict[str, dict[str, str]]) -> None:
    assert findings["2 ranks, gloo"]["state"] == "good"
    assert findings["2 ranks, gloo"]["text"].startswith("summed 16 MiB in ")


def test_plugins_and_compiled_parts_are_listed(findings: dict[str, dict[str, str]]) -> None:
    assert "strategy:fsdp" in findings["plugin fabricate"]["text"]
    if "deepspeed" in findings and findings["deepspeed"]["state"] == "good":
        assert findings["deepspeed ops"]["text"].startswith("built with it: ")


def test_the_configuration_in_force_is_shown_as_it_is_understood(findings: dict[str, dict[str, str]]) -> None:
    text = findings["accelerate config"]["text"]
    assert "strategy fsdp:offload=cpu, precision bf16, processes 2; in force under `accelerate launch`" in text
    assert findings["launcher"]["text"].startswith("python, rank 0 of 1; asked for: nothing")


def test_doctor_names_what_is_broken_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("distributed_type: TPU\n")
    (tmp_path / "torchbroken-1.dist-info").mkdir()
    (tmp_path / "torchbroken-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchbroken\nVersion: 1\n"
    )
    (tmp_path / "torchbroken-1.dist-info" / "entry_points.txt").write_text("[fabricate]\nworn = worn_out\n")
    (tmp_path / "worn_out.py").write_text("raise ImportError('worn out')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = run("--cpu", HF_HOME=str(tmp_path), RANK="5", GLOO_SOCKET_IFNAME="nowhere0", PYTHONPATH=path)
    assert process.returncode == 1
    assert "broken: 2 ranks, gloo; plugin worn; launcher; accelerate config" in process.stderr
    lines = [line for line in process.stdout.splitlines() if line.startswith("BROKEN")]
    assert any("distributed_type TPU is not one of" in line for line in lines)
    assert any("worn out" in line for line in lines)
    assert any("Unable to find address for: nowhere0" in line for line in lines)
    assert "Traceback" not in process.stdout + process.stderr
