"""The exactness of a resume on a GPU: `fabricate verify-resume` in several precisions, then kill -9 at random times for the remaining time.

    python -m campaigns.gpu.resume --out figures             # 7 minutes
    python -m campaigns.gpu.resume --device cpu              # a rehearsal

Passes when every check with deterministic algorithms is exact, bit for bit, and every killed run ends with the weights of the undisturbed
one. Without deterministic algorithms two undisturbed runs are compared; their distance is a figure, not a verdict.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from campaigns.gpu import ROOT
from campaigns.gpu.measuring import Host, Report, arguments, device, last_error, started

SCRIPT = str(ROOT / "campaigns" / "gpu" / "resumable.py")
CHECKS: dict[str, list[str]] = {
    "fp32": ["--recipe", json.dumps({"precision": "fp32"})],
    "bf16, clip, accumulate 2": ["--recipe", json.dumps({"precision": "bf16", "clip": 0.5, "accumulation": 2})],
    "fp16": ["--recipe", json.dumps({"precision": "fp16"})],
    "bf16, dropout": ["--recipe", json.dumps({"precision": "bf16", "dropout": 0.1})],
    "bf16, stream with state": ["--stream", "--recipe", json.dumps({"precision": "bf16"})],
    "bf16, async": ["--save", "async", "--recipe", json.dumps({"precision": "bf16", "dropout": 0.1})],
    "bf16, compile": ["--recipe", json.dumps({"precision": "bf16", "compile": {}})],
}
REHEARSED = ("bf16, dropout",)
MOST_KILLS = 6
"""The updates of one run."""
KILLED = ["--save", "async", "--save-every", "3", "--recipe", json.dumps({"precision": "bf16", "dropout": 0.1})]


def verified(place: Host, extra: list[str]) -> dict[str, Any]:
    """The figures of one verify-resume."""
    with tempfile.TemporaryDirectory() as folder:
        run = [f"{folder}/run", "--device", place.kind, "--steps", "20", *extra]
        command = [
            sys.executable,
            "-m",
            "fabricate",
            "verify-resume",
            SCRIPT,
            "--at",
            "7",
            "--json",
            "--into",
            f"{folder}/kept",
        ]
        process = started([*command, "--", *run], 170)
    line = next((line for line in process.stdout.splitlines() if line.startswith("{")), "")
    if not line:
        return {"failed": [last_error(process)], "output": process.stdout[-4000:]}
    result = json.loads(line)
    first = result["differences"][:3]
    return {
        **result,
        "differences": first,
        "failed": [] if result["exact"] else [f"not exact, {result['when']}: {first}"],
    }


def trained(place: Host, run_dir: Path, *extra: str) -> dict[str, torch.Tensor]:
    """The weights of an undisturbed run."""
    process = started([sys.executable, SCRIPT, str(run_dir), "--device", place.kind, *extra], 120)
    if process.returncode:
        raise RuntimeError(last_error(process))
    return load_file(run_dir / "model" / "model.safetensors")


def loose(place: Host) -> dict[str, Any]:
    """The distance of the weights of two undisturbed runs without deterministic algorithms."""
    with tempfile.TemporaryDirectory() as folder:
        extra = ["--loose", "--recipe", json.dumps({"precision": "bf16"})]
        one, other = (trained(place, Path(folder, name), *extra) for name in ("one", "other"))
    return {"largest_difference": max(float((one[name] - other[name]).abs().max()) for name in one)}


def killed(place: Host, seconds: float) -> dict[str, Any]:
    """Kill a run at random times and resume it until it is finished; repeat as often as the time allows."""
    random.seed(0)
    extra = ["--steps", "300" if place.real else "40", *KILLED]
    runs, kills, failed, ends = 0, 0, list[str](), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder, "whole")
        usual = started_and_killed(place, undisturbed, extra, float("inf"))
        whole = load_file(undisturbed / "model" / "model.safetensors")
        while time.monotonic() + 60 < ends or not runs:
            run_dir = Path(folder, "run")
            for _ in range(MOST_KILLS if place.real else 1):
                if started_and_killed(place, run_dir, extra, random.uniform(0, usual / 2)):
                    break
                kills += 1
            else:
                started_and_killed(place, run_dir, extra, float("inf"))
            ended = load_file(run_dir / "model" / "model.safetensors")
            if not all(torch.equal(ended[name], whole[name]) for name in whole):
                failed.append(f"run {runs} ended with other weights")
            runs += 1
            shutil.rmtree(run_dir)
    failed += [] if kills else ["no run was killed before its end"]
    return {"runs": runs, "kills": kills, "training_seconds": usual, "failed": failed}


def started_and_killed(place: Host, run_dir: Path, extra: list[str], after: float) -> float:
    """Start the script, and kill it the given seconds after its first log line. Returns the seconds from that line to its end; 0 if it was
    killed."""
    lines, log, began = run_dir / "metrics.jsonl", run_dir.with_suffix(".log"), time.time()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, SCRIPT, str(run_dir), "--device", place.kind, *extra],
            cwd=ROOT,
            stdout=output,
            stderr=output,
        )
        try:
            while process.poll() is None and not (lines.exists() and lines.stat().st_mtime > began):
                time.sleep(0.02)
            first = time.monotonic()
            process.wait(min(after, 120.0))
        except subprocess.TimeoutExpired:
            if after > 120.0:
                raise
            return 0.0
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {log.read_text()[-1000:]}")
    return max(time.monotonic() - first, 0.01)


def main() -> int:
    """Run the checks; return the exit code."""
    options = arguments(__doc__, 420).parse_args()
    place = device(options)
    report = Report("resume", place, options)
    for name in CHECKS if place.real else REHEARSED:
        report.case(name, verified, place, CHECKS[name], takes=60)
    report.case("without deterministic algorithms", loose, place, takes=40)
    report.case("killed", killed, place, max(30.0, min(180.0, report.left() - 30)) if place.real else 1.0, takes=70)
    rows = []
    for name, figures in report.cases.items():
        keys = ("resumed_from", "runs", "kills", "largest_difference")
        text = ", ".join(f"{key.replace('_', ' ')} {figures[key]}" for key in keys if key in figures)
        rows.append([name, text, "" if figures.get("failed") else "yes"])
    return report.end(["case", "figures", "as it should be"], rows)


if __name__ == "__main__":
    sys.exit(main())
