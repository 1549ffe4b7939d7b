"""Runs public Lightning code from checkouts, unmodified, under Lightning and under fabricate, and writes the tables of docs/lightning.md.

    python -m campaigns.lightning --source CHECKOUT [--source CHECKOUT ...] [--out docs/lightning.md] [--cases GAN ...]

CHECKOUT: a clone of Lightning-AI/pytorch-lightning, Lightning-AI/tutorials, ashleve/lightning-hydra-template or pyg-team/pytorch_geometric,
or a folder with several. Data and pretrained models are made here; nothing is downloaded. The Python that runs this needs lightning,
pytorch-lightning, torchmetrics and tensorboard; torchvision and torch_geometric for the cases that use them. The exit code is 1 if a case
differs from Lightning by more than `TOLERANCE` or logs other names, or if a resumed fit is not bit-exact.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from campaigns.lightning import page, sources
from campaigns.lightning.cases import CASES, prepared

TOLERANCE = 1e-5
RESUMED = {"LightningLSTM": 7, "GAN": 7, "GLUETransformer, cola": 7, "MNISTLitModule": 11}
"""The cases that are killed, and the update after which they are killed."""


def child(options: argparse.Namespace) -> int:
    """The result of one case in a separate process, which prints it as the last line."""
    warnings.simplefilter("ignore")
    folder = Path(options.folder)
    try:
        setup = prepared(options.case, options.source, folder)
        from campaigns.lightning import runs

        if options.phase:
            runs.part(setup, options.by, options.phase, folder, RESUMED[options.case])
            return 0
        if options.outcome:
            result: dict[str, Any] = runs.outcome(folder)
        else:
            result = {**runs.compare(setup), "own": runs.as_it_is(setup)}
    except sources.Missing as exc:
        result = {"missing_package": str(exc)}
    except Exception as exc:
        from campaigns.lightning.runs import reason

        traceback.print_exc()
        result = {"refused": reason(exc)}
    print(json.dumps(result))
    return 0


def _in_child(case: str, checkouts: Sequence[Path], folder: Path, *more: str) -> Any:
    command = [sys.executable, "-m", "campaigns.lightning", "--case", case, "--folder", str(folder), *more]
    for checkout in checkouts:
        command += ["--source", str(checkout.absolute())]
    process = subprocess.run(command, capture_output=True, text=True)
    lines = process.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1]), process
    except (IndexError, json.JSONDecodeError):
        return None, process


def compared(case: str, checkouts: Sequence[Path]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result, process = _in_child(case, checkouts, Path(folder))
    if result is None or "refused" in result:
        print(process.stderr[-3000:], file=sys.stderr)
    return {"refused": "the process died"} if result is None else result


def resumed(case: str, checkouts: Sequence[Path], by: str) -> dict[str, Any]:
    """The comparison of a killed and resumed fit with an undisturbed one."""
    with tempfile.TemporaryDirectory() as folder:
        for phase in ("whole", "killed", "resumed"):
            _, process = _in_child(case, checkouts, Path(folder), "--by", by, "--phase", phase)
            if (process.returncode != 0) == (phase != "killed"):
                print(process.stdout[-1000:], process.stderr[-3000:], file=sys.stderr)
                return {"failed": f"{phase}: {(process.stderr or process.stdout).strip().splitlines()[-1]}"}
        result, _ = _in_child(case, checkouts, Path(folder), "--outcome")
    return dict(result)


def _wrong(result: Mapping[str, Any]) -> bool:
    """Whether a case differs from Lightning by more than `TOLERANCE`, or logs other names."""
    return bool(result.get("missing")) or any(
        result.get(what, 0.0) > TOLERANCE for what in ("losses", "weights", "metrics")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, action="append", required=True, metavar="CHECKOUT")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[c.name for c in CASES])
    for name in ("case", "folder", "phase", "by"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--outcome", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        return child(options)
    ran: dict[str, Any] = {}
    went_on: dict[str, Any] = {}

    def report(name: str, result: Any) -> None:
        print(name, json.dumps(result), flush=True)
        if options.out is not None:  # after each case, because the rest may be interrupted
            page.write(options.out, ran, went_on, RESUMED)

    for name in options.cases:
        ran[name] = compared(name, options.source)
        report(name, ran[name])
    for name in [name for name in RESUMED if "weights" in ran.get(name, {})]:
        went_on[name] = {by: resumed(name, options.source, by) for by in ("lightning", "fabricate")}
        report(name, went_on[name])
    wrong = any(map(_wrong, ran.values())) or any(case["fabricate"].get("differ", 1) > 0 for case in went_on.values())
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
